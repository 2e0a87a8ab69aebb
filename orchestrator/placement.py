"""Which GPU gets a request: a pure function over a snapshot, with a reason for every refusal.

Best fit: among the GPUs with room, the one that is left with the least, so that large requests keep finding
large holes. The decision is a proposal; the guarded UPDATE in `store.leases` is what grants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GpuView:
    """A GPU as placement sees it."""

    gpu_uuid: str
    node_id: str
    gpu_index: int
    usable_mb: int
    leased_mb: int
    foreign_mb: int
    health: str = "ok"
    fresh: bool = True

    @property
    def free_mb(self) -> int:
        return self.usable_mb - self.leased_mb - self.foreign_mb

    def with_lease(self, memory_mb: int) -> GpuView:
        return replace(self, leased_mb=self.leased_mb + memory_mb)


@dataclass(frozen=True)
class Placed:
    gpus: tuple[GpuView, ...]


@dataclass(frozen=True)
class Refused:
    reason: str


def place(gpus: Sequence[GpuView], memory_mb: int, gpu_count: int = 1, node_id: str | None = None) -> Placed | Refused:
    """Choose `gpu_count` GPUs of one node with `memory_mb` free on each, all or nothing."""
    candidates = [gpu for gpu in gpus if node_id in (None, gpu.node_id)]
    fitting: dict[str, list[GpuView]] = {}
    for gpu in candidates:
        if refusal(gpu, memory_mb) is None:
            fitting.setdefault(gpu.node_id, []).append(gpu)
    choices = [
        sorted(group, key=lambda gpu: (gpu.free_mb, gpu.gpu_index))[:gpu_count]
        for group in fitting.values()
        if len(group) >= gpu_count
    ]
    if not choices:
        return Refused(_why_not(candidates, memory_mb, gpu_count, node_id))
    best = min(choices, key=lambda group: (sum(gpu.free_mb for gpu in group), group[0].node_id))
    return Placed(tuple(best))


def refusal(gpu: GpuView, memory_mb: int) -> str | None:
    """Why this GPU cannot take the request; None when it can. Unknown is not free."""
    if not gpu.fresh:
        return "its last sample is stale"
    if gpu.health != "ok":
        return f"it is {gpu.health}"
    if gpu.free_mb < memory_mb:
        return f"{max(gpu.free_mb, 0)} of {gpu.usable_mb} MB free"
    return None


def _why_not(gpus: Sequence[GpuView], memory_mb: int, gpu_count: int, node_id: str | None) -> str:
    place_name = f"node {node_id}" if node_id else "the cluster"
    if not gpus:
        return f"no GPU is known on {place_name}"
    wanted = f"{memory_mb} MB" if gpu_count == 1 else f"{memory_mb} MB on each of {gpu_count} GPUs of one node"
    shown = [f"{gpu.node_id}/{gpu.gpu_index}: {refusal(gpu, memory_mb) or 'fits'}" for gpu in gpus[:4]]
    more = f" and {len(gpus) - 4} more" if len(gpus) > 4 else ""
    return f"needs {wanted}; {', '.join(shown)}{more}"
