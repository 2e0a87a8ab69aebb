"""The leader's two threads: one keeps the term, the other does the duties while the term lasts.

They are apart so that a slow duty cannot cost the term, and a lost term stops the duties at their next write.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from orchestrator.errors import OrchestratorError, StaleEpoch
from orchestrator.leader.duties import BATCH, DUTIES, Duty, DutyContext
from orchestrator.leader.term import Candidate, Term
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import metrics

log = logging.getLogger(__name__)

#: Seconds between looks at the duty table.
DUTY_TICK_S = 0.05


@dataclass
class _Due:
    duty: Duty
    at: float = 0.0


class LeaderLoop:
    def __init__(self, db: Database, hub: Hub, publisher: Publisher, settings: Settings, holder: str) -> None:
        self._hub = hub
        self._publisher = publisher
        self._settings = settings
        self._candidate = Candidate(db, settings, holder)
        self._stop = threading.Event()
        self._context: DutyContext | None = None
        self._threads = [
            threading.Thread(target=self._keep_term, name="leader-term", daemon=True),
            threading.Thread(target=self._do_duties, name="leader-duties", daemon=True),
        ]

    @property
    def term(self) -> Term | None:
        return self._candidate.term

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the duties, then resign."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(self._settings.db_timeout_s + self._settings.redis_timeout_s)
        self._candidate.resign()

    def _keep_term(self) -> None:
        while not self._stop.is_set():
            try:
                self._candidate.tick()
            except Exception:
                log.exception("election broke")  # without a term nothing is led; the next tick tries again
            metrics.leading(self._candidate.holder, self._candidate.term is not None)
            self._stop.wait(self._settings.leader_interval_s)

    def _do_duties(self) -> None:
        due = [_Due(duty) for duty in DUTIES]
        while not self._stop.wait(DUTY_TICK_S):
            context = self._current_context()
            for item in due:
                if context is not None and time.monotonic() >= item.at:
                    did = self._run(item.duty, context)
                    pause = 0.0 if did >= BATCH else item.duty.interval_s(self._settings)
                    item.at = time.monotonic() + pause

    def _current_context(self) -> DutyContext | None:
        """One context per term: cursors of an earlier term mean nothing."""
        term = self._candidate.term
        if term is None:
            self._context = None
        elif self._context is None or self._context.term.epoch != term.epoch:
            self._context = DutyContext(term, self._hub, self._publisher, self._settings)
        return self._context

    def _run(self, duty: Duty, context: DutyContext) -> int:
        with metrics.duty(duty.name):
            try:
                return duty.run(context)
            except StaleEpoch as stale:
                self._candidate.refused_by(stale.newest)
                log.warning("a newer leader works already", extra={"duty": duty.name, "epoch": context.term.epoch})
            except OrchestratorError as away:
                metrics.duty_failed(duty.name)
                log.warning("duty failed", extra={"duty": duty.name, "error": str(away)})
            except Exception:
                # A bug in one duty must not end the others; it is counted and shown with its trace.
                metrics.duty_failed(duty.name)
                log.exception("duty broke", extra={"duty": duty.name})
        return 0
