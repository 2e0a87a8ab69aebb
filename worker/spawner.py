"""Makes jobs of the tasks that attempts of this worker added, right after they succeeded.

A batch in each transaction, on a thread of its own. Whatever is left when this worker ends, the leader goes on with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from orchestrator.jobs import RetryPolicy
from orchestrator.settings import Settings
from orchestrator.store import spawning
from orchestrator.store.database import Database
from orchestrator.store.policies import Copy
from orchestrator.store.spawning import Marked
from orchestrator.telemetry import logs
from orchestrator.workflows import Limits

log = logging.getLogger(__name__)

#: Seconds until another try, when somebody else was at it.
BUSY_S = 0.02


class Spawner:
    def __init__(self, db: Database, settings: Settings, policies: Copy, nudge: Callable[[str], None]) -> None:
        self._db = db
        self._rules = spawning.Rules(RetryPolicy.of(settings), Limits.of(settings), policies.book)
        self._nudge = nudge
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spawner", initializer=logs.inherited())

    def add(self, job_id: str, attempt: int) -> None:
        """This attempt succeeded, and added tasks."""
        if not self._over.is_set():
            self._thread.submit(self._make, Marked(job_id, attempt))

    def close(self) -> None:
        self._over.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, one: Marked) -> None:
        try:
            while not self._over.is_set():
                made = spawning.make_some(self._db, one, self._rules)
                for lane in made.lanes:
                    self._nudge(lane)
                if made.busy:
                    self._over.wait(BUSY_S)
                elif not made.more:
                    return
        except Exception as error:  # noqa: BLE001 - whatever it was, the leader tries as well
            log.warning("left to the leader", extra={"job_id": one.job_id, "attempt": one.attempt, "error": str(error)})
