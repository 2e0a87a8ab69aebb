"""Jobs that share one call share one lease, are claimed by one transaction, and end each by itself."""

from typing import Any

import pytest

from orchestrator.jobs import BURY, FINISH, HAND_BACK, RETRY, STOP, ErrorKind
from orchestrator.leases import Remains, ResidentSlot
from orchestrator.store import audit, schema, withdraw
from orchestrator.store.claim import NO_SLOT, Claim
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import End, Left, Outcome, never_started
from tests.factories import active_leases, done, failed, gpu, hire, history, row, rows, set_job, submit

SHARED = Left(Remains.SHARED)


def claimed(answers):
    return [answer for answer in answers.values() if isinstance(answer, Claim)]


def batches(answers):
    found: dict[str, set[str]] = {}
    for claim in claimed(answers):
        found.setdefault(claim.batch, set()).add(claim.job_id)
    return sorted(found.values(), key=len, reverse=True)


def sharing(claim, end):
    return end._replace(left=SHARED) if claim.shares else end


def leased_mb(db):
    return {card.gpu_uuid: card.leased_mb for card in rows(db, schema.gpus)}


def warm_model(db, hand, memory_mb=4000):
    """A model that its slot keeps, under a lease of its own."""
    (claim,) = hand.claim(*submit(db, min_memory_mb=memory_mb))
    hand.record(ends=[done(claim)._replace(left=Left(Remains.MODEL, "w#1", "model:w#1:x", "echo"))])
    return ResidentSlot("model:w#1:x", "echo", None, memory_mb, claim.lease.gpus)


# --- who runs with whom ---


def test_a_batch_has_one_lease_for_its_largest_need(db):
    hand = hire(db, gpu())
    ids = [*submit(db, 3, min_memory_mb=1000), *submit(db, min_memory_mb=5000), *submit(db, 3, min_memory_mb=2000)]
    answers = hand.offer(*ids, batch=32, blank=1)
    assert batches(answers) == [set(ids)]
    (lease,) = active_leases(db)
    assert (lease.memory_mb, lease.job_id) == (5000, ids[3])
    assert {row(db, job_id).lease_token for job_id in ids} == {lease.token}
    assert leased_mb(db) == {"GPU-0": 5000}
    assert [claim.shares for claim in claimed(answers)].count(False) == 1
    claim_event = db.read(lambda conn: audit.of_job(conn, ids[0]))[-1]
    assert (claim_event["details"]["batch"], claim_event["details"]["batch_size"]) == (ids[3], 7)


@pytest.mark.parametrize("fields", [{"model_id": "other"}, {"gpu_count": 2}, {"cpu_fallback": True}, {"type": "two"}])
def test_jobs_that_differ_in_where_they_can_run_do_not_share(db, fields):
    hand = hire(db, gpu(0), gpu(1))
    ids, others = submit(db, 3, min_memory_mb=100), submit(db, 2, **({"min_memory_mb": 100} | fields))
    assert batches(hand.offer(*ids, *others, batch=32, blank=2)) == [set(ids), set(others)]


def test_jobs_with_and_without_a_lease_do_not_share(db):
    hand = hire(db, gpu())
    ids, others = submit(db, 3, min_memory_mb=100), submit(db, 2)
    assert batches(hand.offer(*ids, *others, batch=32, blank=2)) == [set(ids), set(others)]


def test_a_batch_is_full_before_the_next_begins(db):
    ids = submit(db, 10)
    assert [len(one) for one in batches(hire(db).offer(*ids, batch=4, blank=4))] == [4, 4, 2]


def test_more_batches_than_slots_go_back_at_once_and_come_first_the_next_time(db):
    """Jobs for one model do not keep out those for another, however many there are."""
    hand = hire(db)
    first = [submit(db, job_id=f"z-{n}", model_id="a")[0] for n in range(3)]
    second = [submit(db, job_id=f"a-{n}", model_id="b")[0] for n in range(2)]
    set_job(db, second[0], queued="announced", published_at=utc_shift(-1.0))
    answers: Any = hand.offer(*second, *first, batch=32, blank=1)
    assert batches(answers) == [set(first)]  # by rank, whatever the order of delivery and of keys
    assert [(answers[job_id].reason, answers[job_id].put_back) for job_id in second] == [(NO_SLOT, True)] * 2
    assert (row(db, second[0]).queued, row(db, second[0]).published_at) == ("ready", None)
    later = [submit(db, job_id=f"0-{n}", model_id="a")[0] for n in range(3)]
    assert batches(hand.offer(*later, *second, batch=32, blank=1)) == [set(second)]


