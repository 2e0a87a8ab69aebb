"""How long leased jobs may run without another heartbeat, where every slot can read it.

The supervisor ends them itself when that time is over. But it may be frozen while its slots run on, and then their
GPU memory would be given to others under them: so each slot looks as well, and ends itself. The system's monotonic
clock is the same for both.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable

_TIME = struct.Struct("d")


class Lifeline:
    """One number in memory that the supervisor writes and its slots read."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("lifeline", 0) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _TIME.size)
        self._memory = mmap.mmap(self.fd, _TIME.size)
        #: Until when leases live for certain, for the supervisor itself; before the first heartbeat there are none.
        self.leased_until = math.inf

    def extend(self, until: float, grace_s: float) -> None:
        """Slots wait `grace_s` longer than the supervisor, which ends jobs in better order."""
        self.leased_until = until
        _TIME.pack_into(self._memory, 0, until + grace_s)

    @property
    def until(self) -> float:
        """Until when slots may run leased jobs, monotonic time; 0 before the first heartbeat."""
        return float(_TIME.unpack_from(self._memory)[0])

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
