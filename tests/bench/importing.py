"""A file of jobs into MariaDB: imported, interrupted in the middle, imported again; every line is one job in the end.

The importer is the command itself, in a process of its own, whose memory is looked at all the time.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select

from orchestrator.settings import Settings
from orchestrator.store import schema
from tests.cluster import Cluster
from tests.conftest import empty
from tests.tables import make_tables

COUNT = 100_000
#: Where the first import is interrupted, and at which parts of the second its memory is told.
INTERRUPTED, LOOKS = 0.5, (0.1, 0.25, 0.5, 0.75, 1.0)
#: How much more memory an importer may have at its end than after a tenth of the way.
GROWTH_MB = 16.0
#: Rows of one look at what is stored.
PAGE = 10_000
#: Seconds for a million lines.
PATIENCE_S = 1800


class WrongEnd(AssertionError):
    """The jobs are not those of the file."""


class Import:
    def __init__(self, database_url: str, redis_url: str, folder: Path) -> None:
        settings = Settings(database_url=database_url, redis_url=redis_url, data_dir=folder, log_level="warning")
        self._cluster = Cluster(settings, folder)
        make_tables(self._cluster.db.engine)
        empty(self._cluster.db)
        _, self._url = self._cluster.serve()
        self._file = folder / "jobs.jsonl"

    def measure(self, count: int) -> dict[str, float]:
        self._write(count)
        first = self._run(count, interrupt_at=INTERRUPTED)
        stored = self._stored()
        # Nothing was lost of what it says is settled; a little more may have been on its way.
        if not first.totals["through"] <= stored < count:
            raise WrongEnd(f"{stored} rows after an interruption at line {first.totals['through']} of {count}")
        second = self._run(count)
        self._check(count, first, second)
        again = self._run(count)
        if (again.totals["existing"], again.totals["created"]) != (count, 0):
            raise WrongEnd(f"a third import: {again.totals}")
        looks = {f"memory at {100 * at:.0f} %: MB": mb for at, mb in zip(LOOKS, second.memory_mb(LOOKS), strict=True)}
        if second.memory_mb((1.0,))[0] - second.memory_mb((0.1,))[0] > GROWTH_MB:
            raise WrongEnd(f"the importer's memory grows: {looks}")
        return {
            "lines": count,
            "all new, until SIGINT: lines/s": first.totals["lines"] / first.seconds,
            "rows after SIGINT": stored,
            "seconds from SIGINT to its end": first.ending_s,
            "again, half of it new: lines/s": count / second.seconds,
            "again: created": second.totals["created"],
            "once more, all known: lines/s": count / again.seconds,
            **looks,
        }

    def _write(self, count: int) -> None:
        with self._file.open("w") as file:
            for n in range(count):
                agent = f"agent-{n % 7}"
                job = {"type": "embed", "agent": agent, "payload": {"document": f"s3://bucket/{n:08}.txt", "n": n}}
                file.write(json.dumps(job) + "\n")

    def _check(self, count: int, first: "Ran", second: "Ran") -> None:
        """Exactly one row for each line, with its own content."""
        seen = bytearray(count)
        for n in self._numbers():
            seen[n] += 1
        if seen != b"\1" * count or second.totals["refused"] or second.totals["lines"] != count:
            raise WrongEnd(f"{seen.count(0)} lines have no row; {first.totals}, then {second.totals}")

    def _stored(self) -> int:
        return sum(1 for _ in self._numbers())

    def _numbers(self) -> Iterator[int]:
        """Of the lines that the rows were made of. Page by page: one statement would take longer than any may."""
        last = ""
        while True:
            page = select(schema.jobs.c.job_id, schema.jobs.c.payload).where(schema.jobs.c.job_id > last)
            query = page.order_by(schema.jobs.c.job_id).limit(PAGE)
            rows = self._cluster.db.read(partial(_fetched, query=query))
            yield from (json.loads(row.payload)["n"] for row in rows)
            if len(rows) < PAGE:
                return
            last = rows[-1].job_id

    def _run(self, count: int, interrupt_at: float | None = None) -> "Ran":
        return Ran(self._url, self._file, count, interrupt_at)

    def close(self) -> None:
        self._cluster.close()


class Ran:
    """One run of the command, from its start to its end."""

    def __init__(self, url: str, file: Path, count: int, interrupt_at: float | None) -> None:
        log = file.with_suffix(".log")
        command = [sys.executable, "-m", "orchestrator", "jobs", "import", str(file), "--json", "--url", url]
        self._seen: list[tuple[float, float]] = []
        self.ending_s = 0.0
        began = time.perf_counter()
        with log.open("w") as progress, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=progress) as process:
            interrupted: float | None = None
            while process.poll() is None and time.perf_counter() - began < PATIENCE_S:
                # Where it reads, in bytes: what it has sent is a few batches behind.
                at = _offset(process.pid, file) / file.stat().st_size
                self._seen.append((at, _rss_mb(process.pid)))
                if interrupt_at is not None and interrupted is None and at >= interrupt_at:
                    process.send_signal(signal.SIGINT)
                    interrupted = time.perf_counter()
                time.sleep(0.05)
            self.seconds = time.perf_counter() - began
            self.ending_s = 0.0 if interrupted is None else time.perf_counter() - interrupted
            assert process.stdout is not None
            text = process.stdout.read().decode()
        expected = 0 if interrupt_at is None else 128 + signal.SIGINT
        if process.returncode != expected:
            raise WrongEnd(f"the import ended with {process.returncode}: {text}\n{log.read_text()[-2000:]}")
        self.totals = json.loads(text)

    def memory_mb(self, looks: tuple[float, ...]) -> list[float]:
        """When it had read so much."""
        return [next((mb for at, mb in self._seen if at >= look), self._seen[-2][1]) for look in looks]


def _fetched(conn: Any, query: Any) -> list[Any]:
    return list(conn.execute(query).all())


def _rss_mb(pid: int) -> float:
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except FileNotFoundError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def _offset(pid: int, file: Path) -> int:
    """How far the process has read the file."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if link.resolve() == file.resolve():
                return int(Path(f"/proc/{pid}/fdinfo/{link.name}").read_text().split()[1])
    except FileNotFoundError:
        pass  # it is just ending
    return 0
