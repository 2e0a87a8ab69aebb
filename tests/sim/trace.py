"""The production trace: a cluster of 1,213 nodes with 6,212 GPUs, and 8,152 tasks (alibaba/clusterdata, 2023).

It is no part of the project: it is read from `../shared/data` beside the project, where it may be absent.
"""

import csv
from pathlib import Path

from orchestrator.placement import Ask
from tests.sim.experiment import GPU_MB, Machine

FOLDER = Path(__file__).parents[3] / "shared" / "data"
NODES = "openb_nodes.csv"
TASKS = "openb_tasks.csv"


def absent(folder: Path = FOLDER) -> str | None:
    """Why there is nothing to read."""
    missing = [name for name in (NODES, TASKS) if not (folder / name).is_file()]
    where = "../shared/data beside the project" if folder == FOLDER else folder
    return f"no {' and no '.join(missing)} in {where}" if missing else None


def machines(folder: Path = FOLDER) -> list[Machine]:
    return [
        Machine(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
        for row in _rows(folder / NODES)
    ]


def tasks(folder: Path = FOLDER) -> list[Ask]:
    return [_ask(row) for row in _rows(folder / TASKS)]


def _ask(row: dict[str, str]) -> Ask:
    count = int(row["num_gpu"])
    # Who asks for several GPUs gets whole ones, who asks for none is there for the CPU.
    memory_mb = {0: 0, 1: int(row["gpu_milli"])}.get(count, GPU_MB)
    return Ask(
        memory_mb,
        count,
        models=frozenset(filter(None, row["gpu_spec"].split("|"))),
        cpu_milli=int(row["cpu_milli"]),
        host_memory_mb=int(row["memory_mib"]),
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
