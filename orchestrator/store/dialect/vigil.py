"""MariaDB's connections that wait for an answer: one that died in silence is cut, a server that is slow is waited for.

Nothing on our side tells the one from the other (no FIN came: a firewall, a failover of the network). The server does:
it knows whether it is at work for a session. Giving up after a while and asking again would be wrong for a slow one: it
is still at the first question, and holds the rows that the second one needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import SQLAlchemyError

from orchestrator.store.dialect.driver import QuickConnection

log = logging.getLogger(__name__)

#: Of the time that an answer may take, how often it is looked whether one has taken that.
LOOKS = 4
_COMMAND = text("SELECT command FROM information_schema.processlist WHERE id = :session")


@dataclass(eq=False)
class Question:
    connection: QuickConnection
    #: Monotonic time: without an answer until then, the server is asked about it.
    due_at: float


class Vigil:
    """Over all transactions on `engine`. `others` is an engine for this alone: what died may have died together."""

    def __init__(self, engine: Engine, others: Engine, silence_s: float) -> None:
        self._others = others
        self._silence_s = silence_s
        #: By thread: each waits for one answer at a time.
        self._questions: dict[int, Question] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="vigil", daemon=True)
        event.listen(engine, "before_cursor_execute", self._asked)
        event.listen(engine, "after_cursor_execute", self._answered)
        event.listen(engine, "commit", self._asked)
        self._thread.start()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a transaction of this thread and its commit, of whose answer nothing else tells."""
        try:
            yield
        finally:
            self._answered()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._silence_s)

    def _asked(self, conn: Connection, *_: Any) -> None:
        connection: Any = conn.connection.dbapi_connection
        self._questions[threading.get_ident()] = Question(connection, time.monotonic() + self._silence_s)

    def _answered(self, *_: Any) -> None:
        self._questions.pop(threading.get_ident(), None)

    def _loop(self) -> None:
        while not self._stop.wait(self._silence_s / LOOKS):
            for thread, question in list(self._questions.items()):
                if time.monotonic() > question.due_at:
                    self._look(thread, question)

    def _look(self, thread: int, question: Question) -> None:
        question.due_at = time.monotonic() + self._silence_s
        try:
            at_work = self._at_work(question.connection)
        except SQLAlchemyError as error:
            log.warning("connection unknown", extra={"error": str(error.args[0])})
            return
        # Who was only late to read its answer, as after a halt of this process, has it by now.
        if not at_work and self._questions.get(thread) is question:
            log.warning("connection died in silence")
            question.connection.cut()

    def _at_work(self, connection: QuickConnection) -> bool:
        self._others.dispose()
        with self._others.connect() as other:
            command = other.execute(_COMMAND, {"session": connection.thread_id()}).scalar()
        return command not in (None, "Sleep")  # None: the session has ended
