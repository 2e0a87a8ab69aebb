"""Processes that outlived their job or their slot. Whatever session they moved to, they wear their slot's mark."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable

from orchestrator.gpu import GpuProcess
from orchestrator.gpu.processes import describe, wearers

log = logging.getLogger(__name__)

#: Looks for processes of a slot at most: each may have started another meanwhile.
MAX_LOOKS = 8


def end_all_of(mark: str) -> None:
    """End all that a slot has left behind: a session of their own keeps them from being killed as its group."""
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
