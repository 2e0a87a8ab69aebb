"""Says that this worker lives, from a thread that no handler can block, and knows when it counts as dead."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestrator.errors import OrchestratorError, WorkerLost
from orchestrator.gpu.backends import Backend
from orchestrator.settings import Settings
from orchestrator.store import nodes
from orchestrator.store.database import Database
from orchestrator.store.nodes import Beat, Worker

log = logging.getLogger(__name__)


class Keepalive:
    """Beats until stopped.

    `on_lost` is called once when this worker must give up what it runs: the leader gave its jobs away, or its
    leases ran out because no heartbeat got through.
    """

    def __init__(
        self,
        db: Database,
        worker: Worker,
        gpus: Backend,
        settings: Settings,
        beat: Callable[[], Beat],
        on_lost: Callable[[], None],
    ) -> None:
        self._db = db
        self._worker = worker
        self._gpus = gpus
        self._settings = settings
        self._beat = beat
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._interval_s = min(settings.worker_heartbeat_s, settings.gpu_sample_s)
        self._last_success = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="keepalive", daemon=True)

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """One heartbeat. Raises WorkerLost or DatabaseUnavailable."""
        started = time.monotonic()
        beat, sample = self._beat(), self._gpus.sample()
        gate = self._settings.gpu_mem_gate_pct
        self._db.write(lambda conn: nodes.heartbeat(conn, self._worker, beat, sample, gate))
        self._last_success = started

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._settings.db_timeout_s)

    def _loop(self) -> None:
        while not self._stop.wait(self._interval_s):
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
            if self._leases_over():
                log.error("leases ran out", extra={"silent_s": round(time.monotonic() - self._last_success, 1)})
                self._on_lost()
                return

    def _leases_over(self) -> bool:
        """A database that is away for a moment costs nothing; after a lease's life its GPU may be another's."""
        margin = self._settings.worker_heartbeat_s
        return time.monotonic() - self._last_success > self._settings.lease_ttl_s - margin
