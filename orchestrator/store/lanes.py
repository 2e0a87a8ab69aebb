"""Lanes: which there are, where jobs wait, how far each came; and forgetting those that nobody uses.

Any client makes a lane by naming it, so nothing that comes often may look at all of them. Whoever has work to find asks
for the lanes that workers serve (`served`) and for a few of the others at a time (`some`): a job that nobody could take
is in no hurry.

A lane's row is a clock, and says that there may be jobs; the jobs are the truth. Whoever makes a job wait sees to it
that its lane has a row. A submit does so without a lock, which would make it wait for every announcement in the lane:
when the row is forgotten beneath it, the job's announcement brings it back (`advance`).

Clocks never go back, also not those of lanes that were forgotten: their ended jobs may be started over, and would stand
behind everybody who came since. A reserved row has the furthest of those clocks, and new lanes begin there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    bindparam,
    delete,
    literal,
    or_,
    select,
    union,
    update,
)

from orchestrator.jobs import DEFAULT_LANE, OWNED, Queued
from orchestrator.pools import CLOSED
from orchestrator.ranking import reached
from orchestrator.store.dialect import by_key, clock, largest, upsert, utc_now, walking
from orchestrator.store.hot import Hot, insert_rows
from orchestrator.store.schema import LIVE_WORKERS, jobs, lane_accounts, lanes, worker_pools, workers

#: The clock at which new lanes begin. No lane's name, since those have no parentheses.
FORGOTTEN = "(forgotten)"
#: Lanes that nobody serves, of which one look sees to.
SOME = 100
#: Accounts that one transaction deletes at most: agents, too, are named by clients.
ACCOUNTS = 500


class Look(NamedTuple):
    """Lanes that were found, and the name behind which the next look begins: nothing when it was at the end."""

    found: list[str]
    after: str


# ── where jobs wait ─────────────────────────────────────────────────────────────────────────────────────────────────


def has(lane: ColumnElement[str], *queued: Queued) -> ColumnElement[bool]:
    """Whether a job of the lane that a row names waits like that: one look into the index, whatever the backlog.

    Neither EXISTS nor IN: the planner would turn one round, and walk over a lane's history for the other.
    """
    return or_(*[_first(lane, state).is_not(None) for state in queued])


def _first(lane: ColumnElement[str], queued: Queued) -> ColumnElement[str]:
    first = walking(select(jobs.c.queued), jobs, "ix_jobs_queue").where(jobs.c.lane == lane, jobs.c.queued == queued)
    return first.limit(1).correlate_except(jobs).scalar_subquery()


def served(conn: Connection, *queued: Queued) -> list[str]:
    """The default lane and those with live workers; if said, only those in which a job waits like that."""
    staffed = select(workers.c.pool_id.label("lane")).where(workers.c.status.in_(LIVE_WORKERS))
    known = union(staffed, select(literal(DEFAULT_LANE))).subquery()
    found = select(known.c.lane).where(*[has(known.c.lane, *queued)] if queued else [])
    return sorted(conn.execute(found).scalars())


def waiting(conn: Connection, among: Collection[str], *queued: Queued) -> list[str]:
    """Of these lanes, those in which a job waits like that."""
    found = select(lanes.c.lane).where(lanes.c.lane.in_(sorted(among)), has(lanes.c.lane, *queued))
    return sorted(conn.execute(found).scalars())


def some(conn: Connection, after: str, *queued: Queued) -> Look:
    """Of the next `SOME` lanes, by name, those in which a job waits like that."""
    return _look(conn, after, has(lanes.c.lane, *queued))


def _look(conn: Connection, after: str, wanted: ColumnElement[bool]) -> Look:
    page = select(lanes.c.lane, wanted.label("wanted")).where(lanes.c.lane > after).order_by(lanes.c.lane).limit(SOME)
    rows = conn.execute(by_key(page, lanes)).all()
    return Look([row.lane for row in rows if row.wanted], rows[-1].lane if len(rows) == SOME else "")


# ── their clocks ────────────────────────────────────────────────────────────────────────────────────────────────────


_CLOCKS = Hot(lambda names: select(lanes.c.lane, lanes.c.virtual_time, utc_now()).where(lanes.c.lane.in_(names)))
_ADVANCE = Hot(
    lambda _ids: (
        update(lanes)
        .where(lanes.c.lane == bindparam("of_lane"))
        .values(virtual_time=largest(lanes.c.virtual_time, bindparam("reached", type_=BigInteger)))
    )
)


def clocks(conn: Connection, names: Collection[str]) -> tuple[datetime, dict[str, int]]:
    """What time it is, for everybody and in service of these lanes; those that had no job yet are remembered."""
    found = _CLOCKS.rows(conn, [FORGOTTEN, *sorted(names)])
    virtual_times = {lane: time for lane, time, _ in found}
    begin = virtual_times.pop(FORGOTTEN, 0)
    if new := sorted(set(names) - virtual_times.keys()):
        insert_rows(conn, lanes, [{"lane": name, "virtual_time": begin} for name in new])
        virtual_times |= dict.fromkeys(new, begin)
    now: datetime = found[0][2] if found else clock(conn)
    return now, virtual_times


def advance(conn: Connection, lane: str, ranked: Sequence[tuple[int, int]]) -> None:
    """The lane's clock goes on to these ranks with their priorities: they are announced, or claimed without that."""
    if ranked:
        furthest = max(reached(*one) for one in ranked)
        if not _ADVANCE.run(conn, of_lane=lane, reached=furthest):
            _reach(conn, {lane: furthest})


