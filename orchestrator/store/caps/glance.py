"""Caps before a job is announced: what has no room is parked instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.policies import Book
from orchestrator.store.caps import rows, waiting
from orchestrator.store.caps.keys import Keyed, caps_of
from orchestrator.store.caps.room import Room


class Glance:
    """What a publisher sees of the caps: it takes no seat, and locks a key only to park somebody there.

    `freed` are lanes in which somebody was let go meanwhile, or is left to be looked at.
    """

    def __init__(self, conn: Connection, book: Book) -> None:
        self.book = book
        self.freed: set[str] = set()
        self._conn = conn
        self._room = Room(book)
        self._given: Counter[str] = Counter()
        self._locked: set[str] = set()

    def seated(self, lane: str, ready: Sequence[Keyed]) -> set[str]:
        """Which of these jobs may be announced, in their order; the others are parked."""
        capped = {job.job_id: caps_of(self.book, lane, job) for job in ready}
        self._look({key for caps in capped.values() for key in caps} - self._room.in_use.keys())
        go, stay = self._split(capped)
        doubtful = {key for job_id in stay if (key := self._room.full(capped[job_id])) is not None}
        if doubtful := {key for key in doubtful if self.book.cap(key)} - self._locked:
            # Whoever gives back a seat from now on finds those whom we park; who did so before is counted here.
            self._count(doubtful, rows.stay(self._conn, doubtful))
            self._locked |= doubtful
            more, stay = self._split({job_id: capped[job_id] for job_id in stay})
            go |= more
        self._park({job_id: capped[job_id] for job_id in stay})
        return go

    def _split(self, capped: Mapping[str, Mapping[str, int]]) -> tuple[set[str], list[str]]:
        go, stay = set(), []
        for job_id, caps in capped.items():
            if self._room.full(caps) is None:
                self._room.take(caps)
                self._given.update(caps.keys())
                go.add(job_id)
            else:
                stay.append(job_id)
        return go, stay

    def _park(self, refused: Mapping[str, Mapping[str, int]]) -> None:
        parked = waiting.park(self._conn, self._room, refused)
        self.freed |= waiting.let_go(self._conn, self._room, waiting.unused(parked, refused))

    def _look(self, keys: set[str]) -> None:
        self._count(keys, rows.look(self._conn, keys))

    def _count(self, keys: set[str], found: Mapping[str, int]) -> None:
        self._room.in_use |= {key: found.get(key, 0) + self._given[key] for key in keys}
