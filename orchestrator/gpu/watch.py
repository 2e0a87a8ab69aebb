"""Bounds the time that a backend may take: a driver that hangs must not stop heartbeats, nor anything else.

The calls run on one thread of their own, one at a time. Nobody can end a call that hangs in the kernel; whoever waits
for it is told so in time, and until it returns nobody else is made to wait. Those who ask while one runs share the
next: an answer may be about later than the question, never about earlier, and however many ask, each waits for the
call under way and its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, Health
from orchestrator.gpu.backends import Backend
from orchestrator.gpu.sampling import Sampling

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Call:
    work: Callable[[], Any]
    started: float = 0.0
    done: bool = False
    value: Any = None
    error: GpuUnavailable | None = None


class Watch(Sampling):
    """A backend that answers within `limit_s`, or raises GpuUnavailable. Safe for many threads."""

    def __init__(self, backend: Backend, limit_s: float) -> None:
        self.name = backend.name
        self._backend = backend
        self._limit_s = limit_s
        self._changed = threading.Condition()
        #: Calls that have not begun, by their question: whoever has the same joins them.
        self._next: dict[str, _Call] = {}
        #: The call that runs now, also one that nobody waits for any more.
        self._running: _Call | None = None
        self._known: list[Gpu] = []
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="gpu-watch", daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        return self._backend.environment()

    def about(self) -> str:
        return self._ask("about", self._backend.about)

    def sample(self) -> list[Gpu]:
        return [*self._ask("sample", self._sample)]

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

    def _ask(self, question: str, work: Callable[[], T]) -> T:
        asked = time.monotonic()
        with self._changed:
            if self._closed:
                raise GpuUnavailable("the GPUs are no longer watched: this process is stopping")
            call = self._next.setdefault(question, _Call(work))
            self._changed.notify_all()
            while not call.done:
                self._wait(asked)
        if call.error is not None:
            raise GpuUnavailable(str(call.error)) from call.error
        value: T = call.value
        return value

    def _wait(self, asked: float) -> None:
        """Wait for news, but neither for longer than the limit nor for a call that has hung for as long."""
        since = self._running.started if self._running is not None else asked
        now = time.monotonic()
        patience = min(asked, since) + self._limit_s - now
        if patience <= 0:
            raise GpuUnavailable(f"the GPU driver has not answered for {now - since:.1f} s")
        self._changed.wait(patience)

    def _serve(self) -> None:
        while (call := self._begin_next()) is not None:
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

    def _begin_next(self) -> _Call | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next)
            if self._closed:
                return None
            call = self._running = self._next.pop(next(iter(self._next)))
            call.started = time.monotonic()
            return call
