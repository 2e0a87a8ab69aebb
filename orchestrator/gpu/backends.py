"""Which GPUs a node has: the choice that `gpu_backend` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from orchestrator.gpu import Gpu
from orchestrator.gpu.simulated import SimulatedGpus


class Backend(Protocol):
    name: str

    def environment(self) -> dict[str, str]:
        """What the processes of jobs need in their environment."""

    def sample(self) -> list[Gpu]:
        """The GPUs as they are now."""


class NoGpus:
    """Backend `none`: this node has no GPUs."""

    name = "none"

    def environment(self) -> dict[str, str]:
        return {}

    def sample(self) -> list[Gpu]:
        return []


def choose(spec: str, node_id: str, data_dir: Path) -> Backend:
    """The backend that `gpu_backend` names. `auto` finds no GPUs: NVML is not supported yet."""
    if spec.startswith("sim:"):
        return SimulatedGpus(spec, node_id, data_dir / "simulated-gpus")
    return NoGpus()
