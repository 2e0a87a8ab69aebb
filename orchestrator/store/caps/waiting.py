"""Who waits for a key: parking there, and letting the next ones go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection

from orchestrator.gates import CAPACITY, FOR_UNITS, QUIET, UNTIL_QUIET
from orchestrator.policies import WAITS_FOR_CAP as KIND
from orchestrator.store import blocked
from orchestrator.store.caps import rows
from orchestrator.store.caps.keys import NO_BOOK, caps_of
from orchestrator.store.caps.room import Room

#: Jobs that one look at those who wait for a key sees at most, in search of one that its other keys let go.
LOOK_AHEAD = 64


def park(conn: Connection, room: Room, refused: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Where each of these jobs waits now; those that find room are left out."""
    found = {job_id: key for job_id, capped in refused.items() if (key := room.full(capped)) is not None}
    waiting: dict[str, list[str]] = defaultdict(list)
    for job_id, key in found.items():
        waiting[key].append(job_id)
    for key, job_ids in sorted(waiting.items()):
        blocked.park(conn, job_ids, KIND + key, room.why(key))
    return found


def look(conn: Connection, room: Room, wishes: Iterable[Mapping[str, int]]) -> None:
    """Who is seated at those of these keys that nobody has looked at yet."""
    unknown = {key for capped in wishes for key in capped} - room.in_use.keys()
    room.in_use |= dict.fromkeys(unknown, 0) | rows.look(conn, unknown)


def unused(parked: Mapping[str, str], refused: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    """Seats that others may have: who was let go for the sake of one key, perhaps, found another one full."""
    return Counter(other for job_id, key in parked.items() for other in refused[job_id] if other != key)


def let_go(conn: Connection, room: Room, seats: Mapping[str, int]) -> set[str]:
    """Let the next ones go who wait for these keys, for as many seats at most; their lanes."""
    waited = rows.waited(conn, [key for key in seats if room.left(key)])
    going = Going(conn, room)
    for key in sorted(waited):
        going.let_go(key, seats[key])
    return {job.lane for job in going.freed}


class Going:
    """Lets jobs go that wait for a key which has room, if their other keys have room as well.

    Of those who are kept back by one other key, the first waits for that one from now on and speaks for the rest: when
    it has run, its seat here is given back, and they are looked at again. So nobody moves a whole backlog from key to
    key, and a seat goes to the first who can use it, among those whom one look sees.
    """

    def __init__(self, conn: Connection, room: Room) -> None:
        self.freed: list[blocked.Waiter] = []
        self._conn = conn
        #: Who was let go has no seat yet, but will want one.
        self._room = room.copy()

    def let_go(self, key: str, most: int) -> None:
        most = min(most, self._room.left(key))
        waiting = blocked.first(self._conn, KIND + key, most)
        going = self._fitting(waiting, most)
        if len(going) < most and len(waiting) == most:
            waiting = blocked.first(self._conn, KIND + key, max(most, LOOK_AHEAD))
            going += self._fitting([job for job in waiting if job not in going], most - len(going))
        self._let_go(going)
        passed = waiting[: waiting.index(going[-1]) if len(going) >= most > 0 else None]
        self._appoint_speakers(key, [job for job in passed if job not in going])
        self.freed += going

    def _let_go(self, going: Sequence[blocked.Waiter]) -> None:
        """Those that want quiet or units meet those gates once more: what they were given there others have now."""
        blocked.let_go(self._conn, [job.job_id for job in going if self._gate(job) is None])
        for gate, reason in ((QUIET, UNTIL_QUIET), (CAPACITY, FOR_UNITS)):
            blocked.wait_elsewhere(self._conn, [job.job_id for job in going if self._gate(job) == gate], gate, reason)

    def _gate(self, job: blocked.Waiter) -> str | None:
        if job.constraints:
            return QUIET
        book = self._room.book
        # Who does not know the policies leaves it to the leader, who does.
        return CAPACITY if job.cost_units and (book.admission.capacity or book is NO_BOOK) else None

    def _fitting(self, waiting: Sequence[blocked.Waiter], most: int) -> list[blocked.Waiter]:
        look(self._conn, self._room, [self._caps_of(job) for job in waiting])
        going: list[blocked.Waiter] = []
        for job in waiting:
            capped = self._caps_of(job)
            if len(going) < most and self._room.full(capped) is None:
                self._room.take(capped)
                going.append(job)
        return going

    def _appoint_speakers(self, key: str, kept: Sequence[blocked.Waiter]) -> None:
        speakers: dict[str, str] = {}
        for job in kept:
            full = self._room.full(self._caps_of(job))
            if full is not None and full != key:
                speakers.setdefault(full, job.job_id)
        for full, job_id in sorted(speakers.items()):
            blocked.wait_elsewhere(self._conn, [job_id], KIND + full, self._room.why(full))

    def _caps_of(self, job: blocked.Waiter) -> dict[str, int]:
        return caps_of(self._room.book, job.lane, job)
