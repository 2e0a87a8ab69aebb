"""GPUs that exist only as files: for trying the system, and for its tests, on machines without any.

Each allocation is a file `ROOT/UUID/PID` with a number of MB. It counts while its process lives, like memory on a
real card. Files with other names (`foreign-…`) stand for processes of nobody we know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.gpu import Gpu
from orchestrator.gpu.processes import describe
from orchestrator.gpu.sampling import Sampling

#: Tells the processes of one node where the simulated memory is kept.
ROOT_VARIABLE = "GPUORCH_SIMULATED_GPUS"

_GROUP = re.compile(r"(\d+)x(\d+)")


class SimulatedGpus(Sampling):
    """Backend `sim:2x24576`: two GPUs of 24,576 MB; groups are separated by commas."""

    def __init__(self, spec: str, node_id: str, root: Path) -> None:
        sizes = [int(size) for count, size in _GROUP.findall(spec) for _ in range(int(count))]
        self._gpus = [(f"SIM-{node_id}-{index}"[:64], size) for index, size in enumerate(sizes)]
        self._root = root
        self.name = spec

    def environment(self) -> dict[str, str]:
        """What a process needs to allocate here."""
        return {ROOT_VARIABLE: str(self._root.resolve())}

    def about(self) -> str:
        return "SIMULATED"

    def sample(self) -> list[Gpu]:
        return [self._sample(index, uuid, total) for index, (uuid, total) in enumerate(self._gpus)]

    def _sample(self, index: int, uuid: str, total_mb: int) -> Gpu:
        used = {path.name: _megabytes(path) for path in _allocations(self._root / uuid)}
        held = (describe(int(name) if name.isdigit() else 0, size) for name, size in used.items())
        return Gpu(uuid, index, "simulated GPU", total_mb, sum(used.values()), tuple(held))


@contextmanager
def allocated(uuids: str, memory_mb: int) -> Iterator[None]:
    """Hold memory on each of the comma-separated GPUs while the block runs."""
    root = Path(os.environ[ROOT_VARIABLE])
    paths = [root / uuid / str(os.getpid()) for uuid in uuids.split(",")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(memory_mb))
    try:
        yield
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _allocations(folder: Path) -> list[Path]:
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in paths if not path.name.isdigit() or Path(f"/proc/{path.name}").exists()]


def _megabytes(path: Path) -> int:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0  # freed, or being written, at this very moment
