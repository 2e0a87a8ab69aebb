"""The life of a job in the database: submit, then one arrow after the other.

Every change of status goes through `_move`: one UPDATE guarded by the states the arrow may leave and by the
attempt that claims to own the job. Its audit row is written in the same transaction by the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Float, Row, Update, bindparam, case, func, literal_column, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator import jobs as job_rules
from orchestrator.errors import DatabaseUnavailable
from orchestrator.jobs import Arrow, ErrorKind, NewJob, Queued, RetryPolicy, Status
from orchestrator.leases import Denied, Granted, LeaseRequest
from orchestrator.ranking import rank
from orchestrator.store import audit, leases
from orchestrator.store.database import Database
from orchestrator.store.dialect import by_key, utc_now, utc_shift
from orchestrator.store.hot import Hot, Listed, insert_rows
from orchestrator.store.schema import jobs, lanes, results

#: Seconds until a job whose type this worker does not know is offered again.
NO_HANDLER_S = 5.0
#: Characters of an error that are kept.
MAX_ERROR = 4000


class Verdict(Enum):
    """What became of a submitted job."""

    CREATED = "created"
    EXISTS = "exists"
    CONFLICT = "conflict"


# ── submit ──────────────────────────────────────────────────────────────────────────────────────────────────────


def submit(
    db: Database, batch: Sequence[NewJob], default_max_attempts: int, actor: str | None = None
) -> list[Verdict]:
    """Store new jobs in one transaction; a verdict for each, in order.

    A job_id that another process inserts at the same moment breaks the statement, not the promise: the batch
    runs again and then finds that row.
    """
    for _ in range(10):
        try:
            return db.write(lambda conn: _submit(conn, batch, default_max_attempts, actor))
        except IntegrityError as duplicate:
            last = duplicate
    message = f"submit met duplicate keys ten times in a row: {last.orig}"
    raise DatabaseUnavailable(message)


def _submit(
    conn: Connection, batch: Sequence[NewJob], default_max_attempts: int, actor: str | None
) -> list[Verdict]:
    known = _known_hashes(conn, [job.job_id for job in batch if not job.generated_id])
    verdicts, fresh = [], []
    for job in batch:
        if job.job_id not in known:
            known[job.job_id] = job.content_hash
            fresh.append(job)
            verdicts.append(Verdict.CREATED)
        else:
            verdicts.append(Verdict.EXISTS if known[job.job_id] == job.content_hash else Verdict.CONFLICT)
    if fresh:
        _insert_jobs(conn, fresh, default_max_attempts, actor)
    return verdicts


def _known_hashes(conn: Connection, job_ids: list[str]) -> dict[str, str]:
    if not job_ids:
        return {}
    rows = conn.execute(select(jobs.c.job_id, jobs.c.payload_hash).where(jobs.c.job_id.in_(job_ids)))
    return {row.job_id: row.payload_hash for row in rows}


def _insert_jobs(conn: Connection, fresh: list[NewJob], default_max_attempts: int, actor: str | None) -> None:
    now = conn.execute(select(utc_now())).scalar_one()
    rows = [_job_row(job, now, position, default_max_attempts) for position, job in enumerate(fresh)]
    _remember_lanes(conn, {row["lane"] for row in rows})
    # In key order: two batches that share ids then wait for each other instead of deadlocking.
    insert_rows(conn, jobs, sorted(rows, key=lambda row: str(row["job_id"])), _JOB_DEFAULTS)
    audit.record(
        conn,
        [
            audit.Event(
                "job.submitted", job_id=job.job_id, pool_id=job.spec.pool_id, actor=actor or job.spec.agent
            )
            for job in fresh
        ],
    )


#: What the schema fills in by itself.
_JOB_DEFAULTS = {"priority": 0, "gpu_count": 1, "cpu_fallback": False, "queued": Queued.READY}


def _job_row(job: NewJob, now: datetime, position: int, default_max_attempts: int) -> dict[str, Any]:
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
        "max_attempts": spec.max_attempts or default_max_attempts,
        "tags": json.dumps(spec.tags) if spec.tags else None,
        "trace_context": job.trace_context,
        "queued": Queued.DELAYED if later else Queued.READY,
        "not_before": job.not_before if later else None,
    }


def _remember_lanes(conn: Connection, names: set[str]) -> None:
    known = set(conn.execute(select(lanes.c.lane).where(lanes.c.lane.in_(names))).scalars())
    if new := names - known:
        insert_rows(conn, lanes, [{"lane": name} for name in sorted(new)])


# ── the one way to change a status ──────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _move_statement(arrow: Arrow, columns: tuple[str, ...]) -> Hot:
    sources = [literal_column(f"'{status}'") for status in sorted(arrow.source)]
    values = (
        {"status": arrow.target, "updated_at": utc_now()}
        | {column: bindparam(f"set_{column}") for column in columns}
        | _CONSEQUENCES.get(arrow, {})
    )
    return Hot(
        lambda ids: (
            by_key(update(jobs))
            .where(
                jobs.c.job_id.in_(ids),
                jobs.c.status.in_(sources),
                jobs.c.attempt == bindparam("owned_attempt"),
            )
            .values(values)
        )
    )


#: Columns that always change with an arrow, beside the status.
_UNOWNED = {
    "worker_id": None,
    "lease_token": None,
    "published_at": None,
    "progress": None,
    "progress_note": None,
}
_ENDED = {"finished_at": utc_now(), "lease_token": None}
_LATER = bindparam("delay_s", type_=Float) > 0
_DUE = {
    "queued": case((_LATER, Queued.DELAYED), else_=Queued.READY),
    "not_before": case((_LATER, utc_shift(bindparam("delay_s", type_=Float))), else_=None),
}
_CONSEQUENCES: dict[Arrow, dict[str, Any]] = {
    job_rules.CLAIM: {
        "attempt": jobs.c.attempt + 1,
        "attempts": jobs.c.attempts + 1,
        "queued": None,
        "claimed_at": utc_now(),
        "started_at": None,
        "wait_reason": None,
    },
    job_rules.START: {"started_at": utc_now()},
    job_rules.FINISH: _ENDED,
    job_rules.SKIP: _ENDED,
    job_rules.FAIL: _ENDED,
    job_rules.BURY: _ENDED,
    job_rules.RETRY: _UNOWNED | _DUE,
    job_rules.HAND_BACK: _UNOWNED | {"attempts": jobs.c.attempts - 1, "queued": Queued.READY},
    job_rules.DEFER: {"published_at": None} | _DUE,
}


def _move(conn: Connection, arrow: Arrow, attempt: int, job_ids: Sequence[str], **values: Any) -> int:
    """Move jobs along one arrow while they are where it starts and `attempt` is still theirs; how many moved.

    `delay_s` is no column: it says when the job is due again.
    """
    delay = {"delay_s": values.pop("delay_s")} if "delay_s" in values else {}
    statement = _move_statement(arrow, tuple(sorted(values)))
    given = {f"set_{column}": value for column, value in values.items()}
    return statement.run(conn, job_ids, owned_attempt=attempt, **given, **delay).rowcount


def _by_attempt(rows: Sequence[Row[Any] | _Offered | End]) -> list[tuple[int, list[str]]]:
    ordered = sorted(rows, key=lambda row: int(row.attempt))
    return [
        (attempt, [row.job_id for row in group])
        for attempt, group in groupby(ordered, lambda row: row.attempt)
    ]


# ── claim ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Claimant:
    """The worker that claims, and the terms on which it takes leases."""

    worker_id: str
    node_id: str
    pool_id: str
    lease_ttl_s: float
    gpu_stale_s: float


@dataclass(frozen=True)
class Claim:
    """A job that is ours under `attempt`."""

    job_id: str
    attempt: int
    type: str
    payload: str
    agent: str
    model_id: str | None
    max_runtime_sec: float | None
    trace_context: str | None
    lease: Granted | None


@dataclass(frozen=True)
class NotClaimed:
    """Why an entry led to no claim. `exists` is False when no row stands behind it."""

    reason: str
    exists: bool = True


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
            ).label("options"),
        )
        .where(jobs.c.job_id.in_(ids), jobs.c.queued.in_(_CLAIMABLE))
        .with_for_update()
    )
)
#: A job that was announced and then unpublished may be claimed all the same: it waits, and somebody has time.
_CLAIMABLE = [literal_column(f"'{queued}'") for queued in (Queued.READY, Queued.ANNOUNCED)]


@dataclass(frozen=True)
class _Offered:
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


def _offered(conn: Connection, job_ids: Sequence[str]) -> dict[str, _Offered]:
    if not job_ids:
        return {}
    rows = _OFFERED.run(conn, job_ids)
    return {row[0]: _Offered(*row[:4], *json.loads(row[4])) for row in rows}


def claim(
    conn: Connection,
    by: Claimant,
    job_ids: Sequence[str],
    memory_for: Callable[[str], int | None],
    held: Collection[str] = (),
) -> dict[str, Claim | NotClaimed]:
    """Pending → claimed for every offered job that is free, with its GPU lease, in the caller's transaction.

    `memory_for(type)` is the handler's default need in MB; None when this worker has no such handler. `held` are
    jobs this worker runs already.
    """
    job_ids = list(dict.fromkeys(job_ids))  # a job announced again may be delivered twice in one read
    offered = _offered(conn, job_ids)
    answers: dict[str, Claim | NotClaimed] = {}
    if others := [job_id for job_id in job_ids if job_id not in offered]:
        answers |= _why_not(conn, by, others, held)
        offered |= _offered(conn, [job_id for job_id in others if job_id not in answers])
    for job in offered.values():
        if memory_for(job.type) is None:
            _defer(conn, job, f"no handler for type {job.type!r} on worker {by.worker_id}", NO_HANDLER_S)
            answers[job.job_id] = NotClaimed("no_handler")
    free = [job for job in offered.values() if job.job_id not in answers]
    granted = _lease_all(conn, by, free, memory_for)
    for job in free:
        lease = granted.get(job.job_id)
        if isinstance(lease, Denied):
            _defer(conn, job, lease.reason, lease.retry_after_s)
            answers[job.job_id] = NotClaimed(lease.reason)
    _take_ownership(conn, by, [job for job in free if job.job_id not in answers], granted, answers)
    return answers


def _why_not(
    conn: Connection, by: Claimant, job_ids: Sequence[str], held: Collection[str]
) -> dict[str, Claim | NotClaimed]:
    """Why these jobs are not free. Strays are handed back, which frees them: they get no answer here."""
    rows = {row.job_id: row for row in _OWNERSHIP.run(conn, job_ids)}
    strays = [row for row in rows.values() if _is_stray(row, by, held)]
    if strays:
        _hand_back_strays(conn, by, strays)
    freed = {row.job_id for row in strays}
    return {
        job_id: NotClaimed(f"already {rows[job_id].status}")
        if job_id in rows
        else NotClaimed("unknown_job", exists=False)
        for job_id in job_ids
        if job_id not in freed
    }


def _is_stray(row: Row[Any], by: Claimant, held: Collection[str]) -> bool:
    """Claimed by this very worker, which does not know of it: the answer to that commit got lost."""
    return row.status == Status.CLAIMED and row.worker_id == by.worker_id and row.job_id not in held


def _hand_back_strays(conn: Connection, by: Claimant, strays: Sequence[Row[Any]]) -> None:
    lost = "the answer to its claim was lost"
    ends = [End(row.job_id, row.attempt, Outcome.HANDED_BACK, error=lost) for row in strays]
    record(conn, by, [], ends, RetryPolicy(0, 0, 0))


def _lease_all(
    conn: Connection, by: Claimant, rows: Sequence[_Offered], memory_for: Callable[[str], int | None]
) -> dict[str, Granted | Denied]:
    """Leases for those that need GPU memory; a job that needs none runs without."""
    requests = []
    for row in rows:
        memory = row.min_memory_mb if row.min_memory_mb is not None else memory_for(row.type)
        if memory:
            requests.append(
                LeaseRequest(
                    agent=row.agent,
                    memory_mb=memory,
                    ttl_s=by.lease_ttl_s,
                    gpu_count=row.gpu_count,
                    cpu_fallback=bool(row.cpu_fallback),
                    node_id=by.node_id,
                    job_id=row.job_id,
                    worker_id=by.worker_id,
                )
            )
    if not requests:
        return {}
    answers = leases.grant(conn, requests, by.gpu_stale_s, by.node_id)
    return {str(request.job_id): answer for request, answer in zip(requests, answers, strict=True)}


def _take_ownership(
    conn: Connection,
    by: Claimant,
    rows: Sequence[_Offered],
    granted: Mapping[str, Granted | Denied],
    answers: dict[str, Claim | NotClaimed],
) -> None:
    for attempt, ids in _by_attempt(rows):
        moved = _move(conn, job_rules.CLAIM, attempt, ids, worker_id=by.worker_id, owner_pool=by.pool_id)
        assert moved == len(ids), "rows are locked, nobody else can have moved them"
    events = []
    for row in rows:
        lease = granted.get(row.job_id)
        own = lease if isinstance(lease, Granted) else None
        claimed = _claim_of(row, row.attempt + 1, own)
        answers[row.job_id] = claimed
        events.append(_event(job_rules.CLAIM, claimed.job_id, claimed.attempt, by, _lease_details(own)))
    _write_lease_tokens(
        conn, {c.job_id: c.lease.key for c in answers.values() if isinstance(c, Claim) and c.lease}
    )
    audit.record(conn, events)


def _claim_of(row: _Offered, attempt: int, lease: Granted | None) -> Claim:
    return Claim(
        row.job_id,
        attempt,
        row.type,
        row.payload,
        row.agent,
        row.model_id,
        row.max_runtime_sec,
        row.trace_context,
        lease,
    )


def _lease_details(lease: Granted | None) -> dict[str, Any] | None:
    if lease is None:
        return None
    return {
        "mode": lease.mode,
        "memory_mb": lease.request.memory_mb,
        "gpus": [gpu.gpu_uuid for gpu in lease.gpus],
    }


def _event(
    arrow: Arrow, job_id: str, attempt: int, by: Claimant, details: dict[str, Any] | None
) -> audit.Event:
    return audit.Event(
        arrow.event,
        job_id=job_id,
        attempt=attempt,
        worker_id=by.worker_id,
        pool_id=by.pool_id,
        details=details,
    )


def _set_lease_tokens(ids: Listed) -> Update:
    chosen = case(*[(jobs.c.job_id == job_id, bindparam(f"key_{i}")) for i, job_id in enumerate(ids)])
    return update(jobs).where(jobs.c.job_id.in_(ids)).values(lease_token=chosen)


def _write_lease_tokens(conn: Connection, keys: Mapping[str, str]) -> None:
    if keys:
        parameters = {f"key_{i}": key for i, key in enumerate(keys.values())}
        statement = _set_lease_tokens([bindparam(f"id_{i}") for i in range(len(keys))])
        conn.execute(statement, parameters | {f"id_{i}": job_id for i, job_id in enumerate(keys)})


def _defer(conn: Connection, row: _Offered, reason: str, delay_s: float) -> None:
    """Pending → pending, later: nobody's fault, no attempt charged; the reason is what `explain` shows."""
    _move(conn, job_rules.DEFER, row.attempt, [row.job_id], wait_reason=reason[:255], delay_s=delay_s)


