"""Rows that somebody holds: the leader's duties pass over them, and see to all others meanwhile."""

import pytest
from sqlalchemy import insert, update

from orchestrator.leader import delivery, duties
from orchestrator.leases import LeaseRequest, Terms, token_hash
from orchestrator.policies import EVERYWHERE, Scope, parse
from orchestrator.store import flows, grants, outbox, policies, schema, spawning, withdraw, workflows
from orchestrator.store.database import RowsHeld
from orchestrator.store.dialect import utc_shift
from orchestrator.workflows import Sweep
from tests.factories import STALE_S, gpu, hire, holding, holding_job, row, rows, set_job, status, submit, traffic
from tests.fetchers import enlist
from tests.leader.test_duties import announced, deliver
from tests.leader.test_http_workers import age as grow_old
from tests.leader.test_publisher import age
from tests.store.test_workflows import create, task


@pytest.fixture
def servers():
    """The other database has one writer, and no rows to hold."""
    return ["mariadb", "redis"]


def queued(db, *job_ids):
    return [row(db, job_id).queued for job_id in job_ids]


def waits_for(seen, table):
    """How often such rows were asked for: a row that somebody holds is waited for once."""
    return sum(table in statement for statement in seen.statements)


def test_what_lost_its_entry_is_repaired_but_for_the_job_whose_row_is_held(db, context):
    held, *others = ids = submit(db, 3)
    db.write(lambda conn: outbox.take(conn, "default", 3))
    age(db, *ids)
    with holding_job(db, held):
        assert delivery.repair(context) == 2
        assert queued(db, held, *others) == ["announced", "ready", "ready"]
    assert delivery.repair(context) == 1
    assert queued(db, held) == ["ready"]


def test_idle_entries_are_decided_about_while_the_row_of_one_is_held(db, hub, raw, context, publisher):
    reader, (held, *others) = hire(db), submit(db, 3)
    publisher.publish("default")
    assert len(deliver(hub, raw, reader)) == 3
    with holding_job(db, held):
        assert delivery.reclaim(context) == 3
        assert queued(db, held, *others) == ["announced", "ready", "ready"]
    assert announced(raw) == []
    age(db, held)
    assert delivery.repair(context) == 1, "without an entry, it is found there"


def test_what_is_ready_is_announced_but_for_the_job_whose_row_is_held(db, raw, context):
    first, held, last = submit(db, 3)
    with holding_job(db, held):
        delivery.publish(context)
        assert announced(raw) == [first, last]
    delivery.publish(context)
    assert announced(raw) == [first, last, held]


def test_a_lane_whose_row_is_held_keeps_no_other_from_being_filled(db, context):
    ids = [submit(db, pool_id=lane)[0] for lane in ("a", "b", "c")]
    with holding(db, schema.lanes, schema.lanes.c.lane == "b"):
        with pytest.raises(RowsHeld), traffic(db) as seen:
            delivery.publish(context)
        assert waits_for(seen, "UPDATE lanes") == 3, "one for each lane"
        assert queued(db, *ids) == ["announced", "ready", "announced"]


def test_the_jobs_of_the_dead_are_rescued_while_a_workflow_of_one_is_held(db, context):
    create(db, task("a"))
    one, other = hire(db), hire(db)
    (plain,) = submit(db)
    one.claim("w.a")
    other.claim(plain)
    db.write(lambda conn: withdraw.cancel(conn, "w.a"))
    one.go_silent()
    other.go_silent()
    with holding(db, schema.workflows, schema.workflows.c.workflow_id == "w"):
        with traffic(db) as seen:
            delivery.reclaim(context)
        assert waits_for(seen, "FROM workflows") == 1
        assert (status(db, plain), status(db, "w.a")) == ("pending", "claimed")
    delivery.reclaim(context)
    assert status(db, "w.a") == "cancelled"


def test_attempts_that_run_too_long_are_ended_while_the_row_of_one_is_held(db, context):
    remote, (held, late) = enlist(db), submit(db, 2, max_runtime_sec=20)
    for claim in remote.fetch(2):
        grow_old(db, claim, 21)
    with holding_job(db, held):
        duties.enforce_limits(context)
        assert (status(db, held), status(db, late)) == ("claimed", "pending")
    duties.enforce_limits(context)
    assert status(db, held) == "pending"


# --- duties about many things: what one of them needs is held, and the others are seen to ---


def due_leases(db, *nodes):
    """A lease on the GPU of each node whose time is over; their keys."""
    for number, node in enumerate(nodes):
        hire(db, gpu(number), node=node)
    host = update(schema.nodes).values(cpu_milli=4000, memory_mb=1000)
    db.write(lambda conn: conn.execute(host))
    wishes = [LeaseRequest("alice", 1000, 60.0, node_id=node, host_cpu_milli=100) for node in nodes]
    answers = db.write(lambda conn: grants.grant(conn, wishes, Terms(STALE_S)))
    db.write(lambda conn: conn.execute(update(schema.leases).values(expires_at=utc_shift(-1.0))))
    return [token_hash(answer.request.token) for answer in answers]


