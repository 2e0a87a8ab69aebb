"""Agents' token buckets as rows: whoever stores jobs of an agent holds its bucket until the commit.

A bucket that has no row is full. Repeated submits never get here, and what the transaction does not store in the end
gets its token back: only jobs that were let in cost any.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, select

from orchestrator.admission import FREELY, Decision
from orchestrator.errors import RateLimited
from orchestrator.jobs import NewJob
from orchestrator.policies import Book
from orchestrator.rates import Bucket, Limit
from orchestrator.store.dialect import by_key, clock, upsert
from orchestrator.store.hot import insert_rows
from orchestrator.store.schema import rate_buckets


class Level(NamedTuple):
    """What a transaction left in a bucket, and our own monotonic time before it looked: there cannot be more since."""

    bucket: Bucket
    looked_at: float


class Taking:
    """The tokens of one transaction."""

    def __init__(self) -> None:
        self.levels: dict[str, Level] = {}
        self._now: datetime | None = None

    def take(self, conn: Connection, book: Book, fresh: Sequence[NewJob]) -> list[Decision]:
        """A token for each new job whose agent has a rate, first come, first served. Without rates: no statement."""
        wanted = Counter(job.spec.agent for job in fresh)
        limits = {agent: limit for agent in sorted(wanted) if (limit := Limit.of(book.agent(agent)))}
        if not limits:
            return [FREELY] * len(fresh)
        rows = _locked(conn, limits)
        looked_at = time.monotonic()
        # Only now: a clock that was read before the wait for the lock is behind those who had it meanwhile.
        self._now = clock(conn)
        found = {agent: _refilled(limits[agent], rows.get(agent), self._now) for agent in limits}
        given = {agent: found[agent].give(wanted[agent]) for agent in limits}
        self.levels = {agent: Level(bucket, looked_at) for agent, (_, bucket) in given.items()}
        taken = {agent for agent, (count, _) in given.items() if count}
        self._write(conn, sorted(taken & rows.keys()))
        # A row that somebody else made meanwhile breaks this statement, and with it the transaction, which runs again.
        insert_rows(conn, rate_buckets, [self._row(agent) for agent in sorted(taken - rows.keys())])
        return _decisions(fresh, {agent: count for agent, (count, _) in given.items()}, self.levels)

    def give_back(self, conn: Connection, refused: Iterable[NewJob]) -> None:
        """Jobs that had a token and were then refused for another reason."""
        counts = Counter(job.spec.agent for job in refused if job.spec.agent in self.levels)
        for agent, count in counts.items():
            level = self.levels[agent]
            self.levels[agent] = level._replace(bucket=level.bucket.refunded(count))
        self._write(conn, list(counts))

    def _write(self, conn: Connection, agents: list[str]) -> None:
        """Rows that are there, and held: one statement for all of them, which therefore adds none."""
        if agents:
            upsert(conn, rate_buckets, [self._row(agent) for agent in agents], lambda _new: {})

    def _row(self, agent: str) -> dict[str, object]:
        return {"agent": agent, "tokens": self.levels[agent].bucket.tokens, "refilled_at": self._now}


def _locked(conn: Connection, agents: Iterable[str]) -> dict[str, tuple[float, datetime]]:
    """In one order for all: two batches of the same agents wait for each other instead of deadlocking."""
    found = select(rate_buckets).where(rate_buckets.c.agent.in_(agents)).order_by(rate_buckets.c.agent)
    rows = conn.execute(by_key(found, rate_buckets).with_for_update())
    return {row.agent: (row.tokens, row.refilled_at) for row in rows}


def _refilled(limit: Limit, row: tuple[float, datetime] | None, now: datetime) -> Bucket:
    if row is None:
        return Bucket.full(limit)
    tokens, refilled_at = row
    return Bucket(limit, tokens).after((now - refilled_at).total_seconds())


def _decisions(fresh: Sequence[NewJob], tokens: dict[str, int], levels: dict[str, Level]) -> list[Decision]:
    decisions: list[Decision] = []
    ahead: Counter[str] = Counter()
    for job in fresh:
        agent = job.spec.agent
        if agent not in tokens:
            decisions.append(FREELY)
        elif tokens[agent] > 0:
            tokens[agent] -= 1
            decisions.append(FREELY)
        else:
            # Those before it will want the next tokens themselves.
            bucket = levels[agent].bucket
            decisions.append(RateLimited(agent, bucket.limit.rate, bucket.wait_s(ahead[agent])))
            ahead[agent] += 1
    return decisions
