"""Which GPUs a node has: the choice that `gpu_backend` makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.gpu import Gpu, GpuProcess
from orchestrator.gpu.sampling import Sampling
from orchestrator.gpu.simulated import SimulatedGpus


class Backend(Protocol):
    """Every question may raise GpuUnavailable, with the reason."""

    name: str

    def environment(self) -> dict[str, str]:
        """What the processes of jobs need in their environment."""

    def about(self) -> str:
        """What stands behind it, for a person to read."""

    def sample(self) -> list[Gpu]:
        """The GPUs as they are now, also those that were there before and do not answer any more."""

    def free_mb(self, uuids: Sequence[str]) -> dict[str, int]:
        """Free memory of these GPUs now: the last look before something starts there."""

    def holders(self, uuids: Sequence[str]) -> dict[str, tuple[GpuProcess, ...] | None]:
        """The processes that hold memory of these GPUs now; None where nobody can tell."""


class NoGpus(Sampling):
    """Backend `none`: this node has no GPUs."""

    name = "none"

    def environment(self) -> dict[str, str]:
        return {}

    def about(self) -> str:
        return "no GPUs"

    def sample(self) -> list[Gpu]:
        return []


def choose(spec: str, node_id: str, data_dir: Path) -> Backend:
    """The backend that `gpu_backend` names.

    `auto` is `nvml` wherever its library is, even if the driver is ill: a node that lost its driver must say so, and
    not pass for one without GPUs.
    """
    if spec.startswith("sim:"):
        return SimulatedGpus(spec, node_id, data_dir / "simulated-gpus")
    if spec == "none":
        return NoGpus()
    from orchestrator.gpu import nvml, real

    return real.NvmlGpus() if spec == "nvml" or nvml.installed() else NoGpus()