def lease_states(db, *keys):
    found = {lease.token: lease.state for lease in rows(db, schema.leases)}
    return [found.get(key) for key in keys]


def of_a_lease(table):
    """What the lease on the GPU of node "a" needs when it ends."""
    mine = {schema.gpus: schema.gpus.c.gpu_uuid == "GPU-0", schema.nodes: schema.nodes.c.node_id == "a"}
    return mine.get(table, schema.lease_gpus.c.gpu_uuid == "GPU-0")


@pytest.fixture
def wary(context):
    """It waited in vain just now."""
    context.apart._beware(RowsHeld("somebody holds it"))
    return context


def test_a_duty_waits_in_vain_once_and_then_for_no_row_for_a_while(db, context):
    held, free = due_leases(db, "a", "b")
    with holding(db, schema.gpus, of_a_lease(schema.gpus)):
        with traffic(db) as seen:
            assert duties.purge_leases(context) == 1
        assert waits_for(seen, "UPDATE gpus") == 2, "one in vain"
        assert lease_states(db, held, free) == ["active", "expired"]
        with traffic(db) as seen:
            duties.purge_leases(context)
        assert waits_for(seen, "UPDATE gpus") == 0
    assert duties.purge_leases(context) == 1
    assert [card.leased_mb for card in rows(db, schema.gpus)] == [0, 0]


@pytest.mark.parametrize("table", [schema.nodes, schema.lease_gpus])
@pytest.mark.parametrize("ending", [None, "expired"])
def test_leases_end_but_for_the_one_of_which_something_is_held(db, wary, table, ending):
    held, free = due_leases(db, "a", "b")
    db.write(lambda conn: conn.execute(update(schema.leases).values(ending_as=ending)))
    db.write(lambda conn: conn.execute(update(schema.gpus).values(sampled_at=utc_shift(-3600.0))))
    with holding(db, table, of_a_lease(table)):
        duties.purge_leases(wary)
        assert lease_states(db, held, free) == ["active", "expired"]
    duties.purge_leases(wary)
    assert lease_states(db, held, free) == ["expired"] * 2
    assert [node.leased_cpu_milli for node in rows(db, schema.nodes)] == [0, 0]


def test_leases_are_forgotten_but_for_the_one_whose_share_is_held(db, wary):
    held, free = due_leases(db, "a", "b")
    over = {"state": "released", "expires_at": utc_shift(-2 * duties.KEEP_ENDED_LEASES_S)}
    db.write(lambda conn: conn.execute(update(schema.leases).values(over)))
    with holding(db, schema.lease_gpus, of_a_lease(schema.lease_gpus)):
        duties.purge_leases(wary)
        assert lease_states(db, held, free) == ["released", None]
    duties.purge_leases(wary)
    assert lease_states(db, held) == [None]


def test_caps_are_counted_but_for_the_key_whose_row_is_held(db, wary):
    wrong = [{"cap_key": f"agent:{name}", "in_use": 5} for name in "ab"]
    db.write(lambda conn: conn.execute(insert(schema.concurrency_caps), wrong))
    (waiting,) = submit(db, agent="c")
    set_job(db, waiting, queued="blocked", blocked_on="cap:agent:c")
    caps = schema.concurrency_caps
    with holding(db, caps, caps.c.cap_key == "agent:a"):
        duties.keep_caps(wary)
        assert {cap.cap_key: cap.in_use for cap in rows(db, caps)} == {"agent:a": 5, "agent:b": 0}
        assert queued(db, waiting) == ["ready"]
    duties.keep_caps(wary)
    assert {cap.in_use for cap in rows(db, caps)} == {0}


def gate_scene(db, context):
    """Two jobs that wait for units, two that ended and still count, and a state that nobody needs any more."""
    policy = parse(Scope.ADMISSION, {"capacity": {"units": 8}})
    db.write(lambda conn: policies.put(conn, Scope.ADMISSION, EVERYWHERE, policy))
    context.policies.expire()
    jobs = submit(db, 4)
    for job_id in jobs[:2]:
        set_job(db, job_id, queued="blocked", blocked_on="capacity", cost_units=1.0)
    for job_id in jobs[2:]:
        set_job(db, job_id, status="done")
    holds = [{"gate": "capacity", "job_id": job_id, "amount": 1.0} for job_id in jobs]
    old = [{"name": name, "closed": True, "since": None, "reason": "of old"} for name in ("memory", "load")]
    db.write(lambda conn: conn.execute(insert(schema.gate_holds), holds))
    db.write(lambda conn: conn.execute(insert(schema.gate_states), old))
    return jobs


def test_gates_are_tended_but_for_the_jobs_whose_rows_are_held(db, context):
    one, other, *ended = gate_scene(db, context)
    holds = schema.gate_holds
    with holding(db, holds, holds.c.job_id.in_([one, ended[0]])), traffic(db) as seen:
        assert duties.tend_gates(context) == 1
        assert queued(db, one, other) == ["blocked", "ready"]
        assert {hold.job_id for hold in rows(db, holds)} == {one, other, ended[0]}
    assert waits_for(seen, "INSERT INTO gate_holds") == 1, "nobody was waited for"
    assert duties.tend_gates(context) == 1
    assert {hold.job_id for hold in rows(db, holds)} == {one, other}


