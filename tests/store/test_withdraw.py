"""Cancelling and deadlines: jobs that end by somebody else's will, and what their workers may still say."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from threading import Barrier

import pytest

from orchestrator import jobs as rules
from orchestrator.errors import JobEnded, JobNotFound, ResultNotFound
from orchestrator.jobs import ErrorKind, Status
from orchestrator.store import audit, job_reads, outbox, ownership, schema
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import End, Outcome, Start
from orchestrator.store.withdraw import cancel, expire_overdue, to_stop
from tests.factories import (
    active_leases,
    done,
    failed,
    gpu,
    hire,
    history,
    row,
    rows,
    set_job,
    status,
    submit,
    write_as,
)


def cancelled(db, job_id, actor="somebody"):
    return write_as(actor, db, lambda conn: cancel(conn, job_id))


def record_of(db, job_id):
    return db.read(lambda conn: job_reads.get(conn, job_id))


def last_event(db, job_id):
    return db.read(lambda conn: audit.of_job(conn, job_id))[-1]


def overdue(db, job_id):
    set_job(db, job_id, expires_at=utc_shift(-1.0), deadline_at=utc_shift(-1.0))


# --- cancel ---


@pytest.mark.parametrize("queued", ["ready", "announced", "delayed"])
def test_a_waiting_job_is_cancelled_at_once(db, queued):
    (job_id,) = submit(db, deadline_at="2999-01-01T00:00:00Z")
    set_job(db, job_id, queued=queued, not_before=utc_shift(60.0) if queued == "delayed" else None)
    assert cancelled(db, job_id, "me") is Status.CANCELLED
    job = row(db, job_id)
    assert (job.status, job.queued, job.not_before, job.expires_at) == ("cancelled", None, None, None)
    assert job.finished_at is not None and job.deadline_at is not None
    assert record_of(db, job_id)["stop_seconds"] == pytest.approx(0, abs=0.01)
    event = last_event(db, job_id)
    assert (event["event_type"], event["actor"]) == ("job.cancelled", "me")
    # Neither the publisher nor a worker that has its entry already gets it.
    assert db.write(lambda conn: outbox.take(conn, "default", 10)) == []
    assert hire(db).offer(job_id)[job_id] == NotClaimed("already cancelled")


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_a_job_that_is_owned_is_asked_to_stop_and_counts_until_it_has(db, state):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    if state == "running":
        hand.start(claim)
    assert cancelled(db, claim.job_id, "me") == state
    job = row(db, claim.job_id)
    assert (job.status, job.worker_id) == (state, hand.worker_id)
    assert job.cancel_requested_at is not None and job.finished_at is None
    assert len(active_leases(db)) == 1
    event = last_event(db, claim.job_id)
    assert (event["event_type"], event["actor"], event["attempt"]) == ("job.cancel_requested", "me", 1)
    assert record_of(db, claim.job_id)["stop_seconds"] is None


def test_asking_twice_is_one_request(db):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    waiting = submit(db)[0]
    for job_id in (claim.job_id, waiting):
        first = cancelled(db, job_id)
        before = row(db, job_id), history(db, job_id)
        assert cancelled(db, job_id) == first
        assert (row(db, job_id), history(db, job_id)) == before


@pytest.mark.parametrize("state", ["done", "skipped", "failed", "dead_letter"])
def test_a_job_that_ended_otherwise_is_not_cancelled(db, state):
    (job_id,) = submit(db)
    set_job(db, job_id, status=state)
    before = row(db, job_id), history(db, job_id)
    with pytest.raises(JobEnded, match=state):
        cancelled(db, job_id)
    assert (row(db, job_id), history(db, job_id)) == before


def test_a_job_that_nobody_knows_is_not_found(db):
    with pytest.raises(JobNotFound):
        cancelled(db, "nobody")


def test_a_cancel_whose_answer_was_lost_is_written_once(db, lose_commits):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    (waiting,) = submit(db)
    for job_id, event in ((waiting, "job.cancelled"), (claim.job_id, "job.cancel_requested")):
        lose_commits(1)
        cancelled(db, job_id)
        assert history(db, job_id).count(event) == 1


# --- what an attempt may say afterwards ---

ENDS = {
    "done": done,
    "failed": lambda claim: failed(claim, ErrorKind.PERMANENT),
    "failed for now": failed,
    "timed out": lambda claim: failed(claim, ErrorKind.TIMEOUT),
    "crashed": lambda claim: failed(claim, ErrorKind.WORKER_LOST),
    "skipped": lambda claim: End(claim.job_id, claim.attempt, Outcome.SKIPPED, error="no"),
    "handed back": lambda claim: End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error="bye"),
    "stopped": lambda claim: End(claim.job_id, claim.attempt, Outcome.CANCELLED),
}


def asked_to_stop(db, **fields):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000, **fields))
    hand.start(claim)
    cancelled(db, claim.job_id)
    set_job(db, claim.job_id, cancel_requested_at=utc_shift(-2.5))
    return hand, claim


@pytest.mark.parametrize("how", ENDS)
def test_however_a_cancelled_attempt_ends_its_job_is_cancelled(db, how):
    """INV-11."""
    hand, claim = asked_to_stop(db, max_attempts=1)
    end = ENDS[how](claim)
    (settled,) = hand.record(ends=[end])
    assert settled.arrow is rules.STOP
    job, event = record_of(db, claim.job_id), last_event(db, claim.job_id)
    assert (job["status"], job["error_kind"], job["last_error"]) == ("cancelled", None, None)
    assert job["finished_at"] is not None
    assert event["event_type"] == "job.cancelled"
    assert event["details"]["ended_as"] == end.outcome.value
    # The event tells of the moment when the row was locked, the row of its last change.
    between_s = job["stop_seconds"] - event["details"]["stop_seconds"]
    assert event["details"]["stop_seconds"] > 2.4 and -0.001 <= between_s < 5
    with pytest.raises(ResultNotFound):
        db.read(lambda conn: job_reads.result(conn, claim.job_id))
    assert rows(db, schema.results) == rows(db, schema.dead_letters) == active_leases(db) == []
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]


@pytest.mark.parametrize("how", ENDS)
def test_such_an_end_whose_commit_answer_was_lost_is_written_once(db, lose_commits, how):
    hand, claim = asked_to_stop(db)
    lose_commits(1)
    (settled,) = hand.record(starts=[Start(claim.job_id, 1)], ends=[ENDS[how](claim)])
    assert settled.arrow is rules.STOP
    assert history(db, claim.job_id).count("job.cancelled") == 1
    assert [g.leased_mb for g in rows(db, schema.gpus)] == [0]


def test_one_cancelled_job_does_not_cost_its_batch_the_fast_way_s_results(db):
    hand = hire(db, gpu())
    claims = hand.claim(*submit(db, 3, min_memory_mb=100))
    cancelled(db, claims[1].job_id)
    settled = hand.finish(*claims)
    assert [item.arrow for item in settled] == [rules.FINISH, rules.STOP, rules.FINISH]
    assert {result.job_id for result in rows(db, schema.results)} == {claims[0].job_id, claims[2].job_id}
    assert active_leases(db) == []


def test_a_cancelled_job_of_a_lost_worker_is_cancelled_and_its_lease_stands(db):
    """Nobody has seen its process end: the memory is free when the lease is over."""
    hand, claim = asked_to_stop(db)
    (lost,) = hand.lose()
    assert lost.arrow is rules.STOP
    assert status(db, claim.job_id) == "cancelled"
    assert len(active_leases(db)) == 1
    # The worker lived and was only slow: what it says now changes nothing.
    before = row(db, claim.job_id), history(db, claim.job_id)
    hand.finish(claim)
    assert (row(db, claim.job_id), history(db, claim.job_id)) == before


def test_a_cancelled_stray_is_ended_not_handed_back(db):
    """Claimed, the answer lost, cancelled: nobody runs it, so nobody would ever report its end."""
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=100))
    cancelled(db, claim.job_id)
    assert hand.offer(claim.job_id) == {claim.job_id: NotClaimed("already cancelled")}
    assert status(db, claim.job_id) == "cancelled"
    assert active_leases(db) == []


def test_an_attempt_that_was_asked_to_stop_owns_nothing_it_could_still_finish(db):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    owns = [db.read(lambda conn, n=n: ownership.owns(conn, claim.job_id, n, hand.worker_id)) for n in (0, 1, 2)]
    assert owns == [False, True, False]
    cancelled(db, claim.job_id)
    assert not db.read(lambda conn: ownership.owns(conn, claim.job_id, 1, hand.worker_id))


def test_cancel_races_the_end_and_one_of_them_wins(maria_db):
    """F-49, INV-11: after a cancel that was accepted no result is stored, and an end that was first stays."""
    hand = hire(maria_db)
    claims = hand.claim(*submit(maria_db, 20))
    barrier = Barrier(2)

    def ends():
        barrier.wait(30)
        for claim in claims:
            hand.finish(claim)

    def cancels():
        barrier.wait(30)
        for claim in reversed(claims):
            with suppress(JobEnded):
                accepted.append((claim.job_id, cancelled(maria_db, claim.job_id)))

    accepted: list = []
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(ends), pool.submit(cancels)]:
            future.result(60)
    finished = {result.job_id for result in rows(maria_db, schema.results)}
    assert finished.isdisjoint(job_id for job_id, _ in accepted)
    assert len(finished) + len(accepted) == len(claims)
    assert {status(maria_db, job_id) for job_id in finished} <= {"done"}
    assert {status(maria_db, job_id) for job_id, _ in accepted} <= {"cancelled"}


# --- what a worker asks ---


def test_a_worker_learns_which_of_its_jobs_to_stop(db):
    hand, other = hire(db), hire(db)
    mine, theirs = hand.claim(*submit(db, 3)), other.claim(*submit(db))
    for claim in (mine[0], mine[2], *theirs):
        cancelled(db, claim.job_id)
    ids = [claim.job_id for claim in (*mine, *theirs)]
    found = db.read(lambda conn: to_stop(conn, [hand.worker_id], ids))
    assert sorted(found) == sorted((claim.job_id, 1) for claim in (mine[0], mine[2]))
    assert db.read(lambda conn: to_stop(conn, [hand.worker_id], ids[1:2])) == []
    assert db.read(lambda conn: to_stop(conn, [hand.worker_id], [])) == []


# --- deadlines ---


def expired(db, job_id):
    job = row(db, job_id)
    assert (job.status, job.error_kind, job.queued) == ("failed", "deadline_exceeded", None)
    assert "deadline" in job.last_error and job.finished_at is not None and job.expires_at is None
    assert history(db, job_id)[-1] == "job.expired"
    return True


def test_a_job_keeps_its_deadline_to_the_microsecond_the_database_knows(db):
    (job_id,) = submit(db, deadline_at="2999-12-31T23:59:59.5+01:00")
    job = row(db, job_id)
    assert job.deadline_at.isoformat() == "2999-12-31T22:59:59.500000" and job.expires_at == job.deadline_at
    assert record_of(db, job_id)["deadline_at"] == job.deadline_at and "expires_at" not in record_of(db, job_id)


@pytest.mark.parametrize("queued", ["ready", "announced", "delayed"])
def test_a_deadline_that_passes_in_the_queue_ends_the_job(db, queued):
    late, other = submit(db, 2, deadline_at="2999-01-01T00:00:00Z")
    set_job(db, late, queued=queued, not_before=utc_shift(60.0) if queued == "delayed" else None)
    overdue(db, late)
    assert [db.write(lambda conn: expire_overdue(conn, 10)) for _ in range(2)] == [1, 0]
    assert expired(db, late)
    assert row(db, late).attempt == 0
    assert status(db, other) == "pending"


def test_the_duty_takes_the_most_overdue_first_and_no_more_than_it_may(db):
    ids = submit(db, 5)
    for n, job_id in enumerate(ids):
        set_job(db, job_id, expires_at=utc_shift(-100.0 + n))
    assert db.write(lambda conn: expire_overdue(conn, 3)) == 3
    assert [status(db, job_id) for job_id in ids] == ["failed"] * 3 + ["pending"] * 2


def test_a_job_that_is_overdue_when_it_is_offered_never_starts(db):
    """The duty comes by every half second; a worker must not start what is too late meanwhile."""
    hand = hire(db, gpu())
    late, fresh = submit(db, 2, min_memory_mb=100)
    overdue(db, late)
    set_job(db, fresh, expires_at=utc_shift(60.0))
    answers = hand.offer(late, fresh)
    assert answers[late] == NotClaimed("deadline_exceeded")
    assert isinstance(answers[fresh], Claim)
    assert expired(db, late)
    assert len(active_leases(db)) == 1


def test_an_overdue_stray_is_ended_and_answered(db):
    """Claimed, the answer lost, its deadline passed: handed back, it must not be left without an answer."""
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=100))
    overdue(db, claim.job_id)
    assert hand.offer(claim.job_id) == {claim.job_id: NotClaimed("deadline_exceeded")}
    assert expired(db, claim.job_id)
    assert active_leases(db) == []


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_a_job_that_started_in_time_goes_on(db, state):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    if state == "running":
        hand.start(claim)
    overdue(db, claim.job_id)
    assert db.write(lambda conn: expire_overdue(conn, 10)) == 0
    assert status(db, claim.job_id) == state
    hand.finish(claim)
    assert (status(db, claim.job_id), row(db, claim.job_id).expires_at) == ("done", None)


@pytest.mark.parametrize("how", ["failed for now", "handed back"])
def test_a_retry_after_the_deadline_expires(db, how):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    overdue(db, claim.job_id)
    hand.record(ends=[ENDS[how](claim)])
    assert status(db, claim.job_id) == "pending"
    assert db.write(lambda conn: expire_overdue(conn, 10)) == 1
    assert expired(db, claim.job_id)
    assert row(db, claim.job_id).attempt == 1


def test_the_deadline_of_an_ended_job_is_no_longer_looked_for(db):
    """However many jobs with deadlines have ended, the index that is searched holds none of them."""
    hand = hire(db)
    ids = submit(db, 6, deadline_at="2999-01-01T00:00:00Z")
    claims = hand.claim(*ids[:4])
    hand.record(ends=[done(claims[0]), *(ENDS[how](claims[n]) for n, how in enumerate(("failed", "skipped"), 1))])
    cancelled(db, ids[3])
    hand.record(ends=[ENDS["stopped"](claims[3])])
    cancelled(db, ids[4])
    overdue(db, ids[5])
    db.write(lambda conn: expire_overdue(conn, 10))
    ends = {job.status for job in rows(db, schema.jobs)}
    assert ends == {"done", "failed", "skipped", "cancelled"}
    assert {job.expires_at for job in rows(db, schema.jobs)} == {None}


def test_two_leaders_at_once_expire_each_job_once(db):
    ids = submit(db, 30)
    for job_id in ids:
        overdue(db, job_id)
    barrier = Barrier(2)

    def run(_n):
        barrier.wait(30)
        return sum(db.write(lambda conn: expire_overdue(conn, 5)) for _ in range(6))

    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(run, range(2)))
    while left := db.write(lambda conn: expire_overdue(conn, 100)):  # rows that both skipped
        counts.append(left)
    assert sum(counts) == 30
    assert all(history(db, job_id) == ["job.submitted", "job.expired"] for job_id in ids)


def test_stop_seconds_are_those_between_the_request_and_the_end(db):
    hand, claim = asked_to_stop(db)
    hand.finish(claim)
    job = row(db, claim.job_id)
    took = job.finished_at - job.cancel_requested_at
    assert timedelta(seconds=2.4) < took
    assert record_of(db, claim.job_id)["stop_seconds"] == took.total_seconds()
    listed, _ = db.read(lambda conn: job_reads.page(conn, job_reads.Filter(), 10, None))
    assert listed[0]["stop_seconds"] == took.total_seconds()
