"""Jobs that end, or are asked to, by somebody else's will: cancelled by a client, or overdue."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, select, update

from orchestrator import jobs as job_rules
from orchestrator.errors import JobEnded, JobNotFound
from orchestrator.jobs import OWNED, TERMINAL, Arrow, ErrorKind, Status
from orchestrator.store import audit, followers, ownership
from orchestrator.store.dialect import by_key, utc_now
from orchestrator.store.moves import Attempt
from orchestrator.store.schema import jobs

TOO_LATE = "its deadline passed before it could start"

OVERDUE = select(jobs.c.job_id, jobs.c.attempt, jobs.c.workflow_id).where(
    # Pending, said in a way that tempts nobody to search the whole backlog by status.
    jobs.c.expires_at <= utc_now(),
    jobs.c.queued.is_not(None),
)


def cancel(conn: Connection, job_id: str) -> Status:
    """Where the job stands after this: cancelled, or still owned by a worker that has been asked to stop it.

    Asking twice is no error. Raises JobNotFound, or JobEnded when it ended otherwise.
    """
    row = ownership.lock(conn, [job_id]).get(job_id)
    if row is None:
        raise JobNotFound(job_id)
    status = Status(row.status)
    if status is Status.PENDING:
        followers.end(conn, job_rules.CANCEL, [row])
        audit.record(conn, [_event(job_rules.CANCEL, row)])
        return Status.CANCELLED
    if status in TERMINAL and status is not Status.CANCELLED:
        raise JobEnded(job_id, status)
    if status in OWNED and row.cancelled_s is None:
        conn.execute(update(jobs).where(jobs.c.job_id == job_id).values(cancel_requested_at=utc_now()))
        asked = audit.Event("job.cancel_requested", job_id=job_id, attempt=row.attempt)
        audit.record(conn, [asked])
    return status


def to_stop(conn: Connection, worker_ids: Collection[str], job_ids: Collection[str]) -> list[tuple[str, int]]:
    """Which of the jobs that these workers hold were cancelled, with their attempts."""
    if not job_ids:
        return []
    rows = conn.execute(
        by_key(select(jobs.c.job_id, jobs.c.attempt), jobs).where(
            jobs.c.job_id.in_(sorted(job_ids)),
            jobs.c.worker_id.in_(sorted(worker_ids)),
            jobs.c.cancel_requested_at.is_not(None),
        )
    )
    return [(row.job_id, row.attempt) for row in rows]


def expire_overdue(conn: Connection, limit: int) -> int:
    """Pending → failed for jobs whose deadline passed in the queue; how many."""
    first = OVERDUE.order_by(jobs.c.expires_at).limit(limit)
    overdue = conn.execute(first.with_for_update(skip_locked=True)).all()
    expire(conn, overdue)
    return len(overdue)


def expire(conn: Connection, rows: Sequence[followers.Task]) -> None:
    """End these pending, overdue jobs; their rows are locked."""
    followers.end(conn, job_rules.EXPIRE, rows, error_kind=ErrorKind.DEADLINE, last_error=TOO_LATE)
    audit.record(conn, [_event(job_rules.EXPIRE, row) for row in rows])


def _event(arrow: Arrow, row: Attempt) -> audit.Event:
    assert arrow.event is not None
    return audit.Event(arrow.event, job_id=row.job_id, attempt=row.attempt)
