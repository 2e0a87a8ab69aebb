"""A whole worker while an operator's session holds a row."""

import time

import pytest

from orchestrator.store import audit
from orchestrator.store.database import MAX_RUNS
from tests.factories import holding_job, new_job
from tests.waiting import wait_until

GATED = ("worker.builtin", "tests.worker.gated_handlers")
#: Seconds for which a session waits for a row here, and a transaction that is run again and again.
LOCK_WAIT_S = 1.0
GIVE_UP_S = MAX_RUNS * LOCK_WAIT_S
#: Seconds between two of the jobs that must not wait: many meet the one that is held, and few cost the machine much.
PAUSE_S = 0.25


@pytest.fixture
def worker_timeout_s() -> float:
    """Shorter than a row is held here, since nobody must miss heartbeats for it, and long for a busy machine."""
    return 5.0


def submit(orchestrator, type, payload):
    job = new_job(type=type, payload=payload)
    orchestrator.submit([job]).result(10)
    return job.job_id


def test_a_running_job_whose_row_is_held_keeps_no_other_from_being_done(cluster, orchestrator, gate):
    """F-32: its end waits for as long as that takes, the claims and ends of all others do not."""
    cluster.worker(worker_handlers=GATED)
    held = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(held, "running")
    with holding_job(cluster.db, held):
        began = time.monotonic()
        gate.unlink()
        others = 0
        while others < 10 or time.monotonic() - began < GIVE_UP_S + LOCK_WAIT_S:
            record = cluster.wait_for(submit(orchestrator, "echo", {}), "done")
            assert record["attempt"] == 1
            others += 1
            time.sleep(PAUSE_S)
        assert cluster.job(held)["status"] == "running"
    record = cluster.wait_for(held, "done")
    assert (record["attempt"], record["attempts"], record["result"]) == (1, 1, 1)
    events = [event["event_type"] for event in cluster.db.read(lambda conn: audit.of_job(conn, held))]
    assert events == ["job.submitted", "job.claimed", "job.running", "job.done"]
    assert cluster.count("workers") == 1, "nobody was declared dead, and began anew"


def test_a_waiting_job_whose_row_is_held_is_passed_over_until_it_is_free(cluster, orchestrator):
    """The one slot must not be kept for it."""
    waiting = [submit(orchestrator, "echo", {}) for _ in range(3)]
    wait_until(lambda: orchestrator.hub.lane("default").length() == 3, what="announced")
    with holding_job(cluster.db, waiting[0]):
        cluster.worker(worker_slots=1)
        for job_id in waiting[1:]:
            cluster.wait_for(job_id, "done")
        assert cluster.job(waiting[0])["status"] == "pending"
    assert cluster.wait_for(waiting[0], "done")["attempt"] == 1
