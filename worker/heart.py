"""The database for signs of life: it leaves a connection that died in silence, and waits for a server that is slow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from orchestrator.settings import Settings
from orchestrator.store.database import Database, TookTooLong

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")


class Heart:
    """Of one node. However many posts write at once, no sign of life waits for a connection of theirs to be free.

    It has a connection for the heartbeats of all workers and one for the word of their supervisor. What takes longer
    than `heartbeat_limit_s` is tried once more, on a fresh connection and for as long as anything may take: that one
    can only be slow. While the server is, nothing is tried twice: all workers of a busy cluster would die of it.
    """

    def __init__(self, quick: Database, patient: Database) -> None:
        self._quick = quick
        self._patient = patient
        self._slow = False

    @classmethod
    def of(cls, settings: Settings) -> Heart:
        patient = settings.model_copy(update={"db_pool_size": 2})
        quick = patient.model_copy(update={"db_timeout_s": settings.heartbeat_limit_s})
        return cls(Database(quick, again_when_late=False), Database(patient, again_when_late=False))

    def write(
        self, work: Callable[[Connection], T], patience_s: float = math.inf, *, again_when_late: bool = True
    ) -> T:
        """As that of a database. What may miss a beat is not tried again when it was late (TookTooLong)."""
        return self._try(lambda db: db.write(work, patience_s), again_when_late=again_when_late)

    def write_at_once(self, work: Callable[[Connection], T]) -> T:
        """As that of a database."""
        return self._try(lambda db: db.write_at_once(work))

    def close(self) -> None:
        self._quick.close()
        self._patient.close()

    def _try(self, write: Callable[[Database], T], *, again_when_late: bool = True) -> T:
        if not self._slow:
            try:
                return write(self._quick)
            except TookTooLong:
                if not again_when_late:
                    raise
                self._patient.drop_connections()
        began = time.monotonic()
        answer = write(self._patient)
        self._slow = time.monotonic() - began > self._quick.settings.db_timeout_s
        return answer
