"""The duty `retention`: what is over goes after its time, a little at a time; everything else stays."""

from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial

import pytest
from sqlalchemy import event, insert, update

from orchestrator.errors import JobNotFound, ResultNotFound, StaleEpoch, WorkflowBusy, WorkflowEnded, WorkflowNotFound
from orchestrator.jobs import ErrorKind, Status
from orchestrator.leader import retention
from orchestrator.leader.context import BATCH, DutyContext
from orchestrator.leader.duties import forget_old
from orchestrator.leader.term import Term, borrow
from orchestrator.store import (
    audit,
    dead_letters,
    flows,
    job_reads,
    leadership,
    lease_purge,
    schema,
    tallies,
    workflows,
)
from orchestrator.store.dialect import utc_shift
from orchestrator.store.retention import JOBS, ROWS
from orchestrator.store.submit import Rules, submit_jobs
from orchestrator.workflows import Limits, NewWorkflow, Sweep
from tests.factories import (
    POLICY,
    gpu,
    hire,
    holding_job,
    many_jobs,
    new_job,
    row,
    rows,
    set_job,
    status,
    submit,
    write_as,
)

DAY_S = 86_400.0
#: In days.
JOBS_KEPT, RESULTS_KEPT, AUDIT_KEPT = 30, 10, 90
PAST = datetime(2020, 1, 1)  # noqa: DTZ001 - the database's times have no zone
LIMITS = Limits(1 << 20, 64)


@pytest.fixture
def config(config):
    kept = {"jobs": JOBS_KEPT, "results": RESULTS_KEPT, "audit": AUDIT_KEPT}
    return config.model_copy(update={f"retention_{name}_s": days * DAY_S for name, days in kept.items()})


def run(context) -> None:
    """As the leader does: again at once, as long as there is more."""
    for _ in range(1000):
        if forget_old(context) < BATCH:
            return
    pytest.fail("it never ends")


def aged(db, days, *job_ids, created=None) -> None:
    """These jobs, and their results, as they are so long after their end."""
    ended, made = utc_shift(-days * DAY_S), utc_shift(-(created or days) * DAY_S)
    for job_id in job_ids:
        set_job(db, job_id, created_at=made, finished_at=ended)
    of_them = update(schema.results).where(schema.results.c.job_id.in_(job_ids))
    db.write(lambda conn: conn.execute(of_them.values(created_at=ended)))


def aged_flow(db, days, workflow_id="w") -> None:
    past = utc_shift(-days * DAY_S)
    mine = update(schema.workflows).where(schema.workflows.c.workflow_id == workflow_id)
    db.write(lambda conn: conn.execute(mine.values(created_at=past, finished_at=past)))
    aged(db, days, *[one.job_id for one in rows(db, schema.jobs) if one.workflow_id == workflow_id])


def left(db, table=schema.jobs) -> set[str]:
    return {one.job_id for one in rows(db, table)}


def finished(db, count=1, **fields) -> list[str]:
    hand = hire(db)
    ids = submit(db, count, **fields)
    hand.finish(*hand.claim(*ids))
    return ids


def ended(db, how, **fields) -> str:
    """A job that ended like this."""
    hand = hire(db)
    (job_id,) = submit(db, max_attempts=1, **fields)
    if how is Status.DONE:
        hand.finish(*hand.claim(job_id))
    elif how is Status.CANCELLED:
        set_job(db, job_id, status="cancelled", queued=None)
    elif how is not None:
        kind = {Status.FAILED: ErrorKind.PERMANENT, Status.DEAD_LETTER: ErrorKind.TRANSIENT}[how]
        hand.fail(hand.claim(job_id)[0], kind)
    assert how is None or status(db, job_id) == how
    return job_id


