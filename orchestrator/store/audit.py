"""The audit trail: one row for everything that happened, written in the transaction that made it happen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection, select

from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import audit

_GATHERED = "audit events"


class Event(NamedTuple):
    event_type: str
    job_id: str | None = None
    pool_id: str | None = None
    worker_id: str | None = None
    attempt: int | None = None
    actor: str | None = None
    details: dict[str, Any] | None = None

    def row(self) -> dict[str, Any]:
        return {
            "event_type": self.event_type,
            "job_id": self.job_id,
            "pool_id": self.pool_id,
            "worker_id": self.worker_id,
            "attempt": self.attempt,
            "actor": self.actor,
            "details": json.dumps(self.details) if self.details else None,
        }


def record(conn: Connection, events: Sequence[Event]) -> None:
    gathered: list[Event] | None = conn.info.get(_GATHERED)
    if gathered is None:
        insert_rows(conn, audit, [event.row() for event in events])
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


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    row["details"] = json.loads(row["details"]) if row["details"] else {}
    return row
