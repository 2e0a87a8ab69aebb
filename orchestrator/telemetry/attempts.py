"""The span `job` of each attempt, in the slot that runs it: current while its handler runs, and so its own to use.

from opentelemetry import trace

trace.get_current_span().set_attribute("tokens", 1234)
with trace.get_tracer(__name__).start_as_current_span("decode"): ...
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from orchestrator.telemetry import carrying, traceparent
from orchestrator.telemetry.sdk import MAX_TEXT, Ids, is_error, links_to_last, provider_for, tracer_of, within, written

#: What a link between two jobs of one call says.
SAME_CALL = {"link.kind": "same_call"}
#: Spans that wait for their job's end, and seconds that the first of them waits, before they are handed over earlier.
MANY, LONG_S = 256, 1.0


class Collector(SpanProcessor):
    """Keeps what ended, and hands it over: with the end of a job, and before that when a handler makes many."""

    def __init__(self, hand_over: Callable[[str], None]) -> None:
        self._hand_over = hand_over
        self._lock = threading.Lock()
        self._ended: list[ReadableSpan] = []
        self._since = 0.0
        self._pid = os.getpid()

    def on_end(self, span: ReadableSpan) -> None:
        # A process that the handler forked has our pipe too, which is not for it to write to.
        if span.context is None or not span.context.trace_flags.sampled or os.getpid() != self._pid:
            return
        with self._lock:
            self._since = self._since if self._ended else time.monotonic()
            self._ended.append(span)
            due = len(self._ended) >= MANY or time.monotonic() - self._since >= LONG_S
        if due:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        if ended:
            with suppress(OSError):  # the supervisor is gone, of which its slot hears otherwise
                self._hand_over(json.dumps([carrying.pack(span) for span in ended], default=str))


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
        spans = [self._started(job, len(jobs)) for job in jobs]
        first, *others = [span for span in spans if span.is_recording()] or spans
        for other in others:
            first.add_link(other.get_span_context(), SAME_CALL)
            other.add_link(first.get_span_context(), SAME_CALL)
        with trace.use_span(first, record_exception=False, set_status_on_exception=False):
            try:
                yield Running(spans)
            finally:
                for span in spans:
                    span.end()
                self._collector.flush()

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
    """The spans of the jobs of one call."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._errors: dict[int, BaseException] = {}

    def contexts(self) -> list[str | None]:
        """What each job's handler sees as its trace."""
        return [written(own) if own.is_valid else None for own in (span.get_span_context() for span in self._spans)]

    def raised(self, error: BaseException) -> None:
        """The call raised it: it is the error of all."""
        self._errors = dict.fromkeys(range(len(self._spans)), error)

    def returned(self, value: object) -> None:
        """Of a batch each job has its own: a result, or an exception in its place."""
        if isinstance(value, list) and len(self._spans) == len(value):
            self._errors = {place: one for place, one in enumerate(value) if isinstance(one, BaseException)}

    def ended(self, endings: Sequence[Mapping[str, Any]]) -> None:
        """How each ended, as its supervisor will hear it: not every exception is an error."""
        for place, (span, ending) in enumerate(zip(self._spans, endings, strict=True)):
            outcome, kind = ending["outcome"], ending.get("error_kind")
            span.set_attribute("job.outcome", outcome)
            if kind:
                span.set_attribute("job.error_kind", kind)
            if is_error(outcome, kind):
                span.set_status(StatusCode.ERROR, str(ending.get("error") or "")[-MAX_TEXT:])
                if place in self._errors:
                    span.record_exception(self._errors[place])
