"""Who is let in, in the transaction that stores the jobs: each step sees what those before it let pass.

Whatever can be told without counting comes first (pauses, gates), then an agent's rate, then what jobs that run now
leave room for. A token that was taken for a job which a later step refuses goes back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from orchestrator.admission import FREELY, Admitted, Decision, label
from orchestrator.errors import RateLimited
from orchestrator.jobs import NewJob
from orchestrator.policies import Book
from orchestrator.rates import Limit
from orchestrator.store import caps
from orchestrator.store.entrance import Entrance
from orchestrator.store.policies import Copy
from orchestrator.store.rates import Level, Taking
from orchestrator.telemetry import metrics

#: Decides about new jobs by the policies, in the transaction that stores them: a decision for each, in order.
Step = Callable[[Connection, Book, Sequence[NewJob]], Sequence[Decision]]

#: What comes after the rates. Before them are the gates; the order is that of refusals.
AFTER: tuple[Step, ...] = (caps.admit,)

#: Agents whose buckets a process remembers; more are asked for every time.
MAX_REMEMBERED = 10_000
#: A job with an id of its own may be a repeat, which the database would answer with what it was: rather than make it
#: wait longer than this, ask.
PATIENCE_S = 1.0


class Admission:
    """One process's. Thread-safe."""

    def __init__(self, policies: Copy, before: Sequence[Step] | None = None, after: Sequence[Step] = AFTER) -> None:
        self.policies = policies
        self.before = (Entrance().admit,) if before is None else tuple(before)
        self.after = tuple(after)
        self._remembered: dict[str, Level] = {}
        self._on_the_way: Counter[str] = Counter()
        self._lock = threading.Lock()
        #: Whether the last transaction held buckets, which the next will therefore wait for.
        self.holds_buckets = False

    def ruling(self) -> Ruling:
        """For one transaction."""
        return Ruling(self)

    def refuse_early(self, jobs: Sequence[NewJob]) -> list[RateLimited] | None:
        """When all of these are over their agents' rates for all we know: the errors, without asking the database.

        Since we saw a bucket, others can only have taken from it, and those of ours that are on their way will. (Unless
        they are refused for another reason: then somebody waited for a moment in vain.) None: ask.
        """
        book = self.policies.fresh()
        if book is None or not self._remembered:
            return None
        refused: list[RateLimited] = []
        ahead: Counter[str] = Counter()
        for job in jobs:
            agent = job.spec.agent
            limit, level = Limit.of(book.agent(agent)), self._remembered.get(agent)
            if limit is None or level is None or level.bucket.limit != limit:
                return None
            bucket = level.bucket.after(time.monotonic() - level.looked_at).less(self._on_the_way[agent])
            if bucket.give(1)[0] or (not job.generated_id and bucket.wait_s() > PATIENCE_S):
                return None
            refused.append(RateLimited(agent, limit.rate, bucket.wait_s(ahead[agent])))
            ahead[agent] += 1
        for error in refused:
            metrics.admission_decided(*label(error))
        return refused

    def on_the_way(self, jobs: Sequence[NewJob], stored: Future[Any]) -> None:
        """They will want tokens when they get there. Not those with ids of their own, which may be there already."""
        wanted = Counter(job.spec.agent for job in jobs if job.generated_id and job.spec.agent in self._remembered)
        if wanted:
            with self._lock:
                self._on_the_way.update(wanted)
            stored.add_done_callback(lambda _: self._there(wanted))

    def _there(self, wanted: Counter[str]) -> None:
        with self._lock:
            self._on_the_way -= wanted  # and without those of which none is left

    def remember(self, levels: dict[str, Level]) -> None:
        self.holds_buckets = bool(levels)
        if len(self._remembered) + len(levels) > MAX_REMEMBERED:
            self._remembered = {}
        self._remembered |= levels


class Ruling:
    """What was decided in one transaction. When that runs again, all is decided anew, and only the last counts."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._decisions: list[Decision] = []
        self._rates = Taking()

    def decide(self, conn: Connection, fresh: Sequence[NewJob]) -> list[Decision]:
        self._decisions, self._rates = [FREELY] * len(fresh), Taking()
        if fresh:
            book = self._admission.policies.book(conn)
            for step in (*self._admission.before, self._rates.take):
                self._apply(conn, book, fresh, step)
            paid = self._admitted()
            for step in self._admission.after:
                self._apply(conn, book, fresh, step)
            refused = set(paid).difference(self._admitted())
            self._rates.give_back(conn, [fresh[n] for n in sorted(refused)])
        return self._decisions

    def committed(self) -> None:
        """Call it then, and not before: what was rolled back did not happen."""
        self._count(self._decisions)
        self._admission.remember(self._rates.levels)

    def rolled_back(self) -> None:
        """All or none were to come in, and one did not: that one was decided about, the others were not."""
        self._count([decision for decision in self._decisions if not isinstance(decision, Admitted)])

    def _count(self, decisions: Sequence[Decision]) -> None:
        for (decision, reason), count in Counter(map(label, decisions)).items():
            metrics.admission_decided(decision, reason, count)

    def _apply(self, conn: Connection, book: Book, fresh: Sequence[NewJob], step: Step) -> None:
        places = self._admitted()
        for place, decision in zip(places, step(conn, book, [fresh[n] for n in places]), strict=True):
            self._decisions[place] = _both(self._decisions[place], decision)

    def _admitted(self) -> list[int]:
        return [n for n, decision in enumerate(self._decisions) if isinstance(decision, Admitted)]


def _both(first: Decision, second: Decision) -> Decision:
    """One refusal is enough. A job waits for one thing at a time: for what else, the claim tells it then."""
    if first is FREELY or not isinstance(first, Admitted) or not isinstance(second, Admitted):
        return second
    waits = first if first.blocked_on is not None else second
    return replace(waits, on_cpu=first.on_cpu or second.on_cpu)
