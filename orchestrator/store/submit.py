"""Accepting jobs: a job is accepted when its row and its audit row are committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from orchestrator.admission import FREELY, Admitted, Decision
from orchestrator.errors import DatabaseUnavailable, InvalidInput, JobConflict, OrchestratorError
from orchestrator.jobs import NewJob, Queued, RetryPolicy
from orchestrator.policies import Book
from orchestrator.store import accounts, audit, flows, lanes
from orchestrator.store.database import Database, Waiting
from orchestrator.store.hot import Hot, insert_rows
from orchestrator.store.schema import jobs

#: Runs of a batch that keeps meeting ids which others insert at the same moment.
MAX_RUNS = 10
#: What a transaction ends with that met such an id, or a row of a lane or an agent that nobody had before.
MetOthers = IntegrityError

R = TypeVar("R")
#: From so many jobs on, accounts are charged apart: an agent's row would be locked while hundreds of jobs are written,
#: and three flushers that submit for one agent would take turns, for a fifth less than they write side by side.
#: A batch that fails after that was charged in vain, which costs its agent a little of its share and nothing else.
MANY = 50


class Verdict(Enum):
    """What became of a submitted job."""

    CREATED = "created"
    EXISTS = "exists"
    CONFLICT = "conflict"


#: Decides about new jobs, in the transaction that stores them.
Admit = Callable[[Connection, Sequence[NewJob]], Sequence[Decision]]
#: What a submitter hears of one job: the error says why it was not let in.
Answer = Verdict | OrchestratorError
#: Refusals that no waiting mends.
PERMANENT = (InvalidInput, JobConflict)


def refusal(job: NewJob, answer: Answer) -> OrchestratorError | None:
    """Why this very job is not stored; None when it is."""
    if answer is Verdict.CONFLICT:
        return JobConflict(job.job_id)
    return None if isinstance(answer, Verdict) else answer


def let_in(_conn: Connection, fresh: Sequence[NewJob]) -> Sequence[Decision]:
    return [FREELY] * len(fresh)


def no_policies(_conn: Connection) -> Book:
    return Book()


@dataclass(frozen=True)
class Rules:
    """By which new jobs are stored."""

    policy: RetryPolicy
    admit: Admit = let_in
    book: Callable[[Connection], Book] = no_policies
    waiting: Waiting = Waiting.ONCE


def submit_jobs(
    db: Database,
    batch: Sequence[NewJob],
    policy: RetryPolicy,
    admit: Admit = let_in,
    book: Callable[[Connection], Book] = no_policies,
    waiting: Waiting = Waiting.ONCE,
) -> list[Answer]:
    """Store new jobs in one transaction; an answer for each, in order. Raises RowsHeld.

    A job_id that another process inserts at the same moment breaks the statement, not the promise: the batch
    runs again and then finds that row.
    """
    # Ids of our own making are new, unless a commit whose answer was lost has stored them: then they are met again.
    lookup = [job.job_id for job in batch if not job.generated_id]
    rules = Rules(policy, admit, book, waiting)
    for _ in range(MAX_RUNS):
        try:
            return db.write_batch(
                lambda conn: _submit(conn, db, batch, lookup, rules),  # noqa: B023 - runs at once
                waiting,
            )
        except IntegrityError:
            lookup = [job.job_id for job in batch]
    raise DatabaseUnavailable(f"submit met ids that others inserted at the same moment, {MAX_RUNS} times in a row")


def meeting_nobody(write: Callable[[], R]) -> R:
    """What a transaction answers that may meet rows which others insert at the same moment: an agent's, a lane's."""
    for _ in range(MAX_RUNS - 1):
        try:
            return write()
        except MetOthers:  # rolled back; the next run finds what they inserted
            continue
    return write()


def submit_within(conn: Connection, db: Database, batch: Sequence[NewJob], rules: Rules) -> list[Answer]:
    """The same in a transaction of the caller's: the jobs are stored if that commits.

    An id that another process inserts at the same moment is `MetOthers`, and the caller's to run again.
    """
    return _submit(conn, db, batch, [job.job_id for job in batch], rules) if batch else []


def _submit(conn: Connection, db: Database, batch: Sequence[NewJob], lookup: list[str], rules: Rules) -> list[Answer]:
    known = _known_hashes(conn, lookup)
    answers: list[Answer] = []
    fresh: dict[int, NewJob] = {}
    first: dict[str, int] = {}
    for position, job in enumerate(batch):
        if job.job_id not in known:
            known[job.job_id] = job.content_hash
            first[job.job_id] = position
            fresh[position] = job
            answers.append(Verdict.CREATED)
        else:
            answers.append(Verdict.EXISTS if known[job.job_id] == job.content_hash else Verdict.CONFLICT)
    if any(job.spec.workflow_id for job in fresh.values()):
        _refuse_strays(conn, fresh, answers)
    admitted: list[Entering] = []
    for (position, job), decision in zip(fresh.items(), rules.admit(conn, list(fresh.values())), strict=True):
        if isinstance(decision, Admitted):
            admitted.append(Entering(job, decision))
        else:
            answers[position] = decision
    if admitted:
        _insert_jobs(conn, db, admitted, rules)
        flows.add_tasks(conn, [one.job.spec.workflow_id for one in admitted if one.job.spec.workflow_id])
    if len(admitted) < len(first):
        # Who named the same id behind one that was not let in must not hear that it is there.
        for position, job in enumerate(batch):
            leader = answers[first.get(job.job_id, position)]
            answers[position] = answers[position] if isinstance(leader, Verdict) else leader
    return answers


def _refuse_strays(conn: Connection, fresh: dict[int, NewJob], answers: list[Answer]) -> None:
    """Those whose workflow takes no tasks; of the others it is locked, so that it does not end meanwhile."""
    found = flows.lock(conn, {job.spec.workflow_id for job in fresh.values() if job.spec.workflow_id})
    for position, job in [*fresh.items()]:
        if job.spec.workflow_id and (refused := flows.refusal(job.spec.workflow_id, found.get(job.spec.workflow_id))):
            answers[position] = refused
            del fresh[position]


_HASHES = Hot(lambda ids: select(jobs.c.job_id, jobs.c.payload_hash).where(jobs.c.job_id.in_(ids)))


def _known_hashes(conn: Connection, job_ids: list[str]) -> dict[str, str]:
    return {job_id: known for job_id, known in _HASHES.rows(conn, job_ids)} if job_ids else {}  # noqa: C416 - no pairs


class Entering(NamedTuple):
    """A job that is let in: where it waits, and what it is in its workflow."""

    job: NewJob
    how: Admitted = FREELY
    task: str | None = None
    #: How many tasks it needs, and for how many of them it waits; None: it is no task.
    needs: int | None = None
    waits_for: int | None = None
    optional: bool = False


def enter(
    conn: Connection,
    db: Database,
    entering: Sequence[Entering],
    policy: RetryPolicy,
    book: Callable[[Connection], Book] = no_policies,
) -> None:
    """Store jobs that were decided about, in the caller's transaction. An id that is taken is `MetOthers`."""
    if entering:
        _insert_jobs(conn, db, entering, Rules(policy, book=book))


