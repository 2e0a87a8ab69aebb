"""Says that this worker lives, from a thread that no handler can block, and hears what became of its jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from orchestrator.errors import GpuUnavailable, OrchestratorError, WorkerLost
from orchestrator.gpu import Gpu
from orchestrator.gpu.watch import Watch
from orchestrator.settings import Settings
from orchestrator.store import inventory, nodes, withdraw
from orchestrator.store.database import Database
from orchestrator.store.gpus import Gate
from orchestrator.store.inventory import Findings
from orchestrator.store.nodes import Beat, Worker
from worker.lifeline import Lifeline

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger(__name__)


class Keepalive:
    """Beats until stopped, and sooner when poked.

    `on_lost` is called once, when the leader gave this worker's jobs away. `on_cancelled` gets jobs (with attempts)
    that somebody cancelled, again with every heartbeat until they have ended. `on_sampled` gets each sample of the
    node's GPUs and what it led to.
    """

    def __init__(
        self,
        db: Database,
        worker: Worker,
        gpus: Watch,
        settings: Settings,
        beat: Callable[[], Beat],
        lifeline: Lifeline,
        *,
        on_lost: Callable[[], None],
        on_cancelled: Callable[[list[tuple[str, int]]], None],
        on_sampled: Callable[[list[Gpu], Findings], None],
        running: Callable[[], Collection[str]],
    ) -> None:
        self._db = db
        self._worker = worker
        self._gpus = gpus
        self._settings = settings
        self._beat = beat
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._on_sampled = on_sampled
        self._running = running
        self._gate = Gate.of(settings)
        self._stop = threading.Event()
        self._poked = threading.Event()
        self._interval_s = min(settings.worker_heartbeat_s, settings.gpu_sample_s)
        self._lifeline = lifeline
        self._thread = threading.Thread(target=self._loop, name="keepalive", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """One heartbeat. Raises WorkerLost or DatabaseUnavailable."""
        started = time.monotonic()
        # Slots first: one that ended before the sample was taken cannot hold what the sample shows.
        beat, running = self._beat(), self._running()
        sampled_at = time.monotonic()
        sample = self._sample()
        patience_s = self._settings.gpu_release_s

        def work(conn: Connection) -> tuple[list[tuple[str, int]], Findings]:
            nodes.heartbeat(conn, self._worker, beat)
            cancelled = withdraw.to_stop(conn, self._worker.worker_id, beat.held)
            if not sample:
                return cancelled, Findings()
            return cancelled, inventory.take_stock(
                conn, self._worker, sample, self._gate, running, patience_s, resident=beat.resident, taken_at=sampled_at
            )

        cancelled, findings = self._db.write(work)
        if self._stop.is_set():
            return  # its session did not wait any longer for this: there is nobody left to tell
        beat_s = self._settings.worker_heartbeat_s
        self._lifeline.extend(started + self._settings.job_lease_ttl_s - beat_s, grace_s=beat_s / 4)
        if cancelled:
            self._on_cancelled(cancelled)
        if sample:
            self._on_sampled(sample, findings)

    def _sample(self) -> list[Gpu]:
        """The GPUs now; those known before, marked as unknown, when the driver does not answer."""
        try:
            return self._gpus.sample()
        except GpuUnavailable as silent:
            log.warning("GPUs not sampled", extra={"error": str(silent)})
            return self._gpus.last_known(str(silent))

    def poke(self) -> None:
        """Something changed in the database: beat now."""
        self._poked.set()

    def close(self) -> None:
        self._stop.set()
        self._poked.set()
        if self._thread.is_alive():
            self._thread.join(self._settings.db_timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._poked.wait(self._interval_s)
            self._poked.clear()
            if self._stop.is_set():
                return
            try:
                self.beat()
            except WorkerLost as lost:
                log.error("declared dead", extra={"error": str(lost)})  # noqa: TRY400 - no bug, no trace
                self._on_lost()
                return
            except OrchestratorError as away:
                log.warning("heartbeat failed", extra={"error": str(away)})
            except Exception:
                log.exception("heartbeat broke")
