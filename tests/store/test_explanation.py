"""Why a job waits, by the database: what is said is what publisher and claim would do."""

import pytest
from sqlalchemy import text

from orchestrator.errors import JobNotFound
from orchestrator.explanation import Why, explain
from orchestrator.leases import Terms
from orchestrator.policies import CapPolicy, PausePolicy, Scope
from orchestrator.pools import PoolSpec
from orchestrator.store import explanation, outbox, policies, pools
from orchestrator.store.claim import Claim, NotClaimed
from tests.factories import STALE_S, gpu, hire, many_jobs, set_job, submit

TERMS = Terms(STALE_S)


def why(db, job_id):
    def look(conn):
        return explanation.look(conn, job_id, policies.read_book(conn), TERMS)

    facts, _ = db.read(look)
    return explain(facts)


def test_an_unknown_job_is_not_found(db):
    with pytest.raises(JobNotFound):
        why(db, "nobody")


def test_from_submit_to_end(db):
    first, second = submit(db, 2)
    assert why(db, second).reason is Why.NO_WORKER
    hand = hire(db)
    assert (why(db, second).reason, why(db, second).position) == (Why.IN_LINE, 2)
    db.write(lambda conn: outbox.take(conn, "default", 10))
    assert (why(db, first).reason, why(db, first).position) == (Why.NEXT, 1)
    assert why(db, second).position == 2
    (claim,) = hand.claim(first)
    assert why(db, first).reason is Why.RUNNING and hand.worker.worker_id in why(db, first).message
    hand.finish(claim)
    assert why(db, first).reason is Why.ENDED
    assert why(db, second).starts_in_s is not None


def test_memory_is_told_as_the_claim_tells_it(db):
    hand = hire(db, gpu(total_mb=1000))
    hand.claim(*submit(db, min_memory_mb=800))
    (waiting,) = submit(db, min_memory_mb=800)
    told = why(db, waiting)
    assert told.reason is Why.NO_GPU
    refused = hand.offer(waiting)[waiting]
    assert isinstance(refused, NotClaimed) and refused.reason == told.message
    assert why(db, waiting).reason is Why.NO_GPU


def test_room_on_a_node_whose_workers_cannot_run_it_does_not_count(db):
    hire(db, gpu(0, total_mb=1000, uuid="small"), node="a")
    hire(db, gpu(0, total_mb=90_000, uuid="large"), node="b", type="other")
    (waiting,) = submit(db, min_memory_mb=5000)
    assert why(db, waiting).reason is Why.NO_GPU


def test_a_job_that_is_free_to_go_can_be_claimed(db):
    hand = hire(db, gpu())
    (job_id,) = submit(db, min_memory_mb=100)
    assert why(db, job_id).reason is Why.IN_LINE
    (claim,) = hand.claim(job_id)
    assert isinstance(claim, Claim)


def test_a_closed_pool_a_pause_and_a_full_cap(db):
    hire(db, pool="gold")
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold", agent_name="a", desired_workers=1)))
    (job_id,) = submit(db, pool_id="gold", agent="a")
    assert why(db, job_id).reason is Why.IN_LINE
    db.write(lambda conn: policies.put(conn, Scope.CONCURRENCY, "agent:*", CapPolicy(max=0)))
    assert why(db, job_id).reason is Why.CAP_FULL
    db.write(lambda conn: policies.put(conn, Scope.PAUSE, "pool:gold", PausePolicy(reason="upgrade")))
    assert why(db, job_id).reason is Why.PAUSED and "upgrade" in why(db, job_id).message
    db.write(lambda conn: pools.drain(conn, "gold", 60.0))
    assert why(db, job_id).reason is Why.POOL_CLOSED


def test_a_long_line_is_counted_no_further_than_anybody_wants_to_know(db, monkeypatch):
    monkeypatch.setattr(explanation, "MOST_AHEAD", 20)
    hire(db)
    many_jobs(db, 50)
    (last,) = submit(db)
    set_job(db, last, rank=10**6)
    answer = why(db, last)
    assert answer.position == 21 and answer.message.startswith("at least 20")


def test_it_costs_the_same_whatever_waits(maria_db, monkeypatch):
    monkeypatch.setattr(explanation, "MOST_AHEAD", 100)
    hire(maria_db, gpu())
    many_jobs(maria_db, 5000)
    (last,) = submit(maria_db, min_memory_mb=100)
    set_job(maria_db, last, rank=10**6)

    def rows_read(conn):
        counters = text(
            "SELECT SUM(variable_value) FROM information_schema.session_status WHERE variable_name LIKE :of"
        )
        before = conn.execute(counters, {"of": "Handler_read%"}).scalar()
        explanation.look(conn, last, policies.read_book(conn), TERMS)
        return conn.execute(counters, {"of": "Handler_read%"}).scalar() - before

    assert maria_db.read(rows_read) < 2000
