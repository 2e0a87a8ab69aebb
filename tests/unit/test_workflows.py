"""Workflows as clients describe them: which are accepted, in what order, and what is the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.jobs import Status
from orchestrator.workflows import (
    MAX_ID,
    Limits,
    NewWorkflow,
    Progress,
    counted_as,
    find_cycle,
    in_order,
    prepare_tasks,
    task_id,
)

LIMITS = Limits(1000, 16, max_tasks=5)


def task(name, *needs, **fields):
    return {"name": name, "type": "echo", "payload": {}, "depends_on": [*needs]} | fields


def prepare(*tasks, **fields):
    return NewWorkflow.prepare({"workflow_id": "w", "tasks": [*tasks]} | fields, LIMITS)


def refused(*tasks, **fields):
    with pytest.raises(InvalidInput) as error:
        prepare(*tasks, **fields)
    return error.value.message


def test_a_task_is_a_job_with_a_name():
    new = prepare(task("a", payload={"n": 1}, priority="HIGH", critical=False), agent="me")
    (one,) = new.tasks
    assert (one.name, one.optional, one.depends_on) == ("a", True, ())
    assert (one.job.job_id, one.job.spec.workflow_id, one.job.spec.agent) == ("w.a", "w", "me")
    assert (one.job.spec.priority, one.job.payload) == (50, '{"n":1}')


def test_tasks_come_behind_those_they_need():
    new = prepare(task("c", "b"), task("b", "a"), task("a"), task("d"))
    assert [one.name for one in new.tasks] == ["a", "d", "b", "c"]


def test_a_cycle_is_named():
    assert "b → c → b" in refused(task("a", "b"), task("b", "c"), task("c", "b"))
    assert "a → a" in refused(task("a", "a"))


def test_what_is_needed_must_be_there():
    assert "'b'" in refused(task("a", "b"))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (task("a", payload=[]), "task 'a': payload"),
        (task("a", job_id="x"), "job_id is made of"),
        (task("a", workflow_id="x"), "workflow_id is that"),
        (task("a", nonsense=1), "nonsense"),
        (task("not a name"), "name"),
        (task("a", critical="no"), "critical"),
    ],
)
def test_a_bad_task_is_refused_by_name(body, said):
    assert said in refused(body)


def test_a_task_that_waits_for_others_has_no_time_of_its_own():
    late = task("b", "a", earliest_start_at="2999-01-01T00:00:00Z")
    assert "earliest_start_at" in refused(task("a"), late)
    assert prepare(task("a", earliest_start_at="2999-01-01T00:00:00Z"))


def test_names_and_needs_are_there_once():
    assert "'a' is there twice" in refused(task("a"), task("a"))
    assert "twice" in refused(task("a"), task("b", "a", "a"))


def test_a_workflow_has_one_task_at_least_and_not_too_many():
    assert "at least one" in refused()
    with pytest.raises(PayloadTooLarge):
        prepare(*[task(f"t{n}") for n in range(6)])


def test_the_order_of_tasks_is_no_content_all_else_is():
    one = prepare(task("a"), task("b"))
    assert one.content_hash == prepare(task("b"), task("a")).content_hash
    others = [
        prepare(task("a"), task("b", "a")),
        prepare(task("a"), task("b", critical=False)),
        prepare(task("a"), task("b", payload={"n": 1})),
        prepare(task("a"), task("b"), name="x"),
        prepare(task("a"), task("b"), max_runtime_sec=3.0),
        prepare(task("a"), task("b"), deadline_at="2999-01-01T00:00:00Z"),
    ]
    assert len({one.content_hash, *[other.content_hash for other in others]}) == 1 + len(others)


def test_ids_of_tasks_fit_however_long_the_names_are():
    long = task_id("w" * MAX_ID, "n" * 128)
    assert len(long) <= 128 and long != task_id("w" * MAX_ID, "n" * 127)


def test_the_earlier_of_two_limits_counts():
    new = prepare(task("a"), max_runtime_sec=10.0, deadline_at="2030-01-01T00:00:05Z")
    assert str(new.expires_at(new.deadline.replace(second=0))) == "2030-01-01 00:00:05"
    assert str(new.expires_at(new.deadline.replace(year=2029, second=0))) == "2029-01-01 00:00:10"
    assert prepare(task("a")).expires_at(new.deadline) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_every_graph_has_an_order_or_a_cycle_that_is_one(edges):
    needs = {str(n): sorted({str(b) for a, b in edges if a == n}) for n in range(10)}
    cycle = find_cycle(needs)
    if cycle is not None:
        assert cycle[0] == cycle[-1]
        assert all(after in needs[before] for before, after in pairwise(cycle))
        return
    bodies = [task(name, *needed) for name, needed in needs.items()]
    ordered = [one.name for one in in_order(prepare_tasks(bodies, "w", "me", Limits(1000, 16)))]
    assert sorted(ordered) == sorted(needs)
    assert all(ordered.index(need) < ordered.index(name) for name in needs for need in needs[name])


def test_a_long_chain_is_no_recursion():
    needs = {str(n): [str(n - 1)] if n else [] for n in range(5000)}
    assert find_cycle(needs) is None
    assert len(find_cycle(needs | {"0": ["4999"]}) or ()) == 5001


def test_progress():
    progress = Progress(3).plus(done=1, failed=1)
    assert (progress.completed, progress.over) == (2, False)
    assert progress.plus(cancelled=1).over
    assert [counted_as(Status(one)) for one in ("done", "skipped", "failed", "dead_letter", "cancelled")] == [
        "done",
        "done",
        "failed",
        "failed",
        "cancelled",
    ]
