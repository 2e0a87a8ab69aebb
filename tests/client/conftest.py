"""A whole orchestrator behind real HTTP, with GPUs that are rows; programs that use it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from orchestrator.settings import Settings
from orchestrator.store import schema
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_shift
from tests.api.conftest import Running, running
from tests.conftest import SHORT
from tests.servers import Redis

NODE = "node-1"


def add_gpu(db: Database, index: int, total_mb: int = 10_000, **columns: Any) -> None:
    """A GPU with nine tenths of its memory for leases, measured just now."""
    row = {
        "gpu_uuid": f"GPU-{index}",
        "node_id": NODE,
        "gpu_index": index,
        "name": "simulated GPU",
        "total_mb": total_mb,
        "usable_mb": total_mb * 9 // 10,
    }
    db.write(lambda conn: conn.execute(insert(schema.gpus), row | columns))


class Orchestrator:
    """What the tests see of it."""

    def __init__(self, url: str, db: Database) -> None:
        self.url, self.db = url, db

    def leases(self, state: str = "active") -> list[Any]:
        query = select(schema.leases).where(schema.leases.c.state == state)
        return list(self.db.read(lambda conn: conn.execute(query).all()))

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
    given = {"database_url": f"sqlite:///{file}", "redis_url": redis_server.url, "gpu_stale_s": 600.0}
    return Settings(**(SHORT | given))


@pytest.fixture(scope="module")
def started(cluster_settings: Settings) -> Iterator[Running]:
    with running(cluster_settings) as api:
        yield api


@pytest.fixture
def server(started: Running, monkeypatch: pytest.MonkeyPatch) -> Orchestrator:
    """With one GPU of 9000 usable MB; where and as whom clients find it stands in the environment."""
    for rows in (schema.lease_gpus.delete(), schema.leases.delete(), schema.gpus.delete()):
        with started.db.engine.begin() as connection:
            connection.execute(rows)
    add_gpu(started.db, 0)
    url = str(started.http.base_url)
    monkeypatch.setenv("GPUORCH_URL", url)
    monkeypatch.setenv("ORCH_NODE_ID", NODE)
    return Orchestrator(url, started.db)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start programs that the test's end kills: `spawn([sys.executable, "-c", …], stdin=PIPE)`."""
    children: list[subprocess.Popen[str]] = []

    def start(command: list[str], **given: Any) -> subprocess.Popen[str]:
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
