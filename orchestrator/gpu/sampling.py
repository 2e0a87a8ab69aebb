"""What every backend, and the watch over it, answers from a fresh sample: how much is free, and who holds the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, GpuProcess, Health


class Sampling(ABC):
    """Raises GpuUnavailable wherever nobody can tell what the GPUs look like."""

    @abstractmethod
    def sample(self) -> list[Gpu]:
        """The GPUs as they are now, also those that have ceased to answer."""

    def free_mb(self, uuids: Sequence[str]) -> dict[str, int]:
        """Free memory of these GPUs now. Raises GpuUnavailable with the reason when one of them is not ok."""
        found = self._asked(uuids)
        for gpu in found:
            if gpu.health is not Health.OK:
                raise GpuUnavailable(f"GPU {gpu.index} ({gpu.uuid}) is {gpu.health}: {gpu.health_reason}")
        return {gpu.uuid: gpu.free_mb for gpu in found}

    def holders(self, uuids: Sequence[str]) -> dict[str, tuple[GpuProcess, ...] | None]:
        """The processes that hold memory of these GPUs now; None where nobody can tell."""
        return {gpu.uuid: gpu.processes for gpu in self._asked(uuids)}

    def _asked(self, uuids: Sequence[str]) -> list[Gpu]:
        known = {gpu.uuid: gpu for gpu in self.sample()}
        strange = [uuid for uuid in uuids if uuid not in known]
        if strange:
            raise GpuUnavailable(f"no GPU of this node is {', '.join(strange)}")
        return [known[uuid] for uuid in uuids]
