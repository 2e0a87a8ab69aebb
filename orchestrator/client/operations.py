"""One method, two colours: called on a noun of `Api` it returns, on one of `AsyncApi` it is awaited.

    class Jobs(Noun[Door]):
        @operation
        def get(self, job_id: str) -> Operation[Job]: ...        # Jobs(api).get(…), await Jobs(async_api).get(…)

        @streaming
        def list(self) -> Emits[Job]: ...                        # for … in, async for … in

Inside of an operation others are used by their generators: `yield from Jobs.get.steps(self, job_id)`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from orchestrator.client.aio import AsyncApi
from orchestrator.client.api import Api
from orchestrator.client.steps import Emits, Operation

P = ParamSpec("P")
R = TypeVar("R")
Item = TypeVar("Item")
Door = TypeVar("Door", bound=Api | AsyncApi)


class Noun(Generic[Door]):
    """Something that a server has, seen through one of the two doors."""

    def __init__(self, door: Door) -> None:
        self._door = door


class operation(Generic[P, R]):  # noqa: N801 - a decorator
    def __init__(self, steps: Callable[Concatenate[Any, P], Operation[R]]) -> None:
        self.steps = steps
        functools.update_wrapper(self, steps)  # type: ignore[arg-type]  # an instance takes them as well

    @overload
    def __get__(self, noun: None, owner: object) -> Self: ...
    @overload
    def __get__(self, noun: Noun[Api], owner: object) -> Callable[P, R]: ...
    @overload
    def __get__(self, noun: Noun[AsyncApi], owner: object) -> Callable[P, Coroutine[Any, Any, R]]: ...

    def __get__(self, noun: Noun[Any] | None, owner: object) -> Any:
        return self if noun is None else _bound(self.steps, noun, noun._door.run)  # noqa: SLF001 - its own decorator


class streaming(Generic[P, Item]):  # noqa: N801 - a decorator
    def __init__(self, steps: Callable[Concatenate[Any, P], Emits[Item]]) -> None:
        self.steps = steps
        functools.update_wrapper(self, steps)  # type: ignore[arg-type]  # an instance takes them as well

    @overload
    def __get__(self, noun: None, owner: object) -> Self: ...
    @overload
    def __get__(self, noun: Noun[Api], owner: object) -> Callable[P, Generator[Item, None, None]]: ...
    @overload
    def __get__(self, noun: Noun[AsyncApi], owner: object) -> Callable[P, AsyncGenerator[Item, None]]: ...

    def __get__(self, noun: Noun[Any] | None, owner: object) -> Any:
        return self if noun is None else _bound(self.steps, noun, noun._door.iterate)  # noqa: SLF001 - its own decorator


def _bound(steps: Callable[..., Any], noun: Noun[Any], drive: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(steps)
    def call(*args: Any, **kwargs: Any) -> Any:
        return drive(steps(noun, *args, **kwargs))

    return call
