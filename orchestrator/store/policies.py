"""Policies as rows: every change with who, when, before and after, and one number that tells whether a copy is old."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from orchestrator import actors
from orchestrator.errors import PolicyNotFound
from orchestrator.policies import Book, Document, Scope, parse
from orchestrator.store import audit
from orchestrator.store.dialect import utc_now
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import policies, policy_history

#: Seconds for which a process uses its copy without asking whether there is a newer one.
FRESH_S = 0.5


def put(conn: Connection, scope: Scope, name: str, document: Document) -> int:
    """Write a policy; its version. The same document again changes nothing."""
    actor = actors.current()
    before = _locked(conn, scope, name)
    after = document.model_dump_json(exclude_unset=True)
    if before is not None and json.loads(before) == json.loads(after):
        return _version(conn, scope, name)
    version = _version(conn, scope, name) + 1
    if before is None:
        row = {"scope": scope.value, "name": name, "version": version, "document": after, "actor": actor}
        try:
            with conn.begin_nested():
                insert_rows(conn, policies, [row])
        except IntegrityError:
            return put(conn, scope, name, document)  # somebody else made it first, and has committed
    else:
        change = update(policies).where(policies.c.scope == scope.value, policies.c.name == name)
        conn.execute(change.values(version=version, document=after, actor=actor, updated_at=utc_now()))
    _remember(conn, scope, name, version, before, after)
    return version


def remove(conn: Connection, scope: Scope, name: str) -> None:
    """Raises PolicyNotFound."""
    before = _locked(conn, scope, name)
    if before is None:
        raise PolicyNotFound(scope.value, name)
    conn.execute(delete(policies).where(policies.c.scope == scope.value, policies.c.name == name))
    _remember(conn, scope, name, _version(conn, scope, name) + 1, before, None)


def roll_back(conn: Connection, scope: Scope, name: str, version: int) -> int | None:
    """Make what was in force after `version` so again; the new version, None when there was no policy then."""
    found = conn.execute(
        select(policy_history.c.document_after).where(
            policy_history.c.scope == scope.value, policy_history.c.name == name, policy_history.c.version == version
        )
    ).one_or_none()
    if found is None:
        raise PolicyNotFound(scope.value, f"{name} version {version}")
    if found.document_after is not None:
        return put(conn, scope, name, parse(scope, json.loads(found.document_after)))
    if _locked(conn, scope, name) is not None:
        remove(conn, scope, name)
    return None


def get(conn: Connection, scope: Scope, name: str) -> dict[str, Any]:
    """Raises PolicyNotFound."""
    row = conn.execute(select(policies).where(policies.c.scope == scope.value, policies.c.name == name)).one_or_none()
    if row is None:
        raise PolicyNotFound(scope.value, name)
    return _readable(row._asdict())


def page(conn: Connection, scope: Scope, after: str, limit: int) -> list[dict[str, Any]]:
    found = select(policies).where(policies.c.scope == scope.value, policies.c.name > after)
    return [_readable(row._asdict()) for row in conn.execute(found.order_by(policies.c.name).limit(limit))]


def history(conn: Connection, scope: Scope, name: str, limit: int = 100) -> list[dict[str, Any]]:
    """Every change, newest first. Raises PolicyNotFound when there was none."""
    found = select(policy_history).where(policy_history.c.scope == scope.value, policy_history.c.name == name)
    rows = conn.execute(found.order_by(policy_history.c.version.desc()).limit(limit)).all()
    if not rows:
        raise PolicyNotFound(scope.value, name)
    return [
        {
            "version": row.version,
            "before": json.loads(row.document_before) if row.document_before else None,
            "after": json.loads(row.document_after) if row.document_after else None,
            "actor": row.actor,
            "changed_at": row.changed_at,
        }
        for row in rows
    ]


def generation(conn: Connection) -> int:
    return conn.execute(select(func.max(policy_history.c.id))).scalar() or 0


def read_book(conn: Connection) -> Book:
    # The number first: a change in between is seen twice rather than never.
    newest = generation(conn)
    rows = conn.execute(select(policies.c.scope, policies.c.name, policies.c.document))
    return Book.of(newest, [(row.scope, row.name, json.loads(row.document)) for row in rows])


class Copy:
    """One process's copy of the policies, at most `FRESH_S` behind. Thread-safe."""

    def __init__(self) -> None:
        self._book = Book()
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def book(self, conn: Connection) -> Book:
        """The policies, on the caller's connection: in a transaction, what it reads is what it decides by."""
        if (known := self.fresh()) is not None:
            return known
        started = time.monotonic()
        newest = generation(conn)
        book = self._book if newest == self._book.generation else read_book(conn)
        with self._lock:
            if book.generation >= self._book.generation:
                self._book, self._read_at = book, started
        return book

    def fresh(self) -> Book | None:
        """The same without asking; None when it must be."""
        return self._book if time.monotonic() - self._read_at < FRESH_S else None

    def expire(self) -> None:
        """Somebody changed them: look at the next question."""
        self._read_at = float("-inf")


def _locked(conn: Connection, scope: Scope, name: str) -> str | None:
    found = select(policies.c.document).where(policies.c.scope == scope.value, policies.c.name == name)
    document: str | None = conn.execute(found.with_for_update()).scalar()
    return document


def _wait_for_others(conn: Connection) -> None:
    """Changes are committed in the order of their numbers, or who saw the later one would never look for the other."""
    newest = select(policy_history.c.id).order_by(policy_history.c.id.desc()).limit(1)
    conn.execute(newest.with_for_update()).all()


def _version(conn: Connection, scope: Scope, name: str) -> int:
    """The newest there ever was: one that was deleted and comes back counts on."""
    newest = select(func.max(policy_history.c.version))
    found = conn.execute(newest.where(policy_history.c.scope == scope.value, policy_history.c.name == name)).scalar()
    return found or 0


def _remember(conn: Connection, scope: Scope, name: str, version: int, before: str | None, after: str | None) -> None:
    change = {
        "scope": scope.value,
        "name": name,
        "version": version,
        "document_before": before,
        "document_after": after,
        "actor": actors.current(),
    }
    _wait_for_others(conn)
    insert_rows(conn, policy_history, [change])
    documents = {"before": json.loads(before) if before else None, "after": json.loads(after) if after else None}
    details = {"scope": scope.value, "name": name, "version": version, **documents}
    audit.record(conn, [audit.Event("policy.changed", details=details)])


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "document": json.loads(row["document"])}
