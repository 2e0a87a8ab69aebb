"""Names that could not be read back are not taken; what has one from before is found under it."""

from typing import Any

import pytest
from sqlalchemy import update

from orchestrator.client import Client
from orchestrator.errors import InvalidInput
from orchestrator.names import NO_JOBS
from orchestrator.store import schema
from orchestrator.store.database import Database
from tests.api.conftest import Running

DOTS = [".", "..", "..."]


def refused(api: Running, method: str, path: str, body: Any) -> str:
    """The field that it was refused for."""
    answer = api.http.request(method, path, json=body)
    assert (answer.status_code, answer.json().get("code")) == (422, "invalid_input"), (path, body, answer.text)
    return answer.json()["field"]


def encoded(dots: str) -> str:
    return dots.replace(".", "%2E")


@pytest.mark.parametrize("dots", DOTS)
def test_names_of_dots_alone_are_refused(maria_api: Running, dots: str) -> None:
    api, job = maria_api, {"type": "echo", "payload": {}}
    flow = {"workflow_id": dots, "tasks": [{"name": "a", **job}]}
    with api.adding_no_row():
        for field in ("job_id", "agent", "pool_id", "type"):
            assert refused(api, "POST", "/jobs/submit", job | {field: dots}) == field
        assert refused(api, "POST", "/workers/pool", {"pool_id": dots}) == "pool_id"
        assert (
            refused(api, "POST", "/workers/register", {"types": ["echo"], "slots": 1, "worker_id": dots}) == "worker_id"
        )
        assert refused(api, "POST", "/leases", {"agent": dots, "min_memory_mb": 1}) == "agent"
        assert refused(api, "POST", "/workflows", flow) == "workflow_id"
        timed = {"every_seconds": 60, "job": job}
        assert refused(api, "PUT", f"/schedules/{encoded(dots)}", timed) == "schedule_id"
        for scope, field in {"agents": "agent", "triggers": "trigger", "concurrency": "key"}.items():
            policy = {"event": "e", "job": job} if field == "trigger" else {"max": 1} if field == "key" else {}
            assert refused(api, "PUT", f"/policies/{scope}/{encoded(dots)}", policy) == field
        assert refused(api, "PUT", f"/policies/concurrency/host:a%2F{encoded(dots)}%2Fb", {"max": 1}) == "key"


def test_an_id_that_is_a_route_is_refused(maria_api: Running) -> None:
    with maria_api.adding_no_row():
        for word in NO_JOBS:
            assert refused(maria_api, "POST", "/jobs/submit", {"type": "e", "payload": {}, "job_id": word}) == "job_id"


def rename(db: Database, job_id: str, name: str) -> None:
    db.write(lambda conn: conn.execute(update(schema.jobs).where(schema.jobs.c.job_id == job_id).values(job_id=name)))


def test_a_job_that_is_called_so_already_is_still_found(maria_api: Running) -> None:
    for name in ("..", "stats"):
        rename(maria_api.db, maria_api.submit(earliest_start_at="2999-01-01T00:00:00Z"), name)
    with Client(str(maria_api.http.base_url)) as client:
        assert client.get("..")["job_id"] == ".."
        assert client.explain("stats")["job_id"] == "stats"
        with pytest.raises(InvalidInput, match="no job has the id 'stats'"):
            client.wait("stats")
    assert {job["job_id"] for job in maria_api.get("/jobs").json()["jobs"]} == {"..", "stats"}
    assert maria_api.post("/jobs/wait", {"job_ids": ["..", "stats"]}).json()["unknown"] == []
