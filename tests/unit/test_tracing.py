"""Spans without processes, by an exporter that keeps them in memory; and what it costs to have none."""

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.errors import ConfigError, DatabaseUnavailable, JobConflict
from orchestrator.jobs import ErrorKind, Ready, Status
from orchestrator.settings import Settings
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End, Outcome
from orchestrator.telemetry import exporting, guard, seldom, traceparent, tracing
from orchestrator.telemetry.attempts import Attempts
from orchestrator.telemetry.sdk import LIMITS, context_of
from orchestrator.telemetry.spans import Spans
from tests.waiting import wait_until
from worker.handlers import Permanent, Registered, Skip
from worker.slot import Slot

TRACE, PARENT = "a" * 32, "b" * 16
CONTEXT = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def memory(monkeypatch) -> Iterator[InMemorySpanExporter]:
    """Tracing is on in this process, and what it exports is kept here."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(exporting, "exporter_to", lambda _endpoint: exporter)
    stop = tracing.start(Settings(otlp_endpoint="http://127.0.0.1:1"), "test")
    yield exporter
    stop()
    assert tracing.spans() is None


def spans() -> Spans:
    found = tracing.spans()
    assert found is not None
    return found


def kept(memory: InMemorySpanExporter) -> dict[str, list]:
    spans()._queue.force_flush()
    found: dict[str, list] = {}
    for span in sorted(memory.get_finished_spans(), key=lambda one: (one.start_time, one.end_time)):
        found.setdefault(span.name, []).append(span)
    return found


def parent_of(span) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def id_of(span) -> str:
    return f"{span.context.span_id:016x}"


# --- context as text ---


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n",
        f" {CONTEXT}",
        f"{CONTEXT}-more",
    ],
)
def test_what_is_no_context_is_none(text):
    assert tracing.accepted(text) is None
    assert traceparent.trace_id(text) is None


def test_a_context_is_read_and_written_as_it_is():
    assert tracing.accepted(CONTEXT) == CONTEXT == str(traceparent.parse(CONTEXT))
    assert traceparent.trace_id(UNSAMPLED) == TRACE
    known = traceparent.parse(UNSAMPLED)
    assert known is not None and not known.sampled


def test_the_span_of_an_attempt_is_known_to_everybody_and_nobody_elses():
    known = traceparent.parse(CONTEXT)
    assert known is not None
    ids = {traceparent.of_attempt(known, job_id, attempt).span_id for job_id in ("j", "k") for attempt in (1, 2, 11)}
    assert len(ids) == 6
    assert traceparent.of_attempt(known, "j", 1) == traceparent.of_attempt(known, "j", 1)
    assert traceparent.of_attempt(known, "j", 1).trace_id == TRACE


# --- off ---


def test_without_an_endpoint_nothing_is_loaded_and_contexts_pass():
    program = """
import sys
from orchestrator.settings import Settings
from orchestrator.telemetry import tracing
import worker.nursery
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "slots are lean"
import orchestrator.daemon, worker.session  # other libraries of theirs look for parts of it
tracing.start(Settings(), "test")()
assert tracing.spans() is None
with tracing.submitting("given") as submit, tracing.dispatching("lane", [], 0):
    submit.about({"a": 1})
    assert submit.context == "given"
