"""What a node's GPUs look like right now. A backend turns hardware (or its simulation) into `Gpu` snapshots.

- `nvml`: questions to the driver, the only importer of pynvml; `reasons`: what its refusals mean and what to do
- `real`: the GPUs of this machine, with what became of those that no longer answer; `simulated`: GPUs kept in files
- `sampling`: what every backend answers from a fresh sample; `backends`: which one a node uses
- `watch`: bounds the time that any of them may take
- `processes`: finds out whose processes use the memory; `accounts`: how much of it no lease covers

Unknown is not zero: a GPU or a process list that nobody can tell about is never reported as free or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """Only `ok` grants leases. `lost` also ends those that are held: the work under them cannot go on."""

    OK = "ok"
    #: Works, but should not be given anything new (ECC errors, XID, too hot to trust).
    UNHEALTHY = "unhealthy"
    #: Fell off the bus, was reset or removed.
    LOST = "lost"
    #: Nobody can tell: the driver gives no (sensible) answer.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    #: None: the driver does not say how much.
    memory_mb: int | None
    #: The slot it descends from, WORKER_ID#NUMBER, by the mark in its environment; None for anybody else's.
    mark: str | None = None
    #: Its own pid and those of its ancestors.
    lineage: tuple[int, ...] = ()

    @property
    def worker_id(self) -> str | None:
        return self.mark.partition("#")[0] if self.mark else None


@dataclass(frozen=True)
class Gpu:
    """One sample of one GPU. Memory in MB; what the driver keeps for itself is no part of `total_mb`."""

    uuid: str
    index: int
    name: str
    total_mb: int
    used_mb: int
    #: None: nobody can tell which processes hold the memory.
    processes: tuple[GpuProcess, ...] | None = ()
    utilization: float | None = None
    temperature_c: int | None = None
    health: Health = Health.OK
    health_reason: str | None = None

    @property
    def free_mb(self) -> int:
        return max(self.total_mb - self.used_mb, 0)
