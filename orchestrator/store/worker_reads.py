"""What people ask about workers: lists, what they did, what the dead left behind."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, func, or_, select

from orchestrator.batch_sizes import BatchSizes, from_text
from orchestrator.jobs import OWNED
from orchestrator.store import paging
from orchestrator.store.dialect import seconds_since, utc_shift, walking
from orchestrator.store.nodes import NO_NODE
from orchestrator.store.schema import ENDED_WORKERS, LIVE_WORKERS, WORKER_STATES, jobs, workers

#: Seconds for which workers that left are told of.
TOLD_S = 3600.0
#: Owned jobs that are looked at for those of the dead.
MOST_OWNED = 10_000


def page(conn: Connection, limit: int = 1000, cursor: str | None = None) -> tuple[list[dict[str, Any]], str | None]:
    """Workers that are alive or were within the last hour, the youngest first; and the cursor of the next page."""
    listed = select(workers, seconds_since(workers.c.last_heartbeat).label("heartbeat_age_seconds"))
    youngest = (
        walking(listed, workers, "ix_workers_liveness")
        .where(_shown(), *paging.after(cursor, workers.c.started_at, workers.c.worker_id))
        .order_by(workers.c.started_at.desc(), workers.c.worker_id.desc())
    )
    rows, following = paging.split(conn.execute(youngest.limit(limit + 1)).all(), limit, "started_at", "worker_id")
    return [_listed(row) for row in rows], following


def _listed(row: Row[Any]) -> dict[str, Any]:
    worker = row._asdict()
    sizes = from_text(worker.pop("batch_sizes"))
    return worker | {
        "types": json.loads(row.types),
        "node_id": None if row.node_id == NO_NODE else row.node_id,
        "load": round(row.busy / row.slots, 3) if row.slots else 0.0,
        "heartbeat_age_seconds": max(round(float(row.heartbeat_age_seconds), 3), 0.0),
        "batches": {type: of_type.summary() for type, of_type in sizes.items()},
    }


def ended_jobs(conn: Connection, pool_id: str) -> dict[str, tuple[int, int]]:
    """How many jobs each of these workers of a pool has done, and how many failed there."""
    counts = select(workers.c.worker_id, workers.c.jobs_done, workers.c.jobs_failed)
    rows = conn.execute(counts.where(workers.c.pool_id == pool_id, _shown()))
    return {worker_id: (done, failed) for worker_id, done, failed in rows}


def _shown() -> ColumnElement[bool]:
    """By status in any case: so an index leads to them, past all that ended in the last days."""
    return or_(workers.c.status.in_(LIVE_WORKERS), and_(workers.c.status.in_(ENDED_WORKERS), _lately()))


def _lately() -> ColumnElement[bool]:
    return workers.c.last_heartbeat > utc_shift(-TOLD_S)


def batch_sizes(conn: Connection) -> dict[str, BatchSizes]:
    """What workers told of their batches, by worker, those that left within the last hour included."""
    told = walking(select(workers.c.worker_id, workers.c.batch_sizes), workers, "ix_workers_liveness")
    rows = conn.execute(told.where(workers.c.status.in_(WORKER_STATES), _lately(), workers.c.batch_sizes.is_not(None)))
    return {row.worker_id: from_text(row.batch_sizes) for row in rows}


def stale_jobs(conn: Connection, timeout_s: float, most: int = MOST_OWNED) -> int:
    """Jobs whose owner is dead, be it declared so or only silent for so long, among `most` that are owned."""
    some = select(jobs.c.worker_id).where(jobs.c.status.in_(sorted(OWNED))).limit(most)
    owned = walking(some, jobs, "ix_jobs_status").subquery()
    dead = or_(
        workers.c.worker_id.is_(None),
        workers.c.status.not_in(LIVE_WORKERS),
        workers.c.last_heartbeat <= utc_shift(-timeout_s),
    )
    theirs = owned.outerjoin(workers, workers.c.worker_id == owned.c.worker_id)
    return int(conn.execute(select(func.count()).select_from(theirs).where(dead)).scalar_one())
