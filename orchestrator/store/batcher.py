"""Group commit: many callers, one transaction.

Callers hand in items and get futures. One thread takes everything that arrived while the last batch was being
committed and flushes it together. There is no timer: an idle batcher flushes a lone item at once, a busy one
batches by itself, the more the busier it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from orchestrator.errors import Overloaded, Unavailable

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Batcher(Generic[Item, Outcome]):
    """`flush` takes items and returns one outcome each, in order; an outcome that is an exception is raised to
    that item's caller alone. `weight` counts what an item adds to a batch (an item may be a list itself).

    When `flush` itself raises, the batch is halved until the item at fault stands alone, so one bad item never
    fails its neighbours. Only `Unavailable` fails all at once: no split mends a server that is away.
    """

    def __init__(
        self,
        name: str,
        flush: Callable[[list[Item]], Sequence[Outcome | Exception]],
        *,
        weight: Callable[[Item], int] = lambda _item: 1,
        max_batch: int = 500,
        max_waiting: int = 50_000,
    ) -> None:
        self._flush = flush
        self._weight = weight
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Item, Future[Outcome]]] = deque()
        self._arrived = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> Future[Outcome]:
        """Hand in one item. Raises Overloaded when too much waits already."""
        future: Future[Outcome] = Future()
        with self._arrived:
            if self._closing:
                message = f"{self._thread.name} is shutting down"
                raise Overloaded(message)
            if len(self._waiting) >= self._max_waiting:
                message = f"{self._thread.name}: {len(self._waiting)} writes wait already"
                raise Overloaded(message)
            self._waiting.append((item, future))
            self._arrived.notify()
        return future

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush what waits, stop the thread; False when that took longer than `timeout_s`."""
        with self._arrived:
            self._closing = True
            self._arrived.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while (batch := self._take()) is not None:
            if batch:
                self._settle(batch)

    def _take(self) -> list[tuple[Item, Future[Outcome]]] | None:
        """The next batch; None when closed and drained. An item is always taken whole, however heavy."""
        batch, weight = [], 0
        with self._arrived:
            self._arrived.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            while self._waiting and weight < self._max_batch:
                item, future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():  # a caller may have gone away meanwhile
                    batch.append((item, future))
                    weight += self._weight(item)
        return batch

    def _settle(self, batch: list[tuple[Item, Future[Outcome]]]) -> None:
        outcomes: Sequence[Outcome | Exception]
        try:
            outcomes = self._flush([item for item, _ in batch])
            if len(outcomes) != len(batch):
                raise AssertionError(f"{self._thread.name}: {len(outcomes)} answers to {len(batch)} items")
        except Unavailable as away:
            outcomes = [away] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to one of the items
            if len(batch) > 1:
                middle = len(batch) // 2
                self._settle(batch[:middle])
                self._settle(batch[middle:])
                return
            outcomes = [error]
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
