"""The cluster as this process last saw it.

Reading all GPUs costs more than anything else about a single lease, and a proposal need not be right: taking it proves
it. So one look serves the requests of a moment. Only a proposal may rest on it, never a refusal.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from orchestrator.placement.cluster import Cluster

#: Seconds for which others' leases and releases may stay unseen.
YOUNG_S = 0.25


@dataclass(frozen=True, slots=True)
class Look:
    cluster: Cluster
    #: The database's time then; None when it knows no GPU.
    now: datetime | None
    #: The only node that was looked at; None: all.
    node_id: str | None
    #: When it was begun.
    taken_at: float = field(default_factory=time.monotonic)

    def time_by_now(self) -> datetime | None:
        """The database's time, or a little later: never earlier, as the look was begun before its time was told."""
        return self.now and self.now + timedelta(seconds=time.monotonic() - self.taken_at)


class LastLook:
    """Any thread may borrow it, one at a time: whoever places writes down in the cluster what it took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._look: Look | None = None

    def borrow(self, node_id: str | None) -> Look | None:
        with self._lock:
            look, self._look = self._look, None
        young = look is not None and look.node_id == node_id and time.monotonic() - look.taken_at < YOUNG_S
        return look if young else None

    def give_back(self, look: Look) -> None:
        with self._lock:
            self._look = look
