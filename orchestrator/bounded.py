"""The same call for many items, a bounded number of them at a time.

    results = bounded.run(paths, lambda path, call: load(path))                 # the first failure stops all
    for index, result in bounded.stream(batches, send, lane=limits.io): ...    # as they complete

What callers may rely on:

1. **Order.** Results stand in the order of the items. `stream` yields them as they complete, or with `in_order`.
2. **Laziness.** `items` may be any iterator, also an endless one. No more than `lane.pending` items and `max_bytes` are
   in the house (taken from `items`, and their result not yet handed out), plus one that waits for room. One that is
   larger than `max_bytes` alone is let in when the house is empty.
3. **Whose thread.** `fn` is called by threads `NAME-0`, `NAME-1`, …; `items`, `size_of`, `on_result` and `on_error` by
   the caller's, one at a time: they need no locks.
4. **Fail fast**, by default: after the first failure nothing more begins, what waits is dropped, calls in flight
   settle (their results and failures are still told), the first error is raised.
5. **Best effort**: everything is tried; at the end `Failures`, an ExceptionGroup, has every error. The result of a
   failed item is None in its `results`.
6. **Failures.** An item has failed when `fn` raised for it after all `retries`, or a callback did. `on_result` is
   called for successes only, `on_error` once at most for each item that failed. What is no Exception (SystemExit,
   LeaseLost) ends the round in either mode and is raised as it is.
7. **Cancellation** is looked at before an item is taken, before each call and each retry, and at the end: then Aborted
   is raised, in either mode, caused by what failed before. Calls in flight see it as `call.token`.
8. **No wait without an end.** Pauses before retries end when the round does. Once a round stops, calls in flight have
   `settle_s` to settle; then it ends without them. Ctrl-C stops the round like a cancellation, a second one at once.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from orchestrator import limits
from orchestrator.cancellation import Cancellation
from orchestrator.errors import Aborted, NoThreads
from orchestrator.limits import Lane

__all__ = ["Call", "Cancellation", "Failures", "Flow", "run", "stream"]

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Seconds that calls in flight are given once a round stops.
SETTLE_S = 60.0
#: Seconds of one wait at most. Whoever waits is woken; this is for what nobody foresaw.
TICK_S = 0.5
#: Longest pause before a retry, in seconds.
BACKOFF_MAX_S = 60.0


@dataclass(frozen=True)
class Call(Generic[Item]):
    """What `fn` and the callbacks get to know about an item."""

    index: int
    item: Item
    token: Cancellation = field(repr=False, compare=False)


class Failures(ExceptionGroup[Exception]):
    """Everything was tried, and some of it failed.

    `results` has None for each that failed; `failed` the error of each, by its index. An error that belongs to no item
    (`items` itself raised) is only among the `exceptions`.
    """

    code = "items_failed"
    results: list[Any]
    failed: dict[int, Exception]

    def __new__(cls, message: str, errors: Sequence[Exception]) -> Failures:  # noqa: PYI034 - as its base has it
        made = super().__new__(cls, message, errors)
        made.results, made.failed = [], {}
        return made

    def derive(self, errors: Sequence[Exception], /) -> Failures:  # type: ignore[override]  # of exceptions only
        made = Failures(self.message, errors)
        made.results, made.failed = self.results, self.failed
        return made


class Flow(Generic[Item, Result]):
    """The books of one round: what waits, runs, is done, has failed; who may come in; how it ends.

    It calls nothing and waits for nothing; whoever drives it lets one thread at a time in.
    """

    def __init__(
        self,
        pending: int,
        max_bytes: int | None = None,
        *,
        best_effort: bool = False,
        in_order: bool = False,
        token: Cancellation | None = None,
    ) -> None:
        self._pending, self._max_bytes = max(pending, 1), max_bytes
        self._best_effort, self._in_order = best_effort, in_order
        self._asked = token
        #: That of the round: cancelled with the caller's, or when nobody wants the round any more.
        self.token = Cancellation(token)
        #: Items that were taken.
        self.count = 0
        #: Everything in the house, in order of the items: index → bytes.
        self._house: dict[int, int] = {}
        self._bytes = 0
        self._waiting: deque[Call[Item]] = deque()
        self._running: set[int] = set()
        self._done: dict[int, tuple[Call[Item], Result]] = {}
        self._untold: deque[tuple[Call[Item], Exception]] = deque()
        self._errors: list[Exception] = []
        self._fatal: BaseException | None = None
        #: By index: the first error of each item.
        self.failed: dict[int, Exception] = {}
        #: No more items come; nothing more begins.
        self.exhausted = self.stopped = False

    # ── in ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, item: Item) -> Call[Item]:
        """The next item; where it stands is its index."""
        self.count += 1
        return Call(self.count - 1, item, self.token)

    def has_room(self, size: int) -> bool:
        if not self._house:
            return True
        return len(self._house) < self._pending and (self._max_bytes is None or self._bytes + size <= self._max_bytes)

    def admit(self, call: Call[Item], size: int = 0) -> None:
        self._house[call.index] = size
        self._bytes += size
        self._waiting.append(call)

    @property
    def takes_more(self) -> bool:
        """Whether it is worth asking for another item."""
        return not (self.exhausted or self.stopped or self.token.cancelled)

    # ── through ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def begin(self) -> Call[Item] | None:
        """The next to be called, if any may."""
        if self.token.cancelled:
            self.stop()
        if not self._waiting:
            return None
        call = self._waiting.popleft()
        self._running.add(call.index)
        return call

    def succeed(self, call: Call[Item], result: Result) -> None:
        self._running.discard(call.index)
        self._done[call.index] = call, result

    def fail(self, call: Call[Item], error: BaseException) -> None:
        """Also after it was handed out, when the callback failed."""
        self._running.discard(call.index)
        self._leave(call.index)
        if not isinstance(error, Exception):
            self.end(error)
        elif not _is_abort(error, self.token):
            self.failed.setdefault(call.index, error)
            self._untold.append((call, error))
            self.note(error)

    def note(self, error: Exception) -> None:
        """An error that ends the round, unless everything shall be tried."""
        self._errors.append(error)
        if not self._best_effort:
            self.stop()

    def end(self, fatal: BaseException) -> None:
        """Whatever the mode."""
        self._fatal = self._fatal or fatal
        self.abandon()

    def abandon(self) -> None:
        """Nobody wants the results: calls in flight are asked to stop."""
        self.stop()
        self.token.cancel("nobody waits for it any more")

    def stop(self) -> None:
        self.stopped = True
        while self._waiting:
            self._leave(self._waiting.pop().index)

    def _leave(self, index: int) -> None:
        self._bytes -= self._house.pop(index, 0)

    # ── out ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def hand_out(self) -> tuple[Call[Item], Result] | None:
        """A result that may be told, if there is one."""
        index = self._first_done()
        if index is None:
            return None
        self._leave(index)
        return self._done.pop(index)

    def _first_done(self) -> int | None:
        index = next(iter(self._house if self._in_order else self._done), None)
        return index if index in self._done else None

    def own_up(self) -> tuple[Call[Item], Exception] | None:
        """A failure that nobody was told of yet."""
        return self._untold.popleft() if self._untold else None

    @property
    def has_news(self) -> bool:
        return bool(self._untold) or self._first_done() is not None

    @property
    def over(self) -> bool:
        return (self.exhausted or self.stopped) and not self._house and not self._untold

    def verdict(self) -> BaseException | None:
        """What to raise at the end."""
        if self._fatal is not None:
            return self._fatal
        failure: Exception | None = None
        if self._errors:
            failure = self._grouped() if self._best_effort else self._errors[0]
        if self._asked is not None and self._asked.cancelled:
            aborted = self._asked.error
            aborted.__cause__ = failure
            return aborted
        return failure

    def _grouped(self) -> Failures:
        group = Failures(f"{len(self.failed)} of {self.count} items failed", self._errors)
        group.failed = dict(self.failed)
        return group


def _is_abort(error: Exception, token: Cancellation) -> bool:
    """What `fn` raises because it looked at the token is no failure of its item."""
    return token.cancelled and (isinstance(error, Aborted) or error is token.error)


class Retrying:
    """Whether an item is tried again, and after which pause."""

    def __init__(self, retries: int, backoff_s: float, worth: Callable[[Exception], bool] | None) -> None:
        self._retries, self._backoff_s, self._worth = retries, backoff_s, worth

    def pause_s(self, tries: int, error: Exception) -> float | None:
        """Seconds before the next try; None when there is none."""
        if tries > self._retries or (self._worth is not None and not self._worth(error)):
            return None
        # Never more than asked for, and not all who failed at the same moment.
        return min(self._backoff_s * 2.0 ** min(tries - 1, 60), BACKOFF_MAX_S) * random.uniform(0.5, 1.0)


def run(
    items: Iterable[Item],
    fn: Callable[[Item, Call[Item]], Result],
    *,
    lane: Lane | None = None,
    max_bytes: int | None = None,
    size_of: Callable[[Item], int] | None = None,
    best_effort: bool = False,
    on_result: Callable[[Result, Call[Item]], object] | None = None,
    on_error: Callable[[Exception, Call[Item]], object] | None = None,
    retries: int = 0,
    backoff_s: float = 0.0,
    retry_if: Callable[[Exception], bool] | None = None,
    token: Cancellation | None = None,
    settle_s: float = SETTLE_S,
    name: str = "bounded",
) -> list[Result]:
    """`fn(item, call)` for every item; the results in order of the items.

    lane: how many run at a time and how many are in the house; by default that for requests (`limits.of_this_process`).
    max_bytes, size_of: bound what is in the house by size too.
    retries, backoff_s, retry_if: further tries of an item; the pause before the first, which doubles up to a minute and
    is jittered; which errors are worth one.

    What it returns has no gaps; those of failed items are in `Failures.results`. Raises as the module says.
    """
    lane = lane or limits.of_this_process().io
    flow: Flow[Item, Result] = Flow(lane.pending, max_bytes, best_effort=best_effort, token=token)
    retrying = Retrying(retries, backoff_s, retry_if)
    round_ = _Round(flow, items, fn, lane.concurrency, size_of, on_error, retrying, settle_s=settle_s, name=name)
    results: dict[int, Result] = {}
    try:
        with closing(round_.outcomes()) as outcomes:
            for call, result in outcomes:
                try:
                    if on_result is not None:
                        on_result(result, call)
                except Exception as error:  # noqa: BLE001 - it is the item's, as any other failure
                    round_.fail(call, error)
                else:
                    results[call.index] = result
    except Failures as failures:
        failures.results = [results.get(index) for index in range(flow.count)]
        raise
    return [results[index] for index in range(flow.count)]


def stream(
    items: Iterable[Item],
    fn: Callable[[Item, Call[Item]], Result],
    *,
    lane: Lane | None = None,
    max_bytes: int | None = None,
    size_of: Callable[[Item], int] | None = None,
    best_effort: bool = False,
    in_order: bool = False,
    on_error: Callable[[Exception, Call[Item]], object] | None = None,
    retries: int = 0,
    backoff_s: float = 0.0,
    retry_if: Callable[[Exception], bool] | None = None,
    token: Cancellation | None = None,
    settle_s: float = SETTLE_S,
    name: str = "bounded",
) -> Generator[tuple[int, Result], None, None]:
    """`run` for those who want each result when it is there: (index, result), and nothing is kept.

    Errors are raised after the last result. Whoever stops early closes it (`contextlib.closing`): nothing more begins
    then, and calls in flight settle.
    """
    lane = lane or limits.of_this_process().io
    flow: Flow[Item, Result] = Flow(lane.pending, max_bytes, best_effort=best_effort, in_order=in_order, token=token)
    retrying = Retrying(retries, backoff_s, retry_if)
    round_ = _Round(flow, items, fn, lane.concurrency, size_of, on_error, retrying, settle_s=settle_s, name=name)
    with closing(round_.outcomes()) as outcomes:
        for call, result in outcomes:
            yield call.index, result


class _Round(Generic[Item, Result]):
    """The threads of one round, and the caller who feeds them and takes what they bring."""

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
                while not self._is_over():
                    ready = self._step(source)
                    if ready is not None:
                        yield ready
        except KeyboardInterrupt:
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

    def _step(self, source: Iterator[Item]) -> tuple[Call[Item], Result] | None:
        """One of: a result, a failure told, an item taken, a moment waited."""
        try:
            with self._lock:
                seen, failure, ready = self._changes, self._flow.own_up(), self._flow.hand_out()
            if failure is not None:
                self._tell(*failure)
            elif ready is None and not self._feed(source):
                self._wait(seen)
            return ready
        except KeyboardInterrupt as interrupt:
            if self._flow.stopped:
                raise
            self._end(interrupt)
            return None

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
