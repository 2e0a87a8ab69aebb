"""Workflows on real processes: results arrive, tasks add tasks, and what dies in between adds nothing twice."""

import signal

import pytest
from sqlalchemy import select

from orchestrator.store import schema, workflows
from orchestrator.store.submit import Rules
from orchestrator.workflows import Limits, NewWorkflow
from tests.factories import POLICY, new_job, rows
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO
from tests.worker.deaths import declare_dead

HANDLERS = ("tests.worker.flow_handlers",)


@pytest.fixture
def worker(cluster):
    return cluster.worker(worker_handlers=HANDLERS)


def submit(orchestrator, type, payload, **fields):
    job = new_job(type=type, payload=payload, **fields)
    orchestrator.submit([job]).result(10)
    return job.job_id


def flow_of(cluster, job_id, status="done", timeout=30.0):
    """The workflow that a job became a task of, once it has this status."""

    def look():
        workflow_id = cluster.db.read(
            lambda conn: conn.execute(select(schema.jobs.c.workflow_id).where(schema.jobs.c.job_id == job_id)).scalar()
        )
        found = cluster.db.read(lambda conn: workflows.get(conn, workflow_id, 500)) if workflow_id else None
        return found if found and found["status"] == status else None

    return wait_until(look, timeout=timeout, what=f"the workflow of {job_id} is {status}")


def collected(cluster, flow):
    (one,) = [task for task in flow["tasks"] if task["type"] == "add-up"]
    return cluster.job(one["job_id"])["result"]


def left_over(cluster):
    return rows(cluster.db, schema.task_stages) + rows(cluster.db, schema.spawns)


@EMBEDDED_TOO
def test_tasks_get_the_results_of_what_they_need(cluster, orchestrator, worker):
    tasks = [
        {"name": "a", "type": "echo", "payload": {"n": 1}},
        {"name": "b", "type": "echo", "payload": {"n": 2}},
        {"name": "c", "type": "gather", "payload": {}, "depends_on": ["b", "a"]},
        {"name": "d", "type": "by-name", "payload": {"names": ["c", "a"]}, "depends_on": ["a", "c"]},
    ]
    new = NewWorkflow.prepare({"workflow_id": "w", "tasks": tasks}, Limits(10_000, 16))
    cluster.db.write(lambda conn: workflows.create(conn, cluster.db, new, Rules(POLICY)))
    gathered = {"name": None, "got": [{"n": 2}, {"n": 1}]}
    assert cluster.wait_for("w.c", "done")["result"] == gathered
    assert cluster.wait_for("w.d", "done")["result"] == {"c": gathered, "a": {"n": 1}}
    assert flow_of(cluster, "w.d")["progress"]["done"] == 4


@EMBEDDED_TOO
def test_a_map_over_a_range_with_a_task_that_collects_it(cluster, orchestrator, worker):
    mapped = submit(orchestrator, "map-squares", {"range": [0, 105, 1]}, agent="me", priority=7)
    flow = flow_of(cluster, mapped)
    assert flow["implicit"] and flow["agent"] == "me" and flow["progress"]["done"] == flow["progress"]["total"] == 13
    assert cluster.job(mapped)["result"] == 12
    total = sum(n * n for n in range(105))
    order = [(10 * n) ** 2 for n in range(11)]
    assert collected(cluster, flow) == {"by": 1, "sum": total, "order": order, "again": 11}
    jobs = [one for one in rows(cluster.db, schema.jobs) if one.type == "square"]
    assert {(one.agent, one.priority) for one in jobs} == {("me", 7)}
    assert left_over(cluster) == []


def test_a_map_over_items_one_by_one_and_from_an_iterator(cluster, orchestrator, worker):
    items = [3, 1, 2]
    for iterator in (False, True):
        mapped = submit(orchestrator, "map-squares", {"items": items, "chunk": 1, "iterator": iterator})
        assert collected(cluster, flow_of(cluster, mapped))["order"] == [9, 1, 4]
    empty = submit(orchestrator, "map-squares", {"items": []})
    assert collected(cluster, flow_of(cluster, empty)) == {"by": 1, "sum": 0, "order": [], "again": 0}


def test_tasks_that_are_added_wait_for_one_another(cluster, orchestrator, worker):
    added = submit(orchestrator, "chain", {})
    flow_of(cluster, added)
    _, second, both, last = cluster.job(added)["result"]
    got = cluster.job(both)["result"]
    assert got == {"name": "both", "got": [{"n": 2}, {"n": 1}]}
    assert cluster.job(last)["result"]["got"] == [got]
    assert cluster.job(second)["priority"] == 50


@pytest.mark.parametrize("how", ["fail", "die"])
def test_an_attempt_that_does_not_succeed_adds_nothing(cluster, orchestrator, worker, how):
    payload = {"range": [0, 30, 1], "times": 1, "how": how}
    mapped = submit(orchestrator, "map-squares", payload)
    flow = flow_of(cluster, mapped)
    assert collected(cluster, flow)["by"] == 2 and flow["progress"]["total"] == 5
    assert len([one for one in rows(cluster.db, schema.jobs) if one.type == "square"]) == 3
    wait_until(lambda: left_over(cluster) == [], what="nothing is left of the first attempt")


def test_a_job_that_fails_for_good_leaves_no_workflow(cluster, orchestrator, worker):
    mapped = submit(orchestrator, "map-squares", {"range": [0, 30, 1], "times": 9, "how": "fail"}, max_attempts=1)
    cluster.wait_for(mapped, "dead_letter")
    wait_until(lambda: left_over(cluster) == [], what="nothing is left of it")
    assert rows(cluster.db, schema.workflows) == [] and len(rows(cluster.db, schema.jobs)) == 1


def test_a_worker_that_is_killed_in_the_middle_adds_nothing_twice(cluster, orchestrator, gate):
    """All is staged, nothing settled: another worker runs it again, and that attempt's tasks alone become jobs."""
    killed = cluster.worker(worker_handlers=HANDLERS)
    mapped = submit(orchestrator, "map-squares", {"range": [0, 50, 1], "gate": str(gate)})
    wait_until(lambda: len(rows(cluster.db, schema.task_stages)) == 2, what="its tasks are staged")
    declare_dead(cluster, killed, signal.SIGKILL)
    gate.unlink()
    cluster.worker(worker_handlers=HANDLERS)
    flow = flow_of(cluster, mapped)
    assert collected(cluster, flow)["by"] == 2 and flow["progress"]["total"] == 7
    assert len([one for one in rows(cluster.db, schema.jobs) if one.type == "square"]) == 5
    wait_until(lambda: left_over(cluster) == [], what="nothing is left of the first attempt")


def test_a_part_that_fails_fails_the_workflow_unless_it_is_optional(cluster, orchestrator, worker):
    strict = submit(orchestrator, "map-squares", {"range": [0, 50, 1], "refuse": 25})
    flow = flow_of(cluster, strict, "failed")
    assert "failed: Permanent: refused" in flow["reason"]
    loose = submit(orchestrator, "map-squares", {"range": [0, 50, 1], "refuse": 25, "critical": False})
    flow = flow_of(cluster, loose)
    assert collected(cluster, flow)["order"] == [0, 100, None, 900, 1600]
    assert flow["progress"]["failed"] == 1


def test_tasks_that_cannot_be_are_refused_by_name(cluster, orchestrator, worker):
    for options in ({"nonsense": 1}, {"agent": "root"}, {"priority": 1000}):
        record = cluster.wait_for(submit(orchestrator, "add-nonsense", options), "failed")
        assert next(iter(options)) in record["last_error"], record["last_error"]
    assert left_over(cluster) == []
