"""Why a job waits, by the database: what is said is what publisher and claim would do."""

from datetime import timedelta

import pytest
from sqlalchemy import insert, update

from orchestrator.errors import JobNotFound
from orchestrator.explanation import Why, explain
from orchestrator.leases import Terms
from orchestrator.policies import CapPolicy, PausePolicy, Scope
from orchestrator.pools import PoolSpec
from orchestrator.store import crews, explanation, outbox, paging, policies, pools, schema
from orchestrator.store.claim import Claim, NotClaimed
from tests.conftest import empty
from tests.factories import STALE_S, gpu, hire, many_jobs, now, rows_read, set_job, submit

TERMS = Terms(STALE_S)


def why(db, job_id):
    def look(conn):
        return explanation.look(conn, job_id, policies.read_book(conn), TERMS)

    facts, _ = db.read(look)
    return explain(facts)


def test_an_unknown_job_is_not_found(db):
    with pytest.raises(JobNotFound):
        why(db, "nobody")


def test_where_nobody_serves_the_pool_and_the_drained_nodes_say_why(db):
    (job_id,) = submit(db)
    hire(db, node="n1").beat()
    db.write(lambda conn: crews.drain_nodes(conn, ["n1"], 0.0))
    db.write(lambda conn: conn.execute(schema.workers.update().values(status="stopped")))
    assert "drained: n1" in why(db, job_id).message
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="chat")))
    reason = {"status_reason": "no node has a handler"}
    db.write(lambda conn: conn.execute(schema.worker_pools.update().values(reason)))
    (in_pool,) = submit(db, pool_id="chat")
    assert why(db, in_pool).message == "no live worker serves pool chat: no node has a handler"


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


def test_a_long_job_that_runs_says_how_long_jobs_take(db):
    brief, long, waits = submit(db, 3)
    hand = hire(db, slots=1)
    (claim,) = hand.claim(brief)
    hand.finish(claim)
    hand.claim(long)
    hand.beat(busy=1)
    assert why(db, waits).starts_in_s < 10
    set_job(db, long, claimed_at=now(db) - timedelta(seconds=40))
    assert 40 <= why(db, waits).starts_in_s < 50


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


@pytest.mark.parametrize("own_mb", [2000, None], ids=["its own need", "its handler's"])
def test_where_no_node_has_a_gpu_that_is_told_until_one_comes(db, own_mb):
    hand = hire(db)
    (job_id,) = submit(db, min_memory_mb=own_mb)
    assert hand.offer(job_id, memory_mb=2000) == {job_id: NotClaimed("needs 2000 MB; no GPU is known on node node-1")}
    told = why(db, job_id)
    assert (told.reason, told.lasts, told.starts_in_s) == (Why.NO_GPU_NODE, True, None)
    assert told.message.startswith("no node has a GPU: ")
    hire(db, gpu(), node="other", type="other")
    assert why(db, job_id).message.startswith("no node with a worker that could run it has a GPU: ")
    hire(db, gpu(uuid="here"), node="here")
    assert why(db, job_id).reason is not Why.NO_GPU_NODE


def test_what_troubles_all_workers_that_could_run_it_is_told(db):
    away, stranger = hire(db), hire(db, type="other", node="other")
    (job_id,) = submit(db)
    stranger.beat(trouble="what another says")
    assert why(db, job_id).reason is Why.IN_LINE
    away.beat(ready=4, trouble="cannot read jobs from Redis")
    assert why(db, job_id).message == "no worker that could run it is well: cannot read jobs from Redis"
    away.beat(trouble="needs 5 MB", blocked=True)
    assert why(db, job_id).reason is Why.IN_LINE, "memory comes by itself"
    away.beat(trouble="cannot read jobs from Redis")
    hire(db, node="well")
    assert why(db, job_id).reason is Why.IN_LINE


def test_what_was_announced_to_slots_that_do_not_read_it_is_told(db):
    hand = hire(db)
    (job_id,) = submit(db)
    db.write(lambda conn: outbox.take(conn, "default", 10))
    hand.beat(ready=4)
    assert why(db, job_id).reason is Why.NEXT
    set_job(db, job_id, published_at=now(db) - timedelta(seconds=40))
    assert why(db, job_id).reason is Why.UNREAD
    for cannot in (
        {"ready": 2, "busy": 2},
        {"ready": 4, "draining": True},
        {"ready": 4, "trouble": "?", "blocked": True},
    ):
        hand.beat(**cannot)
        assert why(db, job_id).reason is Why.NEXT, cannot
    hand.beat(ready=4)
    db.write(lambda conn: conn.execute(update(schema.workers).values(kind="http")))
    assert why(db, job_id).reason is Why.NEXT, "HTTP workers read no lane"


