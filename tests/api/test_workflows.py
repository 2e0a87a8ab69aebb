"""/workflows: what clients may ask, and what they are told."""

from orchestrator.telemetry import metrics
from tests.factories import hire
from tests.store.test_spawning import begin


def task(name, *needs, **fields):
    return {"name": name, "type": "echo", "payload": {}, "depends_on": [*needs]} | fields


def create(api, *tasks, **fields):
    return api.post("/workflows", json={"workflow_id": "w", "tasks": [*tasks]} | fields)


def test_a_workflow_is_created_once(api):
    first = create(api, task("a"), task("b", "a"), name="two")
    assert first.status_code == 202
    found = first.json()
    assert found["created"] and found["status"] == "running" and found["name"] == "two"
    assert found["progress"] == {"completed": 0, "total": 2, "done": 0, "failed": 0, "cancelled": 0}
    assert {one["name"]: one["depends_on"] for one in found["tasks"]} == {"a": [], "b": ["a"]}
    again = create(api, task("b", "a"), task("a"), name="two")
    assert again.status_code == 200 and not again.json()["created"]
    other = create(api, task("a"))
    assert (other.status_code, other.json()["code"]) == (409, "workflow_conflict")


def test_bad_ones_are_refused_and_nothing_is_written(api):
    with api.adding_no_row():
        for tasks, said in (
            ([task("a", "b"), task("b", "a")], "a → b → a"),
            ([task("a", "x")], "no such task"),
            ([task("a", payload=1)], "task 'a'"),
            ([], "at least one"),
            (["a"], "tasks"),
        ):
            answer = create(api, *tasks)
            assert answer.status_code == 422 and said in answer.json()["detail"], answer.text


def test_a_workflow_that_is_not_let_in_is_a_decision_about_the_task_that_was_refused(api):
    def counted(decision, reason):
        labels = {"decision": decision, "reason": reason}
        return metrics.REGISTRY.get_sample_value("gpu_orchestrator_admission_decisions_total", labels)

    before = counted("rejected", "paused"), counted("admitted", "free")
    api.post("/control/pause", {"scope": "type", "name": "closed"})
    with api.adding_no_row():
        answer = create(api, task("a"), task("b", type="closed"))
    assert (answer.status_code, answer.json()["code"]) == (503, "paused")
    assert (counted("rejected", "paused"), counted("admitted", "free")) == (before[0] + 1, before[1])
    assert create(api, task("a")).status_code == 202
    assert (counted("rejected", "paused"), counted("admitted", "free")) == (before[0] + 1, before[1] + 1)


def test_pages_and_filters(api):
    for number in range(3):
        create(api, task("a"), workflow_id=f"w{number}", agent="me")
    page = api.get("/workflows?limit=2&agent=me&status=running").json()
    rest = api.get(f"/workflows?limit=2&agent=me&status=running&cursor={page['next_cursor']}").json()
    assert [one["workflow_id"] for one in page["workflows"] + rest["workflows"]] == ["w2", "w1", "w0"]
    assert rest["next_cursor"] is None
    assert api.get("/workflows?status=done").json()["workflows"] == []
    listed = api.get("/jobs?workflow_id=w1").json()["jobs"]
    assert [(one["job_id"], one["workflow_id"], one["task"]) for one in listed] == [("w1.a", "w1", "a")]


