"""Caps before a job is stored, as a step of admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.admission import FREELY, Admitted, Decision
from orchestrator.jobs import NewJob
from orchestrator.policies import WAITS_FOR_CAP as KIND
from orchestrator.policies import Book
from orchestrator.store.caps import rows
from orchestrator.store.caps.keys import caps_of_new
from orchestrator.store.caps.room import Room
from orchestrator.store.caps.rows import Crowd


def admit(conn: Connection, book: Book, fresh: Sequence[NewJob]) -> list[Decision]:
    """New jobs of a key that is full, or for which others wait, wait with them, outside of their lane's order."""
    wishes = [caps_of_new(book, job) for job in fresh] if book.limits else []
    if not any(wishes):
        return [FREELY] * len(fresh)
    known = rows.crowds(conn, {key for capped in wishes for key in capped})
    decisions = _decide(book, wishes, known)
    if full := {how.blocked_on.removeprefix(KIND) for how in decisions if how.blocked_on}:
        # Nobody gives back a seat between this look and our commit, or else finds them.
        rows.stay(conn, full)
        decisions = _decide(book, wishes, known | rows.crowds(conn, full))
    return [*decisions]


def _decide(book: Book, wishes: Sequence[Mapping[str, int]], crowds: Mapping[str, Crowd]) -> list[Admitted]:
    room = Room(book, {key: crowd.in_use for key, crowd in crowds.items()})
    decisions = []
    for capped in wishes:
        behind = min((key for key in capped if crowds[key].waited_for), default=None)
        key = room.full(capped) or behind
        if key is None:
            room.take(capped)
            decisions.append(FREELY)
        else:
            reason = room.why(key) if key != behind else f"others wait for cap {key} already"
            decisions.append(Admitted(blocked_on=KIND + key, reason=reason[:255]))
    return decisions
