"""One server over HTTP, in an event loop: what `Api` is to threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from orchestrator.bounded import Call, Flow
from orchestrator.client import wire
from orchestrator.client.steps import Emit, Fan, Operation, Pause, Play, Request
from orchestrator.errors import OrchestratorError

R = TypeVar("R")


class AsyncApi:
    """Tasks of one event loop may share one."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigError when this is no URL of a server."""
        self._client = httpx.AsyncClient(**wire.connection(url))
        self.url = url.rstrip("/")
        self.contact = wire.Contact()

    async def send(self, request: Request) -> Any:
        """The answer's JSON. Raises ServerUnreachable or Refused."""
        try:
            response = await self._client.request(request.method, request.path, **wire.arguments(request))
        except wire.UNANSWERED as error:
            raise wire.unreachable(self.url, error) from None
        self.contact.note()
        return wire.answer_of(response)

    async def run(self, operation: Operation[R]) -> R:
        with Play(operation) as play:
            while play.step is not None:
                if isinstance(play.step, Fan):
                    async with aclosing(self.fan_out(play.step)) as emitted:
                        play.answer([value async for value in emitted])
                else:
                    await self._perform(play)
            return play.result

    async def iterate(self, operation: Operation[None]) -> AsyncGenerator[Any, None]:
        with Play(operation) as play:
            while play.step is not None:
                if isinstance(play.step, Emit):
                    yield play.step.value
                    play.answer()
                elif isinstance(play.step, Fan):
                    async with aclosing(self.fan_out(play.step)) as emitted:
                        async for value in emitted:
                            yield value
                    play.answer()
                else:
                    await self._perform(play)

    def fan_out(self, fan: Fan) -> AsyncGenerator[Any, None]:
        return _Round(self, fan).emitted()

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _perform(self, play: Play[Any]) -> None:
        try:
            if isinstance(play.step, Request):
                answer = await self.send(play.step)
            else:
                assert isinstance(play.step, Pause)
                answer = await _sleep(play.step)
        except OrchestratorError as error:
            play.fail(error)
        else:
            play.answer(answer)


async def _sleep(pause: Pause) -> bool:
    """Whether it was ended by its `stop`, which any thread may cancel."""
    if pause.stop is None:
        await asyncio.sleep(max(pause.seconds, 0.0))
        return False
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    with pause.stop.telling(lambda: loop.call_soon_threadsafe(woken.set)):
        try:
            async with asyncio.timeout(0.0 if pause.stop.cancelled else max(pause.seconds, 0.0)):
                await woken.wait()
        except TimeoutError:
            pass
    return pause.stop.cancelled


class _Round:
    """The tasks of one fan: the books are `bounded`'s, and so are its promises."""

    def __init__(self, door: AsyncApi, fan: Fan) -> None:
        self._door, self._fan = door, fan
        self._flow: Flow[Any, Iterable[Any]] = Flow(fan.lane.pending, fan.max_bytes, in_order=True)
        self._source = _aiter(fan.items)
        self._calls: dict[asyncio.Task[Any], Call[Any]] = {}
        #: The next item is being asked for; or it has come, and waits for room.
        self._asking: asyncio.Task[Any] | None = None
        self._next: tuple[Call[Any], int] | None = None

    async def emitted(self) -> AsyncGenerator[Any, None]:
        try:
            while not self._flow.over:
                self._flow.own_up()
                while (ready := self._flow.hand_out()) is not None:
                    for value in ready[1]:
                        yield value
                self._feed()
                self._begin()
                await self._wait()
        finally:
            await self._leave()
        error = self._flow.verdict()
        if error is not None:
            raise error

    def _feed(self) -> None:
        if self._next is not None and self._flow.takes_more and self._flow.has_room(self._next[1]):
            self._flow.admit(*self._next)
            self._next = None
        if self._next is None and self._asking is None and self._flow.takes_more:
            self._asking = asyncio.create_task(_next(self._source), name=f"{self._fan.name}-source")

    def _begin(self) -> None:
        while self._flow.running < self._fan.lane.concurrency and (call := self._flow.begin()) is not None:
            task = asyncio.create_task(self._door.run(self._fan.each(call.item)), name=f"{self._fan.name}-{call.index}")
            self._calls[task] = call

    async def _wait(self) -> None:
        """Until something has happened."""
        asking = {self._asking} if self._asking is not None and self._flow.takes_more else set()
        if not self._calls and not asking:
            return
        over, _ = await asyncio.wait({*self._calls, *asking}, return_when=asyncio.FIRST_COMPLETED)
        for task in over:
            if task is self._asking:
                self._asking = None
                self._take(task)
            else:
                self._settle(task, self._calls.pop(task))

    def _take(self, task: asyncio.Task[Any]) -> None:
        error = task.exception()
        if isinstance(error, StopAsyncIteration):
            self._flow.exhausted = True
        elif isinstance(error, Exception):
            self._flow.exhausted = True
            self._flow.note(error)
        elif error is not None:
            self._flow.end(error)
        else:
            item = task.result()
            self._next = self._flow.call(item), self._fan.size_of(item)

    def _settle(self, task: asyncio.Task[Any], call: Call[Any]) -> None:
        error = task.exception()
        if error is None:
            self._flow.succeed(call, task.result())
        else:
            self._flow.fail(call, error)

    async def _leave(self) -> None:
        tasks = [*self._calls, *([] if self._asking is None else [self._asking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(self._source, AsyncGenerator):
            await self._source.aclose()


async def _next(source: AsyncIterator[Any]) -> Any:
    return await anext(source)


def _aiter(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    return aiter(items) if isinstance(items, AsyncIterable) else _plain(items)


async def _plain(items: Iterable[Any]) -> AsyncGenerator[Any, None]:
    for item in items:
        yield item
