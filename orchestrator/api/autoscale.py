"""/autoscale/{pool_id}: what an autoscaler needs to know of one lane, as JSON for KEDA's metrics-api trigger."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from orchestrator.api.backend import Api
from orchestrator.api.ids import LaneName
from orchestrator.api.replies import Json
from orchestrator.scaling import LATELY_S, Load, desired_workers
from orchestrator.store import load

if TYPE_CHECKING:
    from sqlalchemy import Connection

router = APIRouter(tags=["autoscaling"])


@router.get("/autoscale/{pool_id}")
async def autoscale(api: Api, pool_id: LaneName) -> Json:
    """The lane's load and how many workers it should have; `default` is the lane of jobs without a pool.

    Read from the database, so that every instance says the same. When the database cannot say: 503, never a 0.
    """
    usual, policies = api.settings.worker_slots, api.orchestrator.policies

    def look(conn: Connection) -> Load:
        paused = policies.book(conn).closed(pool_id) is not None
        return replace(load.of_lane(conn, pool_id, usual), paused=paused)

    return Json({"pool_id": pool_id} | _shown(await api.read(look)))


def _shown(found: Load) -> dict[str, Any]:
    return {
        "depth": found.depth,
        "waiting": found.waiting,
        "running": found.running,
        "delayed": found.delayed,
        "blocked": found.blocked,
        "at_least": found.at_least,
        "oldest_wait_seconds": round(found.oldest_wait_s, 3),
        # A number for autoscalers, which take nothing else; `ended_lately` says what a 0 means.
        "mean_latency_seconds": round(found.mean_latency_s or 0.0, 3),
        "ended_lately": found.mean_latency_s is not None,
        "window_seconds": LATELY_S,
        "workers": found.workers,
        "busy_workers": found.busy_workers,
        "draining": found.draining,
        "slots_per_worker": round(found.slots, 3),
        "open": found.open,
        "paused": found.paused,
        "desired_workers": desired_workers(found),
    }
