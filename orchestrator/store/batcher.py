"""Group commit: many callers, one transaction.

Callers hand in items and get futures. A thread takes everything that arrived while the last batch was being
committed and flushes it together. There is no timer: an idle batcher flushes a lone item at once, a busy one
batches by itself, the more the busier it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from orchestrator.errors import Overloaded, Unavailable
from orchestrator.telemetry import logs

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Batcher(Generic[Item, Outcome]):
    """Collects items and flushes them together.

    `flush` takes items and returns one outcome each, in order; an outcome that is an exception is raised to
    that item's caller alone. `weight` counts what an item adds to a batch (an item may be a list itself).

    When `flush` itself raises, the batch is halved until the item at fault stands alone, so one bad item never
    fails its neighbours. Only `Unavailable` fails all at once: no split mends a server that is away.

    With several `flushers` one prepares its statements while another waits for its commit; not while they go `alone`,
    since they would only wait for each other's locks, each with a part of what could share a commit.

    `linger` may ask for a moment's wait after the first item, until an `urgent` one arrives: for when it is known
    that more is about to come. By default nothing waits.

    `about` are the fields of the line about an item that failed and that nobody waits for: which job it is, and nothing
    of what it says, which may be a result.
    """

    def __init__(
        self,
        name: str,
        flush: Callable[[list[Item]], Sequence[Outcome | Exception]],
        *,
        weight: Callable[[Item], int] = lambda _item: 1,
        linger: Callable[[], float] = lambda: 0.0,
        urgent: Callable[[Item], bool] = lambda _item: True,
        flushers: int = 1,
        alone: Callable[[], bool] = lambda: False,
        about: Callable[[Item], dict[str, object]] = lambda _item: {},
        max_batch: int = 500,
        max_waiting: int = 50_000,
    ) -> None:
        self._flush = flush
        self._weight = weight
        self._linger = linger
        self._urgent = urgent
        self._alone = alone
        self._about = about
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Item, Future[Outcome] | None]] = deque()
        self._arrived = threading.Condition()
        self._asleep = 0
        self._flushing = 0
        self._closing = False
        self._name = name
        self._threads = [logs.thread(self._loop, f"{name}-{n}" if n else name) for n in range(flushers)]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item) -> Future[Outcome]:
        """Hand in one item. Raises Overloaded when too much waits already."""
        future: Future[Outcome] = Future()
        self._add(item, future)
        return future

    def post(self, item: Item) -> None:
        """Hand in one item whose outcome nobody waits for."""
        self._add(item, None)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Flush what waits, stop the threads; False when that took longer than `timeout_s`."""
        with self._arrived:
            self._closing = True
            self._arrived.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _add(self, item: Item, future: Future[Outcome] | None) -> None:
        with self._arrived:
            if self._closing:
                raise Overloaded(f"{self._name} is shutting down")
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded(f"{self._name}: {len(self._waiting)} writes wait already")
            self._waiting.append((item, future))
            if self._asleep or self._urgent(item):  # waking a thread costs more than most of what it is woken for
                self._arrived.notify()

    def _loop(self) -> None:
        while (batch := self._take()) is not None:
            if batch:
                self._settle(batch)
            with self._arrived:
                self._flushing -= 1
                if self._closing:
                    self._arrived.notify_all()
                elif self._waiting:
                    self._arrived.notify()

    def _take(self) -> list[tuple[Item, Future[Outcome] | None]] | None:
        """The next batch; None when closed and drained. An item is always taken whole, however heavy."""
        batch, weight = [], 0
        with self._arrived:
            self._asleep += 1
            self._arrived.wait_for(self._may_begin)
            self._asleep -= 1
            if not self._waiting:
                return None
            self._flushing += 1
            self._wait_for_more()
            while self._waiting and weight < self._max_batch:
                item, future = self._waiting.popleft()
                # A caller may have gone away meanwhile.
                if future is None or future.set_running_or_notify_cancel():
                    batch.append((item, future))
                    weight += self._weight(item)
        return batch

    def _may_begin(self) -> bool:
        if not self._waiting:
            return self._closing
        return not self._flushing or not self._alone()

    def _wait_for_more(self) -> None:
        limit = self._linger()
        if limit > 0 and not self._closing and not any(self._urgent(item) for item, _ in self._waiting):
            self._arrived.wait(limit)

    def _settle(self, batch: list[tuple[Item, Future[Outcome] | None]]) -> None:
        outcomes: Sequence[Outcome | Exception]
        try:
            outcomes = self._flush([item for item, _ in batch])
            if len(outcomes) != len(batch):
                raise AssertionError(f"{self._name}: {len(outcomes)} answers to {len(batch)} items")
        except Unavailable as away:
            outcomes = [away] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to one of the items
            if len(batch) > 1:
                middle = len(batch) // 2
                self._settle(batch[:middle])
                self._settle(batch[middle:])
                return
            outcomes = [error]
        for (item, future), outcome in zip(batch, outcomes, strict=True):
            self._answer(item, future, outcome)

    def _answer(self, item: Item, future: Future[Outcome] | None, outcome: Outcome | Exception) -> None:
        if future is None:
            if isinstance(outcome, Exception):
                told = {"item": type(item).__name__, "error": str(outcome)}
                log.error("a write failed", extra=told | self._about(item))
        elif isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
