"""Pools that size themselves: up by what waits, down after their hold, for each other where GPUs are few."""

from typing import Any

import pytest
from sqlalchemy import update

from orchestrator.crews import Crew, PoolView
from orchestrator.leader import duties
from orchestrator.leader.autosize import by_backlog
from orchestrator.leader.context import DutyContext
from orchestrator.leader.term import borrow
from orchestrator.leases import Granted, LeaseRequest, Terms
from orchestrator.pools import PoolSpec, PoolState
from orchestrator.publisher import Publisher
from orchestrator.store import crews, grants, pools, residency, schema
from orchestrator.store.dialect import utc_shift
from orchestrator.stream.hub import Hub
from tests.factories import STALE_S, gpu, hire, rows, submit


@pytest.fixture
def context(db, settings, redis_server):
    redis_server.flush()
    given = settings(
        database_url=db.settings.database_url,
        redis_url=redis_server.url,
        gpu_stale_s=STALE_S,
        leader_ttl_s=60.0,  # the term of a test lasts longer than the test, however slow the machine
        resident_min_s=0.0,
        worker_timeout_s=30.0,
    )
    hub = Hub(given)
    yield DutyContext(borrow(db, given, "test"), hub, Publisher(db, hub, given), given)
    hub.close()


@pytest.fixture
def node(db):
    """A node with one GPU, whose supervisor runs pools."""
    hand = hire(db, gpu(0, 24_000))
    db.write(lambda conn: crews.take_node(conn, "node-1", "supervisor", ["echo"], 60.0))
    return hand


def create(db, pool_id="chat", **fields):
    given: dict[str, Any] = {"desired_workers": 1, "max_workers": 3, "hold_seconds": 60, "autosize": True} | fields
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id=pool_id, **given)))


def assigned(db, pool_id="chat"):
    return sum(row.workers for row in rows(db, schema.pool_assignments) if row.pool_id == pool_id)


def idle_for(db, seconds, pool_id="chat"):
    change = update(schema.worker_pools).where(schema.worker_pools.c.pool_id == pool_id)
    db.write(lambda conn: conn.execute(change.values(active_at=utc_shift(-seconds))))


def load(db, pool_id, memory_mb, idle_s=0.0):
    """A worker of the pool that keeps its model warm, idle for so long."""
    hand = hire(db, pool=pool_id, slots=1)
    request = LeaseRequest(
        pool_id,
        memory_mb,
        60.0,
        node_id="node-1",
        worker_id=hand.worker_id,
        model_key=f"model:{pool_id}",
        slot=f"{hand.worker_id}#1",
        job_type="echo",
    )
    lease = grants.grant_model(db, request, Terms(STALE_S))
    assert isinstance(lease, Granted)
    db.write(lambda conn: residency.loaded(conn, lease.key))
    old = update(schema.leases).where(schema.leases.c.token == lease.key)
    db.write(lambda conn: conn.execute(old.values(idle_since=utc_shift(-idle_s), created_at=utc_shift(-600.0))))
    return hand


def test_a_pool_without_gpus_grows_with_its_backlog_and_shrinks_after_its_hold(db, context, node):
    create(db, min_memory_mb=0)
    duties.reconcile(context)
    assert assigned(db) == 0
    ids = submit(db, 2, pool_id="chat")
    duties.reconcile(context)
    assert assigned(db) == 2
    ids += submit(db, 5, pool_id="chat")
    duties.reconcile(context)
    assert assigned(db) == 3  # and no more
    hand = hire(db, pool="chat", slots=3)
    hand.finish(*hand.claim(*ids))
    duties.reconcile(context)
    assert assigned(db) == 3  # held
    idle_for(db, 61)
    duties.reconcile(context)
    assert assigned(db) == 0


def test_a_pool_on_gpus_starts_when_jobs_wait_and_there_is_room(db, context, node):
    create(db, min_memory_mb=10_000)
    duties.reconcile(context)
    assert assigned(db) == 0
    submit(db, 1, pool_id="chat", min_memory_mb=10_000)
    duties.reconcile(context)
    assert assigned(db) == 1
    duties.reconcile(context)
    assert assigned(db) == 1  # the one that comes counts


def test_a_model_that_nobody_wants_leaves_for_one_that_is_waited_for(db, context, node):
    create(db, "old", min_memory_mb=20_000)
    create(db, "new", min_memory_mb=20_000)
    load(db, "old", 20_000, idle_s=50.0)
    change = schema.pool_assignments.insert().values(pool_id="old", node_id="node-1", revision=1, workers=1)
    db.write(lambda conn: conn.execute(change))
    submit(db, 1, pool_id="new", min_memory_mb=20_000)
    overdue = update(schema.jobs).values(created_at=utc_shift(-300.0))
    db.write(lambda conn: conn.execute(overdue))
    duties.reconcile(context)
    (lease,) = [row for row in rows(db, schema.leases) if row.resident]
    assert lease.evicted_at is not None
    assert (assigned(db, "old"), assigned(db, "new")) == (0, 1)


def test_a_pool_that_does_not_size_itself_is_as_large_as_it_says(db, context, node):
    create(db, autosize=False, desired_workers=2, min_memory_mb=0)
    submit(db, 9, pool_id="chat")
    duties.reconcile(context)
    assert assigned(db) == 2


@pytest.mark.parametrize(
    ("waiting", "busy", "now", "idle_s", "size"),
    [(0, 0, 0, 0.0, 1), (5, 0, 1, 0.0, 3), (99, 4, 3, 0.0, 4), (0, 1, 4, 0.0, 4), (0, 0, 4, 61.0, 1)],
)
def test_by_backlog(waiting, busy, now, idle_s, size):
    pool = PoolView(
        "p", PoolState.RUNNING, 1, 2, 1, 2, 60.0, maximum=4, idle_s=idle_s, assigned={("n", 1): now} if now else {}
    )
    pool = PoolView(
        **{**pool.__dict__, "crews": (Crew("w", "n", 1, 8, busy),) if busy else (), "in_demand": waiting > 0}
    )
    assert by_backlog(pool, waiting) == size
