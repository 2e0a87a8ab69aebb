"""The cluster of a chaos run: each process is a site with wires of its own to MariaDB and Redis.

Whatever ends is started again, as systemd or Kubernetes would. A site's wires are proxies, so one process can lose
its database while the others keep theirs.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pymysql

from orchestrator.settings import Settings
from tests.chaos.clock import Clock
from tests.chaos.history import Recorder
from tests.cluster import Member
from tests.plain import http
from tests.proxy import Proxy
from tests.servers import MariaDB, Redis, free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
#: Times that let a fault and its recovery fit into seconds, each in the proportions of the defaults.
SHORT_TIMES: dict[str, Any] = {
    "claim_idle_ms": 3000,
    "db_timeout_s": 5.0,
    "gpu_sample_s": 0.5,
    "gpu_stale_s": 3.0,
    "leader_interval_s": 0.3,
    "leader_trust_margin_s": 1.0,
    "leader_ttl_s": 4.0,
    "lease_ttl_s": 8.0,
    "publish_interval_s": 0.2,
    "purge_interval_s": 0.5,
    "reclaim_interval_s": 0.5,
    "redis_block_ms": 500,
    "redis_timeout_s": 2.0,
    "republish_after_s": 2.0,
    "retry_base_s": 0.2,
    "retry_cap_s": 2.0,
    "worker_grace_s": 1.0,
    "worker_heartbeat_s": 0.5,
    "worker_timeout_s": 3.0,
}


class Site:
    """One orchestrator or worker, its wires, and its process of the moment."""

    def __init__(self, name: str, command: str, settings: Settings, wires: dict[str, Proxy], build: Path) -> None:
        self.name = name
        self.command = command
        self.settings = settings
        self.wires = wires
        self._build = build
        self.clock = Clock(settings.data_dir / f"{name}.clock")
        self.starts = 0
        self.logs: list[Path] = []
        #: Whether its next end is our doing.
        self.ending = False
        self.member = self.start()

    @property
    def pid(self) -> int:
        return self.member.process.pid

    @property
    def alive(self) -> bool:
        return self.member.process.poll() is None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    def start(self) -> Member:
        self.starts += 1
        log = self.settings.data_dir / f"{self.name}-{self.starts}.log"
        self.logs.append(log)
        self.ending = False
        self.member = Member(
            self.command,
            self.settings,
            log,
            path=os.pathsep.join([str(self._build), str(ROOT)]),
            build=self._build,
            environment=self.environment,
            forked=True,
        )
        return self.member

    @property
    def environment(self) -> dict[str, str]:
        """What its process finds beside its settings."""
        return self.clock.environment

    def send(self, number: signal.Signals) -> None:
        self.ending = self.ending or number in (signal.SIGKILL, signal.SIGTERM)
        with suppress(ProcessLookupError):
            self.member.send(number)


class Sites:
    """All sites between private servers, and the keeper that starts what ended."""

    def __init__(self, mariadb: MariaDB, redis: Redis, folder: Path, recorder: Recorder, build: Path = ROOT) -> None:
        self.mariadb, self.redis = mariadb, redis
        self.folder = folder
        self.recorder = recorder
        self._build = build
        self._proxies = ExitStack()
        self.orchestrators: list[Site] = []
        self.workers: list[Site] = []
        #: Held while the dead are started again.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="chaos-keeper", daemon=True)

    @property
    def all(self) -> list[Site]:
        return [*self.orchestrators, *self.workers]

    def open(self, orchestrators: int, workers: int, **given: Any) -> Self:
        """Start everything; returns when every orchestrator is ready and every worker takes jobs."""
        for number in range(1, orchestrators + 1):
            settings = {"port": free_port()} | given
            self.orchestrators.append(self._site(f"orchestrator-{number}", "serve", settings))
        for number in range(1, workers + 1):
            # Two workers share a node, and so its GPUs.
            self._add_worker(f"worker-{number}", {"node_id": f"node-{(number + 1) // 2}"} | given)
        for site in self.orchestrators:
            site.member.says("gpuorch serves", timeout=60)
        for site in self.workers:
            site.member.says("worker ready", timeout=60)
        self._keeper.start()
        return self

    def add_worker(self, name: str, **given: Any) -> Site:
        """One more; it takes jobs when this returns."""
        site = self._add_worker(name, {"node_id": name} | given)
        site.member.says("worker ready", timeout=60)
        return site

    def _add_worker(self, name: str, given: dict[str, Any]) -> Site:
        site = self._site(name, "worker", {"worker_handlers": ("tests.chaos.handlers",)} | given)
        self.workers.append(site)
        return site

    def remove(self, site: Site) -> None:
        """Stop a worker for good."""
        with self._lock:
            self.workers.remove(site)
        site.member.stop()

    def close(self) -> None:
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for site in self.all:
            site.send(signal.SIGCONT)
            site.member.kill()
        self._proxies.close()

    def mend(self) -> None:
        """Undo what a fault that was itself interrupted may have left."""
        for server in (self.mariadb, self.redis):
            if not server.running:
                server.start()
        for site in self.all:
            site.send(signal.SIGCONT)
            site.clock.put_wrong(0)
            for wire in site.wires.values():
                wire.heal()

    def _site(self, name: str, command: str, given: dict[str, Any]) -> Site:
        db, redis = (self._proxies.enter_context(Proxy(server.port)) for server in (self.mariadb, self.redis))
        settings = Settings(
            database_url=self.mariadb.url.replace(f":{self.mariadb.port}/", f":{db.port}/"),
            redis_url=self.redis.url.replace(f":{self.redis.port}/", f":{redis.port}/"),
            data_dir=self.folder,
            gpu_backend="sim:2x24576",
            log_format="json",
            **given,
        )
        return Site(name, command, settings, {"mariadb": db, "redis": redis}, self._build)

    def _keep(self) -> None:
        """Start again what ended, whoever ended it."""
        while not self._closing.wait(0.1):
            with self._lock:
                for site in self.all:
                    self._revive(site)

    def _revive(self, site: Site) -> None:
        code = site.member.process.poll()
        if code is not None:
            if not site.ending:
                self.recorder.happen(f"{site.name} ended by itself with {code}")
            site.start()

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Ask the database past every proxy. Raises pymysql.MySQLError while it is away."""
        with self.mariadb.connect() as connection:
            connection.select_db("orchestrator")
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())

    def leader(self) -> Site | None:
        """Who leads by the database's word."""
        try:
            rows = self.query("SELECT holder FROM leadership")
        except pymysql.MySQLError:
            return None
        pid = int(rows[0][0].split(":")[1]) if rows and rows[0][0] else 0
        return next((site for site in self.orchestrators if site.pid == pid), None)

    def unfinished(self) -> int:
        ended = "('done', 'skipped', 'failed', 'cancelled', 'dead_letter', 'expired')"
        return int(self.query(f"SELECT COUNT(*) FROM orchestrator_jobs WHERE status NOT IN {ended}")[0][0])

    def healthy(self) -> bool:
        """Whether every process is up, and every orchestrator says it is ready."""
        try:
            ready = [http.get(f"{site.url}/readyz", timeout=5).status_code == 200 for site in self.orchestrators]
        except httpx.HTTPError:
            return False
        return all(ready) and all(site.alive for site in self.all)

    def wait_healthy(self, timeout: float = 60.0) -> None:
        wait_until(self.healthy, timeout=timeout, what=self.tails)

    def tails(self) -> str:
        return "\n".join(f"--- {site.name}:\n{site.member.tail()[-1500:]}" for site in self.all)


def watch(name: str, step: Callable[[], None], every_s: float) -> Callable[[], None]:
    """Call `step` in a thread of that name until the returned function is called."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(every_s):
            step()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end
