"""Taking jobs: pending → claimed together with the GPU lease, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection

from orchestrator import jobs as job_rules
from orchestrator.batching import Batch, gather
from orchestrator.jobs import DEFAULT_LANE, RetryPolicy, Status
from orchestrator.leases import Denied, GpuShare, Granted, ResidentSlot
from orchestrator.store import audit, caps, claim_leases, outbox, ownership, patience, pools, registry, withdraw
from orchestrator.store.caps import Seats
from orchestrator.store.database import Database, RowsHeld, Waiting
from orchestrator.store.moves import Claimant, by_attempt, job_event, move
from orchestrator.store.offers import Offered, defer, offered
from orchestrator.store.ownership import Ownership
from orchestrator.store.settle import never_started, record

#: Why a job whose deadline passed is not claimed.
EXPIRED = str(job_rules.ErrorKind.DEADLINE)
#: Why a job is not claimed whose type this worker does not know, as its `wait_reason` begins.
NO_HANDLER = "no handler for type"
#: Seconds until it is offered again: while no other worker of the lane has the type; and while one does, who only was
#: not the one to read of it, first and at most.
NO_HANDLER_S = 5.0
MISSED_S, MAX_MISSED_S = 0.05, 1.0
#: Why a job is not claimed, and seconds until it is offered again, when somebody holds a row that its claim needs: of
#: a GPU, a cap, its pool.
HELD = "somebody holds a row that its claim needs"
HELD_S = 1.0
#: Why a job is not claimed that was delivered together with others, of which some took the last slot.
NO_SLOT = "no slot is free"


class Claim(NamedTuple):
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
    #: The batch it runs in, by the job that bears the lease of all; empty for a type whose jobs run one by one.
    batch: str = ""
    #: The capped keys that it counts for until its attempt ends.
    caps: tuple[str, ...] = ()
    #: The workflow that it is a task of.
    workflow_id: str | None = None
    #: Seconds for which it waited: since it was submitted, or since its last attempt was over.
    waited_s: float = 0.0

    @property
    def shares(self) -> bool:
        """Whether it runs under another's lease, which ends with that job."""
        return self.batch not in ("", self.job_id)

    @property
    def gpus(self) -> tuple[GpuShare, ...]:
        """What it may use; none for a job without a lease, and for one whose lease is of the CPU."""
        return self.lease.gpus if self.lease else ()

    @property
    def lease_key(self) -> str | None:
        return self.lease.key if self.lease else None


@dataclass(frozen=True)
class NotClaimed:
    """Why an entry led to no claim. `exists` is False when no row stands behind it."""

    reason: str
    exists: bool = True
    #: Idle warm models were asked to make room for it: their worker must hear of that.
    evicting: bool = False
    #: It waits as before and may be announced at once: there were not enough slots.
    put_back: bool = False


def claim_jobs(
    conn: Connection,
    by: Claimant,
    job_ids: Sequence[str],
    memory_for: Callable[[str], int | None],
    held: Collection[str] = (),
    warm: Sequence[ResidentSlot] = (),
    blank: int | None = None,
    size_of: Callable[[str], int] = lambda _type: 0,
    *,
    seats: Seats | None = None,
) -> dict[str, Claim | NotClaimed]:
    """Pending → claimed for every offered job that is free, with its GPU lease, in the caller's transaction.

    `memory_for(type)` is the handler's default need in MB; None when this worker has no such handler. `held` are
    jobs this worker runs already, `warm` its free slots that keep a model, `blank` how many others are free (None:
    enough). `size_of(type)` is how many jobs of a type run in one call, under one lease; 0 when its handler takes them
    one by one. `seats` are those of the caller's transaction, who closes them.
    """
    seats = seats or Seats(conn)
    job_ids = list(dict.fromkeys(job_ids))  # a job announced again may be delivered twice in one read
    if why := _closed(conn, by, seats):
        outbox.unpublish(conn, job_ids)
        _why_not(conn, by, job_ids, held, seats)  # strays are handed back also now: nobody offers them again
        return dict.fromkeys(job_ids, NotClaimed(why))
    waiting = offered(conn, job_ids)
    answers: dict[str, Claim | NotClaimed] = {}
    if others := [job_id for job_id in job_ids if job_id not in waiting]:
        answers |= _why_not(conn, by, others, held, seats)
        waiting |= offered(conn, [job_id for job_id in others if job_id not in answers])
    answers |= _without_handler(conn, by, [job for job in waiting.values() if memory_for(job.type) is None])
    free = [_for_pool(job, by) for job in waiting.values() if job.job_id not in answers]
    capped = {job.job_id: capped for job in free if (capped := seats.caps_of(by.pool_id, job))}
    refused = _refused(seats, free, capped) if capped else {}
    together = gather([job for job in free if job.job_id not in refused], size_of, memory_for)
    # Of jobs that run one by one no more are offered than there are slots; how many batches it takes shows only here.
    limited = blank is not None and any(batch.name for batch in together)
    slots = len(warm) + (blank or 0) if limited else len(together)
    answers |= _put_back(conn, [job for batch in together[slots:] for job in batch.jobs])
    answers |= _claim_all(conn, by, together[:slots], warm, blank)
    if capped:
        answers |= _seat(conn, seats, [claim for claim in answers.values() if isinstance(claim, Claim)], capped)
        answers |= _park(conn, seats, list(refused.values()), capped)
    return answers


