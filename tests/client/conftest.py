"""A whole orchestrator behind real HTTP, a node that measures its GPUs, and programs that use them."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from sqlalchemy import func, select, update

from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_shift
from tests.api.conftest import Running, running
from tests.conftest import SHORT
from tests.factories import Hand, gpu, hire
from tests.forked import ROOT, Forked, nest
from tests.servers import Redis

NODE = "node-1"
#: No worker is declared dead and no term ends because the machine is busy; and what nobody here waits for is not done
#: all the time.
PATIENT: dict[str, Any] = {
    "claim_idle_ms": 60_000,
    "gpu_stale_s": 600.0,
    "leader_interval_s": 2.0,
    "leader_ttl_s": 20.0,
    "publish_interval_s": 2.0,
    "reclaim_interval_s": 5.0,
    "redis_block_ms": 2000,
    "redis_timeout_s": 10.0,
    "republish_after_s": 10.0,
    "worker_timeout_s": 45.0,
}


class Orchestrator:
    """What the tests see of it: one node, whose GPUs are measured all the time and hold no process."""

    def __init__(self, url: str, db: Database, node: Hand) -> None:
        self.url, self.db, self._node = url, db, node

    def add_gpu(self) -> None:
        """One more, of 9000 MB for leases."""
        self._node.sees(*self._node.gpus, gpu(len(self._node.gpus), 10_000))

    def leases(self, state: str = "active") -> list[Any]:
        """One that is ending already, and only waits for its processes to go, is over for its holder."""
        seen_as = func.coalesce(schema.leases.c.ending_as, schema.leases.c.state)
        return list(self.db.read(lambda conn: conn.execute(select(schema.leases).where(seen_as == state)).all()))

    def leased_mb(self) -> int:
        return sum(self.db.read(lambda conn: conn.execute(select(schema.gpus.c.leased_mb)).scalars().all()))

    def end_leases(self) -> None:
        """As if nobody had renewed them: the leader ends them, and the next heartbeat hears so."""
        self.db.write(lambda conn: conn.execute(update(schema.leases).values(expires_at=utc_shift(-1.0))))


@pytest.fixture(scope="module")
def cluster_settings(
    redis_server: Redis, sqlite_with_tables: Path, tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    redis_server.flush()
    file = tmp_path_factory.mktemp("client") / "orchestrator.db"
    copyfile(sqlite_with_tables, file)
    servers = {"database_url": f"sqlite:///{file}", "redis_url": redis_server.url}
    return Settings(**(SHORT | PATIENT | servers))


@pytest.fixture(scope="module")
def started(cluster_settings: Settings) -> Iterator[Running]:
    with running(cluster_settings) as api:
        yield api


@contextmanager
def measured(node: Hand) -> Iterator[None]:
    """Its heartbeats and samples come by themselves, as a worker sends them."""
    stop = threading.Event()

    def keep_beating() -> None:
        while not stop.wait(0.25):
            node.beat()

    thread = threading.Thread(target=keep_beating, name="node")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(20)


@pytest.fixture
def server(started: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    """With one GPU of 9000 usable MB; where and as whom clients find it stands in the environment."""
    for rows in (schema.lease_gpus.delete(), schema.leases.delete(), schema.gpus.delete()):
        with started.db.engine.begin() as connection:
            connection.execute(rows)
    url = str(started.http.base_url)
    monkeypatch.setenv("GPUORCH_URL", url)
    monkeypatch.setenv("ORCH_NODE_ID", NODE)
    node = hire(started.db, gpu(0, 10_000), node=NODE)
    with measured(node):
        yield Orchestrator(url, started.db, node)


class Piped(Forked):
    """`gpuorch ARGUMENTS`, forked like members of a cluster, but with pipes where those have a log."""

    def __init__(self, arguments: list[str], *, loaded: str, stdin: int = subprocess.DEVNULL) -> None:
        order = {"arguments": arguments, "environment": dict(os.environ), "path": "", "folder": str(ROOT)}
        (their_in, ours), (out, their_out), (err, their_err) = (os.pipe() for _ in range(3))
        theirs = [their_in, their_out, their_err]
        try:
            self._hatch(nest(str(ROOT), (), ("orchestrator.cli", loaded)), order, theirs)
        finally:
            for end in theirs:
                os.close(end)
        self.stdin, self.stdout, self.stderr = os.fdopen(ours, "w"), os.fdopen(out), os.fdopen(err)
        if stdin == subprocess.DEVNULL:
            self.stdin.close()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Any]]:
    """Start programs that the test's end kills: `spawn([sys.executable, "-c", …], stdin=PIPE)`.

    `spawn(["run", …], loaded="orchestrator.cli.leased")` is `gpuorch run …` without the work of loading it each time.
    """
    children: list[subprocess.Popen[str] | Piped] = []

    def start(command: list[str], loaded: str = "", **given: Any) -> subprocess.Popen[str] | Piped:
        if loaded:
            children.append(Piped(command, loaded=loaded, **given))
            return children[-1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        children.append(subprocess.Popen(command, env=environment, text=True, **(pipes | given)))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait(10)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
