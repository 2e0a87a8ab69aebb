"""How this instance is: alive, ready, in detail, and in numbers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.responses import Response

from orchestrator import __version__
from orchestrator.api.backend import Api
from orchestrator.api.probes import Probe
from orchestrator.api.replies import Json
from orchestrator.errors import Unavailable
from orchestrator.telemetry import metrics

router = APIRouter(tags=["health"])

T = TypeVar("T")


@router.get("/livez")
async def livez() -> Json:
    """The process answers. Nothing else is asked: restarting us would not mend a database."""
    return Json({"status": "ok"})


@router.get("/readyz")
async def readyz(api: Api) -> Json:
    """Whether to send requests here. Submits need only the database; without Redis, jobs wait."""
    database_of, redis_of = _ask(api.probes.database), _ask(api.probes.redis)
    database, redis = await asyncio.gather(database_of, redis_of)
    if isinstance(database, Unavailable):
        return Json({"status": "unready", "reasons": [f"database: {database}"]}, 503)
    return Json({"status": "ready", "degraded": [f"redis: {redis}"] if isinstance(redis, Unavailable) else redis})


@router.get("/health")
async def health(api: Api) -> Json:
    """The same in detail, for people. Degraded: it works, and somebody should look.

    `stale_jobs` are owned by workers that are dead, or silent for `worker_timeout_s`: a leader takes them back within
    moments. Some thousand owned jobs are looked at. Null: unknown.
    """
    probes = api.probes
    term_of, redis_of = _ask(probes.database), _ask(probes.redis)
    pools_of, stale_of = _ask(probes.workers), _ask(probes.stale_jobs)
    term, redis, pools, stale = await asyncio.gather(term_of, redis_of, pools_of, stale_of)
    down = isinstance(term, Unavailable)
    fine = not isinstance(term, Unavailable) and term.alive and redis == [] and stale == 0
    body: dict[str, Any] = {
        "status": "down" if down else "ok" if fine else "degraded",
        "version": __version__,
        "instance": api.orchestrator.holder,
        "database": {"ok": not down} | _error(term),
        "redis": {"ok": not isinstance(redis, Unavailable)} | (_error(redis) or {"warnings": redis}),
        "workers": _error(pools) if isinstance(pools, Unavailable) else {"alive": sum(p.workers for p in pools)},
        "stale_jobs": None if isinstance(stale, Unavailable) else stale,
        "leader": _error(term) if isinstance(term, Unavailable) else asdict(term),
    }
    return Json(body, 503 if down else 200)


@router.get("/metrics")
async def prometheus(api: Api) -> Response:
    return Response(await api.gauges.exposition(), media_type=metrics.CONTENT_TYPE)


async def _ask(probe: Probe[T]) -> T | Unavailable:
    """The answer, or why there is none."""
    try:
        return await probe.answer()
    except Unavailable as away:
        return away


def _error(answer: object) -> dict[str, Any]:
    return {"error": answer.message} if isinstance(answer, Unavailable) else {}
