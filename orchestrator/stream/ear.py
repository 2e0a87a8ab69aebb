"""Reads that wait, and a way to end such a wait from another thread.

The server is asked to end it (CLIENT UNBLOCK), as if its time had run out: the read returns empty, and no entry can get
lost. Closing the connection would end it too, but an entry that is on its way by then would be delivered to nobody.

Best effort: who may not ask for this, or cannot just now, waits until the read has waited long enough by itself.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import NamedTuple

import redis
from redis.connection import AbstractConnection

from orchestrator.settings import Settings
from orchestrator.stream.client import connect

#: Seconds until the next try: whoever is to be interrupted may not have begun to wait.
AGAIN_S = 0.05


class _Line(NamedTuple):
    """A connection, and the number under which its server knows it."""

    connection: AbstractConnection
    number: int


class Ear:
    """For one thread that reads: `client` has a connection of its own, since a read that waits holds up all others.

    `others` is a client whose connections wait for nothing: the interrupt goes that way.
    """

    def __init__(self, settings: Settings, others: redis.Redis) -> None:
        self._others = others
        self._line: _Line | None = None
        self.client = connect(settings, self._connected)

    def interrupt(self) -> bool:
        """End the wait that goes on now, if any. False when asking failed: then it is no use to ask again."""
        line = self._line
        # Without its connection the number means nothing: a server that was started anew may have given it to another.
        if line is None or not line.connection.is_connected:
            return True
        try:
            self._others.client_unblock(line.number)
        except redis.RedisError:
            return False
        return True

    def release(self, thread: threading.Thread, patience_s: float) -> None:
        """Wait for the end of the thread that reads here, for which it was told to stop, and end its waits meanwhile.

        Again and again: it may have looked at its flag before that was set, and begin to wait only now.
        """
        deadline = time.monotonic() + patience_s
        helps = True
        while thread.is_alive() and time.monotonic() < deadline:
            helps = helps and self.interrupt()
            left = max(deadline - time.monotonic(), 0.0)
            thread.join(min(left, AGAIN_S) if helps else left)
        if not thread.is_alive():
            self.close()

    def close(self) -> None:
        """After the last read."""
        self.client.close()

    def _connected(self, connection: AbstractConnection) -> None:
        """At every connect: each has another number, and until it is known there is none."""
        self._line = None
        connection.on_connect()  # type: ignore[no-untyped-call]  # redis does not say
        connection.send_command("CLIENT", "ID")  # type: ignore[no-untyped-call]  # likewise
        with suppress(redis.ResponseError):  # not to be known, or not by this user
            self._line = _Line(connection, int(connection.read_response()))
