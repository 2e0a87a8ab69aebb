"""Long polls: whoever waits for something to happen is woken by one task that asks for all of them together.

The cost of waiting is one small question every POLL_S while anybody waits, however many do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import Request

from orchestrator.errors import Overloaded

#: Seconds between two questions; a waiter learns of the end this much later, at worst.
POLL_S = 0.05
#: Jobs, or workers, in one question.
CHUNK = 1000
#: What the waiters of one process wait for; beyond, clients must ask again by themselves.
MAX_WAITERS = 10_000

Ask = Callable[[list[str]], Awaitable[set[str]]]


class Waiters:
    """Lives in one event loop. `ask` tells for which of the given keys it has happened: a job ended, say."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._waiting: dict[asyncio.Future[bool], frozenset[str]] = {}
        self._keys = 0
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, keys: frozenset[str], seconds: float) -> bool:
        """True when it has happened for any of them; False when the time is over, or the process stops.

        Raises Unavailable when the database cannot be asked, Overloaded when too many wait.
        """
        if self._keys + len(keys) > MAX_WAITERS:
            raise Overloaded(f"requests wait for {self._keys} things already; ask again without waiting")
        if self._closed or seconds <= 0:
            return False
        woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = keys
        self._keys += len(keys)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="waiters")
        try:
            return await asyncio.wait_for(woken, seconds)
        except TimeoutError:
            return False
        finally:
            del self._waiting[woken]
            self._keys -= len(keys)

    def close(self) -> None:
        """Let everybody go: a server that stops does not wait for jobs."""
        self._closed = True
        for woken in self._waiting:
            _wake(woken, happened=False)

    async def _poll(self) -> None:
        while self._waiting:
            ids = sorted(set[str]().union(*self._waiting.values()))
            for start in range(0, len(ids), CHUNK):
                await self._ask_about(ids[start : start + CHUNK])
            await asyncio.sleep(POLL_S)

    async def _ask_about(self, ids: list[str]) -> None:
        failure: Exception | None = None
        try:
            happened = await self._ask(ids)
        except Exception as away:  # noqa: BLE001 - it belongs to those who wait; the poller must live
            happened, failure = set(ids), away
        for woken, keys in self._waiting.items():
            if not keys.isdisjoint(happened):
                _wake(woken, failure)


def _wake(woken: asyncio.Future[bool], failure: Exception | None = None, *, happened: bool = True) -> None:
    if woken.done():
        return
    if failure is None:
        woken.set_result(happened)
    else:
        woken.set_exception(failure)


async def unless_gone(request: Request, wait: Coroutine[Any, Any, bool]) -> bool:
    """Wait, until the client has gone at most: nobody waits for an absent one. True when it has happened."""
    waiting = asyncio.create_task(wait)
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not waiting.done():
            waiting.cancel()
    # Its result is also what kept us from waiting, if something did.
    return waiting.done() and not waiting.cancelled() and waiting.result()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
