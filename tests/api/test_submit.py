"""POST /jobs/submit and /jobs/submit_batch."""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from orchestrator import daemon
from orchestrator.jobs import NewJob
from orchestrator.store.database import Database
from orchestrator.store.submit import Answer, submit_jobs
from tests.api.conftest import Running
from tests.factories import hire, history, row

pytestmark = pytest.mark.embedded_too

JOB = {"type": "echo", "payload": {"text": "x"}}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_new_job_is_stored(api: Running) -> None:
    answer = api.post("/jobs/submit", JOB | {"job_id": "mine", "priority": "HIGH", "tags": ["a"]})
    assert answer.status_code == 202
    assert answer.json() == {"job_id": "mine", "status": "pending", "created": True}
    stored = row(api.db, "mine")
    assert (stored.status, stored.priority, json.loads(stored.payload)) == ("pending", 50, {"text": "x"})
    assert history(api.db, "mine") == ["job.submitted"]


def test_a_job_without_an_id_gets_one(api: Running) -> None:
    first, second = (api.post("/jobs/submit", JOB).json()["job_id"] for _ in range(2))
    assert first != second
    assert api.get(f"/jobs/{first}").status_code == 200


def test_the_same_job_again_answers_with_its_current_status(api: Running) -> None:
    api.submit(job_id="twice")
    hand = hire(api.db)
    hand.finish(*hand.claim("twice"))
    again = api.post("/jobs/submit", {"job_id": "twice", "payload": {}, "type": "echo"})
    assert again.status_code == 200
    assert again.json() == {"job_id": "twice", "status": "done", "created": False}


def test_other_content_under_the_same_id_is_a_conflict(api: Running) -> None:
    api.submit(job_id="taken")
    with api.adding_no_row():
        answer = api.post("/jobs/submit", JOB | {"job_id": "taken", "pool_id": "elsewhere"})
    assert answer.status_code == 409
    assert answer.json()["code"] == "job_conflict"
    assert answer.headers["content-type"] == "application/problem+json"


def test_200_concurrent_submits_of_one_id_make_one_job(api: Running) -> None:
    body = JOB | {"job_id": "crowd"}
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: api.post("/jobs/submit", body), range(200)))
    seen = Counter((answer.status_code, answer.json()["created"]) for answer in answers)
    assert seen == {(202, True): 1, (200, False): 199}
    assert api.count_jobs() == 1
    assert history(api.db, "crowd") == ["job.submitted"]


def test_only_a_well_formed_trace_is_kept(api: Running) -> None:
    zeros = f"00-{'0' * 32}{TRACE[35:]}"
    for header in (TRACE.upper(), f"{TRACE}-extra", f"ff{TRACE[2:]}", zeros, "x' OR 1=1", ""):
        answer = api.post("/jobs/submit", JOB, headers={"traceparent": header})
        assert row(api.db, answer.json()["job_id"]).trace_context is None, header
    answer = api.post("/jobs/submit", JOB, headers={"traceparent": TRACE})
    assert row(api.db, answer.json()["job_id"]).trace_context == TRACE


def test_a_batch_gives_a_verdict_per_item(api: Running) -> None:
    api.submit(job_id="known")
    jobs = [
        JOB | {"job_id": "new"},
        {"type": "echo", "payload": {}, "job_id": "known"},
        JOB | {"job_id": "known"},
        {"type": "echo"},
        JOB | {"job_id": "new"},
        "nonsense",
        JOB,
    ]
    answer = api.post("/jobs/submit_batch", {"jobs": jobs})
    assert answer.status_code == 200
    body = answer.json()
    assert {key: body[key] for key in ("created", "existing", "refused")} == {
        "created": 2,
        "existing": 2,
        "refused": 3,
    }
    new, known, conflict, missing, twice, nonsense, unnamed = body["jobs"]
    assert new == {"job_id": "new", "status": "pending", "created": True}
    assert known == {"job_id": "known", "status": "pending", "created": False}
    assert (conflict["job_id"], conflict["error"]["code"]) == ("known", "job_conflict")
    assert (missing["error"]["code"], missing["error"]["field"]) == ("invalid_input", "payload")
    assert twice == {"job_id": "new", "status": "pending", "created": False}
    assert nonsense["error"]["status"] == 422
    assert unnamed["created"]
    assert api.count_jobs() == 3


def test_a_batch_is_one_transaction(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, submit = [], submit_jobs

    def counting(db: Database, batch: Sequence[NewJob], *rest: Any, **given: Any) -> list[Answer]:
        sizes.append(len(batch))
        return submit(db, batch, *rest, **given)

    monkeypatch.setattr(daemon, "submit_jobs", counting)
    assert api.post("/jobs/submit_batch", {"jobs": [JOB] * 1000}).json()["created"] == 1000
    assert sizes == [1000]
    assert api.count_jobs() == 1000


def test_what_is_no_batch_is_refused(api: Running) -> None:
    with api.adding_no_row():
        too_many = api.post("/jobs/submit_batch", {"jobs": [JOB] * 1001})
        assert (too_many.status_code, too_many.json()["code"]) == (413, "payload_too_large")
        for body in ({"jobs": "x"}, {"jobs": [JOB], "atomic": True}, {}, [JOB], "text", 7):
            answer = api.post("/jobs/submit_batch", body)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input"), body
        half = api.http.post(
            "/jobs/submit_batch", content=rb'{"jobs":[],"\ud800":1}', headers={"content-type": "application/json"}
        )
        assert (half.status_code, half.json()["field"]) == (422, "\ud800")


def test_an_empty_batch_does_nothing(api: Running) -> None:
    assert api.post("/jobs/submit_batch", {"jobs": []}).json() == {
        "jobs": [],
        "created": 0,
        "existing": 0,
        "refused": 0,
    }


def test_the_description_names_the_fields_of_a_job(api: Running) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    schema = paths["/jobs/submit"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["type", "payload"]
    assert {"job_id", "priority", "max_attempts", "tags"} <= set(schema["properties"])
    assert "/leases/{token}/heartbeat" in paths
