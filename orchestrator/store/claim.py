"""Taking jobs: pending → claimed together with the GPU lease, in one transaction."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, func, literal_column, or_, select

from orchestrator import jobs as job_rules
from orchestrator.jobs import Queued, RetryPolicy, Status
from orchestrator.leases import Denied, GpuShare, Granted, LeaseRequest, ResidentSlot
from orchestrator.placement import Cluster, GpuView, Placed, Reason, reservation
from orchestrator.store import audit, gpus, grants, nodes, ownership, residency, withdraw
from orchestrator.store.dialect import by_key, seconds_since, utc_now
from orchestrator.store.hot import Hot
from orchestrator.store.moves import Claimant, by_attempt, job_event, move
from orchestrator.store.ownership import Ownership
from orchestrator.store.schema import jobs
from orchestrator.store.settle import never_started, record

#: Longest pause between two offers of a job that finds no GPU memory.
MAX_PATIENCE_S = 30.0
#: First and longest pause of a job that is too large for every GPU there is.
HOPELESS_S, MAX_HOPELESS_S = 60.0, 3600.0
#: Why a job whose deadline passed is not claimed.
EXPIRED = str(job_rules.ErrorKind.DEADLINE)
#: Seconds until a job whose type this worker does not know is offered again.
NO_HANDLER_S = 5.0
#: Seconds until a job is offered again that fits on another node, whose worker may be quicker then.
ELSEWHERE_S = 0.25
#: Seconds for which a GPU is kept for a starving job, and until it is offered again.
RESERVED_S, RESERVED_RETRY_S = 15.0, 1.0
#: Why a job is not claimed whose lease needs a process of its own, while all free ones keep a model warm.
NO_BLANK_SLOT = "every free slot keeps another model warm"


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


#: A job that was announced and then unpublished may be claimed all the same: it waits, and somebody has time.
_CLAIMABLE: list[ColumnElement[str]] = [literal_column(f"'{queued}'") for queued in (Queued.READY, Queued.ANNOUNCED)]

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
            ).label("options"),
        )
        .where(
            jobs.c.job_id.in_(ids),
            jobs.c.queued.in_(_CLAIMABLE),
            or_(jobs.c.expires_at.is_(None), jobs.c.expires_at > utc_now()),
        )
        .with_for_update(),
        jobs,
    )
)


class _Offered(NamedTuple):
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


def _offered(conn: Connection, job_ids: Sequence[str]) -> dict[str, _Offered]:
    if not job_ids:
        return {}
    rows = _OFFERED.rows(conn, job_ids)
    found = (_Offered(*columns, *json.loads(options)) for *columns, options in rows)
    return {job.job_id: job for job in found}


def claim_jobs(
    conn: Connection,
    by: Claimant,
    job_ids: Sequence[str],
    memory_for: Callable[[str], int | None],
    held: Collection[str] = (),
    warm: Sequence[ResidentSlot] = (),
    blank: int | None = None,
) -> dict[str, Claim | NotClaimed]:
    """Pending → claimed for every offered job that is free, with its GPU lease, in the caller's transaction.

    `memory_for(type)` is the handler's default need in MB; None when this worker has no such handler. `held` are
    jobs this worker runs already, `warm` its free slots that keep a model, `blank` how many others are free (None:
    enough).
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
    requests = {job.job_id: request for job in free if (request := _request(by, job, memory_for))}
    granted: dict[str, Granted | Denied] = dict(_under_warm_models(conn, by, free, requests, warm))
    granted |= _lease_all(conn, by, [request for key, request in requests.items() if key not in granted], blank)
    for job in free:
        lease = granted.get(job.job_id)
        if isinstance(lease, Denied):
            _defer(conn, job, lease.reason, _patience(conn, by, job, requests[job.job_id], lease))
            answers[job.job_id] = NotClaimed(lease.reason, evicting=lease.evicting)
    _take_ownership(conn, by, [job for job in free if job.job_id not in answers], granted, answers)
    return answers


def _why_not(
    conn: Connection, by: Claimant, job_ids: Sequence[str], held: Collection[str]
) -> dict[str, Claim | NotClaimed]:
    """Why these jobs are not free. Strays are handed back; those that are free then get no answer here."""
    rows = ownership.lock(conn, job_ids)
    strays = [row for row in rows.values() if _is_stray(row, by, held)]
    if strays:
        _hand_back_strays(conn, by, strays)
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


