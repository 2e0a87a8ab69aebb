"""The leader's part in workflows: time limits, what one transaction could not do, tasks whose worker left them."""

import pytest
from sqlalchemy import insert, update

from orchestrator.errors import StaleEpoch
from orchestrator.jobs import ErrorKind
from orchestrator.leader import duties
from orchestrator.leader import workflows as leading
from orchestrator.store import flows, leadership, schema, spawning, workflows
from orchestrator.store.dialect import utc_shift
from orchestrator.store.sweeping import Walk
from tests.factories import hire, row, rows
from tests.store.test_spawning import begin
from tests.store.test_workflows import create, flow, standing, task

CONTROL = "stream:orchestrator:control"


def test_a_workflow_past_its_time_fails_and_its_workers_hear_of_it(db, raw, context):
    create(db, task("a"), task("b", "a"), max_runtime_sec=3600.0)
    hire(db).claim("w.a")
    duties.tend_workflows(context)
    assert flow(db)["status"] == "running"
    db.write(lambda conn: conn.execute(update(schema.workflows).values(expires_at=utc_shift(-1.0))))
    rung = raw.xlen(CONTROL)
    duties.tend_workflows(context)
    assert flow(db)["status"] == "failed" and standing(db) == {"a": "claimed", "b": "cancelled"}
    assert row(db, "w.a").cancel_requested_at is not None and raw.xlen(CONTROL) > rung


def test_it_goes_on_with_what_one_transaction_could_not_do(db, context, monkeypatch):
    monkeypatch.setattr(flows, "BATCH", 3)
    create(db, task("a"), *[task(f"t{n}", "a") for n in range(10)])
    hand = hire(db)
    hand.fail(hand.claim("w.a")[0], ErrorKind.PERMANENT)
    duties.tend_workflows(context)
    assert flow(db)["progress"]["cancelled"] == 10 and flow(db)["sweep"] is None
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    duties.tend_workflows(context)
    assert flow(db)["progress"]["completed"] == 0 and flow(db)["sweep"] is None
    assert list(standing(db).values()).count("ready") == 1


def test_a_workflow_with_more_tasks_than_one_call_sees_to_is_gone_through_all_the_same(db, context, monkeypatch):
    monkeypatch.setattr(flows, "BATCH", 3)
    monkeypatch.setattr(leading, "BATCHES", 2)
    create(db, *[task(f"t{n:02}") for n in range(20)])
    db.write(lambda conn: workflows.cancel(conn, "w"))
    for _ in range(4):
        duties.tend_workflows(context)
    assert flow(db)["progress"]["cancelled"] == 20 and flow(db)["sweep"] is None and not context.unfinished


def test_a_walk_begins_anew_when_something_else_is_to_be_done(db, context, monkeypatch):
    monkeypatch.setattr(flows, "BATCH", 3)
    monkeypatch.setattr(leading, "BATCHES", 1)
    create(db, *[task(f"t{n:02}") for n in range(12)])
    db.write(lambda conn: workflows.cancel(conn, "w"))
    for _ in range(5):
        duties.tend_workflows(context)
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    duties.tend_workflows(context)
    duties.tend_workflows(context)
    assert context.unfinished, "it is in the middle of starting them over"
    db.write(lambda conn: workflows.cancel(conn, "w"))
    for _ in range(6):
        duties.tend_workflows(context)
    assert set(standing(db).values()) == {"cancelled"} and flow(db)["sweep"] is None


def test_a_batch_whose_transaction_runs_again_is_not_passed_over(db, context, monkeypatch):
    """As after a deadlock, or a connection that broke before the commit."""
    monkeypatch.setattr(flows, "BATCH", 3)
    create(db, *[task(f"t{n:02}") for n in range(9)])
    db.write(lambda conn: workflows.cancel(conn, "w"))
    go_on, breaks = Walk.go_on, [False, True, False]

    def go_on_twice(walk, conn, workflow_id):
        if breaks and breaks.pop(0):
            with pytest.raises(ZeroDivisionError), conn.begin_nested():
                go_on(walk, conn, workflow_id)
                raise ZeroDivisionError
        return go_on(walk, conn, workflow_id)

    monkeypatch.setattr(Walk, "go_on", go_on_twice)
    duties.tend_workflows(context)
    assert set(standing(db).values()) == {"cancelled"} and flow(db)["sweep"] is None


def test_it_makes_jobs_of_tasks_whose_worker_left_them_and_forgets_those_of_the_lost(db, context, monkeypatch):
    monkeypatch.setattr(spawning, "BATCH", 4)
    attempt = begin(db)
    attempt.stage.map("part", range(10), 1, ("sum", {}), {})
    attempt.succeed()
    lost = begin(db)
    lost.stage.spawn("part", {}, ())
    lost.stage.flush()
    lost.hand.fail(lost.claim)
    assert duties.tend_workflows(context) >= 11
    assert len([one for one in rows(db, schema.jobs) if one.type == "part"]) == 10
    assert rows(db, schema.task_stages) == rows(db, schema.spawns) == []
    assert duties.tend_workflows(context) == 0


def test_one_who_was_replaced_does_nothing(db, context, config):
    create(db, task("a"), max_runtime_sec=3600.0)
    db.write(lambda conn: conn.execute(update(schema.workflows).values(expires_at=utc_shift(-1.0))))
    db.write(lambda conn: leadership.take(conn, config.leader_lock, "another", 60.0, lock_held=True))
    with pytest.raises(StaleEpoch):
        duties.tend_workflows(context)
    assert flow(db)["status"] == "running"


def test_a_mark_whose_tasks_are_gone_fails_its_workflow(db, context):
    create(db, task("a"))
    mark = {"job_id": "w.a", "attempt": 1, "workflow_id": "w", "remaining": 1}
    db.write(lambda conn: conn.execute(insert(schema.spawns), mark))
    db.write(lambda conn: conn.execute(update(schema.workflows).values(total=2)))
    duties.tend_workflows(context)
    assert flow(db)["status"] == "failed" and rows(db, schema.spawns) == []


def test_tasks_that_nobody_will_make_jobs_of_are_deleted_where_no_workflow_is(db, context):
    db.write(lambda conn: spawning.stage(conn, "nobody", 1, 0, "[]"))
    assert duties.tend_workflows(context) == 1
    assert rows(db, schema.task_stages) == []
