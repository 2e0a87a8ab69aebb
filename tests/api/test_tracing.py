"""Spans of the API's process: of every way in which a job can come, and of workers over HTTP."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from redis import Redis as Client

from orchestrator.store import schema
from orchestrator.telemetry import exporting, traceparent, tracing
from tests.factories import row, rows
from tests.fetching import register
from tests.waiting import wait_until

TRACE, PARENT = "a" * 32, "b" * 16
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
JOB = {"type": "echo", "payload": {}}


@pytest.fixture
def memory(monkeypatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(exporting, "exporter_to", lambda _endpoint: exporter)
    return exporter


@pytest.fixture
def traced(memory, maria_db, run_api):
    """An instance that traces."""
    url = str(maria_db.settings.database_url)
    return run_api(database_url=url, otlp_endpoint="http://127.0.0.1:1")


def kept(memory, name, **attributes):
    """Spans of that name with these attributes (`_` for `.`), sent by now."""
    found = tracing.spans()
    assert found is not None
    found._queue.force_flush()
    wanted = {key.replace("_", ".", 1): value for key, value in attributes.items()}
    return [one for one in memory.get_finished_spans() if one.name == name and wanted.items() <= one.attributes.items()]


def context_of(span) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{int(span.context.trace_flags):02x}"


def stored(traced, job_id) -> str:
    return row(traced.db, job_id).trace_context


def test_a_submit_is_the_parent_of_all_that_follows(traced, memory):
    answer = traced.post("/jobs/submit", JOB, headers=CALLER)
    job_id = answer.json()["job_id"]
    [span] = kept(memory, "submit", job_id=job_id)
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert stored(traced, job_id) == context_of(span)
    [dispatch] = wait_until(lambda: kept(memory, "orchestrator.dispatch", job_id=job_id), what="its dispatch")
    assert dispatch.parent.span_id == span.context.span_id
    again = traced.post("/jobs/submit", JOB | {"job_id": job_id}, headers=CALLER)
    assert (again.status_code, stored(traced, job_id)) == (200, context_of(span)), "the first one counts"


def test_jobs_of_a_batch_and_tasks_of_a_workflow_share_the_span_of_their_request(traced, memory):
    answer = traced.post("/jobs/submit_batch", {"jobs": [JOB, JOB, {"type": "x"}]}, headers=CALLER).json()
    [span] = kept(memory, "submit")
    assert span.attributes["orchestrator.batch.size"] == 3
    assert {stored(traced, one["job_id"]) for one in answer["jobs"][:2]} == {context_of(span)}

    tasks = [JOB | {"name": "one"}, JOB | {"name": "two", "depends_on": ["one"]}]
    flow = traced.post("/workflows", {"workflow_id": "w", "tasks": tasks}, headers=CALLER)
    assert flow.status_code == 202, flow.text
    [span] = kept(memory, "submit", workflow_id="w")
    assert {job.trace_context for job in rows(traced.db, schema.jobs) if job.workflow_id == "w"} == {context_of(span)}
    assert traced.post("/workflows/w/tasks", {"tasks": [JOB | {"name": "three"}]}).status_code == 202
    first, second = kept(memory, "submit", workflow_id="w")
    assert first.context.trace_id != second.context.trace_id
    assert second.attributes["http.route"] == "/workflows/{workflow_id}/tasks"


def test_a_refused_submit_says_so(traced, memory):
    assert traced.post("/jobs/submit", {"type": "echo"}, headers=CALLER).status_code == 422
    [span] = kept(memory, "submit")
    assert span.attributes["error.type"] == "invalid_input" and span.status.is_ok


def test_schedules_and_triggers_begin_traces(traced, memory):
    traced.http.put("/schedules/often", json={"job": JOB, "every_seconds": 1})
    wait_until(lambda: rows(traced.db, schema.jobs), what="it fires")
    traced.http.delete("/schedules/often")
    for job in rows(traced.db, schema.jobs):
        [span] = kept(memory, "submit", job_id=job.job_id)
        assert (span.parent, context_of(span)) == (None, job.trace_context)
    traced.http.put("/schedules/rare", json={"job": JOB, "every_seconds": 86_400, "enabled": False})
    fired = traced.post("/schedules/rare/fire", headers=CALLER).json()["job_id"]
    assert traceparent.trace_id(stored(traced, fired)) == TRACE

    trigger = {"event": "article", "job": {"type": "embed", "payload": {"text": {"$field": "title"}}}}
    traced.http.put("/policies/triggers/embed", json=trigger)
    with Client.from_url(traced.orchestrator.settings.redis_url) as client:
        fields = {"type": "article", "payload": '{"title": "t"}', "event_id": "7"}
        client.xadd("stream:orchestrator:ingest_events", fields)
    wait_until(lambda: "embed:7" in {job.job_id for job in rows(traced.db, schema.jobs)}, what="the event is a job")
    [span] = kept(memory, "submit", orchestrator_origin="trigger")
    assert stored(traced, "embed:7") == context_of(span)


def test_a_worker_over_http_has_the_context_and_its_claims_and_ends_have_spans(traced, memory):
    puppet = register(traced)
    job_id = traced.post("/jobs/submit", JOB, headers=CALLER).json()["job_id"]
    [submit] = kept(memory, "submit", job_id=job_id)
    job = puppet.one()
    assert job["trace_context"] == context_of(submit)
    [wait], [claim] = kept(memory, "wait", job_id=job_id), kept(memory, "claim", job_id=job_id)
    assert {wait.parent.span_id, claim.parent.span_id} == {submit.context.span_id}
    assert claim.attributes["worker.id"] == puppet.worker_id
    body = {"worker_id": puppet.worker_id, "attempt": 1, "result": {}}
    done = traced.post(f"/jobs/{job_id}/complete", body, headers={"traceparent": job["trace_context"]})
    assert done.status_code == 200, done.text
    [settle] = kept(memory, "settle", job_id=job_id)
    assert (settle.parent.span_id, settle.attributes["job.status"]) == (submit.context.span_id, "done")
