"""Processes that outlived their job or their slot. Whatever session they moved to, they wear their slot's mark."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from functools import partial

from orchestrator.gpu import GpuProcess
from orchestrator.gpu.processes import describe, wearers
from orchestrator.telemetry import logs

log = logging.getLogger(__name__)

#: Looks for processes of a slot at most: each may have started another meanwhile.
MAX_LOOKS = 8


class Sweeper:
    """Ends what slots leave behind, in a thread of its own: looking at all processes may take long, or hang."""

    def __init__(self) -> None:
        self._sweeps: list[threading.Thread] = []

    def sweep(self, mark: str) -> None:
        """Returns at once."""
        self._sweeps = [thread for thread in self._sweeps if thread.is_alive()]
        self._sweeps.append(logs.thread(partial(_end_all_of, mark), "strays"))
        self._sweeps[-1].start()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._sweeps:
            thread.join(max(deadline - time.monotonic(), 0.0))


def _end_all_of(mark: str) -> None:
    """A session of their own keeps them from being killed as their slot's group."""
    for _ in range(MAX_LOOKS):
        if not (left := wearers(mark)):
            return
        end_processes(left)


def end_processes(processes: Iterable[GpuProcess]) -> None:
    for process in sorted(processes, key=lambda process: process.pid):
        if _kill(process):
            log.warning("ended a process that outlived its job", extra={"pid": process.pid, "slot": process.mark})


def _kill(process: GpuProcess) -> bool:
    """Kill it if it still is the process that was seen: its number may have been given to another."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if describe(process.pid, None).mark != process.mark:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError as refused:
        log.warning("cannot end a process", extra={"pid": process.pid, "error": str(refused)})
        return False
    finally:
        os.close(fd)
    return True
