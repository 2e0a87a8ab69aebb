"""Reads that wait, and a way to end such a wait from another thread.

The server is asked to end it (CLIENT UNBLOCK), as if its time had run out: the read returns empty, and no entry can get
lost. Closing the connection would end it too, but an entry that is on its way by then would be delivered to nobody.

Best effort: who may not ask for this, or cannot just now, waits until the read has waited long enough by itself.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from weakref import ref

import redis
from redis.connection import AbstractConnection

from orchestrator.settings import Settings
from orchestrator.stream.client import connect

#: Seconds until the next try: whoever is to be interrupted may not have begun to wait.
AGAIN_S = 0.05


class _Line:
    """The connection of a client, and the number under which its server knows it.

    It holds neither the client nor the connection, which hold it: in a circle, they would stay open when nobody has
    them any more, until Python looks for circles.
    """

    def __init__(self) -> None:
        self._known: tuple[ref[AbstractConnection], int] | None = None

    def number(self) -> int | None:
        """None without a connection: a server that was started anew may have given its number to another."""
        known = self._known
        if known is None:
            return None
        connection, number = known[0](), known[1]
        return number if connection is not None and connection.is_connected else None

    def connected(self, connection: AbstractConnection) -> None:
        """At every connect: each has another number, and until it is known there is none."""
        self._known = None
        connection.on_connect()  # type: ignore[no-untyped-call]  # redis does not say
        connection.send_command("CLIENT", "ID")  # type: ignore[no-untyped-call]  # likewise
        with suppress(redis.ResponseError):  # not to be known, or not by this user
            self._known = ref(connection), int(connection.read_response())


class Ear:
    """For one thread that reads: `client` has a connection of its own, since a read that waits holds up all others.

    `others` is a client whose connections wait for nothing: the interrupt goes that way.
    """

    def __init__(self, settings: Settings, others: redis.Redis) -> None:
        self._others = others
        self._line = _Line()
        self.client = connect(settings, self._line.connected)

    def interrupt(self) -> bool:
        """End the wait that goes on now, if any. False when asking failed: then it is no use to ask again."""
        number = self._line.number()
        if number is None:
            return True
        try:
            self._others.client_unblock(number)
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
