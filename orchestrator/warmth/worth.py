"""Whether a swap pays: what a warm worker is worth to its pool, and what a further one is worth to a pool that waits.

Both are seconds, of loading and of waiting. While queues are short, a second counts the same here and there: a pool
may have an idle model unloaded as soon as its jobs have waited, together, for as long as the swap is expected to cost.

A jam is the work that waits for each worker beyond what a rush of minutes brings. In a jam a load delays everybody
who waits, so loads get dearer, and pools wait until more of their jobs can share one. Nobody complains of what one
fair queue would make him wait too; who waits for much longer goes first.
"""

from __future__ import annotations

from math import exp, inf
from typing import NamedTuple

from orchestrator.warmth.views import Pool, Terms

#: Times `patience_s` of work that may wait for each worker before it is a jam.
JAM_FROM = 2.0
#: Seconds ahead for which it matters whether a model is asked for again.
AHEAD_S = 1200.0
#: Waiting that is accepted, as a part of the load time it saves, before a model is loaded in another's place.
THRIFT = 0.5
#: A pool wants another worker when those it has would need so many load times for what waits. Others leave for it only
CROWDED = 5.0
#: if they would also need so many jams: what waits for one of its workers is then far more than what waits for others.
UNFAIR = 3.0
#: A load costs its time once more for every so many seconds of jam.
DEARER_S = 1.0
#: A pool without a worker is overdue when its oldest job has waited for `patience_s` and so many jams.
LATE = 4.0
#: An overdue pool has a working model sent away whose own oldest job has waited less, by this part ...
SLACK = 0.6
#: ... or by so many seconds: a rival whose queue only grows is overtaken too.
SLACK_MOST_S = 1800.0
#: More than any load costs: sets workers that have work apart from those that have none.
WORKING_S = 1e9


class Bid(NamedTuple):
    """What a pool offers for room that others hold."""

    waited_s: float
    oldest_wait_s: float
    load_s: float
    #: What a second of loading costs.
    price: float
    #: It has less than its minimum, or is overdue: idle models leave whatever they are worth.
    owed: bool
    #: Working ones leave too, if their own jobs wait for less.
    overdue: bool
    #: It has its share: it takes room that is free, last of all, and nobody leaves for it.
    content: bool

    @classmethod
    def of(cls, pool: Pool, workers: int, jam_s: float, terms: Terms) -> Bid:
        overdue = workers == 0 and pool.waiting > 0 and pool.oldest_wait_s >= due_s(jam_s, terms)
        # A further worker spares only a part of the waiting.
        waited = waited_s(pool) / (workers + 1)
        owed = overdue or workers < pool.min_workers
        content = not owed and workers > 0 and queued_s(pool, workers) <= CROWDED * pool.load_s + UNFAIR * jam_s
        return cls(waited, pool.oldest_wait_s, pool.load_s, 1.0 + jam_s / DEARER_S, owed, overdue, content)

    def place_in_line(self) -> tuple[bool, bool, bool, float]:
        """First who is owed a minimum, then who is overdue, longest first, then by how soon the waiting pays a load.

        Whoever has somebody sent away must still be first when the room is free: else others take it, and more leave.
        """
        urgency = self.oldest_wait_s if self.overdue else self.waited_s / max(self.load_s, 0.1)
        return not (self.owed and not self.overdue), not self.overdue, self.content, -urgency

    def beats(self, regret_s: float) -> bool:
        return regret_s <= self.most_s

    @property
    def most_s(self) -> float:
        """The regret up to which it may ask others to leave; below zero while a load would not pay at all."""
        if self.owed or self.content:
            return inf if self.owed else -inf
        return self.waited_s / self.price - THRIFT * self.load_s

    def offers_no_more_than(self, other: Bid) -> bool:
        return (self.most_s, self.overdue) <= (other.most_s, other.overdue) and (
            self.oldest_wait_s <= other.oldest_wait_s or not self.overdue
        )

    def overtakes(self, rival: Pool) -> bool:
        """Whether a worker of that pool should leave its own jobs to others, or to later."""
        ahead_s = self.oldest_wait_s - rival.oldest_wait_s
        return self.overdue and ahead_s >= min(SLACK * self.oldest_wait_s, SLACK_MOST_S)


def due_s(jam_s: float, terms: Terms) -> float:
    return terms.patience_s + LATE * jam_s


def jam_s(pools: list[Pool], workers: int, terms: Terms) -> float:
    """Seconds of work that wait for each worker, beyond what is usual in a rush."""
    work_s = sum(pool.waiting * pool.run_s for pool in pools if pool.waiting and not pool.drained)
    return max(work_s / max(workers, 1) - JAM_FROM * terms.patience_s, 0.0)


def waited_s(pool: Pool) -> float:
    """What its jobs have waited so far, all together: the oldest is known, the others are spread evenly behind it."""
    return pool.oldest_wait_s * (pool.waiting + 1) / 2


def crowded(pool: Pool, workers: int) -> bool:
    """Whether a further worker would be loaded long before the present ones are done with what waits."""
    return workers == 0 or queued_s(pool, workers) > CROWDED * pool.load_s


def queued_s(pool: Pool, workers: int) -> float:
    """Seconds of work that wait for each of its workers."""
    return pool.waiting * pool.run_s / max(workers, 1)


def regret_s(pool: Pool, workers: int) -> float:
    """Load time that is expected to be spent again if one of so many workers leaves.

    Jobs that arrive while all others are busy would want it back.
    """
    missed_per_s = pool.arrivals_per_s * blocked(pool.arrivals_per_s * pool.run_s, workers - 1)
    return pool.load_s * (1.0 - exp(-missed_per_s * AHEAD_S))


def blocked(offered: float, servers: int) -> float:
    """The part of arrivals that find all servers busy (Erlang's loss formula)."""
    part = 1.0
    for server in range(1, servers + 1):
        part = offered * part / (server + offered * part)
    return part
