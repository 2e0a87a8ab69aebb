"""Which jobs go into a stream next: the row decides, the stream entry only announces it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, func, select, update

from orchestrator.jobs import Queued, Ready
from orchestrator.store import pools
from orchestrator.store.dialect import utc_now, utc_shift
from orchestrator.store.hot import Hot
from orchestrator.store.schema import jobs, lanes, workers

_READY = (
    select(jobs.c.job_id, jobs.c.type, jobs.c.trace_context)
    .where(jobs.c.lane == bindparam("of_lane"), jobs.c.queued == Queued.READY)
    .order_by(jobs.c.rank)
    .limit(bindparam("most"))
    .with_for_update(skip_locked=True)
)
_ANNOUNCE = Hot(
    lambda ids: (
        update(jobs)
        .where(jobs.c.job_id.in_(ids), jobs.c.queued == Queued.READY)
        .values(queued=Queued.ANNOUNCED, published_at=utc_now())
    )
)


def take(conn: Connection, lane: str, limit: int) -> list[Ready]:
    """Ready → announced for the next `limit` jobs of a lane, in order of rank. Two takers never get the same job."""
    ready = [Ready(*row) for row in conn.execute(_READY, {"of_lane": lane, "most": limit})]
    if ready:
        _ANNOUNCE.run(conn, [job.job_id for job in ready])
    return ready


def promote_due(conn: Connection, limit: int) -> int:
    """Delayed → ready for jobs whose time has come."""
    due = conn.execute(
        select(jobs.c.job_id)
        .where(jobs.c.not_before <= utc_now(), jobs.c.queued == Queued.DELAYED)
        .order_by(jobs.c.not_before)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).scalars()
    ids = list(due)
    if ids:
        conn.execute(
            update(jobs)
            .where(jobs.c.job_id.in_(ids), jobs.c.queued == Queued.DELAYED)
            .values(queued=Queued.READY, not_before=None)
        )
    return len(ids)


def announced(conn: Connection, lane: str, older_than_s: float, limit: int) -> list[str]:
    """Jobs of a lane that were announced a while ago and nobody has claimed: their entries should exist."""
    rows = conn.execute(
        select(jobs.c.job_id)
        .where(
            jobs.c.lane == lane,
            jobs.c.queued == Queued.ANNOUNCED,
            jobs.c.published_at <= utc_shift(-older_than_s),
        )
        .order_by(jobs.c.rank)
        .limit(limit)
    )
    return list(rows.scalars())


def unpublish(conn: Connection, job_ids: Sequence[str], older_than_s: float = 0.0) -> int:
    """Announced → ready, unless somebody announced them anew or claimed them meanwhile."""
    if not job_ids:
        return 0
    return conn.execute(
        update(jobs)
        .where(
            jobs.c.job_id.in_(job_ids),
            jobs.c.queued == Queued.ANNOUNCED,
            jobs.c.published_at <= utc_shift(-older_than_s),
        )
        .values(queued=Queued.READY, published_at=None)
    ).rowcount


def known_lanes(conn: Connection) -> list[str]:
    return list(conn.execute(select(lanes.c.lane).order_by(lanes.c.lane)).scalars())


def live_slots(conn: Connection, lane: str) -> int | None:
    """Slots of the workers that read this lane, HTTP workers do not; None when its pool takes no jobs."""
    if not pools.takes_jobs(conn, lane):
        return None
    total = conn.execute(
        select(func.sum(workers.c.slots)).where(
            workers.c.pool_id == lane, workers.c.status == "active", workers.c.kind == "process"
        )
    ).scalar()
    return int(total or 0)
