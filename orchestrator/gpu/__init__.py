"""What a node's GPUs look like right now. A backend turns hardware (or its simulation) into `Gpu` snapshots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One sample of one GPU. Memory in MB; `foreign_mb` is held by processes that have no lease."""

    uuid: str
    index: int
    name: str
    total_mb: int
    used_mb: int
    foreign_mb: int
    utilization: float | None = None
    health: str = "ok"
    health_reason: str | None = None
