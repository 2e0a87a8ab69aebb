"""A worker that stops without dying: SIGSTOP, a debugger, a paused virtual machine."""

import os
import signal

import pytest
from sqlalchemy import text

from orchestrator.store import schema
from tests.processes import gone
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO, locked_gpus
from tests.worker.deaths import declare_dead
from tests.worker.test_worker import GATED, events, submit


@pytest.fixture
def worker_timeout_s() -> float:
    """Most tests here wait for a frozen worker to be declared dead."""
    return 2.0


@EMBEDDED_TOO
def test_a_frozen_worker_is_replaced_and_cannot_overwrite_when_it_wakes(cluster, orchestrator, gate):
    worker = cluster.worker(worker_handlers=GATED)
    job_id = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(job_id, "running")
    before = cluster.job(job_id)["worker_id"]
    with cluster.db.engine.connect() as connection, connection.begin():
        # SQLite locks the whole file, and no server is there to end a frozen writer: stop it between two writes.
        worker.send(signal.SIGSTOP)
    gate.unlink()
    cluster.worker(worker_handlers=GATED)
    record = cluster.wait_for(job_id, "done")
    worker.send(signal.SIGCONT)
    worker.says("declared dead")
    # Its own slot finished the job meanwhile; that end changed nothing, and it takes jobs again under a new id.
    wait_until(lambda: worker.log.read_text().count("worker ready") == 2, what="a new session")
    assert cluster.job(job_id) == record
    assert record["worker_id"] != before
    assert events(cluster, job_id).count("job.done") == 1


def test_the_locks_of_a_frozen_worker_end_before_it_is_declared_dead(cluster, orchestrator, gate):
    worker = cluster.worker(worker_handlers=GATED)
    job_id = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(job_id, "running")
    freeze_inside_a_transaction(cluster, worker)
    gate.unlink()
    cluster.worker(worker_handlers=GATED)
    assert cluster.wait_for(job_id, "done")["attempt"] == 2


def freeze_inside_a_transaction(cluster, worker):
    """Let its heartbeat wait for a row that we hold, stop it there, and let go: now it owns every lock it asked for."""
    waits = text(
        "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'INSERT INTO gpus%' AND time_ms > 50"
    )
    with locked_gpus(cluster):
        wait_until(lambda: cluster.db.read(lambda conn: conn.execute(waits).scalar_one()), what="a waiting heartbeat")
        worker.send(signal.SIGSTOP)


@pytest.mark.parametrize("worker_timeout_s", [20.0])
def test_a_draining_worker_that_was_declared_dead_ends_what_it_runs(cluster, orchestrator, gate):
    """Its jobs run elsewhere by then; it would wait for their end for as long as it drains."""
    worker = cluster.worker(worker_handlers=GATED, worker_slots=1)
    job_id = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(job_id, "running")
    (slot,) = worker.slots()
    worker.send(signal.SIGUSR1)
    wait_until(lambda: cluster.count("workers", schema.workers.c.status == "draining"), what="it drains")
    declare_dead(cluster, worker, signal.SIGSTOP)
    cluster.wait_for(job_id, "pending")
    worker.send(signal.SIGCONT)
    wait_until(lambda: gone(slot), what="the end of what it ran")
    assert worker.process.wait(30) == 0
    assert cluster.count("workers", schema.workers.c.status == "lost") == 1
    assert cluster.count("orchestrator_audit", schema.audit.c.event_type == "worker.stopped") == 0
    gate.unlink()
    cluster.worker(worker_handlers=GATED)
    assert cluster.wait_for(job_id, "done")["attempt"] == 2


def test_a_worker_that_does_not_wait_for_its_posts_any_longer_says_so(cluster):
    worker = cluster.worker(worker_slots=1, worker_grace_s=0.1, db_timeout_s=0.5)
    (frozen,) = worker.slots()
    os.kill(frozen, signal.SIGSTOP)  # it is waited for longer than that
    assert worker.stop() == 1
    assert "left without waiting longer" in worker.log.read_text()