def test_gates_are_tended_while_the_row_of_one_is_held(db, context):
    one, other, *_ = gate_scene(db, context)
    states = schema.gate_states
    with holding(db, states, states.c.name == "memory"):
        assert duties.tend_gates(context) == 2
        assert queued(db, one, other) == ["ready"] * 2
        assert {state.name for state in rows(db, states)} == {"memory", "capacity"}
    duties.tend_gates(context)
    assert {state.name for state in rows(db, states)} == {"capacity"}


def test_jobs_are_not_called_back_whose_holds_are_held(db, context):
    """What it was let go for is written down with it: neither is changed without the other."""
    policy = parse(Scope.ADMISSION, {"capacity": {"units": 8}})
    db.write(lambda conn: policies.put(conn, Scope.ADMISSION, EVERYWHERE, policy))
    db.write(lambda conn: policies.put(conn, Scope.CONCURRENCY, "pool:p", parse(Scope.CONCURRENCY, {"max": 0})))
    context.policies.expire()
    held, free = submit(db, 2, pool_id="p", cost_units=1.0)
    holds, let_go = schema.gate_holds, [{"gate": "capacity", "job_id": one, "amount": 1.0} for one in (held, free)]
    for job_id in (held, free):
        set_job(db, job_id, queued="ready", blocked_on=None)
    db.write(lambda conn: conn.execute(insert(holds), let_go))
    with holding(db, holds, holds.c.job_id == held):
        duties.tend_gates(context)
        assert queued(db, held, free) == ["ready", "blocked"]
        assert {hold.job_id for hold in rows(db, holds)} == {held}
    duties.tend_gates(context)
    assert queued(db, held) == ["blocked"] and rows(db, holds) == []


def test_units_of_those_who_wait_for_a_cap_are_given_back_but_for_what_is_held(db, context):
    gate_scene(db, context)
    held, free = submit(db, 2, cost_units=1.0)
    holds, given = schema.gate_holds, [{"gate": "capacity", "job_id": one, "amount": 1.0} for one in (held, free)]
    for job_id in (held, free):
        set_job(db, job_id, queued="blocked", blocked_on="cap:agent:a")
    db.write(lambda conn: conn.execute(insert(holds), given))
    with holding(db, holds, holds.c.job_id == held):
        duties.tend_gates(context)
        assert {hold.job_id for hold in rows(db, holds)} & {held, free} == {held}
    duties.tend_gates(context)
    assert not {hold.job_id for hold in rows(db, holds)} & {held, free}


@pytest.mark.parametrize("late", [True, False])
def test_workflows_are_seen_to_but_for_the_one_whose_row_is_held(db, wary, late):
    """Past their time, or with a sweep that is not done."""
    for name in ("v", "w"):
        create(db, task("a"), workflow_id=name)
    change = {"expires_at": utc_shift(-1.0)} if late else {"status": "failed", "sweep": Sweep.ALL}
    db.write(lambda conn: conn.execute(update(schema.workflows).values(change)))
    with holding(db, schema.workflows, schema.workflows.c.workflow_id == "v"):
        duties.tend_workflows(wary)
        assert [status(db, "v.a"), status(db, "w.a")] == ["pending", "cancelled"]
    duties.tend_workflows(wary)
    assert status(db, "v.a") == "cancelled"


def test_a_sweep_that_meets_a_held_row_tells_of_what_it_did_and_goes_on_from_there(db, wary, monkeypatch):
    create(db, *[task(name, max_attempts=1, critical=False) for name in "abc"])
    hand, taken_back = hire(db), list[str]()
    for job_id in ("w.a", "w.b", "w.c"):
        hand.fail(hand.claim(job_id)[0])
    letters = schema.dead_letters
    db.write(lambda conn: conn.execute(update(letters).values(entry_id=letters.c.job_id)))
    monkeypatch.setattr(flows, "BATCH", 1)
    monkeypatch.setattr(wary.hub.dead_letters, "take_back", taken_back.extend)
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    with holding_job(db, "w.c"):
        duties.tend_workflows(wary)
        assert (status(db, "w.b"), status(db, "w.c")) == ("pending", "dead_letter")
        assert taken_back == ["w.b"]
        hand.fail(hand.claim("w.b")[0])
        duties.tend_workflows(wary)
        assert status(db, "w.b") == "dead_letter", "it was started over once, as it was asked for"
    duties.tend_workflows(wary)
    assert (status(db, "w.b"), status(db, "w.c")) == ("dead_letter", "pending")
    assert taken_back == ["w.b", "w.c"] and not wary.unfinished


def test_what_lost_attempts_staged_is_deleted_but_for_what_is_held(db, wary):
    for name in ("one", "other"):
        db.write(lambda conn, name=name: spawning.stage(conn, name, 1, 0, "[]"))
    stages = schema.task_stages
    with holding(db, stages, stages.c.job_id == "one"):
        duties.tend_workflows(wary)
        assert [stage.job_id for stage in rows(db, stages)] == ["one"]
    duties.tend_workflows(wary)
    assert rows(db, stages) == []
