"""MariaDB's connections that wait for an answer: one that died in silence is cut, a server that is slow is waited for.

Nothing on our side tells the one from the other (no FIN came: a firewall, a failover of the network). The server does:
it knows whether it is at work for a session. Giving up after a while and asking again would be wrong for a slow one: it
is still at the first question, and holds the rows that the second one needs.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine, event, text
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.store.dialect.driver import WatchedConnection

log = logging.getLogger(__name__)

#: Of the time that an answer may take, how often it is looked whether one has taken that.
LOOKS = 4
#: An address may lead to several servers, and each has sessions of the same numbers.
_SERVER = "CONCAT_WS(' ', @@hostname, @@port, @@server_id)"
_WHO = f"SELECT {_SERVER}, CONNECTION_ID()"
_DOING = text(f"SELECT {_SERVER}, (SELECT command FROM information_schema.processlist WHERE id = :session)")  # noqa: S608 - of our own


class Vigil:
    """Over all connections of `engine`. `others` is an engine for this alone: what died may have died together.

    After a cut, fresh connections are trusted for `trust_s`: one that is silent so soon has a server that is slow in a
    way that it does not tell, and whoever asked again and again would never hear its answer.
    """

    def __init__(self, engine: Engine, others: Engine, silence_s: float, trust_s: float) -> None:
        self._others = others
        self._silence_s = silence_s
        self._trust_s = trust_s
        self._lock = threading.Lock()
        self._connections: WeakSet[WatchedConnection] = WeakSet()
        self._cut_at = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="vigil", daemon=True)
        event.listen(engine, "connect", self._meet)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._silence_s)
        self._others.dispose()

    def _meet(self, connection: WatchedConnection, _record: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_WHO)
            connection.server, connection.session = cursor.fetchone()
        with self._lock:
            self._connections.add(connection)

    def _loop(self) -> None:
        while not self._stop.wait(self._silence_s / LOOKS):
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                try:
                    self._look(connection)
                except Exception:
                    log.exception("vigil broke")

    def _look(self, connection: WatchedConnection) -> None:
        asked_at, now = connection.asked_at, time.monotonic()
        if asked_at is None or now < max(asked_at, connection.vouched_at) + self._silence_s:
            return
        if connection.opened_at > self._cut_at > now - self._trust_s:
            return
        if connection.sends():
            return
        at_work = self._at_work(connection)
        if at_work:
            connection.vouched_at = time.monotonic()
        # Who was only late to read its answer, as after a halt of this process, has it by now.
        elif at_work is False and connection.asked_at == asked_at:
            self._cut_at = time.monotonic()
            connection.cut()
            log.warning("connection died in silence")

    def _at_work(self, connection: WatchedConnection) -> bool | None:
        """Whether its server works for it, as far as that can be known; None: ask again soon."""
        self._others.dispose()
        try:
            with self._others.connect() as other:
                server, command = other.execute(_DOING, {"session": connection.session}).one()
        except SQLAlchemyError as error:
            log.warning("connection unknown", extra={"error": str(error.args[0])})
            return None
        return server != connection.server or command not in (None, "Sleep")  # None: the session has ended
