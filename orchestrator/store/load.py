"""What is asked of one lane, as `scaling` needs it: read from rows, so that every instance says the same.

The cost does not grow with the backlog: what is counted is counted up to `MOST_COUNTED`, and of what ended only the
jobs at the head of the lane's order are looked at.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Select, case, func, select

from orchestrator import ranking
from orchestrator.errors import LaneNotFound
from orchestrator.jobs import DEFAULT_LANE, DUE, OWNED, Queued, Status
from orchestrator.pools import OPEN
from orchestrator.scaling import LATELY_S, Load
from orchestrator.store.backlog import counted, soonest
from orchestrator.store.dialect import seconds_since, utc_shift, walking
from orchestrator.store.schema import ACTIVE, LIVE_WORKERS, jobs, lanes, worker_pools, workers

#: Jobs of one kind that are counted. More make no difference to an autoscaler, which has a maximum of its own.
MOST_COUNTED = 5000
#: Waiting jobs that are asked for their age: those at the head, which are about the oldest.
MOST_ASKED = 256
#: Jobs, from the head of the lane's order backwards, among which those that ended lately are looked for.
MOST_ENDED = 1000
#: Ends that somebody waited for. A job that was cancelled took as long as its client's patience.
_SERVED = (Status.DONE, Status.SKIPPED, Status.FAILED, Status.DEAD_LETTER)
#: Between the lane's clock and the rank of the last job that ran: LOW ones rank behind it.
_BEYOND_THE_CLOCK = -ranking.head_start(ranking.PRIORITY_NAMES["LOW"])


def of_lane(conn: Connection, lane: str, usual_slots: int, most: int = MOST_COUNTED) -> Load:
    """What is asked of the lane now; `usual_slots` has a worker of one that nobody serves.

    Raises LaneNotFound: of a name that nobody is known to have used it cannot be said that it needs no workers.
    """
    pool = conn.execute(select(worker_pools).where(worker_pools.c.pool_id == lane)).one_or_none()
    staff = _staff(conn, lane)
    clock = conn.execute(select(lanes.c.virtual_time).where(lanes.c.lane == lane)).scalar()
    if pool is None and clock is None and not staff.known and lane != DEFAULT_LANE and not _had_jobs(conn, lane):
        raise LaneNotFound(lane)
    found = conn.execute(_counts(lane, most)).one()
    *numbers, deferred_s = found
    waiting, running, busy, delayed, blocked, soon, deferred = (min(int(number or 0), most) for number in numbers)
    if soon == most:
        deferred = delayed  # which of them nobody can say without counting on: each may be one that could run
    return Load(
        waiting=waiting + deferred,
        running=running,
        delayed=max(delayed - deferred, 0),
        blocked=blocked,
        oldest_wait_s=max(_oldest_wait_s(conn, lane), float(deferred_s or 0.0)),
        mean_latency_s=None if clock is None else _mean_latency_s(conn, lane, clock),
        workers=int(staff.active or 0),
        busy_workers=busy,
        draining=int(staff.draining or 0),
        slots=float(staff.slots or (pool.slots if pool else usual_slots)),
        minimum=pool.min_workers if pool else 0,
        maximum=pool.max_workers if pool else None,
        open=pool is None or pool.status in OPEN,
        at_least=most in (waiting, running, delayed, blocked, soon),
    )


def _had_jobs(conn: Connection, lane: str) -> bool:
    """The lane itself may be forgotten before its jobs are."""
    job = walking(select(jobs.c.lane), jobs, "ix_jobs_queue").where(jobs.c.lane == lane)
    return conn.execute(job.limit(1)).first() is not None


def _staff(conn: Connection, lane: str) -> Any:
    """Who serves the lane, and whether anybody did lately: workers are forgotten some days after their end."""
    active = workers.c.status == ACTIVE
    anybody = select(workers.c.pool_id).where(workers.c.pool_id == lane).limit(1).subquery()
    query = select(
        select(func.count()).select_from(anybody).scalar_subquery().label("known"),
        func.sum(case((active, 1), else_=0)).label("active"),
        func.sum(case((active, 0), else_=1)).label("draining"),
        func.avg(case((workers.c.slots > 0, workers.c.slots))).label("slots"),
    )
    return conn.execute(query.where(workers.c.pool_id == lane, workers.c.status.in_(LIVE_WORKERS))).one()


def _counts(lane: str, most: int) -> Select[*tuple[Any, ...]]:
    """Waiting, running, who runs them, delayed, blocked; due soon in all lanes; deferred in this one, and an age.

    Who is busy is told by the jobs and not by heartbeats, which are some seconds late: long enough for an autoscaler to
    end a worker that has just begun, or to keep one for a job that is over. Those due soon are of all lanes, since
    their order is that of time.
    """
    here = jobs.c.lane == lane
    owned = here & jobs.c.status.in_(sorted(OWNED))
    later = soonest(most)
    mine = (later.c.lane == lane) & (later.c.deferred == 1)
    return select(
        counted("ix_jobs_queue", most, here, jobs.c.queued.in_(DUE)),
        counted("ix_jobs_status", most, owned),
        _owners(most, owned),
        counted("ix_jobs_queue", most, here, jobs.c.queued == Queued.DELAYED),
        counted("ix_jobs_queue", most, here, jobs.c.queued == Queued.BLOCKED),
        func.sum(later.c.soon),
        func.sum(case((mine, 1), else_=0)),
        func.max(case((mine, later.c.age_s))),
    ).select_from(later)


def _owners(most: int, owned: ColumnElement[bool]) -> ScalarSelect[int]:
    """Workers that take jobs and have some of these; those that leave are none to keep."""
    some = walking(select(jobs.c.worker_id).where(owned).limit(most), jobs, "ix_jobs_status").subquery()
    theirs = some.join(workers, workers.c.worker_id == some.c.worker_id)
    count = select(func.count(some.c.worker_id.distinct())).select_from(theirs)
    return count.where(workers.c.status == ACTIVE).scalar_subquery()


def _oldest_wait_s(conn: Connection, lane: str) -> float:
    waiting = (jobs.c.lane == lane, jobs.c.queued.in_(DUE))
    some = select(seconds_since(jobs.c.created_at).label("age_s")).where(*waiting).limit(MOST_ASKED)
    head = walking(some, jobs, "ix_jobs_queue").subquery()
    return max(float(conn.execute(select(func.max(head.c.age_s))).scalar() or 0.0), 0.0)


def _mean_latency_s(conn: Connection, lane: str, clock: int) -> float | None:
    """Submit to end, of what ended lately; None when nothing did.

    No index has a lane's jobs by their end, and none is worth a write for every job. But those that are owned or over
    stand in the lane's order without a place in the queue, and jobs start in that order: the last that ended are near
    the lane's clock. What was cancelled before its turn ranks beyond it.
    """
    over = select(jobs.c.status, jobs.c.finished_at, seconds_since(jobs.c.created_at).label("age_s"))
    started = over.add_columns(seconds_since(jobs.c.finished_at).label("ended_s")).where(
        jobs.c.lane == lane, jobs.c.queued.is_(None), jobs.c.rank <= clock + _BEYOND_THE_CLOCK
    )
    last = walking(started.order_by(jobs.c.rank.desc()).limit(MOST_ENDED), jobs, "ix_jobs_queue").subquery()
    lately = (last.c.finished_at > utc_shift(-LATELY_S), last.c.status.in_(_SERVED))
    mean = conn.execute(select(func.avg(last.c.age_s - last.c.ended_s)).where(*lately)).scalar()
    return None if mean is None else max(float(mean), 0.0)