assert tracing.added_by("given", "j", 1) == "given"
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))])
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_an_endpoint_without_the_library_is_told(monkeypatch):
    monkeypatch.setattr(tracing, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install '/path/to/clone\[tracing\]'"):
        tracing.start(Settings(otlp_endpoint="http://127.0.0.1:1"), "test")
    assert tracing.spans() is None


def test_who_shares_a_process_shares_the_spans_until_the_last_has_left(monkeypatch):
    monkeypatch.setattr(exporting, "exporter_to", lambda _endpoint: InMemorySpanExporter())
    settings = Settings(otlp_endpoint="http://127.0.0.1:1")
    first, second = tracing.start(settings, "a"), tracing.start(settings, "b")
    first()
    first()
    assert tracing.spans() is not None
    second()
    assert tracing.spans() is None


# --- submits ---


def test_a_submit_stands_in_its_callers_trace(memory):
    with tracing.submitting(CONTEXT, **{"http.route": "/jobs/submit"}) as submit:
        submit.about({"job.id": "j", "absent": None})
    [span] = kept(memory)["submit"]
    assert (span.kind, parent_of(span)) == (trace.SpanKind.SERVER, PARENT)
    assert dict(span.attributes) == {"http.route": "/jobs/submit", "job.id": "j"}
    known = traceparent.parse(submit.context)
    assert known is not None
    assert (known.trace_id, known.span_id, known.sampled) == (TRACE, id_of(span), True)


def test_a_submit_without_a_caller_begins_a_trace(memory):
    with tracing.submitting(None) as submit:
        pass
    [span] = kept(memory)["submit"]
    assert span.parent is None and span.kind is trace.SpanKind.INTERNAL
    assert traceparent.trace_id(submit.context) == f"{span.context.trace_id:032x}"


def test_what_a_caller_does_not_record_is_handed_on(memory):
    with tracing.submitting(UNSAMPLED) as submit:
        assert submit.context == UNSAMPLED
    assert kept(memory) == {}


def test_who_disables_the_library_has_no_spans_and_no_trouble(monkeypatch):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    exporter = InMemorySpanExporter()
    silent = Spans(exporter, "test")
    with silent.submitting(None, {}) as own, silent.submitting(CONTEXT, {}) as other:
        assert (own.context, other.context) == (None, CONTEXT)
    silent.died([End("j", 1, Outcome.FAILED, error="killed", trace_context=CONTEXT)], 0.0, "w")
    silent.close()
    assert exporter.get_finished_spans() == ()


def test_the_share_that_is_sampled():
    exporter = InMemorySpanExporter()
    none = Spans(exporter, "test", 0.0)
    with none.submitting(None, {}) as own, none.submitting(CONTEXT, {}):
        known = traceparent.parse(own.context)
        assert known is not None and not known.sampled, "its jobs are not traced either"
    none.close()
    assert [parent_of(span) for span in exporter.get_finished_spans()] == [PARENT], "the caller's decision counts more"


@pytest.mark.parametrize(
    ("error", "code", "is_ours"),
    [
        (JobConflict("j"), "job_conflict", False),
        (DatabaseUnavailable("away"), "database_unavailable", True),
        (RuntimeError("a bug"), "RuntimeError", True),
    ],
)
def test_a_submit_that_fails_says_why_and_whose_fault_it_is(memory, error, code, is_ours):
    with pytest.raises(type(error)), tracing.submitting(CONTEXT):
        raise error
    [span] = kept(memory)["submit"]
    assert span.attributes["error.type"] == code
    assert span.status.is_ok is not is_ours


# --- what is told when it is over ---


def claim(context: str | None = CONTEXT) -> Claim:
    return Claim("j", 1, "t", "{}", "a", None, None, context, None, waited_s=2.0)


def test_the_steps_of_a_job_are_children_of_its_submit(memory):
    begun = tracing.ago(1.0)
    with tracing.dispatching("lane", [Ready("j", "t", CONTEXT), Ready("k", "t", None)], begun):
        pass
    spans().claimed([claim(), claim(None), claim(UNSAMPLED)], begun, begun + 5, "w", "pool")
    spans().settled([(End("j", 1, Outcome.DONE, trace_context=CONTEXT), Status.DONE)], begun, "w")
    found = kept(memory)
    assert {name: len(some) for name, some in found.items()} == dict.fromkeys(
        ["orchestrator.dispatch", "wait", "claim", "settle"], 1
    )
    assert {parent_of(span) for some in found.values() for span in some} == {PARENT}
    [wait], [claimed] = found["wait"], found["claim"]
    assert (wait.end_time, claimed.start_time, claimed.end_time) == (begun, begun, begun + 5)
    assert claimed.end_time - wait.start_time == 2_000_000_000
    assert found["orchestrator.dispatch"][0].attributes["orchestrator.batch.size"] == 2
    assert found["settle"][0].attributes["job.status"] == "done"


def test_a_dispatch_that_fails_is_an_error_and_is_raised(memory):
    with pytest.raises(DatabaseUnavailable), tracing.dispatching("lane", [Ready("j", "t", CONTEXT)], 1):
        raise DatabaseUnavailable("away")
    [span] = kept(memory)["orchestrator.dispatch"]
    assert not span.status.is_ok and "away" in span.status.description


def test_attempts_that_nobody_can_tell_of_have_their_span_and_their_link(memory):
    known = traceparent.parse(CONTEXT)
    assert known is not None
    lost = End("j", 2, Outcome.FAILED, error_kind=ErrorKind.WORKER_LOST, error="killed", trace_context=CONTEXT)
    back = End("k", 1, Outcome.HANDED_BACK, error="its worker was stopped", trace_context=CONTEXT)
    unseen = End("u", 1, Outcome.FAILED, error="killed", trace_context=UNSAMPLED)
    spans().died([unseen, lost, back], 3.0, "w", "pool", "t")
    ids = {span.attributes["job.id"]: span for span in kept(memory)["job"]}
    assert ids.keys() == {"j", "k"}
    assert id_of(ids["j"]) == traceparent.of_attempt(known, "j", 2).span_id
    assert [f"{link.context.span_id:016x}" for link in ids["j"].links] == [
        traceparent.of_attempt(known, "j", 1).span_id
    ]
    assert (ids["j"].status.is_ok, ids["k"].status.is_ok, len(ids["k"].links)) == (False, True, 0)


def test_jobs_that_an_attempt_added_stand_below_it(memory):
    known = traceparent.parse(CONTEXT)
    assert known is not None
    assert tracing.added_by(CONTEXT, "j", 3) == str(traceparent.of_attempt(known, "j", 3))
    assert (tracing.added_by(UNSAMPLED, "j", 3), tracing.added_by(None, "j", 3)) == (UNSAMPLED, None)


# --- attempts, in a slot that is no process ---


@pytest.fixture
def run(memory) -> Callable[..., list]:
    """Run jobs in one call of this handler, as a slot does; their spans, as its supervisor would export them."""

    def go(function, *jobs: tuple[str, int], context: str | None = CONTEXT, batch: int = 0) -> list:
        attempts = Attempts(lambda frame: spans().carried(frame), "w", "pool")
        known = {"t": Registered("t", function, 0, batch=batch)}
        slot = Slot(Mock(), known, Mock(), Mock(vouched=True), 1000, {}, attempts=attempts)
        given = [
            {"job_id": job_id, "type": "t", "attempt": attempt, "agent": "a", "trace_context": context}
            for job_id, attempt in jobs
        ]
        if batch:
            slot._run_batch(given, json.dumps([{}] * len(given)))
        else:
            slot._run_job(given[0], "{}")
        assert slot.running is None
        by_job = {span.attributes["job.id"]: span for span in kept(memory).get("job", [])}
        return [by_job.get(job_id) for job_id, _ in jobs]

    return go


def test_a_handler_has_its_span(run, memory):
    seen = []

    def handler(ctx, _payload):
        seen.append(ctx.trace_context)
        trace.get_current_span().set_attributes({"own": 1.5, "flag": True, "many": ["x", "y"]})
        trace.get_current_span().add_event("noted", {"n": 1})

    [span] = run(handler, ("j", 1))
    known = traceparent.parse(CONTEXT)
    assert known is not None
    assert (id_of(span), parent_of(span)) == (traceparent.of_attempt(known, "j", 1).span_id, PARENT)
    assert seen == [f"00-{TRACE}-{id_of(span)}-01"]
    about = {"job.type": "t", "job.attempt": 1, "worker.id": "w", "pool.id": "pool", "job.outcome": "done"}
    assert (about | {"own": 1.5, "flag": True}).items() <= span.attributes.items()
    assert list(span.attributes["many"]) == ["x", "y"]
    assert [(event.name, dict(event.attributes)) for event in span.events] == [("noted", {"n": 1})]
    assert span.kind is trace.SpanKind.CONSUMER and not span.links
    assert not trace.get_current_span().is_recording(), "it is over with the job"


def raising(error):
    def handler(_ctx, _payload):
        raise error

    return handler


def test_what_a_handler_raises_is_in_its_span_if_it_is_an_error(run):
    [span] = run(raising(ValueError("no\nluck")), ("j", 2))
    assert not span.status.is_ok and "luck" in span.status.description
    [event] = span.events
    assert (event.name, event.attributes["exception.type"]) == ("exception", "ValueError")
    [link] = span.links
    known = traceparent.parse(CONTEXT)
    assert known is not None
    assert f"{link.context.span_id:016x}" == traceparent.of_attempt(known, "j", 1).span_id
    [span] = run(raising(Permanent("never")), ("p", 1))
    assert (span.attributes["job.error_kind"], len(span.events)) == ("permanent", 1)
    [span] = run(raising(Skip("nothing to do")), ("s", 1))
    assert (span.status.is_ok, len(span.events), span.attributes["job.outcome"]) == (True, 0, "skipped")


def test_a_result_that_cannot_be_stored_is_an_error_without_an_exception(run):
    [span] = run(lambda _ctx, _payload: object(), ("j", 1))
    assert (span.status.is_ok, len(span.events), span.attributes["job.error_kind"]) == (False, 0, "bad_result")


def test_of_a_batch_each_job_has_its_own(run):
    def handler(_ctx, payloads):
        trace.get_current_span().add_event("together")
        return [1, ValueError("a bad one"), 3]

    first, bad, last = run(handler, ("a", 1), ("b", 1), ("c", 1), batch=8)
    assert [span.status.is_ok for span in (first, bad, last)] == [True, False, True]
    assert [event.name for event in first.events] == ["together"]
    assert [event.name for event in bad.events] == ["exception"]
    assert {link.context.span_id for link in first.links} == {bad.context.span_id, last.context.span_id}
    assert {link.context.span_id for one in (bad, last) for link in one.links} == {first.context.span_id}


def test_a_batch_that_fails_as_a_whole_is_an_error_of_all(run):
    found = run(raising(ValueError("all of it")), ("a", 1), ("b", 1), batch=8)
    assert [(span.status.is_ok, span.attributes["job.outcome"]) for span in found] == [(False, "handed_back")] * 2


@pytest.mark.parametrize("context", [None, UNSAMPLED])
def test_a_job_that_nobody_traces_sees_what_it_was_given(run, context):
    seen = []
    assert run(lambda ctx, _payload: seen.append(ctx.trace_context), ("j", 1), context=context) == [None]
    assert seen == [context]


def test_many_spans_of_a_long_job_do_not_wait_for_its_end(memory):
    handed: list[str] = []
    attempts = Attempts(handed.append, "w", "pool")
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    with attempts.running([job]):
        for _ in range(300):
            with attempts.provider.get_tracer("mine").start_as_current_span("step"):
                pass
        assert len(handed) == 1
    assert len(handed) == 2 and sum(len(json.loads(some)) for some in handed) == 301


def test_a_process_that_a_handler_forked_does_not_write_to_its_pipe(monkeypatch):
    handed: list[str] = []
    attempts = Attempts(handed.append, "w", "pool")
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    with attempts.running([job]):
        pass
    assert len(handed) == 1  # as everybody else does
    with attempts.running([job]):
        monkeypatch.setattr("os.getpid", lambda: -1)
    assert len(handed) == 1


def test_what_a_handler_says_is_kept_up_to_a_size(run):
    def handler(_ctx, _payload):
        trace.get_current_span().set_attribute("long", "x" * 100_000)

    [span] = run(handler, ("j", 1))
    assert len(span.attributes["long"]) == 4000


def test_a_supervisor_that_is_gone_fails_no_job():
    gone = Mock(side_effect=BrokenPipeError)
    attempts = Attempts(gone, "w", "pool")
    with attempts.running([{"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}]):
        pass
    assert gone.call_count == 1


def known() -> traceparent.TraceParent:
    found = traceparent.parse(CONTEXT)
    assert found is not None
    return found


def carried(**changes: object) -> dict:
    """A span as a slot writes it."""
    whole: dict[str, Any] = {
        "name": "step",
        "context": CONTEXT,
        "parent": None,
        "kind": "INTERNAL",
        "times": [1, 2],
        "attributes": {},
        "events": [],
        "links": [],
        "status": ["UNSET", None],
        "scope": ["mine", None],
    }
    return whole | changes


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        [],
        {"context": "x"},
        carried(context=5),
        carried(status=["NO", None]),
        carried(kind="NONE"),
        carried(links=[[f"00-{'0' * 32}-{PARENT}-01", {}]]),
        carried(attributes=[1]),
        carried(times=[1.5, 2]),
        carried(times=[-1, 2]),
        carried(times=[1, 2**63]),
        carried(times=[True, "soon"]),
    ],
    ids=str,
)
def test_what_is_no_span_costs_no_other_and_no_slot(memory, caplog, wrong):
    guard._broke._next = 0.0
    spans().carried(json.dumps([carried(name="before"), wrong, carried(name="after")]))
    assert kept(memory).keys() == {"before", "after"}
    assert [one.message for one in caplog.records] == ["tracing broke"]


@pytest.mark.parametrize("frame", ["", "no json", "5", "null", "[", '{"a": 1}'])
def test_what_is_no_frame_of_spans_costs_no_slot(memory, frame):
    spans().carried(frame)
    assert kept(memory) == {}


class Unspeakable(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


#: What a type checker would not let pass.
ODDITY: Any = object()
SOON: Any = "soon"


def of_nobody() -> trace.Link:
    return trace.Link(trace.INVALID_SPAN_CONTEXT, {"link.kind": "caller"})


def odd_flags() -> trace.SpanContext:
    return trace.SpanContext(1, 2, True, trace.TraceFlags(0x1FF))


ODD = {
    "link to nobody": lambda tracer: tracer.start_span("x", links=[of_nobody()]).end(),
    "link added to nobody": lambda _: trace.get_current_span().add_link(trace.INVALID_SPAN_CONTEXT, {"k": "v"}),
    "link with odd flags": lambda _: trace.get_current_span().add_link(odd_flags()),
    "id that is too large": lambda _: trace.get_current_span().add_link(trace.SpanContext(1 << 130, 2, True), {"a": 1}),
    "parent with odd flags": lambda tracer: tracer.start_span(
        "x", trace.set_span_in_context(trace.NonRecordingSpan(odd_flags()))
    ).end(),
    "no name": lambda tracer: tracer.start_span(None).end(),
    "number for a name": lambda tracer: tracer.start_span(5).end(),
    "bytes for a name": lambda tracer: tracer.start_span(b"x").end(),
    "object for a name": lambda tracer: tracer.start_span(Unspeakable()).end(),
    "half a character": lambda tracer: tracer.start_span("a\ud800", attributes={"k\ud800": "v\ud800"}).end(),
    "enormous name": lambda tracer: tracer.start_span("x" * 5_000_000).end(),
    "odd status": lambda _: trace.get_current_span().set_status(trace.StatusCode.ERROR, ODDITY),
    "status with half a character": lambda tracer: tracer.start_span("x").set_status(trace.StatusCode.ERROR, "\ud800"),
    "odd values": lambda _: trace.get_current_span().set_attributes(
        {"b": b"\xff", "n": float("nan"), "o": ODDITY, "d": {"a": {ODDITY: 3}}, "l": [1, "a", None], "i": 10**5000}
    ),
    "text for the time of an event": lambda _: trace.get_current_span().add_event("e", timestamp=SOON),
    "text for an end": lambda tracer: tracer.start_span("x").end(end_time="late"),
    "negative times": lambda tracer: tracer.start_span("x", start_time=-5).end(end_time=-9),
    "seconds for nanoseconds": lambda tracer: tracer.start_span("x", start_time=1.5).end(),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_no_span_of_a_handler_costs_its_job_or_the_other_spans(memory, odd):
    handed: list[str] = []
    attempts = Attempts(handed.append, "w", "pool")
    tracer = attempts.provider.get_tracer("mine")
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    with attempts.running([job]) as running:
        tracer.start_span("good").end()
        odd(tracer)
        running.ended([{"outcome": "done"}])
    for frame in handed:
        spans().carried(frame)
    found = kept(memory)
    assert len(found["good"]) == len(found["job"]) == 1
    encode_spans([span for some in found.values() for span in some])


def test_of_an_odd_span_that_is_kept_all_is_kept_that_can_be(run, memory):
    def handler(_ctx, _payload):
        trace.get_current_span().set_attribute("many", list(range(1000)))
        trace.get_current_span().add_event("e", timestamp=SOON)
        trace.get_current_span().add_event("f", timestamp=7)
        trace.get_current_span().add_link(trace.INVALID_SPAN_CONTEXT, {"k": "v"})
        trace.get_current_span().add_link(trace.SpanContext(1, 2, True), {"k": "w"})
        trace.get_current_span().update_name("job" + "b" * 1000)

    assert run(handler, ("j", 1)) == [None]
    [[span]] = kept(memory).values()
    assert span.name == "job" + "b" * 253
    assert len(span.attributes["many"]) == 128
    assert [event.name for event in span.events] == ["f"]
    assert [dict(link.attributes) for link in span.links] == [{"k": "w"}]


def test_spans_go_in_frames_of_a_size(memory, caplog):
    handed: list[str] = []
    attempts = Attempts(handed.append, "w", "pool")
    tracer = attempts.provider.get_tracer("mine")
    with attempts.running([{"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}]):
        for _ in range(200):
            with tracer.start_as_current_span("step") as span:
                for _ in range(8):
                    span.add_event("token", {"text": "v" * 1000})
        with tracer.start_as_current_span("of many words") as span:
            for number in range(100):
                span.add_event("token", {f"{key}": "v" * 4000 for key in range(15)} | {"number": number})
        with tracer.start_as_current_span("too large") as span:
            span.set_attributes({f"{key}": ["v" * 4000] * 100 for key in range(10)})
    assert len(handed) > 5 and max(map(len, handed)) <= 256 * 1024
    for frame in handed:
        spans().carried(frame)
    found = kept(memory)
    assert {name: len(some) for name, some in found.items()} == {"step": 200, "of many words": 1, "job": 1}
    assert {len(one.events) for one in found["step"]} == {8}
    assert not found["of many words"][0].events
    [told] = [one for one in caplog.records if one.message == "spans lost"]
    assert told.__dict__["spans"] == 1


def test_what_a_span_keeps_is_bounded(run):
    def handler(_ctx, _payload):
        for number in range(200):
            trace.get_current_span().add_event("e", {f"{number}{key}": 1 for key in range(20)})
            trace.get_current_span().add_link(trace.SpanContext(1, 2, True), {f"{key}": 1 for key in range(20)})

    [span] = run(handler, ("j", 1))
    assert (len(span.events), len(span.links), len(span.attributes)) == (32, 128, 7)
    assert {len(one.attributes) for one in [*span.events, *span.links]} == {16}
    assert LIMITS.max_span_attributes == 64


def test_garbage_that_ends_a_span_while_others_are_handed_over_holds_up_nobody():
    attempts = Attempts(lambda _frame: tracer.start_span("garbage").end(), "w", "pool")
    tracer = attempts.provider.get_tracer("mine")
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    with attempts.running([job]), attempts._collector._lock:  # as the collector of garbage would come in between
        for _ in range(600):
            tracer.start_span("step").end()


def test_who_hands_spans_over_is_not_asked_to_meanwhile():
    """Its pipe is taken, by itself: it would wait for ever."""
    pipe, refused = threading.Lock(), []

    def hand_over(_frame):
        if not pipe.acquire(blocking=False):
            refused.append(1)
            return
        for _ in range(300):
            tracer.start_span("garbage").end()
        pipe.release()

    attempts = Attempts(hand_over, "w", "pool")
    tracer = attempts.provider.get_tracer("mine")
    with attempts.running([{"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}]):
        pass
    assert not refused


# --- what goes wrong with spans goes wrong nowhere else ---


@pytest.mark.parametrize("broken", ["start_span", "on_end"])
def test_a_fault_of_the_library_costs_no_submit_no_commit_and_no_dispatch(memory, caplog, monkeypatch, broken):
    guard._broke._next = 0.0
    fault = Mock(side_effect=RuntimeError("a fault"))
    monkeypatch.setattr(spans()._tracer if broken == "start_span" else spans()._queue, broken, fault)
    with tracing.submitting(CONTEXT, **{"http.route": "/jobs/submit"}) as submit:
        submit.about({"job.id": "j"})
    assert traceparent.trace_id(submit.context) == TRACE
    with pytest.raises(JobConflict), tracing.submitting(CONTEXT):
        raise JobConflict("j")
    with tracing.dispatching("lane", [Ready("j", "t", CONTEXT)], 1):
        pass
    with pytest.raises(Unspeakable), tracing.dispatching("lane", [Ready("j", "t", CONTEXT)], 1):
        raise Unspeakable
    end = End("j", 1, Outcome.FAILED, error="killed", trace_context=CONTEXT)
    spans().claimed([claim()], 1, 2, "w", "pool")
    spans().settled([(end, Status.DONE)], 1, "w")
    spans().died([end], 1.0, "w")
    spans().carried(json.dumps([carried()]))
    assert fault.call_count >= 6
    assert [one.message for one in caplog.records] == ["tracing broke"], "once in a while"


def test_one_job_that_cannot_be_told_of_costs_the_others_nothing(memory):
    spans().claimed([claim()._replace(waited_s=SOON)], 1, 2, "w", "pool")
    with tracing.dispatching("lane", [Ready("j", "t", ODDITY), Ready("k", "t", CONTEXT)], 1):
        pass
    [span] = kept(memory)["orchestrator.dispatch"]
    assert span.attributes["job.id"] == "k"


@pytest.mark.parametrize("broken", ["start_span", "hand_over"])
def test_a_fault_of_the_library_costs_no_attempt(monkeypatch, broken):
    fault = Mock(side_effect=RuntimeError("a fault"))
    attempts = Attempts(fault, "w", "pool")
    if broken == "start_span":
        monkeypatch.setattr(attempts._tracer, "start_span", fault)
    seen = []

    known = {"t": Registered("t", lambda ctx, _payload: seen.append(ctx.trace_context), 0)}
    slot = Slot(Mock(), known, Mock(), Mock(vouched=True), 1000, {}, attempts=attempts)
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    head, _ = slot._run_job(job, "{}")
    assert head["end"]["outcome"] == "done"
    assert [traceparent.trace_id(one) for one in seen] == [TRACE]
    assert fault.called


def test_an_error_that_cannot_be_shown_costs_only_its_own_event(memory):
    attempts = Attempts(lambda frame: spans().carried(frame), "w", "pool")
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    with attempts.running([job]) as running:
        running.raised(Unspeakable())
        running.ended([{"outcome": "failed", "error_kind": "transient", "error": "x"}])
    [span] = kept(memory)["job"]
    assert (span.status.is_ok, span.attributes["job.outcome"]) == (False, "failed")
    assert running._errors == {}, "whoever has it still has no frames of the handler"


class Tensor:
    """Stands for memory of a GPU."""


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("how", ["raised", "returned"])
def test_what_a_failed_job_had_is_gone_with_it(memory, batch, how):
    seen: list[weakref.ref] = []

    def failing():
        tensor = Tensor()
        seen.append(weakref.ref(tensor))
        raise ValueError("no luck")

    def handler(_ctx, _payload):
        if how == "raised":
            failing()
        try:
            failing()
        except ValueError as error:
            return [error] * (batch or 1)

    attempts = Attempts(lambda frame: spans().carried(frame), "w", "pool")
    known = {"t": Registered("t", handler, 0, batch=batch)}
    slot = Slot(Mock(), known, Mock(), Mock(vouched=True), 1000, {}, attempts=attempts)
    job = {"job_id": "j", "type": "t", "attempt": 1, "agent": "a", "trace_context": CONTEXT}
    if batch:
        slot._run_batch([job, job | {"job_id": "k"}], "[{}, {}]")
    else:
        slot._run_job(job, "{}")
    gc.collect()
    assert [one() for one in seen] == [None]


# --- exporting ---


class Stuck(SpanExporter):
    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()
        self.given = 0

    def export(self, spans) -> SpanExportResult:
        self.given += len(spans)
        self.asked.set()
        self.free.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.free.set()


def test_the_end_does_not_wait_for_a_receiver_that_hangs(monkeypatch):
    monkeypatch.setattr(exporting, "CLOSE_S", 0.1)
    stuck = Stuck()
    found = Spans(stuck, "test")
    with found.submitting(None, {}):
        pass
    assert stuck.asked.wait(30)
    found.close()
    assert not stuck.free.is_set(), "it hangs still, and nobody waits"
    stuck.free.set()


def test_a_full_queue_drops_spans_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(exporting, "QUEUE", 4)
    monkeypatch.setattr(exporting, "BATCH", 2)
    stuck = Stuck()
    found = Spans(stuck, "test")
    for _ in range(100):
        with found.submitting(None, {}):
            pass
    assert stuck.asked.wait(30)
    stuck.free.set()
    found.close()
    assert stuck.given <= 4 + 2, "those that wait, and those on their way"


@pytest.mark.parametrize("how", [{"return_value": SpanExportResult.FAILURE}, {"side_effect": OSError("away")}])
def test_that_spans_are_lost_is_told_once_in_a_while(caplog, monkeypatch, how):
    exporter = exporting.Patient(Mock(spec=SpanExporter, export=Mock(**how)), "http://there")
    for _ in range(3):
        assert exporter.export([Mock(), Mock()]) is SpanExportResult.FAILURE
    assert [(one.message, one.spans) for one in caplog.records] == [("spans lost", 2)]
    monkeypatch.setattr(exporter._losses, "_seldom", seldom.Seldom())
    exporter.export([Mock()])
    assert caplog.records[-1].spans == 5


def test_a_span_that_cannot_be_encoded_costs_no_other(caplog):
    sent = InMemorySpanExporter()

    def export(some):
        encode_spans(some)
        return sent.export(some)

    exporter = exporting.Patient(Mock(spec=SpanExporter, export=Mock(side_effect=export)), "http://there")
    good, bad = (ReadableSpan(name, context_of(known()), start_time=1, end_time=2) for name in ("good", ODDITY))
    assert exporter.export([good, bad, good]) is SpanExportResult.SUCCESS
    assert [span.name for span in sent.get_finished_spans()] == ["good", "good"]
    assert [(one.message, one.spans) for one in caplog.records] == [("spans lost", 1)]
    assert exporter.export([bad]) is SpanExportResult.FAILURE


def test_a_network_that_breaks_is_not_tried_again_and_again():
    export = Mock(side_effect=OSError("away"))
    exporter = exporting.Patient(Mock(spec=SpanExporter, export=export), "http://there")
    span = ReadableSpan("good", context_of(known()), start_time=1, end_time=2)
    assert exporter.export([span, span]) is SpanExportResult.FAILURE
    assert export.call_count == 1


def test_what_slots_send_waits_up_to_a_size(monkeypatch, caplog):
    frame = json.dumps([carried(attributes={"text": "v" * 1000})] * 2)
    monkeypatch.setattr(exporting, "CARRIED", 3 * len(frame))
    stuck = Stuck()
    found = Spans(stuck, "test")
    for _ in range(5):
        found.carried(frame)
    found.carried("[]")
    [told] = [one for one in caplog.records if one.message == "spans lost"]
    assert told.__dict__["spans"] == 2
    assert sum(found._room._sizes.values()) <= 3 * len(frame)
    stuck.free.set()
    found._queue.force_flush()
    wait_until(lambda: gc.collect() is not None and not found._room._sizes, what="there is room again")
    found.close()


# --- settings ---


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_a_bare_address_means_the_usual_path(given, meant):
    assert Settings(otlp_endpoint=given).otlp_endpoint == meant


@pytest.mark.parametrize("wrong", ["collector:4317", "grpc://collector:4317", "http://", "http://me:secret@collector"])
def test_what_is_no_endpoint_is_refused(wrong):
    with pytest.raises(ValueError, match="otlp_endpoint") as told:
        Settings(otlp_endpoint=wrong)
    assert "secret" not in str(told.value)
