"""Who owns a job right now; `lock` before anything is decided about its attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from orchestrator.jobs import OWNED
from orchestrator.store.dialect import by_key, seconds_since, utc_now
from orchestrator.store.hot import Hot
from orchestrator.store.schema import jobs

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


def lock(conn: Connection, job_ids: Sequence[str]) -> dict[str, Row[Any]]:
    """The rows of these jobs, locked until the transaction ends; unknown ones are left out."""
    return {row.job_id: row for row in _OWNERSHIP.run(conn, job_ids)} if job_ids else {}
