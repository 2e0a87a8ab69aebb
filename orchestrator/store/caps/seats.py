"""The seats of one transaction that claims or ends jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.policies import Book
from orchestrator.store.caps import held as held_caps
from orchestrator.store.caps import rows, waiting
from orchestrator.store.caps.keys import NO_BOOK, Keyed, caps_to_claim
from orchestrator.store.caps.room import UNLIMITED, Room


class Seats:
    """The seats that one transaction gives back and takes. `close` writes them; `freed` are the lanes to nudge then."""

    def __init__(self, conn: Connection, book: Book = NO_BOOK) -> None:
        self.book = book
        self.freed: set[str] = set()
        self._conn = conn
        self._room = Room(book)
        #: The rows that are locked, as they were.
        self._before: dict[str, int] = {}
        #: By key, how many were let go for its sake and found another one full: others may use those seats.
        self._unused: Counter[str] = Counter()

    def expect(
        self,
        offered: Sequence[str] = (),
        ended: Sequence[str] = (),
        held: Iterable[str] = (),
        model_id: str | None = None,
    ) -> None:
        """Lock the keys of jobs that are to be claimed or ended, before anything of those; `held` are known already.

        `model_id` is that of offered jobs which name none.
        """
        keys, wanted = set(held), set[str]()
        if self.book.limits and (offered or ended):
            for job in held_caps.of_jobs(self._conn, [*offered, *ended]):
                keys |= set(job.held)
                usual = job if job.model_id or not model_id else job._replace(model_id=model_id)
                wanted |= set(self.caps_of(job.lane, usual)) if job.job_id in offered else set()
        self._lock(keys, wanted)

    def caps_of(self, lane: str, job: Keyed) -> dict[str, int]:
        return caps_to_claim(self.book, lane, job)

    def give_back(self, keys: Sequence[str]) -> None:
        """Of attempts that are over; a key is there once for each of them."""
        self._lock(keys)
        for key in keys:
            if self._room.in_use.get(key):
                self._room.in_use[key] -= 1

    def choose(self, wishes: Sequence[Mapping[str, int]]) -> list[bool]:
        """Who would find a seat at all its keys, if all before it are seated. Nothing is taken."""
        self._lock((), {key for capped in wishes for key, most in capped.items() if most})
        trial, chosen = self._room.copy(), []
        for capped in wishes:
            chosen.append(trial.full(capped) is None)
            trial.take(capped if chosen[-1] else ())
        return chosen

    def take(self, keys: Iterable[str]) -> None:
        self._room.take(keys)

    def park(self, refused: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        """Park those jobs, by their ids, that still find no seat; why, by id. The others need not wait."""
        parked = waiting.park(self._conn, self._room, refused)
        self._unused.update(waiting.unused(parked, refused))
        return {job_id: self._room.why(key) for job_id, key in parked.items()}

    def close(self) -> None:
        """Write what changed, and let as many go as may sit down now."""
        changes: dict[tuple[int, int], list[str]] = defaultdict(list)
        for key, before in sorted(self._before.items()):
            change = self._room.in_use[key] - before
            most = self.book.cap(key) if change > 0 else None
            if change:
                changes[change, UNLIMITED if most is None else most].append(key)
        for (change, most), keys in changes.items():
            rows.change(self._conn, keys, change, most)
        given = Counter({key: before - self._room.in_use[key] for key, before in self._before.items()})
        self.freed |= waiting.let_go(self._conn, self._room, +given + self._unused)
        self._before = {key: self._room.in_use[key] for key in self._before}
        self._unused.clear()

    def _lock(self, keys: Iterable[str], wanted: Collection[str] = ()) -> None:
        """A key that somebody wants to sit at must have a row; one where nobody sits any more need not."""
        if not (new := {*keys, *wanted} - self._before.keys()):
            return
        found = rows.lock(self._conn, new)
        if missing := sorted((set(wanted) & new) - found.keys()):
            rows.create(self._conn, missing)
            found |= rows.lock(self._conn, missing)
        self._before |= found
        self._room.in_use |= found
