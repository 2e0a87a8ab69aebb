"""What the leader does at the gates, in one transaction: look, write down what was seen, let go whom nothing keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Row, select

from orchestrator import admission
from orchestrator.errors import Overloaded
from orchestrator.gates import (
    AGENT,
    CAPACITY,
    DEPTH,
    LANE,
    LARGE,
    MEMORY,
    QUIET,
    Asked,
    Closed,
    GateState,
    Standing,
    Use,
    Waiting,
    agent_gate,
    load_gate,
    memory_gate,
    quiet_now,
)
from orchestrator.jobs import DUE, Queued
from orchestrator.policies import WAITS_FOR_CAP, Book
from orchestrator.store import blocked, caps, gates, pools
from orchestrator.store.dialect import by_key
from orchestrator.store.gates import Hold, Measured, Seen
from orchestrator.store.schema import gate_holds, gate_states, jobs

#: Jobs that one look lets go of those that wait for one thing.
BATCH = 500
#: Jobs at once that run because the leader let them: all of them are looked at every time.
MOST_HELD = 1000
#: Agents, and lanes, of which one look sees to.
MOST_KEYS = 500
#: The name of the measured load among the states.
LOAD = "load"

#: While there is none of these, and no policy that is measured, there is nothing to tend: what was seen at gates, jobs
#: that passed them and count, jobs that wait for anything.
CONCERNED = (
    select(gate_states.c.name),
    select(gate_holds.c.gate),
    select(jobs.c.blocked_on).where(jobs.c.blocked_on.is_not(None)),
)


@dataclass
class Walk:
    """Behind which agent the next look begins, where jobs of more agents wait than one look sees to."""

    after: str = ""


def tend(conn: Connection, book: Book, seen: Measured, walk: Walk | None = None) -> list[Row[Any]]:
    """Those who may go now, and did. Nudge their lanes after the commit."""
    before = gates.states(conn)
    standing, states = _look(book, seen, before)
    quiet = gates.sweep(conn, QUIET, 2 * MOST_HELD)
    if quiet and not standing.quiet.so:
        _call_back(conn, quiet, standing)
    units = gates.sweep(conn, CAPACITY, 2 * MOST_HELD)
    prospects = _Prospects(conn, book)
    for job_id in _take_back(conn, prospects, {*quiet, *units}):
        quiet.pop(job_id, None)
        units.pop(job_id, None)
    standing.used_units = sum(units.values())
    if book.admission.capacity:
        standing.used_units += gates.owned_units(conn, units.keys())
    opened = _agents(conn, standing, before)
    leaving = _Leaving(conn, standing, units, MOST_HELD - max(len(units), len(quiet)), prospects)
    freed = [job for key in _keys(conn, standing, prospects, walk or Walk()) for job in leaving.of(key)]
    if book.admission.capacity:
        there = book.admission.capacity.now(quiet=standing.quiet.so)
        told = f"{standing.used_units:g} of {there:g} units are in use; {standing.quiet.reason}"
        states[CAPACITY] = GateState(closed=standing.spoken_for or standing.used_units >= there, reason=told)
    gone = {name for name in before if not name.startswith(AGENT)} - states.keys() | opened
    free = gates.unheld_states(conn, states.keys() | gone)  # the others at the next look
    gates.write_states(conn, {name: state for name, state in states.items() if name in free})
    gates.forget_states(conn, gone & free)
    return freed


def _look(book: Book, seen: Measured, before: dict[str, Seen]) -> tuple[Standing, dict[str, GateState]]:
    """What is so now, by what was so before; a memory that is old is none."""
    known = {name: one.fresh for name, one in before.items()}
    states: dict[str, GateState] = {}
    policy = book.admission
    if policy.gpu_memory:
        states[MEMORY] = memory_gate(policy.gpu_memory, known.get(MEMORY), seen.used_pct, seen.now)
    if policy.capacity and policy.capacity.follow_load:
        states[LOAD] = load_gate(policy.capacity, known.get(LOAD), seen.load_pct, seen.now)
    quiet = quiet_now(policy.capacity, states.get(LOAD), seen.now)
    return Standing(book, states.get(MEMORY), quiet=quiet), states


def _agents(conn: Connection, standing: Standing, before: dict[str, Seen]) -> set[str]:
    """Look at the agents whose gates are closed; the names of those that open."""
    closed = sorted(name for name in before if name.startswith(AGENT))[:MOST_KEYS]
    memory = gates.leased_mb(conn) if closed else {}
    opened = set()
    for name in closed:
        agent = name.removeprefix(AGENT)
        policy = standing.book.agent(agent)
        flying = gates.in_flight(conn, agent, policy.max_in_flight, exact=True) if policy.max_in_flight else 0
        use = standing.agents[agent] = Use(flying, memory.get(agent, 0))
        use.closed = agent_gate(policy, use).closed
        if not use.closed:
            opened.add(name)
    return opened


def _call_back(conn: Connection, quiet: Collection[str], standing: Standing) -> None:
    """It is quiet no more: who was let go and has not started waits again."""
    ids = _unstarted(conn, quiet)
    blocked.park(conn, ids, QUIET, f"waits until it is quiet: {standing.quiet.reason}")
    for gate in (QUIET, CAPACITY):
        gates.let_go(conn, gate, ids)


def _unstarted(conn: Connection, job_ids: Collection[str]) -> list[str]:
    """Those that wait for a worker, without those of which somebody holds a row; locked, and so are their holds."""
    waiting = jobs.c.queued.in_(DUE)
    found = by_key(select(jobs.c.job_id), jobs).where(jobs.c.job_id.in_(sorted(job_ids)), waiting)
    free = list(conn.execute(found.with_for_update(skip_locked=True)).scalars())
    return sorted(gates.unheld(conn, (QUIET, CAPACITY), free))


def _take_back(conn: Connection, prospects: _Prospects, holders: Collection[str]) -> set[str]:
    """Who was let go and cannot start gives back what others can use, and meets the gates again when it can."""
    waiting = jobs.c.queued.in_((Queued.BLOCKED, *DUE))
    columns = (jobs.c.job_id, jobs.c.lane, jobs.c.queued, jobs.c.blocked_on)
    found = by_key(select(*columns), jobs).where(jobs.c.job_id.in_(sorted(holders)), waiting)
    idle: set[str] = set()
    stuck: dict[str, list[str]] = defaultdict(list)
    for row in conn.execute(found) if holders else ():
        if row.queued == Queued.BLOCKED:
            idle |= {row.job_id} if row.blocked_on.startswith(WAITS_FOR_CAP) else set()
        elif prospects.shut(row.lane):
            stuck[row.lane].append(row.job_id)
    for lane, job_ids in sorted(stuck.items()):
        ids = _unstarted(conn, job_ids)
        blocked.park(conn, ids, f"{LANE}{lane}", prospects.shut(lane) or "")
        idle |= {*ids}
    idle = gates.unheld(conn, (QUIET, CAPACITY), idle)
    for gate in (QUIET, CAPACITY):
        gates.let_go(conn, gate, idle)
    return idle


def _keys(conn: Connection, standing: Standing, prospects: _Prospects, walk: Walk) -> Iterator[str]:
    """What anybody may wait for at the gates that are open now, the gates nearest to the end first."""
    yield from (CAPACITY, LARGE)
    if standing.quiet.so:
        yield QUIET
    for key in blocked.waited_for(conn, limit=MOST_KEYS, kind=LANE):
        if not prospects.shut(key.removeprefix(LANE)):
            yield key
    if standing.memory is None or not standing.memory.closed:
        yield MEMORY
    for key in blocked.waited_for(conn, limit=MOST_KEYS, kind=DEPTH):
        lane = key.removeprefix(DEPTH)
        limit = standing.book.admission.queue_depth and standing.book.admission.queue_depth.limit(lane)
        standing.lanes[lane] = Waiting(gates.waiting_in(conn, lane, limit) if limit else 0)
        yield key
    names = blocked.waited_for(conn, walk.after, MOST_KEYS, AGENT)
    walk.after = names[-1] if len(names) >= MOST_KEYS else ""
    for key in names:
        agent = key.removeprefix(AGENT)
        if agent not in standing.agents:
            limit = standing.book.agent(agent).max_in_flight
            standing.agents[agent] = Use(gates.in_flight(conn, agent, limit) if limit else 0)
        if not standing.agents[agent].closed:
            yield key


class _Prospects:
    """Who could start now, as far as lanes and caps go: units that wait with a job for those are nobody's."""

    def __init__(self, conn: Connection, book: Book) -> None:
        self._conn = conn
        self._room = caps.Room(book)
        self._shut: dict[str, str | None] = {}

    def shut(self, lane: str) -> str | None:
        """Why nothing of this lane starts."""
        if lane not in self._shut:
            closed = None if pools.takes_jobs(self._conn, lane) else f"pool {lane} takes no jobs"
            self._shut[lane] = self._room.book.closed(lane) or closed
        return self._shut[lane]

    def see(self, waiting: Sequence[Any]) -> None:
        caps.look(self._conn, self._room, [self._caps_of(row) for row in waiting])

    def stopped(self, row: Any) -> Closed | None:
        if why := self.shut(row.lane):
            return Closed("queue", f"{LANE}{row.lane}", Overloaded(why))
        key = self._room.full(self._caps_of(row))
        return None if key is None else Closed("queue", WAITS_FOR_CAP + key, Overloaded(self._room.why(key)))

    def take(self, row: Any) -> None:
        self._room.take(self._caps_of(row))

    def _caps_of(self, row: Any) -> dict[str, int]:
        return caps.caps_of(self._room.book, row.lane, row)


