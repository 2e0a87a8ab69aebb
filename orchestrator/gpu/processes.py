"""Whose process is it? By a mark in its environment for slots, by descent for everybody else.

The mark survives what descent does not: a handler's grandchild that outlives its parents, moves to another session or
is adopted by init still carries the environment it was born with.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.gpu import GpuProcess

#: Names a slot in its environment, and so in that of all its descendants: WORKER_ID#NUMBER.
MARK = "GPUORCH_SLOT"
#: The kernel's number of the first process-id namespace: the one whose ids the driver speaks of.
_FIRST_NAMESPACE = "pid:[4026531836]"
_MAX_DEPTH = 64


def driver_ids_are_ours() -> bool:
    """Whether process ids that the driver tells mean the same to us; in a container of its own they do not."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        return False


def describe(pid: int, memory_mb: int | None) -> GpuProcess:
    """A process with what tells whose it is. One that is gone by now, or not ours to look at, is nobody's.

    One that was started with an environment of its own has the mark of its nearest ancestor.
    """
    lineage = _lineage(pid)
    mark = next((mark for one in lineage if (mark := _mark(one))), None)
    return GpuProcess(pid, memory_mb, mark, lineage)


def wearers(mark: str) -> list[GpuProcess]:
    """All processes of this machine that wear it."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [GpuProcess(pid, None, mark, ()) for pid in pids if _mark(pid) == mark]


def _mark(pid: int) -> str | None:
    prefix = f"{MARK}=".encode()
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    marks = [entry.removeprefix(prefix) for entry in environment.split(b"\0") if entry.startswith(prefix)]
    return marks[0].decode(errors="replace").strip() or None if marks else None


def _lineage(pid: int) -> tuple[int, ...]:
    found: list[int] = []
    while pid > 1 and len(found) < _MAX_DEPTH:
        found.append(pid)
        pid = _parent(pid)
    return tuple(found)


def _parent(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    # The name in parentheses may hold anything, also parentheses and spaces.
    return int(status.rpartition(")")[2].split()[1])
