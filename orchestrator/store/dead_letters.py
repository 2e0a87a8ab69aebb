"""Dead letters: jobs that were given up, until an operator redrives or purges them.

A letter is written in the transaction that ends its job. The leader tells the dead-letter stream of it later, at
least once; the rows here are the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, select, update

from orchestrator import jobs as job_rules
from orchestrator.dead_letters import DeadLetter
from orchestrator.errors import JobNotFound, NotRedrivable, RedriveLimit, TaskOfWorkflow
from orchestrator.jobs import TERMINAL, Arrow, Status
from orchestrator.store import audit, lanes, lease_purge, ownership, paging
from orchestrator.store.blocked import GATED, SOON_S
from orchestrator.store.dialect import by_key, in_order, unled, walking
from orchestrator.store.moves import by_attempt, move
from orchestrator.store.schema import dead_letters, jobs


@dataclass(frozen=True)
class Filter:
    """Which dead letters are meant; all of them unless something is named."""

    job_ids: tuple[str, ...] = ()
    type: str | None = None
    agent: str | None = None
    pool_id: str | None = None
    reason: str | None = None

    @property
    def leading(self) -> list[ColumnElement[bool]]:
        """What leads to the letters: their ids. With those, nobody looks at any other letter."""
        return [dead_letters.c.job_id.in_(self.job_ids), *self._named()] if self.job_ids else []

    @property
    def others(self) -> list[ColumnElement[bool]]:
        return [] if self.job_ids else self._named()

    def _named(self) -> list[ColumnElement[bool]]:
        named = (
            (unled(jobs.c.type), self.type),
            (unled(jobs.c.agent), self.agent),
            (unled(jobs.c.lane), self.pool_id),
            (dead_letters.c.reason, self.reason),
        )
        return [column == value for column, value in named if value is not None]

    def way(self, *, oldest_first: bool = False) -> paging.Way:
        index = "PRIMARY" if self.job_ids else "ix_dead_letters_time"
        return paging.Way(dead_letters, index, dead_letters.c.buried_at, dead_letters.c.job_id, oldest_first)


ALL = Filter()
_BESIDE_ITS_JOB = dead_letters.join(jobs, jobs.c.job_id == dead_letters.c.job_id)
#: Letters that are looked at for a count: beyond that there are at least so many. A metric tells how they grow, so it
#: goes further.
MOST_COUNTED, MOST_MEASURED = 10_000, 100_000


def add(conn: Connection, job_id: str, reason: str, attempts: int, origin_id: str) -> None:
    conn.execute(
        insert(dead_letters), {"job_id": job_id, "reason": reason, "attempts": attempts, "origin_id": origin_id}
    )


# ── the leader tells the stream ─────────────────────────────────────────────────────────────────────────────────


class Untold(NamedTuple):
    letter: DeadLetter
    buried_at: datetime


UNTOLD = select(dead_letters.c.job_id).where(dead_letters.c.entry_id.is_(None))


def untold(conn: Connection, limit: int) -> list[Untold]:
    """Letters that the stream has not been told of."""
    letter = (dead_letters.c.job_id, dead_letters.c.origin_id, dead_letters.c.attempts, jobs.c.last_error)
    found = UNTOLD.with_only_columns(*letter, dead_letters.c.reason, dead_letters.c.buried_at)
    rows = conn.execute(in_order(found).select_from(_BESIDE_ITS_JOB).limit(limit))
    return [
        Untold(
            DeadLetter(row.job_id, row.origin_id, row.attempts, row.last_error or "", row.reason),
            row.buried_at,
        )
        for row in rows
    ]


def told(conn: Connection, entry_ids: dict[Untold, str]) -> list[str]:
    """Remember under which entry each letter stands in the stream; the entries of letters that have left since."""
    gone = []
    for item in sorted(entry_ids, key=lambda item: item.letter.job_id):  # in the order in which others lock them
        # Redriven meanwhile, and dead again: that letter is another one, and still untold.
        marked = conn.execute(
            update(dead_letters)
            .where(
                dead_letters.c.job_id == item.letter.job_id,
                dead_letters.c.buried_at == item.buried_at,
                dead_letters.c.entry_id.is_(None),
            )
            .values(entry_id=entry_ids[item])
        )
        if marked.rowcount == 0:
            gone.append(entry_ids[item])
    return gone


# ── operators look, redrive and purge ───────────────────────────────────────────────────────────────────────────


class Total(NamedTuple):
    """How many letters there are; `at_least` so many, where there are others at which nobody looked."""

    letters: int
    at_least: bool


def count(conn: Connection, wanted: Filter = ALL, most: int = MOST_COUNTED) -> Total:
    """How many of the latest `most` letters are meant."""
    way, leading, others = wanted.way(), wanted.leading, wanted.others
    edge = None if leading else way.edge(conn, [], most)
    if edge is not None and not others:
        return Total(most, at_least=True)
    seen = [] if edge is None else [way.until(edge)]
    query = walking(select(func.count()), dead_letters, way.index)
    query = _beside_its_job(query) if leading or others else query.select_from(dead_letters)
    return Total(int(conn.execute(query.where(*leading, *seen, *others)).scalar_one()), edge is not None)


def depth(conn: Connection) -> int:
    """How many letters there are, counted up to `MOST_MEASURED`."""
    return count(conn, most=MOST_MEASURED).letters


def page(conn: Connection, wanted: Filter, limit: int, cursor: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """Latest first; the cursor of the next page, or None at the end. A page may be short, or empty, before that."""
    query = _beside_its_job(
        select(
            dead_letters.c.job_id,
            dead_letters.c.reason,
            dead_letters.c.attempts,
            dead_letters.c.origin_id,
            dead_letters.c.buried_at,
            jobs.c.type,
            jobs.c.agent,
            jobs.c.lane.label("pool_id"),
            jobs.c.redrives,
            jobs.c.last_error,
        )
    )
    shown, following = wanted.way().page(conn, query, wanted.leading, wanted.others, limit, cursor)
    return [row._asdict() for row in shown], following


def _beside_its_job(query: Select[Any]) -> Select[Any]:
    """The letter leads, and its job is found by its key: an agent may have a million others."""
    return by_key(in_order(query).select_from(_BESIDE_ITS_JOB), jobs)


_GATED = GATED.label("gated")
#: A task of a workflow starts over with that, and is kept as long as that is.
_NO_TASK = jobs.c.workflow_id.is_(None)


#: The audit row of a letter that is forgotten.
PURGED = "job.purged"


class Found(NamedTuple):
    """A job that ended, locked."""

    job_id: str
    entry_id: str | None
    attempt: int
    redrives: int
    lane: str
    #: It wants quiet or costs units: it meets the gates again, as a job that becomes due does.
    gated: bool
    status: str = Status.DEAD_LETTER
    optional: bool = False


@dataclass(frozen=True)
class Removed:
    """Letters that left: their jobs, the lanes that got them back, and the entries that told of them."""

    job_ids: list[str]
    lanes: set[str]
    entry_ids: list[str]


class Meant(NamedTuple):
    """A job that ended badly, and that somebody means: since when it is what it is, and whether it may change."""

    since: datetime
    job_id: str
    redrives: int
    is_task: bool


def look(conn: Connection, wanted: Filter, cursor: str | None) -> tuple[list[Meant], str | None]:
    """Letters that are meant, oldest first, and where the next look begins; None at the end.

    Whoever changes them names them: a transaction that runs again after a lost answer then meets its own work,
    not the next letters.
    """
    columns = dead_letters.c.buried_at, dead_letters.c.job_id, jobs.c.redrives, jobs.c.workflow_id.is_not(None)
    way = wanted.way(oldest_first=True)
    query = _beside_its_job(select(*columns))
    found, following = way.page(conn, query, wanted.leading, wanted.others, paging.WINDOW, cursor)
    return [Meant._make(row) for row in found], following


def redrive(conn: Connection, job_ids: Sequence[str], redrive_max: int, delay: Callable[[int], float]) -> Removed:
    """Dead letter → pending for those of these that still are, and were not redriven too often already.

    `delay(n)` is how many seconds the n-th of them waits: a crowd that failed together need not come back together.
    """
    found = [row for row in _lock(conn, job_ids, _NO_TASK) if row.redrives < redrive_max]
    return _redrive(conn, found, job_ids, delay)


def redrive_ended(
    conn: Connection,
    job_ids: Sequence[str],
    statuses: Collection[Status],
    redrive_max: int,
    delay: Callable[[int], float],
) -> Removed:
    """The same for jobs that ended in one of these states, with a letter or without."""
    ended = lock_ended(conn, job_ids, _NO_TASK)
    found = [one for one in ended if one.status in statuses and one.redrives < redrive_max]
    return _redrive(conn, found, job_ids, delay)


def _redrive(conn: Connection, found: Sequence[Found], asked: Sequence[str], delay: Callable[[int], float]) -> Removed:
    place = {job_id: n for n, job_id in enumerate(asked)}
    delays = {one.job_id: delay(place[one.job_id]) for one in found}
    _start_over(conn, job_rules.REDRIVE, found, delays)
    return _removed(found)


def redrive_one(conn: Connection, job_id: str, redrive_max: int, nth: int | None = None) -> Removed:
    """Start one job over, dead letter or otherwise badly ended.

    `nth` says which of its restarts this is, so that asking for the same one again is no error. Raises
    JobNotFound, NotRedrivable or RedriveLimit.
    """
    letter = select(dead_letters.c.entry_id).where(dead_letters.c.job_id == job_id).with_for_update()
    entry_id = conn.execute(letter).scalar()
    row = ownership.lock(conn, [job_id]).get(job_id)
    if row is None:
        raise JobNotFound(job_id)
    if row.workflow_id is not None:
        raise TaskOfWorkflow(job_id, row.workflow_id)
    if row.status == Status.PENDING and row.redrives == nth:
        return Removed([job_id], {row.lane}, [])
    if row.status not in job_rules.REDRIVE.source:
        raise NotRedrivable(job_id, row.status)
    if row.redrives >= redrive_max:
        raise RedriveLimit(job_id, redrive_max)
    gated = bool(conn.execute(select(_GATED).where(jobs.c.job_id == job_id)).scalar())
    found = Found(job_id, entry_id, row.attempt, row.redrives, row.lane, gated)
    start_over(conn, job_rules.REDRIVE, [found])
    return _removed([found])


def lock_ended(conn: Connection, job_ids: Sequence[str], *conditions: ColumnElement[bool]) -> list[Found]:
    """Those of these that have ended, however they did; their letters before them, as everybody does."""
    letters = select(dead_letters.c.job_id, dead_letters.c.entry_id).where(dead_letters.c.job_id.in_(job_ids))
    locked = conn.execute(by_key(letters, dead_letters).with_for_update())
    entries = {row.job_id: row.entry_id for row in locked}
    columns = (jobs.c.job_id, jobs.c.attempt, jobs.c.redrives, jobs.c.lane, _GATED, jobs.c.status, jobs.c.optional)
    ended = by_key(select(*columns), jobs).where(jobs.c.job_id.in_(job_ids), jobs.c.status.in_(sorted(TERMINAL)))
    rows = conn.execute(ended.where(*conditions).order_by(jobs.c.job_id).with_for_update())
    return [Found(one.job_id, entries.get(one.job_id), *one[1:]) for one in rows]


def start_over(conn: Connection, arrow: Arrow, rows: Sequence[Found]) -> None:
    """Ended → pending, at once."""
    if rows:
        _start_over(conn, arrow, rows, dict.fromkeys([row.job_id for row in rows], 0.0))


def purge(conn: Connection, job_ids: Sequence[str]) -> Removed:
    """Forget those of these that are dead letters, rows and all; only the audit trail remembers them.

    A task stays: its workflow counts it, and others need it.
    One that still has a lease, because its worker vanished, stays until that ends: its id may be submitted again at
    once, and the new job's lease would bear the same name.
    """
    dead = _lock(conn, job_ids, _NO_TASK)
    held = lease_purge.forget_jobs(conn, [row.job_id for row in dead])
    found = [row for row in dead if row.job_id not in held]
    ids = [row.job_id for row in found]
    conn.execute(delete(dead_letters).where(dead_letters.c.job_id.in_(ids)))
    conn.execute(delete(jobs).where(jobs.c.job_id.in_(ids), jobs.c.status == Status.DEAD_LETTER))
    audit.record(conn, [_event(PURGED, row) for row in found])
    return _removed(found)


def _lock(conn: Connection, job_ids: Sequence[str], *conditions: ColumnElement[bool]) -> list[Found]:
    """Those of these that are dead letters, oldest first.

    Waits for whoever changes one of them: a letter that was passed over would be missing from the count. Letters are
    locked by key and before their jobs, by everybody, so nobody waits in a circle.
    """
    letter = dead_letters.c.job_id, dead_letters.c.entry_id
    query = select(*letter, jobs.c.attempt, jobs.c.redrives, jobs.c.lane, _GATED)
    rows = conn.execute(
        by_key(in_order(query).select_from(_BESIDE_ITS_JOB), dead_letters, jobs)
        .where(dead_letters.c.job_id.in_(job_ids), jobs.c.status == Status.DEAD_LETTER, *conditions)
        .order_by(dead_letters.c.buried_at, dead_letters.c.job_id)
        .with_for_update()
    )
    return [Found(*row) for row in rows]


def _start_over(conn: Connection, arrow: Arrow, rows: Sequence[Found], asked: Mapping[str, float]) -> None:
    delays = {row.job_id: max(asked[row.job_id], SOON_S if row.gated else 0.0) for row in rows}
    for delay_s in sorted(set(delays.values())):
        for attempt, ids in by_attempt([row for row in rows if delays[row.job_id] == delay_s]):
            moved = move(conn, arrow, attempt, ids, delay_s=delay_s)
            assert moved == len(ids), "rows are locked, nobody else can have moved them"
    lanes.remember(conn, {row.lane for row in rows})
    conn.execute(delete(dead_letters).where(dead_letters.c.job_id.in_(list(delays))))
    audit.record(conn, [_event(str(arrow.event), row) for row in rows])


def _event(name: str, row: Found) -> audit.Event:
    details = {"redrives": row.redrives + (name != PURGED)}
    return audit.Event(name, job_id=row.job_id, attempt=row.attempt, pool_id=row.lane, details=details)


def _removed(rows: Sequence[Found]) -> Removed:
    return Removed(
        [row.job_id for row in rows], {row.lane for row in rows}, [row.entry_id for row in rows if row.entry_id]
    )
