"""What a warm worker is worth to its pool, and what a further one is worth to a pool that waits: both in seconds."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from orchestrator.warmth.views import Pool, Terms

#: Seconds ahead for which it matters whether a model is asked for again.
AHEAD_S = 120.0
#: Waiting that is accepted, as a part of the load time it saves, before a model is loaded in another's place.
THRIFT = 0.5
#: A pool gets another worker when those it has would need so many load times for what waits.
CROWDED = 4.0
#: A job that waited for `patience_s` has a working model sent away if that one's own jobs wait less by this part ...
SLACK = 0.3
#: ... or by so many seconds.
SLACK_MOST_S = 1800.0
#: More than any load takes: sets workers apart that have work from those that have none.
MOST_S = 1e6


class Bid(NamedTuple):
    """What a pool offers for room that others hold."""

    seconds: float
    oldest_wait_s: float
    #: It has no worker at all, and its oldest job has lost its patience: idle models leave whatever they are worth.
    overdue: bool

    @classmethod
    def of(cls, pool: Pool, workers: int, terms: Terms) -> Bid:
        # A further worker spares only a part of the waiting; without the load it could spare more.
        spared = waited_s(pool) / (workers + 1) - THRIFT * pool.load_s
        return cls(spared, pool.oldest_wait_s, workers == 0 and pool.oldest_wait_s >= terms.patience_s)

    def beats(self, regret_s: float) -> bool:
        return self.overdue or self.seconds >= regret_s

    def overtakes(self, rival: Pool) -> bool:
        """Whether a worker of that pool should leave its own jobs to others, or to later."""
        ahead_s = self.oldest_wait_s - rival.oldest_wait_s
        return self.overdue and ahead_s >= min(SLACK * self.oldest_wait_s, SLACK_MOST_S)


def waited_s(pool: Pool) -> float:
    """What its jobs have waited so far, all together: the oldest is known, the others are spread evenly behind it."""
    return pool.oldest_wait_s * (pool.waiting + 1) / 2


def crowded(pool: Pool, workers: int) -> bool:
    """Whether a further worker would be loaded long before the present ones are done with what waits."""
    return workers == 0 or pool.waiting * pool.run_s / workers > CROWDED * pool.load_s


def pressure(pool: Pool, workers: int) -> float:
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