def test_a_job_that_was_cancelled_or_is_overdue_is_not_part_of_it(db):
    ids = submit(db, 4)
    db.write(lambda conn: withdraw.cancel(conn, ids[0]))
    set_job(db, ids[1], expires_at=utc_shift(-1.0))
    answers = hire(db).offer(*ids, batch=32, blank=1)
    assert batches(answers) == [{ids[2], ids[3]}]
    assert row(db, ids[1]).error_kind == "deadline_exceeded"


@pytest.mark.parametrize("past", [{"crashes": 1}, *({"error_kind": kind} for kind in ("batch", "timeout", "gpu_lost"))])
def test_a_suspect_runs_alone(db, past):
    ids = submit(db, 4)
    set_job(db, ids[1], **past)
    answers: Any = hire(db).offer(*ids, batch=32, blank=2)
    assert batches(answers) == [{ids[0], ids[2], ids[3]}, {ids[1]}]
    assert answers[ids[1]].batch == ids[1]


def test_one_that_only_failed_may_share_again(db):
    ids = submit(db, 3)
    set_job(db, ids[1], error_kind="transient", attempts=0)
    assert batches(hire(db).offer(*ids, batch=32, blank=1)) == [set(ids)]


# --- room ---


def test_a_batch_without_room_waits_and_its_smaller_jobs_may_go_first(db):
    hand = hire(db, gpu(total_mb=10_000))
    small, large = submit(db, 3, min_memory_mb=1000), submit(db, min_memory_mb=9500)
    answers: Any = hand.offer(*small, *large, batch=32, blank=1)
    assert claimed(answers) == []
    assert row(db, large[0]).queued == "delayed" and "9500" in row(db, large[0]).wait_reason
    assert all(answers[job_id].put_back for job_id in small)
    assert batches(hand.offer(*small, batch=32, blank=1)) == [set(small)]


def test_a_warm_model_is_occupied_once_for_all(db):
    hand = hire(db, gpu())
    slot = warm_model(db, hand)
    ids = submit(db, 5, min_memory_mb=1000)
    answers = hand.offer(*ids, batch=32, warm=[slot], blank=0)
    assert batches(answers) == [set(ids)]
    assert {row(db, job_id).lease_token for job_id in ids} == {slot.key}
    assert leased_mb(db) == {"GPU-0": 4000}


# --- each ends by itself ---


def test_the_lease_ends_with_the_last_of_them(db):
    hand = hire(db, gpu())
    claims = claimed(hand.offer(*submit(db, 4, min_memory_mb=1000), batch=32, blank=1))
    bearer = next(claim for claim in claims if not claim.shares)
    for claim in [claim for claim in claims if claim.shares]:
        hand.record(ends=[sharing(claim, done(claim))])
        assert leased_mb(db) == {"GPU-0": 1000}
    hand.record(ends=[done(bearer)])
    assert (leased_mb(db), active_leases(db)) == ({"GPU-0": 0}, [])


def test_each_ends_as_it_did_itself(db):
    hand = hire(db, gpu())
    ids = submit(db, 5, min_memory_mb=1000)
    claims = claimed(hand.offer(*ids, batch=32, blank=1))
    db.write(lambda conn: withdraw.cancel(conn, claims[1].job_id))
    ends = [
        done(claims[0]),
        done(claims[1]),
        failed(claims[2], ErrorKind.PERMANENT),
        failed(claims[3], ErrorKind.TIMEOUT),
        End(claims[4].job_id, claims[4].attempt, Outcome.HANDED_BACK, error="a neighbour overran"),
    ]
    settled = hand.record(ends=[sharing(claim, end) for claim, end in zip(claims, ends, strict=True)])
    assert [item.arrow and item.arrow.event for item in settled] == [
        "job.done",
        "job.cancelled",
        "job.failed",
        "job.retry",
        "job.handed_back",
    ]
    assert leased_mb(db) == {"GPU-0": 0}
    assert [row(db, claim.job_id).attempts for claim in claims] == [1, 1, 1, 1, 0]