# ── start and end ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Start:
    """The handler of this attempt is running."""

    job_id: str
    attempt: int


class Outcome(Enum):
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    HANDED_BACK = "handed_back"


@dataclass(frozen=True)
class End:
    """How an attempt ended, as its worker saw it."""

    job_id: str
    attempt: int
    outcome: Outcome
    run_seconds: float = 0.0
    result: str | None = None
    error_kind: ErrorKind | None = None
    error: str | None = None
    retry_after_s: float | None = None
    lease_key: str | None = None


@dataclass(frozen=True)
class Settled:
    """What an End led to: the arrow taken, or None when the attempt no longer owned the job."""

    end: End
    arrow: Arrow | None


_OWNERSHIP = Hot(
    lambda ids: by_key(
        select(
            jobs.c.job_id,
            jobs.c.status,
            jobs.c.attempt,
            jobs.c.attempts,
            jobs.c.max_attempts,
            jobs.c.crashes,
            jobs.c.lease_token,
            jobs.c.error_kind,
            jobs.c.worker_id,
        )
        .where(jobs.c.job_id.in_(ids))
        .with_for_update()
    )
)


class NotAllOwned(Exception):
    """Some of these attempts lost their jobs; the caller rolls back and uses `record`."""


def all_done(ends: Sequence[End]) -> bool:
    return all(end.outcome is Outcome.DONE for end in ends)


