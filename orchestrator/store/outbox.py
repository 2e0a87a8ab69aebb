"""Which jobs go into a stream next: the row decides, the stream entry only announces it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Float, bindparam, func, select, update

from orchestrator.gates import AGENT, CAPACITY, FOR_PLACE, FOR_UNITS, QUIET, UNTIL_QUIET
from orchestrator.jobs import Queued, Ready
from orchestrator.policies import Book
from orchestrator.store import lanes, ownership, pools
from orchestrator.store.caps import NO_BOOK, Glance
from orchestrator.store.clock import is_old
from orchestrator.store.dialect import by_key, utc_now, utc_shift, walking
from orchestrator.store.hot import Hot
from orchestrator.store.moves import LATEST_START
from orchestrator.store.schema import ACTIVE, gate_holds, jobs, workers

#: How often one transaction looks for more, after jobs whose caps are full were parked.
MAX_LOOKS = 16

_ENTRY = (jobs.c.job_id, jobs.c.type, jobs.c.trace_context, jobs.c.rank, jobs.c.priority)
#: What caps need to know of a job: read only where there are any.
_KEYED = (*_ENTRY, jobs.c.agent, jobs.c.model_id, jobs.c.concurrency_keys)


class _Next(NamedTuple):
    job_id: str
    type: str
    trace_context: str | None
    rank: int
    priority: int
    agent: str = ""
    model_id: str | None = None
    concurrency_keys: str | None = None


def _ready(columns: Sequence[ColumnElement[Any]]) -> Hot:
    return Hot(
        lambda _ids: (
            select(*columns)
            .where(jobs.c.lane == bindparam("of_lane"), jobs.c.queued == Queued.READY)
            .order_by(jobs.c.rank)
            .limit(bindparam("most"))
            .with_for_update(skip_locked=True)
        )
    )


def _urgent(columns: Sequence[ColumnElement[Any]]) -> Hot:
    return Hot(
        lambda _ids: (
            walking(select(*columns), jobs, "ix_jobs_start_by")
            .where(
                jobs.c.lane == bindparam("of_lane"),
                jobs.c.start_by <= utc_shift(bindparam("horizon_s", type_=Float)),
                jobs.c.queued == Queued.READY,
            )
            .order_by(jobs.c.start_by)
            .limit(bindparam("most"))
            .with_for_update(skip_locked=True)
        )
    )


_READY = {keyed: _ready(_KEYED if keyed else _ENTRY) for keyed in (False, True)}
_URGENT = {keyed: _urgent(_KEYED if keyed else _ENTRY) for keyed in (False, True)}
_ANNOUNCE = Hot(
    lambda ids: (
        by_key(update(jobs))
        .where(jobs.c.job_id.in_(ids), jobs.c.queued == Queued.READY)
        .values(queued=Queued.ANNOUNCED, published_at=utc_now())
    )
)


class Urgent(NamedTuple):
    """Jobs whose latest start is at most `horizon_s` away go first, up to `places` of them."""

    places: int
    horizon_s: float


def take(
    conn: Connection, lane: str, limit: int, urgent: Urgent | None = None, caps: Glance | None = None
) -> list[Ready]:
    """Ready → announced for the next `limit` jobs of a lane, in order of rank. Two takers never get the same job.

    Those that are taken for their deadline jump ahead: what they overtook has not been served, so the clock stays.
    Those whose caps are full are parked, and others take their place.
    """
    if caps is None or not caps.book.limits:
        return _announce(conn, lane, *_find(conn, lane, limit, urgent))
    return [] if caps.book.closed(lane) else _take_seated(conn, lane, limit, urgent, caps)


def _take_seated(conn: Connection, lane: str, limit: int, urgent: Urgent | None, caps: Glance) -> list[Ready]:
    taken: list[Ready] = []
    for _ in range(MAX_LOOKS):
        asked = limit - len(taken)
        early, ranked = _find(conn, lane, asked, urgent, keyed=True)
        found = [*early, *ranked]
        seated = caps.seated(lane, found) if found else set()
        taken += _announce(conn, lane, *([job for job in some if job.job_id in seated] for some in (early, ranked)))
        if (len(found) < asked and lane not in caps.freed) or len(taken) >= limit:
            break
        caps.freed.discard(lane)
        urgent = None  # they were announced or parked
    else:
        caps.freed.add(lane)
    return taken


def _find(
    conn: Connection, lane: str, limit: int, urgent: Urgent | None, *, keyed: bool = False
) -> tuple[list[_Next], list[_Next]]:
    """Those whose deadline is near, and the first of the others; locked."""
    near = _URGENT[keyed].rows(conn, of_lane=lane, horizon_s=urgent.horizon_s, most=urgent.places) if urgent else []
    early = [_Next(*row) for row in near]
    known = {job.job_id for job in early}
    ranked = [_Next(*row) for row in _READY[keyed].rows(conn, of_lane=lane, most=limit)]
    return early, [job for job in ranked if job.job_id not in known][: limit - len(early)]


def _announce(conn: Connection, lane: str, early: Sequence[_Next], ranked: Sequence[_Next]) -> list[Ready]:
    chosen = [Ready(job.job_id, job.type, job.trace_context, urgent=True) for job in early]
    chosen += [Ready(job.job_id, job.type, job.trace_context) for job in ranked]
    if chosen:
        _ANNOUNCE.run(conn, [job.job_id for job in chosen])
        lanes.advance(conn, lane, [(job.rank, job.priority) for job in ranked])
    return chosen


_DELAYED = select(
    jobs.c.job_id, jobs.c.constraints, jobs.c.cost_units, jobs.c.agent, jobs.c.attempt, jobs.c.wait_reason
).where(jobs.c.queued == Queued.DELAYED)
DELAYED_AND_DUE = _DELAYED.where(jobs.c.not_before <= utc_now())


def promote_due(conn: Connection, limit: int, book: Book = NO_BOOK) -> int:
    """Delayed → ready for jobs whose time has come.

    Those that want quiet, units that they do not hold yet, or a place among their agent's jobs that they were not given
    when they were submitted, wait for the leader's gates then.
    """
    soonest = DELAYED_AND_DUE.order_by(jobs.c.not_before).limit(limit)
    due = conn.execute(soonest.with_for_update(skip_locked=True)).all()
    _let_go(conn, due, book)
    return len(due)


def promote_early(conn: Connection, job_ids: Sequence[str], book: Book = NO_BOOK) -> None:
    """The same for jobs that a claim put off, before their time: somebody else has come who could take them."""
    early = by_key(_DELAYED, jobs).where(jobs.c.job_id.in_(job_ids), jobs.c.wait_reason.is_not(None))
    _let_go(conn, conn.execute(early.with_for_update(skip_locked=True)).all(), book)


def _let_go(conn: Connection, due: Sequence[Any], book: Book) -> None:
    gates = {row.job_id: gates for row in due if (gates := _gates(row, book))}
    held = _held(conn, gates)
    waiting: dict[str, list[str]] = defaultdict(list)
    for job_id, before in gates.items():
        if first := next((gate for gate in before if (gate, job_id) not in held), None):
            waiting[first].append(job_id)
    kept = {job_id for job_ids in waiting.values() for job_id in job_ids}
    _promote(conn, [row.job_id for row in due if row.job_id not in kept], Queued.READY)
    for gate, job_ids in sorted(waiting.items()):
        _promote(conn, job_ids, Queued.BLOCKED, blocked_on=gate, wait_reason=_REASONS.get(gate, FOR_PLACE))


_REASONS = {QUIET: UNTIL_QUIET, CAPACITY: FOR_UNITS}


def _gates(job: Any, book: Book) -> list[str]:
    """What a job that is due waits for, in order, unless it has that already. Quiet is never had: it is so or not."""
    agent = book.agent(job.agent)
    # Whoever was tried or put off before has passed there.
    new = not job.attempt and job.wait_reason is None
    limited = [f"{AGENT}{job.agent}"] if new and agent.limits and agent.action == "queue" else []
    if job.constraints:
        return [*limited, QUIET]
    return [*limited, CAPACITY] if job.cost_units and book.admission.capacity else limited


def _held(conn: Connection, gates: Mapping[str, Collection[str]]) -> set[tuple[str, str]]:
    """By gate and job, what these hold already."""
    names = {gate for before in gates.values() for gate in before} - {QUIET}
    if not names:
        return set()
    held = select(gate_holds.c.gate, gate_holds.c.job_id).where(
        gate_holds.c.gate.in_(sorted(names)), gate_holds.c.job_id.in_(sorted(gates))
    )
    return {(row.gate, row.job_id) for row in conn.execute(held)}


def _promote(conn: Connection, job_ids: Sequence[str], queued: Queued, **values: str) -> None:
    ready = {"start_by": LATEST_START, "ready_at": utc_now()} if queued is Queued.READY else {"start_by": None}
    if job_ids:
        conn.execute(
            by_key(update(jobs))
            .where(jobs.c.job_id.in_(job_ids), jobs.c.queued == Queued.DELAYED)
            .values(queued=queued, not_before=None, **ready, **values)
        )


def announced(conn: Connection, lane: str, older_than_s: float, limit: int) -> list[str]:
    """Jobs of a lane that were announced a while ago and nobody has claimed: their entries should exist."""
    rows = conn.execute(
        select(jobs.c.job_id)
        .where(
            jobs.c.lane == lane,
            jobs.c.queued == Queued.ANNOUNCED,
            is_old(jobs.c.published_at, older_than_s),
        )
        .order_by(jobs.c.rank)
        .limit(limit)
    )
    return list(rows.scalars())


def unpublish(conn: Connection, job_ids: Sequence[str], older_than_s: float = 0.0) -> int:
    """Announced → ready, unless somebody announced them anew or claimed them meanwhile."""
    if not job_ids:
        return 0
    return conn.execute(
        by_key(update(jobs))
        .where(
            jobs.c.job_id.in_(job_ids),
            jobs.c.queued == Queued.ANNOUNCED,
            is_old(jobs.c.published_at, older_than_s),
        )
        .values(queued=Queued.READY, published_at=None, ready_at=utc_now())
    ).rowcount


def unpublish_unheld(conn: Connection, job_ids: Sequence[str], older_than_s: float = 0.0) -> int:
    """The same, without those whose rows somebody holds: nobody waits for them, and the leader comes again."""
    return unpublish(conn, ownership.lock_unheld(conn, job_ids), older_than_s)


def live_slots(conn: Connection, lane: str) -> int | None:
    """Slots of the workers that read this lane, HTTP workers do not; None when its pool takes no jobs."""
    if not pools.takes_jobs(conn, lane):
        return None
    total = conn.execute(
        select(func.sum(workers.c.slots)).where(
            workers.c.pool_id == lane, workers.c.status == ACTIVE, workers.c.kind == "process"
        )
    ).scalar()
    return int(total or 0)
