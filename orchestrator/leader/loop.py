"""The leader's threads: one keeps the term, one does the duties while it lasts, one hears who wants them done now.

They are apart so that a slow duty cannot cost the term, and a lost term stops the duties at their next write.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from orchestrator.errors import OrchestratorError, RedisUnavailable, StaleEpoch
from orchestrator.leader.context import BATCH, DutyContext
from orchestrator.leader.duties import DUTIES, Duty
from orchestrator.leader.term import Candidate, Term
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from orchestrator.telemetry import logs, metrics
from orchestrator.telemetry.seldom import Seldom

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
        self._hurried: set[str] = set()
        self._failing: defaultdict[str, Seldom] = defaultdict(Seldom)
        self._preloads = hub.preloads()
        metrics.expect_duties([duty.name for duty in DUTIES])
        self._threads = [
            threading.Thread(target=self._keep_term, name="leader-term", daemon=True),
            threading.Thread(target=self._do_duties, name="leader-duties", daemon=True),
        ]
        self._listener = threading.Thread(target=self._hear_requests, name="leader-preloads", daemon=True)

    @property
    def term(self) -> Term | None:
        return self._candidate.term

    def start(self) -> None:
        for thread in (*self._threads, self._listener):
            thread.start()

    def hurry(self, duty: str) -> bool:
        """Do this duty at the next tick instead of when it is due; False when this instance does not lead."""
        self._hurried.add(duty)
        return self.term is not None

    def stop(self) -> None:
        """Begin no more duties; `close` waits for those that were begun."""
        self._stop.set()

    def close(self) -> None:
        """Stop the duties, then resign."""
        self.stop()
        patience_s = self._settings.db_timeout_s + self._settings.redis_timeout_s
        self._preloads.ear.release(self._listener, patience_s)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(patience_s)
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
                if context is not None and (time.monotonic() >= item.at or item.duty.name in self._hurried):
                    self._hurried.discard(item.duty.name)
                    did = self._run(item.duty, context)
                    pause = 0.0 if did >= BATCH else item.duty.interval_s(self._settings)
                    item.at = time.monotonic() + pause

    def _hear_requests(self) -> None:
        """Reconcile when somebody asks for it, not only on time. Whoever does not lead leaves the requests alone."""
        while not self._stop.is_set():
            if self.term is None:
                self._stop.wait(self._settings.leader_interval_s)
                continue
            try:
                if self._preloads.take(self._candidate.holder, self._settings.redis_block_ms):
                    self.hurry("reconcile")
            except RedisUnavailable:
                self._stop.wait(self._settings.reconcile_interval_s)  # the timer does it meanwhile
            except Exception:
                log.exception("requests for pools broke")
                self._stop.wait(self._settings.reconcile_interval_s)

    def _current_context(self) -> DutyContext | None:
        """One context per term: cursors of an earlier term mean nothing."""
        term = self._candidate.term
        if term is None:
            self._context = None
        elif self._context is None or self._context.term.epoch != term.epoch:
            self._context = DutyContext(term, self._hub, self._publisher, self._settings)
        return self._context

    def _run(self, duty: Duty, context: DutyContext) -> int:
        with metrics.duty(duty.name), logs.bind(duty=duty.name, epoch=context.term.epoch):
            try:
                did = duty.run(context)
            except StaleEpoch as stale:
                self._candidate.refused_by(stale.newest)
                log.warning("a newer leader works already")
            except OrchestratorError as away:
                metrics.duty_failed(duty.name)
                if self._failing[duty.name].due():  # most are tried again within a second
                    log.warning("duty failed", extra={"error": ", ".join([str(away), *getattr(away, "__notes__", ())])})
            except Exception:
                # A bug in one duty must not end the others; it is counted and shown with its trace.
                metrics.duty_failed(duty.name)
                log.exception("duty broke")
            else:
                if self._failing[duty.name].over():
                    log.info("duty works again")
                return did
        return 0
