"""Claiming: each job once, with its lease, in one transaction."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import update

from orchestrator.errors import LeaseNotFound
from orchestrator.jobs import ErrorKind
from orchestrator.store import audit, gpus, leases, nodes, patience, schema, withdraw
from orchestrator.store import claim as claim_module
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.dialect import utc_shift
from orchestrator.store.submit import submit_jobs
from tests.factories import POLICY, active_leases, gpu, hire, history, new_job, now, row, rows, set_job, submit


def leased(db):
    return {gpu.gpu_uuid: gpu.leased_mb for gpu in rows(db, schema.gpus)}


def test_a_claim_gives_the_job_to_one_worker_under_a_new_attempt(db):
    hand = hire(db)
    (job_id,) = submit(db, payload={"n": 1})
    before = now(db)
    (claim,) = hand.claim(job_id)
    job = row(db, job_id)
    assert (claim.attempt, claim.payload, claim.type, claim.lease) == (1, '{"n":1}', "echo", None)
    assert (job.status, job.worker_id, job.owner_pool) == ("claimed", hand.worker_id, "default")
    assert (job.attempt, job.attempts) == (1, 1)
    assert before <= job.claimed_at <= now(db)


def test_a_duplicate_delivery_is_not_claimed_again(db):
    first, second = hire(db), hire(db)
    (job_id,) = submit(db)
    first.claim(job_id)
    assert second.offer(job_id) == {job_id: NotClaimed("already claimed")}
    assert row(db, job_id).worker_id == first.worker_id


def test_two_entries_of_one_job_in_one_batch_are_one_claim(db):
    hand = hire(db, gpu())
    (job_id,) = submit(db, min_memory_mb=1000)
    answers = hand.offer(job_id, job_id)
    assert isinstance(answers[job_id], Claim)
    assert history(db, job_id) == ["job.submitted", "job.claimed"]
    assert leased(db) == {"GPU-0": 1000}


def test_a_job_that_is_over_unknown_or_not_due_is_not_claimed(db):
    hand = hire(db)
    over, delayed = submit(db, 2)
    hand.finish(*hand.claim(over))
    set_job(db, delayed, queued="delayed")
    assert hand.offer(over, delayed, "nobody") == {
        over: NotClaimed("already done"),
        delayed: NotClaimed("already pending"),
        "nobody": NotClaimed("unknown_job", exists=False),
    }
    assert row(db, delayed).attempt == 0


def test_jobs_of_different_attempts_are_claimed_in_one_batch(db):
    hand = hire(db)
    ids = submit(db, 5)
    for n, job_id in enumerate(ids):
        set_job(db, job_id, attempt=n, attempts=n)
    assert [claim.attempt for claim in hand.claim(*ids)] == [1, 2, 3, 4, 5]


def pause_s(db, job_id):
    job = row(db, job_id)
    return (job.not_before - job.updated_at).total_seconds()


def test_a_worker_without_the_handler_puts_the_job_off_and_charges_nothing(db):
    hand = hire(db)
    (job_id,) = submit(db)
    assert hand.offer(job_id, memory_mb=None) == {job_id: NotClaimed("no_handler")}
    job = row(db, job_id)
    assert (job.status, job.attempts, job.published_at, job.queued) == ("pending", 0, None, "delayed")
    assert "no handler for type 'echo'" in job.wait_reason
    assert pause_s(db, job_id) == pytest.approx(claim_module.NO_HANDLER_S, abs=0.01)  # it is no other's either


def test_a_job_that_another_worker_of_the_lane_could_run_is_put_off_for_a_moment(db):
    """Whoever read of it was the wrong one; the pauses grow from one such miss to the next, to a second."""
    wrong, (job_id,) = hire(db, type="other"), submit(db)
    hire(db, pool="elsewhere")
    wrong.offer(job_id, memory_mb=None)
    assert pause_s(db, job_id) == pytest.approx(claim_module.NO_HANDLER_S, abs=0.01)
    right = hire(db)
    for since_s, least_s, most_s in ((None, 0.05, 0.05), (0.4, 0.4, 0.99), (40.0, 1.0, 1.0)):
        updated = since_s and now(db) - timedelta(seconds=since_s)
        set_job(db, job_id, queued="ready", not_before=None, updated_at=updated)
        wrong.offer(job_id, memory_mb=None)
        assert least_s - 0.01 <= pause_s(db, job_id) <= most_s + 0.01
    lost = update(schema.workers).where(schema.workers.c.worker_id == right.worker_id).values(status="lost")
    db.write(lambda conn: conn.execute(lost))
    set_job(db, job_id, queued="ready", not_before=None)
    wrong.offer(job_id, memory_mb=None)
    assert pause_s(db, job_id) == pytest.approx(claim_module.NO_HANDLER_S, abs=0.01)


# --- with a lease ---


def test_a_claim_brings_its_lease(db):
    hand = hire(db, gpu(0), gpu(1))
    (job_id,) = submit(db, min_memory_mb=1000, gpu_count=2)
    (claim,) = hand.claim(job_id)
    (lease,) = rows(db, schema.leases)
    assert leased(db) == {"GPU-0": 1000, "GPU-1": 1000}
    assert claim.lease.key == lease.token == row(db, job_id).lease_token
    assert (lease.job_id, lease.worker_id, lease.agent_name) == (job_id, hand.worker_id, "anonymous")
    (event,) = [e for e in db.read(lambda c: audit.of_job(c, job_id)) if e["event_type"] == "job.claimed"]
    assert event["details"] == {"mode": "gpu", "memory_mb": 1000, "gpus": ["GPU-0", "GPU-1"]}


def test_each_of_several_claims_gets_a_lease_of_its_own(db):
    hand = hire(db, gpu(0), gpu(1))
    ids = submit(db, 4, min_memory_mb=10_000)
    claims = hand.claim(*ids)
    keys = {claim.job_id: claim.lease.key for claim in claims}
    assert keys == {job.job_id: job.lease_token for job in rows(db, schema.jobs)}
    assert leased(db) == {"GPU-0": 20_000, "GPU-1": 20_000}


def test_the_handlers_need_counts_when_the_job_names_none_and_zero_means_none(db):
    hand = hire(db, gpu())
    plain, without = submit(db)[0], submit(db, min_memory_mb=0)[0]
    claims = hand.claim(plain, without, memory_mb=500)
    assert [claim.lease is not None for claim in claims] == [True, False]
    assert leased(db) == {"GPU-0": 500}


def test_a_denied_lease_puts_the_job_off_with_numbers_and_charges_nothing(db):
    hand = hire(db, gpu(total_mb=10_000, foreign_mb=4000))
    (job_id,) = submit(db, min_memory_mb=5500)
    answer = hand.offer(job_id)[job_id]
    assert isinstance(answer, NotClaimed)
    assert answer.reason == "needs 5500 MB; node-1/0: 5000 of 9000 MB free"
    job = row(db, job_id)
    assert (job.status, job.attempt, job.attempts) == ("pending", 0, 0)
    assert (job.wait_reason, job.queued, job.published_at) == (answer.reason, "delayed", None)
    assert rows(db, schema.leases) == []


def test_one_denied_lease_does_not_hold_up_the_others(db):
    hand = hire(db, gpu(total_mb=10_000))
    small, big = submit(db, min_memory_mb=1000)[0], submit(db, min_memory_mb=9_001)[0]
    answers = hand.offer(big, small)
    assert isinstance(answers[small], Claim)
    assert isinstance(answers[big], NotClaimed)
    assert leased(db) == {"GPU-0": 1000}


def test_a_job_that_allows_it_runs_on_the_cpu_when_no_gpu_has_room(db):
    hand = hire(db)
    (job_id,) = submit(db, min_memory_mb=1000, cpu_fallback=True)
    (claim,) = hand.claim(job_id)
    assert (claim.lease.mode, claim.lease.gpus) == ("cpu", ())


def test_a_worker_leases_only_on_its_own_node(db):
    hire(db, gpu(0, uuid="GPU-far"), node="far")
    hand = hire(db, node="near")
    (job_id,) = submit(db, min_memory_mb=1000)
    assert hand.offer(job_id) == {job_id: NotClaimed("needs 1000 MB; no GPU is known on node near")}
    assert leased(db) == {"GPU-far": 0}


@pytest.mark.parametrize("broken", ["_take_ownership", "job_event"])
def test_a_failure_between_lease_and_claim_leaves_neither(db, monkeypatch, broken):
    hand = hire(db, gpu())
    (job_id,) = submit(db, min_memory_mb=1000)

    def fail(*_args, **_kw):
        raise RuntimeError("in between")

    monkeypatch.setattr(claim_module, broken, fail)
    with pytest.raises(RuntimeError):
        hand.offer(job_id)
    assert leased(db) == {"GPU-0": 0}
    assert rows(db, schema.leases) == rows(db, schema.lease_gpus) == []
    assert (row(db, job_id).status, row(db, job_id).attempt) == ("pending", 0)
    assert history(db, job_id) == ["job.submitted"]


def test_the_secret_of_a_lease_is_nowhere_in_the_database(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    token = claim.lease.request.token
    everything = repr([rows(db, table) for table in schema.metadata.sorted_tables])
    assert token not in everything
    assert token not in repr(claim)


def test_no_token_opens_the_lease_of_a_job(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    for guess in (claim.lease.key, claim.lease.request.token):
        with pytest.raises(LeaseNotFound):
            db.write(lambda conn, guess=guess: leases.release(conn, guess))


# --- waiting ---


def waits_s(db, job_id):
    """Seconds from when it was put off until it is offered again."""
    job = row(db, job_id)
    return (job.not_before - job.updated_at).total_seconds()


def age_s(db, job_id):
    """How old it was when it was put off."""
    job = row(db, job_id)
    return (job.updated_at - job.created_at).total_seconds()


def grow_old(db, *job_ids, seconds=61.0):
    for job_id in job_ids:
        set_job(db, job_id, created_at=utc_shift(-seconds))


def reserved(db):
    return {gpu.gpu_uuid: gpu.reserved_for for gpu in rows(db, schema.gpus) if gpu.reserved_for}


def again(db, job_id):
    """As if its pause were over."""
    set_job(db, job_id, queued="ready", not_before=None)


def full(db, *gpus, node="node-1", held_mb=8000):
    """A worker whose GPUs (9000 MB usable) are leased to jobs of one lease each."""
    hand = hire(db, *(gpus or (gpu(0, total_mb=10_000),)), node=node)
    return hand, hand.claim(*submit(db, len(gpus) or 1, min_memory_mb=held_mb))


def test_a_job_that_fits_on_another_node_is_offered_again_at_once(db):
    near, _ = full(db, node="near")
    hire(db, gpu(1, total_mb=10_000), node="far")
    (job_id,) = submit(db, min_memory_mb=5000)
    grow_old(db, job_id, seconds=1000.0)
    near.offer(job_id)
    assert waits_s(db, job_id) <= patience.ELSEWHERE_S * 1.2
    assert reserved(db) == {}


@pytest.mark.parametrize("why", ["another lane", "dead", "full", "stale"])
def test_a_node_that_cannot_take_the_job_now_is_no_reason_for_haste(db, why):
    near, _ = full(db, node="near")
    far = hire(db, gpu(1, total_mb=10_000), node="far", pool="other" if why == "another lane" else "default")
    (job_id,) = submit(db, min_memory_mb=5000)
    grow_old(db, job_id, seconds=50.0)
    if why == "dead":
        far.go_silent()
        assert db.write(lambda conn: nodes.declare_lost(conn, 60.0, 10))
    if why == "full":
        far.sees(gpu(1, total_mb=10_000, foreign_mb=5000))
    if why == "stale":
        old = update(schema.gpus).where(schema.gpus.c.gpu_uuid == "GPU-1").values(sampled_at=utc_shift(-100.0))
        db.write(lambda conn: conn.execute(old))
    near.offer(job_id)
    assert waits_s(db, job_id) > 3.0  # a tenth of its age, more or less


def test_the_longer_a_job_has_waited_the_longer_it_waits_until_a_limit(db):
    hand, _ = full(db)
    hand.terms = replace(hand.terms, starvation_s=1e9)
    young, grown, old = (submit(db, min_memory_mb=5000)[0] for _ in range(3))
    for job_id, seconds in ((young, 0.0), (grown, 100.0), (old, 100_000.0)):
        grow_old(db, job_id, seconds=seconds)
        hand.offer(job_id)
    assert waits_s(db, young) <= 1.2
    assert 7 < waits_s(db, grown) <= age_s(db, grown) * 0.12
    assert 20 < waits_s(db, old) <= patience.MAX_PATIENCE_S * 1.2


def test_a_job_that_is_too_large_for_every_gpu_waits_longest_and_reserves_nothing(db):
    hand, _ = full(db)
    (job_id,) = submit(db, min_memory_mb=9001)
    grow_old(db, job_id)
    hand.offer(job_id)
    assert waits_s(db, job_id) > 40
    assert reserved(db) == {}


# --- starving ---


def test_a_job_that_starves_gets_the_next_room(db):
    hand, (holder,) = full(db)
    big, small = submit(db, min_memory_mb=5000)[0], submit(db, min_memory_mb=500)[0]
    grow_old(db, big)
    answer = hand.offer(big)[big]
    assert isinstance(answer, NotClaimed)
    assert reserved(db) == {"GPU-0": big}
    assert waits_s(db, big) <= patience.RESERVED_RETRY_S * 1.2
    assert "reserved for another request" in hand.offer(small)[small].reason  # though it would fit
    hand.finish(holder)
    again(db, small)
    assert isinstance(hand.offer(small)[small], NotClaimed)
    again(db, big)
    assert isinstance(hand.offer(big)[big], Claim)
    assert reserved(db) == {}
    again(db, small)
    assert isinstance(hand.offer(small)[small], Claim)


def test_a_job_that_has_not_waited_long_enough_reserves_nothing(db):
    hand, _ = full(db)
    (big,) = submit(db, min_memory_mb=5000)
    grow_old(db, big, seconds=30.0)
    hand.offer(big)
    assert reserved(db) == {}


def test_a_reservation_goes_on_while_its_job_waits_and_ends_when_it_vanishes(db):
    hand, _ = full(db)
    big, small = submit(db, min_memory_mb=5000)[0], submit(db, min_memory_mb=500)[0]
    grow_old(db, big)
    hand.offer(big)
    db.write(lambda conn: conn.execute(update(schema.gpus).values(reserved_until=utc_shift(1.0))))
    again(db, big)
    hand.offer(big)
    left_s = (rows(db, schema.gpus)[0].reserved_until - now(db)).total_seconds()
    assert 10 < left_s <= patience.RESERVED_S
    db.write(lambda conn: withdraw.cancel(conn, big))
    db.write(lambda conn: conn.execute(update(schema.gpus).values(reserved_until=utc_shift(-0.1))))
    assert isinstance(hand.offer(small)[small], Claim)


def test_the_second_that_starves_does_not_take_the_reservation_of_the_first(db):
    hand, _ = full(db)
    first, second = submit(db, 2, min_memory_mb=5000)
    grow_old(db, first, second)
    hand.offer(first)
    hand.offer(second)
    assert reserved(db) == {"GPU-0": first}
    assert waits_s(db, second) > 4  # with everybody else


def test_a_job_reserves_on_one_node_only_and_every_worker_keeps_it_so(db):
    near, _ = full(db, gpu(0, total_mb=10_000), node="near")
    far, _ = full(db, gpu(1, total_mb=10_000), node="far")
    (big,) = submit(db, min_memory_mb=5000)
    grow_old(db, big, seconds=1000.0)
    near.offer(big)
    assert reserved(db) == {"GPU-0": big}
    mine = update(schema.gpus).where(schema.gpus.c.gpu_uuid == "GPU-0")
    db.write(lambda conn: conn.execute(mine.values(reserved_until=utc_shift(9.0))))
    again(db, big)
    far.offer(big)
    assert reserved(db) == {"GPU-0": big}
    (kept,) = [gpu for gpu in rows(db, schema.gpus) if gpu.gpu_uuid == "GPU-0"]
    assert (kept.reserved_until - now(db)).total_seconds() > 10
    assert waits_s(db, big) <= patience.RESERVED_RETRY_S * 1.2


@pytest.mark.parametrize("why", ["lost", "quarantined", "stale", "foreign", "nobody serves it"])
def test_a_reservation_that_became_useless_is_made_elsewhere(db, why):
    near, _ = full(db, gpu(0, total_mb=10_000), node="near")
    far, _ = full(db, gpu(1, total_mb=10_000), node="far")
    (big,) = submit(db, min_memory_mb=5000)
    grow_old(db, big)
    near.offer(big)
    assert reserved(db) == {"GPU-0": big}
    values: Any = {
        "lost": {"health": "lost"},
        "quarantined": {"quarantined_at": utc_shift(0.0)},
        "stale": {"sampled_at": utc_shift(-100.0)},
        "foreign": {"foreign_mb": 5000},
        "nobody serves it": {},
    }[why]
    if values:
        mine = update(schema.gpus).where(schema.gpus.c.gpu_uuid == "GPU-0")
        db.write(lambda conn: conn.execute(mine.values(values)))
    else:
        db.write(lambda conn: nodes.deregister(conn, near.worker))
    again(db, big)
    far.offer(big)
    assert reserved(db)["GPU-1"] == big
    assert waits_s(db, big) <= patience.RESERVED_RETRY_S * 1.2


def test_half_a_reservation_is_completed(db):
    """Another had one of the two GPUs when they were to be reserved."""
    hand, _ = full(db, gpu(0, total_mb=10_000), gpu(1, total_mb=10_000))
    (big,) = submit(db, min_memory_mb=5000, gpu_count=2)
    grow_old(db, big)
    db.write(lambda conn: gpus.reserve(conn, ["GPU-0"], big, 15.0))
    hand.offer(big)
    assert reserved(db) == {"GPU-0": big, "GPU-1": big}


def test_a_gpu_that_strangers_fill_is_not_reserved(db):
    hand = hire(db, gpu(0, total_mb=10_000, foreign_mb=5000), gpu(1, total_mb=10_000))
    hand.claim(*submit(db, min_memory_mb=8000))
    (big,) = submit(db, min_memory_mb=5000)
    grow_old(db, big)
    hand.offer(big)
    assert reserved(db) == {"GPU-1": big}


# --- lost answers ---


def test_a_claim_whose_answer_was_lost_is_handed_back_and_claimed_anew_with_its_lease(db, lose_commits):
    hand = hire(db, gpu())
    (job_id,) = submit(db, min_memory_mb=1000)
    lose_commits(1)
    (claim,) = hand.claim(job_id)
    job = row(db, job_id)
    assert (claim.attempt, job.attempt, job.attempts) == (2, 2, 1)
    assert job.lease_token == claim.lease.key
    assert leased(db) == {"GPU-0": 1000}
    assert len(active_leases(db)) == 1
    assert history(db, job_id) == ["job.submitted", "job.claimed", "job.handed_back", "job.claimed"]


def test_a_job_the_worker_holds_is_no_stray(db):
    hand = hire(db)
    (job_id,) = submit(db)
    (claim,) = hand.claim(job_id)
    assert hand.offer(job_id, held={job_id}) == {job_id: NotClaimed("already claimed")}
    assert row(db, job_id).attempt == claim.attempt


def test_a_running_job_is_no_stray(db):
    hand = hire(db)
    (claim,) = hand.claim(*submit(db))
    hand.start(claim)
    assert hand.offer(claim.job_id) == {claim.job_id: NotClaimed("already running")}


# --- races ---


def test_sixteen_threads_claim_each_of_500_jobs_exactly_once(db, db_url, open_database):
    ids, threads = submit(db, 500), 16
    others = [db, open_database(db_url)]
    hands = [hire(others[n % 2]) for n in range(threads)]
    barrier = Barrier(threads)

    def race(n):
        """Every thread is offered every job, in chunks, each from another place on."""
        mine, start = [], 31 * n
        order = ids[start:] + ids[:start]
        barrier.wait(30)
        for at in range(0, 500, 50):
            answers = hands[n].offer(*order[at : at + 50])
            mine += [(c.job_id, c.attempt) for c in answers.values() if isinstance(c, Claim)]
        return mine

    with ThreadPoolExecutor(threads) as pool:
        claimed = [claim for mine in pool.map(race, range(threads)) for claim in mine]
    assert sorted(claimed) == sorted((job_id, 1) for job_id in ids)
    assert {job.attempts for job in rows(db, schema.jobs)} == {1}
    events = [e.event_type for e in rows(db, schema.audit)]
    assert events.count("job.claimed") == 500


def test_attempts_only_grow(db):
    """INV-3, over every way back to pending."""
    hand, seen = hire(db), []
    submit_jobs(db, [new_job(job_id="j", max_attempts=100)], POLICY)
    ways = [
        hand.hand_back,
        lambda claim: hand.fail(claim, retry_after_s=0.0),
        lambda claim: hand.fail(claim, ErrorKind.WORKER_LOST),
        hand.hand_back,
    ]
    for back in ways:
        (claim,) = hand.claim("j")
        seen.append((claim.attempt, row(db, "j").attempts))
        back(claim)
    assert seen == [(1, 1), (2, 1), (3, 2), (4, 3)]
