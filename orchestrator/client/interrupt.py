"""Raising LeaseLost in the thread that holds the lease, whatever it does right now.

- In the main thread by a signal: it also ends a wait (`time.sleep`, a lock, a socket). The signal is SIGURG, because
  nothing happens when it comes to a process that does not expect it. A handler that was there before is called for
  every SIGURG that is not ours, and put back with the last lease. A signal that comes a moment before the interpreter
  begins to wait does not end that wait, so it is sent again until it was heard.
- In any other thread by the interpreter's own way (PyThreadState_SetAsyncExc): between two steps of Python code, so a
  thread that waits hears of it when its wait is over.
- In a task of an event loop by cancelling it, as `asyncio.timeout` does: `async with` makes LeaseLost of that.

None of them reaches into a call of a C library that does not return (a CUDA kernel, an endless read in a driver): the
error is raised when it returns. Whoever must not wait for that runs the work in a process of its own: `gpuorch run`.

Nothing is ever raised outside of the lease's block: `close` is called when the block is left, and an error on its way
arrives inside of `close`.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from orchestrator.client.errors import LeaseLost

SIGNAL = signal.SIGURG
#: Seconds that an error on its way is given to arrive. The next step of Python code is enough, unless the error of
#: another lease took its place: a thread has room for one.
_ARRIVAL_S = 1.0
#: Seconds between two signals while none was heard.
AGAIN_S = 1.0


class Interrupt(Protocol):
    def send(self, reason: str) -> None:
        """Raise in the holder's thread; called from another one."""

    def insist(self) -> None:
        """See to it that what was sent is raised, unless the block is left first; called by the thread that sent it."""

    def close(self) -> None:
        """Raise no more; called by the holder's thread, any number of times."""


def of_this_thread() -> Interrupt:
    if threading.current_thread() is threading.main_thread():
        by_signal = _by_signal.watch()
        if by_signal is not None:
            return by_signal
    return AtNextStep()


class AtNextStep:
    def __init__(self) -> None:
        self._thread = threading.current_thread()
        self._lock = threading.Lock()
        self._sent = self._arrived = self._closed = False

    def send(self, reason: str) -> None:
        with self._lock:
            # A thread that is gone may have left its number to a new one.
            if self._closed or not self._thread.is_alive():
                return
            self._sent = True
            _raise_in(self._thread, self._class(reason))

    def insist(self) -> None:
        """The interpreter keeps it."""

    def close(self) -> None:
        try:
            with self._lock:
                self._closed = True
            patient_until = time.monotonic() + _ARRIVAL_S
            while self._sent and not self._arrived and time.monotonic() < patient_until:
                time.sleep(0.001)
        except LeaseLost:
            if not self._arrived:  # that of another lease, around this one
                raise

    def _class(self, reason: str) -> type[LeaseLost]:
        """The interpreter takes a class and makes the error in the thread that it is for: so we know it arrived."""
        interrupt = self

        class Arriving(LeaseLost):
            def __init__(self) -> None:
                interrupt._arrived = True
                super().__init__(reason)

        Arriving.__name__, Arriving.__qualname__, Arriving.__module__ = (
            LeaseLost.__name__,
            LeaseLost.__qualname__,
            LeaseLost.__module__,
        )
        return Arriving


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


class InTask:
    """The task that runs now. Leaving the block makes LeaseLost of the cancellation, by `arrived`."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        self._before = task.cancelling()
        self._sent = self._closed = False

    def send(self, reason: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody runs there any more
            self._loop.call_soon_threadsafe(self._cancel)

    def insist(self) -> None:
        """The loop keeps it."""

    def close(self) -> None:
        self._closed = True

    def arrived(self) -> bool:
        """Whether the task was cancelled by us, and by nobody else."""
        return self._sent and self._task.uncancel() <= self._before

    def _cancel(self) -> None:
        if not self._closed and not self._sent:
            self._sent = True
            self._task.cancel()


class BySignal:
    def __init__(self, closed: Callable[[BySignal], None]) -> None:
        self._closed = closed
        #: What to raise at the next signal.
        self.due: str | None = None
        # No event: its lock stayed locked if the error of another lease came while it is set.
        self._over = False

    def send(self, reason: str) -> None:
        self.due = reason
        _ring()

    def insist(self) -> None:
        while True:
            time.sleep(AGAIN_S)
            if self._over:
                return
            _ring()

    def heard(self) -> None:
        self.due = None  # first: the next signal may come in the middle of this
        self._over = True

    def close(self) -> None:
        self._over = True
        self._closed(self)


def _ring() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


class _Handler:
    """The one handler of our signal, for all leases that the main thread holds."""

    def __init__(self) -> None:
        self._watched: list[BySignal] = []
        self._previous: Any = signal.SIG_DFL

    def watch(self) -> BySignal | None:
        """None where Python cannot handle the signal: in a subinterpreter, or when C code does already."""
        if not self._watched:
            try:
                if signal.getsignal(SIGNAL) is None:
                    return None
                self._previous = signal.signal(SIGNAL, self._on_signal)
            except ValueError:
                return None
        one = BySignal(self._forget)
        self._watched.append(one)
        return one

    def _forget(self, one: BySignal) -> None:
        if one not in self._watched:
            return
        self._watched.remove(one)
        # Whoever put a handler of their own there meanwhile keeps it. A lease that another thread ends cannot take ours
        # away, which then does nothing.
        if not self._watched and signal.getsignal(SIGNAL) == self._on_signal:
            with suppress(ValueError):
                signal.signal(SIGNAL, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        due = [one for one in self._watched if one.due is not None]
        if due:
            # The outermost: its error leaves the blocks of all others too.
            reason = due[0].due or ""
            for one in due:
                one.heard()
            raise LeaseLost(reason)
        if callable(self._previous):
            self._previous(number, frame)


_by_signal = _Handler()