@contextmanager
def watched(db):
    """How many rows each transaction deleted."""
    deleted: list[int] = []
    now = [0]

    def ran(_conn, cursor, statement, *_rest):
        if statement.startswith("DELETE"):
            now[0] += cursor.rowcount

    def committed(_conn):
        if now[0]:
            deleted.append(now[0])
        now[0] = 0

    event.listen(db.engine, "after_cursor_execute", ran)
    event.listen(db.engine, "commit", committed)
    try:
        yield deleted
    finally:
        event.remove(db.engine, "after_cursor_execute", ran)
        event.remove(db.engine, "commit", committed)


@pytest.mark.parametrize("how", [Status.DONE, Status.FAILED, Status.CANCELLED])
def test_a_job_goes_when_its_time_is_over(db, context, how):
    old, young = ended(db, how), ended(db, how)
    aged(db, JOBS_KEPT + 1, old)
    aged(db, JOBS_KEPT - 1, young)
    run(context)
    assert left(db) == {young}
    with pytest.raises(JobNotFound):
        db.read(lambda conn: job_reads.get(conn, old))


def test_the_time_begins_with_the_end_not_with_the_beginning(db, context):
    (job_id,) = finished(db)
    aged(db, JOBS_KEPT - 1, job_id, created=400)
    run(context)
    assert left(db) == {job_id}
    aged(db, JOBS_KEPT + 1, job_id, created=400)
    run(context)
    assert left(db) == set()


def test_what_has_not_ended_stays_however_old(db, context):
    waits = ended(db, None)
    hand = hire(db)
    (runs,) = submit(db)
    hand.start(*hand.claim(runs))
    for job_id in (waits, runs):
        set_job(db, job_id, created_at=utc_shift(-400 * DAY_S))
    run(context)
    assert left(db) == {waits, runs}


def test_a_dead_letter_stays_until_somebody_decides(db, context):
    job_id = ended(db, Status.DEAD_LETTER)
    aged(db, 400, job_id)
    run(context)
    assert left(db) == left(db, schema.dead_letters) == {job_id}
    write_as("ops", db, lambda conn: dead_letters.redrive_one(conn, job_id, 3))
    hand = hire(db)
    hand.finish(*hand.claim(job_id))
    aged(db, JOBS_KEPT + 1, job_id)
    run(context)
    assert left(db) == set()


def test_a_result_may_go_before_its_job(db, context):
    old, young = finished(db, 2)
    aged(db, RESULTS_KEPT + 1, old)
    aged(db, RESULTS_KEPT - 1, young)
    run(context)
    assert (left(db), left(db, schema.results)) == ({old, young}, {young})
    with pytest.raises(ResultNotFound, match="retention_results_s"):
        db.read(lambda conn: job_reads.result(conn, old))
    aged(db, RESULTS_KEPT + 1, young)
    run(context)  # and the walk goes on from where it was
    assert left(db, schema.results) == set()


def test_a_result_goes_with_its_job(db, context):
    config = context.settings.model_copy(update={"retention_results_s": JOBS_KEPT * DAY_S})
    (job_id,) = finished(db)
    aged(db, JOBS_KEPT + 1, job_id)
    run(replace(context, settings=config))
    assert left(db) == left(db, schema.results) == set()


def test_an_id_means_another_job_once_its_own_is_forgotten(db, context):
    submit(db, job_id="same", payload={"n": 1})
    hand = hire(db)
    hand.finish(*hand.claim("same"))
    aged(db, JOBS_KEPT + 1, "same")
    run(context)
    submit(db, job_id="same", payload={"n": 2})
    hand.finish(*hand.claim("same"))
    assert row(db, "same").attempt == 1


def test_zero_keeps_for_ever(db, context):
    (job_id,) = finished(db)
    aged(db, 400, job_id)
    db.write(lambda conn: conn.execute(update(schema.audit).values(ts=utc_shift(-400 * DAY_S))))
    events = len(rows(db, schema.audit))
    never = {f"retention_{name}_s": 0.0 for name in ("jobs", "results", "audit")}
    run(replace(context, settings=context.settings.model_copy(update=never)))
    assert (left(db), left(db, schema.results), len(rows(db, schema.audit))) == ({job_id}, {job_id}, events)


