"""Tasks that attempts add: nothing before they succeed, everything once after it, whoever makes jobs of them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.errors import InvalidInput, WorkflowGrown
from orchestrator.jobs import ErrorKind
from orchestrator.store import flows, inputs, schema, spawning, workflows
from orchestrator.store.backlog import Left, left
from orchestrator.store.settle import finish_all
from orchestrator.store.spawning import Marked, Parent, Rules, check, forget_lost, make_some, marked, stage
from orchestrator.workflows import Limits
from tests.factories import POLICY, done, hire, row, rows, submit, traffic
from tests.store.test_workflows import create, flow, run, standing, sweep, task
from worker.spawn import Added, Stage

RULES = Rules(POLICY, Limits(1_000_000, 64))


class Attempt:
    """A claimed job, and what its handler adds."""

    def __init__(self, db, hand, job_id):
        self.db, self.hand = db, hand
        (self.claim,) = hand.claim(job_id)
        self.stage = Stage(self._keep, 100_000)

    def _keep(self, number, frame):
        check(frame, Parent("w", "me", "default"), RULES.limits)
        self.db.write(lambda conn: stage(conn, self.claim.job_id, self.claim.attempt, number, frame))

    @property
    def end(self):
        self.stage.flush()
        return done(self.claim)._replace(spawned=self.stage.count)

    @property
    def mark(self):
        return Marked(self.claim.job_id, self.claim.attempt)

    def succeed(self):
        self.hand.record(ends=[self.end])

    def make(self):
        while make_some(self.db, self.mark, RULES).more:
            pass


def begin(db, job_id=None, hand=None):
    return Attempt(db, hand or hire(db), job_id or submit(db)[0])


def of_type(db, type):
    return sorted((one for one in rows(db, schema.jobs) if one.type == type), key=lambda one: one.job_id)


def payloads(db, type):
    return sorted((json.loads(one.payload) for one in of_type(db, type)), key=lambda one: one["index"])


def flow_of(db, attempt):
    return flow(db, row(db, attempt.claim.job_id).workflow_id)


# --- nothing before, everything after ---


def test_what_is_staged_is_nothing_until_the_attempt_succeeded(db):
    attempt = begin(db)
    attempt.stage.map("part", range(25), 10, ("sum", {}), {})
    attempt.stage.flush()
    assert len(rows(db, schema.jobs)) == 1 and db.read(lambda conn: marked(conn, 10)) == []
    attempt.make()
    assert len(rows(db, schema.jobs)) == 1
    attempt.succeed()
    assert db.read(lambda conn: marked(conn, 10)) == [attempt.mark]
    attempt.make()
    assert [one["start"] for one in payloads(db, "part")] == [0, 10, 20]
    assert rows(db, schema.task_stages) == rows(db, schema.spawns) == []


def test_a_crash_before_the_commit_adds_nothing_and_one_after_it_loses_nothing(db):
    attempt = begin(db)
    attempt.stage.map("part", range(3), 1, None, {})
    end = attempt.end

    def crash(conn):
        finish_all(conn, attempt.hand.by, [end])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        db.write(crash)
    assert rows(db, schema.workflows) == rows(db, schema.spawns) == []
    attempt.succeed()  # and its worker dies: another one goes on
    assert [make_some(db, one, RULES).count for one in db.read(lambda conn: marked(conn, 10))] == [3]


def test_an_end_that_is_written_again_adds_nothing_more(db):
    attempt = begin(db)
    attempt.stage.spawn("part", {}, ())
    attempt.succeed()
    attempt.succeed()
    attempt.make()
    attempt.succeed()
    attempt.make()
    assert len(of_type(db, "part")) == 1 and flow_of(db, attempt)["progress"]["total"] == 2


@pytest.mark.parametrize("kind", [ErrorKind.TRANSIENT, ErrorKind.PERMANENT])
def test_what_failed_attempts_staged_is_deleted(db, kind):
    attempt = begin(db)
    attempt.stage.spawn("part", {}, ())
    attempt.stage.flush()
    assert db.write(lambda conn: forget_lost(conn, 10)) == 0
    attempt.hand.fail(attempt.claim, kind)
    assert db.write(lambda conn: forget_lost(conn, 10)) == 1
    assert rows(db, schema.task_stages) == []


def test_of_two_attempts_only_the_tasks_of_the_one_that_succeeded_are_kept(db):
    first = begin(db)
    first.stage.spawn("part", {}, ())
    first.stage.flush()
    first.hand.hand_back(first.claim)
    second = begin(db, first.claim.job_id)
    second.stage.spawn("part", {}, ())
    second.stage.flush()
    assert db.write(lambda conn: forget_lost(conn, 10)) == 1
    second.succeed()
    assert db.write(lambda conn: forget_lost(conn, 10)) == 0
    second.make()
    assert len(of_type(db, "part")) == 1 and rows(db, schema.task_stages) == []


def test_ending_an_attempt_costs_the_same_whatever_it_added(db):
    costs = []
    for count in (1, 50_000):
        attempt = begin(db)
        attempt.stage.map("part", range(count), 1, None, {})
        attempt.stage.flush()
        with traffic(db) as seen:
            attempt.succeed()
        costs.append(len(seen.statements))
    assert costs[0] == costs[1], costs


def test_two_who_make_jobs_of_the_same_tasks_make_each_once(db, monkeypatch):
    monkeypatch.setattr(spawning, "BATCH", 7)
    attempt = begin(db)
    attempt.stage.map("part", range(100), 1, ("sum", {}), {})
    attempt.succeed()

    def make():
        while (made := make_some(db, attempt.mark, RULES)).more or made.busy:
            pass

    with ThreadPoolExecutor(3) as pool:
        for one in [pool.submit(make) for _ in range(3)]:
            one.result()
    assert [one["start"] for one in payloads(db, "part")] == list(range(100))
    (collector,) = of_type(db, "sum")
    assert collector.waits_for == 100 and flow_of(db, attempt)["progress"]["total"] == 102


# --- maps ---


@pytest.mark.parametrize("shape", [list, iter, lambda numbers: numbers])
@pytest.mark.parametrize("numbers", [range(25), range(100, 50, -2)])
def test_every_item_is_in_one_part_in_order(db, numbers, shape):
    attempt = begin(db)
    wanted = list(numbers)
    attempt.stage.map("part", shape(numbers), 10, None, {"shared": 1})
    attempt.succeed()
    attempt.make()
    parts = payloads(db, "part")
    found = [one["items"] if "items" in one else list(range(one["start"], one["stop"], one["step"])) for one in parts]
    assert [n for part in found for n in part] == wanted and {len(part) for part in found[:-1]} == {10}
    assert [one["index"] for one in parts] == [0, 1, 2] and all(one["shared"] == 1 for one in parts)


def test_a_long_list_travels_in_frames_of_bounded_size(db):
    attempt = begin(db)
    attempt.stage.map("part", [f"{n:01000}" for n in range(1000)], 1, None, {})
    attempt.stage.flush()
    frames = rows(db, schema.task_stages)
    assert len(frames) >= 4 and max(len(frame.body) for frame in frames) < 300_000
    attempt.succeed()
    attempt.make()
    assert [int(one["items"][0]) for one in payloads(db, "part")] == list(range(1000))


def test_whoever_collects_goes_when_all_parts_have_ended_and_gets_them_in_order(db):
    attempt = begin(db)
    then = attempt.stage.map("echo", range(5), 1, ("sum", {}), {})
    attempt.succeed()
    attempt.make()
    hand = attempt.hand
    parts = [one.job_id for one in of_type(db, "echo") if one.job_id != attempt.claim.job_id]
    for number, job_id in enumerate(reversed(parts)):
        assert row(db, then.job_id).queued == "blocked"
        (claim,) = hand.claim(job_id)
        hand.record(ends=[done(claim, str(number))])
    assert row(db, then.job_id).queued == "ready"
    found = db.read(lambda conn: inputs.page(conn, then.job_id))
    assert [one.result for one in found.inputs] == ["4", "3", "2", "1", "0"] and not found.more


def test_results_come_in_pages_of_bounded_size(db, monkeypatch):
    monkeypatch.setattr(inputs, "PAGE", 4)
    monkeypatch.setattr(inputs, "MAX_CHARACTERS", 100)
    create(db, *[task(f"t{n}") for n in range(6)], task("z", *[f"t{n}" for n in range(6)]))
    hand = hire(db)
    for n, claim in enumerate(hand.claim(*[f"w.t{n}" for n in range(6)])):
        hand.record(ends=[done(claim, '"' + "x" * (200 if n == 1 else 10) + '"')])
    pages, after, more = [], -1, True
    while more:
        found = db.read(lambda conn, after=after: inputs.page(conn, "w.z", after))
        pages.append([one.position for one in found.inputs])
        after, more = pages[-1][-1], found.more
    assert pages == [[0], [1], [2, 3, 4, 5]]


def test_tasks_that_need_others_wait_for_those_that_have_not_ended(db, monkeypatch):
    monkeypatch.setattr(spawning, "BATCH", 1)
    attempt = begin(db)
    first = attempt.stage.spawn("echo", {}, ())
    second = attempt.stage.spawn("echo", {}, ())
    both = attempt.stage.spawn("echo", {}, (first, second))
    attempt.succeed()
    make_some(db, attempt.mark, RULES)
    attempt.hand.finish(*attempt.hand.claim(first.job_id))  # before the one that needs it is a job
    attempt.make()
    assert row(db, both.job_id).waits_for == 1
    attempt.hand.finish(*attempt.hand.claim(second.job_id))
    assert row(db, both.job_id).queued == "ready"


def test_bad_needs_and_sizes_are_refused_at_once(db):
    attempt = begin(db)
    uncollected = attempt.stage.map("part", range(3), 1, None, {})
    with pytest.raises(ValueError, match="then"):
        attempt.stage.spawn("echo", {}, (uncollected,))
    with pytest.raises(TypeError):
        attempt.stage.spawn("echo", {}, ("a-name",))
    with pytest.raises(ValueError, match="chunk"):
        attempt.stage.map("part", ["x" * 60_000] * 2, 2, None, {})
    with pytest.raises(ValueError, match="1,000,000"):
        attempt.stage.map("part", range(2_000_000), 1, None, {})
    assert isinstance(uncollected, Added)
    frame = '{"base":"b","entries":[{"n":0,"count":1,"type":"echo","payload":{},"options":{"job_id":"x"}}]}'
    with pytest.raises(InvalidInput, match="job_id"):
        check(frame, Parent("w", "me", "default"), RULES.limits)


# --- what is left ---


def test_tasks_that_are_no_jobs_yet_are_left(db):
    """Who works until his lane is empty must not leave between the end of the one that added them and their making."""
    create(db, task("a"))
    attempt = begin(db, "w.a")
    attempt.stage.map("part", range(5), 1, ("sum", {}), {})
    attempt.succeed()
    assert db.read(lambda conn: left(conn, "default")) == Left(0, 0, 0, 0, coming=6)
    assert db.read(lambda conn: left(conn, "default", most=2)).total == 2
    attempt.make()
    assert db.read(lambda conn: left(conn, "default")) == Left(5, 1, 0, 0)


def test_tasks_that_a_stopped_workflow_will_not_get_are_not_left(db):
    create(db, task("a"))
    attempt = begin(db, "w.a")
    attempt.stage.map("part", range(5), 1, None, {})
    attempt.succeed()
    db.write(lambda conn: workflows.cancel(conn, "w"))
    assert len(rows(db, schema.spawns)) == 1
    assert db.read(lambda conn: left(conn, "default")).total == 0


# --- running again ---


@pytest.mark.parametrize("again", ["a", "b"])
def test_a_task_that_added_tasks_is_not_run_again(db, again):
    """It would add them a second time."""
    create(db, task("a"), task("b", "a"), task("c", "b"))
    run(hire(db), "a")
    attempt = begin(db, "w.b")
    attempt.stage.map("part", range(3), 1, ("sum", {}), {})
    attempt.succeed()
    before = standing(db), flow(db)
    with pytest.raises(WorkflowGrown, match="task b has added tasks"):
        db.write(lambda conn: workflows.rerun(conn, "w", again))
    assert (standing(db), flow(db)) == before
    run(attempt.hand, "c")
    assert db.write(lambda conn: workflows.rerun(conn, "w", "c")).tasks == 1


def test_an_attempt_that_added_tasks_and_failed_may_be_followed_by_another(db):
    create(db, task("a"))
    attempt = begin(db, "w.a")
    attempt.stage.spawn("part", {}, ())
    attempt.stage.flush()
    attempt.hand.fail(attempt.claim, ErrorKind.PERMANENT)
    assert db.write(lambda conn: workflows.rerun(conn, "w", "a")).tasks == 1


# --- handlers that catch what adding raised ---


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stage: stage.spawn("part", {"x": object()}, ()),
        lambda stage: stage.spawn("part", {"x": "x" * 200_000}, ()),
        lambda stage: stage.map("part", range(5), 1, ("sum", {"x": object()}), {}),
        lambda stage: stage.map("part", range(5), 1, ("sum", {}), {"x": object()}),
        lambda stage: stage.map("part", [object()], 1, ("sum", {}), {}),
        lambda stage: stage.map("part", range(2_000_000), 1, ("sum", {}), {}),
    ],
)
def test_a_call_that_raised_added_nothing_and_the_others_are_made(db, wrong):
    attempt = begin(db)
    attempt.stage.spawn("echo", {}, ())
    with pytest.raises((InvalidInput, ValueError)):
        wrong(attempt.stage)
    assert attempt.stage.count == 1
    attempt.stage.map("part", range(3), 1, ("sum", {}), {})
    attempt.succeed()
    attempt.make()
    assert len(of_type(db, "part")) == 3 and of_type(db, "sum")[0].waits_for == 3
    assert (flow_of(db, attempt)["status"], flow_of(db, attempt)["progress"]["total"]) == ("running", 6)
    assert rows(db, schema.spawns) == rows(db, schema.task_stages) == []


def test_a_map_that_broke_halfway_breaks_its_attempt():
    def breaking():
        yield from ["x" * 1000] * 500
        raise LookupError("no more")

    stage = Stage(lambda _number, _frame: None, 100_000)
    with pytest.raises(LookupError):
        stage.map("part", breaking(), 1, ("sum", {}), {})
    for more in (stage.flush, lambda: stage.spawn("echo", {}, ()), lambda: stage.map("echo", range(3), 1, None, {})):
        with pytest.raises(LookupError, match="no more"):
            more()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_frame_that_was_not_kept_breaks_its_attempt(lost):
    """The first is the one of whoever collects, and is sent behind its parts."""

    def send(number, _frame):
        if number == lost:
            raise RuntimeError("not kept")

    stage = Stage(send, 100_000)
    with pytest.raises(RuntimeError):
        stage.map("part", range(3), 1, ("sum", {}), {})
    with pytest.raises(RuntimeError, match="not kept"):
        stage.flush()


# --- in a workflow that does not go on ---


def test_a_task_that_adds_tasks_keeps_its_workflow_from_ending(db):
    create(db, task("a"))
    attempt = begin(db, "w.a")
    attempt.stage.spawn("echo", {}, ())
    attempt.succeed()
    assert flow(db)["status"] == "running" and flow(db)["progress"]["total"] == 2
    attempt.make()
    (added,) = [one for one in rows(db, schema.jobs) if one.task is None]
    attempt.hand.finish(*attempt.hand.claim(added.job_id))
    assert flow(db)["status"] == "done"


def test_a_workflow_that_was_stopped_gets_no_more_tasks_until_it_goes_on(db, monkeypatch):
    monkeypatch.setattr(spawning, "BATCH", 3)
    create(db, task("a"), task("b"))
    attempt = begin(db, "w.a")
    then = attempt.stage.map("echo", range(5), 1, ("echo", {}), {})
    attempt.succeed()
    make_some(db, attempt.mark, RULES)  # the one that collects
    make_some(db, attempt.mark, RULES)  # three parts
    attempt.hand.fail(attempt.hand.claim("w.b")[0], ErrorKind.PERMANENT)
    sweep(db)
    assert make_some(db, attempt.mark, RULES).count == 0 and db.read(lambda conn: marked(conn, 10)) == []
    assert set(standing(db).values()) == {"done", "failed", "cancelled"}
    db.write(lambda conn: workflows.retry_failed(conn, "w"))
    # Two of its five parts are no jobs yet, and it waits for those as well.
    assert row(db, then.job_id).waits_for == 5
    attempt.make()
    ids = [one.job_id for one in rows(db, schema.jobs) if one.task is None and one.job_id != then.job_id]
    for job_id in [*ids, "w.b"]:
        assert row(db, then.job_id).queued == ("blocked" if job_id != "w.b" else "ready")
        attempt.hand.finish(*attempt.hand.claim(job_id))
    attempt.hand.finish(*attempt.hand.claim(then.job_id))
    assert flow(db)["status"] == "done"


def test_who_stops_a_workflow_waits_for_whoever_adds_tasks_to_it(maria_db):
    """Otherwise tasks that are made at this moment would be missed, and run."""
    create(maria_db, task("a"))
    attempt = begin(maria_db, "w.a")
    attempt.stage.map("echo", range(5), 1, None, {})
    attempt.succeed()
    with ThreadPoolExecutor(1) as pool:

        def slowly(conn):
            made = spawning.make(conn, maria_db, attempt.mark, RULES)
            cancelling = pool.submit(lambda: maria_db.write(lambda conn: workflows.cancel(conn, "w")))
            with pytest.raises(TimeoutError):
                cancelling.result(0.3)
            return made, cancelling

        made, cancelling = maria_db.write(slowly)
        cancelling.result(60)
    assert made.count == 5 and list(standing(maria_db).values()).count("cancelled") == 5


def test_tasks_that_are_made_while_their_workflow_fails_are_cancelled_too(maria_db, monkeypatch):
    create(maria_db, task("a"), task("b"))
    attempt = begin(maria_db, "w.a")
    attempt.stage.map("echo", range(5), 1, None, {})
    attempt.succeed()
    look = flows.tasks

    def slowly(*asked):
        seen = look(*asked)
        attempt.make()
        return seen

    (claim,) = attempt.hand.claim("w.b")
    with monkeypatch.context() as patched:
        patched.setattr(flows, "tasks", slowly)
        attempt.hand.fail(claim, ErrorKind.PERMANENT)
    assert flow(maria_db)["sweep"] == "pending" and list(standing(maria_db).values()).count("ready") == 5
    sweep(maria_db)
    assert flow(maria_db)["sweep"] is None and list(standing(maria_db).values()).count("cancelled") == 5


def test_tasks_that_can_never_be_fail_their_workflow(db):
    attempt = begin(db)
    attempt.stage.spawn("echo", {"long": "x" * 5000}, ())
    attempt.succeed()
    small = Rules(POLICY, Limits(1000, 64))
    make_some(db, attempt.mark, small)
    found = flow_of(db, attempt)
    assert found["status"] == "failed" and "larger than 1000 bytes" in found["reason"]
    assert found["progress"]["total"] == 1 and rows(db, schema.task_stages) == rows(db, schema.spawns) == []


def test_added_tasks_that_cost_units_or_want_quiet_wait_for_the_leader(db):
    attempt = begin(db)
    attempt.stage.spawn("echo", {}, (), options={"constraints": {"quiet": True}})
    attempt.succeed()
    attempt.make()
    (added,) = [one for one in rows(db, schema.jobs) if one.constraints]
    assert (added.queued, added.blocked_on) == ("blocked", "quiet")


def test_frames_that_vanished_are_noticed(db):
    attempt = begin(db)
    attempt.stage.spawn("echo", {}, ())
    attempt.succeed()
    db.write(lambda conn: conn.execute(schema.task_stages.delete()))
    make_some(db, attempt.mark, RULES)
    assert "gone" in flow_of(db, attempt)["reason"]
