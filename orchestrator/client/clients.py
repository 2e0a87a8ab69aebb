"""`Client` and `AsyncClient`: the same operations, for threads and for an event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

from orchestrator.client.aio import AsyncApi
from orchestrator.client.api import Api
from orchestrator.client.holding import LeaseOptions, Leasing, lease
from orchestrator.client.nouns import DeadLettersOf, JobsOf, PoolsOf, WorkflowsOf
from orchestrator.client.operations import Door
from orchestrator.client.paths import default_url

#: Seconds for which a server that says "later", or restarts, is waited for.
PATIENCE_S = 60.0


class _Everything(JobsOf[Door]):
    def __init__(self, door: Door, patience_s: float) -> None:
        super().__init__(door, patience_s)
        self.url = door.url
        self.pools: PoolsOf[Door] = PoolsOf(door, patience_s)
        self.dlq: DeadLettersOf[Door] = DeadLettersOf(door, patience_s)
        self.workflows: WorkflowsOf[Door] = WorkflowsOf(door, patience_s)

    def lease(self, min_memory_mb: int, **options: Unpack[LeaseOptions]) -> Leasing:
        """GPU memory for a block: `with`, or `async with`. See `orchestrator.client.lease`."""
        return lease(min_memory_mb, url=self.url, **options)


class Client(_Everything[Api]):
    """A server, for programs with threads, which may share one. Close it, or use it as a context manager."""

    def __init__(self, url: str | None = None, *, patience_s: float = PATIENCE_S) -> None:
        """`url`: by default GPUORCH_URL, or the local server. Raises ConfigError when it is no URL."""
        super().__init__(Api(url or default_url()), patience_s)

    def close(self) -> None:
        self._door.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Everything[AsyncApi]):
    """A server, for the tasks of one event loop, which may share one. Close it, or use it by `async with`."""

    def __init__(self, url: str | None = None, *, patience_s: float = PATIENCE_S) -> None:
        """`url`: by default GPUORCH_URL, or the local server. Raises ConfigError when it is no URL."""
        super().__init__(AsyncApi(url or default_url()), patience_s)

    async def close(self) -> None:
        await self._door.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
