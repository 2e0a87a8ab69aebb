"""A worker from start to end: sessions, one after the other, until it is told to stop.

A session is one registration under one worker id. It ends in order (SIGTERM: finish or hand back, deregister) or
because the leader declared the worker dead; then everything it ran is killed, since it runs elsewhere already, and
a new session begins under a new id.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator.errors import OrchestratorError, Overloaded, Unavailable
from orchestrator.gpu import backends
from orchestrator.identity import instance_id, node_id
from orchestrator.jobs import BURY, DEFAULT_LANE, FAIL, FINISH, HAND_BACK, RETRY, SKIP, RetryPolicy
from orchestrator.publisher import Publisher
from orchestrator.settings import Settings
from orchestrator.store import nodes, ownership
from orchestrator.store.claim import Claim
from orchestrator.store.database import Database
from orchestrator.store.moves import Claimant
from orchestrator.store.nodes import Beat, Worker
from orchestrator.store.settle import End, Outcome, Settled, Start
from orchestrator.stream.hub import Hub
from worker.doorbell import Listener
from worker.intake import Held, Intake
from worker.keepalive import Keepalive
from worker.ledger import Ledger
from worker.lifeline import Lifeline
from worker.slots import SlotEvents, SlotPool

log = logging.getLogger(__name__)

#: Seconds between tries to begin a session while a server is away.
RETRY_EVERY_S = 1.0


class Session:
    """One registration: creates everything that works under its worker id, and ends it in order."""

    def __init__(self, settings: Settings, db: Database, hub: Hub, publisher: Publisher) -> None:
        self._settings = settings
        self._db = db
        self._hub = hub
        self._publisher = publisher
        self._lane = hub.lane(settings.worker_pool or DEFAULT_LANE)
        self._node_id = node_id(settings)
        self.worker_id = instance_id()
        self._gpus = backends.choose(settings.gpu_backend, self._node_id, settings.data_dir)
        self._by = Claimant(
            self.worker_id, self._node_id, self._lane.name, settings.job_lease_ttl_s, settings.gpu_stale_s
        )
        self._held = Held()
        self._progress: dict[str, tuple[int, float, str]] = {}
        self._counts = {"done": 0, "failed": 0}
        self._draining = False
        self._lifeline = Lifeline()
        self._keepalive: Keepalive | None = None
        self._doorbell: Listener | None = None
        # Apart from the slots' thread, which must never wait for the database.
        self._questions = ThreadPoolExecutor(1, thread_name_prefix="ownership")
        self.over = threading.Event()
        self.lost = False
        self._build()

    def _build(self) -> None:
        settings = self._settings
        policy = RetryPolicy.of(settings)
        self._slots = SlotPool(
            settings.worker_slots,
            [str(settings.payload_max_bytes), *settings.worker_handlers],
            self._gpus.environment(),
            SlotEvents(self._started, self._ended, self._progressed, self._asked),
            settings.cancel_step_s,
            self._lifeline,
            leased_until=lambda: self._keepalive.leased_until if self._keepalive else math.inf,
        )
        self._ledger = Ledger(
            self._db,
            self._lane,
            self._by,
            policy,
            memory_for=self._slots.memory_for,
            held=self._held.job_ids,
            claim_is_near=lambda: self._intake.backlogged and self._slots.quick,
            on_settled=self._settled,
            on_stuck=self._on_lost,
        )
        self._intake = Intake(
            self._db,
            self._hub,
            self._lane,
            self._hub.reader(self._lane, self.worker_id),
            self._slots,
            self._ledger,
            self._held,
            settings,
            on_read=self._read,
            on_refused=self._refused,
        )

    def begin(self) -> None:
        """Start the slots, register once their handlers are known, then take jobs."""
        self._slots.start()
        while not self._slots.wait_free(1.0):
            if self.over.is_set():
                return
        worker = self._describe()
        self._db.write(lambda conn: nodes.register(conn, worker, self._gpus.name))
        self._keepalive = Keepalive(
            self._db,
            worker,
            self._gpus,
            self._settings,
            self._beat,
            self._lifeline,
            on_lost=self._on_lost,
            on_cancelled=self._cancelled,
        )
        self._keepalive.start()
        self._doorbell = Listener(self._hub.doorbell(), self._settings, self._keepalive.poke)
        self._doorbell.start()
        self._intake.start()
        self._publisher.nudge(self._lane.name)
        log.info("worker ready", extra={"worker_id": self.worker_id, "lane": self._lane.name})

    def _describe(self) -> Worker:
        return Worker(
            self.worker_id,
            self._node_id,
            self._lane.name,
            socket.gethostname(),
            os.getpid(),
            self._settings.worker_slots,
            tuple(self._slots.memory),
        )

    def end(self) -> None:
        """Stop reading → finish or hand back → write it down → deregister. Heartbeats go on until the last."""
        self._draining = True
        self._intake.stop()
        patience_over = time.monotonic() + self._settings.worker_grace_s
        self._finish_or_hand_back(patience_over)
        self._intake.join()
        self._finish_or_hand_back(patience_over)  # a claim that was being committed comes after the rest
        self._close()
        try:
            worker = self._describe()
            self._db.write(lambda conn: nodes.deregister(conn, worker))
            self._publisher.publish(self._lane.name)
            self._lane.forget_consumer(self.worker_id)
        except Unavailable as away:
            log.warning("left without a word", extra={"error": str(away)})  # the leader notices the silence

    def _finish_or_hand_back(self, until: float) -> None:
        if not self._slots.wait_idle(max(until - time.monotonic(), 0.0)):
            self._slots.hand_back("its worker was stopped")

    def abandon(self) -> None:
        """Kill what runs and leave: the leader gave our jobs away, or they never were ours."""
        self._intake.stop()
        self._slots.hand_back("its worker was declared dead")
        self._close()

    def _close(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
        self._slots.close()
        self._questions.shutdown(wait=False, cancel_futures=True)
        self._intake.join()
        self._ledger.close(self._settings.db_timeout_s)
        if self._keepalive is not None:
            self._keepalive.close()
        self._lifeline.close()  # last: a heartbeat writes to it

    # ── what the parts tell ─────────────────────────────────────────────────────────────────────────────────

    def _started(self, claim: Claim) -> None:
        self._ledger.note(Start(claim.job_id, claim.attempt), self._held.entry_of(claim.job_id))

    def _ended(self, claim: Claim, end: End) -> None:
        self._progress.pop(claim.job_id, None)
        self._ledger.note(end, self._held.entry_of(claim.job_id))

    def _refused(self, claim: Claim) -> None:
        """Claimed, but its slot went away meanwhile."""
        back = End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error="no slot was free any more")
        try:
            self._ended(claim, back)
        except Overloaded:  # the session ended while the claim was being committed: the leader finds the job
            log.warning("left a claimed job behind", extra={"job_id": claim.job_id})

    def _progressed(self, claim: Claim, fraction: float, note: str) -> None:
        """What a handler says must not be able to stop the heartbeat that carries it."""
        if math.isfinite(fraction):
            text = str(note).encode(errors="replace").decode()
            self._progress[claim.job_id] = (claim.attempt, min(max(float(fraction), 0.0), 1.0), text)

    def _asked(self, claim: Claim, question: int) -> None:
        self._questions.submit(self._answer, claim, question)

    def _answer(self, claim: Claim, question: int) -> None:
        """Without an answer from the database nobody owns anything."""
        try:
            owns = self._db.read(lambda conn: ownership.owns(conn, claim.job_id, claim.attempt, self.worker_id))
        except Exception as error:  # noqa: BLE001 - whatever it was, the handler waits for an answer
            log.warning("ownership unknown", extra={"job_id": claim.job_id, "error": str(error)})
            owns = False
        self._slots.answer(claim, question, owns)

    def _cancelled(self, jobs: list[tuple[str, int]]) -> None:
        for job_id, attempt in jobs:
            self._slots.cancel(job_id, attempt)

    def _read(self, count: int, ran_dry: bool) -> None:
        if ran_dry:
            self._publisher.nudge(self._lane.name)
        else:
            self._publisher.consumed(self._lane.name, count)

    def _settled(self, settled: Sequence[Settled]) -> None:
        self._held.drop([item.end.job_id for item in settled])
        self._counts["done"] += sum(item.arrow in (FINISH, SKIP) for item in settled)
        self._counts["failed"] += sum(item.arrow in (FAIL, BURY, RETRY) for item in settled)
        if any(item.arrow in (HAND_BACK, RETRY) for item in settled):
            self._publisher.nudge(self._lane.name)

    def _beat(self) -> Beat:
        progress = tuple((job_id, *report) for job_id, report in list(self._progress.items()))
        held = tuple(self._held.job_ids())
        return Beat(self._slots.busy(), self._counts["done"], self._counts["failed"], self._draining, progress, held)

    def _on_lost(self) -> None:
        self.lost = True
        self.over.set()


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
