"""The gates as an admission step: what this process saw a moment ago decides about the jobs of a batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, func, select

from orchestrator import admission
from orchestrator.admission import FREELY, Decision
from orchestrator.gates import AGENT, MEMORY, Asked, Standing, Use, Waiting, over_mark
from orchestrator.jobs import NewJob
from orchestrator.policies import Book
from orchestrator.store import gates
from orchestrator.store.dialect import clock
from orchestrator.store.gates import Hold, Seen
from orchestrator.store.schema import workers

#: Seconds for which a process decides by what it saw. What took long is kept longer: looking may not cost more than a
#: tenth of the time.
FRESH_S, KEEP_FACTOR = 0.5, 10
#: Seconds over which a lane's speed is measured.
SPEED_S = 10.0
#: Lanes and agents to remember, before all are forgotten.
MOST_KNOWN = 10_000

T = TypeVar("T")


class Entrance:
    """One per process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[float, Any]] = {}
        #: Per lane, how many jobs its workers had ended at a moment.
        self._ended: dict[str, tuple[float, int]] = {}

    def admit(self, conn: Connection, book: Book, fresh: Sequence[NewJob]) -> list[Decision]:
        """Decide about new jobs, in the transaction that stores them. Without policies it costs no statement."""
        if not book.gates and not any(job.spec.constraints for job in fresh):
            return [FREELY] * len(fresh)
        now = self._now(conn)
        asked = [_asked(job, now) for job in fresh]
        standing = self._standing(conn, book, asked)
        with self._lock:  # what one batch counts, the next one must see
            decisions = [admission.decide(one, standing) for one in asked]
            shut = _newly_shut(standing, asked, decisions)
        gates.close_agents(conn, shut, now)
        gates.hold(conn, _in_flight(book, fresh, decisions))
        return decisions

    def _now(self, conn: Connection) -> datetime:
        at: float
        then: datetime
        at, then = self._look(("now", ""), lambda: (time.monotonic(), clock(conn)))
        return then + timedelta(seconds=time.monotonic() - at)

    def _standing(self, conn: Connection, book: Book, asked: Sequence[Asked]) -> Standing:
        seen = self._look(("states", ""), lambda: gates.states(conn))
        standing = Standing(book, seen[MEMORY].fresh if MEMORY in seen else None)
        depth = book.admission.queue_depth
        for lane in {one.lane for one in asked} if depth else ():
            limit = depth.limit(lane) if depth else None
            if limit is not None:
                standing.lanes[lane] = self._look(("lane", lane), partial(self._waiting, conn, lane, limit))
        for agent in {one.agent for one in asked}:
            if book.agent(agent).limits:
                standing.agents[agent] = self._look(("agent", agent), partial(self._use, conn, book, agent, seen))
        return standing

    def _waiting(self, conn: Connection, lane: str, limit: int) -> Waiting:
        count = gates.waiting_in(conn, lane, limit + 1)
        return Waiting(count, self._speed(conn, lane) if count >= limit else None)

    def _use(self, conn: Connection, book: Book, agent: str, seen: dict[str, Seen]) -> Use:
        policy = book.agent(agent)
        flying = gates.in_flight(conn, agent, policy.max_in_flight) if policy.max_in_flight else 0
        memory = self._look(("leased", ""), lambda: gates.leased_mb(conn)) if policy.max_memory_mb else {}
        return Use(flying, memory.get(agent, 0), closed=f"{AGENT}{agent}" in seen)

    def _speed(self, conn: Connection, lane: str) -> float | None:
        """Jobs of a lane that end in a second, as far as that was seen since it is full."""
        done = select(func.sum(workers.c.jobs_done + workers.c.jobs_failed)).where(workers.c.pool_id == lane)
        ended, now = int(conn.execute(done).scalar() or 0), time.monotonic()
        at, before = self._ended.setdefault(lane, (now, ended))
        if now - at > SPEED_S or ended < before:
            self._ended[lane] = now, ended
        return (ended - before) / (now - at) if ended > before else None

    def _look(self, key: tuple[str, str], ask: Callable[[], T]) -> T:
        started = time.monotonic()
        until, known = self._known.get(key, (started, None))
        if started < until:
            kept: T = known
            return kept
        value = ask()
        ended = time.monotonic()
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = ended + max(FRESH_S, KEEP_FACTOR * (ended - started)), value
        return value


def _asked(job: NewJob, now: datetime) -> Asked:
    spec = job.spec
    return Asked(
        spec.pool_id,
        spec.agent,
        spec.type,
        spec.model_id,
        needs_memory=spec.min_memory_mb != 0,
        cpu_fallback=spec.cpu_fallback,
        cost_units=spec.cost_units or 0.0,
        quiet=bool(spec.constraints and spec.constraints.get("quiet")),
        later=job.not_before is not None and job.not_before > now,
    )


def _newly_shut(standing: Standing, asked: Sequence[Asked], decisions: Sequence[Decision]) -> dict[str, str]:
    """Agents that met their marks just now, and why: their gates stay closed until the leader opens them."""
    shut: dict[str, str] = {}
    for one, decision in zip(asked, decisions, strict=True):
        use = standing.agent(one.agent)
        if use.closed or admission.is_counted(decision):
            continue
        if why := over_mark(standing.book.agent(one.agent), use):
            shut[one.agent], use.closed = why, True
    return shut


def _in_flight(book: Book, fresh: Sequence[NewJob], decisions: Sequence[Decision]) -> list[Hold]:
    return [
        Hold(f"{AGENT}{job.spec.agent}", job.job_id)
        for job, decision in zip(fresh, decisions, strict=True)
        if admission.is_counted(decision) and book.agent(job.spec.agent).max_in_flight is not None
    ]
