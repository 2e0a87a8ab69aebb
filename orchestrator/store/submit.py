"""Accepting jobs: a job is accepted when its row and its audit row are committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from orchestrator.errors import DatabaseUnavailable
from orchestrator.jobs import NewJob, Queued, RetryPolicy
from orchestrator.ranking import rank
from orchestrator.store import audit
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_now
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import jobs, lanes

#: Runs of a batch that keeps meeting ids which others insert at the same moment.
MAX_RUNS = 10


class Verdict(Enum):
    """What became of a submitted job."""

    CREATED = "created"
    EXISTS = "exists"
    CONFLICT = "conflict"


def submit_jobs(db: Database, batch: Sequence[NewJob], policy: RetryPolicy, actor: str | None = None) -> list[Verdict]:
    """Store new jobs in one transaction; a verdict for each, in order.

    A job_id that another process inserts at the same moment breaks the statement, not the promise: the batch
    runs again and then finds that row.
    """
    # Ids of our own making are new, unless a commit whose answer was lost has stored them: then they are met again.
    lookup = [job.job_id for job in batch if not job.generated_id]
    for _ in range(MAX_RUNS):
        try:
            return db.write(lambda conn: _submit(conn, batch, lookup, policy, actor))  # noqa: B023 - runs at once
        except IntegrityError:
            lookup = [job.job_id for job in batch]
    raise DatabaseUnavailable(f"submit met ids that others inserted at the same moment, {MAX_RUNS} times in a row")


def _submit(
    conn: Connection, batch: Sequence[NewJob], lookup: list[str], policy: RetryPolicy, actor: str | None
) -> list[Verdict]:
    known = _known_hashes(conn, lookup)
    verdicts, fresh = [], []
    for job in batch:
        if job.job_id not in known:
            known[job.job_id] = job.content_hash
            fresh.append(job)
            verdicts.append(Verdict.CREATED)
        else:
            verdicts.append(Verdict.EXISTS if known[job.job_id] == job.content_hash else Verdict.CONFLICT)
    if fresh:
        _insert_jobs(conn, fresh, policy, actor)
    return verdicts


def _known_hashes(conn: Connection, job_ids: list[str]) -> dict[str, str]:
    if not job_ids:
        return {}
    rows = conn.execute(select(jobs.c.job_id, jobs.c.payload_hash).where(jobs.c.job_id.in_(job_ids)))
    return {row.job_id: row.payload_hash for row in rows}


def _insert_jobs(conn: Connection, fresh: list[NewJob], policy: RetryPolicy, actor: str | None) -> None:
    now = conn.execute(select(utc_now())).scalar_one()
    rows = [_job_row(job, now, position, policy) for position, job in enumerate(fresh)]
    _remember_lanes(conn, {row["lane"] for row in rows})
    # In key order: two batches that share ids then wait for each other instead of deadlocking.
    insert_rows(conn, jobs, sorted(rows, key=lambda row: str(row["job_id"])), _JOB_DEFAULTS, bulky="payload")
    audit.record(
        conn,
        [
            audit.Event("job.submitted", job_id=job.job_id, pool_id=job.spec.pool_id, actor=actor or job.spec.agent)
            for job in fresh
        ],
    )


#: What the schema fills in by itself.
_JOB_DEFAULTS = {"priority": 0, "gpu_count": 1, "cpu_fallback": False, "queued": Queued.READY}


def _job_row(job: NewJob, now: datetime, position: int, policy: RetryPolicy) -> dict[str, Any]:
    spec = job.spec
    later = job.not_before is not None and job.not_before > now
    return {
        "job_id": job.job_id,
        "type": spec.type,
        "payload": job.payload,
        "payload_hash": job.content_hash,
        "agent": spec.agent,
        "lane": spec.pool_id,
        "model_id": spec.model_id,
        "priority": spec.priority,
        "rank": rank(now, spec.priority, position),
        "min_memory_mb": spec.min_memory_mb,
        "gpu_count": spec.gpu_count,
        "cpu_fallback": spec.cpu_fallback,
        "expected_duration_sec": spec.expected_duration_sec,
        "max_runtime_sec": spec.max_runtime_sec,
        "max_attempts": spec.max_attempts or policy.for_job(spec.type).max_attempts,
        "retry_base_sec": spec.retry_base_sec,
        "retry_cap_sec": spec.retry_cap_sec,
        "deadline_at": job.deadline,
        "expires_at": job.deadline,
        "tags": json.dumps(spec.tags) if spec.tags else None,
        "trace_context": job.trace_context,
        "queued": Queued.DELAYED if later else Queued.READY,
        "not_before": job.not_before if later else None,
    }


def _remember_lanes(conn: Connection, names: set[str]) -> None:
    known = set(conn.execute(select(lanes.c.lane).where(lanes.c.lane.in_(names))).scalars())
    if new := names - known:
        insert_rows(conn, lanes, [{"lane": name} for name in sorted(new)])