def test_a_warm_model_goes_on_when_its_batch_never_started(db):
    """Only who occupied the lease gives it up: a neighbour may come late, when others run under it."""
    hand = hire(db, gpu())
    slot = warm_model(db, hand)
    claims = claimed(hand.offer(*submit(db, 3, min_memory_mb=1000), batch=32, warm=[slot], blank=0))
    bearer = next(claim for claim in claims if not claim.shares)
    late = next(claim for claim in claims if claim.shares)
    hand.record(ends=[never_started(bearer.job_id, 1, "no slot", slot.key)])
    (again,) = claimed(hand.offer(*submit(db, min_memory_mb=1000), batch=32, warm=[slot], blank=0))
    hand.record(ends=[never_started(late.job_id, 1, "no slot", slot.key)])
    (lease,) = active_leases(db)
    assert (lease.token, lease.job_id) == (slot.key, again.job_id)


# --- nobody knows who did it ---


def test_a_batch_that_failed_as_a_whole_charges_nobody_and_its_jobs_run_alone(db):
    hand = hire(db)
    ids = submit(db, 3, max_attempts=1)
    for claim in claimed(hand.offer(*ids, batch=32, blank=1)):
        end = End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error_kind=ErrorKind.BATCH, error="its batch died")
        assert hand.record(ends=[sharing(claim, end)])[0].arrow is HAND_BACK
    jobs = [row(db, job_id) for job_id in ids]
    assert {(job.status, job.queued, job.attempts, job.crashes) for job in jobs} == {("pending", "ready", 0, 0)}
    assert {(job.error_kind, job.last_error) for job in jobs} == {("batch", "its batch died")}
    assert [len(one) for one in batches(hand.offer(*ids, batch=32, blank=3))] == [1, 1, 1]


def test_a_job_that_kills_its_process_ends_after_one_batch_and_two_runs_alone(db):
    hand = hire(db)
    (poison,) = submit(db)
    arrows: list[Any] = []
    for outcome, kind in (
        (Outcome.HANDED_BACK, ErrorKind.BATCH),
        (Outcome.FAILED, ErrorKind.WORKER_LOST),
        (Outcome.FAILED, ErrorKind.WORKER_LOST),
    ):
        neighbours = submit(db, 2)
        answers = hand.offer(poison, *neighbours, batch=32, blank=2)
        assert [len(one) for one in batches(answers)] == ([2, 1] if arrows else [3])
        end = End(poison, len(arrows) + 1, outcome, error_kind=kind)
        arrows.append(hand.record(ends=[end])[0].arrow)
    assert arrows == [HAND_BACK, RETRY, BURY]
    assert history(db, poison).count("job.claimed") == 3


def test_neighbours_of_a_worker_that_died_twice_are_not_buried(db):
    """The leader charges all whom it finds; from then on each runs alone."""
    hand = hire(db)
    ids = submit(db, 3)
    for claim in claimed(hand.offer(*ids, batch=32, blank=1)):
        assert hand.fail(claim, ErrorKind.WORKER_LOST).arrow is RETRY
    again = hand.offer(*ids, batch=32, blank=3)
    assert [len(one) for one in batches(again)] == [1, 1, 1]
    assert [item.arrow for item in hand.finish(*claimed(again))] == [FINISH] * 3


def test_a_cancelled_job_of_a_batch_ends_as_cancelled_whatever_happened_to_the_rest(db):
    hand = hire(db)
    ids = submit(db, 2)
    claims = claimed(hand.offer(*ids, batch=32, blank=1))
    db.write(lambda conn: withdraw.cancel(conn, ids[0]))
    ends = [
        End(claim.job_id, claim.attempt, Outcome.HANDED_BACK, error_kind=ErrorKind.BATCH, error="died")
        for claim in claims
    ]
    assert [item.arrow for item in hand.record(ends=ends)] == [STOP, HAND_BACK]
