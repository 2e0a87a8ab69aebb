"""The worker of `gpuorch dev`: a child process that is started again when it dies, unless it refuses to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from orchestrator.children import Restarter, dying_with_parent
from orchestrator.cli import REFUSED
from orchestrator.settings import Settings

#: Seconds beyond its own limit that a worker gets to be gone.
GOING_S = 2.0


class WorkerChild(Restarter):
    """The worker of `gpuorch dev` and of `orchestrator.testing`."""

    def __init__(
        self, settings: Settings, path: str | None = None, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        """`path`: where it finds modules beside those that are installed. `on_refused`: see Restarter."""
        limit_s = stop_limit_s(settings)
        super().__init__("worker", lambda: spawn(settings, path), limit_s, refusal=REFUSED, on_refused=on_refused)


def stop_limit_s(settings: Settings) -> float:
    """How long to wait for the end of a worker that was told to stop."""
    return settings.leave_limit_s + GOING_S


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
