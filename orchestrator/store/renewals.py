"""Leases that go on: those of clients by their own heartbeats, those of jobs and warm models by their worker's.

Every lease lives for its own time to live from its last renewal. One that ended, or is ending, cannot be renewed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, func, select, update

from orchestrator.errors import LeaseEnded, LeaseNotFound
from orchestrator.leases import LeaseState, lease_name
from orchestrator.store.database import RowsHeld
from orchestrator.store.dialect import by_key, utc_now, utc_shift, walking
from orchestrator.store.hot import Hot
from orchestrator.store.leases import LIVE
from orchestrator.store.schema import leases

# Whether its time is over is asked of rows that are locked: who holds one may have extended it just in time.
_MINE = select(leases.c.token, (leases.c.expires_at > utc_now()).label("in_time")).where(*LIVE)
_UNHELD = Hot(lambda keys: by_key(_MINE.where(leases.c.token.in_(keys)).with_for_update(skip_locked=True), leases))
_IN_TURN = Hot(lambda keys: by_key(_MINE.where(leases.c.token.in_(keys)).with_for_update(), leases))
_EXTEND = Hot(
    lambda keys: (
        by_key(update(leases))
        .where(leases.c.token.in_(keys), *LIVE)
        .values(last_heartbeat=utc_now(), expires_at=utc_shift(leases.c.ttl_seconds))
    )
)


def _lock(conn: Connection, keys: Sequence[str], *, in_turn: bool) -> dict[str, bool]:
    """Those that live, and whether their time is not over; `in_turn` those too that somebody else holds."""
    found = (_IN_TURN if in_turn else _UNHELD).rows(conn, keys) if keys else ()
    return {key: bool(in_time) for key, in_time in found}


# ── of clients ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Standing(NamedTuple):
    token: str
    state: str
    ending_as: str | None
    end_reason: str | None
    expires_at: datetime


_STANDING = Hot(
    lambda keys: by_key(
        select(
            leases.c.token,
            leases.c.state,
            leases.c.ending_as,
            leases.c.end_reason,
            leases.c.expires_at,
        ).where(leases.c.token.in_(keys)),
        leases,
    )
)


Renewed = datetime | LeaseNotFound | LeaseEnded | RowsHeld


def renew(conn: Connection, keys: Sequence[str], *, in_turn: bool = False) -> list[Renewed]:
    """For each lease, in order, until when it lives now, or why it does not.

    One whose row somebody holds is left out, unless `in_turn`: then its turn is waited for. One whose time is over is
    not renewed, even if nobody has ended it yet.
    """
    asked = sorted({*keys})
    mine = _lock(conn, asked, in_turn=in_turn)
    if living := sorted(key for key, in_time in mine.items() if in_time):
        _EXTEND.run(conn, living)
    found = {row[0]: _Standing(*row) for row in _STANDING.rows(conn, asked)}
    return [_renewed(found.get(key), in_time=mine.get(key)) for key in keys]


def _renewed(lease: _Standing | None, *, in_time: bool | None) -> Renewed:
    """`in_time` is None for one that was not ours to extend: it is over, or somebody holds it."""
    if lease is None:
        return LeaseNotFound()
    if in_time:
        return lease.expires_at
    if in_time is None and lease.state == LeaseState.ACTIVE and lease.ending_as is None:
        return RowsHeld(f"somebody holds the row of lease {lease_name(lease.token)}")
    over_as = LeaseState.EXPIRED if lease.state == LeaseState.ACTIVE else lease.state
    return LeaseEnded(lease.ending_as or over_as, lease.end_reason)


# ── of workers ──────────────────────────────────────────────────────────────────────────────────────────────────


def renew_of_workers(conn: Connection, holders: Mapping[str, str], *, in_turn: bool = False) -> set[str]:
    """Extend all that these workers (worker → node) hold; those of whom somebody else holds one are returned.

    None is left out if `in_turn`: then their turn is waited for, and one that is not extended has ended meanwhile.
    """
    found = conn.execute(_of_workers(leases.c.token, leases.c.worker_id, of=holders))
    owners = {row.token: row.worker_id for row in found}
    mine = _lock(conn, sorted(owners), in_turn=in_turn)
    if mine:
        _EXTEND.run(conn, sorted(mine))
    return set() if in_turn else {owner for key, owner in owners.items() if key not in mine}


def not_renewed(conn: Connection, holders: Mapping[str, str], recent_s: float) -> set[str]:
    """Those workers (worker → node) of whom a lease was not extended within so many seconds, by anybody."""
    extended_at = func.coalesce(leases.c.last_heartbeat, leases.c.created_at)
    old = _of_workers(leases.c.worker_id, of=holders).where(extended_at < utc_shift(-recent_s))
    return {*conn.execute(old).scalars()}


def _of_workers(*columns: ColumnElement[Any], of: Mapping[str, str]) -> Select[Any]:
    # Along the index that passes over what is over, however long nobody deletes that. But the ends of leases change it,
    # and would wait for us there: so nothing is locked along it.
    mine = leases.c.node_id.in_(sorted({*of.values()})), leases.c.worker_id.in_(sorted(of))
    return walking(select(*columns), leases, "ix_leases_node").where(*mine, *LIVE)
