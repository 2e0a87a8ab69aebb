"""Workers of one lane that have different handlers."""

from datetime import timedelta
from functools import partial

from orchestrator.jobs import Status
from orchestrator.store.claim import MAX_MISSED_S
from tests.fetchers import enlist
from tests.waiting import wait_until
from tests.worker.test_worker import submit

MARKS = ("tests.worker.marking_handlers",)


def test_a_job_that_only_some_workers_can_run_never_waits_long_for_the_others(cluster, orchestrator, tmp_path):
    """Whoever reads of it without its handler puts it off for a moment, not for as long as if nobody could run it."""
    cluster.worker()
    cluster.worker(worker_handlers=MARKS)
    longest = timedelta()

    def over(job_id):
        nonlocal longest
        job = cluster.job(job_id)
        if job["not_before"] and job["updated_at"]:
            longest = max(longest, job["not_before"] - job["updated_at"])
        return job["status"] == Status.DONE

    for n in range(8):
        job_id = submit(orchestrator, "marks", {"file": str(tmp_path / f"mark-{n}")})
        wait_until(partial(over, job_id), what="done")
    assert longest <= timedelta(seconds=MAX_MISSED_S + 0.1)


def test_a_worker_that_fetches_gets_what_the_readers_of_its_lane_cannot_run(cluster, orchestrator):
    """They take every entry within milliseconds."""
    cluster.worker()
    remote = enlist(cluster.db, types=("theirs",))
    job_id = submit(orchestrator, "theirs", {})
    wait_until(lambda: cluster.job(job_id)["wait_reason"], what="put off")
    claims = wait_until(remote.fetch, what="fetched")
    assert [claim.job_id for claim in claims] == [job_id]