def leave_for_later(db: Database, by: Claimant, job_id: str, held: Collection[str]) -> NotClaimed:
    """The answer to the offer of a job that somebody else's lock keeps from being claimed, and nobody waits for.

    If that is the lock of the job itself, it stays announced, without an entry: the leader's `repair` sees to it when
    it is free. But if this worker claimed it and does not know of it, the answer was lost, and nobody else would bring
    it back: then RowsHeld is raised, and it is offered again.
    """
    with suppress(RowsHeld):
        if db.write_batch(lambda conn: _deferred(conn, job_id), Waiting.NOT):
            return NotClaimed(HELD)
    if job_id not in held and db.read(lambda conn: ownership.is_claimed_by(conn, job_id, by.worker_id)):
        raise RowsHeld(f"job {job_id}: the answer to its claim was lost, and {HELD}")
    return NotClaimed(HELD)


def _deferred(conn: Connection, job_id: str) -> bool:
    """Whether it waited."""
    waiting = list(offered(conn, [job_id]).values())
    defer(conn, waiting, HELD, HELD_S)
    return bool(waiting)


def _closed(conn: Connection, by: Claimant, seats: Seats) -> str | None:
    """Why nothing of its lane is claimed."""
    if by.pool_id != DEFAULT_LANE and (closed := pools.closed_to_claims(conn, by.pool_id)):
        return f"pool {by.pool_id} is {closed}"
    return seats.book.closed(by.pool_id)


def _without_handler(conn: Connection, by: Claimant, strange: Sequence[Offered]) -> dict[str, NotClaimed]:
    others = registry.serving(conn, by.pool_id, but=by.worker_id) if strange else []
    for job in strange:
        pause_s = _missed_s(job) if any(job.type in types for types, _has_gpus in others) else NO_HANDLER_S
        defer(conn, [job], f"{NO_HANDLER} {job.type!r} on worker {by.worker_id}", pause_s)
    return {job.job_id: NotClaimed("no_handler") for job in strange}


def _missed_s(job: Offered) -> float:
    """As long as since it was put off last: so the pauses grow, and what waited long for its turn is not held up."""
    return min(max(job.moved_s or 0.0, MISSED_S), MAX_MISSED_S)


def _refused(seats: Seats, free: Sequence[Offered], capped: Mapping[str, Mapping[str, int]]) -> dict[str, Offered]:
    """Those that find no seat if all before them do. Whoever gets no lease after all takes none."""
    wishing = sorted((job for job in free if job.job_id in capped), key=lambda job: job.rank)
    chosen = seats.choose([capped[job.job_id] for job in wishing])
    return {job.job_id: job for job, is_chosen in zip(wishing, chosen, strict=True) if not is_chosen}


def _seat(
    conn: Connection, seats: Seats, claims: Sequence[Claim], capped: Mapping[str, Mapping[str, int]]
) -> dict[str, Claim]:
    seated = {claim.job_id: claim._replace(caps=tuple(capped.get(claim.job_id, ()))) for claim in claims}
    for claim in seated.values():
        seats.take(claim.caps)
    caps.remember(conn, {claim.job_id: claim.caps for claim in seated.values()})
    return seated


def _park(
    conn: Connection, seats: Seats, refused: Sequence[Offered], capped: Mapping[str, Mapping[str, int]]
) -> dict[str, Claim | NotClaimed]:
    """Those that could sit down after all, because somebody else got no lease, are announced again."""
    reasons = seats.park({job.job_id: capped[job.job_id] for job in refused})
    parked = {job_id: NotClaimed(reason) for job_id, reason in reasons.items()}
    return parked | _put_back(conn, [job for job in refused if job.job_id not in parked])


def _claim_all(
    conn: Connection, by: Claimant, together: Sequence[Batch[Offered]], warm: Sequence[ResidentSlot], blank: int | None
) -> dict[str, Claim | NotClaimed]:
    requests = claim_leases.requests_of(by, together)
    granted = claim_leases.grant(conn, by, together, requests, warm, blank)
    answers: dict[str, Claim | NotClaimed] = {}
    for batch in together:
        lease = granted.get(batch.bearer.job_id)
        if isinstance(lease, Denied):
            request = requests[batch.bearer.job_id]
            defer(conn, batch.largest, lease.reason, patience.pause(conn, by, batch.bearer.age_s, request, lease))
            answers |= {job.job_id: NotClaimed(lease.reason, evicting=lease.evicting) for job in batch.largest}
            # Smaller ones may find room by themselves.
            answers |= _put_back(conn, [job for job in batch.jobs if job.job_id not in answers])
    _take_ownership(conn, by, [batch for batch in together if batch.bearer.job_id not in answers], granted, answers)
    return answers


