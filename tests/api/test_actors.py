"""Every request that changes something leaves one row in the audit trail, and the row says who asked."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import func, select

from orchestrator import actors
from orchestrator.api.app import NOUNS
from orchestrator.store import gpus
from orchestrator.store.schema import audit
from tests.api.conftest import Running
from tests.factories import gpu, hire, rows
from tests.fetching import Puppet, register

LOCAL = "anonymous@127.0.0.1"


@dataclass(frozen=True)
class Call:
    """What to send, and what is told of it; `given` are the names in its path."""

    event: str
    body: Any = None
    given: dict[str, str] = field(default_factory=dict)
    #: Jobs and leases are asked for in the name of an agent; what a worker says of its jobs has the worker's.
    actor: str | None = LOCAL


Prepare = Callable[[Running], Call]
_numbers = itertools.count()


def fresh(kind: str) -> str:
    return f"{kind}-{next(_numbers)}"


def waiting(event: str, body: Any = None) -> Prepare:
    return lambda api: Call(event, body, {"job_id": api.submit()})


def hired(api: Running) -> tuple[Puppet, dict[str, Any]]:
    """A worker over HTTP, and its job."""
    lane = fresh("lane")
    worker = register(api, pool_id=lane)
    api.submit(pool_id=lane, max_attempts=1)
    return worker, worker.one()


def owned(event: str, **said: Any) -> Prepare:
    def prepare(api: Running) -> Call:
        worker, job = hired(api)
        body = {"worker_id": worker.worker_id, "attempt": job["attempt"]} | said
        return Call(event, body, {"job_id": job["job_id"]}, actor=None)

    return prepare


def buried(api: Running) -> str:
    worker, job = hired(api)
    assert worker.fail(job).json()["status"] == "dead_letter"
    return str(job["job_id"])


def about_letter(event: str) -> Prepare:
    return lambda api: Call(event, {"filter": {"job_ids": [buried(api)]}})


def to_claim(api: Running) -> Call:
    lane = fresh("lane")
    worker = register(api, pool_id=lane)
    api.submit(pool_id=lane)
    return Call("job.claimed", {"worker_id": worker.worker_id, "wait_seconds": 20}, actor=None)


def retry_all(api: Running) -> Call:
    agent = fresh("agent")
    lane = fresh("lane")
    worker = register(api, pool_id=lane)
    api.submit(pool_id=lane, agent=agent, max_attempts=1)
    worker.fail(worker.one())
    return Call("job.redriven", {"filter": {"agent": agent}})


def leased(event: str) -> Prepare:
    def prepare(api: Running) -> Call:
        hire(api.db, gpu(0))
        asked = api.post("/leases", {"agent": "ann", "min_memory_mb": 10, "ttl_seconds": 60}).json()
        return Call(event, None, {"token": asked["token"]})

    return prepare


def to_lease(api: Running) -> Call:
    hire(api.db, gpu(0))
    return Call("lease.granted", {"agent": "ann", "min_memory_mb": 10, "ttl_seconds": 60}, actor="ann")


def registered(event: str) -> Prepare:
    return lambda api: Call(event, {"worker_id": register(api).worker_id})


def pool(event: str, body: Any = None, *, closed: bool = False, named: bool = False) -> Prepare:
    """About a pool; `named`: its name stands in the body."""

    def prepare(api: Running) -> Call:
        pool_id = fresh("pool")
        assert api.post("/workers/pool", {"pool_id": pool_id, "desired_workers": 0}).status_code == 201
        if closed:
            assert api.post("/control/evict_pool", {"pool_id": pool_id}).status_code == 200
        return Call(event, {"pool_id": pool_id} if named else body, {} if named else {"pool_id": pool_id})

    return prepare


ADMISSION = {"queue_depth": {"max": 1000}}
DOCUMENTS = {
    "agents": {"weight": 2.0},
    "triggers": {"event": "x", "job": {"type": "echo", "payload": {}}},
    "concurrency": {"max": 3},
}


def policy(scope: str, body: Any = None, *, there: bool = True) -> Prepare:
    def prepare(api: Running) -> Call:
        name = f"agent:{fresh('a')}" if scope == "concurrency" else fresh("name")
        path = f"/policies/{scope}/{name}"
        if there:
            assert api.http.put(path, json=DOCUMENTS[scope]).status_code == 200
        if body is not None:  # to go back from
            assert api.http.delete(path).status_code == 200
        return Call("policy.changed", DOCUMENTS[scope] if not there else body, {"name": name})

    return prepare


def admission(body: Any = None, *, there: bool = True) -> Prepare:
    def prepare(api: Running) -> Call:
        api.http.delete("/policies/admission")
        if there:
            assert api.http.put("/policies/admission", json=ADMISSION).status_code == 200
        if body is None:
            return Call("policy.changed", None if there else ADMISSION)
        api.http.delete("/policies/admission")
        version = api.get("/policies/admission/history").json()["changes"][1]["version"]
        return Call("policy.changed", {"version": version})

    return prepare


def schedule(event: str, *, there: bool = True) -> Prepare:
    spec = {"every_seconds": 3600, "job": {"type": "echo", "payload": {}}}

    def prepare(api: Running) -> Call:
        name = fresh("schedule")
        if there:
            assert api.http.put(f"/schedules/{name}", json=spec).status_code == 201
        return Call(event, None if there else spec, {"schedule_id": name})

    return prepare


def flow(api: Running, *, ended: bool = False) -> str:
    tasks = [{"name": "a", "type": "echo", "payload": {}, "pool_id": fresh("lane")}]
    workflow_id: str = api.post("/workflows", {"tasks": tasks}).json()["workflow_id"]
    if ended:
        assert api.post(f"/workflows/{workflow_id}/cancel").status_code == 200
        api.wait_cancelled(workflow_id)
    return workflow_id


def workflow(event: str, body: Any = None, *, ended: bool = False) -> Prepare:
    return lambda api: Call(event, body, {"workflow_id": flow(api, ended=ended)})


def ran(api: Running) -> Call:
    """A workflow whose only task is done."""
    lane = fresh("lane")
    worker = register(api, pool_id=lane)
    made = api.post("/workflows", {"tasks": [{"name": "a", "type": "echo", "payload": {}, "pool_id": lane}]}).json()
    worker.complete(worker.one())
    return Call("workflow.rerun", {"task": "a"}, {"workflow_id": made["workflow_id"]})


def node(event: str) -> Prepare:
    def prepare(api: Running) -> Call:
        name = fresh("node")
        hire(api.db, node=name)
        return Call(event, {"node_id": name})

    return prepare


def paused(api: Running) -> Call:
    scope = {"scope": "agent", "name": fresh("a")}
    assert api.post("/control/pause", scope).status_code == 200
    return Call("policy.changed", scope)


def led(api: Running) -> Call:
    api.led()
    return Call("control.reconcile")


def quarantined(api: Running) -> Call:
    uuid = fresh("GPU")
    hire(api.db, gpu(0, uuid=uuid))
    api.db.write(lambda conn: gpus.quarantine(conn, [uuid], "for a test"))
    return Call("gpu.cleared", None, {"gpu_uuid": uuid})


JOB = {"type": "echo", "payload": {}, "agent": "ann"}
TASK = {"name": "b", "type": "echo", "payload": {}}
CASES: dict[str, Prepare] = {
    "POST /jobs/submit": lambda _: Call("job.submitted", JOB, actor="ann"),
    "POST /jobs/submit_batch": lambda _: Call("job.submitted", {"jobs": [JOB]}, actor="ann"),
    "POST /jobs/claim": to_claim,
    "POST /jobs/{job_id}/complete": owned("job.done", result=1),
    "POST /jobs/{job_id}/fail": owned("job.dead_letter", error="no"),
    "POST /jobs/retry_failed": retry_all,
    "POST /jobs/{job_id}/cancel": waiting("job.cancelled"),
    "POST /jobs/{job_id}/retry": lambda api: Call("job.redriven", None, {"job_id": buried(api)}),
    "POST /jobs/{job_id}/priority": waiting("job.priority", {"priority": 9}),
    "POST /dlq/redrive": about_letter("job.redriven"),
    "POST /dlq/purge": about_letter("job.purged"),
    "POST /leases": to_lease,
    "POST /leases/{token}/release": leased("lease.released"),
    "POST /workers/register": lambda _: Call("worker.registered", {"slots": 1, "types": ["echo"]}),
    "POST /workers/deregister": registered("worker.stopped"),
    "POST /workers/pool": lambda _: Call("pool.created", {"desired_workers": 0}),
    "PATCH /workers/pool/{pool_id}": pool("pool.changed", {"hold_seconds": 7}),
    "DELETE /workers/pool/{pool_id}": pool("pool.deleted", closed=True),
    **{f"PUT /policies/{scope}/{{name}}": policy(scope, there=False) for scope in ("agents", "triggers")},
    **{f"DELETE /policies/{scope}/{{name}}": policy(scope) for scope in ("agents", "triggers")},
    **{f"POST /policies/{scope}/{{name}}/rollback": policy(scope, {"version": 1}) for scope in ("agents", "triggers")},
    "PUT /policies/concurrency/{name:path}": policy("concurrency", there=False),
    "DELETE /policies/concurrency/{name:path}": policy("concurrency"),
    "POST /policies/concurrency/{name:path}/rollback": policy("concurrency", {"version": 1}),
    "PUT /policies/admission": admission(there=False),
    "DELETE /policies/admission": admission(),
    "POST /policies/admission/rollback": admission({}),
    "PUT /schedules/{schedule_id}": schedule("schedule.changed", there=False),
    "DELETE /schedules/{schedule_id}": schedule("schedule.deleted"),
    "POST /schedules/{schedule_id}/fire": schedule("schedule.fired"),
    "POST /workflows": lambda _: Call("workflow.created", {"agent": "ann", "tasks": [TASK]}, actor="ann"),
    "POST /workflows/{workflow_id}/tasks": workflow("workflow.extended", {"tasks": [TASK]}),
    "POST /workflows/{workflow_id}/cancel": workflow("workflow.cancelled"),
    "POST /workflows/{workflow_id}/retry_failed": workflow("workflow.retried", ended=True),
    "POST /workflows/{workflow_id}/rerun": ran,
    "POST /control/drain_pool": pool("pool.draining", named=True),
    "POST /control/evict_pool": pool("pool.evicted", named=True),
    "POST /control/drain_node": node("node.draining"),
    "POST /control/resume_node": node("node.resumed"),
    "POST /control/pause": lambda _: Call("policy.changed", {"scope": "agent", "name": fresh("a")}),
    "POST /control/resume": paused,
    "POST /control/reconcile": led,
    "POST /gpus/{gpu_uuid}/clear": quarantined,
}
#: Requests that leave no row, and why.
SILENT = {
    "POST /jobs/{job_id}/heartbeat": "a sign of life changes no state",
    "POST /leases/{token}/heartbeat": "a sign of life changes no state",
    "POST /workers/heartbeat": "a sign of life changes no state",
    "POST /jobs/wait": "only looks; its ids would not fit into a URL",
}


def writing_routes() -> set[str]:
    routes = [route for module in NOUNS for route in module.router.routes]
    return {f"{method} {route.path}" for route in routes for method in route.methods - {"GET", "HEAD"}}


def test_every_request_that_can_change_something_is_tried_or_excused():
    assert writing_routes() == CASES.keys() | SILENT.keys()
    assert not CASES.keys() & SILENT.keys()


@pytest.mark.timeout(120)
def test_every_change_is_told_once_with_whoever_asked_for_it(maria_api: Running) -> None:
    wrong = {name: found for name, prepare in CASES.items() if (found := told_wrongly(maria_api, name, prepare))}
    assert wrong == {}


def told_wrongly(api: Running, name: str, prepare: Prepare) -> str | None:
    call = prepare(api)
    newest = select(func.coalesce(func.max(audit.c.id), 0))
    before = api.db.read(lambda conn: conn.execute(newest).scalar_one())
    method, _, path = name.partition(" ")
    answer = api.http.request(method, path.replace(":path", "").format(**call.given), json=call.body)
    if answer.status_code >= 400:
        return answer.text
    found = [row for row in rows(api.db, audit) if row.id > before and row.event_type == call.event]
    if len(found) != 1:
        return f"{len(found)} rows {call.event}"
    (row,) = found
    who = row.worker_id if call.actor is None else row.actor
    return None if who and call.actor in {None, who} else f"by {row.actor}"


def test_an_actor_ends_with_what_was_done_in_its_name():
    with actors.acting("ann"):
        with actors.acting("bob"):
            assert actors.current() == "bob"
        assert actors.current() == "ann"
    assert actors.current() is None


def test_a_user_without_a_name_acts_as_well(monkeypatch):
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert actors.of_user() == "cli:12345"