def _hand_back_strays(conn: Connection, by: Claimant, strays: Sequence[Ownership]) -> None:
    """No slot has heard of them: a lease of their own is free, a warm model's has its model in memory as before."""
    lost = "the answer to its claim was lost"
    ends = [never_started(row.job_id, row.attempt, lost) for row in strays]
    record(conn, by, [], ends, RetryPolicy(0, 0, 0))


def _request(by: Claimant, job: _Offered, memory_for: Callable[[str], int | None]) -> LeaseRequest | None:
    """The lease that a job needs; None for one that needs no GPU memory."""
    memory = job.min_memory_mb if job.min_memory_mb is not None else memory_for(job.type)
    if not memory:
        return None
    return LeaseRequest(
        agent=job.agent,
        memory_mb=memory,
        ttl_s=by.lease_ttl_s,
        gpu_count=job.gpu_count,
        cpu_fallback=bool(job.cpu_fallback),
        node_id=by.node_id,
        job_id=job.job_id,
        attempt=job.attempt + 1,
        worker_id=by.worker_id,
        model_id=job.model_id,
    )


def _under_warm_models(
    conn: Connection,
    by: Claimant,
    offered: Sequence[_Offered],
    requests: Mapping[str, LeaseRequest],
    warm: Sequence[ResidentSlot],
) -> dict[str, Granted]:
    """Jobs whose model is in memory already run under its lease, one at a time."""
    reserved = gpus.reservations(conn) if warm else {}
    idle = list(warm)
    taken: dict[str, Granted] = {}
    for job in offered if idle else ():
        request = requests.get(job.job_id)
        fitting = [slot for slot in idle if request and _serves(slot, job, request, reserved)]
        slot = next((slot for slot in fitting if residency.occupy(conn, slot, job.job_id, by.worker_id)), None)
        if request and slot:
            idle.remove(slot)
            expires = datetime.max  # noqa: DTZ901 - its worker renews it, whatever stands in the row now
            taken[job.job_id] = Granted(request, "gpu", by.node_id, slot.gpus, expires, resident=slot.key)
    return taken


def _serves(slot: ResidentSlot, job: _Offered, request: LeaseRequest, reserved: Mapping[str, str]) -> bool:
    """Not while its GPU is kept for another job: a stream of jobs for this model would never let it become idle."""
    same_model = (slot.type, slot.model_id) == (job.type, job.model_id)
    large_enough = slot.memory_mb >= request.memory_mb and len(slot.gpus) == request.gpu_count
    return same_model and large_enough and all(reserved.get(gpu.gpu_uuid) in (None, job.job_id) for gpu in slot.gpus)


def _lease_all(
    conn: Connection, by: Claimant, requests: Sequence[LeaseRequest], blank: int | None
) -> dict[str, Granted | Denied]:
    """New leases, for as many jobs as there are slots without a model in memory. The others may do without a GPU."""
    room = len(requests) if blank is None else min(blank, len(requests))
    answers = grants.grant(conn, requests[:room], by.terms, by.node_id) if room else []
    answers += grants.grant_cpu(conn, [one for one in requests[room:] if one.cpu_fallback], by.node_id)
    granted: dict[str, Granted | Denied] = dict.fromkeys(
        (str(request.job_id) for request in requests),
        Denied(NO_BLANK_SLOT, Reason.NO_MEMORY, ELSEWHERE_S, evicting=True),
    )
    asked = [*requests[:room], *[one for one in requests[room:] if one.cpu_fallback]]
    return granted | {str(request.job_id): answer for request, answer in zip(asked, answers, strict=True)}