def test_the_audit_goes_oldest_first_and_never_to_the_last_row(db, context):
    events = [audit.Event("pool.created", details={"n": n}) for n in range(2 * ROWS + 10)]
    db.write(lambda conn: audit.record(conn, events))
    old = update(schema.audit).values(ts=utc_shift(-(AUDIT_KEPT + 1) * DAY_S))
    db.write(lambda conn: conn.execute(old))
    ids = [one.id for one in rows(db, schema.audit)]
    newest = max(ids)
    run(context)
    assert [one.id for one in rows(db, schema.audit)] == ids  # nobody has counted them yet
    while db.write(tallies.fold):
        pass
    run(context)
    assert [one.id for one in rows(db, schema.audit)] == [newest]
    db.write(lambda conn: audit.record(conn, events[:1]))
    assert max(one.id for one in rows(db, schema.audit)) == newest + 1


def test_young_events_stay(db, context):
    db.write(lambda conn: audit.record(conn, [audit.Event("pool.created")] * 5))
    before = len(rows(db, schema.audit))
    run(context)
    assert len(rows(db, schema.audit)) == before


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def crowd(db, count) -> None:
    past = utc_shift(-(JOBS_KEPT + 1) * DAY_S)
    many_jobs(db, count, status=lambda i: ("done", "failed")[i % 2], queued=None, attempt=1)
    db.write(lambda conn: conn.execute(update(schema.jobs).values(created_at=past, finished_at=past)))
    done = [{"job_id": f"many-{i:06}", "attempt": 1, "result": "{}", "run_seconds": 1.0} for i in range(0, count, 2)]
    db.write(lambda conn: conn.execute(insert(schema.results), done))


def test_a_crowd_of_jobs_goes_in_short_transactions(db, context):
    count = 2 * BATCH + 2 * JOBS  # more than one run does, and each more than one transaction
    crowd(db, count)
    with watched(db) as deleted:
        run(context)
    assert left(db) == left(db, schema.results) == set()
    assert sum(deleted) == count + count // 2
    assert max(deleted) <= ROWS
    forgotten = [one for one in rows(db, schema.audit) if one.event_type == "jobs.forgotten"]
    assert {one.actor for one in forgotten} == {context.term.actor}


