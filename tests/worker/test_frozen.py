"""A worker that stops without dying: SIGSTOP, a debugger, a paused virtual machine."""

import os
import signal

from sqlalchemy import select, text

from orchestrator.store import schema
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO
from tests.worker.test_worker import events, submit


@EMBEDDED_TOO
def test_a_frozen_worker_is_replaced_and_cannot_overwrite_when_it_wakes(cluster, orchestrator):
    worker = cluster.worker()
    job_id = submit(orchestrator, "sleep", {"seconds": 1.0})
    cluster.wait_for(job_id, "running")
    before = cluster.job(job_id)["worker_id"]
    with cluster.db.engine.connect() as connection, connection.begin():
        # SQLite locks the whole file, and no server is there to end a frozen writer: stop it between two writes.
        worker.send(signal.SIGSTOP)
    cluster.worker()
    record = cluster.wait_for(job_id, "done")
    worker.send(signal.SIGCONT)
    worker.says("declared dead")
    # Its own slot finished the job meanwhile; that end changed nothing, and it takes jobs again under a new id.
    wait_until(lambda: worker.log.read_text().count("worker ready") == 2, what="a new session")
    assert cluster.job(job_id) == record
    assert record["worker_id"] != before
    assert events(cluster, job_id).count("job.done") == 1


def test_the_locks_of_a_frozen_worker_end_before_it_is_declared_dead(cluster, orchestrator):
    worker = cluster.worker()
    job_id = submit(orchestrator, "sleep", {"seconds": 3.0})
    cluster.wait_for(job_id, "running")
    freeze_inside_a_transaction(cluster, worker)
    cluster.worker()
    assert cluster.wait_for(job_id, "done", timeout=15)["attempt"] == 2


def freeze_inside_a_transaction(cluster, worker):
    """Let its heartbeat wait for a row that we hold, stop it there, and let go: now it owns every lock it asked for."""
    waits = text(
        "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'INSERT INTO gpus%' AND time_ms > 50"
    )
    with cluster.db.engine.begin() as holder:
        holder.execute(select(schema.gpus).with_for_update()).all()
        wait_until(lambda: cluster.db.read(lambda conn: conn.execute(waits).scalar_one()), what="a waiting heartbeat")
        worker.send(signal.SIGSTOP)


def test_a_frozen_slot_that_does_not_take_its_job_is_replaced(cluster, orchestrator):
    worker = cluster.worker(worker_slots=1)
    (frozen,) = worker.children()
    os.kill(frozen, signal.SIGSTOP)
    # Larger than a pipe: sending it to somebody who does not read would last for ever.
    job_id = submit(orchestrator, "echo", {"data": "x" * 900_000})
    assert cluster.wait_for(job_id, "done")["crashes"] == 1
    assert frozen not in worker.children()
