"""Who works for which pool while a decision is made: what pools lack, and whom they can spare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from orchestrator.placement import Resident
from orchestrator.warmth import worth
from orchestrator.warmth.views import Pool, State, Terms, Worker

#: Who can be spared most easily comes first.
_EASE = {State.IDLE: 0, State.LOADING: 1, State.BUSY: 2}


class Spare(NamedTuple):
    """A worker that may leave, at a price."""

    resident: Resident
    pool: Pool
    worker: Worker


class Staff:
    def __init__(self, pools: Iterable[Pool], workers: Iterable[Worker], terms: Terms) -> None:
        # Sorted: the same facts lead to the same decision, in whatever order the database names them.
        self.pools = {pool.pool_id: pool for pool in sorted(pools, key=lambda pool: pool.pool_id)}
        self._workers = {worker.key: worker for worker in sorted(workers, key=_ease)}
        self.leaving = [worker for worker in self._workers.values() if worker.leaving]
        self._staying: dict[str, list[Worker]] = {}
        for worker in self._workers.values():
            if not worker.leaving:
                self._staying.setdefault(worker.pool_id, []).append(worker)
        self._expected: Counter[str] = Counter()
        self._terms = terms
        self._spares: dict[str, list[Spare]] = {}
        self._line = worth.Line.of(self.pools.values(), len(self._workers))

    def worker(self, key: str) -> Worker:
        return self._workers[key]

    def size(self, pool_id: str) -> int:
        """Workers that stay or are to come."""
        return len(self._staying.get(pool_id, ())) + self._expected[pool_id]

    def expect(self, pool: Pool) -> None:
        """One more will come."""
        self._expected[pool.pool_id] += 1

    def dismiss(self, worker: Worker) -> None:
        self._staying[worker.pool_id].remove(worker)
        self._spares.pop(worker.pool_id, None)
        self.leaving.append(worker)

    def unwanted(self) -> list[tuple[Worker, str]]:
        """Those who should leave even if nobody needs their room."""
        return [found for name, staying in self._staying.items() for found in _unwanted(self.pools.get(name), staying)]

    def in_line(self) -> list[Pool]:
        """Pools that want more."""
        wanting = [pool for pool in self.pools.values() if self.why_more(pool)]
        return sorted(wanting, key=lambda pool: self.bid(pool).place_in_line())

    def bid(self, pool: Pool) -> worth.Bid:
        return worth.Bid.of(pool, self.size(pool.pool_id), self._line, self._terms)

    def why_more(self, pool: Pool) -> str | None:
        size = self.size(pool.pool_id)
        if pool.drained or size >= pool.max_workers:
            return None
        if size < pool.min_workers:
            return f"{size} of at least {pool.min_workers} workers"
        if pool.waiting > self._ready(pool) and worth.crowded(pool, size):
            return f"{pool.waiting} jobs wait, the oldest for {pool.oldest_wait_s:.0f} s"
        return None

    def _ready(self, pool: Pool) -> int:
        """Workers that will take a job as soon as they can."""
        staying = self._staying.get(pool.pool_id, ())
        return sum(worker.state is not State.BUSY for worker in staying) + self._expected[pool.pool_id]

    def spare(self) -> Iterator[Spare]:
        """Workers that their pools could do without, by the rules."""
        for name, staying in self._staying.items():
            found = self._spares.get(name)
            if found is None:
                pool = self.pools.get(name)
                found = self._spares[name] = list(self._spare_of(pool, staying)) if pool and not pool.pinned else []
            yield from found

    def _spare_of(self, pool: Pool, staying: list[Worker]) -> Iterator[Spare]:
        """The more of a pool go, the dearer the next."""
        size = len(staying)
        for number, worker in enumerate(staying[: max(size - pool.min_workers, 0)]):
            if worker.state is State.LOADING or worker.resident_s < self._terms.resident_min_s:
                continue
            busy = worker.state is State.BUSY
            price = worth.WORKING_S + worth.queued_s(pool, size) if busy else worth.regret_s(pool, size - number)
            yield Spare(_resident(worker, price), pool, worker)

    def why_so_many(self, pool_id: str) -> str:
        pool, size = self.pools[pool_id], self.size(pool_id)
        if pool.drained:
            return "drained"
        if size == 0:
            return "nobody asks for it"
        if size <= pool.min_workers:
            return f"at least {pool.min_workers}"
        return (
            "all are wanted"
            if pool.waiting
            else f"held: nobody needs their room, idle for less than {pool.hold_s:.0f} s"
        )


def _resident(worker: Worker, price: float) -> Resident:
    return Resident(worker.key, worker.gpu_uuids, worker.memory_mb, worker.idle_s, worker.resident_s, regret=price)


def _ease(worker: Worker) -> tuple[int, float, str]:
    return _EASE[worker.state], -worker.idle_s, worker.key


def _unwanted(pool: Pool | None, staying: list[Worker]) -> Iterator[tuple[Worker, str]]:
    if pool is None or pool.drained:
        yield from ((worker, "its pool is drained") for worker in staying)
        return
    size = len(staying)
    for number, worker in enumerate(staying[: max(size - pool.min_workers, 0)]):
        if number < size - pool.max_workers:
            yield worker, f"{size} of at most {pool.max_workers} workers"
        elif worker.state is State.IDLE and worker.idle_s >= pool.hold_s and not pool.pinned and not pool.waiting:
            yield worker, f"idle for {worker.idle_s:.0f} s"
