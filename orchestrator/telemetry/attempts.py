"""The span `job` of each attempt, in the slot that runs it: current while its handler runs, and so its own to use.

from opentelemetry import trace

trace.get_current_span().set_attribute("tokens", 1234)
with trace.get_tracer(__name__).start_as_current_span("decode"): ...
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from orchestrator.telemetry import carrying, traceparent
from orchestrator.telemetry.guard import Losses, harmless
from orchestrator.telemetry.sdk import (
    MAX_TEXT,
    Ids,
    is_error,
    links_to_last,
    provider_for,
    tracer_of,
    within,
    written,
)

#: What a link between two jobs of one call says.
SAME_CALL = {"link.kind": "same_call"}
#: Spans that wait for their job's end, and seconds that the first of them waits, before they are handed over earlier.
MANY, LONG_S = 256, 1.0


class Collector(SpanProcessor):
    """Keeps what ended, and hands it over: with the end of a job, and before that when a handler makes many."""

    def __init__(self, hand_over: Callable[[str], None]) -> None:
        self._hand_over = hand_over
        # Garbage that is collected meanwhile may end a span of its own, on this thread.
        self._lock = threading.RLock()
        self._flushing = False
        self._losses = Losses()
        self._ended: list[ReadableSpan] = []
        self._since = 0.0
        self._pid = os.getpid()

    @harmless
    def on_end(self, span: ReadableSpan) -> None:
        # A process that the handler forked has our pipe too, which is not for it to write to.
        if span.context is None or not span.context.trace_flags.sampled or os.getpid() != self._pid:
            return
        with self._lock:
            self._since = self._since if self._ended else time.monotonic()
            self._ended.append(span)
            due = len(self._ended) >= MANY or time.monotonic() - self._since >= LONG_S
            due = due and not self._flushing
        if due:
            self.flush()

    @harmless
    def flush(self) -> None:
        """Fails no job: that the supervisor is gone, its slot hears otherwise."""
        with self._lock:
            ended, self._ended, self._flushing = self._ended, [], True
        sent = 0
        try:
            for frame, count in carrying.frames(ended):
                self._hand_over(frame)
                sent += count
        finally:
            self._flushing = False
            self._losses.add(len(ended) - sent)


class Attempts:
    """`hand_over` gets spans as JSON, on their way to whoever exports."""

    def __init__(self, hand_over: Callable[[str], None], worker_id: str, pool_id: str) -> None:
        self._common = {"worker.id": worker_id, "pool.id": pool_id}
        self._ids = Ids()
        self._collector = Collector(hand_over)
        self.provider = provider_for(self._collector, "gpuorch-slot", self._ids)
        self._tracer = tracer_of(self.provider)

    def install(self) -> None:
        """Let handlers reach it by the library's own functions."""
        trace.set_tracer_provider(self.provider)

    @contextmanager
    def running(self, jobs: Sequence[Mapping[str, Any]]) -> Iterator[Running]:
        """While this lasts, the first span that is recorded is the current one; the others are linked to it."""
        running = self._begun(jobs) or Running.unseen(jobs)
        with trace.use_span(running.first, record_exception=False, set_status_on_exception=False):
            try:
                yield running
            finally:
                running.close()
                self._collector.flush()

    @harmless
    def _begun(self, jobs: Sequence[Mapping[str, Any]]) -> Running:
        spans = [self._started(job, len(jobs)) for job in jobs]
        first, *others = [span for span in spans if span.is_recording()] or spans
        for other in others:
            first.add_link(other.get_span_context(), SAME_CALL)
            other.add_link(first.get_span_context(), SAME_CALL)
        own = [span.get_span_context() for span in spans]
        return Running(spans, first, [written(one) if one.is_valid else None for one in own])

    def _started(self, job: Mapping[str, Any], size: int) -> Span:
        parent = traceparent.parse(job.get("trace_context"))
        if parent is None or not parent.sampled:
            return trace.INVALID_SPAN if parent is None else trace.get_current_span(within(parent))
        job_id, attempt = job["job_id"], job["attempt"]
        about = {"job.id": job_id, "job.type": job["type"], "job.attempt": attempt, "job.agent": job["agent"]}
        batched = {"orchestrator.batch.size": size} if size > 1 else {}
        self._ids.choose(traceparent.of_attempt(parent, job_id, attempt).span_id)
        return self._tracer.start_span(
            "job",
            within(parent),
            SpanKind.CONSUMER,
            attributes={**about, **self._common, **batched},
            links=links_to_last(parent, job_id, attempt),
        )


class Running:
    """The spans of the jobs of one call, the first of which is the current one; `contexts` are what handlers see."""

    def __init__(self, spans: Sequence[Span], first: Span, contexts: Sequence[str | None]) -> None:
        self.first, self.contexts = first, contexts
        self._spans = spans
        self._errors: dict[int, BaseException] = {}

    @classmethod
    def unseen(cls, jobs: Sequence[Mapping[str, Any]]) -> Running:
        """Of jobs whose spans could not be made: they run all the same, in the trace that they were given."""
        return cls([], trace.INVALID_SPAN, [job.get("trace_context") for job in jobs])

    def raised(self, error: BaseException) -> None:
        """The call raised it: it is the error of all."""
        self._errors = dict.fromkeys(range(len(self._spans)), error)

    @harmless
    def returned(self, value: object) -> None:
        """Of a batch each job has its own: a result, or an exception in its place."""
        if isinstance(value, list) and len(self._spans) == len(value):
            self._errors = {place: one for place, one in enumerate(value) if isinstance(one, BaseException)}

    def ended(self, endings: Sequence[Mapping[str, Any]]) -> None:
        """How each ended, as its supervisor will hear it: not every exception is an error."""
        for place, (span, ending) in enumerate(zip(self._spans, endings, strict=False)):
            self._end(span, ending, self._errors.get(place))

    @harmless
    def _end(self, span: Span, ending: Mapping[str, Any], error: BaseException | None) -> None:
        outcome, kind = ending["outcome"], ending.get("error_kind")
        span.set_attribute("job.outcome", outcome)
        if kind:
            span.set_attribute("job.error_kind", kind)
        if is_error(outcome, kind):
            span.set_status(StatusCode.ERROR, str(ending.get("error") or "")[-MAX_TEXT:])
            if error is not None:
                span.record_exception(error)

    def close(self) -> None:
        """An error has its handler's frames, and these what the handler had on its GPU: they must not outlive it."""
        self._errors = {}
        for span in self._spans:
            harmless(span.end)()