def test_what_no_node_could_ever_hold_is_told_until_one_comes_that_does(db):
    hire(db, gpu(0, total_mb=1000, uuid="small"), node="a")
    (one,), (many,) = submit(db, min_memory_mb=50_000), submit(db, min_memory_mb=100, gpu_count=2)
    assert {why(db, job_id).reason for job_id in (one, many)} == {Why.TOO_LARGE}
    assert "on node a" in why(db, one).message
    for n in range(2):
        hire(db, *(gpu(i, total_mb=90_000, uuid=f"large-{i}") for i in range(n + 1)), node="b", type="other")
    assert {why(db, job_id).reason for job_id in (one, many)} == {Why.NO_GPU}


@pytest.mark.parametrize("gpu_count", [1, 2])
@pytest.mark.parametrize("whose", ["pool", "handler"])
def test_a_need_that_its_pool_or_its_handler_has_is_too_large_as_well(db, whose, gpu_count):
    need_mb = 5000 if gpu_count == 1 else 500
    pool_mb = need_mb if whose == "pool" else None
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold", type="echo", min_memory_mb=pool_mb)))
    hand = hire(db, gpu(total_mb=1000), pool="gold")
    (job_id,) = submit(db, pool_id="gold", gpu_count=gpu_count)
    # Only workers know what a handler needs, until one was refused it.
    assert why(db, job_id).reason is (Why.TOO_LARGE if whose == "pool" else Why.IN_LINE)
    assert isinstance(hand.offer(job_id, memory_mb=need_mb)[job_id], NotClaimed)
    told = why(db, job_id)
    assert (told.reason, told.starts_in_s) == (Why.TOO_LARGE, None)
    assert told.message.startswith(f"needs {need_mb} MB")


def test_nodes_of_another_provider_may_yet_come(db):
    spec = PoolSpec(pool_id="gold", type="echo", min_memory_mb=5000)
    db.write(lambda conn: pools.create(conn, spec))
    db.write(lambda conn: conn.execute(update(schema.worker_pools).values(provider="external")))
    hire(db, gpu(total_mb=1000), pool="gold")
    (job_id,) = submit(db, pool_id="gold", min_memory_mb=5000)
    assert why(db, job_id).reason is Why.NO_GPU


def test_the_need_of_a_pool_that_has_room_or_is_of_another_type_stops_nothing(db):
    hire(db, gpu(total_mb=1000), pool="gold")
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold", type="echo", min_memory_mb=900)))
    first, small = submit(db, pool_id="gold"), submit(db, pool_id="gold", min_memory_mb=0)
    db.write(lambda conn: conn.execute(schema.gpus.update().values(leased_mb=900)))  # its model is loaded
    assert {why(db, job_id).reason for job_id in (*first, *small)} == {Why.IN_LINE}
    db.write(lambda conn: conn.execute(schema.worker_pools.update().values(type="other", min_memory_mb=5000)))
    assert why(db, *first).reason is Why.IN_LINE


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

    assert cost(maria_db, last) < 2000


def cost(db, job_id):
    with db.engine.connect() as connection:
        before = rows_read(connection)
        explanation.look(connection, job_id, policies.read_book(connection), TERMS)
        return rows_read(connection) - before


def collector(db, parts, running):
    """A task that needs so many others, of which these run still and the others are done."""
    state = {"status": lambda i: "running" if i in running else "done", "queued": None}
    many_jobs(db, parts, **state, task=lambda i: f"part-{i}", attempt=1, attempts=1)
    (job_id,) = submit(db)
    set_job(db, job_id, queued="blocked", blocked_on="tasks", waits_for=len(running), needs=parts)
    edges = [{"task_id": job_id, "position": i, "needs_id": f"many-{i:06}"} for i in range(parts)]
    db.write(lambda conn: conn.execute(insert(schema.task_edges), edges))
    return job_id


def test_of_very_many_tasks_it_looks_at_the_last(maria_db, monkeypatch):
    """They were made last, and so end last."""
    monkeypatch.setattr(paging, "WINDOW", 100)
    job_id = collector(maria_db, 3000, {2950, 2960})
    assert why(maria_db, job_id).message == "it waits for tasks: part-2950 (running), part-2960 (running)"
    assert cost(maria_db, job_id) < 1000


def test_what_nobody_looked_at_is_counted(db, monkeypatch):
    monkeypatch.setattr(paging, "WINDOW", 5)
    answer = why(db, collector(db, 12, {0, 1, 8}))
    assert (answer.reason, answer.message) == (Why.TASKS, "it waits for tasks: part-8 (running) and 2 more")
    empty(db)
    answer = why(db, collector(db, 12, {0, 1}))
    assert (answer.reason, answer.message) == (Why.TASKS, "it waits for 2 of the tasks that it needs")
