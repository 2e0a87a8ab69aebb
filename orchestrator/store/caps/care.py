"""What the leader does about caps: it counts by the jobs themselves, and lets go whom nobody told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, delete, select, update

from orchestrator.policies import WAITS_FOR_CAP as KIND
from orchestrator.policies import Book
from orchestrator.store import blocked
from orchestrator.store.caps import held, rows
from orchestrator.store.caps.keys import caps_of
from orchestrator.store.caps.room import Room
from orchestrator.store.caps.waiting import Going
from orchestrator.store.schema import concurrency_caps

#: Keys that one look at those who wait sees at most.
MANY_KEYS = 500

#: While there is none of these, and no policy limits anything, there is nothing to take care of: keys with a row, jobs
#: that sit somewhere, jobs that wait for a seat.
CONCERNED = (select(concurrency_caps.c.cap_key), held.SEATED, blocked.of_kind(KIND))


def seat_late(conn: Connection, book: Book, limit: int) -> int:
    """Jobs that were claimed before a key of theirs had a cap sit there as well, from now on; how many.

    Their workers do not know of it and give back only what they took: `heal` finds that seat.
    """
    if not book.limits:
        return 0
    ids = [job.job_id for job in held.of_owned(conn) if _unseated(book, job)][:limit]
    if ids:
        # As they are now: one that ended meanwhile may have been claimed again, and sit elsewhere.
        found = held.lock_owned(conn, ids)
        held.remember(conn, {job.job_id: job.held + new for job in found if (new := _unseated(book, job))})
    return len(ids)


def _unseated(book: Book, job: held.JobKeys) -> list[str]:
    return [key for key, most in caps_of(book, job.lane, job).items() if most and key not in job.held]


def heal(conn: Connection, *, unheld: bool = False) -> int:
    """Count who is seated where by the jobs themselves, and correct the rows that differ; how many did.

    Right under the locks: who changes a row changes its jobs in the same transaction. With `unheld` rows stay as they
    are that somebody holds.
    """
    doubtful = _differing(rows.look_at_all(conn), held.count(conn))
    doubtful -= rows.held_by_others(conn, doubtful) if unheld else set()
    if not doubtful:
        return 0
    rows.create(conn, sorted(doubtful))
    found = rows.lock(conn, doubtful)
    counted = held.count(conn)
    wrong = [key for key in sorted(found) if found[key] != counted[key]]
    for key in wrong:
        change = update(concurrency_caps).where(concurrency_caps.c.cap_key == key)
        conn.execute(change.values(in_use=counted[key]))
    return len(wrong)


def _differing(written: Mapping[str, int], counted: Mapping[str, int]) -> set[str]:
    return {key for key in {*written, *counted} if written.get(key, 0) != counted.get(key, 0)}


class Round(NamedTuple):
    """What one round let go: into which lanes, how many, and where the next begins."""

    lanes: frozenset[str]
    released: int
    after: str


def let_go(conn: Connection, book: Book, after: str, limit: int) -> Round:
    """Let jobs go whose key has seats, or no cap any more: a policy changed, or nobody was there to tell them."""
    waiting = blocked.waited_for(conn, after, MANY_KEYS, KIND)
    keys = [name.removeprefix(KIND) for name in waiting]
    going = Going(conn, Room(book, rows.look(conn, keys)))
    for name, key in zip(waiting, keys, strict=True):
        going.let_go(key, limit - len(going.freed))
        if len(going.freed) >= limit:
            following = name
            break
    else:
        following = waiting[-1] if len(waiting) >= MANY_KEYS else ""
    return Round(frozenset(job.lane for job in going.freed), len(going.freed), following)


def forget(conn: Connection, book: Book, limit: int) -> int:
    """Remove rows of keys at which nobody sits and that no policy names: every host ever asked would stay."""
    idle = conn.execute(select(concurrency_caps.c.cap_key).where(concurrency_caps.c.in_use == 0)).scalars()
    keys = [key for key in idle if key not in book.caps][:limit]
    if not keys:
        return 0
    gone = delete(concurrency_caps).where(concurrency_caps.c.cap_key.in_(keys), concurrency_caps.c.in_use == 0)
    return conn.execute(gone).rowcount
