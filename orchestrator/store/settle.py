"""Ending attempts: claimed → running, and owned → any ending or back to pending.

An attempt that no longer owns its job changes nothing; that is a normal outcome, not an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from orchestrator import jobs as job_rules
from orchestrator.jobs import Arrow, ErrorKind, RetryPolicy, Status
from orchestrator.jsontext import listed
from orchestrator.leases import MODEL_LEASE, LeaseState, Remains
from orchestrator.store import audit, dead_letters, followers, leases, nodes, ownership, residency
from orchestrator.store.caps import Seats
from orchestrator.store.hot import insert_rows
from orchestrator.store.moves import Claimant, by_attempt, job_event, move
from orchestrator.store.ownership import Ownership
from orchestrator.store.schema import jobs, results

#: Characters of an error that are kept.
MAX_ERROR = 4000
#: Characters of it that its audit row keeps.
AUDITED_ERROR = 500


class Start(NamedTuple):
    """The handler of this attempt is running."""

    job_id: str
    attempt: int


class Outcome(Enum):
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"


class Left(NamedTuple):
    """What an attempt left on its GPU, in which slot, and the model that stays there."""

    remains: Remains = Remains.NOTHING
    slot: str = ""
    #: The key of the model's lease from now on.
    key: str = ""
    type: str = ""
    model_id: str | None = None
    pinned: bool = False
    #: Who never started, if nobody did.
    job_id: str = ""


class End(NamedTuple):
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
    left: Left = Left()
    #: The entry that brought the job; a dead letter names it.
    origin_id: str = ""
    #: The capped keys that its claim took.
    caps: tuple[str, ...] = ()
    #: The workflow that the job is a task of, and how many tasks the attempt staged (`spawning`).
    workflow_id: str | None = None
    spawned: int = 0
    #: The leader took it from a worker that is lost; nobody saw it end.
    reclaimed: bool = False
    #: The trace that the job belongs to.
    trace_context: str | None = None


def never_started(
    job_id: str, attempt: int, reason: str, lease_key: str | None = None, retry_after_s: float | None = None
) -> End:
    """Claimed, and handed back before any process heard of it."""
    left = Left(Remains.UNUSED, job_id=job_id)
    return End(
        job_id,
        attempt,
        Outcome.HANDED_BACK,
        error=reason,
        retry_after_s=retry_after_s,
        lease_key=lease_key,
        left=left,
    )


class Release(NamedTuple):
    """A warm model left its slot; no job was under way."""

    lease_key: str
    left: Left


class Settled(NamedTuple):
    """What an End led to: the arrow taken, or None when the attempt no longer owned the job."""

    end: End
    arrow: Arrow | None


class NotAllOwned(Exception):
    """Some of these attempts lost their jobs or were cancelled; the caller rolls back and uses `record`."""


def all_done(ends: Sequence[End]) -> bool:
    return all(end.outcome is Outcome.DONE for end in ends)


def finish_all(conn: Connection, by: Claimant, ends: Sequence[End], seats: Seats | None = None) -> list[Settled]:
    """Owned → done for all of them, or NotAllOwned: the guarded UPDATE is the check, no row is read before it."""
    if ends:
        events = _finish(conn, by, ends)
        _give_back(conn, seats, [key for end in ends for key in end.caps])
        end_leases(conn, [(end.lease_key, end.left) for end in ends if end.lease_key])
        audit.record(conn, events)
    return [Settled(end, job_rules.FINISH) for end in ends]


def record(
    conn: Connection,
    by: Claimant,
    starts: Sequence[Start],
    ends: Sequence[End],
    policy: RetryPolicy,
    *,
    keep_leases: bool = False,
    seats: Seats | None = None,
) -> list[Settled]:
    """Write what a worker's attempts did, after a look at who owns each job.

    `seats` are those of the caller's transaction, who closes them.
    """
    with followers.together(conn):
        return _record(conn, by, starts, ends, policy, keep_leases=keep_leases, seats=seats)


def _record(
    conn: Connection,
    by: Claimant,
    starts: Sequence[Start],
    ends: Sequence[End],
    policy: RetryPolicy,
    *,
    keep_leases: bool,
    seats: Seats | None,
) -> list[Settled]:
    ids = [start.job_id for start in starts] + [end.job_id for end in ends]
    rows = ownership.lock(conn, ids)
    _start(conn, by, [rows[start.job_id] for start in starts if _owns(rows, start, by, {Status.CLAIMED})])
    settled = []
    events: list[audit.Event] = []
    finished: list[End] = []
    for end in ends:
        row = rows.get(end.job_id)
        if row is not None and (first := _already(row, end, by)):
            settled.append(Settled(end, first))  # our own commit, whose answer was lost
        elif row is None or not _owns(rows, end, by, job_rules.OWNED):
            settled.append(Settled(end, None))
        elif row.cancelled_s is not None:
            settled.append(Settled(end, _stop(conn, by, row, end, events)))
        elif end.outcome is Outcome.DONE:
            finished.append(end._replace(workflow_id=row.workflow_id))
            settled.append(Settled(end, job_rules.FINISH))
        else:
            settled.append(Settled(end, _end_otherwise(conn, by, row, end, policy, events)))
    events += _finish(conn, by, finished)
    # As the rows were before: one that had ended already holds nothing.
    over = [rows[item.end.job_id] for item in settled if item.arrow]
    _give_back(conn, seats, [key for row in over for key in listed(row.held_caps)])
    if not keep_leases:
        # An attempt that lost its job has its lease all the same, and nobody else will end it.
        taken = [(rows[s.end.job_id].lease_token if s.arrow else s.end.lease_key, s.end.left) for s in settled]
        end_leases(conn, [(key, left) for key, left in taken if key])
    audit.record(conn, events)
    return settled


def _give_back(conn: Connection, seats: Seats | None, keys: Sequence[str]) -> None:
    """Before leases are ended: whoever claims has the keys first, and then waits for GPUs."""
    if keys:
        given = seats or Seats(conn)
        given.give_back(keys)
        if seats is None:
            given.close()


def end_leases(conn: Connection, keys: Sequence[tuple[str, Left]]) -> None:
    """What becomes of leases whose jobs are over: by what the worker saw left on their GPUs.

    Those that give memory back come last: leases are locked before GPUs.
    """
    over = []
    for key, left in keys:
        if left.remains is Remains.SHARED:
            continue
        if left.remains is Remains.PROCESSES:
            leases.let_go(conn, [key], LeaseState.SPENT, slot=left.slot)
        elif left.remains is Remains.MODEL:
            model = residency.Model(left.key, left.slot, left.type, left.model_id, left.pinned)
            residency.keep(conn, key, model)
        elif left.remains is Remains.LOADED:
            residency.loaded(conn, key)
        elif left.remains is Remains.UNUSED and key.startswith(MODEL_LEASE):
            residency.vacate(conn, key, left.job_id)
        else:
            over.append(key)
    leases.free(conn, over)


_ENDED_BY = {
    (Outcome.DONE, Status.DONE): job_rules.FINISH,
    (Outcome.SKIPPED, Status.SKIPPED): job_rules.SKIP,
    (Outcome.FAILED, Status.FAILED): job_rules.FAIL,
    (Outcome.FAILED, Status.DEAD_LETTER): job_rules.BURY,
    (Outcome.CANCELLED, Status.DEAD_LETTER): job_rules.BURY,
}


def _already(row: Ownership, end: End, by: Claimant) -> Arrow | None:
    """The arrow that this very end took before; the kind of error tells a worker's end from the leader's."""
    if (row.attempt, row.worker_id) != (end.attempt, by.owner):
        return None
    if row.status == Status.CANCELLED:
        return job_rules.STOP
    if end.outcome is Outcome.FAILED and row.error_kind != end.error_kind:
        return None
    return _ENDED_BY.get((end.outcome, Status(row.status)))


def _owns(rows: Mapping[str, Ownership], event: Start | End, by: Claimant, states: Collection[Status]) -> bool:
    """The worker counts as well as the attempt: a job that was purged and submitted again begins at attempt 1."""
    row = rows.get(event.job_id)
    return row is not None and (row.attempt, row.worker_id) == (event.attempt, by.owner) and row.status in states


def _start(conn: Connection, by: Claimant, rows: Sequence[Ownership]) -> None:
    for attempt, ids in by_attempt(rows):
        move(conn, job_rules.START, attempt, ids, owner=by.owner)
    audit.record(conn, [job_event(job_rules.START, row.job_id, row.attempt, by, None) for row in rows])


def _finish(conn: Connection, by: Claimant, ends: Sequence[End]) -> list[audit.Event]:
    spawned = {end.job_id: end.spawned for end in ends if end.spawned}
    if followers.end(conn, job_rules.FINISH, ends, spawned, owner=by.owner) != len(ends):
        raise NotAllOwned
    rows = [
        {"job_id": end.job_id, "attempt": end.attempt, "result": end.result, "run_seconds": end.run_seconds}
        for end in ends
    ]
    insert_rows(conn, results, rows, bulky="result")
    return [job_event(job_rules.FINISH, end.job_id, end.attempt, by, None) for end in ends]


def _stop(conn: Connection, by: Claimant, row: Ownership, end: End, events: list[audit.Event]) -> Arrow:
    """Cancelled while it ran: however the attempt ended, its process is gone now, and nothing else counts."""
    followers.end(conn, job_rules.STOP, [row], owner=by.owner)
    details = {"stop_seconds": round(float(row.cancelled_s or 0.0), 3), "ended_as": end.outcome.value}
    details |= {"run_seconds": round(end.run_seconds, 6)} | _reclaimed(end)
    events.append(job_event(job_rules.STOP, row.job_id, row.attempt, by, details))
    return job_rules.STOP


def _end_otherwise(
    conn: Connection, by: Claimant, row: Ownership, end: End, policy: RetryPolicy, events: list[audit.Event]
) -> Arrow:
    """Everything but success: rarer, and each with an error text of its own, so one statement a job."""
    crashes = row.crashes + (end.error_kind in job_rules.CRASHES)
    error = (end.error or "")[:MAX_ERROR]
    values: dict[str, Any] = {"last_error": error, "error_kind": end.error_kind, "crashes": crashes}
    if end.outcome is Outcome.HANDED_BACK:
        arrow = job_rules.HAND_BACK
        blamed = {"last_error": error, "error_kind": end.error_kind} if end.error_kind else {}
        values = blamed | {"wait_reason": error[:255], "delay_s": end.retry_after_s or 0.0}
    elif end.outcome is Outcome.SKIPPED:
        arrow = job_rules.SKIP
    else:
        step = job_rules.after_failure(
            end.error_kind or ErrorKind.TRANSIENT,
            attempts=row.attempts,
            max_attempts=row.max_attempts,
            crashes=crashes,
            policy=policy.for_job(row.type, row.retry_base_sec, row.retry_cap_sec),
            retry_after_s=end.retry_after_s,
        )
        arrow = step.arrow
        if arrow is job_rules.RETRY:
            values["delay_s"] = step.delay_s
    if arrow.target in job_rules.TERMINAL:
        followers.end(conn, arrow, [row], owner=by.owner, **values)
    else:
        move(conn, arrow, row.attempt, [row.job_id], owner=by.owner, **values)
    if arrow is job_rules.BURY:
        dead_letters.add(conn, row.job_id, str(end.error_kind), row.attempts, end.origin_id)
    details = {"error": _end_of(error), "kind": end.error_kind, "run_seconds": round(end.run_seconds, 6)}
    events.append(job_event(arrow, row.job_id, row.attempt, by, details | _reclaimed(end)))
    return arrow


def _reclaimed(end: End) -> dict[str, Any]:
    return {"reclaimed": True} if end.reclaimed else {}


def _end_of(error: str) -> str:
    """What the audit keeps of it: a trace says at its end what went wrong."""
    return error if len(error) <= AUDITED_ERROR else f"…{error[1 - AUDITED_ERROR :]}"


def take_from_dead(conn: Connection, dead: Claimant, policy: RetryPolicy, limit: int) -> list[Settled]:
    """End, as lost, up to `limit` attempts that a dead worker still owns; none if one of its name registered meanwhile.

    Their leases stay until they expire: nobody has seen the processes end, and a worker that only cannot reach us
    stops them by then.
    """
    if dead.owner and nodes.lives(conn, dead.owner):
        return []
    owned = conn.execute(
        select(jobs.c.job_id, jobs.c.attempt, jobs.c.trace_context)
        .where(jobs.c.worker_id == dead.owner, jobs.c.status.in_(sorted(job_rules.OWNED)))
        .limit(limit)
        .with_for_update(skip_locked=True)  # whoever holds a row must not hold up the leader: next time, then
    ).all()
    reason = f"worker {dead.worker_id or 'unknown'} stopped sending heartbeats"
    lost = End("", 0, Outcome.FAILED, error_kind=ErrorKind.WORKER_LOST, error=reason, reclaimed=True)
    ends = [lost._replace(**row._asdict()) for row in owned]
    return record(conn, dead, [], ends, policy, keep_leases=True) if ends else []
