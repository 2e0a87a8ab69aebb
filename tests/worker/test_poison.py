"""BI-20: whoever can write to our keys in Redis can delay a lane, and not stop it: the rows decide what is run."""

import pytest

from tests.factories import spoil_job
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO
from tests.worker.test_worker import events, submit

KEY = "stream:orchestrator:inference_jobs"
LAST = "18446744073709551615-18446744073709551615"


def drained(cluster, orchestrator):
    wait_until(lambda: not cluster.unfinished(), what="all jobs ended")
    wait_until(lambda: orchestrator.hub.lane("default").length() == 0, what="an empty lane")


def done_once(cluster, job_ids):
    assert {job_id: events(cluster, job_id).count("job.done") for job_id in job_ids} == dict.fromkeys(job_ids, 1)


def test_entries_that_nobody_announced_run_nothing(cluster, orchestrator, raw):
    cluster.worker()
    finished = submit(orchestrator, "echo", {"hello": "world"})
    before = cluster.wait_for(finished, "done")
    raw.xgroup_create(KEY, "another-group", id="0", mkstream=True)
    raw.xadd(KEY, {"job_id": finished})
    raw.xadd(KEY, {"nothing": "x" * (8 << 20)})
    raw.xadd(KEY, {"job_id": "x" * (1 << 20)})
    raw.xadd(KEY, {"job_id": "never-submitted", "type": "os:system", "payload": "{}"})
    raw.xreadgroup("another-group", "stranger", {KEY: ">"}, count=100)
    jobs = [submit(orchestrator, "echo", {}) for _ in range(5)]
    drained(cluster, orchestrator)
    done_once(cluster, [finished, *jobs])
    assert cluster.job(finished) == before


@pytest.mark.parametrize("taken", [True, False], ids=["poison was read", "poison waits"])
@EMBEDDED_TOO
def test_a_stream_that_can_take_no_entry_any_more(cluster, orchestrator, raw, taken):
    jobs = [submit(orchestrator, "echo", {}) for _ in range(5)]
    wait_until(lambda: raw.xlen(KEY) == 5, what="announced")
    if taken:
        cluster.worker()
        drained(cluster, orchestrator)
    raw.xadd(KEY, {"job_id": "poison"}, id=LAST)
    if not taken:
        cluster.worker()
    jobs += [submit(orchestrator, "echo", {}) for _ in range(5)]
    drained(cluster, orchestrator)
    done_once(cluster, jobs)


@EMBEDDED_TOO
def test_a_key_that_is_no_stream(cluster, orchestrator, raw):
    jobs = [submit(orchestrator, "echo", {}) for _ in range(5)]
    wait_until(lambda: raw.xlen(KEY) == 5, what="announced")
    raw.set(KEY, "somebody's")
    cluster.worker()
    jobs += [submit(orchestrator, "echo", {}) for _ in range(5)]
    drained(cluster, orchestrator)
    done_once(cluster, jobs)


@EMBEDDED_TOO
def test_a_key_that_is_no_stream_any_more_although_nothing_is_submitted(cluster, orchestrator, raw, gate):
    """All jobs are announced, so no publisher looks; their worker can neither read nor acknowledge."""
    cluster.worker(worker_slots=1, worker_handlers=("worker.builtin", "tests.worker.gated_handlers"))
    first = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(first, "running")
    jobs = [first] + [submit(orchestrator, "echo", {}) for _ in range(5)]
    wait_until(lambda: raw.xlen(KEY) == 6, what="announced")
    raw.set(KEY, "somebody's")
    gate.unlink()
    wait_until(lambda: not cluster.unfinished(), what="all jobs ended")
    done_once(cluster, jobs)


def test_a_dead_letter_stream_that_cannot_be_written_holds_nothing_up(cluster, orchestrator, raw):
    raw.set("stream:orchestrator:dlq", "somebody's")
    cluster.worker()
    raw.xadd(KEY, {"job_id": "never-submitted"})
    buried = submit(orchestrator, "fail", {}, max_attempts=1)
    job = submit(orchestrator, "echo", {})
    cluster.wait_for(buried, "dead_letter")
    cluster.wait_for(job, "done")
    drained(cluster, orchestrator)


def test_a_type_is_a_name_and_no_path_to_code(cluster, orchestrator):
    """BI-9: what no handler was registered for is not looked up anywhere, however it is spelt."""
    cluster.worker()
    types = ["os.system", "os:system", "builtins.eval", "worker.builtin:echo", "echo.run", ".echo", "ECHO"]
    waiting = [submit(orchestrator, type, {"command": "true"}) for type in types]
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")
    wait_until(
        lambda: all("no handler" in (cluster.job(job_id)["wait_reason"] or "") for job_id in waiting), what="all wait"
    )
    found = [cluster.job(job_id) for job_id in waiting]
    assert {(job["status"], job["attempts"]) for job in found} == {("pending", 0)}


@EMBEDDED_TOO
def test_a_row_that_no_claim_can_read_delays_nobody_else(cluster, orchestrator, raw):
    bad = submit(orchestrator, "echo", {}, min_memory_mb=100, max_attempts=1)
    jobs = [submit(orchestrator, "echo", {}) for _ in range(3)]
    wait_until(lambda: raw.xlen(KEY) == 4, what="announced")
    spoil_job(cluster.db, bad, gpu_count=0)
    workers = [cluster.worker(), cluster.worker()]
    jobs += [submit(orchestrator, "echo", {}) for _ in range(6)]
    for job_id in jobs:
        cluster.wait_for(job_id, "done")
    done_once(cluster, jobs)
    wait_until(lambda: any(bad in worker.log.read_text() for worker in workers), what="a line that names it")
