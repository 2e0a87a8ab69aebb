"""Starting and ending attempts: what is charged, what is freed, and what a repetition changes."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest
from sqlalchemy import update

from orchestrator import jobs as rules
from orchestrator.errors import ResultNotFound
from orchestrator.jobs import ErrorKind
from orchestrator.store import audit, job_reads, lease_purge, nodes, schema, settle
from orchestrator.store.claim import Claim
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import End, Outcome, Start
from tests.factories import active_leases, done, failed, gpu, hire, history, now, row, rows, submit


def claimed(db, **fields):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, **fields))
    return hand, claim


def books(db):
    """Everything that must not change a second time."""
    tables = (schema.jobs, schema.audit, schema.results, schema.leases, schema.lease_gpus)
    return [rows(db, table) for table in tables], [g.leased_mb for g in rows(db, schema.gpus)]


# --- endings ---


def test_a_finished_job_has_its_result_and_frees_its_lease(db):
    hand, claim = claimed(db, min_memory_mb=1000)
    hand.start(claim)
    (settled,) = hand.record(ends=[done(claim, '{"answer":42}')])
    assert settled.arrow is rules.FINISH
    record = db.read(lambda conn: job_reads.get(conn, claim.job_id))
    assert (record["status"], record["result"], record["run_seconds"]) == ("done", {"answer": 42}, 0.5)
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]
    assert active_leases(db) == []
    assert db.write(lambda conn: lease_purge.forget(conn, 60.0)) == 1
    assert rows(db, schema.leases) == rows(db, schema.lease_gpus) == []
    assert row(db, claim.job_id).lease_token is None


def test_start_and_end_may_come_in_one_transaction(db):
    hand, claim = claimed(db)
    hand.record(starts=[Start(claim.job_id, 1)], ends=[done(claim)])
    assert history(db, claim.job_id) == ["job.submitted", "job.claimed", "job.running", "job.done"]
    job = row(db, claim.job_id)
    assert job.created_at <= job.claimed_at <= job.started_at <= job.finished_at <= now(db)


def test_a_retry_waits_keeps_its_rank_and_is_not_owned(db):
    hand, claim = claimed(db, min_memory_mb=1000)
    rank = row(db, claim.job_id).rank
    settled = hand.fail(claim, ErrorKind.TIMEOUT, retry_after_s=30.0)
    assert settled.arrow is rules.RETRY
    job = row(db, claim.job_id)
    assert (job.status, job.queued, job.rank) == ("pending", "delayed", rank)
    assert (job.worker_id, job.lease_token, job.published_at) == (None, None, None)
    assert (job.attempt, job.attempts, job.error_kind, job.last_error) == (1, 1, "timeout", "it broke")
    wait = job.not_before - now(db)
    assert timedelta(seconds=25) < wait <= timedelta(seconds=30)
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]


def test_a_retry_without_delay_is_ready_at_once(db):
    hand, claim = claimed(db)
    hand.fail(claim, retry_after_s=0.0)
    assert row(db, claim.job_id).queued == "ready"
    assert [c.attempt for c in hand.claim(claim.job_id)] == [2]


def test_a_hand_back_charges_nothing_and_the_attempt_still_grows(db):
    hand, claim = claimed(db, min_memory_mb=1000, max_attempts=1)
    for attempt in (1, 2, 3):
        assert hand.hand_back(claim).arrow is rules.HAND_BACK
        job = row(db, claim.job_id)
        assert (job.status, job.attempt, job.attempts, job.queued) == ("pending", attempt, 0, "ready")
        assert (job.worker_id, job.published_at, job.wait_reason) == (None, None, "leaving")
        assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]
        (claim,) = hand.claim(claim.job_id)
        assert claim.attempt == attempt + 1


def test_a_hand_back_may_name_a_pause(db):
    """The memory was not really there: asking again at once would get the same answer."""
    hand, claim = claimed(db, min_memory_mb=1000)
    end = End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error="needs 1000 MB", retry_after_s=30.0)
    assert hand.record(ends=[end])[0].arrow is rules.HAND_BACK
    job = row(db, claim.job_id)
    assert (job.status, job.queued, job.attempts, job.wait_reason) == ("pending", "delayed", 0, "needs 1000 MB")
    assert timedelta(seconds=25) < job.not_before - now(db) <= timedelta(seconds=30)
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]


def test_attempts_that_are_used_up_bury_the_job(db):
    hand, claim = claimed(db, max_attempts=3)
    arrows = []
    for _ in range(3):
        arrows.append(hand.fail(claim, retry_after_s=0.0).arrow)
        if arrows[-1] is rules.RETRY:
            (claim,) = hand.claim(claim.job_id)
    assert arrows == [rules.RETRY, rules.RETRY, rules.BURY]
    job = row(db, claim.job_id)
    assert (job.status, job.attempts, job.last_error) == ("dead_letter", 3, "it broke")
    assert job.finished_at is not None


@pytest.mark.parametrize("kind", [ErrorKind.WORKER_LOST, ErrorKind.GPU_LOST])
def test_crashes_are_counted_apart_and_bury_a_job_that_has_attempts_left(db, kind):
    hand, claim = claimed(db, max_attempts=50)
    assert hand.fail(claim, ErrorKind.TRANSIENT, retry_after_s=0.0).arrow is rules.RETRY
    (claim,) = hand.claim(claim.job_id)
    assert hand.fail(claim, kind).arrow is rules.RETRY
    assert (row(db, claim.job_id).crashes, row(db, claim.job_id).queued) == (1, "ready")
    (claim,) = hand.claim(claim.job_id)
    assert hand.fail(claim, kind).arrow is rules.BURY
    job = row(db, claim.job_id)
    assert (job.status, job.crashes, job.attempts, job.error_kind) == ("dead_letter", 2, 3, kind)


def test_a_long_error_is_cut_and_a_strange_one_kept(db):
    hand, claim = claimed(db)
    hand.fail(claim, ErrorKind.PERMANENT, error="🦊\n\0" + "x" * 100_000)
    assert len(row(db, claim.job_id).last_error) == settle.MAX_ERROR
    assert row(db, claim.job_id).last_error.startswith("🦊\n")


def test_the_audit_keeps_the_end_of_an_error_where_a_trace_says_what_went_wrong(db):
    hand, claim = claimed(db)
    hand.fail(claim, ErrorKind.TRANSIENT, error="Traceback\n" + "x" * 600 + "\nValueError: no")
    kept = db.read(lambda conn: audit.of_job(conn, claim.job_id))[-1]["details"]["error"]
    assert len(kept) == settle.AUDITED_ERROR and kept.startswith("…x") and kept.endswith("\nValueError: no")


def test_a_job_without_a_result_says_so(db):
    _hand, claim = claimed(db)
    with pytest.raises(ResultNotFound) as refused:
        db.read(lambda conn: job_reads.result(conn, claim.job_id))
    assert refused.value.status == "claimed"


# --- stale attempts ---


def test_a_stale_attempt_settles_nothing(db):
    """INV-2: a worker that was given up wakes up while its successor works, and after that one ended."""
    hand, stale = claimed(db, min_memory_mb=1000)
    hand.fail(stale, ErrorKind.WORKER_LOST)
    other = hire(db)
    (fresh,) = other.claim(stale.job_id)
    reports = [
        done(stale, '"stale"'),
        failed(stale),
        failed(stale, ErrorKind.PERMANENT),
        End(stale.job_id, stale.attempt, Outcome.SKIPPED),
        End(stale.job_id, stale.attempt, Outcome.HANDED_BACK),
    ]
    for state in ("owned", "over"):
        before = books(db)
        for end in reports:
            (settled,) = hand.record(starts=[Start(stale.job_id, stale.attempt)], ends=[end])
            assert settled.arrow is None, (state, end)
        assert books(db) == before
        other.finish(fresh)
    assert row(db, stale.job_id).status == "done"


def test_one_stale_report_does_not_disturb_its_batch(db):
    hand = hire(db)
    claims = hand.claim(*submit(db, 3))
    hand.hand_back(claims[1])
    settled = hand.finish(*claims)
    assert [item.arrow for item in settled] == [rules.FINISH, None, rules.FINISH]
    assert Counter(job.status for job in rows(db, schema.jobs)) == {"done": 2, "pending": 1}


def test_a_report_about_nobody(db):
    (settled,) = hire(db).record(ends=[End("nobody", 1, Outcome.DONE, result="{}")])
    assert settled.arrow is None


# --- repetitions after a lost answer ---

REPEATED = {
    "done": (done, rules.FINISH),
    "skipped": (lambda claim: End(claim.job_id, claim.attempt, Outcome.SKIPPED, error="no"), rules.SKIP),
    "failed": (lambda claim: failed(claim, ErrorKind.PERMANENT), rules.FAIL),
    "buried": (failed, rules.BURY),
}


@pytest.mark.parametrize("how", REPEATED)
def test_an_end_whose_commit_answer_was_lost_is_written_once_and_still_reported(db, lose_commits, how):
    hand, claim = claimed(db, max_attempts=2, min_memory_mb=1000)
    hand.fail(claim, ErrorKind.TIMEOUT, retry_after_s=0.0)
    (claim,) = hand.claim(claim.job_id)
    end, arrow = REPEATED[how]
    lose_commits(1)
    (settled,) = hand.record(starts=[Start(claim.job_id, 2)], ends=[end(claim)])
    assert settled.arrow is arrow
    assert history(db, claim.job_id)[4:] == ["job.running", arrow.event]
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]


@pytest.mark.parametrize("how", ["retried", "handed back"])
def test_a_return_to_pending_is_written_once(db, lose_commits, how):
    hand, claim = claimed(db, min_memory_mb=1000)
    outcome = failed(claim) if how == "retried" else End(claim.job_id, 1, Outcome.HANDED_BACK, error="bye")
    lose_commits(1)
    hand.record(ends=[outcome])
    assert len(history(db, claim.job_id)) == 3
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]
    assert row(db, claim.job_id).attempts == (1 if how == "retried" else 0)


def test_a_whole_batch_recorded_twice_changes_nothing_the_second_time(db):
    hand = hire(db, gpu())
    claims = hand.claim(*submit(db, 6, min_memory_mb=100))
    starts = [Start(claim.job_id, claim.attempt) for claim in claims]
    ends = [
        done(claims[0]),
        failed(claims[1]),
        failed(claims[2], ErrorKind.PERMANENT),
        End(claims[3].job_id, 1, Outcome.SKIPPED, error="no"),
        End(claims[4].job_id, 1, Outcome.HANDED_BACK, error="bye"),
        done(claims[5]),
    ]
    hand.record(starts, ends)
    before = books(db)
    hand.record(starts, ends)
    assert books(db) == before


def test_the_end_the_leader_wrote_is_not_taken_for_the_workers_own(db):
    hand, claim = claimed(db, max_attempts=1)
    hand.go_silent()
    lost = hand.lose()
    assert [item.arrow for item in lost] == [rules.BURY]
    assert hand.fail(claim).arrow is None


# --- the dead ---


def test_the_jobs_of_a_dead_worker_wait_again_and_its_leases_stand_until_they_expire(db):
    hand, other = hire(db, gpu()), hire(db, gpu())
    ids = submit(db, 3, min_memory_mb=1000)
    lost = hand.claim(*ids[:2])
    other.claim(ids[2])
    hand.start(lost[0])
    settled = hand.lose()
    assert {item.arrow for item in settled} == {rules.RETRY}
    for claim in lost:
        job = row(db, claim.job_id)
        assert (job.status, job.crashes, job.queued, job.worker_id) == ("pending", 1, "ready", None)
        assert hand.worker_id in job.last_error
    assert row(db, ids[2]).status == "claimed"
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [3000]
    over = update(schema.leases).where(schema.leases.c.worker_id == hand.worker_id)
    db.write(lambda conn: conn.execute(over.values(expires_at=utc_shift(-1.0))))
    assert db.write(lease_purge.purge) == 2
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [3000]  # until a neighbour sees that its processes are gone
    other.beat(busy=1)
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [1000]
    assert hand.lose() == []


def test_a_dead_workers_jobs_are_taken_in_bounded_steps(db):
    hand = hire(db)
    hand.claim(*submit(db, 5))
    steps = [len(hand.lose(2)) for _ in range(4)]
    assert steps == [2, 2, 1, 0]


def test_a_worker_and_the_leader_settle_the_same_job_once(db):
    """F-49: whoever comes second finds the attempt gone; the books balance either way."""
    hand = hire(db, gpu())
    claims = hand.claim(*submit(db, 20, min_memory_mb=100))
    barrier = Barrier(2)

    def worker():
        barrier.wait(30)
        return [hand.finish(claim)[0].arrow for claim in claims]

    def leader():
        barrier.wait(30)
        taken = []
        while step := hand.lose(1):
            taken += [item for item in step if item.arrow]  # None: the worker was faster between look and lock
        return taken

    with ThreadPoolExecutor(2) as pool:
        finished, taken = pool.submit(worker), pool.submit(leader)
        arrows, lost = finished.result(), taken.result()
    assert arrows.count(rules.FINISH) + len(lost) == 20
    statuses = Counter(job.status for job in rows(db, schema.jobs))
    assert statuses["done"] == arrows.count(rules.FINISH)
    assert statuses["pending"] == len(lost)
    # Whoever settled it: the worker looked at its GPU, and ends the lease.
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0] == [100 * len(active_leases(db))]
    assert len(rows(db, schema.results)) == statuses["done"]


def test_progress_is_shown_for_the_attempt_that_reports_it(db):
    hand, claim = claimed(db)
    hand.start(claim)
    hand.beat(busy=1, progress=((claim.job_id, 1, 0.5, "half"), (claim.job_id, 9, 0.9, "stale")))
    assert (row(db, claim.job_id).progress, row(db, claim.job_id).progress_note) == (0.5, "half")


def test_the_whole_life_of_a_job(db):
    """submit → claim → crash → claim → transient error → claim → done, as one audit trail."""
    hand = hire(db)
    (job_id,) = submit(db)
    (claim,) = hand.claim(job_id)
    hand.lose()
    (claim,) = hand.claim(job_id)
    hand.fail(claim, retry_after_s=0.0)
    (claim,) = hand.claim(job_id)
    hand.start(claim)
    hand.finish(claim)
    trail = "submitted claimed retry claimed retry claimed running done"
    assert history(db, job_id) == [f"job.{event}" for event in trail.split()]
    assert isinstance(claim, Claim)
    assert claim.attempt == 3
    assert db.read(lambda conn: nodes.dead_owners(conn, 10)) == []