_COLUMNS = (
    *(jobs.c.job_id, jobs.c.lane, jobs.c.agent, jobs.c.type, jobs.c.model_id, jobs.c.concurrency_keys),
    *(jobs.c.min_memory_mb, jobs.c.cost_units, jobs.c.constraints),
)


class _Leaving:
    """Lets jobs go, in order of rank, while they fit. Who meets the next gate waits there."""

    def __init__(
        self, conn: Connection, standing: Standing, units: Collection[str], room: int, prospects: _Prospects
    ) -> None:
        self._conn = conn
        self._standing = standing
        #: Jobs that hold what they cost since an earlier attempt.
        self._units = units
        #: How many more may run because they were let go.
        self._room = room
        self._prospects = prospects

    def of(self, key: str) -> list[Row[Any]]:
        freed: list[Row[Any]] = []
        moved: dict[tuple[str, str], list[Any]] = defaultdict(list)
        waiting = blocked.first_rows(self._conn, key, BATCH, *_COLUMNS)
        # What they hold since an earlier attempt is written again.
        free = gates.unheld(self._conn, (QUIET, CAPACITY, key), {row.job_id for row in waiting})
        waiting = [row for row in waiting if row.job_id in free]
        self._prospects.see(waiting)
        for row in waiting:
            asked = self._asked(row)
            if self._holds_more(asked) and self._room <= 0:
                break
            closed = admission.go_on(asked, self._standing, key)
            if closed is None:
                self._room -= self._holds_more(asked)
                self._prospects.take(row)
                freed.append(row)
            elif closed.key != key:
                moved[closed.key, closed.reason].append(row)
            elif key not in (QUIET, LARGE):
                # Those behind it wait for the same; units they must not take from under it.
                self._standing.spoken_for |= key == CAPACITY
                break
        self._write(key, freed, moved)
        return freed

    def _write(self, key: str, freed: Sequence[Any], moved: Mapping[tuple[str, str], Sequence[Any]]) -> None:
        blocked.let_go(self._conn, [row.job_id for row in freed])
        for (on, reason), rows in moved.items():
            blocked.wait_elsewhere(self._conn, [row.job_id for row in rows], on, reason)
        holds = [one for row in freed for one in self._holds(row)]
        if key.startswith(AGENT):
            holds += [Hold(key, row.job_id) for row in (*freed, *chain.from_iterable(moved.values()))]
        gates.hold(self._conn, holds)

    def _asked(self, row: Any) -> Asked:
        return Asked(
            row.lane,
            row.agent,
            needs_memory=row.min_memory_mb != 0,
            cost_units=0.0 if row.job_id in self._units else row.cost_units or 0.0,
            quiet=row.constraints is not None,
            stopped=self._prospects.stopped(row) if row.constraints or row.cost_units else None,
        )

    def _holds_more(self, asked: Asked) -> bool:
        return asked.quiet or bool(asked.cost_units and self._standing.book.admission.capacity)

    def _holds(self, row: Any) -> Iterator[Hold]:
        if row.constraints is not None:
            yield Hold(QUIET, row.job_id)
        if row.cost_units and self._standing.book.admission.capacity:
            yield Hold(CAPACITY, row.job_id, row.cost_units)