def remember(conn: Connection, names: Collection[str]) -> None:
    """Ended jobs of these lanes wait again: those that were forgotten have rows again, and no other is meanwhile."""
    forgettable = sorted({*names} - {DEFAULT_LANE})
    if not forgettable:
        return
    begin = conn.execute(select(lanes.c.virtual_time).where(lanes.c.lane == FORGOTTEN)).scalar() or 0
    rows = [{"lane": name, "virtual_time": begin} for name in forgettable]
    upsert(conn, lanes, rows, lambda _new: {"virtual_time": lanes.c.virtual_time})  # locked, and as it is


def _reach(conn: Connection, times: dict[str, int]) -> None:
    """These clocks have come so far, at least; the lanes have rows from now on."""
    rows = [{"lane": lane, "virtual_time": time} for lane, time in sorted(times.items())]
    upsert(conn, lanes, rows, lambda new: {"virtual_time": largest(lanes.c.virtual_time, new.virtual_time)})


# ── forgetting ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_known(lane: ColumnElement[str]) -> ColumnElement[bool]:
    """It has a pool that is not over, or a worker that is remembered still: that is for days after its end."""
    pool = select(worker_pools.c.pool_id).where(worker_pools.c.pool_id == lane, worker_pools.c.status.not_in(CLOSED))
    worker = select(workers.c.pool_id).where(workers.c.pool_id == lane).limit(1)
    return or_(
        pool.correlate_except(worker_pools).scalar_subquery().is_not(None),
        worker.correlate_except(workers).scalar_subquery().is_not(None),
    )


#: No job of it waits, nobody serves it, and it is nobody's; whether a job runs is asked once for all (`_busy`).
_UNUSED = ~has(lanes.c.lane, *Queued) & ~_is_known(lanes.c.lane) & lanes.c.lane.not_in([DEFAULT_LANE, FORGOTTEN])


def unused(conn: Connection, after: str) -> Look:
    """Of the next lanes those that nobody seems to use."""
    return _look(conn, after, _UNUSED)


def lock_unused(conn: Connection, names: Sequence[str]) -> list[str]:
    """Those of these that nobody uses, and of which nobody announces a job until this transaction ends."""
    mine = by_key(select(lanes.c.lane), lanes).where(lanes.c.lane.in_(names))
    locked = list(conn.execute(mine.with_for_update(skip_locked=True)).scalars())
    _lock_accounts(conn, locked)
    # Asked only now: whoever submitted there has committed what it did.
    idle = by_key(select(lanes.c.lane), lanes).where(lanes.c.lane.in_(locked), _UNUSED)
    return sorted({*conn.execute(idle).scalars()} - _busy(conn, locked))


def _lock_accounts(conn: Connection, names: Sequence[str]) -> Sequence[Row[Any]]:
    key = lane_accounts.c.lane, lane_accounts.c.agent
    mine = by_key(select(*key, lane_accounts.c.last_rank), lane_accounts).where(key[0].in_(names))
    return conn.execute(mine.order_by(*key).limit(ACCOUNTS).with_for_update()).all()


def _busy(conn: Connection, names: Sequence[str]) -> set[str]:
    owned = select(jobs.c.lane).where(jobs.c.status.in_(sorted(OWNED)), jobs.c.lane.in_(names)).distinct()
    return {*conn.execute(walking(owned, jobs, "ix_jobs_status")).scalars()}


def forget(conn: Connection, names: Sequence[str]) -> int:
    """Delete lanes that are locked, with their accounts; how many. One with too many of those goes another time."""
    if not names:
        return 0
    charged, account = _lock_accounts(conn, names), lane_accounts.c
    times = conn.execute(select(lanes.c.virtual_time).where(lanes.c.lane.in_(names))).scalars()
    furthest = max(*times, *(row.last_rank for row in charged), 0)
    if len(charged) < ACCOUNTS:
        conn.execute(delete(lane_accounts).where(account.lane.in_(names)))
        _reach(conn, {FORGOTTEN: furthest})
        return conn.execute(delete(lanes).where(lanes.c.lane.in_(names))).rowcount
    last = charged[-1]
    conn.execute(delete(lane_accounts).where(account.lane.in_(names), account.lane < last.lane))
    conn.execute(delete(lane_accounts).where(account.lane == last.lane, account.agent <= last.agent))
    _reach(conn, {FORGOTTEN: furthest, last.lane: furthest})
    return conn.execute(delete(lanes).where(lanes.c.lane.in_(names), lanes.c.lane < last.lane)).rowcount
