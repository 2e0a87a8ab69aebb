"""Jobs that are offered to a worker: which of them may be claimed now, and how those wait on that are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, case, func, literal_column, or_, select

from orchestrator import jobs as job_rules
from orchestrator.jobs import DUE
from orchestrator.store.dialect import by_key, seconds_since, utc_now
from orchestrator.store.hot import Hot
from orchestrator.store.moves import by_attempt, move
from orchestrator.store.schema import jobs

#: A job that was announced and then unpublished may be claimed all the same: it waits, and somebody has time.
CLAIMABLE: list[ColumnElement[str]] = [literal_column(f"'{queued}'") for queued in DUE]

_ALONE_AFTER: list[ColumnElement[str]] = [literal_column(f"'{kind}'") for kind in sorted(job_rules.ALONE_AFTER)]
_ALONE = case(
    (or_(jobs.c.crashes > literal_column("0"), jobs.c.error_kind.in_(_ALONE_AFTER)), literal_column("1")),
    else_=literal_column("0"),
)

# What few jobs use travels as one column: the driver parses every column of every row in Python.
_OFFERED = Hot(
    lambda ids: by_key(
        select(
            jobs.c.job_id,
            jobs.c.type,
            jobs.c.payload,
            jobs.c.attempt,
            func.json_array(
                jobs.c.agent,
                jobs.c.model_id,
                jobs.c.max_runtime_sec,
                jobs.c.trace_context,
                jobs.c.min_memory_mb,
                jobs.c.gpu_count,
                jobs.c.cpu_fallback,
                seconds_since(jobs.c.created_at),
                jobs.c.rank,
                _ALONE,
                jobs.c.concurrency_keys,
                jobs.c.workflow_id,
                seconds_since(jobs.c.updated_at),
            ).label("options"),
        )
        .where(
            jobs.c.job_id.in_(ids),
            jobs.c.queued.in_(CLAIMABLE),
            or_(jobs.c.expires_at.is_(None), jobs.c.expires_at > utc_now()),
        )
        .with_for_update(),
        jobs,
    )
)


class Offered(NamedTuple):
    """A job that may be claimed now."""

    job_id: str
    type: str
    payload: str
    attempt: int
    agent: str
    model_id: str | None
    max_runtime_sec: float | None
    trace_context: str | None
    min_memory_mb: int | None
    gpu_count: int
    cpu_fallback: int
    age_s: float
    rank: int
    #: It brought a process down, or was there when one died: it shares a call with nobody.
    alone: int
    concurrency_keys: str | None
    workflow_id: str | None
    #: Seconds since it was moved last; None: it never was.
    moved_s: float | None


def offered(conn: Connection, job_ids: Sequence[str]) -> dict[str, Offered]:
    """Those of them that wait and are not overdue, locked."""
    if not job_ids:
        return {}
    rows = _OFFERED.rows(conn, job_ids)
    found = (Offered(*columns, *json.loads(options)) for *columns, options in rows)
    return {job.job_id: job for job in found}


def defer(conn: Connection, rows: Sequence[Offered], reason: str, delay_s: float) -> None:
    """Pending → pending, later: nobody's fault, no attempt charged; the reason is shown as `wait_reason`."""
    for attempt, ids in by_attempt(rows):
        move(conn, job_rules.DEFER, attempt, ids, wait_reason=reason[:255], delay_s=delay_s)
