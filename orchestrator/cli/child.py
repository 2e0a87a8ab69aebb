"""The worker of `gpuorch dev`: a child process that is started again when it dies unexpectedly."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

from orchestrator.children import dying_with_parent, end
from orchestrator.settings import Settings

log = logging.getLogger(__name__)

#: Seconds before a worker that died is started again: at first, and at most.
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
#: A worker that lived for this long begins with the shortest wait again.
STEADY_S = 60.0
#: Seconds beyond its own grace that a worker gets to write down what it did.
CLOSING_S = 15.0


class WorkerChild:
    """A thread of its own starts the worker, and outlives it: a worker dies with the thread it came from."""

    def __init__(self, settings: Settings, path: str | None = None) -> None:
        """`path`: where it finds modules beside those that are installed."""
        self._settings, self._path = settings, path
        #: How it ended when it did last, unless that was wanted.
        self.code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="worker-child", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """SIGTERM and time to hand its jobs back, SIGKILL at the end of it."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None:
            end(process, self._settings.worker_grace_s + CLOSING_S)
        self._thread.join()

    def _keep(self) -> None:
        backoff_s = BACKOFF_S
        while (process := self._spawn()) is not None:
            started = time.monotonic()
            code = process.wait()
            if self._stopping.is_set():
                return
            self.code = code
            steady = time.monotonic() - started > STEADY_S
            backoff_s = BACKOFF_S if steady else backoff_s
            log.warning("worker ended, starting it again", extra={"exit_code": code, "pause_s": backoff_s})
            self._stopping.wait(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        with self._lock:  # a stop comes before or after this, never between
            if self._stopping.is_set():
                return None
            self._process = spawn(self._settings, self._path)
            return self._process


def spawn(settings: Settings, path: str | None = None) -> subprocess.Popen[bytes]:
    """A worker with these settings; it dies with the thread that this is called from."""
    return subprocess.Popen(
        dying_with_parent([sys.executable, "-m", "orchestrator", "worker"]),
        env=_environment(settings) | ({} if path is None else {"PYTHONPATH": path}),
        stdin=subprocess.DEVNULL,
        # A Ctrl-C is for us, who tell the worker when it is its turn.
        start_new_session=True,
    )


def _environment(settings: Settings) -> dict[str, str]:
    """Ours, with these very settings instead of what we were started with. A file would beat them."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORCH_")}
    return inherited | settings.environment()
