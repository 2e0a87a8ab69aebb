"""The processes of a run: two orchestrators, and on each node a supervisor with GPUs and a directory of its own."""

import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.gpu.processes import MARK
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.stream.hub import Hub
from tests.chaos.history import Recorder
from tests.chaos.pools.handlers import PROCESSES
from tests.chaos.sites import ROOT, SHORT_TIMES, Site
from tests.cluster import Member
from tests.processes import status
from tests.servers import MariaDB, Redis, free_port

#: Where dozens of slots start on two cores, heartbeats are waited for a little longer; nothing else is slower.
TIMES: dict[str, Any] = SHORT_TIMES | {
    "claim_idle_ms": 5000,
    "gpu_sample_s": 1.0,
    "gpu_stale_s": 5.0,
    "max_crashes": 100,
    "pool_drain_s": 3.0,
    "reconcile_interval_s": 0.5,
    "resident_min_s": 1.0,
    "worker_heartbeat_s": 1.0,
    "worker_timeout_s": 5.0,
}
#: Tells the slots of one run from those of another on the same machine.
RUN = "CHAOS_RUN"
WORKER_SLOTS = 1
HANDLERS = ("tests.chaos.handlers", "tests.chaos.pools.handlers")
#: Seconds in which a process of ours should come up, on a busy machine.
START_S = 20.0


class Slot(NamedTuple):
    """A slot's process, by its mark: WORKER_ID#NUMBER, where the worker's id has its supervisor's process id."""

    pid: int
    parent: int
    mark: str

    @property
    def worker_id(self) -> str:
        return self.mark.rpartition("#")[0]


class MarkedSite(Site):
    """A site whose processes carry the marks of this run; what they say goes to where the others' does."""

    def __init__(self, name: str, command: str, settings: Settings, build: Path, marks: dict[str, str]) -> None:
        self._marks = marks
        self.started_at = 0.0
        super().__init__(name, command, settings, {}, build)

    def start(self) -> Member:
        self.started_at = time.monotonic()
        return super().start()

    @property
    def starting(self) -> bool:
        """Whether it has not said yet that it works. One on a drained node never does: it is not waited for long."""
        young = time.monotonic() - self.started_at < START_S
        return young and self.alive and not re.search("worker ready|gpuorch serves", self.member.log.read_text())

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | self._marks


class Stage:
    """Starts, kills and freezes; remembers who suffered, and when anything was last changed."""

    def __init__(self, mariadb: MariaDB, redis: Redis, folder: Path, recorder: Recorder, build: Path = ROOT) -> None:
        self.mariadb, self.redis = mariadb, redis
        self.folder = folder
        self.recorder = recorder
        self._build = build
        self._run = secrets.token_hex(8)
        settings = Settings(database_url=mariadb.url, redis_url=redis.url, data_dir=folder)
        self.db, self.hub = Database(settings), Hub(settings)
        self.orchestrators: list[MarkedSite] = []
        self.nodes: dict[str, MarkedSite] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.changed_at = time.monotonic()
        #: Process ids of supervisors that were killed or frozen, and workers of which a slot was killed.
        self.hurt_supervisors: set[int] = set()
        self.hurt_workers: set[str] = set()

    @property
    def processes(self) -> Path:
        return self.folder / "processes.jsonl"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def sites(self) -> list[MarkedSite]:
        return [*self.orchestrators, *self.nodes.values()]

    def open(self, orchestrators: int, nodes: int, gpus: str) -> None:
        """Start everything; returns when all orchestrators serve and all nodes take jobs."""
        for number in range(1, orchestrators + 1):
            self.orchestrators.append(self._site(f"orchestrator-{number}", "serve", port=free_port()))
        for number in range(1, nodes + 1):
            name = f"node-{number}"
            given = {"node_id": name, "gpu_backend": gpus, "worker_slots": WORKER_SLOTS}
            self.nodes[name] = self._site(name, "worker", worker_handlers=HANDLERS, **given)
        for site in self.orchestrators:
            site.member.says("gpuorch serves", timeout=90)
        for site in self.nodes.values():
            site.member.says("worker ready", timeout=90)

    def _site(self, name: str, command: str, **given: Any) -> MarkedSite:
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            database_url=self.mariadb.url,
            redis_url=self.redis.url,
            data_dir=home,
            log_format="json",
            **(TIMES | given),
        )
        return MarkedSite(name, command, settings, self._build, {RUN: self._run, PROCESSES: str(self.processes)})

    def close(self) -> None:
        self._later.clear()
        for site in self.sites:
            site.send(signal.SIGCONT)
            site.member.kill()
        for slot in self.slots():  # only a broken build leaves any
            os.kill(slot.pid, signal.SIGKILL)
        self.hub.close()
        self.db.close()

    # ── doing ───────────────────────────────────────────────────────────────────────────────────────────────

    def touch(self) -> None:
        self.changed_at = time.monotonic()

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + delay_s, act))

    def do_what_is_due(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        due = [item for item in self._later if all_of_it or item[0] <= now]
        self._later = [item for item in self._later if item not in due]
        for _, act in due:
            act()
            self.touch()

    def kill(self, site: Site) -> None:
        self.hurt_supervisors.add(site.pid)
        site.send(signal.SIGKILL)
        site.member.process.wait(10)

    def revive(self, site: Site) -> None:
        if not site.alive:
            site.start()
            self.touch()

    def freeze(self, site: Site, seconds: float) -> None:
        pid = site.pid
        self.hurt_supervisors.add(pid)
        site.send(signal.SIGSTOP)
        self.later(seconds, lambda: site.send(signal.SIGCONT) if site.pid == pid else None)

    def leader(self) -> Site | None:
        """Who leads by the database's word."""
        rows = self.query("SELECT holder FROM leadership")
        pid = int(rows[0][0].split(":")[1]) if rows and rows[0][0] else 0
        return next((site for site in self.orchestrators if site.pid == pid), None)

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.mariadb.connect() as connection:
            connection.select_db("orchestrator")
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())

    def slots(self) -> list[Slot]:
        """The slots' processes of this run, wherever they hang, below their supervisors; and nurseries without one."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        marked = [slot for pid in pids if (slot := _slot(pid, self._run)) is not None]
        nurseries = {one.pid: one.parent for one in marked if not one.mark}
        supervisors = self.supervisors()
        orphans = [one._replace(mark="nursery") for one in marked if not (one.mark or one.parent in supervisors)]
        return orphans + [one._replace(parent=nurseries.get(one.parent, one.parent)) for one in marked if one.mark]

    def supervisors(self) -> dict[int, str]:
        """Process ids of the supervisors that live, and their nodes."""
        return {site.pid: name for name, site in self.nodes.items() if site.alive}


def _slot(pid: int, run: str) -> Slot | None:
    """Zombies are no processes: they have no environment any more."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    known = status(pid)
    values = dict(entry.partition(b"=")[::2] for entry in environment)
    if known is None or values.get(RUN.encode()) != run.encode() or MARK.encode() not in values:
        return None
    return Slot(pid, known.parent, values[MARK.encode()].decode().strip())  # nothing but spaces: a nursery