def _put_back(conn: Connection, waiting: Sequence[Offered]) -> dict[str, Claim | NotClaimed]:
    ids = [job.job_id for job in waiting]
    outbox.unpublish(conn, ids)
    return dict.fromkeys(ids, NotClaimed(NO_SLOT, put_back=True))


def _for_pool(job: Offered, by: Claimant) -> Offered:
    return job if job.model_id or not by.model_id else job._replace(model_id=by.model_id)


def _why_not(
    conn: Connection, by: Claimant, job_ids: Sequence[str], held: Collection[str], seats: Seats
) -> dict[str, Claim | NotClaimed]:
    """Why these jobs are not free. Strays are handed back; those that are free then get no answer here."""
    rows = ownership.lock(conn, job_ids)
    strays = [row for row in rows.values() if _is_stray(row, by, held)]
    if strays:
        _hand_back_strays(conn, by, strays, seats)
        rows = ownership.lock(conn, job_ids)  # a stray that was cancelled has ended, an overdue one waits to be ended
    overdue = {job_id: row for job_id, row in rows.items() if row.status == Status.PENDING and row.overdue}
    withdraw.expire(conn, list(overdue.values()))
    freed = {row.job_id for row in strays if rows[row.job_id].status == Status.PENDING} - overdue.keys()
    reasons = {job_id: f"already {row.status}" for job_id, row in rows.items()} | dict.fromkeys(overdue, EXPIRED)
    return {
        job_id: NotClaimed(reasons[job_id]) if job_id in reasons else NotClaimed("unknown_job", exists=False)
        for job_id in job_ids
        if job_id not in freed
    }


def _is_stray(row: Ownership, by: Claimant, held: Collection[str]) -> bool:
    """Claimed by this very worker, which does not know of it: the answer to that commit got lost."""
    return row.status == Status.CLAIMED and row.worker_id == by.worker_id and row.job_id not in held


def _hand_back_strays(conn: Connection, by: Claimant, strays: Sequence[Ownership], seats: Seats) -> None:
    """No slot has heard of them: a lease of their own is free, a warm model's has its model in memory as before."""
    lost = "the answer to its claim was lost"
    ends = [never_started(row.job_id, row.attempt, lost) for row in strays]
    record(conn, by, [], ends, RetryPolicy(0, 0, 0), seats=seats)


def _take_ownership(
    conn: Connection,
    by: Claimant,
    together: Sequence[Batch[Offered]],
    granted: Mapping[str, Granted | Denied],
    answers: dict[str, Claim | NotClaimed],
) -> None:
    groups: dict[tuple[bool, str | None], list[Offered]] = {}
    for batch in together:
        groups.setdefault(_lease_kind(batch, granted.get(batch.bearer.job_id)), []).extend(batch.jobs)
    for (leased, key), group in groups.items():
        how: dict[str, Any] = {"lease_token": key} if key else {"leased": leased}
        for attempt, ids in by_attempt(group):
            moved = move(conn, job_rules.CLAIM, attempt, ids, worker_id=by.worker_id, owner_pool=by.pool_id, **how)
            assert moved == len(ids), "rows are locked, nobody else can have moved them"
    events = []
    for batch in together:
        answer = granted.get(batch.bearer.job_id)
        lease = answer if isinstance(answer, Granted) else None
        details = _details(batch, lease)
        for row in batch.jobs:
            claimed = answers[row.job_id] = _claim_of(row, lease, batch.name)
            events.append(job_event(job_rules.CLAIM, claimed.job_id, claimed.attempt, by, details))
    audit.record(conn, events)


def _lease_kind(batch: Batch[Offered], lease: Granted | Denied | None) -> tuple[bool, str | None]:
    """Whether its jobs have a lease, and its key where that is not the job's own."""
    if not isinstance(lease, Granted):
        return False, None
    return True, lease.key if lease.resident or len(batch.jobs) > 1 else None


def _claim_of(row: Offered, lease: Granted | None, batch: str) -> Claim:
    return Claim(
        row.job_id,
        row.attempt + 1,
        row.type,
        row.payload,
        row.agent,
        row.model_id,
        row.max_runtime_sec,
        row.trace_context,
        lease,
        batch,
        workflow_id=row.workflow_id,
        waited_s=max(row.age_s if row.attempt == 0 or row.moved_s is None else row.moved_s, 0.0),
    )


def _details(batch: Batch[Offered], lease: Granted | None) -> dict[str, Any] | None:
    details: dict[str, Any] = {"batch": batch.name, "batch_size": len(batch.jobs)} if batch.name else {}
    if lease is not None:
        uuids = [gpu.gpu_uuid for gpu in lease.gpus]
        details |= {"mode": lease.mode, "memory_mb": lease.request.memory_mb, "gpus": uuids}
    return details or None
