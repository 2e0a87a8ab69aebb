"""What talking to a server takes, without doing any of it.

An operation is a generator that yields steps: send this, wait so long, do that for many. Whoever performs them (`Api`
with threads, `AsyncApi` in an event loop) sends back each answer, or throws the error in. So there is one description
of everything that a client can do, and what it decides can be tested without a server.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from orchestrator.cancellation import Cancellation
from orchestrator.errors import OrchestratorError
from orchestrator.limits import Lane

#: Seconds to connect and to answer; what a long poll waits comes on top.
TIMEOUT_S = 15.0
#: Seconds that changing thousands of jobs may take longer than other requests.
BULK_S = 120.0
NOTHING: Mapping[str, object] = MappingProxyType({})

R = TypeVar("R")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    params: Mapping[str, object] = field(default_factory=lambda: NOTHING)
    #: Bytes are JSON already.
    body: Mapping[str, object] | bytes | None = None
    timeout_s: float = TIMEOUT_S
    #: Sending it twice comes to the same as sending it once.
    repeatable: bool = False


@dataclass(frozen=True)
class Pause:
    """Its answer is whether it was ended by `stop`."""

    seconds: float
    stop: Cancellation | None = None


@dataclass(frozen=True)
class Fan:
    """An operation for each item, several at a time; what each returns is emitted, in order of the items."""

    items: Iterable[Any] | AsyncIterable[Any]
    each: Callable[[Any], Operation[Iterable[Any]]]
    lane: Lane
    max_bytes: int
    size_of: Callable[[Any], int]
    name: str


@dataclass(frozen=True)
class Emit(Generic[Item]):
    """Something for whoever iterates over the operation."""

    value: Item


Step: TypeAlias = Request | Pause | Fan | Emit[Any]
Operation: TypeAlias = Generator[Step, Any, R]
#: An operation that returns nothing and emits these.
Emits: TypeAlias = Generator[Request | Pause | Fan | Emit[Item], Any, None]


class Play(Generic[R]):
    """An operation under way: `step` is what it wants next, None when it is over and has its `result`."""

    result: R

    def __init__(self, operation: Operation[R]) -> None:
        self._operation = operation
        self.step: Step | None = None

    def __enter__(self) -> Self:
        self._advance(lambda: next(self._operation))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._operation.close()

    def answer(self, value: Any = None) -> None:
        self._advance(lambda: self._operation.send(value))

    def fail(self, error: OrchestratorError) -> None:
        self._advance(lambda: self._operation.throw(error))

    def _advance(self, move: Callable[[], Step]) -> None:
        try:
            self.step = move()
        except StopIteration as end:
            self.step, self.result = None, end.value
