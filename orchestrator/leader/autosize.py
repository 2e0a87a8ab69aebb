"""Pools that size themselves: between their limits, by what waits for them and by the GPU memory there is.

What `warmth` decides upon is read from rows, but for two averages that the leader keeps for itself, because nobody
writes them down: how often jobs arrive in a lane, and how long they run. A new leader begins with what is usual.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator import warmth
from orchestrator.crews import PoolView
from orchestrator.leader.term import Term
from orchestrator.placement import Cluster
from orchestrator.pools import OPEN
from orchestrator.settings import Settings
from orchestrator.store import demand, residency
from orchestrator.store.demand import Demand
from orchestrator.warmth import Average, Rate, State, Worker

#: Seconds that a job runs, and that a model loads, before either was seen.
USUAL_RUN_S, USUAL_LOAD_S = 10.0, 30.0


@dataclass
class _Seen:
    """What a lane did since this leader looks at it."""

    at: float
    ended: int
    waiting: int
    busy_s: float = 0.0
    arrivals: Rate = field(default_factory=Rate)
    run_s: Average = field(default_factory=lambda: Average(USUAL_RUN_S))

    def note(self, now: float, found: Demand, busy: int) -> None:
        """Jobs that came are those that ended, and those that wait more than before. Time in use ÷ ends = run time."""
        ended = max(found.ended - self.ended, 0)  # workers of long ago are forgotten, and their counts with them
        self.arrivals.add(now, max(ended + found.waiting - self.waiting, 0))
        self.busy_s += busy * (now - self.at)
        if ended:
            self.run_s.add(self.busy_s / ended)
            self.busy_s = 0.0
        self.at, self.ended, self.waiting = now, found.ended, found.waiting


class Autosize:
    """For one term."""

    def __init__(self, settings: Settings) -> None:
        self._terms = warmth.Terms(settings.resident_min_s, settings.gpu_starvation_s)
        self._seen: dict[str, _Seen] = {}

    def look(self, term: Term, pools: Sequence[PoolView], cluster: Cluster) -> tuple[list[PoolView], dict[str, int]]:
        """The pools with what leaves them now, and how many workers those that size themselves should have."""
        own = [pool for pool in pools if pool.autosize and pool.provider == "local" and pool.state in OPEN]
        if not own:
            return list(pools), {}
        names = [pool.pool_id for pool in own]
        found = term.db.read(lambda conn: demand.of_pools(conn, names))
        for pool in own:
            self._note(pool, found[pool.pool_id])
        sizes = {pool.pool_id: by_backlog(pool, found[pool.pool_id].waiting) for pool in own if not pool.memory_mb}
        on_gpus = [pool for pool in own if pool.memory_mb]
        warm = term.db.read(lambda conn: demand.warm_workers(conn, [pool.pool_id for pool in on_gpus]))
        decision = warmth.decide(
            [self._pool(pool, found[pool.pool_id]) for pool in on_gpus],
            [worker for pool in on_gpus for worker in _workers(pool, [w for _, w in warm.get(pool.pool_id, [])])],
            cluster,
            self._terms,
        )
        leaving = {leave.key for leave in decision.leaves}
        if leaving:
            term.write(lambda conn: residency.ask_to_leave(conn, sorted(leaving)))
        sizes |= {pool.pool_id: math.ceil(decision.sizes[pool.pool_id].workers / pool.slots) for pool in on_gpus}
        parting = {
            name: dict(Counter(node for node, worker in held if worker.key in leaving or worker.leaving))
            for name, held in warm.items()
        }
        return [replace(pool, parting=parting.get(pool.pool_id, {})) for pool in pools], sizes

    def _note(self, pool: PoolView, found: Demand) -> None:
        now = time.monotonic()
        seen = self._seen.setdefault(pool.pool_id, _Seen(now, found.ended, found.waiting))
        seen.note(now, found, sum(crew.busy for crew in pool.crews))

    def _pool(self, pool: PoolView, found: Demand) -> warmth.Pool:
        seen = self._seen[pool.pool_id]
        return warmth.Pool(
            pool.pool_id,
            pool.ask,
            pool.minimum * pool.slots,
            pool.maximum * pool.slots,
            pool.hold_s,
            waiting=found.waiting,
            oldest_wait_s=found.oldest_wait_s,
            arrivals_per_s=seen.arrivals.per_s(time.monotonic()),
            run_s=seen.run_s.value,
            load_s=USUAL_LOAD_S if found.load_s is None else found.load_s,
        )


def by_backlog(pool: PoolView, waiting: int) -> int:
    """Workers of a pool that needs no GPU memory: one for each job, up as soon as they wait, down after the hold."""
    now = sum(count for (_, revision), count in pool.assigned.items() if revision == pool.revision)
    busy = sum(crew.busy for crew in pool.crews)
    needed = min(max(math.ceil((busy + waiting) / pool.slots), pool.minimum), pool.maximum)
    return min(max(now, needed), pool.maximum) if pool.in_use or pool.idle_s < pool.hold_s else pool.minimum


def _workers(pool: PoolView, warm: Sequence[Worker]) -> list[Worker]:
    """Its models in memory, and as many more as its nodes were told to start and that have no lease yet."""
    assigned = sum(count for (_, revision), count in pool.assigned.items() if revision == pool.revision) * pool.slots
    coming = max(assigned - sum(not worker.leaving for worker in warm), 0)
    return [
        *warm,
        *(Worker(f"coming:{pool.pool_id}:{n}", pool.pool_id, (), pool.memory_mb, State.LOADING) for n in range(coming)),
    ]