def finish_all(conn: Connection, by: Claimant, ends: Sequence[End]) -> list[Settled]:
    """Owned → done for all of them, or NotAllOwned: the guarded UPDATE is the check, no row is read before it."""
    if ends:
        events = _finish(conn, by, ends)
        leases.free(conn, [end.lease_key for end in ends if end.lease_key])
        audit.record(conn, events)
    return [Settled(end, job_rules.FINISH) for end in ends]


def record(
    conn: Connection, by: Claimant, starts: Sequence[Start], ends: Sequence[End], policy: RetryPolicy
) -> list[Settled]:
    """Write what a worker's attempts did: claimed → running, and owned → any ending or back to pending.

    An attempt that no longer owns its job changes nothing; that is a normal outcome, not an error.
    """
    ids = [event.job_id for event in (*starts, *ends)]
    if not ids:
        return []
    rows = {row.job_id: row for row in _OWNERSHIP.run(conn, ids)}
    _start(conn, by, [rows[start.job_id] for start in starts if _owns(rows, start, {Status.CLAIMED})])
    settled = []
    events: list[audit.Event] = []
    finished: list[End] = []
    for end in ends:
        row = rows.get(end.job_id)
        if row is not None and (first := _already(row, end)):
            settled.append(Settled(end, first))  # our own commit, whose answer was lost
        elif row is None or not _owns(rows, end, job_rules.OWNED):
            settled.append(Settled(end, None))
        elif end.outcome is Outcome.DONE:
            finished.append(end)
            settled.append(Settled(end, job_rules.FINISH))
        else:
            settled.append(Settled(end, _end_otherwise(conn, by, row, end, policy, events)))
    events += _finish(conn, by, finished)
    leases.free(
        conn, [rows[s.end.job_id].lease_token for s in settled if s.arrow and rows[s.end.job_id].lease_token]
    )
    audit.record(conn, events)
    return settled