def test_whoever_comes_after_a_crash_goes_on(db, context, monkeypatch):
    crowd(db, 4 * JOBS)
    calls = iter(range(100))

    def dies(term, work):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original(term, work)

    original = Term.write
    monkeypatch.setattr(Term, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        run(context)
    monkeypatch.undo()
    assert 0 < len(left(db)) < 4 * JOBS
    fresh = DutyContext(context.term, context.hub, context.publisher, context.settings)
    run(fresh)
    assert left(db) == set()


def test_what_must_stay_does_not_hide_what_may_go(db, context):
    """Older by creation, and more than a look sees."""
    crowd(db, 2 * JOBS)
    young = utc_shift(-DAY_S)
    db.write(lambda conn: conn.execute(update(schema.jobs).values(finished_at=young, created_at=PAST)))
    (job_id,) = finished(db)
    aged(db, JOBS_KEPT + 1, job_id)
    run(context)
    assert len(left(db)) == 2 * JOBS
    assert job_id not in left(db)


def test_a_leader_that_was_replaced_deletes_nothing(db, context):
    (job_id,) = finished(db)
    aged(db, JOBS_KEPT + 1, job_id)
    name = context.settings.leader_lock
    db.write(lambda conn: leadership.take(conn, name, "another", 60.0, lock_held=True))
    with pytest.raises(StaleEpoch):
        forget_old(context)
    assert left(db) == {job_id}


def test_a_job_that_somebody_holds_goes_another_time(maria_db, config, hub, publisher):
    db = maria_db
    context = DutyContext(borrow(db, config, "the-test"), hub, publisher, config)
    one, other = finished(db, 2)
    aged(db, JOBS_KEPT + 1, one, other)
    with holding_job(db, one):
        run(context)
        assert left(db) == {one}
    run(context)
    assert left(db) == set()


def lost_once(db, hand, job_id) -> None:
    """Its first attempt had a lease, its worker vanished, and the second attempt is done."""
    hand.claim(*submit(db, job_id=job_id, max_attempts=5, min_memory_mb=100))
    hand.lose()
    set_job(db, job_id, not_before=None, queued="ready")
    hand.finish(*hand.claim(job_id))
    aged(db, JOBS_KEPT + 1, job_id)


def test_a_job_whose_lease_is_left_stays_until_that_ended_and_then_its_id_is_free(db, context):
    hand = hire(db, gpu())
    # The second's lease is named like those of the first, as far as that goes.
    for job_id in ("j", "j:1"):
        lost_once(db, hand, job_id)
    run(context)
    assert left(db) == {"j", "j:1"}  # their leases are held still
    first = update(schema.leases).where(schema.leases.c.job_id == "j")
    db.write(lambda conn: conn.execute(first.values(expires_at=utc_shift(-1.0))))
    db.write(lease_purge.purge)
    hand = hire(db, gpu())
    run(context)
    assert left(db) == {"j:1"}
    submit(db, job_id="j", min_memory_mb=100)
    assert [claim.attempt for claim in hand.claim("j")] == [1]


# ── workflows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def workflow(db, *tasks, **fields) -> None:
    named = [{"name": name, "type": "echo", "payload": {}, "depends_on": list(needs)} for name, *needs in tasks]
    new = NewWorkflow.prepare({"workflow_id": "w", "tasks": named} | fields, LIMITS)
    db.write(lambda conn: workflows.create(conn, db, new, Rules(POLICY)))


def finish(db, *names) -> None:
    hand = hire(db)
    for name in names:
        hand.finish(*hand.claim(f"w.{name}"))


def test_a_workflow_goes_as_a_whole_after_its_end(db, context):
    workflow(db, ["a"], ["b", "a"])
    finish(db, "a")
    aged(db, 400, "w.a")
    run(context)
    assert left(db) == {"w.a", "w.b"}  # it runs: its first task's result is needed
    assert left(db, schema.results) == {"w.a"}
    finish(db, "b")
    aged(db, 400, "w.a", "w.b")
    run(context)
    assert left(db) == left(db, schema.results) == {"w.a", "w.b"}  # it ended only now
    aged_flow(db, JOBS_KEPT + 1)
    run(context)
    assert left(db) == left(db, schema.results) == set()
    assert rows(db, schema.task_edges) == rows(db, schema.workflows) == []
    (told,) = [one for one in rows(db, schema.audit) if one.event_type == "workflow.forgotten"]
    assert told.actor == context.term.actor


def test_many_workflows_are_many_runs_between_which_other_duties_have_their_turn(db, context, monkeypatch):
    monkeypatch.setattr(retention, "BUDGET_S", 0.0)
    for number in range(4):
        workflow(db, ["a"], ["b"], ["c", "a", "b"], workflow_id=f"w{number}")
        hand = hire(db)
        for name in "abc":
            hand.finish(*hand.claim(f"w{number}.{name}"))
        aged_flow(db, JOBS_KEPT + 1, f"w{number}")
    there = []
    while (did := forget_old(context)) >= BATCH:
        there.append(len(rows(db, schema.workflows)))
    assert there == [3, 2, 1, 0]
    assert (did, left(db), rows(db, schema.task_edges)) == (0, set(), [])


def test_a_workflow_with_a_dead_letter_stays(db, context):
    workflow(db, ["a"], ["b"])
    finish(db, "b")
    hand = hire(db)
    (claim,) = hand.claim("w.a")
    set_job(db, "w.a", max_attempts=1)
    hand.fail(claim)
    assert status(db, "w.a") == "dead_letter"
    aged_flow(db, 400)
    run(context)
    assert left(db) == {"w.a", "w.b"}


def test_a_workflow_whose_tasks_still_end_stays(db, context):
    workflow(db, ["a"], ["b"])
    hand = hire(db)
    (claim,) = hand.claim("w.a")
    db.write(lambda conn: workflows.cancel(conn, "w"))
    db.write(lambda conn: flows.change(conn, "w", sweep=None))  # as the leader does once all were asked
    aged_flow(db, 400)
    run(context)
    assert left(db) == {"w.a", "w.b"}
    hand.fail(claim)
    aged_flow(db, 400)
    run(context)
    assert left(db) == set()


def test_a_large_workflow_goes_in_short_transactions_and_nobody_starts_it_over(db, context):
    workflow(db, *[[f"t{n}"] for n in range(20)])
    finish(db, *[f"t{n}" for n in range(20)])
    count = 2 * JOBS + 30
    many_jobs(db, count, status="done", queued=None, attempt=1, workflow_id="w", job_id=lambda i: f"w.more-{i}")
    needed = [{"task_id": "w.t0", "position": i, "needs_id": f"w.more-{i}"} for i in range(count)]
    needed += [{"task_id": "w.t1", "position": i, "needs_id": f"w.more-{i}"} for i in range(count)]
    db.write(lambda conn: conn.execute(insert(schema.task_edges), needed))
    db.write(lambda conn: flows.change(conn, "w", total=20 + count, done=20 + count))
    aged_flow(db, JOBS_KEPT + 1)
    with watched(db) as deleted:
        forget_old(context)
        assert len(left(db)) + len(rows(db, schema.task_edges)) > 0
        for start_over in (workflows.retry_failed, partial(workflows.rerun, task="t0")):
            with pytest.raises(WorkflowNotFound):
                db.write(lambda conn, start_over=start_over: start_over(conn, workflow_id="w"))
        assert db.read(lambda conn: flows.swept(conn, 10)) == []  # nobody's business but the duty's
        run(context)
    assert left(db) == set()
    assert rows(db, schema.task_edges) == rows(db, schema.workflows) == []
    assert max(deleted) <= ROWS + 1  # the workflow itself


def test_an_id_whose_workflow_is_half_deleted_is_neither_there_nor_free(db, context):
    workflow(db, ["a"], ["b"])
    finish(db, "a", "b")
    aged_flow(db, JOBS_KEPT + 1)
    db.write(lambda conn: flows.change(conn, "w", sweep=Sweep.FORGET))
    for tasks in (["a"], ["b"]), (["other"],):  # what it was, and something else
        with pytest.raises(WorkflowBusy):
            workflow(db, *tasks)
    for task in ("a", "new"):
        added = NewWorkflow.prepare(
            {"workflow_id": "w", "tasks": [{"name": task, "type": "echo", "payload": {}}]}, LIMITS
        ).tasks
        with pytest.raises(WorkflowEnded):
            db.write(lambda conn, added=added: workflows.add(conn, db, "w", added, Rules(POLICY)))
    with pytest.raises(WorkflowEnded):
        db.write(lambda conn: workflows.cancel(conn, "w"))
    stray = new_job(workflow_id="w")
    (refused,) = submit_jobs(db, [stray], POLICY)
    assert isinstance(refused, WorkflowEnded)
    run(context)
    workflow(db, ["other"])
    assert left(db) == {"w.other"}


def test_a_look_that_finds_nothing_writes_nothing(db, context):
    finished(db, 3)
    before = len(rows(db, schema.audit))
    with watched(db) as deleted:
        assert forget_old(context) == 0
    assert deleted == []
    assert len(rows(db, schema.audit)) == before


def test_what_went_is_logged(db, context, caplog):
    (job_id,) = finished(db)
    aged(db, JOBS_KEPT + 1, job_id)
    with caplog.at_level("INFO", retention.log.name):
        forget_old(context)
    (line,) = caplog.records
    assert (line.message, line.jobs) == ("forgotten", 1)
