"""The audit trail: one row for everything that happened, written in the transaction that made it happen.

Only a job's rows have an index of their own: every other would cost each write of the hot path. Whoever looks for
something else walks along the ids, at most `WINDOW` rows a question, and is told where to go on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, func, select

from orchestrator import actors
from orchestrator.store.dialect import seconds_since
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import audit

#: Rows that one question looks at.
WINDOW = 10_000
#: Seconds after which an id that is missing between two others will not come any more. Ids are given out before their
#: transaction commits: one that is missing may belong to somebody who is about to.
GAP_S = 5.0

_GATHERED = "audit events"


class Event(NamedTuple):
    event_type: str
    job_id: str | None = None
    pool_id: str | None = None
    worker_id: str | None = None
    attempt: int | None = None
    actor: str | None = None
    details: dict[str, Any] | None = None

    def row(self, acting: str | None) -> dict[str, Any]:
        return {
            "event_type": self.event_type,
            "job_id": self.job_id,
            "pool_id": self.pool_id,
            "worker_id": self.worker_id,
            "attempt": self.attempt,
            "actor": self.actor or acting,
            "details": json.dumps(self.details) if self.details else None,
        }


def record(conn: Connection, events: Sequence[Event]) -> None:
    """Write what happened, by whoever acts here and now unless an event says otherwise."""
    gathered: list[Event] | None = conn.info.get(_GATHERED)
    if gathered is None:
        acting = actors.current()
        insert_rows(conn, audit, [event.row(acting) for event in events])
    else:
        gathered.extend(events)


@contextmanager
def together(conn: Connection) -> Iterator[None]:
    """Write the events of everything inside as one statement, at the end, in the same transaction."""
    gathered: list[Event] = []
    info = conn.info  # a connection that breaks meanwhile would not give it out any more
    info[_GATHERED] = gathered
    try:
        yield
    finally:
        del info[_GATHERED]
    record(conn, gathered)


def of_job(conn: Connection, job_id: str, after_id: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
    """A job's history, oldest first."""
    page = select(audit).where(audit.c.job_id == job_id, audit.c.id > after_id).order_by(audit.c.id).limit(limit)
    return [_readable(row._asdict()) for row in conn.execute(page)]


@dataclass(frozen=True)
class Filter:
    """`event_type` may end in `.*` and then means all that begin like that."""

    event_type: str | None = None
    job_id: str | None = None
    pool_id: str | None = None
    worker_id: str | None = None
    actor: str | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        columns = (audit.c.job_id, audit.c.pool_id, audit.c.worker_id, audit.c.actor)
        values = (self.job_id, self.pool_id, self.worker_id, self.actor)
        named = [column == value for column, value in zip(columns, values, strict=True) if value is not None]
        if self.event_type is None:
            return named
        begins = self.event_type.removesuffix("*")
        same = audit.c.event_type == self.event_type
        return [*named, audit.c.event_type.startswith(begins, autoescape=True) if begins.endswith(".") else same]


def page(
    conn: Connection, wanted: Filter, limit: int, before: int | None = None
) -> tuple[list[dict[str, Any]], int | None]:
    """Newest first; the id before which to go on, None at the end. A page may be short, or empty, before that."""
    oldest, newest = conn.execute(select(func.min(audit.c.id), func.max(audit.c.id))).one()
    if newest is None:
        return [], None
    end = newest + 1 if before is None else min(before, newest + 1)
    # A job's rows have their index: no need to stop before they end.
    start = oldest if wanted.job_id is not None else max(end - WINDOW, oldest)
    query = select(audit).where(audit.c.id < end, audit.c.id >= start, *wanted.conditions())
    rows = conn.execute(query.order_by(audit.c.id.desc()).limit(limit)).all()
    following = rows[-1].id if len(rows) == limit else start
    return [_readable(row._asdict()) for row in rows], following if following > oldest else None


def since(conn: Connection, wanted: Filter, limit: int, after: int) -> tuple[list[dict[str, Any]], int]:
    """Oldest first, what came after an id; and the id after which to go on, so that nothing is missed."""
    end = _settled(conn, after)
    query = select(audit).where(audit.c.id > after, audit.c.id <= end, *wanted.conditions())
    rows = conn.execute(query.order_by(audit.c.id).limit(limit)).all()
    return [_readable(row._asdict()) for row in rows], rows[-1].id if len(rows) == limit else end


def _settled(conn: Connection, after: int) -> int:
    """How far the trail is complete: up to the first missing id that may still come."""
    oldest = conn.execute(select(func.min(audit.c.id))).scalar()
    if oldest is None:
        return after
    young = seconds_since(audit.c.ts) < GAP_S
    ids = select(audit.c.id, young.label("young")).where(audit.c.id > after).order_by(audit.c.id).limit(WINDOW)
    end: int = max(after, oldest - 1)
    for row in conn.execute(ids):
        if row.young and row.id != end + 1:
            break
        end = row.id
    return end


def settled_id(conn: Connection) -> int:
    """The id from which whoever wants what comes goes on: up to it nothing is missing."""
    newest = int(conn.execute(select(func.coalesce(func.max(audit.c.id), 0))).scalar_one())
    return _settled(conn, max(newest - WINDOW, 0))


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    row["details"] = json.loads(row["details"]) if row["details"] else {}
    return row