def test_what_nobody_knows_is_404(api):
    for path in ("", "/events"):
        assert api.get(f"/workflows/x{path}").json()["code"] == "workflow_not_found"
    for action, body in (("cancel", None), ("retry_failed", None), ("rerun", {"task": "a"}), ("tasks", {"tasks": []})):
        answer = api.post(f"/workflows/x/{action}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "workflow_not_found"), action


def test_tasks_are_added_and_jobs_join(api):
    create(api, task("a"))
    added = api.post("/workflows/w/tasks", json={"tasks": [task("b", "a")]})
    assert (added.status_code, added.json()["added"]) == (202, ["b"])
    again = api.post("/workflows/w/tasks", json={"tasks": [task("b", "a")]})
    assert (again.status_code, again.json()["added"]) == (200, [])
    joined = api.post("/jobs/submit", json={"type": "echo", "payload": {}, "workflow_id": "w"})
    assert joined.status_code == 202
    assert api.get("/workflows/w").json()["progress"]["total"] == 3
    lost = api.post("/jobs/submit", json={"type": "echo", "payload": {}, "workflow_id": "x"})
    assert lost.json()["code"] == "workflow_not_found"


def test_explain_names_what_a_task_waits_for(api):
    create(api, task("a"), task("b", "a"))
    found = api.get("/jobs/w.b/explain").json()
    assert found["reason"] == "tasks" and found["message"] == "it waits for tasks: a (pending)"
    assert found["evidence"]["tasks"] == [{"task": "a", "status": "pending"}]


def test_cancel_retry_and_rerun(api):
    create(api, task("a"), task("b", "a"))
    cancelled = api.post("/workflows/w/cancel")
    assert cancelled.json() == {"workflow_id": "w", "status": "cancelled"}
    assert api.post("/workflows/w/cancel").status_code == 200
    refused = api.post("/workflows/w/tasks", json={"tasks": [task("c")]})
    assert (refused.status_code, refused.json()["code"]) == (409, "workflow_ended")
    api.wait_cancelled("w")
    retried = api.post("/workflows/w/retry_failed").json()
    assert retried["status"] == "running" and retried["progress"]["completed"] == 0
    early = api.post("/workflows/w/rerun", json={"task": "a"})
    assert (early.status_code, early.json()["code"]) == (409, "workflow_busy")
    hand = hire(api.db)
    hand.finish(*hand.claim("w.a"))
    alone = api.post("/jobs/w.a/retry")
    assert (alone.status_code, alone.json()["code"]) == (409, "task_of_workflow")
    again = api.post("/workflows/w/rerun", json={"task": "a"}).json()
    assert again["restarted"] == 1 and again["progress"]["done"] == 0
    hand.finish(*hand.claim("w.a"))
    hand.finish(*hand.claim("w.b"))
    assert api.get("/workflows/w").json()["status"] == "done"
    events = api.get("/workflows/w/events").json()["events"]
    assert [one["event_type"] for one in events] == [
        f"workflow.{what}" for what in ("created", "cancelled", "retried", "rerun", "done")
    ]


def test_a_task_that_added_tasks_is_not_run_again(api):
    create(api, task("a"), task("b"))
    attempt = begin(api.db, "w.a")
    attempt.stage.map("echo", range(1), 1, None, {})  # without it the leader would find it gone, and end the workflow
    attempt.succeed()
    refused = api.post("/workflows/w/rerun", json={"task": "a"})
    assert (refused.status_code, refused.json()["code"]) == (409, "workflow_grown")
    assert "make a new workflow" in refused.json()["detail"] and "spawned" not in api.get("/jobs/w.a").json()


def test_the_results_of_what_a_task_needed(api):
    create(api, task("a"), task("b"), task("c", "b", "a"))
    hand = hire(api.db)
    hand.finish(*hand.claim("w.a", "w.b"))
    found = api.get("/jobs/w.c/inputs").json()
    assert [(one["name"], one["status"], one["result"]) for one in found["inputs"]] == [
        ("b", "done", {}),
        ("a", "done", {}),
    ]
    assert found["next_after"] is None
    (only,) = api.get("/jobs/w.c/inputs?name=a").json()["inputs"]
    assert only["job_id"] == "w.a"
    assert api.get(f"/jobs/w.c/inputs?after={2**31 - 1}").json()["inputs"] == []
    beyond = api.get(f"/jobs/w.c/inputs?after={2**31}")
    assert (beyond.status_code, beyond.json()["code"]) == (422, "invalid_input")
