"""What this machine (or the container it gave us) has beside its GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.store.nodes import Host

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMORY = Path("/proc/meminfo")


def describe(gpu_backend: str) -> Host:
    return Host(gpu_backend, len(os.sched_getaffinity(0)) * 1000, _memory_mb())


def _memory_mb() -> int | None:
    """Memory of the machine, or as much of it as our control group may use."""
    found = [_limit_bytes(), _total_bytes()]
    return min((size // 2**20 for size in found if size is not None), default=None)


def _limit_bytes() -> int | None:
    try:
        text = _LIMIT.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _total_bytes() -> int | None:
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return sizes[0] * 1024 if sizes else None
