"""The books of one round of calls: what waits, runs, is done, has failed; who may come in; how it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from orchestrator.cancellation import Cancellation
from orchestrator.errors import Aborted

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    """It calls nothing and waits for nothing; whoever drives it lets one thread at a time in."""

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
