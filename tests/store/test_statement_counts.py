"""How many statements and commits the hot paths cost: what makes batching worth it must not creep away."""

import pytest
from sqlalchemy import insert, update

from orchestrator.gpu import GpuProcess
from orchestrator.leases import Denied, LeaseRequest, Remains, ResidentSlot, Terms
from orchestrator.pools import PoolSpec
from orchestrator.store import crews, dead_letters, grants, outbox, pools, schema, withdraw
from orchestrator.store.claim import Claim
from orchestrator.store.dialect import utc_shift
from orchestrator.store.dispatch import Claiming, Fetch
from orchestrator.store.reports import Sign
from orchestrator.store.settle import Left
from orchestrator.store.submit import submit_jobs
from tests.factories import POLICY, active_leases, done, gpu, hire, is_sqlite, many_jobs, new_job, submit, traffic
from tests.fetchers import claimant, enlist


def statements(seen):
    return [statement for statement in seen.statements if not statement.startswith("BEGIN")]


def test_submitting_500_jobs(db):
    submit(db)
    batch = [new_job() for _ in range(500)]
    with traffic(db) as seen:
        submit_jobs(db, batch, POLICY)
    assert len(statements(seen)) <= 6, seen.statements
    assert seen.commits == 1


def test_a_look_at_20_pools(db):
    for number in range(20):
        spec = PoolSpec(pool_id=f"pool-{number}", type="echo")
        db.write(lambda conn, spec=spec: pools.create(conn, spec))
        submit(db, pool_id=f"pool-{number}")
    with traffic(db) as seen:
        assert all(view.in_demand for view in db.write(crews.look))
    assert len(statements(seen)) <= 4, seen.statements


@pytest.mark.parametrize("fields", [{}, {"deadline_at": "2999-01-01T00:00:00Z"}])
def test_claiming_16_jobs_without_leases(db, fields):
    hand, ids = hire(db), submit(db, 16, **fields)
    with traffic(db) as seen:
        hand.claim(*ids)
    assert len(statements(seen)) <= 5, seen.statements
    assert seen.commits == 1


def test_claiming_16_jobs_with_leases_does_not_cost_a_statement_for_each(db):
    hand, ids = hire(db, gpu(0), gpu(1)), submit(db, 16, min_memory_mb=100)
    with traffic(db) as seen:
        hand.claim(*ids)
    assert len(statements(seen)) <= 12, seen.statements
    assert seen.commits == 1


def test_recording_16_finished_jobs(db):
    hand = hire(db)
    claims = hand.claim(*submit(db, 16))
    with traffic(db) as seen:
        hand.record(ends=[done(claim) for claim in claims])
    assert len(statements(seen)) <= 6, seen.statements
    assert seen.commits == 1


def test_recording_16_finished_jobs_of_which_one_was_cancelled(db):
    """The short way finds it, is rolled back, and the long one needs a statement for it alone."""
    hand = hire(db)
    claims = hand.claim(*submit(db, 16))
    db.write(lambda conn: withdraw.cancel(conn, claims[3].job_id))
    with traffic(db) as seen:
        hand.record(ends=[done(claim) for claim in claims])
    assert len(statements(seen)) <= 8, seen.statements
    assert seen.commits == 1


def test_redriving_and_purging_100_dead_letters(db):
    many_jobs(db, 200, status="dead_letter", queued=None, attempt=3, attempts=3)
    ids = [f"many-{i:06}" for i in range(200)]
    letters = [{"job_id": job_id, "reason": "timeout", "attempts": 3} for job_id in ids]
    db.write(lambda conn: conn.execute(insert(schema.dead_letters), letters))
    with traffic(db) as redriven:
        removed = db.write(lambda conn: dead_letters.redrive(conn, ids[:100], 3, lambda _n: 0.0))
    with traffic(db) as purged:
        removed_too = db.write(lambda conn: dead_letters.purge(conn, ids[100:]))
    assert [len(removed.job_ids), len(removed_too.job_ids)] == [100, 100]
    assert len(statements(redriven)) <= 4, redriven.statements
    assert len(statements(purged)) <= 7, purged.statements


