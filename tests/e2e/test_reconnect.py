"""Servers die, freeze, refuse and come back under load; no process of ours is restarted, and no job is lost.

One orchestrator and one worker serve all tests. Each test submits without pause before, during and after its fault;
what was refused is submitted again under the same id, as a client should. Afterwards every job is done exactly once,
somebody leads, and the processes are those that were there before.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pymysql
import pytest
import redis
from sqlalchemy import func, select

from orchestrator.settings import Settings
from orchestrator.store import schema
from tests.cluster import Cluster, Member
from tests.conftest import SHORT, new_server
from tests.plain import http
from tests.proxy import Proxy
from tests.servers import MariaDB, Redis, free_port
from tests.tables import make_tables
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

#: Seconds within which all must be well again; most of it is for a busy machine.
PATIENCE_S = 30.0
#: Seconds a request may take, whatever the servers do: the limit of the database, and room for a slow machine.
ANSWER_S = 12.0

ECHO: dict[str, Any] = {"type": "echo", "payload": {}}
SHORT_SLEEP: dict[str, Any] = {"type": "sleep", "payload": {"seconds": 0.1}}


class LoggedMariaDB(MariaDB):
    """With a binary log, as one that others replicate."""

    def command(self) -> list[str]:
        return [*super().command(), "--log-bin=binlog", "--server-id=1"]


class MortalRedis(Redis):
    """Takes more options at its next start."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[str] = []

    def command(self) -> list[str]:
        return super().command() + self.options


class Load:
    """Submits jobs one after the other; what is refused is tried again under the same id."""

    def __init__(self, url: str, name: str) -> None:
        self.accepted: list[str] = []
        #: Status, code and seconds of each answer.
        self.answers: list[tuple[int, str, float]] = []
        self._name = name
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False, verify=False)  # noqa: S501
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._submit, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._http.close()

    def more(self, count: int, what: str) -> None:
        """Wait until that many more were accepted."""
        wanted = len(self.accepted) + count
        wait_until(lambda: len(self.accepted) >= wanted, timeout=PATIENCE_S, what=what)

    def more_answers(self, count: int) -> list[tuple[int, str]]:
        """The next answers after those that are on their way now."""
        first = len(self.answers) + 1
        wait_until(lambda: len(self.answers) >= first + count, timeout=PATIENCE_S, what="answers")
        return [(status, code) for status, code, _ in self.answers[first:]]

    def _submit(self) -> None:
        number = 0
        while not self._stop.wait(0.01):
            job_id = f"{self._name}-{number}"
            job = SHORT_SLEEP if number % 5 == 0 else ECHO
            started = time.monotonic()
            answer = self._http.post("/jobs/submit", json=job | {"job_id": job_id})
            code = "" if answer.is_success else answer.json()["code"]
            self.answers.append((answer.status_code, code, time.monotonic() - started))
            if answer.is_success:
                self.accepted.append(job_id)
                number += 1


class System:
    """Everything under test, and the ways to hurt it."""

    def __init__(
        self, mariadb: MariaDB, redis_server: MortalRedis, to_db: Proxy, to_redis: Proxy, folder: Path
    ) -> None:
        self.mariadb, self.redis = mariadb, redis_server
        self.to_db, self.to_redis = to_db, to_redis
        given = SHORT | {
            "database_url": f"mysql+pymysql://orch@127.0.0.1:{to_db.port}/orchestrator?charset=utf8mb4",
            "redis_url": f"redis://127.0.0.1:{to_redis.port}/0",
            "data_dir": folder,
            "db_timeout_s": 3.0,
            "lease_ttl_s": 3.0,
            "worker_timeout_s": 2.0,
            "worker_grace_s": 0.5,
            "worker_slots": 2,
            "gpu_backend": "none",
            # A worker may be lost in the course of a fault, and the job's next one too: not the job's fault.
            "max_crashes": 10,
        }
        self.cluster = Cluster(Settings(**given), folder)
        self.members: list[Member] = []

    def start(self) -> None:
        self.sql("CREATE USER orch@'127.0.0.1'", "GRANT ALL ON orchestrator.* TO orch@'127.0.0.1'")
        make_tables(self.cluster.db.engine)
        server, self.url = self.cluster.serve()
        self.members = [server, self.cluster.worker()]
        self.wait_green()

    def sql(self, *statements: str) -> None:
        """As root, past the proxy."""
        with self.mariadb.connect() as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def get(self, path: str) -> dict[str, Any]:
        answer = http.get(self.url + path)
        return {"http": answer.status_code, **answer.json()}

    # ── what must be seen ───────────────────────────────────────────────────────────────────────────────────

    def wait_red(self, name: str, reason: str = "") -> None:
        """Without the database we are not ready. Without Redis jobs are accepted and wait: degraded, and it says so."""

        def red() -> bool:
            shown = self.get("/readyz")
            complaints = shown.get("reasons", []) + shown.get("degraded", [])
            named = any(text.startswith(f"{name}: ") and reason in text for text in complaints)
            return named and shown["http"] == (503 if name == "database" else 200)

        wait_until(red, timeout=PATIENCE_S, what=lambda: f"{name} is missed: {self.get('/readyz')}")

    def wait_green(self) -> None:
        """Ready without complaint, led, and with a worker."""

        def green() -> bool:
            ready, health = self.get("/readyz"), self.get("/health")
            staffed = bool(health["workers"].get("alive"))
            return ready["http"] == 200 and not ready["degraded"] and health["status"] == "ok" and staffed

        wait_until(green, timeout=PATIENCE_S, what=lambda: f"all is well: {self.get('/health')}\n{self.logs()}")

    def wait_done(self, load: Load) -> None:
        """Every accepted job ends as done, and that is written down once."""
        wait_until(lambda: not self.cluster.unfinished(), timeout=PATIENCE_S, what=lambda: f"all ended\n{self.logs()}")
        assert self._count(schema.jobs.c.status).keys() == {"done"}
        done = self._count(schema.audit.c.job_id, schema.audit.c.event_type == "job.done")
        assert {job_id: done.get(job_id) for job_id in load.accepted} == dict.fromkeys(load.accepted, 1)
        assert set(done.values()) == {1}

    def _count(self, column: Any, *conditions: Any) -> dict[str, int]:
        query = select(column, func.count()).where(*conditions).group_by(column)
        return self.cluster.db.read(lambda conn: {row[0]: row[1] for row in conn.execute(query)})

    def nothing_broke(self) -> None:
        server, worker = (member.log.read_text() for member in self.members)
        assert [member.process.poll() for member in self.members] == [None, None], self.logs()
        assert "Exception in thread" not in server + worker
        assert "broke" not in server

    def logs(self) -> str:
        return "\n".join(member.tail()[-1500:] for member in self.members)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with ExitStack() as stack:
        mariadb = stack.enter_context(new_server(LoggedMariaDB))
        redis_server = stack.enter_context(new_server(MortalRedis))
        to_db, to_redis = stack.enter_context(Proxy(mariadb.port)), stack.enter_context(Proxy(redis_server.port))
        system = System(mariadb, redis_server, to_db, to_redis, tmp_path_factory.mktemp("cluster"))
        stack.callback(system.cluster.close)
        system.start()
        yield system


