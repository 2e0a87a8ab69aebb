"""Who owns a job right now; `lock` before anything is decided about its attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, select

from orchestrator.jobs import OWNED, Status
from orchestrator.store.dialect import by_key, seconds_since, utc_now
from orchestrator.store.hot import Hot
from orchestrator.store.schema import jobs


class Ownership(NamedTuple):
    """Where a job stands, and all that decides about the end of an attempt."""

    job_id: str
    status: str
    attempt: int
    attempts: int
    max_attempts: int
    crashes: int
    redrives: int
    lane: str
    lease_token: str | None
    error_kind: str | None
    worker_id: str | None
    type: str
    retry_base_sec: float | None
    retry_cap_sec: float | None
    #: Seconds since somebody asked to cancel it.
    cancelled_s: float | None
    overdue: bool | None
    #: The capped keys that it counts for, as JSON.
    held_caps: str | None
    #: The workflow that it is a task of.
    workflow_id: str | None = None


_OWNERSHIP = Hot(
    lambda ids: by_key(
        select(
            jobs.c.job_id,
            jobs.c.status,
            jobs.c.attempt,
            jobs.c.attempts,
            jobs.c.max_attempts,
            jobs.c.crashes,
            jobs.c.redrives,
            jobs.c.lane,
            jobs.c.lease_token,
            jobs.c.error_kind,
            jobs.c.worker_id,
            jobs.c.type,
            jobs.c.retry_base_sec,
            jobs.c.retry_cap_sec,
            seconds_since(jobs.c.cancel_requested_at).label("cancelled_s"),
            (jobs.c.expires_at <= utc_now()).label("overdue"),
            jobs.c.held_caps,
            jobs.c.workflow_id,
        )
        .where(jobs.c.job_id.in_(ids))
        .with_for_update(),
        jobs,
    )
)


def owns(conn: Connection, job_id: str, attempt: int, worker_id: str) -> bool:
    """Whether this attempt owns its job and may still finish it."""
    found = conn.execute(
        select(jobs.c.job_id).where(
            jobs.c.job_id == job_id,
            jobs.c.attempt == attempt,
            jobs.c.worker_id == worker_id,
            jobs.c.status.in_(sorted(OWNED)),
            jobs.c.cancel_requested_at.is_(None),
        )
    )
    return found.one_or_none() is not None


def is_claimed_by(conn: Connection, job_id: str, worker_id: str) -> bool:
    """Whether this worker claimed it and has not said that it runs."""
    mine = (jobs.c.job_id == job_id, jobs.c.worker_id == worker_id, jobs.c.status == Status.CLAIMED)
    return conn.execute(select(jobs.c.job_id).where(*mine)).one_or_none() is not None


_UNHELD = Hot(
    lambda ids: by_key(
        select(jobs.c.job_id).where(jobs.c.job_id.in_(ids)).with_for_update(skip_locked=True),
        jobs,
    )
)


def lock_unheld(conn: Connection, job_ids: Sequence[str]) -> list[str]:
    """Those of these jobs whose rows nobody else holds, locked: nobody waits for the others."""
    return [job_id for (job_id,) in _UNHELD.rows(conn, job_ids)] if job_ids else []


def lock(conn: Connection, job_ids: Sequence[str]) -> dict[str, Ownership]:
    """The rows of these jobs, locked until the transaction ends; unknown ones are left out."""
    found = (Ownership(*row) for row in _OWNERSHIP.rows(conn, job_ids)) if job_ids else ()
    return {job.job_id: job for job in found}