def test_an_idle_look_for_overdue_jobs_is_one_statement(db):
    submit(db, 3, deadline_at="2999-01-01T00:00:00Z")
    with traffic(db) as seen:
        assert db.write(lambda conn: withdraw.expire_overdue(conn, 500)) == 0
    assert len(statements(seen)) == 1, seen.statements


def test_publishing_100_jobs(db):
    submit(db, 100)
    with traffic(db) as seen:
        assert len(db.write(lambda conn: outbox.take(conn, "default", 100))) == 100
    assert len(statements(seen)) <= 3, seen.statements
    assert seen.commits == 1


def test_an_idle_publisher_costs_one_look(db):
    with traffic(db) as seen:
        db.write(lambda conn: outbox.take(conn, "default", 100))
    assert len(statements(seen)) == 1
    assert is_sqlite(db) or seen.commits == 1


def test_an_http_worker_claims_16_jobs(db):
    """The worker, what it owns, two looks, the lock, and then as any worker does."""
    remote, _ = enlist(db), submit(db, 20)
    with traffic(db) as seen:
        assert len(remote.fetch(16)) == 16
    assert len(statements(seen)) <= 5 + 4, seen.statements
    assert seen.commits == 1


def test_8_http_workers_that_claim_at_once_share_the_looks(db):
    remotes, _ = [enlist(db) for _ in range(8)], submit(db, 40)
    fetches = [Fetch(remote.worker_id, 2) for remote in remotes]
    with traffic(db) as seen:
        answers = db.write(Claiming(fetches, claimant))
    assert [len(answer) for answer in answers] == [2] * 8
    # The workers, what they own, two looks, the lock; each reads and takes its own; one audit; the lane's clock.
    assert len(statements(seen)) <= 5 + 8 * 2 + 2, seen.statements
    assert seen.commits == 1


def test_an_http_worker_reports_16_ends(db):
    remote, _ = enlist(db), submit(db, 16)
    claims = remote.fetch(16)
    with traffic(db) as seen:
        answers = remote.finish(*claims)
    assert {answer.status for answer in answers} == {"done"}
    assert len(statements(seen)) <= 6, seen.statements
    assert seen.commits == 1


def test_16_signs_of_jobs_that_run_are_two_looks(db):
    remote, _ = enlist(db), submit(db, 16)
    signs = [Sign(claim.job_id, claim.attempt) for claim in remote.fetch(16)]
    remote.report(*signs)
    with traffic(db) as seen:
        remote.report(*signs)
    assert len(statements(seen)) == 2, seen.statements


def many_gpus(db, hand, busy):
    marks = [f"{hand.worker_id}#{n}" for n in range(8)]
    processes = [(GpuProcess(n, 100, mark=marks[n]),) if busy else () for n in range(8)]
    return [gpu(n, used_mb=100, processes=processes[n]) for n in range(8)]


def node_is_due(db):
    """A node's heartbeat is written once a second: with the next of its workers', however long this test takes."""
    db.write(lambda conn: conn.execute(update(schema.nodes).values(last_heartbeat=utc_shift(-10.0))))


@pytest.mark.parametrize("resident", [(), ("model:a",)])
def test_a_sample_of_8_gpus_costs_as_much_as_one_of_a_single_gpu(db, resident):
    hand = hire(db, *[gpu(n) for n in range(8)])
    hand.claim(*submit(db, 8, min_memory_mb=20_000))
    node_is_due(db)
    with traffic(db) as seen:
        hand.sees(*many_gpus(db, hand, busy=True), busy=8, resident=resident)
    assert len([s for s in statements(seen) if s.startswith("INSERT INTO gpus")]) == 1
    # The worker: locked, written. Its leases: found, locked, extended, looked at. Its node: looked at, locked,
    # written. The sample: endings, foreign before, holders, the write; models to evict.
    assert len(statements(seen)) <= 9 + 5, seen.statements
    assert seen.commits == 1


