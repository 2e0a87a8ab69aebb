"""A cluster of real processes for tests: orchestrators and workers, started and killed like an operator would."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import func, select

from orchestrator.jobs import TERMINAL
from orchestrator.settings import Settings
from orchestrator.store import job_reads, schema
from orchestrator.store.database import Database
from tests.forked import ROOT, Forked
from tests.plain import http
from tests.processes import children
from tests.waiting import wait_until


class Member:
    """One process of the cluster; its output goes to a file that failures show."""

    def __init__(
        self,
        command: str,
        settings: Settings,
        log: Path,
        path: str = "",
        *,
        build: Path = ROOT,
        environment: Mapping[str, str] = MappingProxyType({}),
        forked: bool = False,
    ) -> None:
        """`environment` is what it finds beside its settings, `build` where its packages are."""
        self.log = log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ORCH_")}
        whole = inherited | settings.environment() | {"PYTHONPATH": path, **environment}
        self.process: subprocess.Popen[bytes] | Forked
        if forked:
            self.process = Forked(command.split(), whole, log, path=path, build=build, at_start=environment)
            return
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", *command.split()],
                env=whole,
                cwd=build,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def says(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        """Wait until its output matches."""

        def look() -> re.Match[str] | None:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}:\n{self.tail()}")
            return re.search(pattern, self.log.read_text()) if self.log.exists() else None

        found = wait_until(look, timeout=timeout, what=f"{pattern!r} in {self.log.name}")
        assert found is not None
        return found

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def send(self, number: signal.Signals) -> None:
        """A process that is to stop has stopped when this returns: what it is in the middle of stays as it is."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            threads = Path(f"/proc/{self.process.pid}/task")
            wait_until(lambda: all(_state(one) in "TZX" for one in threads.iterdir()), what="a stopped process")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return self.process.wait(timeout)

    def slots(self) -> set[int]:
        """Pids of a worker's slots: the children of its nursery."""
        return {slot for nursery in children(self.process.pid) for slot in children(nursery)}


class Cluster:
    def __init__(self, settings: Settings, folder: Path, *, forked: bool = False) -> None:
        """`forked` members come from a process that has loaded the modules: much less work to start."""
        self.settings = settings
        self._forked = forked
        self.db = Database(settings)
        self._folder = folder
        self._members: list[Member] = []

    def _start(
        self,
        command: str,
        given: dict[str, Any],
        path: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Member:
        settings = self.settings.model_copy(update=given)
        log = self._folder / f"{command}-{len(self._members)}.log"
        member = Member(command, settings, log, path, environment=environment, forked=self._forked)
        self._members.append(member)
        return member

    def serve(self, **given: Any) -> tuple[Member, str]:
        """Start an orchestrator; it and its URL."""
        member = self._start("serve", {"port": 0} | given)
        return member, member.says(r"gpuorch serves (\S+)")[1]

    def worker(self, path: str = "", environment: Mapping[str, str] = MappingProxyType({}), **given: Any) -> Member:
        """Start a worker that takes jobs when this returns."""
        member = self._start("worker", given, path, environment)
        member.says("worker ready")
        return member

    def close(self) -> None:
        for member in self._members:
            with suppress(ProcessLookupError):
                member.send(signal.SIGCONT)
            member.kill()
        self.db.close()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    def job(self, job_id: str) -> dict[str, Any]:
        return self.db.read(lambda conn: job_reads.get(conn, job_id))

    def wait_for(self, job_id: str, status: str, timeout: float = 60.0) -> dict[str, Any]:
        wait_until(
            lambda: self.job(job_id)["status"] == status,
            timeout=timeout,
            what=lambda: f"{status}: {self.job(job_id)}\n" + "\n".join(member.tail() for member in self._members),
        )
        return self.job(job_id)

    def count(self, table: str, *conditions: Any) -> int:
        query = select(func.count()).select_from(schema.metadata.tables[table]).where(*conditions)
        return int(self.db.read(lambda conn: conn.execute(query).scalar_one()))

    def unfinished(self) -> int:
        return self.count("orchestrator_jobs", schema.jobs.c.status.not_in(sorted(TERMINAL)))


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def post(url: str, path: str, body: Any) -> dict[str, Any]:
    answer = http.post(f"{url}{path}", json=body)
    answer.raise_for_status()
    return dict(answer.json())
