"""How long a worker's word holds without another heartbeat, where every slot can read it.

What it claimed is its own for certain until the leader may declare it dead: a slot that gets a job later, because its
supervisor was frozen between the claim and now, does not begin it. Leases live a little longer. The supervisor ends
leased jobs itself when that time is over; but it may be frozen while its slots run on, and then their GPU memory would
be given to others under them: so each slot looks as well, and ends itself. The system's monotonic clock is the same
for both.
"""

from __future__ import annotations

import math
import os
import signal
import struct
import threading
import time
from collections.abc import Callable

from worker import shared

_TIME = struct.Struct("d")
#: Where each of them stands, and how much they take.
_LEASED, _VOUCHED, _SIZE = 0, _TIME.size, 2 * _TIME.size


class Lifeline:
    """Two times in memory that the supervisor writes and its slots read."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd, self._memory = shared.memory("lifeline", _SIZE, fd)
        #: Until when leases live for certain, for the supervisor itself; before the first heartbeat there are none.
        self.leased_until = math.inf
        if fd is None:
            self.vouch(math.inf)  # nothing is claimed before the first heartbeat

    def extend(self, until: float, grace_s: float) -> None:
        """Slots wait `grace_s` longer than the supervisor, which ends jobs in better order."""
        self.leased_until = until
        _TIME.pack_into(self._memory, _LEASED, until + grace_s)

    def vouch(self, until: float) -> None:
        """Nobody declares this worker dead before then."""
        _TIME.pack_into(self._memory, _VOUCHED, until)

    @property
    def vouched(self) -> bool:
        """Whether what was claimed is its claimant's for certain."""
        return time.monotonic() < self._read(_VOUCHED)

    @property
    def until(self) -> float:
        """Until when slots may run leased jobs, monotonic time; 0 before the first heartbeat."""
        return self._read(_LEASED)

    def _read(self, place: int) -> float:
        return float(_TIME.unpack_from(self._memory, place)[0])

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


def end_when_over(lifeline: Lifeline, leased: Callable[[], bool], every_s: float) -> None:
    """Start a thread that kills this process group when it runs a leased job longer than anybody vouches for."""

    def watch() -> None:
        while True:
            time.sleep(every_s)
            if leased() and time.monotonic() > lifeline.until:
                os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
