"""Claiming: each job once, with its lease, in one transaction."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from orchestrator.errors import LeaseNotFound
from orchestrator.jobs import ErrorKind
from orchestrator.store import audit, leases, schema
from orchestrator.store import claim as claim_module
from orchestrator.store.claim import Claim, NotClaimed
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


def test_a_worker_without_the_handler_puts_the_job_off_and_charges_nothing(db):
    hand = hire(db)
    (job_id,) = submit(db)
    assert hand.offer(job_id, memory_mb=None) == {job_id: NotClaimed("no_handler")}
    job = row(db, job_id)
    assert (job.status, job.attempts, job.published_at, job.queued) == ("pending", 0, None, "delayed")
    assert "no handler for type 'echo'" in job.wait_reason
    assert job.not_before > now(db)


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
    assert hand.offer(job_id) == {job_id: NotClaimed("no GPU is known on node near")}
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
