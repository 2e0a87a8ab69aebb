"""Bounds the time that a backend may take: a driver that hangs must not stop heartbeats, nor anything else.

The calls run on one thread of their own, one at a time. Nobody can end a call that hangs in the kernel; whoever waits
for it is told so in time, and until it returns nobody else is made to wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, GpuProcess, Health
from orchestrator.gpu.backends import Backend

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class _Call:
    work: Callable[[], Any]
    started: float
    done: bool = False
    value: Any = None
    error: GpuUnavailable | None = None


class Watch:
    """A backend that answers within `limit_s`, or raises GpuUnavailable. Safe for many threads."""

    def __init__(self, backend: Backend, limit_s: float) -> None:
        self.name = backend.name
        self._backend = backend
        self._limit_s = limit_s
        self._changed = threading.Condition()
        #: The call that runs now, also one that nobody waits for any more.
        self._running: _Call | None = None
        self._known: list[Gpu] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="gpu-watch", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        return self._backend.environment()

    def about(self) -> str:
        return self._ask(self._backend.about)

    def sample(self) -> list[Gpu]:
        return self._ask(self._sample)

    def free_mb(self, uuids: Sequence[str]) -> dict[str, int]:
        return self._ask(lambda: self._backend.free_mb(uuids))

    def holders(self, uuids: Sequence[str]) -> dict[str, tuple[GpuProcess, ...] | None]:
        return self._ask(lambda: self._backend.holders(uuids))

    def last_known(self, reason: str) -> list[Gpu]:
        """The GPUs of the last sample with closed gates, to report while no new sample can be had."""
        return [
            replace(gpu, processes=None, health=Health.UNKNOWN, health_reason=reason)
            if gpu.health is not Health.LOST
            else gpu
            for gpu in self._known
        ]

    def close(self) -> None:
        """End the thread; one that hangs in a call is left behind and dies with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._limit_s)

    def _sample(self) -> list[Gpu]:
        self._known = self._backend.sample()
        return self._known

    def _ask(self, work: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._limit_s
        with self._changed:
            while self._running is not None:
                self._wait_for(self._running, deadline)
            if self._closed:
                raise GpuUnavailable("the GPUs are no longer watched: this process is stopping")
            call = self._running = _Call(work, time.monotonic())
            self._changed.notify_all()
            while not call.done:
                self._wait_for(call, deadline)
        if call.error is not None:
            raise call.error
        value: T = call.value
        return value

    def _wait_for(self, call: _Call, deadline: float) -> None:
        """Wait for news of a call, but neither past the deadline nor for a call that has hung for longer."""
        now = time.monotonic()
        patience = min(deadline, call.started + self._limit_s) - now
        if patience <= 0:
            raise GpuUnavailable(f"the GPU driver has not answered for {now - call.started:.1f} s")
        self._changed.wait(patience)

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.value = call.work()
            except GpuUnavailable as refused:
                call.error = refused
            except Exception as error:
                # A bug here, or an answer that nobody foresaw, is no answer: jobs must end and heartbeats go on.
                log.exception("asking the GPUs broke")
                call.error = GpuUnavailable(f"asking the GPUs broke: {error!r}"[:200])
            with self._changed:
                call.done = True
                self._running = None
                self._changed.notify_all()

    def _next(self) -> _Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._running is not None)
            return None if self._closed else self._running
