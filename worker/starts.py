"""Lets only so many slots of a node start at the same time.

Each keeps a core busy while its handlers are loaded, for seconds perhaps. When a node gets many at once, because
another one died, they would take the time of the heartbeats: the leader gives their workers up, their slots start
elsewhere, and take the time of the heartbeats there.
"""

from __future__ import annotations

import os
import threading

#: Seconds after which a slot that is still starting does not hold up others any longer: its handlers may hang.
PATIENCE_S = 10.0


class Starts:
    """Shared by all posts of a supervisor."""

    def __init__(self, at_once: int | None = None) -> None:
        self._free = threading.Semaphore(at_once or max(os.cpu_count() or 1, 2))

    def take(self) -> bool:
        """Whether one more may start now; then `give` must follow."""
        return self._free.acquire(blocking=False)

    def give(self) -> None:
        self._free.release()