def _insert_jobs(conn: Connection, db: Database, admitted: Sequence[Entering], rules: Rules) -> None:
    now, virtual_times = lanes.clocks(conn, {one.job.spec.pool_id for one in admitted})
    batch, book = [one.job for one in admitted], rules.book(conn)
    charging = partial(accounts.rank_all, batch=batch, virtual_times=virtual_times, book=book)
    apart = len(admitted) >= MANY and rules.waiting is Waiting.ONCE  # another connection would wait as long
    ranks = db.write_apart(conn, charging) if apart else charging(conn)
    rows = [_job_row(one, now, rank, rules.policy) for one, rank in zip(admitted, ranks, strict=True)]
    # In key order: two batches that share ids then wait for each other instead of deadlocking.
    insert_rows(conn, jobs, sorted(rows, key=lambda row: str(row["job_id"])), _JOB_DEFAULTS, bulky="payload")
    audit.record(
        conn,
        [
            audit.Event("job.submitted", job.job_id, job.spec.pool_id, actor=job.spec.agent, details=_due(job, now))
            for job in batch
        ],
    )


def _due(job: NewJob, now: datetime) -> dict[str, Any] | None:
    """When it may start, if that is later: its row forgets it then, and how long it waited is counted from there."""
    later = job.not_before is not None and job.not_before > now
    return {"not_before": f"{job.not_before:%Y-%m-%d %H:%M:%S.%f}"} if later else None


#: What the schema fills in by itself.
_JOB_DEFAULTS = {"priority": 0, "gpu_count": 1, "cpu_fallback": False, "queued": Queued.READY, "optional": False}


def _job_row(one: Entering, now: datetime, rank: int, policy: RetryPolicy) -> dict[str, Any]:
    job, how, spec = one.job, one.how, one.job.spec
    later = job.not_before is not None and job.not_before > now
    queued = Queued.DELAYED if later else Queued.BLOCKED if how.blocked_on else Queued.READY
    return {
        "job_id": job.job_id,
        "type": spec.type,
        "payload": job.payload,
        "payload_hash": job.content_hash,
        "agent": spec.agent,
        "lane": spec.pool_id,
        "model_id": spec.model_id,
        "priority": spec.priority,
        "rank": rank,
        "min_memory_mb": 0 if how.on_cpu else spec.min_memory_mb,
        "gpu_count": spec.gpu_count,
        "cpu_fallback": spec.cpu_fallback,
        "cost_units": spec.cost_units,
        "constraints": json.dumps(spec.constraints) if spec.constraints else None,
        "expected_duration_sec": spec.expected_duration_sec,
        "max_runtime_sec": spec.max_runtime_sec,
        "max_attempts": spec.max_attempts or policy.for_job(spec.type).max_attempts,
        "retry_base_sec": spec.retry_base_sec,
        "retry_cap_sec": spec.retry_cap_sec,
        "deadline_at": job.deadline,
        "expires_at": job.deadline,
        "concurrency_keys": json.dumps(spec.concurrency_keys) if spec.concurrency_keys else None,
        "tags": json.dumps(spec.tags) if spec.tags else None,
        "trace_context": job.trace_context,
        "workflow_id": spec.workflow_id,
        "task": one.task,
        "needs": one.needs,
        "waits_for": one.waits_for,
        "optional": one.optional,
        "queued": queued,
        "start_by": job.start_by if queued is Queued.READY else None,
        "not_before": job.not_before if later else None,
        "blocked_on": None if later else how.blocked_on,
        "wait_reason": None if later else how.reason,
    }