@pytest.fixture
def system(shared: System) -> Iterator[System]:
    """The same for all tests, whatever the last one left behind."""
    pids = [member.process.pid for member in shared.members]
    yield shared
    heal_all(shared)
    shared.wait_green()
    assert [member.process.pid for member in shared.members] == pids


def heal_all(system: System) -> None:
    system.redis.options.clear()
    for server in (system.mariadb, system.redis):
        if not server.running:
            server.start()
    system.to_db.heal()
    system.to_redis.heal()
    system.sql("SET GLOBAL read_only = OFF", "SET GLOBAL max_connections = 300")


@contextmanager
def outage(system: System, name: str, server: str, reason: str = "") -> Iterator[Load]:
    """Load before, during and after what the body does; the body ends with the server being well again."""
    with Load(system.url, name) as load:
        load.more(20, "submits before")
        yield load
        system.wait_green()
        load.more(20, "submits after")
    system.wait_done(load)
    system.nothing_broke()
    assert max(seconds for _, _, seconds in load.answers) < ANSWER_S
    refusals = {(status, code) for status, code, _ in load.answers} - {(202, ""), (200, "")}
    assert refusals <= ({(503, "database_unavailable")} if server == "database" else set())


# --- the database ---


def refused(load: Load) -> None:
    assert set(load.more_answers(2)) == {(503, "database_unavailable")}


def test_a_killed_database(system: System) -> None:
    with outage(system, "db-killed", "database") as load:
        system.mariadb.kill()
        system.wait_red("database")
        refused(load)
        system.mariadb.start()


def test_connections_to_the_database_that_are_cut(system: System) -> None:
    with outage(system, "db-cut", "database") as load:
        for _ in range(3):
            system.to_db.cut()
            load.more(5, "submits go on")
    assert {status for status, _, _ in load.answers} <= {200, 202}


def test_half_open_connections_to_the_database(system: System) -> None:
    with outage(system, "db-half-open", "database") as load:
        system.to_db.stall()
        system.wait_red("database")
        refused(load)
        system.to_db.heal()


def test_a_database_that_became_read_only(system: System) -> None:
    """As the old primary is after a failover."""
    with outage(system, "db-read-only", "database") as load:
        system.sql("SET GLOBAL read_only = ON")
        system.wait_red("database", "read-only")
        refused(load)
        system.sql("SET GLOBAL read_only = OFF")


def test_a_database_without_connections_left(system: System) -> None:
    with outage(system, "db-full", "database") as load, ExitStack() as hogs:
        system.to_db.refuse()
        system.sql("SET GLOBAL max_connections = 10")
        with suppress(pymysql.err.OperationalError):
            while True:
                port = system.mariadb.port
                hogs.enter_context(pymysql.connect(host="127.0.0.1", port=port, user="orch", read_timeout=30))
        system.to_db.heal()
        system.wait_red("database", "Too many connections")
        refused(load)
        hogs.close()
        system.sql("SET GLOBAL max_connections = 300")


