"""The threads of one round of calls, and the caller who feeds them and takes what they bring."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

from orchestrator.backoff import doubled, spread
from orchestrator.bounded.flow import Call, Flow, Item, Result
from orchestrator.errors import NoThreads

log = logging.getLogger(__name__)

Done = TypeVar("Done")

#: Seconds of one wait at most. Whoever waits is woken; this is for what nobody foresaw.
TICK_S = 0.5
#: Longest pause before a retry, in seconds.
BACKOFF_MAX_S = 60.0


class Retrying:
    """Whether an item is tried again, and after which pause."""

    def __init__(self, retries: int, backoff_s: float, worth: Callable[[Exception], bool] | None) -> None:
        self._retries, self._backoff_s, self._worth = retries, backoff_s, worth

    def pause_s(self, tries: int, error: Exception) -> float | None:
        """Seconds before the next try; None when there is none."""
        if tries > self._retries or (self._worth is not None and not self._worth(error)):
            return None
        return spread(doubled(self._backoff_s, tries - 1, BACKOFF_MAX_S))


class Round(Generic[Item, Result]):
    def __init__(
        self,
        flow: Flow[Item, Result],
        items: Iterable[Item],
        fn: Callable[[Item, Call[Item]], Result],
        concurrency: int,
        size_of: Callable[[Item], int] | None,
        on_error: Callable[[Exception, Call[Item]], object] | None,
        retrying: Retrying,
        *,
        settle_s: float,
        name: str,
    ) -> None:
        self._flow, self._items, self._fn = flow, items, fn
        self._most, self._settle_s, self._name = concurrency, settle_s, name
        self._size_of, self._on_error, self._retrying = size_of, on_error, retrying
        # A lock that its holder may take again: a signal handler may cancel while we hold it.
        self._lock = threading.RLock()
        #: Work for the threads; news for the caller; an end to pauses.
        self._work, self._news, self._halt = (threading.Condition(self._lock) for _ in range(3))
        #: Raised by every change, so that the caller waits only if there was none since it looked.
        self._changes = 0
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._settle_by = float("inf")
        #: An item that was taken and does not fit yet.
        self._next: tuple[Call[Item], int] | None = None

    def outcomes(self) -> Generator[tuple[Call[Item], Result], None, None]:
        try:
            source = iter(self._items)
            with self._flow.token.telling(self._change):
                while not self._heeding(self._is_over):
                    ready = self._heeding(lambda: self._step(source))
                    if ready is not None:
                        yield ready
        except KeyboardInterrupt:
            if self._flow.stopped:
                self._settle_by = 0.0  # the second: they were given time already
            raise
        finally:
            self._close()
        error = self._flow.verdict()
        if error is not None:
            if self._flow.running:
                error.add_note(f"{self._flow.running} calls were still running {self._settle_s:g} s after that")
            raise error

    def fail(self, call: Call[Item], error: BaseException) -> None:
        with self._lock:
            self._flow.fail(call, error)
            self._change()

    # ── the caller's side ───────────────────────────────────────────────────────────────────────────────────────────

    def _heeding(self, do: Callable[[], Done]) -> Done | None:
        """Do this; the first Ctrl-C that comes meanwhile ends the round as a failure would."""
        try:
            return do()
        except KeyboardInterrupt as interrupt:
            if self._flow.stopped:
                raise
            self._end(interrupt)
            return None

    def _step(self, source: Iterator[Item]) -> tuple[Call[Item], Result] | None:
        """One of: a result, a failure told, an item taken, a moment waited."""
        with self._lock:
            seen, failure, ready = self._changes, self._flow.own_up(), self._flow.hand_out()
        if failure is not None:
            self._tell(*failure)
        elif ready is None and not self._feed(source):
            self._wait(seen)
        return ready

    def _tell(self, call: Call[Item], error: Exception) -> None:
        try:
            if self._on_error is not None:
                self._on_error(error, call)
        except Exception as another:  # noqa: BLE001 - it counts as the item's too
            with self._lock:
                self._flow.note(another)
                self._change()

    def _feed(self, source: Iterator[Item]) -> bool:
        """Let one more item in; False when none comes, or it has to wait for room."""
        if not self._flow.takes_more:
            return False
        if self._next is None:
            self._next = self._take_from(source)
        if self._next is None:
            return True
        call, size = self._next
        with self._lock:
            if not self._flow.has_room(size):
                return False
            self._flow.admit(call, size)
            self._next = None
            self._work.notify()
            hiring = self._flow.waiting > self._idle and len(self._threads) < self._most
        if hiring:
            self._hire()
        return True

    def _take_from(self, source: Iterator[Item]) -> tuple[Call[Item], int] | None:
        try:
            item = next(source)
        except StopIteration:
            self._flow.exhausted = True
            return None
        except Exception as error:  # noqa: BLE001 - told at the end, when what was taken before is settled
            with self._lock:
                self._flow.exhausted = True
                self._flow.note(error)
                self._change()
            return None
        call = self._flow.call(item)
        try:
            return call, self._size_of(item) if self._size_of is not None else 0
        except Exception as error:  # noqa: BLE001 - it is the item's, as any other failure
            self.fail(call, error)
            return None

    def _wait(self, seen: int) -> None:
        with self._lock:
            if self._changes == seen and not self._flow.over:
                self._news.wait(max(min(TICK_S, self._settle_by - time.monotonic()), 0.0))

    def _is_over(self) -> bool:
        with self._lock:
            if self._flow.token.cancelled:
                self._flow.stop()
            if self._flow.stopped and self._settle_by == float("inf"):
                self._settle_by = time.monotonic() + self._settle_s
                self._change()
            return self._flow.over or (time.monotonic() >= self._settle_by and not self._flow.has_news)

    def _end(self, fatal: BaseException) -> None:
        with self._lock:
            self._flow.end(fatal)
            self._change()

    def _close(self) -> None:
        """Nothing more begins; whatever was left is asked to stop, and given the rest of its time."""
        with self._lock:
            self._closed = True
            if not self._flow.over:
                self._flow.abandon()
                self._settle_by = min(self._settle_by, time.monotonic() + self._settle_s)
            self._change()
            while self._flow.running and (left_s := self._settle_by - time.monotonic()) > 0:
                self._news.wait(min(TICK_S, left_s))
            if self._flow.running:
                log.warning("%s: %d calls did not settle in time", self._name, self._flow.running)
                return
        for thread in self._threads:
            thread.join(TICK_S)

    def _change(self) -> None:
        with self._lock:
            self._changes += 1
            self._news.notify_all()
            if self._closed or self._flow.stopped or self._flow.token.cancelled:
                self._work.notify_all()
                self._halt.notify_all()

    # ── the threads' side ───────────────────────────────────────────────────────────────────────────────────────────

    def _hire(self) -> None:
        thread = threading.Thread(target=self._labour, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            if not self._threads:
                self._end(NoThreads(self._name, error))
                return
            self._most = len(self._threads)
            log.warning("%s goes on with %d threads: %s", self._name, self._most, error)
            return
        self._threads.append(thread)

    def _labour(self) -> None:
        while (call := self._take()) is not None:
            self._settle(call)
            del call  # while it waits for the next it keeps nothing alive

    def _take(self) -> Call[Item] | None:
        with self._lock:
            self._idle += 1
            try:
                while (call := self._flow.begin()) is None and not self._closed:
                    self._work.wait(TICK_S)
                return call
            finally:
                self._idle -= 1

    def _settle(self, call: Call[Item]) -> None:
        try:
            result = self._try(call)
        except BaseException as error:  # noqa: BLE001 - the caller's to hear, in its own thread
            self.fail(call, error)
            return
        with self._lock:
            self._flow.succeed(call, result)
            self._change()

    def _try(self, call: Call[Item]) -> Result:
        for tries in itertools.count(1):
            call.token.raise_if_cancelled()
            try:
                return self._fn(call.item, call)
            except Exception as error:
                pause_s = self._retrying.pause_s(tries, error)
                if pause_s is None or self._is_halted_within(pause_s):
                    raise
        raise AssertionError("counting does not end")

    def _is_halted_within(self, seconds: float) -> bool:
        with self._lock:
            return self._halt.wait_for(lambda: self._flow.stopped or self._flow.token.cancelled, seconds)
