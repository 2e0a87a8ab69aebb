"""The trace of a job, as a real receiver gets it from real processes."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.plain import http
from tests.receiver import Received, Receiver, receiving
from tests.servers import free_port
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO

HANDLERS = ("tests.worker.traced_handlers", "tests.worker.gated_handlers")
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"
#: What stands below `submit`, of each attempt.
STEPS = {"orchestrator.dispatch", "wait", "claim", "job", "settle"}
SERVER, PRODUCER, CONSUMER = 2, 4, 5


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


def trace(cluster, endpoint):
    """Whoever is started from now on traces. One slot: each loads what makes spans, which takes a while."""
    given = {"otlp_endpoint": f"{endpoint}/v1/traces", "worker_handlers": HANDLERS, "worker_slots": 1}
    cluster.settings = cluster.settings.model_copy(update=given | {"cancel_step_s": 0.2})


@pytest.fixture
def url(cluster, receiver):
    """An orchestrator and a worker as processes, which trace."""
    trace(cluster, receiver.url)
    _, url = cluster.serve()
    cluster.worker()
    return url


def submit(url: str, body: dict, **headers: str) -> str:
    answer = http.post(f"{url}/jobs/submit", json={"payload": {}} | body, headers=headers)
    answer.raise_for_status()
    return str(answer.json()["job_id"])


def whole(receiver: Receiver, job_id: str, attempts: int = 1) -> Received:
    """Wait for all spans of a job; its submit, below which they stand."""

    def there() -> bool:
        return all(len(receiver.named(name, job_id=job_id)) >= attempts for name in STEPS) and bool(
            receiver.named("submit", job_id=job_id)
        )

    wait_until(there, what=lambda: f"{attempts} of each of {STEPS}: {[(s.name, s.attributes) for s in receiver.spans]}")
    top = receiver.one("submit", job_id=job_id)
    for name in STEPS:
        found = receiver.named(name, job_id=job_id)
        assert len(found) == attempts, name
        assert {(one.trace_id, one.parent_id) for one in found} == {(top.trace_id, top.span_id)}, name
        assert all(one.start <= one.end for one in found), name
    return top


@EMBEDDED_TOO
def test_a_job_that_is_retried_is_one_tree(cluster, url, receiver):
    job_id = submit(url, {"type": "traced", "payload": {"times": 1}, "agent": "ann"}, traceparent=CALLER)
    record = cluster.wait_for(job_id, "done")
    top = whole(receiver, job_id, attempts=2)
    assert (top.trace_id, top.parent_id, top.kind, top.service) == ("a" * 32, "b" * 16, SERVER, "gpuorch-serve")
    about = {"job.type": "traced", "job.agent": "ann", "orchestrator.lane": "default", "http.route": "/jobs/submit"}
    assert about.items() <= top.attributes.items()

    first, second = receiver.named("job", job_id=job_id)
    assert (first.kind, first.service, first.attributes["job.attempt"]) == (CONSUMER, "gpuorch-worker", 1)
    assert "not yet" in (first.error or "") and first.events["exception"]["exception.type"] == "ValueError"
    assert (first.attributes["job.outcome"], second.attributes["job.outcome"]) == ("failed", "done")
    assert second.error is None and not first.links
    assert second.links == (first.span_id,)
    assert first.attributes["tokens"] == 7 and first.attributes["pool.id"] == "default"
    assert {one.parent_id for one in receiver.named("decode")} == {first.span_id, second.span_id}
    assert record["result"] == f"00-{'a' * 32}-{second.span_id}-01"

    claims = receiver.named("claim", job_id=job_id)
    workers = {one.attributes["worker.id"] for one in [*claims, first, second]}
    assert len(workers) == 1 and claims[0].attributes["lease.mode"] == "none"
    waits = receiver.named("wait", job_id=job_id)
    assert [one.end for one in waits] == [one.start for one in claims]
    assert [one.attributes["job.status"] for one in receiver.named("settle", job_id=job_id)] == ["pending", "done"]
    assert receiver.named("orchestrator.dispatch", job_id=job_id)[0].kind == PRODUCER


@EMBEDDED_TOO
def test_every_end_has_its_tree(cluster, url, receiver, gate):
    done = submit(url, {"type": "echo", "min_memory_mb": 500})
    skipped = submit(url, {"type": "fail", "payload": {"kind": "skip"}})
    failed = submit(url, {"type": "fail", "payload": {"kind": "permanent", "message": "never"}})
    crashed = submit(url, {"type": "crash"})
    for job_id, status in ((done, "done"), (skipped, "skipped"), (failed, "failed"), (crashed, "dead_letter")):
        cluster.wait_for(job_id, status)
    cancelled = submit(url, {"type": "gated", "payload": {"gate": str(gate)}})
    cluster.wait_for(cancelled, "running")
    http.post(f"{url}/jobs/{cancelled}/cancel").raise_for_status()
    cluster.wait_for(cancelled, "cancelled")

    for job_id in (done, skipped, failed, cancelled):
        whole(receiver, job_id)
    lease = receiver.one("claim", job_id=done).attributes
    assert (lease["lease.mode"], lease["lease.memory_mb"], len(lease["lease.gpus"])) == ("gpu", 500, 1)
    assert receiver.one("job", job_id=done).error is None
    assert receiver.one("job", job_id=skipped).error is None
    assert receiver.one("job", job_id=skipped).attributes["job.outcome"] == "skipped"
    assert not receiver.one("job", job_id=skipped).events
    assert "never" in (receiver.one("job", job_id=failed).error or "")
    assert receiver.one("settle", job_id=failed).attributes["job.status"] == "failed"
    assert receiver.one("settle", job_id=cancelled).attributes["job.status"] == "cancelled"

    whole(receiver, crashed, attempts=2)
    first, second = receiver.named("job", job_id=crashed)
    assert (first.links, second.links) == ((), (first.span_id,))
    assert "the process that ran it" in (first.error or "")
    assert second.attributes["job.error_kind"] == "worker_lost"


def test_no_span_of_a_handler_costs_its_slot_or_the_other_spans(cluster, url, receiver, tmp_path):
    seen = tmp_path / "seen"
    job_id = submit(url, {"type": "traced-oddly", "payload": {"seen": str(seen)}, "max_attempts": 1})
    assert cluster.wait_for(job_id, "done")["result"] == "fine"
    whole(receiver, job_id)
    assert seen.read_text().split() == ["1"]
    wait_until(lambda: receiver.named("of many words"), what="the last of them")
    assert receiver.one("of nobody").links == ()
    assert receiver.one("half a character ?")
    assert not receiver.named("backwards")


def test_jobs_of_one_call_have_a_span_each(cluster, receiver, raw, tmp_path):
    trace(cluster, receiver.url)
    _, url = cluster.serve()
    seen = tmp_path / "seen"
    bodies = [
        {"type": "traced-batch", "payload": {"seen": str(seen), "bad": n == 1}, "max_attempts": 1} for n in range(3)
    ]
    answer = http.post(f"{url}/jobs/submit_batch", json={"jobs": bodies}).json()
    ids = [one["job_id"] for one in answer["jobs"]]
    wait_until(lambda: raw.xlen("stream:orchestrator:inference_jobs") == 3, what="all are announced")
    cluster.worker()  # which finds all three
    for job_id, status in zip(ids, ("done", "dead_letter", "done"), strict=True):
        cluster.wait_for(job_id, status)
    wait_until(lambda: len(receiver.named("settle")) == 3 and receiver.named("submit"), what="all settled")
    assert seen.read_text() == "3", "they ran in one call"
    top = receiver.one("submit")
    assert top.attributes["orchestrator.batch.size"] == 3
    wait_until(lambda: len(receiver.named("job")) == 3, what="a span for each")
    spans = receiver.named("job")
    assert {one.parent_id for one in spans} == {top.span_id}
    [lead] = [one for one in spans if "together" in one.events]
    others = [one for one in spans if one is not lead]
    assert set(lead.links) == {one.span_id for one in others}
    assert {one.links for one in others} == {(lead.span_id,)}
    bad = receiver.one("job", job_id=ids[1])
    assert "a bad one" in (bad.error or "") and bad.events["exception"]["exception.message"] == "a bad one"
    assert sum(one.error is not None for one in spans) == 1


def test_a_trace_that_its_caller_does_not_record_is_handed_on_and_not_sent(cluster, url, receiver):
    unsampled = f"{CALLER[:-2]}00"
    quiet = submit(url, {"type": "traced"}, traceparent=unsampled)
    assert cluster.wait_for(quiet, "done")["result"] == unsampled
    loud = submit(url, {"type": "traced"}, traceparent="00-nonsense-01")
    cluster.wait_for(loud, "done")
    top = whole(receiver, loud)
    assert top.parent_id == ""
    assert {one.trace_id for one in receiver.spans} == {top.trace_id}


@pytest.mark.parametrize("trouble", ["away", "hangs", "refuses"])
def test_a_receiver_in_trouble_costs_spans_and_nothing_else(cluster, receiver, trouble):
    endpoint = f"http://127.0.0.1:{free_port()}" if trouble == "away" else receiver.url
    if trouble == "hangs":
        receiver.open.clear()
    receiver.broken = trouble == "refuses"
    trace(cluster, endpoint)
    api, url = cluster.serve()
    worker = cluster.worker()
    ids = [submit(url, {"type": "traced"}) for _ in range(5)]
    for job_id in ids:
        cluster.wait_for(job_id, "done")
    if trouble != "away":
        wait_until(lambda: receiver.requests >= 2, what="both processes have tried")
    begun = time.monotonic()
    for member in (worker, api):
        member.send(signal.SIGTERM)
    assert (worker.process.wait(30), api.process.wait(30)) == (0, 0)
    # Each may wait for 2 s. A receiver that hangs does so for 60.
    assert time.monotonic() - begun < 30
    assert not receiver.spans
    if trouble == "refuses":
        assert "spans lost" in worker.log.read_text()


@pytest.mark.parametrize("worker_timeout_s", [2.0])
def test_the_job_of_a_worker_that_died_has_a_span(cluster, receiver, gate):
    trace(cluster, receiver.url)
    _, url = cluster.serve()
    worker = cluster.worker()
    job_id = submit(url, {"type": "gated", "payload": {"gate": str(gate)}})
    cluster.wait_for(job_id, "running")
    worker.send(signal.SIGKILL)
    gate.unlink()
    cluster.worker()
    cluster.wait_for(job_id, "done")
    wait_until(lambda: len(receiver.named("job", job_id=job_id)) == 2, what="both attempts")
    first, second = receiver.named("job", job_id=job_id)
    assert (first.service, second.service) == ("gpuorch-serve", "gpuorch-worker")
    assert "heartbeats" in (first.error or "") and second.links == (first.span_id,)


def test_tasks_that_a_job_adds_stand_below_it(cluster, url, receiver):
    job_id = submit(url, {"type": "traced-adding"})
    cluster.wait_for(job_id, "done")
    wait_until(lambda: len(receiver.named("job", job_type="traced")) == 2, what="both tasks")
    top = receiver.one("job", job_id=job_id)
    assert {(one.trace_id, one.parent_id) for one in receiver.named("job", job_type="traced")} == {
        (top.trace_id, top.span_id)
    }