_ENDED_BY = {
    (Outcome.DONE, Status.DONE): job_rules.FINISH,
    (Outcome.SKIPPED, Status.SKIPPED): job_rules.SKIP,
    (Outcome.FAILED, Status.FAILED): job_rules.FAIL,
    (Outcome.FAILED, Status.DEAD_LETTER): job_rules.BURY,
}


def _already(row: Row[Any], end: End) -> Arrow | None:
    """The arrow that this very end took before; the kind of error tells a worker's end from the leader's."""
    if row.attempt != end.attempt or (end.outcome is Outcome.FAILED and row.error_kind != end.error_kind):
        return None
    return _ENDED_BY.get((end.outcome, row.status))


def _owns(rows: Mapping[str, Row[Any]], event: Start | End, states: Collection[Status]) -> bool:
    row = rows.get(event.job_id)
    return row is not None and row.attempt == event.attempt and row.status in states


def _start(conn: Connection, by: Claimant, rows: Sequence[Row[Any]]) -> None:
    for attempt, ids in _by_attempt(rows):
        _move(conn, job_rules.START, attempt, ids)
    audit.record(conn, [_event(job_rules.START, row.job_id, row.attempt, by, None) for row in rows])


def _finish(conn: Connection, by: Claimant, ends: Sequence[End]) -> list[audit.Event]:
    for attempt, ids in _by_attempt(ends):
        if _move(conn, job_rules.FINISH, attempt, ids) != len(ids):
            raise NotAllOwned
    insert_rows(
        conn,
        results,
        [
            {
                "job_id": end.job_id,
                "attempt": end.attempt,
                "result": end.result,
                "run_seconds": end.run_seconds,
            }
            for end in ends
        ],
    )
    return [_event(job_rules.FINISH, end.job_id, end.attempt, by, None) for end in ends]