def _take_ownership(
    conn: Connection,
    by: Claimant,
    rows: Sequence[_Offered],
    granted: Mapping[str, Granted | Denied],
    answers: dict[str, Claim | NotClaimed],
) -> None:
    groups: dict[tuple[bool, str | None], list[_Offered]] = {}
    for job in rows:
        lease = granted.get(job.job_id)
        kind = (True, lease.resident) if isinstance(lease, Granted) else (False, None)
        groups.setdefault(kind, []).append(job)
    for (leased, resident), group in groups.items():
        how: dict[str, Any] = {"lease_token": resident} if resident else {"leased": leased}
        for attempt, ids in by_attempt(group):
            moved = move(conn, job_rules.CLAIM, attempt, ids, worker_id=by.worker_id, owner_pool=by.pool_id, **how)
            assert moved == len(ids), "rows are locked, nobody else can have moved them"
    events = []
    for row in rows:
        lease = granted.get(row.job_id)
        own = lease if isinstance(lease, Granted) else None
        claimed = _claim_of(row, row.attempt + 1, own)
        answers[row.job_id] = claimed
        events.append(job_event(job_rules.CLAIM, claimed.job_id, claimed.attempt, by, _lease_details(own)))
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


def _patience(conn: Connection, by: Claimant, job: _Offered, request: LeaseRequest, denied: Denied) -> float:
    """Seconds until a denied job is offered again: the longer it has waited, the more.

    Otherwise a crowd of jobs that do not fit would keep all others from being offered at all. One that no GPU of
    the cluster could take waits longest; a larger GPU may join one day.
    """
    if denied.evicting:
        pause = denied.retry_after_s
    elif request.memory_mb > gpus.largest_usable_mb(conn):
        pause = min(max(HOPELESS_S, job.age_s), MAX_HOPELESS_S)
    elif _fits_elsewhere(conn, by, request):
        pause = ELSEWHERE_S
    elif job.age_s >= by.terms.starvation_s and _reserved(conn, by, request):
        pause = RESERVED_RETRY_S
    else:
        pause = min(max(denied.retry_after_s, job.age_s / 10), MAX_PATIENCE_S)
    return pause * random.uniform(0.8, 1.2)


def _fits_elsewhere(conn: Connection, by: Claimant, request: LeaseRequest) -> bool:
    """Whether another node that serves this lane has room: a worker there should get the job soon, not later."""
    ask = replace(request, node_id=None).ask()
    choice = grants.snapshot(conn, by.terms).place(ask, by.terms.policy, by.terms.recent.mix())
    return isinstance(choice, Placed) and nodes.serves(conn, choice.gpus[0].node_id, by.pool_id)


def _reserved(conn: Connection, by: Claimant, request: LeaseRequest) -> bool:
    """Keep GPUs for a job that has starved; they take nothing else until it got its room.

    They are of one node. Whichever worker is offered the job, it goes on keeping them, while they could still hold it
    and somebody there would run it; otherwise it keeps some of its own node instead.
    """
    ask = request.ask()
    before = {uuid for uuid, key in gpus.reservations(conn).items() if key == ask.key}
    if before:
        kept = reservation(_for_reservation(conn, by, None, before), ask._replace(node_id=None))
        if kept and nodes.serves(conn, kept[0].node_id, by.pool_id):
            return gpus.reserve(conn, [view.gpu_uuid for view in kept], ask.key, RESERVED_S)
        gpus.unreserve(conn, before, ask.key)
    chosen = reservation(_for_reservation(conn, by, by.node_id), ask) or ()
    return bool(chosen) and gpus.reserve(conn, [view.gpu_uuid for view in chosen], ask.key, RESERVED_S)


def _for_reservation(
    conn: Connection, by: Claimant, node_id: str | None, uuids: Collection[str] | None = None
) -> Cluster:
    """The GPUs, or these of them, as reservations must see them."""
    views = [view for view in gpus.views(conn, by.terms.stale_s, node_id) if uuids is None or view.gpu_uuid in uuids]
    pinned = {node: residency.pinned_mb(conn, node) for node in {view.node_id for view in views}}
    return Cluster(_unmovable(view, pinned[view.node_id]) for view in views)


def _unmovable(view: GpuView, pinned: Mapping[str, int]) -> GpuView:
    """What pinned models lease does not go away, like what foreign processes hold."""
    held = pinned.get(view.gpu_uuid, 0)
    return view._replace(leased_mb=max(view.leased_mb - held, 0), foreign_mb=view.foreign_mb + held)


def _defer(conn: Connection, row: _Offered, reason: str, delay_s: float) -> None:
    """Pending → pending, later: nobody's fault, no attempt charged; the reason is shown as `wait_reason`."""
    move(conn, job_rules.DEFER, row.attempt, [row.job_id], wait_reason=reason[:255], delay_s=delay_s)
