"""Who leads: one row with an epoch that only grows. The row is the authority; a lock is only a hint.

`fence` is the first statement of every transaction a leader writes in. It takes a shared lock on the row, so a
successor's `take` waits for that transaction, and a transaction begun after the `take` finds its epoch gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator import actors
from orchestrator.errors import StaleEpoch
from orchestrator.store import audit
from orchestrator.store.clock import AHEAD_S
from orchestrator.store.database import Database
from orchestrator.store.dialect import seconds_since, utc_now, utc_shift
from orchestrator.store.hot import Hot
from orchestrator.store.schema import leadership


@dataclass(frozen=True)
class Leadership:
    holder: str | None
    epoch: int
    acquired_at: datetime | None
    expires_at: datetime | None
    alive: bool
    #: Seconds since its term began.
    age_s: float = 0.0


_LEADS = select(leadership.c.epoch).where(
    leadership.c.name == bindparam("lock"),
    leadership.c.epoch == bindparam("mine"),
    leadership.c.expires_at > utc_now(),
)
_FENCE = _LEADS.with_for_update(read=True)


def fence(conn: Connection, name: str, epoch: int) -> None:
    """Raises StaleEpoch unless `epoch` leads until this transaction ends."""
    if conn.execute(_FENCE, {"lock": name, "mine": epoch}).scalar() is None:
        raise StaleEpoch(epoch)


def question(*anything: Select[Any]) -> Hot:
    """Does an epoch lead, and has any of these a row? For `finds`: one statement, which locks nothing."""
    return Hot(lambda _ids: select(_LEADS.exists(), or_(*(one.exists() for one in anything))))


def finds(conn: Connection, asked: Hot, name: str, epoch: int, **given: Any) -> bool:
    """Raises StaleEpoch unless `epoch` leads: who was replaced must hear of it also when there is nothing to do."""
    ((leads, found),) = asked.rows(conn, lock=name, mine=epoch, **given)
    if not leads:
        raise StaleEpoch(epoch)
    return bool(found)


def ensure_row(db: Database, name: str) -> None:
    def insert_if_missing(conn: Connection) -> None:
        if conn.execute(select(leadership.c.name).where(leadership.c.name == name)).scalar() is None:
            conn.execute(insert(leadership), {"name": name, "epoch": 0})

    try:
        db.write(insert_if_missing)
    except IntegrityError:
        return  # another instance inserted it at the same moment


def take(conn: Connection, name: str, holder: str, ttl_s: float, *, lock_held: bool, above: int = 0) -> int | None:
    """Begin a term: epoch + 1, and higher than `above`. Without the lock's word, only when the last term is over.

    None when not taken.
    """
    ahead = leadership.c.expires_at > utc_shift(ttl_s + AHEAD_S)  # its clock was set back, and nobody renewed it since
    over = or_(leadership.c.expires_at.is_(None), leadership.c.expires_at <= utc_now(), ahead).label("over")
    row = conn.execute(select(leadership, over).where(leadership.c.name == name).with_for_update()).one()
    if not lock_held and not row.over:
        return None
    epoch = max(int(row.epoch), above) + 1
    conn.execute(
        update(leadership)
        .where(leadership.c.name == name, leadership.c.epoch == row.epoch)
        .values(holder=holder, epoch=epoch, acquired_at=utc_now(), expires_at=utc_shift(ttl_s))
    )
    details = {"epoch": epoch, "previous": row.holder}
    audit.record(conn, [audit.Event("leader.elected", actor=actors.of_leader(holder), details=details)])
    return epoch


def renew(conn: Connection, name: str, epoch: int, ttl_s: float) -> None:
    """Extend the term. Raises StaleEpoch when it is not ours any more; an expired term is not revived."""
    renewed = conn.execute(
        update(leadership)
        .where(leadership.c.name == name, leadership.c.epoch == epoch, leadership.c.expires_at > utc_now())
        .values(expires_at=utc_shift(ttl_s))
    )
    if renewed.rowcount != 1:
        raise StaleEpoch(epoch)


def resign(conn: Connection, name: str, epoch: int, holder: str) -> None:
    """End a term before its time, unless it is over already."""
    resigned = conn.execute(
        update(leadership)
        .where(leadership.c.name == name, leadership.c.epoch == epoch, leadership.c.holder.is_not(None))
        .values(holder=None, expires_at=utc_now())
    )
    if resigned.rowcount:
        event = audit.Event("leader.resigned", actor=actors.of_leader(holder), details={"epoch": epoch})
        audit.record(conn, [event])


def current(conn: Connection, name: str) -> Leadership:
    alive = (leadership.c.expires_at > utc_now()).label("alive")
    age_s = func.coalesce(seconds_since(leadership.c.acquired_at), 0.0).label("age_s")
    row = conn.execute(select(leadership, alive, age_s).where(leadership.c.name == name)).one_or_none()
    if row is None:
        return Leadership(None, 0, None, None, alive=False)
    return Leadership(row.holder, row.epoch, row.acquired_at, row.expires_at, bool(row.alive), float(row.age_s))
