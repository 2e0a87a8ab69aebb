"""Pools, crews and nodes as rows: arrows are guarded and told, plans are written once, a node has one supervisor."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, insert, text, update

from orchestrator import pools as rules
from orchestrator.crews import Crew, Plan, PoolView, plan
from orchestrator.errors import InvalidInput, PoolBusy, PoolClosed, PoolExists, PoolNotFound
from orchestrator.placement import Cluster
from orchestrator.pools import CLOSED, OPEN, POOL_ARROWS, WARM, PoolChange, PoolSpec, PoolState
from orchestrator.store import audit, crews, nodes, outbox, pools, schema
from orchestrator.store.claim import Claim, NotClaimed
from orchestrator.store.database import Database
from orchestrator.store.dialect import utc_shift
from tests.factories import hire, rows, submit, traffic, write_as
from tests.waiting import wait_until
from worker.supervisor import Supervisor

TIMEOUT_S = 30.0


def create(db: Database, pool_id: str = "gold", **fields: Any) -> None:
    assert db.write(lambda conn: pools.create(conn, PoolSpec(pool_id=pool_id, **fields))) == (pool_id, True)


def drain(db: Database, timeout_s: float = 60.0, pool_id: str = "gold") -> pools.Closing:
    return write_as("ann", db, lambda conn: pools.drain(conn, pool_id, timeout_s))


def get(db: Database, pool_id: str = "gold") -> dict[str, Any]:
    return db.read(lambda conn: pools.get(conn, pool_id))


def set_pool(db: Database, pool_id: str = "gold", **values: Any) -> None:
    """Behind the back of all guards."""
    change = update(schema.worker_pools).where(schema.worker_pools.c.pool_id == pool_id).values(**values)
    db.write(lambda conn: conn.execute(change))


def told(db: Database) -> list[tuple[str, Any]]:
    """Audit rows about pools and nodes: what happened, and the details."""
    about = [row for row in rows(db, schema.audit) if row.event_type.startswith(("pool.", "node."))]
    return [(row.event_type, json.loads(row.details) if row.details else None) for row in about]


def look(db: Database) -> PoolView:
    (view,) = db.read(crews.look)
    return view


def carry_out(db: Database, view: PoolView, decided: Plan) -> bool:
    return db.write(lambda conn: crews.carry_out(conn, view, decided))


def assigned(db: Database) -> dict[tuple[str, int], int]:
    return {(row.node_id, row.revision): row.workers for row in rows(db, schema.pool_assignments)}


def reconcile(db: Database) -> int:
    """One pass of the leader; how many pools were due."""
    views = db.read(crews.look)
    where = db.read(lambda conn: crews.node_views(conn, TIMEOUT_S))
    due = [(v, p) for v, p in zip(views, plan(views, where, Cluster([])), strict=True) if p.is_due(v)]
    for view, decided in due:
        carry_out(db, view, decided)
    return len(due)


# --- arrows ---


@pytest.mark.parametrize("arrow", POOL_ARROWS, ids=lambda arrow: arrow.event)
def test_an_arrow_leaves_only_where_it_starts_and_tells_of_it(db, arrow):
    for state in PoolState:
        create(db, state)
        set_pool(db, state, status=state)
        before = len(told(db))
        moved = db.write(lambda conn, state=state: pools.move(conn, arrow, state, {"n": 1}))
        assert moved == (state in arrow.source)
        assert get(db, state)["status"] == (arrow.target if moved else state)
        assert told(db)[before:] == ([(arrow.event, {"n": 1})] if moved else [])


def test_an_arrow_and_its_audit_row_are_one(db, monkeypatch):
    def broken(*_):
        raise RuntimeError

    create(db)
    monkeypatch.setattr(audit, "record", broken)
    with pytest.raises(RuntimeError):
        drain(db)
    monkeypatch.undo()
    assert get(db)["status"] == "starting"


def test_what_operators_do_and_what_is_told_of_it(db):
    create(db, model_id="a")
    write_as("bob", db, lambda conn: pools.change(conn, "gold", PoolChange(desired_workers=2)))
    write_as("bob", db, lambda conn: pools.change(conn, "gold", PoolChange(model_id="b")))
    assert drain(db, 5.0) == (PoolState.DRAINING, False)
    assert drain(db, 1.0) == (PoolState.DRAINING, False)
    assert db.write(lambda conn: pools.evict(conn, "gold")) == (PoolState.EVICTED, False)
    assert db.write(lambda conn: pools.evict(conn, "gold")) == (PoolState.EVICTED, True)
    assert drain(db) == (PoolState.EVICTED, True)
    db.write(lambda conn: pools.forget(conn, "gold"))
    assert told(db) == [
        ("pool.created", {"pool_id": "gold", "model_id": "a"}),
        ("pool.changed", {"desired_workers": [1, 2]}),
        ("pool.swapped", {"model_id": ["a", "b"]}),
        ("pool.draining", {"timeout_seconds": 5.0}),
        ("pool.draining", {"timeout_seconds": 1.0}),
        ("pool.evicted", None),
        ("pool.deleted", None),
    ]
    assert {row.actor for row in rows(db, schema.audit)} == {"ann", "bob", None}


def test_a_commit_whose_answer_is_lost_makes_one_pool(db, lose_commits):
    spec = PoolSpec().named()
    lose_commits(1)
    db.write(lambda conn: pools.create(conn, spec))
    assert [row.pool_id for row in rows(db, schema.worker_pools)] == [spec.pool_id]
    assert [event for event, _ in told(db)] == ["pool.created"]


def test_what_is_refused(db):
    create(db)
    with pytest.raises(PoolExists):
        create(db, desired_workers=2)
    with pytest.raises(InvalidInput):
        create(db, "default")
    with pytest.raises(InvalidInput) as wrong:
        db.write(lambda conn: pools.change(conn, "gold", PoolChange(slots=0)))
    assert wrong.value.field == "slots"
    hand = hire(db, pool="gold")
    drain(db)
    for refused, work in (
        (PoolClosed, lambda conn: pools.create(conn, PoolSpec(pool_id="gold"))),
        (PoolClosed, lambda conn: pools.change(conn, "gold", PoolChange(desired_workers=2))),
        (PoolBusy, lambda conn: pools.forget(conn, "gold")),
        (PoolNotFound, lambda conn: pools.drain(conn, "nobody", 1.0)),
        (PoolNotFound, lambda conn: pools.get(conn, "nobody")),
    ):
        with pytest.raises(refused):
            db.write(work)
    db.write(lambda conn: pools.evict(conn, "gold"))
    with pytest.raises(PoolBusy):  # its worker has not left
        db.write(lambda conn: pools.forget(conn, "gold"))
    db.write(lambda conn: nodes.deregister(conn, hand.worker))
    db.write(lambda conn: pools.forget(conn, "gold"))


def test_a_pool_has_so_many_slots_and_one_that_has_more_can_be_made_smaller(db):
    create(db, desired_workers=8, max_workers=8, slots=512)
    with pytest.raises(InvalidInput, match="max_workers times slots must not exceed 4096"):
        db.write(lambda conn: pools.change(conn, "gold", PoolChange(max_workers=9)))
    with pytest.raises(ValueError, match="desired_workers times slots must not exceed 4096"):
        PoolSpec(desired_workers=4096, slots=2)
    db.write(lambda conn: conn.execute(update(schema.worker_pools).values(desired_workers=512, max_workers=None)))
    with pytest.raises(InvalidInput, match="desired_workers times slots"):
        db.write(lambda conn: pools.change(conn, "gold", PoolChange(hold_seconds=1)))
    db.write(lambda conn: pools.change(conn, "gold", PoolChange(desired_workers=2)))
    assert get(db)["desired_workers"] == 2


def test_a_pool_is_found_among_thousands(db):
    some = [{"pool_id": f"pool-{n:05}", "status": "stopped"} for n in range(1500)]
    db.write(lambda conn: conn.execute(insert(schema.worker_pools), some))
    assert get(db, "pool-01400")["pool_id"] == "pool-01400"
    page = db.read(lambda conn: pools.list_pools(conn, 10, "pool-01494"))
    assert [pool["pool_id"] for pool in page] == [f"pool-{n:05}" for n in range(1495, 1500)]
    assert db.read(pools.counts) == {"stopped": 1500}
    assert db.read(lambda conn: pools.open_ids(conn, 10)) == []


def test_a_pool_whose_worker_is_replaced_while_it_is_looked_at_shows_no_slots_of_members_that_it_does_not_name(db):
    create(db)
    old = hire(db, pool="gold")
    old.beat(ready=1)

    meanwhile = [
        lambda: db.write(lambda conn: nodes.deregister(conn, old.worker)),
        lambda: hire(db, pool="gold", node="b"),
    ]

    def replace_worker(*_: Any) -> None:
        while meanwhile:
            meanwhile.pop(0)()

    event.listen(db._reader, "after_cursor_execute", replace_worker)
    try:
        seen = get(db)
    finally:
        event.remove(db._reader, "after_cursor_execute", replace_worker)
    assert [member["node_id"] for member in get(db)["members"]] == ["b"]
    assert (seen["workers"], seen["ready_slots"]) == (len(seen["members"]), sum(m["ready"] for m in seen["members"]))


def test_a_pool_of_a_deleted_ones_name_begins_with_a_revision_that_nobody_has_seen(db):
    """Whoever still serves the old one must not pass for a worker of the new: its model is another."""
    for revision in (1, 3):
        create(db, model_id="a")
        assert get(db)["revision"] == revision
        db.write(lambda conn: pools.change(conn, "gold", PoolChange(model_id="b")))
        db.write(lambda conn: pools.evict(conn, "gold"))
        db.write(lambda conn: pools.forget(conn, "gold"))
    create(db, "other")
    assert (get(db, "other")["revision"], look(db).assigned) == (1, {})


def test_what_is_left_of_a_deleted_pool_is_no_place_of_the_next(db):
    supervised(db)
    create(db)
    db.write(lambda conn: pools.evict(conn, "gold"))
    db.write(lambda conn: pools.forget(conn, "gold"))
    create(db)
    assert (look(db).assigned, get(db)["assignments"]) == ({}, [])
    reconcile(db)
    assert assigned(db) == {("node-1", 2): 1}


def test_deleting_a_pool_does_not_open_its_lane_to_a_worker_started_for_it(db):
    """It left when the pool was evicted, and its process is still there."""
    supervisor = Supervisor(db.settings.model_copy(update={"worker_pool": "gold"}))

    def posts():
        supervisor._look()
        return [duty.post.key for duty in supervisor._duties if duty.leave_s is None]

    assert posts() == [("gold", 0)]  # a lane without a pool
    create(db)
    assert posts() == [("gold", 1)]
    db.write(lambda conn: pools.evict(conn, "gold"))
    assert posts() == []
    db.write(lambda conn: pools.forget(conn, "gold"))
    assert posts() == []
    create(db)
    assert posts() == [("gold", 2)]
    supervisor._node.close()


# --- claims ---


@pytest.mark.parametrize("state", PoolState)
def test_only_an_open_pool_takes_jobs_and_what_was_announced_goes_back(db, state):
    create(db)
    (job_id,) = submit(db, pool_id="gold")
    hand = hire(db, pool="gold")
    db.write(lambda conn: outbox.take(conn, "gold", 10))
    set_pool(db, status=state)
    answer = hand.offer(job_id)[job_id]
    assert isinstance(answer, Claim if state in OPEN else NotClaimed)
    (job,) = rows(db, schema.jobs)
    assert (job.status, job.queued) == (("claimed", None) if state in OPEN else ("pending", "ready"))
    assert (db.read(lambda conn: outbox.live_slots(conn, "gold")) is None) == (state not in OPEN)


def test_a_lane_without_a_pool_is_open(db):
    (job_id,) = submit(db, pool_id="gold")
    assert isinstance(hire(db, pool="gold").offer(job_id)[job_id], Claim)


def test_a_drain_waits_for_a_claim_under_way(maria_db, open_database):
    """INV-22: the claim has read that the pool is open; the drain must not answer before it is committed."""
    db = open_database(str(maria_db.settings.database_url), worker_timeout_s=45.0, db_timeout_s=30.0)
    create(db)
    # Not innodb_trx: it shows what it showed last time to whoever looks more often than ten times a second.
    waiting = text("SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'SELECT worker_pools%UPDATE'")
    with ThreadPoolExecutor(1) as threads:
        with db.engine.begin() as claiming:
            assert pools.closed_to_claims(claiming, "gold") is None
            drained = threads.submit(drain, db)
            wait_until(lambda: db.read(lambda conn: conn.execute(waiting).scalar()), what="the drain waits")
            assert not drained.done()
        assert drained.result().state is PoolState.DRAINING


def test_claims_and_a_drain_at_once(db):
    """INV-22: whatever is claimed when the drain has answered was claimed before; nothing follows."""
    create(db)
    hands = [hire(db, pool="gold") for _ in range(3)]
    ids = submit(db, 30, pool_id="gold")
    begin = threading.Barrier(4)

    def claim(n):
        begin.wait()
        return [hands[n].offer(job_id)[job_id] for job_id in ids[n::3]]

    with ThreadPoolExecutor(3) as threads:
        work = [threads.submit(claim, n) for n in range(3)]
        begin.wait()
        drain(db)
        claimed = [row.job_id for row in rows(db, schema.jobs) if row.status == "claimed"]
        answers = [answer for future in work for answer in future.result()]
    assert sorted(answer.job_id for answer in answers if isinstance(answer, Claim)) == sorted(claimed)
    assert sorted(row.job_id for row in rows(db, schema.jobs) if row.status == "claimed") == sorted(claimed)


def test_many_who_make_one_pool_at_once(db):
    def make(_):
        return db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold")))[1]

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make, range(50)))
    assert sorted(made) == [False] * 49 + [True]


# --- the leader ---


def supervised(db: Database, node: str = "node-1", pool: str = "default") -> Any:
    hand = hire(db, node=node, pool=pool)
    assert db.write(lambda conn: crews.take_node(conn, node, f"supervisor-{node}", ["echo"], TIMEOUT_S))
    return hand


def test_a_look_sees_pools_with_workers_places_and_demand(db):
    create(db, desired_workers=3, min_workers=1, slots=2, type="echo", min_memory_mb=500, metadata={"a": 1})
    hand = hire(db, pool="gold", node="n", slots=4)
    hand.beat(busy=1, ready=3, slots=4, blocked=True, trouble="no memory")
    hire(db, pool="gold", node="m").beat(draining=True, ready=2)
    place = {"pool_id": "gold", "node_id": "n", "revision": 1, "workers": 2}
    db.write(lambda conn: conn.execute(insert(schema.pool_assignments), place))
    submit(db, pool_id="other")
    view = look(db)
    assert (view.state, view.desired, view.minimum, view.slots, view.type) == (PoolState.STARTING, 3, 1, 2, "echo")
    assert (view.memory_mb, view.assigned, view.in_demand) == (500, {("n", 1): 2}, False)
    here = {crew.node_id: crew for crew in view.crews}
    assert here["n"] == Crew(hand.worker_id, "n", 0, 4, 1, 3, "no memory", blocked=True)
    assert here["m"].ready == 0  # one that leaves takes no more jobs
    submit(db, pool_id="gold")
    assert look(db).in_demand


def test_a_job_for_later_is_no_demand_yet(db):
    create(db)
    submit(db, pool_id="gold", earliest_start_at="2999-01-01T00:00:00Z")
    assert not look(db).in_demand


def test_a_plan_is_written_with_its_places_its_arrow_and_the_audit(db):
    create(db)
    view = look(db)
    decided = Plan("gold", 1, {("n", 1): 1}, 1, WARM, "because")
    with traffic(db) as seen:
        assert carry_out(db, view, decided)
    assert seen.commits == 1
    pool = get(db)
    assert (pool["status"], pool["spawned_workers"], pool["status_reason"]) == ("running", 1, "because")
    assert pool["started_at"] is not None and assigned(db) == {("n", 1): 1}
    assert told(db)[1:] == [("pool.assigned", {"workers": {"n@1": 1}}), ("pool.warm", {"ready": 1, "wanted": 1})]


@pytest.mark.parametrize("meanwhile", [{"status": "draining"}, {"status": "evicted"}, {"revision": 2}])
def test_a_plan_for_what_the_pool_is_no_more_writes_nothing(db, meanwhile):
    create(db)
    view = look(db)
    set_pool(db, **meanwhile)
    before = told(db)
    assert not carry_out(db, view, Plan("gold", 1, {("n", 1): 1}, 1, WARM, "because"))
    assert (assigned(db), told(db), get(db)["status_reason"]) == ({}, before, None)


def test_a_cluster_that_is_as_it_should_be_costs_no_write(db):
    create(db)
    hand = supervised(db, "node-1")
    reconcile(db)
    crew = hire(db, pool="gold", node="node-1", slots=1)
    crew.worker = replace(crew.worker, revision=1)
    db.write(lambda conn: conn.execute(update(schema.workers).values(revision=1)))
    crew.beat(ready=1, slots=1)
    assert reconcile(db) == 1  # it became warm
    with traffic(db) as seen:
        assert reconcile(db) == 0
    assert not [s for s in seen.statements if s.startswith(("INSERT", "UPDATE", "DELETE"))]
    assert hand.worker.node_id == "node-1" and get(db)["status"] == "running"


def test_use_is_noted_and_keeps_a_pool_from_falling_asleep(db):
    create(db, hold_seconds=60)
    submit(db, pool_id="gold")
    set_pool(db, active_at=utc_shift(-3600.0))
    reconcile(db)
    assert look(db).idle_s < 60
    assert reconcile(db) == 0  # not again a moment later


def test_a_drained_pool_stops_without_workers_and_loses_its_places(db):
    supervised(db)
    create(db)
    reconcile(db)
    assert assigned(db) == {("node-1", 1): 1}
    hand = hire(db, pool="gold")
    drain(db)
    reconcile(db)
    assert (get(db)["status"], assigned(db)) == ("draining", {("node-1", 1): 1})
    db.write(lambda conn: nodes.deregister(conn, hand.worker))
    reconcile(db)
    assert (get(db)["status"], assigned(db)) == ("stopped", {})
    assert reconcile(db) == 0


# --- nodes and their supervisors ---


def test_a_node_has_one_supervisor_until_it_is_silent(db):
    hire(db, node="n")

    def take(supervisor, timeout_s=TIMEOUT_S):
        return db.write(lambda conn: crews.take_node(conn, "n", supervisor, ["echo", "a"], timeout_s))

    assert [take("one"), take("two"), take("one")] == [True, False, True]
    silent = update(schema.nodes).values(supervisor_seen_at=utc_shift(-TIMEOUT_S - 1))
    db.write(lambda conn: conn.execute(silent))
    assert [take("two"), take("one")] == [True, False]
    db.write(lambda conn: crews.leave_node(conn, "n", "one"))  # too late: it is not its own any more
    assert not take("one")
    db.write(lambda conn: crews.leave_node(conn, "n", "two"))
    assert db.read(lambda conn: crews.node_views(conn, TIMEOUT_S)) == []
    assert take("one")
    assert not db.write(lambda conn: crews.take_node(conn, "unheard-of", "one", [], TIMEOUT_S))


def test_only_one_of_many_takes_a_node(db):
    hire(db, node="n")

    def take(n):
        return db.write(lambda conn: crews.take_node(conn, "n", f"s{n}", [], TIMEOUT_S))

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(take, range(6))) == 1


def test_a_node_is_open_while_its_supervisor_is_heard_and_nobody_drains_it(db):
    supervised(db, "n")

    def opened():
        (node,) = db.read(lambda conn: crews.node_views(conn, TIMEOUT_S))
        assert node.types == {"echo"}
        return node.open

    assert opened()
    db.write(lambda conn: crews.drain_nodes(conn, ["n"], 60.0))
    assert not opened()
    db.write(lambda conn: crews.resume_nodes(conn, None))
    assert opened()
    db.write(lambda conn: conn.execute(update(schema.nodes).values(supervisor_seen_at=utc_shift(-TIMEOUT_S - 1))))
    assert not opened()


def test_draining_nodes_tells_how_many_and_writes_it_down(db):
    for name in ("a", "b"):
        hire(db, node=name)
    assert db.write(lambda conn: crews.drain_nodes(conn, ["a", "nobody"], 60.0)) == 1
    assert 50 < db.read(lambda conn: crews.node_leave_s(conn, "a")) <= 60
    assert db.read(lambda conn: crews.node_leave_s(conn, "b")) is None
    assert db.write(lambda conn: crews.drain_nodes(conn, None, 0.0)) == 2
    assert db.read(lambda conn: crews.node_leave_s(conn, "b")) == 0.0
    assert db.write(lambda conn: crews.resume_nodes(conn, ["a"])) == 1
    assert db.write(lambda conn: crews.resume_nodes(conn, ["nobody"])) == 0
    events = [(event, details["node_id"]) for event, details in told(db)]
    assert events == [("node.draining", n) for n in ("a", "a", "b")] + [("node.resumed", "a")]
    listed = db.read(crews.list_nodes)
    assert [(node["node_id"], node["drain_until"] is None, node["workers"]) for node in listed] == [
        ("a", True, 1),
        ("b", False, 1),
    ]


@pytest.mark.parametrize("state", PoolState)
def test_orders_say_who_must_leave_and_how_soon(db, state):
    create(db, desired_workers=2, slots=3, type="echo", model_id="m", min_memory_mb=7)
    places = [{"pool_id": "gold", "node_id": node, "revision": 1, "workers": 2} for node in ("n", "m")]
    db.write(lambda conn: conn.execute(insert(schema.pool_assignments), places))
    set_pool(db, status=state, drain_until=utc_shift(50.0))
    (order,) = db.read(lambda conn: crews.orders(conn, "n"))
    alone = db.read(lambda conn: crews.order_for(conn, "gold"))
    assert (order.workers, order.slots, order.type, order.model_id, order.memory_mb) == (2, 3, "echo", "m", 7)
    for each in (order, alone):
        if state in OPEN:
            assert each.leave_s is None
        elif state is PoolState.EVICTED:
            assert each.leave_s == 0.0
        else:
            assert 40 < each.leave_s <= 50
    assert db.read(lambda conn: crews.order_for(conn, "nobody")) is None
    assert db.read(lambda conn: crews.orders(conn, "elsewhere")) == []


def test_a_time_that_is_over_is_no_time_left(db):
    create(db)
    set_pool(db, status="draining", drain_until=utc_shift(-50.0))
    assert db.read(lambda conn: crews.order_for(conn, "gold")).leave_s == 0.0
    assert get(db)["drain_seconds_left"] == 0.0


def test_an_order_of_an_older_revision_is_outdated(db):
    create(db)
    place = {"pool_id": "gold", "node_id": "n", "revision": 1, "workers": 1}
    db.write(lambda conn: conn.execute(insert(schema.pool_assignments), [place, place | {"revision": 2}]))
    set_pool(db, revision=2)
    assert [order.outdated for order in db.read(lambda conn: crews.orders(conn, "n"))] == [True, False]


def test_every_state_is_open_closed_or_drains():
    assert {*OPEN, *CLOSED, PoolState.DRAINING} == {*PoolState}
    assert rules.DRAIN.source == OPEN and rules.CREATE.source == CLOSED
