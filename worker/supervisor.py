"""A worker from start to end: sessions, one after the other, until it is told to stop.

A session that the leader declared dead is followed by a new one under a new id.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading

from orchestrator.errors import OrchestratorError, Unavailable
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from worker.session import Session

log = logging.getLogger(__name__)

#: Seconds between tries to begin a session while a server is away.
RETRY_EVERY_S = 1.0


class Supervisor:
    """Runs sessions until stopped; survives servers that are away."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self._session: Session | None = None
        self._db = Database(settings)
        self._hub = Hub(settings)
        self._publisher = Publisher(self._db, self._hub, settings)

    def stop(self) -> None:
        self._stop.set()
        if self._session is not None:
            self._session.over.set()

    def run(self) -> None:
        self._publisher.start()
        while not self._stop.is_set():
            self._session = Session(self._settings, self._db, self._hub, self._publisher)
            try:
                self._run_session(self._session)
            except Unavailable as away:
                log.warning("worker waits for its servers", extra={"error": str(away)})
                self._session.abandon()
                self._stop.wait(RETRY_EVERY_S)
        self._publisher.close()
        self._hub.close()
        self._db.close()

    def _run_session(self, session: Session) -> None:
        session.begin()
        while not (session.over.wait(1.0) or self._stop.is_set()):
            pass
        if session.lost:
            session.abandon()
        else:
            session.end()


def run(settings: Settings) -> int:
    """Run a worker until SIGTERM or SIGINT; the process's exit code."""
    # Thousands of short-lived objects a second and no cycles among them: let the collector look less often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    supervisor = Supervisor(settings)

    def stop(_number: int, _frame: object) -> None:
        supervisor.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        supervisor.run()
    except OrchestratorError as error:
        log.error("worker failed", extra={"error": str(error)})  # noqa: TRY400
        return 1
    return 0