@contextmanager
def new_password(system: System) -> Iterator[str]:
    system.sql("ALTER USER orch@'127.0.0.1' IDENTIFIED BY 'sesame'")
    system.to_db.cut()  # those that are in stay in
    try:
        yield "check the user and the password"
    finally:
        system.sql("ALTER USER orch@'127.0.0.1' IDENTIFIED BY ''")


@contextmanager
def rights_withdrawn(system: System) -> Iterator[str]:
    system.sql(
        "REVOKE ALL ON orchestrator.* FROM orch@'127.0.0.1'", "GRANT SELECT ON orchestrator.* TO orch@'127.0.0.1'"
    )
    system.to_db.cut()
    try:
        yield "grant this user all rights"
    finally:
        system.sql("GRANT ALL ON orchestrator.* TO orch@'127.0.0.1'")


@contextmanager
def log_of_statements(system: System) -> Iterator[str]:
    system.sql("SET GLOBAL binlog_format = 'STATEMENT'")
    system.to_db.cut()
    try:
        yield "set binlog_format to ROW or MIXED"
    finally:
        system.sql("SET GLOBAL binlog_format = 'MIXED'")  # who is in keeps the other: it must come anew


@pytest.mark.parametrize("state", [new_password, rights_withdrawn, log_of_statements])
def test_a_database_that_answers_and_refuses(system: System, state: Callable[[System], Any]) -> None:
    with outage(system, f"db-{state.__name__}".replace("_", "-"), "database") as load, state(system) as reason:
        system.wait_red("database", reason)
        refused(load)


# --- Redis ---


def test_a_killed_redis_with_its_data(system: System) -> None:
    with outage(system, "redis-killed", "redis") as load:
        system.redis.kill()
        system.wait_red("redis")
        load.more(10, "submits without Redis")
        system.redis.start()


def test_a_redis_that_comes_back_empty(system: System) -> None:
    with outage(system, "redis-empty", "redis") as load:
        system.redis.kill()
        shutil.rmtree(system.redis.directory / "appendonlydir")
        system.wait_red("redis")
        load.more(10, "submits without Redis")
        system.redis.start()


def test_connections_to_redis_that_are_cut(system: System) -> None:
    with outage(system, "redis-cut", "redis") as load:
        for _ in range(3):
            system.to_redis.cut()
            load.more(5, "submits go on")


def test_half_open_connections_to_redis(system: System) -> None:
    with outage(system, "redis-half-open", "redis") as load:
        system.to_redis.stall()
        system.wait_red("redis")
        load.more(10, "submits without Redis")
        system.to_redis.heal()


@contextmanager
def replica(system: System) -> Iterator[str]:
    with system.redis.client() as client:
        client.replicaof("127.0.0.1", free_port())
        try:
            yield "read only replica"
        finally:
            client.replicaof("NO", "ONE")


@contextmanager
def out_of_memory(system: System) -> Iterator[str]:
    with system.redis.client() as client:
        client.config_set("maxmemory", 1)
        try:
            yield "maxmemory"
        finally:
            client.config_set("maxmemory", 0)


@contextmanager
def unable_to_save(system: System) -> Iterator[str]:
    """A directory where the snapshot should go: every BGSAVE fails, and then every write."""
    obstacle = system.redis.directory / "dump.rdb"
    with system.redis.client() as client:
        obstacle.mkdir()
        client.config_set("save", "3600 1000000")
        client.bgsave()
        try:
            yield "MISCONF"
        finally:
            client.config_set("save", "")
            obstacle.rmdir()


@contextmanager
def locked(system: System) -> Iterator[str]:
    with system.redis.client() as client:
        client.config_set("requirepass", "sesame")
        system.to_redis.cut()  # those that are in stay in
        try:
            yield "Authentication required"
        finally:
            client.config_set("requirepass", "")


@contextmanager
def busy(system: System) -> Iterator[str]:
    with system.redis.client() as client, redis.Redis(port=system.redis.port, socket_timeout=30) as other:
        client.config_set("busy-reply-threshold", 50)
        endless = threading.Thread(target=lambda: suppress_errors(other.eval, "while true do end", 0))
        endless.start()
        try:
            yield "BUSY"
        finally:
            client.script_kill()
            endless.join(10)


@contextmanager
def loading(system: System) -> Iterator[str]:
    with system.redis.client() as client:
        client.mset({f"ballast:{number}": "x" * 1000 for number in range(2000)})
        client.bgrewriteaof()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], what="the file is rewritten")
    system.redis.kill()
    system.redis.options = ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]
    system.redis.start()
    yield "loading the dataset"


def suppress_errors(call: Callable[..., Any], *arguments: Any) -> None:
    with suppress(redis.RedisError):
        call(*arguments)


@pytest.mark.parametrize("state", [replica, out_of_memory, unable_to_save, locked, busy, loading])
def test_a_redis_that_answers_and_refuses(system: System, state: Callable[[System], Any]) -> None:
    with outage(system, f"redis-{state.__name__}".replace("_", "-"), "redis") as load, state(system) as reason:
        system.wait_red("redis", reason)
        load.more(10, "submits without Redis")
