"""What a handler gets to know about its job, and the way it reports back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: Seconds between two reports of progress; more would only fill the pipe.
PROGRESS_EVERY_S = 0.1


@dataclass
class Context:
    """`device` is the UUID of the leased GPU (several: comma-separated), "cpu" for a CPU lease, None without one."""

    job_id: str
    type: str
    attempt: int
    agent: str
    model_id: str | None = None
    device: str | None = None
    trace_context: str | None = None
    _report: Callable[[float, str], None] = field(default=lambda _fraction, _note: None, repr=False)
    _last_report: float = field(default=float("-inf"), repr=False)

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far the job is (0…1); shown in its record within a heartbeat."""
        now = time.monotonic()
        if now - self._last_report >= PROGRESS_EVERY_S:
            self._last_report = now
            self._report(min(max(float(fraction), 0.0), 1.0), str(note))
