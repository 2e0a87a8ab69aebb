"""Stamps that a clock which was set back, or a failover to a server that is behind, left in the future.

What should be over some time after such a stamp would not be before the clock has come as far again: a dead worker
would count as alive, its GPUs as measured, a lease as renewed. The leader sets those stamps to now, and the usual times
follow: whoever lives writes its own long before they are over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, and_, literal, or_, select, true, update

from orchestrator.leases import LeaseState
from orchestrator.store.dialect import by_key, utc_shift
from orchestrator.store.hot import among
from orchestrator.store.schema import LIVE_WORKERS, gpus, leases, nodes, workers

#: Seconds by which a stamp may be ahead; what waits for it waits for so much longer at most.
AHEAD_S = 60.0


class _Stamp(NamedTuple):
    column: Column[Any]
    #: Of which rows.
    where: ColumnElement[bool] = true()
    #: By how many seconds it is ahead when it was written just now.
    lead_s: ColumnElement[Any] = literal(0.0)

    @property
    def wrong(self) -> ColumnElement[bool]:
        return and_(self.where, self.column > utc_shift(self.lead_s + AHEAD_S))


_STAMPS = (
    _Stamp(workers.c.last_heartbeat, among(workers.c.status, LIVE_WORKERS)),
    _Stamp(nodes.c.last_heartbeat),
    _Stamp(nodes.c.supervisor_seen_at),
    _Stamp(gpus.c.sampled_at),
    _Stamp(gpus.c.gate_closed_at),
    _Stamp(leases.c.expires_at, leases.c.state == LeaseState.ACTIVE, leases.c.ttl_seconds),
)
#: What `set_right` looks for.
AHEAD = tuple(select(stamp.column).where(stamp.wrong) for stamp in _STAMPS)


def is_old(stamp: ColumnElement[Any], seconds: float) -> ColumnElement[bool]:
    """Whether it is so old, or from a time that has not come."""
    return or_(stamp <= utc_shift(-seconds), stamp > utc_shift(AHEAD_S))


def set_right(conn: Connection) -> int:
    """Set stamps that are ahead to now, but for rows that somebody holds; how many."""
    return sum(_set_right(conn, stamp) for stamp in _STAMPS)


def _set_right(conn: Connection, stamp: _Stamp) -> int:
    (key,) = stamp.column.table.primary_key
    found = select(key).where(stamp.wrong).with_for_update(skip_locked=True)
    if keys := sorted(conn.execute(found).scalars()):
        right = by_key(update(stamp.column.table)).where(key.in_(keys))
        conn.execute(right.values({stamp.column: utc_shift(stamp.lead_s)}))
    return len(keys)
