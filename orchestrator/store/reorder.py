"""A job's place in its lane, changed while it waits."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, select, update

from orchestrator.errors import JobNotFound, JobNotWaiting
from orchestrator.jobs import Status
from orchestrator.ranking import moved
from orchestrator.store import audit
from orchestrator.store.dialect import by_key
from orchestrator.store.schema import jobs


class Reordered(NamedTuple):
    lane: str
    before: int
    after: int


def set_priority(conn: Connection, job_id: str, priority: int) -> Reordered:
    """Move a waiting job as if it had been submitted with this priority; nudge its lane after the commit.

    The same priority again changes nothing. One that is announced may start before those it now stands behind: its
    entry is on its way. Raises JobNotFound, or JobNotWaiting when it is owned or over.
    """
    found = select(jobs.c.status, jobs.c.lane, jobs.c.priority, jobs.c.rank, jobs.c.attempt)
    row = conn.execute(by_key(found, jobs).where(jobs.c.job_id == job_id).with_for_update()).one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    if row.status != Status.PENDING:
        raise JobNotWaiting(job_id, row.status)
    if row.priority != priority:
        there = moved(row.rank, row.priority, priority)
        conn.execute(update(jobs).where(jobs.c.job_id == job_id).values(priority=priority, rank=there))
        details = {"before": row.priority, "after": priority}
        changed = audit.Event("job.priority", job_id=job_id, attempt=row.attempt, details=details)
        audit.record(conn, [changed])
    return Reordered(row.lane, row.priority, priority)
