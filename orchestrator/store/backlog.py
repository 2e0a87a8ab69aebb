"""How much waits and runs in each lane: counted along the index of the queue, and never by reading a row for each job.

A count still passes every entry of those that wait, so whoever asks often keeps what it found (`api.readings`),
or counts up to a bound (`counted`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    ScalarSelect,
    Subquery,
    bindparam,
    case,
    func,
    literal_column,
    or_,
    select,
    union_all,
)

from orchestrator.jobs import DUE, OWNED, Queued
from orchestrator.pools import OPEN
from orchestrator.store.dialect import largest, seconds_since, utc_now, utc_shift, walking
from orchestrator.store.hot import some_at_a_time
from orchestrator.store.lanes import FORGOTTEN
from orchestrator.store.patience import LONGEST_PAUSE_S
from orchestrator.store.schema import ACTIVE, jobs, lanes, spawns, worker_pools, workers, workflows
from orchestrator.workflows import FlowStatus

#: Lanes that one statement names: each is four ranges of the index.
MANY_LANES = 250
#: Jobs of a lane among which its oldest is looked for, in order of rank.
LOOK = 1000
#: Jobs of one kind that `left` counts: beyond that there are at least so many.
MOST_COUNTED = 10_000
#: Delayed jobs, the soonest of all lanes, among which those are looked for that a worker could take.
SOONEST = 5000


@dataclass
class Depth:
    """Jobs of a lane, by where they are."""

    ready: int = 0
    announced: int = 0
    #: Until they are due.
    delayed: int = 0
    #: Delayed as well, though they are due: no claim could have them, for want of memory say. They are offered again.
    deferred: int = 0
    blocked: int = 0
    #: Claimed or running.
    owned: int = 0
    #: Age since its submit of the oldest that is deferred.
    oldest_deferred_s: float = 0.0

    @property
    def due(self) -> int:
        """Those that a worker could take at once."""
        return self.ready + self.announced

    @property
    def work(self) -> int:
        """What there must be workers for."""
        return self.due + self.deferred + self.owned


def lanes_by_age(conn: Connection) -> list[str]:
    """Every lane that is remembered, the first first: the same order for everybody."""
    known = select(lanes.c.lane).where(lanes.c.lane != FORGOTTEN)
    return list(conn.execute(known.order_by(lanes.c.created_at, lanes.c.lane)).scalars())


def depths(conn: Connection, names: Sequence[str], look: int = SOONEST) -> dict[str, Depth]:
    """How many jobs of these lanes are where.

    What waits and what is owned come from one statement for each lane: between two, a job on its way is in neither.
    When more are due soon than are looked at, those that are deferred may be behind them: then all delayed ones count
    as such, since nobody may be told that nothing waits.
    """
    found = {name: Depth() for name in names}
    for some in some_at_a_time(names, MANY_LANES):
        soon_in_all = 0
        for lane, where, count, soon, age_s in conn.execute(_where(some, look)):
            soon_in_all += int(soon)
            if lane in some:
                setattr(found[lane], where, int(count))
                found[lane].oldest_deferred_s = max(found[lane].oldest_deferred_s, float(age_s))
        for depth in (found[name] for name in some):
            depth.deferred = depth.delayed if soon_in_all >= look else depth.deferred
            depth.delayed -= depth.deferred
    return found


def _where(names: Sequence[str], look: int) -> CompoundSelect[Any]:
    """Lane, where, how many; and of those that are deferred, how many of all the delayed are due soon, and an age."""
    here = jobs.c.lane.in_(names)
    nothing: list[ColumnElement[Any]] = [literal_column("0"), literal_column("0.0")]
    waiting = select(jobs.c.lane, jobs.c.queued, func.count(), *nothing).where(here, jobs.c.queued.in_([*Queued]))
    owned = select(jobs.c.lane, literal_column("'owned'"), func.count(), *nothing)
    owned = owned.where(here, jobs.c.status.in_(sorted(OWNED))).group_by(jobs.c.lane)
    later = soonest(look)
    age_s = func.max(case((later.c.deferred == 1, later.c.age_s), else_=0.0))
    deferred = select(later.c.lane, literal_column("'deferred'"), func.sum(later.c.deferred), func.sum(later.c.soon))
    return union_all(
        walking(waiting.group_by(jobs.c.lane, jobs.c.queued), jobs, "ix_jobs_queue"),
        walking(owned, jobs, "ix_jobs_status"),
        deferred.add_columns(age_s).group_by(later.c.lane),
    )


def soonest(most: int) -> Subquery:
    """The delayed jobs of all lanes that are due soonest: lane, whether a worker could take it all the same, its age.

    `deferred` are those that a claim put off, which alone gives a delayed job a reason to wait, and those that nobody
    has let go though they are due: perhaps nobody leads. `soon` are all whose time comes before a claim would usually
    have put one off for; when there are `most` of these, not all that are deferred may be here.
    """
    deferred = or_(jobs.c.wait_reason.is_not(None), jobs.c.not_before <= utc_now())
    columns = (
        jobs.c.lane,
        case((deferred, 1), else_=0).label("deferred"),
        case((jobs.c.not_before <= utc_shift(LONGEST_PAUSE_S), 1), else_=0).label("soon"),
        seconds_since(jobs.c.created_at).label("age_s"),
    )
    first = select(*columns).where(jobs.c.not_before.is_not(None)).order_by(jobs.c.not_before).limit(most)
    return walking(first, jobs, "ix_jobs_due").subquery()


def counted(index: str, most: int, *conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    """How many jobs there are, along an index, up to `most`.

    Several belong in one statement: between two, a job passes unseen from one to the other.
    """
    some = walking(select(jobs.c.lane).where(*conditions).limit(most), jobs, index).subquery()
    return select(func.count()).select_from(some).scalar_subquery()


@dataclass(frozen=True)
class Left:
    """What is left of a lane: jobs that may start, that wait for something, for a moment, and that are owned.

    `coming` are tasks that were added and are no jobs yet; of all lanes, since only their jobs will say in which each
    is. Each is counted up to `MOST_COUNTED`.
    """

    ready: int
    blocked: int
    delayed: int
    running: int
    coming: int = 0

    @property
    def waiting(self) -> int:
        return self.ready + self.blocked + self.delayed

    @property
    def total(self) -> int:
        return self.waiting + self.running + self.coming


def left(conn: Connection, lane: str, most: int = MOST_COUNTED) -> Left:
    here = jobs.c.lane == lane
    adding = spawns.join(workflows, workflows.c.workflow_id == spawns.c.workflow_id)
    coming = select(func.coalesce(func.sum(spawns.c.remaining), 0)).select_from(adding)
    found = select(
        counted("ix_jobs_queue", most, here, jobs.c.queued.in_(DUE)),
        counted("ix_jobs_queue", most, here, jobs.c.queued == Queued.BLOCKED),
        counted("ix_jobs_queue", most, here, jobs.c.queued == Queued.DELAYED),
        counted("ix_jobs_status", most, here, jobs.c.status.in_(sorted(OWNED))),
        coming.where(workflows.c.status == FlowStatus.RUNNING).scalar_subquery(),
    )
    return Left(*[min(int(number), most) for number in conn.execute(found).one()])


def oldest_s(conn: Connection, names: Sequence[str], look: int = LOOK) -> dict[str, float]:
    """Age since its submit of the oldest due job of each of these lanes, if it has any.

    Looked for among the first `look` that are ready, in order of rank, and among as many that are announced.
    """
    found = {}
    for name in names:
        ages = conn.execute(_OLDEST, {"of_lane": name, "look": look}).one()
        if known := [float(age) for age in ages if age is not None]:
            found[name] = max(0.0, *known)
    return found


def _oldest(queued: Queued) -> ScalarSelect[Any]:
    query = select(jobs.c.created_at).where(jobs.c.lane == bindparam("of_lane"), jobs.c.queued == queued)
    head = walking(query, jobs, "ix_jobs_queue").order_by(jobs.c.rank).limit(bindparam("look")).subquery()
    return select(func.max(seconds_since(head.c.created_at))).scalar_subquery()


_OLDEST = select(_oldest(Queued.READY), _oldest(Queued.ANNOUNCED))


def oldest_head_s(conn: Connection, but: Collection[str]) -> float:
    """The same of all lanes but these, looking only at the first job of each; 0 when none waits there."""

    def age(queued: Queued) -> ColumnElement[Any]:
        first = select(jobs.c.created_at).where(jobs.c.lane == lanes.c.lane, jobs.c.queued == queued)
        head = walking(first, jobs, "ix_jobs_queue").order_by(jobs.c.rank).limit(1)
        return func.max(seconds_since(head.correlate(lanes).scalar_subquery()))

    query = select(age(Queued.READY), age(Queued.ANNOUNCED)).select_from(lanes).where(lanes.c.lane.not_in(sorted(but)))
    return max(0.0, *[float(seconds or 0.0) for seconds in conn.execute(query).one()])


class Stuck(NamedTuple):
    """The first job of a lane that waits to be announced, and for how long it could have been."""

    job_id: str
    seconds: float


def listening(conn: Connection) -> dict[str, float]:
    """Lanes whose streams workers read, and for how many seconds somebody has; closed pools read nothing."""
    rows = conn.execute(
        select(workers.c.pool_id, func.max(seconds_since(workers.c.started_at)))
        .outerjoin(worker_pools, worker_pools.c.pool_id == workers.c.pool_id)
        .where(workers.c.status == ACTIVE, workers.c.kind == "process", workers.c.slots > 0)
        .where(or_(worker_pools.c.status.is_(None), worker_pools.c.status.in_(sorted(OPEN))))
        .group_by(workers.c.pool_id)
    )
    return {lane: max(float(seconds), 0.0) for lane, seconds in rows}


def stuck(conn: Connection, heard: dict[str, float], names: Collection[str]) -> dict[str, Stuck]:
    """Of these lanes, in which something is ready and nothing announced: what stands first, and for how long.

    No longer than somebody has listened, nor than since the last claim of a job that runs still: until then it went on.
    """
    found = {}
    for name in sorted(names):
        since = largest(
            jobs.c.created_at,
            func.coalesce(jobs.c.updated_at, jobs.c.created_at),
            func.coalesce(jobs.c.ready_at, jobs.c.created_at),
        )
        head = select(jobs.c.job_id, seconds_since(since)).where(jobs.c.lane == name, jobs.c.queued == Queued.READY)
        first = conn.execute(walking(head, jobs, "ix_jobs_queue").order_by(jobs.c.rank).limit(1)).one_or_none()
        if first is not None:
            found[name] = Stuck(first[0], max(0.0, min(float(first[1]), heard[name], _claimed_s(conn, name))))
    return found


def _claimed_s(conn: Connection, lane: str) -> float:
    owned = select(func.max(jobs.c.claimed_at)).where(jobs.c.status.in_(sorted(OWNED)), jobs.c.lane == lane)
    last = walking(owned, jobs, "ix_jobs_status").scalar_subquery()
    age = conn.execute(select(seconds_since(last))).scalar()
    return float("inf") if age is None else float(age)
