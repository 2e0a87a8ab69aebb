"""Asking work to stop: one token, passed down to whoever might do more of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from orchestrator.errors import Aborted


class Cancellation:
    """Once cancelled, for ever. With a `parent` it is cancelled with that one too.

    Any thread may cancel, and so may a signal handler: the lock is one that its holder may take again.
    """

    def __init__(self, parent: Cancellation | None = None) -> None:
        self._parent = parent
        self._changed = threading.Condition()
        self._cancelled = False
        self._error: str | Exception = ""
        self._heard: list[Callable[[], object]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled or (self._parent is not None and self._parent.cancelled)

    @property
    def error(self) -> Exception:
        """What `raise_if_cancelled` raises: Aborted with the reason, or the error that `cancel` was given instead."""
        if not self._cancelled and self._parent is not None and self._parent.cancelled:
            return self._parent.error
        return self._error if isinstance(self._error, Exception) else Aborted(self._error)

    def cancel(self, reason: str | Exception = "") -> None:
        """Again is fine; the first reason stays."""
        with self._changed:
            if self._cancelled:
                return
            self._error = reason
            self._cancelled = True
            self._changed.notify_all()
            heard = list(self._heard)
        for callback in heard:
            callback()

    def raise_if_cancelled(self) -> None:
        if self.cancelled:
            raise self.error

    def wait(self, seconds: float) -> bool:
        """Sleep, unless it is cancelled; whether it is."""
        with self.telling(self._wake), self._changed:
            return self._changed.wait_for(lambda: self.cancelled, seconds)

    @contextmanager
    def telling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Inside of the block, `callback` is called by whoever cancels. It must not block."""
        with self._changed:
            self._heard.append(callback)
        try:
            with nullcontext() if self._parent is None else self._parent.telling(callback):
                yield
        finally:
            with self._changed:
                self._heard.remove(callback)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
