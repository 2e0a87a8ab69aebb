"""Workflows in the database: who is let go when, by whom, and what a failure, a cancel and a restart do."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from sqlalchemy import insert, select, update

from orchestrator.admission import FREELY
from orchestrator.errors import (
    InvalidInput,
    JobConflict,
    QueueFull,
    TaskOfWorkflow,
    WorkflowBusy,
    WorkflowConflict,
    WorkflowEnded,
    WorkflowNotFound,
)
from orchestrator.jobs import ErrorKind
from orchestrator.store import audit, dead_letters, flows, followers, hot, outbox, paging, schema, withdraw, workflows
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import End, Outcome, finish_all, record
from orchestrator.store.submit import Rules, Verdict, submit_jobs
from orchestrator.store.sweeping import Walk
from orchestrator.workflows import FlowStatus, Limits, NewWorkflow, prepare_tasks
from tests.factories import POLICY, done, failed, hire, history, meeting, new_job, row, rows, submit, traffic
from tests.fetchers import enlist

LIMITS = Limits(10_000, 16)
RULES = Rules(POLICY)


def task(name, *needs, **fields):
    return {"name": name, "type": "echo", "payload": {}, "depends_on": [*needs]} | fields


def create(db, *tasks, rules=RULES, **fields):
    new = NewWorkflow.prepare({"workflow_id": "w", "tasks": [*tasks]} | fields, LIMITS)
    return db.write(lambda conn: workflows.create(conn, db, new, rules))


def add(db, *tasks, workflow_id="w"):
    new = prepare_tasks([*tasks], workflow_id, "me", LIMITS)
    return db.write(lambda conn: workflows.add(conn, db, workflow_id, new, RULES))


def flow(db, workflow_id="w"):
    return db.read(lambda conn: workflows.get(conn, workflow_id))


def standing(db, workflow_id="w"):
    """Where each task is: pending ones by where they wait."""
    found = [one for one in rows(db, schema.jobs) if one.workflow_id == workflow_id]
    return {one.task or one.job_id: one.queued or one.status for one in found}


def run(hand, *names, workflow_id="w"):
    hand.finish(*hand.claim(*[f"{workflow_id}.{name}" for name in names]))


def sweep(db, workflow_id="w"):
    walk = db.write(lambda conn: Walk().go_on(conn, workflow_id))
    while walk.after is not None:
        walk = db.write(partial(walk.go_on, workflow_id=workflow_id))
    return walk


def told(db, workflow_id="w"):
    return history(db, f"{flows.AUDITED}{workflow_id}")


DIAMOND = (task("a"), task("b", "a"), task("c", "a"), task("d", "b", "c"))


# --- creating ---


def test_tasks_wait_outside_of_their_lane_until_what_they_need_has_ended(db):
    assert create(db, *DIAMOND)
    assert standing(db) == {"a": "ready", "b": "blocked", "c": "blocked", "d": "blocked"}
    taken = db.write(lambda conn: outbox.take(conn, "default", 10))
    assert [job.job_id for job in taken] == ["w.a"]
    assert told(db) == ["workflow.created"]


def test_the_same_again_is_there_and_another_is_refused(db):
    assert create(db, *DIAMOND)
    assert not create(db, *reversed(DIAMOND))
    with pytest.raises(WorkflowConflict):
        create(db, *DIAMOND[:3])
    assert len(rows(db, schema.jobs)) == 4


def test_a_task_whose_id_is_taken_stops_all_of_it(db):
    submit(db, job_id="w.b")
    with pytest.raises(JobConflict):
        create(db, *DIAMOND)
    assert rows(db, schema.workflows) == [] and len(rows(db, schema.jobs)) == 1


def test_a_task_that_is_not_let_in_stops_all_of_it(db):
    def admit(_conn, fresh):
        return [FREELY] * (len(fresh) - 1) + [QueueFull("too many")]

    with pytest.raises(QueueFull):
        create(db, *DIAMOND, rules=Rules(POLICY, admit))
    assert rows(db, schema.workflows) == rows(db, schema.jobs) == []


# --- going on ---


def test_a_diamond_runs_through(db):
    create(db, *DIAMOND)
    hand = hire(db)
    run(hand, "a")
    assert standing(db) == {"a": "done", "b": "ready", "c": "ready", "d": "blocked"}
    run(hand, "b")
    assert standing(db)["d"] == "blocked"
    run(hand, "c")
    assert standing(db)["d"] == "ready" and flow(db)["status"] == "running"
    run(hand, "d")
    found = flow(db)
    assert found["status"] == "done" and found["finished_at"] is not None
    assert found["progress"] == {"completed": 4, "total": 4, "done": 4, "failed": 0, "cancelled": 0}
    assert told(db) == ["workflow.created", "workflow.done"]


def test_skipped_is_as_good_as_done(db):
    create(db, task("a"), task("b", "a"))
    hand = hire(db)
    (claim,) = hand.claim("w.a")
    hand.record(ends=[End(claim.job_id, 1, Outcome.SKIPPED, error="nothing to do")])
    assert standing(db) == {"a": "skipped", "b": "ready"}


def test_a_task_goes_in_the_transaction_that_ends_what_it_needs_or_not_at_all(db):
    create(db, task("a"), task("b", "a"))
    hand = hire(db)
    (claim,) = hand.claim("w.a")

    def crash(conn):
        finish_all(conn, hand.by, [done(claim)])
        assert conn.execute(select(schema.jobs.c.queued).where(schema.jobs.c.job_id == "w.b")).scalar() == "ready"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        db.write(crash)
    assert standing(db) == {"a": "claimed", "b": "blocked"} and flow(db)["progress"]["done"] == 0
    hand.finish(claim)
    assert standing(db) == {"a": "done", "b": "ready"}


def test_an_end_that_is_written_again_counts_once(db):
    create(db, task("a"), task("b", "a"), task("c", "a", "b"))
    hand = hire(db)
    (claim,) = hand.claim("w.a")
    hand.finish(claim)
    hand.finish(claim)  # as after a lost answer
    assert standing(db) == {"a": "done", "b": "ready", "c": "blocked"} and flow(db)["progress"]["done"] == 1
    assert row(db, "w.c").waits_for == 1


def test_http_workers_let_tasks_go_too(db):
    create(db, task("a"), task("b", "a"))
    remote = enlist(db)
    (claim,) = remote.fetch(1)
    remote.finish(claim)
    assert standing(db) == {"a": "done", "b": "ready"}


def test_16_ends_of_one_workflow_write_its_row_once(db):
    create(db, *[task(f"t{n}") for n in range(17)], task("z", *[f"t{n}" for n in range(17)]))
    hand = hire(db)
    claims = hand.claim(*[f"w.t{n}" for n in range(16)])
    with traffic(db) as seen:
        hand.record(ends=[done(claim) for claim in claims])
    written = [one for one in seen.statements if one.startswith("UPDATE workflows")]
    assert len(written) == 1 and flow(db)["progress"]["done"] == 16
    # Six as always; its row, who follows, their counts, who is free, its row.
    assert len([one for one in seen.statements if not one.startswith("BEGIN")]) <= 6 + 5, seen.statements


def test_two_parents_that_end_at_the_same_moment_let_their_child_go_once(db):
    for number in range(10):
        name = f"w{number}"
        create(db, task("a"), task("b"), task("c", "a", "b"), workflow_id=name)
        hands = [hire(db), hire(db)]
        claims = [hand.claim(f"{name}.{one}")[0] for hand, one in zip(hands, "ab", strict=True)]
        barrier = threading.Barrier(2)

        def settle(hand, claim, barrier=barrier):
            barrier.wait(30)
            hand.finish(claim)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(settle, hands, claims))
        assert standing(db, name) == {"a": "done", "b": "done", "c": "ready"}
        assert flow(db, name)["progress"]["done"] == 2 and row(db, f"{name}.c").waits_for == 0


def test_the_second_of_two_open_transactions_waits_for_the_first_and_sees_its_end(maria_db):
    """The race itself: both have ended their parent before either commits."""
    create(maria_db, task("a"), task("b"), task("c", "a", "b"))
    hands = [hire(maria_db), hire(maria_db)]
    claims = [hand.claim(f"w.{one}")[0] for hand, one in zip(hands, "ab", strict=True)]
    finish = meeting(2, finish_all)

    def settle(hand, claim):
        def work(conn):
            with audit.together(conn), followers.together(conn):
                finish(conn, hand.by, [done(claim)])

        maria_db.write(work)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(settle, hands, claims))
    assert standing(maria_db) == {"a": "done", "b": "done", "c": "ready"} and flow(maria_db)["progress"]["done"] == 2


def test_tasks_of_the_oldest_workflow_go_first_however_late_they_are_let_go(db):
    create(db, task("a"), task("b", "a"), workflow_id="old")
    create(db, task("a"), task("b"), workflow_id="young")
    submit(db)
    hand = hire(db)
    run(hand, "a", workflow_id="old")
    (first,) = db.write(lambda conn: outbox.take(conn, "default", 1))
    assert first.job_id == "old.b"


def test_a_task_that_wants_quiet_meets_the_gates_when_it_is_let_go(db):
    create(db, task("a"), task("b", "a", constraints={"quiet": True}))
    run(hire(db), "a")
    assert standing(db)["b"] == "delayed"


# --- joining ---


def test_a_job_joins_a_workflow_that_runs(db):
    create(db, task("a"))
    (verdict,) = submit_jobs(db, [new_job(job_id="more", workflow_id="w")], POLICY)
    assert verdict is Verdict.CREATED and flow(db)["progress"]["total"] == 2
    hand = hire(db)
    run(hand, "a")
    assert flow(db)["status"] == "running"
    hand.finish(*hand.claim("more"))
    assert flow(db)["status"] == "done"
    (again, late, nowhere) = submit_jobs(
        db,
        [
            new_job(job_id="more", workflow_id="w"),
            new_job(workflow_id="w"),
            new_job(workflow_id="x"),
        ],
        POLICY,
    )
    assert again is Verdict.EXISTS
    assert isinstance(late, WorkflowEnded) and isinstance(nowhere, WorkflowNotFound)


def test_tasks_are_added_while_it_runs(db):
    create(db, task("a"), task("b"))
    hand = hire(db)
    run(hand, "a")
    assert add(db, task("c", "a"), task("d", "b", "c")) == ["c", "d"]
    assert standing(db) == {"a": "done", "b": "ready", "c": "ready", "d": "blocked"}
    assert add(db, task("c", "a")) == []
    with pytest.raises(JobConflict):
        add(db, task("c", "a", payload={"other": 1}))
    with pytest.raises(InvalidInput, match="no such task"):
        add(db, task("e", "z"))
    run(hand, "b", "c")
    run(hand, "d")
    assert flow(db)["status"] == "done" and flow(db)["progress"]["total"] == 4
    with pytest.raises(WorkflowEnded):
        add(db, task("f"))
    with pytest.raises(WorkflowNotFound):
        add(db, task("f"), workflow_id="x")


def test_a_parent_that_ends_while_a_task_is_added_is_not_waited_for_in_vain(db):
    create(db, task("a"), task("z"))
    hand = hire(db)
    (claim,) = hand.claim("w.a")
    barrier = threading.Barrier(2)

    def settle():
        barrier.wait(30)
        hand.finish(claim)

    def extend():
        barrier.wait(30)
        add(db, task("b", "a"))

    with ThreadPoolExecutor(2) as pool:
        for done_one in [pool.submit(settle), pool.submit(extend)]:
            done_one.result()
    assert standing(db)["b"] == "ready"


# --- failing ---


@pytest.mark.parametrize("how", ["failed", "dead_letter", "cancelled", "expired", "lost"])
def test_a_critical_task_fails_all_of_it(db, how):
    create(db, task("a", max_attempts=1), task("b", "a"), task("c"))
    hand = hire(db)
    if how == "cancelled":
        db.write(lambda conn: withdraw.cancel(conn, "w.a"))
    elif how == "expired":
        late = update(schema.jobs).where(schema.jobs.c.job_id == "w.a").values(expires_at=utc_shift(-1.0))
        db.write(lambda conn: conn.execute(late))
        db.write(lambda conn: withdraw.expire_overdue(conn, 10))
    else:
        (claim,) = hand.claim("w.a")
        if how == "lost":
            hand.lose()
        else:
            hand.fail(claim, ErrorKind.PERMANENT if how == "failed" else ErrorKind.TRANSIENT)
    found = flow(db)
    assert found["status"] == "failed" and "task a is" in found["reason"]
    assert {name: where for name, where in standing(db).items() if name != "a"} == {"b": "cancelled", "c": "cancelled"}
    assert found["progress"]["completed"] == 3 and found["sweep"] is None
    assert told(db) == ["workflow.created", "workflow.failed"]


def test_a_task_that_runs_when_another_fails_goes_on_and_lets_nobody_go(db):
    create(db, task("a"), task("b"), task("c", "b"))
    hand = hire(db)
    a, b = hand.claim("w.a", "w.b")
    hand.fail(a, ErrorKind.PERMANENT)
    hand.finish(b)
    assert standing(db) == {"a": "failed", "b": "done", "c": "cancelled"}
    assert flow(db)["progress"] == {"completed": 3, "total": 3, "done": 1, "failed": 1, "cancelled": 1}


def test_a_workflow_that_failed_lets_nobody_go_also_of_those_that_are_not_cancelled_yet(db, monkeypatch):
    create(db, task("a"), task("b"), task("c", "b"))
    hand = hire(db)
    a, b = hand.claim("w.a", "w.b")
    monkeypatch.setattr(flows, "BATCH", 1)
    hand.fail(a, ErrorKind.PERMANENT)
    hand.finish(b)
    assert standing(db) == {"a": "failed", "b": "done", "c": "blocked"}
    sweep(db)
    assert standing(db)["c"] == "cancelled" and flow(db)["progress"]["completed"] == 3


def test_without_an_optional_task_the_others_go_on(db):
    create(db, task("a", critical=False), task("b", "a"), task("c", "b", critical=False))
    hand = hire(db)
    hand.fail(hand.claim("w.a")[0], ErrorKind.PERMANENT)
    assert standing(db) == {"a": "failed", "b": "ready", "c": "blocked"}
    run(hand, "b")
    db.write(lambda conn: withdraw.cancel(conn, "w.c"))
    assert flow(db)["status"] == "done"
    assert flow(db)["progress"] == {"completed": 3, "total": 3, "done": 1, "failed": 1, "cancelled": 1}


def test_a_retry_is_no_end(db):
    create(db, task("a"), task("b", "a"))
    hand = hire(db)
    hand.fail(hand.claim("w.a")[0])
    assert standing(db)["b"] == "blocked" and flow(db)["status"] == "running"


def test_a_failure_among_many_ends_of_one_transaction(db):
    create(db, task("a"), task("b"), task("c", "a"), task("d", "b"))
    hand = hire(db)
    a, b = hand.claim("w.a", "w.b")
    db.write(lambda conn: record(conn, hand.by, [], [done(a), failed(b, ErrorKind.PERMANENT)], POLICY))
    assert standing(db) == {"a": "done", "b": "failed", "c": "cancelled", "d": "cancelled"}


def test_what_one_transaction_cannot_cancel_the_leader_does(db, monkeypatch):
    monkeypatch.setattr(flows, "BATCH", 3)
    create(db, task("a"), *[task(f"t{n}", "a") for n in range(10)])
    hand = hire(db)
    hand.fail(hand.claim("w.a")[0], ErrorKind.PERMANENT)
    assert list(standing(db).values()).count("cancelled") == 2 and flow(db)["sweep"] == "pending"
    assert db.read(lambda conn: flows.swept(conn, 10)) == ["w"]
    sweep(db)
    assert list(standing(db).values()).count("cancelled") == 10 and flow(db)["sweep"] is None


# --- cancelling, and the time limit ---


def test_a_cancel_ends_what_waits_and_asks_what_runs(db):
    create(db, task("a"), task("b"), task("c", "a"))
    hand = hire(db)
    (claim,) = hand.claim("w.a")
    walk = db.write(lambda conn: workflows.cancel(conn, "w"))
    assert standing(db) == {"a": "claimed", "b": "cancelled", "c": "cancelled"} and walk.asked == 1
    assert row(db, "w.a").cancel_requested_at is not None and flow(db)["sweep"] == "all"
    hand.finish(claim)
    assert standing(db)["a"] == "cancelled"
    sweep(db)
    assert flow(db)["status"] == "cancelled" and flow(db)["sweep"] is None
    db.write(lambda conn: workflows.cancel(conn, "w"))  # again is fine
    assert told(db) == ["workflow.created", "workflow.cancelled"]


def test_what_is_over_is_not_cancelled(db):
    create(db, task("a"))
    run(hire(db), "a")
    with pytest.raises(WorkflowEnded):
        db.write(lambda conn: workflows.cancel(conn, "w"))


def test_past_its_time_it_fails_and_all_of_it_stops(db):
    create(db, task("a"), task("b", "a"), max_runtime_sec=3600.0)
    hand = hire(db)
    hand.claim("w.a")
    assert db.read(lambda conn: flows.overdue(conn, 10)) == []
    db.write(lambda conn: workflows.expire(conn, "w"))
    assert flow(db)["status"] == "running"
    db.write(lambda conn: conn.execute(update(schema.workflows).values(expires_at=utc_shift(-1.0))))
    assert db.read(lambda conn: flows.overdue(conn, 10)) == ["w"]
    walk = db.write(lambda conn: workflows.expire(conn, "w"))
    assert walk.asked == 1 and standing(db)["b"] == "cancelled"
    assert flow(db)["status"] == "failed" and "max_runtime_sec" in flow(db)["reason"]
    assert db.read(lambda conn: flows.overdue(conn, 10)) == []


# --- starting over ---


def test_retry_failed_starts_over_what_ended_badly(db):
    create(db, *DIAMOND)
    hand = hire(db)
    run(hand, "a")
    b, c = hand.claim("w.b", "w.c")
    hand.finish(b)
    hand.fail(c, ErrorKind.PERMANENT)
    assert standing(db) == {"a": "done", "b": "done", "c": "failed", "d": "cancelled"}
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    assert standing(db) == {"a": "done", "b": "done", "c": "ready", "d": "blocked"}
    found = flow(db)
    assert found["status"] == "running" and found["progress"]["completed"] == 2 and found["reason"] is None
    run(hand, "c")
    run(hand, "d")
    assert flow(db)["status"] == "done"
    assert told(db) == ["workflow.created", "workflow.failed", "workflow.retried", "workflow.done"]


def test_retry_failed_in_batches_releases_nobody_too_early(db, monkeypatch):
    chain = [task("t0"), *[task(f"t{n}", f"t{n - 1}") for n in range(1, 8)]]
    create(db, *chain)
    hand = hire(db)
    hand.fail(hand.claim("w.t0")[0], ErrorKind.PERMANENT)
    monkeypatch.setattr(flows, "BATCH", 1)
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    assert flow(db)["sweep"] == "retry"
    run(hand, "t0")  # nobody ends it meanwhile
    sweep(db)
    for number in range(1, 8):
        assert list(standing(db).values()).count("ready") == 1, standing(db)
        run(hand, f"t{number}")
    assert flow(db)["status"] == "done"


def test_retry_failed_takes_dead_letters_along(db):
    create(db, task("a", max_attempts=1))
    hand = hire(db)
    hand.fail(hand.claim("w.a")[0])
    assert len(rows(db, schema.dead_letters)) == 1
    with pytest.raises(TaskOfWorkflow):
        db.write(lambda conn: dead_letters.redrive_one(conn, "w.a", 3))
    assert [one.is_task for one in db.read(lambda conn: dead_letters.look(conn, dead_letters.ALL, None))[0]] == [True]
    assert db.write(lambda conn: dead_letters.redrive(conn, ["w.a"], 3, lambda _n: 0.0)).job_ids == []
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    assert rows(db, schema.dead_letters) == [] and standing(db) == {"a": "ready"}


def test_a_purge_leaves_the_tasks_of_workflows(db):
    create(db, task("a", max_attempts=1, critical=False), task("b", "a"))
    hand = hire(db)
    hand.fail(hand.claim("w.a")[0])
    before = flow(db), rows(db, schema.task_edges)
    assert db.write(lambda conn: dead_letters.purge(conn, ["w.a"])).job_ids == []
    assert (flow(db), rows(db, schema.task_edges)) == before and standing(db)["a"] == "dead_letter"
    assert len(rows(db, schema.dead_letters)) == 1


def test_retry_failed_waits_for_tasks_that_are_being_stopped(db):
    create(db, task("a"))
    hire(db).claim("w.a")
    db.write(lambda conn: workflows.cancel(conn, "w"))
    with pytest.raises(WorkflowBusy):
        db.write(lambda conn: workflows.retry_failed(conn, "w"))


def test_rerun_starts_a_task_over_with_all_that_follows_it(db):
    create(db, *DIAMOND, task("e"))
    hand = hire(db)
    for names in (["a", "e"], ["b", "c"], ["d"]):
        run(hand, *names)
    again = db.write(lambda conn: workflows.rerun(conn, "w", "b"))
    assert again.tasks == 2
    assert standing(db) == {"a": "done", "b": "ready", "c": "done", "d": "blocked", "e": "done"}
    assert flow(db)["status"] == "running" and flow(db)["progress"]["done"] == 3
    run(hand, "b")
    run(hand, "d")
    assert flow(db)["status"] == "done"
    assert history(db, "w.b").count("job.done") == 2 and "job.rerun" in history(db, "w.b")
    assert told(db)[-2:] == ["workflow.rerun", "workflow.done"]


def test_rerun_calls_back_who_has_not_started(db):
    create(db, task("a"), task("b", "a"))
    hand = hire(db)
    run(hand, "a")
    db.write(lambda conn: outbox.take(conn, "default", 10))
    assert standing(db)["b"] == "announced"
    db.write(lambda conn: workflows.rerun(conn, "w", "a"))
    assert standing(db) == {"a": "ready", "b": "blocked"}
    run(hand, "a")
    assert standing(db)["b"] == "ready"


def test_any_number_of_followers_is_seen_to_in_statements_of_bounded_size(db, monkeypatch):
    monkeypatch.setattr(hot, "MANY_IDS", 3)
    names = [f"t{n}" for n in range(8)]
    create(db, task("a"), *[task(name, "a") for name in names])
    hand = hire(db)

    def updates(column, work):
        with traffic(db) as seen:
            work()
        return sum(one.startswith("UPDATE orchestrator_jobs") and f"{column}=" in one for one in seen.statements)

    (claim,) = hand.claim("w.a")
    assert updates("waits_for", lambda: hand.finish(claim)) == 3
    assert standing(db) == {"a": "done"} | dict.fromkeys(names, "ready")
    assert updates("waits_for", lambda: db.write(lambda conn: workflows.rerun(conn, "w", "a"))) == 3
    assert standing(db) == {"a": "ready"} | dict.fromkeys(names, "blocked")
    (claim,) = hand.claim("w.a")
    assert updates("wait_reason", lambda: hand.finish(claim)) == 3  # those that let them go
    assert standing(db) == {"a": "done"} | dict.fromkeys(names, "ready")


def test_rerun_also_starts_over_what_it_would_wait_for(db):
    create(db, task("a"), task("b"), task("c", "a", "b"))
    hand = hire(db)
    run(hand, "a")
    hand.fail(hand.claim("w.b")[0], ErrorKind.PERMANENT)
    again = db.write(lambda conn: workflows.rerun(conn, "w", "a"))
    assert again.tasks == 3  # b too, which nobody named
    assert standing(db) == {"a": "ready", "b": "ready", "c": "blocked"}


def test_rerun_of_what_runs_or_is_not_there_is_refused(db):
    create(db, task("a"), task("b", "a"))
    hand = hire(db)
    with pytest.raises(WorkflowBusy):
        db.write(lambda conn: workflows.rerun(conn, "w", "a"))
    hand.claim("w.a")
    with pytest.raises(WorkflowBusy):
        db.write(lambda conn: workflows.rerun(conn, "w", "a"))
    with pytest.raises(InvalidInput):
        db.write(lambda conn: workflows.rerun(conn, "w", "z"))
    with pytest.raises(WorkflowNotFound):
        db.write(lambda conn: workflows.rerun(conn, "x", "a"))


# --- looking ---


def walked(db, wanted):
    shown, cursor = [], None
    while True:
        found, cursor = db.read(lambda conn, at=cursor: workflows.page(conn, wanted, 3, at))
        shown += [one["workflow_id"] for one in found]
        if cursor is None:
            return shown


def test_windows_of_workflows_leave_none_out(db, monkeypatch):
    monkeypatch.setattr(paging, "WINDOW", 4)
    made = [
        {"workflow_id": f"w-{i:02}", "agent": "ann" if i % 7 else "bob", "content_hash": "", "total": 1}
        | {"status": FlowStatus.RUNNING if i % 3 else FlowStatus.DONE}
        for i in range(30)
    ]
    db.write(lambda conn: conn.execute(insert(schema.workflows), made))
    for status in FlowStatus:
        for agent in ("ann", "bob", "nobody"):
            wanted = workflows.Filter(status, agent)
            meant = [one["workflow_id"] for one in made if (one["status"], one["agent"]) == (status, agent)]
            assert walked(db, wanted) == meant[::-1], wanted


def test_what_runs_is_found_at_once_however_much_of_an_agent_is_over(db, monkeypatch):
    monkeypatch.setattr(paging, "WINDOW", 4)
    made = [
        {"workflow_id": f"w-{i:02}", "agent": "ann", "content_hash": "", "total": 1}
        | {"status": FlowStatus.DONE if i else FlowStatus.RUNNING}
        for i in range(20)
    ]
    db.write(lambda conn: conn.execute(insert(schema.workflows), made))
    wanted = workflows.Filter(FlowStatus.RUNNING, "ann")
    (found,), following = db.read(lambda conn: workflows.page(conn, wanted, 3, None))
    assert (found["workflow_id"], following) == ("w-00", None)


def test_pages_of_workflows_and_of_their_tasks(db):
    for number in range(5):
        create(db, *DIAMOND, workflow_id=f"w{number}", agent="me" if number % 2 else "you")
    first, cursor = db.read(lambda conn: workflows.page(conn, workflows.Filter(), 3, None))
    rest, end = db.read(lambda conn: workflows.page(conn, workflows.Filter(), 3, cursor))
    assert [one["workflow_id"] for one in [*first, *rest]] == ["w4", "w3", "w2", "w1", "w0"] and end is None
    mine, _ = db.read(lambda conn: workflows.page(conn, workflows.Filter(agent="me"), 3, None))
    assert [one["workflow_id"] for one in mine] == ["w3", "w1"]
    page = db.read(lambda conn: workflows.get(conn, "w1", 3))
    more = db.read(lambda conn: workflows.get(conn, "w1", 3, page["next_cursor"]))
    assert [one["name"] for one in [*page["tasks"], *more["tasks"]]] == ["a", "b", "c", "d"]
    assert more["tasks"][0]["depends_on"] == ["b", "c"] and more["next_cursor"] is None
