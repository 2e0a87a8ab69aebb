"""The other side of `driver.c`: builds it, and edits the file that tells it what GPUs there are and what ails them.

Several processes may edit the same file: it is changed under a lock and replaced as a whole. A process that shall see
these GPUs is started with `Driver.environment()`.
"""

import fcntl
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.gpu.processes import driver_ids_are_ours

MB = 1 << 20
VARIABLE = "GPUORCH_FAKE_DRIVER"
SOURCE = Path(__file__).with_name("driver.c")
ROOT = SOURCE.parents[2]
#: The stand-in speaks of the processes that its tests see, also where a real driver would not.
IN_A_CONTAINER = """
from orchestrator.gpu import processes
processes.driver_ids_are_ours = lambda: True
"""
#: What a card shows that is in good order.
HEALTHY = {"utilization": 7, "temperature": 40, "mig": 0, "ecc": 0, "pending": 0, "failed": 0, "retired": 0}

Line = tuple[str, dict[str, str]]


class MissingCompilerError(RuntimeError):
    pass


def build(folder: Path) -> Path:
    """Compile the stand-in into `folder`, under the name by which everybody looks for the real one."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise MissingCompilerError("there is no C compiler")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE), "-lpthread"], check=True)
    (folder / "sitecustomize.py").write_text(IN_A_CONTAINER)
    return library


class Driver:
    """GPUs by their UUIDs, sizes in MB.

    `call` names a part of the driver: init, count, handle, uuid, name, pci, mig, slice, memory (memory_v1, memory_v2),
    processes (of one version: processes_v2, processes_v3; of one kind: compute, graphics, mps), utilization,
    temperature, ecc, remap, retired, fields, events, register, wait, version; `device` is all that one GPU answers.
    """

    def __init__(self, path: Path, library: Path) -> None:
        self.path = path
        self.library = library
        if not path.exists():
            self._edit(lambda lines: [*lines, ("driver", {"version": "580.65.06", "nvml": "13.580.65.06"})])

    def environment(self) -> dict[str, str]:
        here = {"LD_LIBRARY_PATH": str(self.library.parent), VARIABLE: str(self.path)}
        if driver_ids_are_ours():
            return here
        return here | {"PYTHONPATH": os.pathsep.join(map(str, (self.library.parent, ROOT)))}

    # --- hardware ---

    def add_gpu(
        self,
        uuid: str,
        total_mb: int = 24_576,
        *,
        reserved_mb: int = 0,
        bus: int = 0x41,
        name: str = "NVIDIA A10",
        **more: Any,
    ) -> None:
        sizes = {"total": total_mb * MB, "reserved": reserved_mb * MB, "used": 0}
        place = {"uuid": uuid, "bus": f"00000000:{bus:02X}:00.0", "name": name}
        self._add("gpu", place | sizes | HEALTHY | more)

    def add_slice(self, uuid: str, card: str, position: int, total_mb: int, *, name: str, **more: Any) -> None:
        fields = {"uuid": uuid, "card": card, "position": position, "instance": position + 3, "name": name}
        self._add("slice", fields | {"total": total_mb * MB, "reserved": 0, "used": 0} | more)

    def change(self, uuid: str, **fields: Any) -> None:
        def work(lines: list[Line]) -> list[Line]:
            changed = {key: str(value) for key, value in fields.items()}
            return [(kind, old | changed if old.get("uuid") == uuid else old) for kind, old in lines]

        self._edit(work)

    def remove(self, uuid: str) -> None:
        self._edit(lambda lines: [line for line in lines if line[1].get("uuid") != uuid])

    def reorder(self, *uuids: str) -> None:
        """List the cards in this order from now on."""
        order = {uuid: place for place, uuid in enumerate(uuids)}
        self._edit(lambda lines: sorted(lines, key=lambda line: order.get(line[1].get("uuid", ""), -1)))

    # --- memory ---

    def set_used(self, uuid: str, used_mb: int) -> None:
        """Memory in use beside what the listed processes hold."""
        self.change(uuid, used=used_mb * MB)

    def set_processes(self, uuid: str, *held: tuple[int, int | None], kind: str = "compute") -> None:
        """Exactly these hold memory, by process id and MB (None: the driver does not tell how much)."""

        def work(lines: list[Line]) -> list[Line]:
            others = [line for line in lines if not _is_process(line, uuid, kind)]
            return [*others, *(_process(uuid, pid, size, kind) for pid, size in held)]

        self._edit(work)

    @contextmanager
    def allocated(self, uuid: str, memory_mb: int, pid: int | None = None) -> Iterator[None]:
        """Hold memory in the name of a process, of this one by default, until the block ends or the process dies."""
        line = self.allocate(uuid, memory_mb, pid or os.getpid())
        try:
            yield
        finally:
            self._edit(lambda lines: _without_first(lines, line))

    def allocate(self, uuid: str, memory_mb: int, pid: int) -> Line:
        """Hold memory in the name of a process until it dies."""
        line = _process(uuid, pid, memory_mb, "compute", alive="1")
        self._edit(lambda lines: [*lines, line])
        return line

    def used_mb(self, uuid: str) -> int:
        """What the lines say is in use, for a test that keeps accounts; whether processes live is not looked at."""
        lines = self._read()
        (device,) = [fields for _, fields in lines if fields.get("uuid") == uuid]
        held = {fields["pid"]: fields["bytes"] for kind, fields in lines if kind == "process" and fields["on"] == uuid}
        sizes = [int(size) for size in held.values() if size != "unknown"]
        return (int(device["used"]) + sum(sizes)) // MB

    # --- faults ---

    def fail(self, call: str, code: int, on: str = "all") -> None:
        self._add("fault", {"call": call, "on": on, "code": code})

    def heal(self, call: str | None = None, on: str | None = None) -> None:
        """End the faults and hangs of this call, of this GPU (or "all" where that was said), or all of them."""

        def ails(kind: str, fields: dict[str, str]) -> bool:
            meant = call in (None, fields.get("call")) and on in (None, fields.get("on", "all"))
            return kind in {"fault", "hang"} and meant

        self._edit(lambda lines: [line for line in lines if not ails(*line)])

    def lose(self, uuid: str) -> None:
        """The card falls off the bus: it is counted and answers nothing."""
        self.fail("device", 15, uuid)

    def unload(self) -> None:
        """The kernel modules go away. `heal` loads them again; libraries that had been open are not any more."""
        self.fail("init", 9)
        for call in ("count", "handle", "device", "wait", "events"):
            self.fail(call, 1)

    def hang(self, call: str) -> None:
        self._add("hang", {"call": call})

    def xid(self, uuid: str, number: int, instance: int | None = None) -> None:
        def work(lines: list[Line]) -> list[Line]:
            serial = 1 + max((int(fields["serial"]) for kind, fields in lines if kind == "xid"), default=0)
            fields = {"serial": serial, "on": uuid, "number": number}
            return [*lines, _line("xid", fields if instance is None else fields | {"instance": instance})]

        self._edit(work)

    # --- the file ---

    def _add(self, kind: str, fields: dict[str, Any]) -> None:
        self._edit(lambda lines: [*lines, _line(kind, fields)])

    def _read(self) -> list[Line]:
        texts = self.path.read_text().splitlines() if self.path.exists() else []
        words = [shlex.split(text) for text in texts]
        return [(kind, dict(field.split("=", 1) for field in fields)) for kind, *fields in words]

    def _edit(self, change: Callable[[list[Line]], list[Line]]) -> None:
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._write(change(self._read()))

    def _write(self, lines: list[Line]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(_text(line) for line in lines))
        new.replace(self.path)


def _line(kind: str, fields: dict[str, Any]) -> Line:
    return kind, {key: str(value) for key, value in fields.items()}


def _text(line: Line) -> str:
    kind, fields = line
    return " ".join([kind, *(f'{key}="{value}"' for key, value in fields.items())]) + "\n"


def _process(uuid: str, pid: int, size: int | None, kind: str, **more: str) -> Line:
    fields = {"on": uuid, "pid": pid, "bytes": "unknown" if size is None else size * MB, "list": kind}
    return _line("process", fields | more)


def _is_process(line: Line, uuid: str, kind: str) -> bool:
    return line[0] == "process" and line[1]["on"] == uuid and line[1]["list"] == kind


def _without_first(lines: list[Line], gone: Line) -> list[Line]:
    place = lines.index(gone) if gone in lines else len(lines)
    return lines[:place] + lines[place + 1 :]