def test_ending_8_leases_whose_processes_are_gone(db):
    hand = hire(db, *[gpu(n) for n in range(8)])
    claims = hand.claim(*submit(db, 8, min_memory_mb=20_000))
    hand.record(ends=[done(claim)._replace(left=Left(Remains.PROCESSES, "w#1")) for claim in claims])
    node_is_due(db)
    with traffic(db) as seen:
        hand.sees(*many_gpus(db, hand, busy=False))
    assert active_leases(db) == []
    # 9 more: the heartbeats and the sample; then one look, one UPDATE of leases, and one for each GPU.
    assert len(statements(seen)) <= 9 + 2 + 8, seen.statements


def test_making_room_looks_up_the_idle_models_once_a_batch(db):
    hand = hire(db, gpu(0, total_mb=10_000))
    hand.claim(*submit(db, min_memory_mb=9000))
    wishes = [LeaseRequest("a", 1000, 60.0) for _ in range(16)]
    with traffic(db) as seen:
        answers = db.write(lambda conn: grants.grant(conn, wishes, Terms(30.0)))
    assert all(isinstance(answer, Denied) for answer in answers)
    assert len(statements(seen)) <= 3, seen.statements  # the GPUs, the idle models, the time


def test_claiming_8_jobs_under_warm_models(db):
    hand = hire(db, gpu())
    claims = hand.claim(*submit(db, 8, min_memory_mb=100))
    kept = [(f"model:{n}", claim) for n, claim in enumerate(claims)]
    hand.record(ends=[done(claim)._replace(left=Left(Remains.MODEL, f"w#{key}", key, "echo")) for key, claim in kept])
    warm = [ResidentSlot(key, "echo", None, 100, claim.lease.gpus) for key, claim in kept]
    ids = submit(db, 8, min_memory_mb=100)
    with traffic(db) as seen:
        answers = hand.offer(*ids, warm=warm, blank=0)
    assert all(isinstance(answer, Claim) for answer in answers.values())
    # For each, the lease is occupied and the job moved under it; the look and the audit are shared.
    assert len(statements(seen)) <= 4 + 2 * 8, seen.statements


# --- batches: as much as one job ---


def in_batches(hand, ids, **given):
    answers = hand.offer(*ids, batch=32, **given)
    return [answer for answer in answers.values() if isinstance(answer, Claim)]


def test_claiming_and_ending_a_batch_of_32(db):
    hand = hire(db, gpu())
    ids = submit(db, 32, min_memory_mb=1000)
    with traffic(db) as claiming:
        claims = in_batches(hand, ids, blank=1)
    shared = [Left(Remains.SHARED) if claim.shares else Left() for claim in claims]
    with traffic(db) as ending:
        hand.record(ends=[done(claim)._replace(left=left) for claim, left in zip(claims, shared, strict=True)])
    assert len(claims) == 32 and active_leases(db) == []
    assert len(statements(claiming)) <= 8, claiming.statements
    assert len(statements(ending)) <= 7, ending.statements
    assert (claiming.commits, ending.commits) == (1, 1)


def test_a_batch_of_32_without_room_is_put_off_by_one_statement(db):
    hand = hire(db, gpu(total_mb=10_000))
    ids = submit(db, 32, min_memory_mb=9500)
    with traffic(db) as seen:
        assert in_batches(hand, ids, blank=1) == []
    assert len([s for s in statements(seen) if s.startswith("UPDATE")]) == 1, seen.statements


def test_claiming_a_batch_of_32_under_a_warm_model(db):
    hand = hire(db, gpu())
    (claim,) = hand.claim(*submit(db, min_memory_mb=1000))
    hand.record(ends=[done(claim)._replace(left=Left(Remains.MODEL, "w#1", "model:x", "echo"))])
    warm = [ResidentSlot("model:x", "echo", None, 1000, claim.lease.gpus)]
    ids = submit(db, 32, min_memory_mb=1000)
    with traffic(db) as seen:
        assert len(in_batches(hand, ids, warm=warm, blank=0)) == 32
    # The jobs, reservations, the lease, the jobs again, the audit.
    assert len(statements(seen)) <= 5, seen.statements


def test_putting_back_what_finds_no_slot_is_one_statement(db):
    hand = hire(db)
    ids = [job_id for n in range(8) for job_id in submit(db, 4, model_id=f"m{n}")]
    with traffic(db) as seen:
        assert len(in_batches(hand, ids, blank=1)) == 4
    assert len(statements(seen)) <= 4, seen.statements