def _end_otherwise(
    conn: Connection, by: Claimant, row: Row[Any], end: End, policy: RetryPolicy, events: list[audit.Event]
) -> Arrow:
    """Everything but success: rarer, and each with an error text of its own, so one statement a job."""
    crashes = row.crashes + (end.error_kind is ErrorKind.WORKER_LOST)
    error = (end.error or "")[:MAX_ERROR]
    values: dict[str, Any] = {"last_error": error, "error_kind": end.error_kind, "crashes": crashes}
    if end.outcome is Outcome.HANDED_BACK:
        arrow, values = job_rules.HAND_BACK, {"wait_reason": error[:255]}
    elif end.outcome is Outcome.SKIPPED:
        arrow = job_rules.SKIP
    else:
        step = job_rules.after_failure(
            end.error_kind or ErrorKind.TRANSIENT,
            attempts=row.attempts,
            max_attempts=row.max_attempts,
            crashes=crashes,
            policy=policy,
            retry_after_s=end.retry_after_s,
        )
        arrow = step.arrow
        if arrow is job_rules.RETRY:
            values["delay_s"] = step.delay_s
    _move(conn, arrow, row.attempt, [row.job_id], **values)
    details = {"error": error[:500], "kind": end.error_kind, "run_seconds": round(end.run_seconds, 6)}
    events.append(_event(arrow, row.job_id, row.attempt, by, details))
    return arrow


# ── the dead ────────────────────────────────────────────────────────────────────────────────────────────────────


def take_from_dead(conn: Connection, dead: Claimant, policy: RetryPolicy, limit: int) -> list[Settled]:
    """End, as lost, up to `limit` attempts that a dead worker still owns."""
    owned = conn.execute(
        select(jobs.c.job_id, jobs.c.attempt)
        .where(jobs.c.worker_id == dead.worker_id, jobs.c.status.in_(sorted(job_rules.OWNED)))
        .limit(limit)
    ).all()
    reason = f"worker {dead.worker_id} stopped sending heartbeats"
    ends = [
        End(row.job_id, row.attempt, Outcome.FAILED, error_kind=ErrorKind.WORKER_LOST, error=reason)
        for row in owned
    ]
    return record(conn, dead, [], ends, policy) if ends else []


def statuses(conn: Connection, job_ids: Sequence[str]) -> dict[str, Status]:
    """Where each of these jobs stands; those nobody knows are left out."""
    rows = conn.execute(select(jobs.c.job_id, jobs.c.status).where(jobs.c.job_id.in_(job_ids)))
    return {row.job_id: Status(row.status) for row in rows}
