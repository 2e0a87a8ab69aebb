"""A worker that is told to leave while a server does not answer: it leaves in time, and with what could be written."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.daemon import Orchestrator
from orchestrator.settings import Settings
from tests.cluster import Cluster
from tests.servers import MariaDB, Redis
from tests.tables import make_tables
from tests.waiting import wait_until
from tests.worker.test_worker import GATED, submit

#: Seconds for a busy machine to end a process that wants to end.
BUSY_S = 10.0


@pytest.fixture
def mortal(private_server: Callable[..., MariaDB]) -> MariaDB:
    """A database of our own, to be frozen."""
    return private_server(MariaDB)


@pytest.fixture
def cluster(
    mortal: MariaDB, redis_server: Redis, settings: Callable[..., Settings], tmp_path: Path
) -> Iterator[Cluster]:
    redis_server.flush()
    given: dict[str, Any] = {"database_url": mortal.create_database("leaving"), "redis_url": redis_server.url}
    # As long as by default: what waits for it several times over takes much longer than it should.
    given |= {"db_timeout_s": 10.0, "worker_grace_s": 1.0, "worker_timeout_s": 20.0}
    ours = settings(**given, data_dir=tmp_path, worker_slots=1, gpu_backend="none")
    opened = Cluster(ours, tmp_path, forked=True)
    make_tables(opened.db.engine)
    yield opened
    opened.close()


@pytest.fixture
def frozen(mortal: MariaDB) -> Iterator[Callable[[], None]]:
    """Call it to freeze the database; it goes on when the test ends, if not before."""
    yield lambda: os.kill(mortal.pid, signal.SIGSTOP)
    os.kill(mortal.pid, signal.SIGCONT)


def runs_gated(cluster: Cluster, orchestrator: Orchestrator, gate: Path) -> str:
    job_id = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(job_id, "running")
    return job_id


def test_it_leaves_in_time_though_the_database_is_frozen(cluster, orchestrator, gate, frozen):
    worker = cluster.worker(worker_handlers=GATED)
    runs_gated(cluster, orchestrator, gate)
    frozen()
    asked = time.monotonic()
    assert worker.stop(timeout=120.0) == 1
    took_s = time.monotonic() - asked
    assert took_s < cluster.settings.leave_limit_s + BUSY_S
    assert "left without waiting longer" in worker.log.read_text()


def test_what_the_database_takes_before_that_is_written(cluster, orchestrator, gate, mortal, frozen):
    worker = cluster.worker(worker_handlers=GATED)
    job_id = runs_gated(cluster, orchestrator, gate)
    frozen()
    gate.unlink()
    worker.process.terminate()
    wait_until(lambda: not worker.slots(), what="what it ran has ended")
    os.kill(mortal.pid, signal.SIGCONT)
    assert worker.process.wait(60) == 0, worker.tail()
    assert cluster.wait_for(job_id, "done")["attempt"] == 1
