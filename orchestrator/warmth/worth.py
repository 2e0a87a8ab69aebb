"""Whether a swap pays: what a warm worker is worth to its pool, and what a further one is worth to a pool that waits.

Both are seconds, of loading and of waiting. A load takes its time from everybody who waits for the same GPUs, so its
price is its time, once for its own pool and once more for each job that waits per worker. A pool may have an idle model
unloaded as soon as its jobs have waited, together, for as long as that costs: its own load, and the load that the other
pool is expected to need again. In a jam loads get dear by themselves, and pools wait until more jobs share one.

A pool that has workers wants another while each would still have two loads' worth of work beside it (the load it needs
and the one it may cause); others leave for it only if that is also more than what waits for workers elsewhere.

Nobody starves. One queue without warm models would make a job wait for what waits now, with a load for each job. A pool
without a worker is overdue when its oldest job has waited for `patience_s` and for `UNFAIR` times that. Then every idle
model leaves for it, and so does a working one, when its present job is over, whose own oldest job has waited for less
by `UNFAIR` times. So the first job of a pool waits for at most

    max(patience_s, UNFAIR × wait in one queue, UNFAIR × longest wait of the pools that have the GPUs)

and for its turn, `resident_min_s` + a job + a load for each pool that has been overdue for longer: unless all who could
leave are pinned, or at their minimum.
"""

from __future__ import annotations

from collections.abc import Collection
from math import exp, inf
from typing import NamedTuple

from orchestrator.warmth.seen import FADE_S
from orchestrator.warmth.views import Pool, Terms

#: So many times as long as one fair queue would take, or as others wait, is too long.
UNFAIR = 2.0
#: More than any load costs: sets workers that have work apart from those that have none.
WORKING_S = 1e9


class Line(NamedTuple):
    """Everybody who waits, for each worker there is."""

    jobs: float
    #: Seconds of their work, and with a load for each.
    work_s: float
    wait_s: float

    @classmethod
    def of(cls, pools: Collection[Pool], workers: int) -> Line:
        waiting = [pool for pool in pools if pool.waiting and not pool.drained]
        jobs = sum(pool.waiting for pool in waiting)
        work_s = sum(pool.waiting * pool.run_s for pool in waiting)
        load_s = sum(pool.waiting * pool.load_s for pool in waiting)
        share = 1 / max(workers, 1)
        return cls(jobs * share, work_s * share, (work_s + load_s) * share)

    @property
    def price(self) -> float:
        """What a second of loading costs, in seconds of waiting."""
        return 1.0 + self.jobs

    def due_s(self, terms: Terms) -> float:
        """How long a job waits before its pool is overdue."""
        return max(terms.patience_s, UNFAIR * self.wait_s)


class Bid(NamedTuple):
    """What a pool offers for room that others hold."""

    #: The regret up to which it may ask others to leave; below zero while a load would not pay at all.
    most_s: float
    oldest_wait_s: float
    #: How many times its waiting would pay for a load.
    urgency: float
    #: It has less than its minimum: idle models leave whatever they are worth.
    owed: bool
    #: Working ones leave too, if their own jobs wait for less.
    overdue: bool
    #: It has its share: it takes room that is free, last of all, and nobody leaves for it.
    content: bool

    @classmethod
    def of(cls, pool: Pool, workers: int, line: Line, terms: Terms) -> Bid:
        owed = workers < pool.min_workers
        overdue = workers == 0 and pool.waiting > 0 and pool.oldest_wait_s >= line.due_s(terms)
        content = not owed and not crowded(pool, workers, line.work_s)
        waited = waited_s(pool)
        most = inf if owed or overdue else -inf if content else waited / line.price - pool.load_s
        return cls(most, pool.oldest_wait_s, waited / max(pool.load_s, 0.1), owed, overdue, content)

    def place_in_line(self) -> tuple[bool, bool, bool, float]:
        """First who is owed a minimum, then who is overdue, longest first, then by how often the waiting pays a load.

        Whoever has somebody sent away must still be first when the room is free: else others take it, and more leave.
        """
        first = self.owed and not self.overdue
        urgency = self.oldest_wait_s if self.overdue else self.urgency
        return not first, not self.overdue, self.content, -urgency

    def beats(self, regret_s: float) -> bool:
        return regret_s <= self.most_s

    def offers_no_more_than(self, other: Bid) -> bool:
        return (self.most_s, self.overdue) <= (other.most_s, other.overdue) and (
            self.oldest_wait_s <= other.oldest_wait_s or not self.overdue
        )

    def overtakes(self, rival: Pool) -> bool:
        """Whether a worker of that pool should leave its own jobs to others, or to later."""
        return self.overdue and self.oldest_wait_s >= UNFAIR * rival.oldest_wait_s


def waited_s(pool: Pool) -> float:
    """What its jobs have waited so far, all together: the oldest is known, the others are spread evenly behind it."""
    return pool.oldest_wait_s * (pool.waiting + 1) / 2


def crowded(pool: Pool, workers: int, elsewhere_s: float = 0.0) -> bool:
    """Whether a further worker would still have enough to do: a load, the load that its room costs, and its share."""
    return workers == 0 or queued_s(pool, workers + 1) > 2 * pool.load_s + elsewhere_s


def queued_s(pool: Pool, workers: int) -> float:
    """Seconds of work that wait for each of its workers."""
    return pool.waiting * pool.run_s / max(workers, 1)


def regret_s(pool: Pool, workers: int) -> float:
    """Load time that is expected to be spent again if one of so many workers leaves.

    Jobs that arrive while all others are busy would want it back, for as long as the rate of arrivals holds.
    """
    missed_per_s = pool.arrivals_per_s * blocked(pool.arrivals_per_s * pool.run_s, workers - 1)
    return pool.load_s * (1.0 - exp(-missed_per_s * FADE_S))


def blocked(offered: float, servers: int) -> float:
    """The part of arrivals that find all servers busy (Erlang's loss formula)."""
    part = 1.0
    for server in range(1, servers + 1):
        part = offered * part / (server + offered * part)
    return part
