"""Long polls: whoever waits for a job to end is woken by one task that asks for all of them together.

The cost of waiting is one small query every POLL_S while anybody waits, however many do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from orchestrator.errors import Overloaded

#: Seconds between two questions; a waiter learns of the end this much later, at worst.
POLL_S = 0.05
#: Jobs in one question.
CHUNK = 1000
#: Waiters of one process; beyond, clients must ask again by themselves.
MAX_WAITERS = 10_000

Ask = Callable[[list[str]], Awaitable[set[str]]]


class Waiters:
    """Lives in one event loop. `ask` tells which of the given jobs have ended."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, job_id: str, seconds: float) -> None:
        """Return when the job has ended, the time is over, or the process stops.

        Raises Unavailable when the database cannot be asked, Overloaded when too many wait.
        """
        if len(self._waiting) >= MAX_WAITERS:
            raise Overloaded(f"{MAX_WAITERS} requests wait already; ask again without ?wait")
        if self._closed or seconds <= 0:
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = job_id
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="waiters")
        try:
            await asyncio.wait_for(woken, seconds)
        except TimeoutError:
            pass
        finally:
            del self._waiting[woken]

    def close(self) -> None:
        """Let everybody go: a server that stops does not wait for jobs."""
        self._closed = True
        for woken in self._waiting:
            _wake(woken)

    async def _poll(self) -> None:
        while self._waiting:
            ids = sorted(set(self._waiting.values()))
            for start in range(0, len(ids), CHUNK):
                await self._ask_about(ids[start : start + CHUNK])
            await asyncio.sleep(POLL_S)

    async def _ask_about(self, ids: list[str]) -> None:
        failure: Exception | None = None
        try:
            ended = await self._ask(ids)
        except Exception as away:  # noqa: BLE001 - it belongs to those who wait; the poller must live
            ended, failure = set(ids), away
        for woken, job_id in self._waiting.items():
            if job_id in ended:
                _wake(woken, failure)


def _wake(woken: asyncio.Future[None], failure: Exception | None = None) -> None:
    if woken.done():
        return
    if failure is None:
        woken.set_result(None)
    else:
        woken.set_exception(failure)
