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
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeVar

from orchestrator.errors import Overloaded, Unavailable
from orchestrator.store.database import RowsHeld, Waiting
from orchestrator.telemetry import logs

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
_Entry = tuple[Item, Future[Outcome] | None]
_Batch = list[_Entry[Item, Outcome]]

#: Seconds for which batches are flushed apart from the start, after one waited in vain for a row that somebody holds:
#: what comes next for that row must not make all others wait once more.
WARY_S = 30.0
#: Seconds between two waits for a row by what is flushed apart: all others wait as long as one does.
PATIENT_EVERY_S = 5.0


class Later(NamedTuple):
    """An item's outcome is not known yet: flush it again, apart, after so many seconds."""

    seconds: float


class Batcher(Generic[Item, Outcome]):
    """Collects items and flushes them together.

    `flush` takes items and returns one outcome each, in order; an outcome that is an exception is raised to
    that item's caller alone. `weight` counts what an item adds to a batch (an item may be a list itself).

    When `flush` itself raises, the batch is halved until the item at fault stands alone, so one bad item never
    fails its neighbours. Only `Unavailable` fails all at once: no split mends a server that is away.

    `RowsHeld`, although one of those, is about one item: somebody holds a row of it, and its neighbours can be written.
    They are told from each other by `apart`, a flush that is told how long to wait for rows, and so are all batches of
    the next seconds. What it cannot write may be put off (`Later`): it holds up nobody, and is tried until it is
    written or fails. Now and then one of them may queue for its row, which it might not get otherwise.

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
        flush: Callable[[list[Item]], Sequence[Outcome | Later | Exception]],
        *,
        apart: Callable[[list[Item], Waiting], Sequence[Outcome | Later | Exception]] | None = None,
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
        self._apart = apart
        self._weight = weight
        self._linger = linger
        self._urgent = urgent
        self._alone = alone
        self._about = about
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._waiting: deque[_Entry[Item, Outcome]] = deque()
        #: What was put off: when it is due, and its number, by which those of a moment keep their order.
        self._put_off: list[tuple[float, int, _Entry[Item, Outcome]]] = []
        self._numbers = count()
        self._wary_until = -inf
        #: When one of those at fault may wait again.
        self._patient_at = -inf
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
            self._put_off = [(-inf, number, entry) for _, number, entry in self._put_off]  # it has waited long enough
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
        while (taken := self._take()) is not None:
            fresh, due = taken
            # New ones first: those that were put off come after each batch at most, however often they fail.
            if fresh and time.monotonic() < self._wary_until:
                self._settle_apart(fresh, Waiting.MOMENT)
            elif fresh:
                self._settle(fresh)
            if due:
                self._settle_apart(due, Waiting.NOT)
            with self._arrived:
                self._flushing -= 1
                if self._closing:
                    self._arrived.notify_all()
                elif self._waiting:
                    self._arrived.notify()

    def _take(self) -> tuple[_Batch[Item, Outcome], _Batch[Item, Outcome]] | None:
        """The next batch, and what was put off and is due; None when closed and drained."""
        with self._arrived:
            self._asleep += 1
            while not self._may_begin():
                self._arrived.wait(self._next_due_s())
            self._asleep -= 1
            if not self._waiting and not self._put_off:
                return None
            self._flushing += 1
            if self._waiting:
                self._wait_for_more()
            return self._take_waiting(), self._take_due()

    def _take_waiting(self) -> _Batch[Item, Outcome]:
        """An item is always taken whole, however heavy."""
        batch, weight = [], 0
        while self._waiting and weight < self._max_batch:
            item, future = self._waiting.popleft()
            # A caller may have gone away meanwhile.
            if future is None or future.set_running_or_notify_cancel():
                batch.append((item, future))
                weight += self._weight(item)
        return batch

    def _take_due(self) -> _Batch[Item, Outcome]:
        batch: _Batch[Item, Outcome] = []
        while self._is_due() and len(batch) < self._max_batch:
            batch.append(heappop(self._put_off)[2])
        return batch

    def _may_begin(self) -> bool:
        if not self._waiting and not self._is_due():
            return self._closing and not self._put_off
        return not self._flushing or not self._alone()

    def _is_due(self) -> bool:
        return bool(self._put_off) and self._put_off[0][0] <= time.monotonic()

    def _next_due_s(self) -> float | None:
        """How long until something is due; None: until we are woken. Whoever flushes alone sees to what is due next."""
        if not self._put_off or (self._flushing and self._alone()):
            return None
        return max(self._put_off[0][0] - time.monotonic(), 0.0)

    def _wait_for_more(self) -> None:
        limit = self._linger()
        if limit > 0 and not self._closing and not any(self._urgent(item) for item, _ in self._waiting):
            self._arrived.wait(limit)

    def _settle(self, batch: _Batch[Item, Outcome]) -> None:
        try:
            outcomes = self._outcomes(batch, self._flush([item for item, _ in batch]))
        except Unavailable as away:
            if isinstance(away, RowsHeld) and self._apart is not None:
                self._wary_until = time.monotonic() + WARY_S
                self._settle_apart(batch, Waiting.NOT)
                return
            outcomes = [away] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to one of the items
            if len(batch) > 1:
                for part in _halves(batch):
                    self._settle(part)
                return
            outcomes = [error]
        self._answer_all(batch, outcomes)

    def _settle_apart(self, batch: _Batch[Item, Outcome], waiting: Waiting) -> None:
        """All whose rows nobody holds; then, for those at fault, one of them may wait."""
        in_vain: list[tuple[_Entry[Item, Outcome], Later | RowsHeld]] = []
        for entry, outcome in self._at_fault(batch, waiting):
            if time.monotonic() < self._patient_at:
                self._answer(*entry, outcome)
                continue
            self._patient_at = time.monotonic() + PATIENT_EVERY_S
            if self._at_fault([entry], Waiting.BRIEFLY):
                in_vain.append((entry, outcome))
        for entry, outcome in in_vain:  # behind the others, so that each gets its turn; but tried as often as they are
            self._answer(*entry, outcome)

    def _at_fault(
        self, batch: _Batch[Item, Outcome], waiting: Waiting
    ) -> list[tuple[_Entry[Item, Outcome], Later | RowsHeld]]:
        """Those that held rows keep from being written, with their outcome if it stays so. The others have theirs.

        Only the whole of it waits as long as it may: parts of it, by the dozen, would wait for the same row again.
        """
        assert self._apart is not None
        try:
            outcomes = self._outcomes(batch, self._apart([item for item, _ in batch], waiting))
        except RowsHeld as held:
            if len(batch) == 1:
                return [(batch[0], held)]
            return [late for part in _halves(batch) for late in self._at_fault(part, Waiting.NOT)]
        except Unavailable as away:
            outcomes = [away] * len(batch)
        except Exception as error:  # noqa: BLE001 - as above
            if len(batch) > 1:
                return [late for part in _halves(batch) for late in self._at_fault(part, waiting)]
            outcomes = [error]
        settled = list(zip(batch, outcomes, strict=True))
        for entry, outcome in settled:
            if not isinstance(outcome, Later):
                self._answer(*entry, outcome)
        return [(entry, outcome) for entry, outcome in settled if isinstance(outcome, Later)]

    def _outcomes(
        self, batch: _Batch[Item, Outcome], outcomes: Sequence[Outcome | Later | Exception]
    ) -> Sequence[Outcome | Later | Exception]:
        if len(outcomes) != len(batch):
            raise AssertionError(f"{self._name}: {len(outcomes)} answers to {len(batch)} items")
        return outcomes

    def _answer_all(self, batch: _Batch[Item, Outcome], outcomes: Sequence[Outcome | Later | Exception]) -> None:
        for entry, outcome in zip(batch, outcomes, strict=True):
            self._answer(*entry, outcome)

    def _answer(self, item: Item, future: Future[Outcome] | None, outcome: Outcome | Later | Exception) -> None:
        if isinstance(outcome, Later):
            with self._arrived:
                due = time.monotonic() + outcome.seconds
                heappush(self._put_off, (due, next(self._numbers), (item, future)))
        elif future is None:
            if isinstance(outcome, Exception):
                told = {"item": type(item).__name__, "error": str(outcome)}
                log.error("a write failed", extra=told | self._about(item))
        elif isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _halves(batch: _Batch[Item, Outcome]) -> tuple[_Batch[Item, Outcome], _Batch[Item, Outcome]]:
    return batch[: len(batch) // 2], batch[len(batch) // 2 :]
