"""The spans of an orchestrator and of a worker's supervisor: most are made when what they tell of is over."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, StatusCode

from orchestrator.errors import OrchestratorError, Unavailable
from orchestrator.telemetry import carrying, exporting, traceparent
from orchestrator.telemetry.guard import Losses, harmless
from orchestrator.telemetry.sdk import (
    MAX_TEXT,
    Ids,
    clipped,
    is_error,
    links_to_last,
    provider_for,
    tracer_of,
    within,
    written,
)
from orchestrator.telemetry.tracing import Submit, ago, moment

if TYPE_CHECKING:
    from orchestrator.jobs import Ready, Status
    from orchestrator.store.claim import Claim
    from orchestrator.store.settle import End


class Spans:
    """Makes them, and has them sent. Any thread may, and none is disturbed by what goes wrong with them."""

    def __init__(self, exporter: SpanExporter, service: str, sample_pct: float = 100.0) -> None:
        self._ids = Ids()
        self._queue = exporting.queue_to(exporter)
        self._room, self._losses = exporting.Room(), Losses()
        self._provider = provider_for(self._queue, service, self._ids, sample_pct)
        self._tracer = tracer_of(self._provider)

    def close(self) -> None:
        exporting.close(self._queue)

    # ── orchestrators ───────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def submitting(self, given: str | None, attributes: Mapping[str, Any]) -> Iterator[Submit]:
        submit = self._begun(given, attributes) or _Submitting(INVALID_SPAN, given)
        try:
            yield submit
        except Exception as error:
            submit.failed(error)
            raise
        finally:
            submit.end()

    @harmless
    def _begun(self, given: str | None, attributes: Mapping[str, Any]) -> _Submitting:
        kind = SpanKind.SERVER if "http.route" in attributes else SpanKind.INTERNAL
        parent = within(traceparent.parse(given))
        return _Submitting(self._tracer.start_span("submit", parent, kind, attributes=_plain(attributes)), given)

    @contextmanager
    def dispatching(self, lane: str, jobs: Sequence[Ready], since: int) -> Iterator[None]:
        """One for each job: it is its trace that somebody will look at."""
        error: Exception | None = None
        try:
            yield
        except Exception as away:
            error = away
            raise
        finally:
            self._dispatched(lane, jobs, since, error)

    @harmless
    def _dispatched(self, lane: str, jobs: Sequence[Ready], since: int, error: Exception | None) -> None:
        of_all = {"orchestrator.lane": lane, "orchestrator.batch.size": len(jobs)}
        said = None if error is None else str(error)
        for job in jobs:
            about = of_all | {"job.id": job.job_id, "job.type": job.type, "orchestrator.urgent": job.urgent}
            self._past("orchestrator.dispatch", job.trace_context, since, about, said, kind=SpanKind.PRODUCER)

    # ── attempts ────────────────────────────────────────────────────────────────────────────────────────────────

    @harmless
    def claimed(
        self, claims: Collection[Claim], since: int, until: int, worker_id: str, pool_id: str | None = None
    ) -> None:
        """Their wait was over when the claim was begun. How long it was is counted within the claim's transaction."""
        for claim in claims:
            if not claim.trace_context:
                continue
            own = _of_claim(claim)
            waiting = min(until - round(claim.waited_s * 1e9), since)
            self._past("wait", claim.trace_context, waiting, own, until=since)
            where = {"worker.id": worker_id, "pool.id": pool_id}
            self._past("claim", claim.trace_context, since, own | where | _of_lease(claim), until=until)

    @harmless
    def settled(self, ended: Sequence[tuple[End, Status | None]], since: int, worker_id: str) -> None:
        """What one transaction wrote; without a status, the attempt did not own its job any more."""
        for end, status in ended:
            if not end.trace_context:
                continue
            about = {
                "job.id": end.job_id,
                "job.attempt": end.attempt,
                "job.status": str(status or "not_owned"),
                "orchestrator.batch.size": len(ended),
                "worker.id": worker_id,
            }
            self._past("settle", end.trace_context, since, about)

    @harmless
    def died(
        self,
        ends: Sequence[End],
        ran_s: float,
        worker_id: str,
        pool_id: str | None = None,
        job_type: str | None = None,
    ) -> None:
        """The spans of attempts whose process, or whole worker, was gone before it could send them."""
        for end in ends:
            parent = traceparent.parse(end.trace_context)
            if parent is None:
                continue
            about = {
                "job.id": end.job_id,
                "job.type": job_type,
                "job.attempt": end.attempt,
                "job.outcome": end.outcome.value,
                "job.error_kind": end.error_kind,
                "worker.id": worker_id,
                "pool.id": pool_id,
            }
            self._past(
                "job",
                end.trace_context,
                ago(ran_s),
                about,
                end.error or "" if is_error(end.outcome.value, end.error_kind) else None,
                kind=SpanKind.CONSUMER,
                links=links_to_last(parent, end.job_id, end.attempt),
                span_id=traceparent.of_attempt(parent, end.job_id, end.attempt).span_id,
            )

    @harmless
    def carried(self, frame: str) -> None:
        """Those that a slot made, and that its pipe brought here: a bad one costs no other."""
        spans = json.loads(frame)
        if not self._room.has(len(frame)):
            self._losses.add(len(spans))
            return
        for packed in spans:
            self._carried(packed, len(frame) // len(spans))

    @harmless
    def _carried(self, packed: Mapping[str, Any], size: int) -> None:
        span = carrying.unpack(packed, self._provider.resource)
        self._room.fill(span, size)
        self._queue.on_end(span)

    @harmless
    def _past(
        self,
        name: str,
        context: str | None,
        since: int,
        attributes: Mapping[str, Any],
        error: str | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        until: int | None = None,
        span_id: str | None = None,
    ) -> None:
        """A span that is over now; none for a job that nobody traces."""
        parent = traceparent.parse(context)
        if parent is None or not parent.sampled:
            return
        until = until or moment()
        if span_id is not None:
            self._ids.choose(span_id)
        span = self._tracer.start_span(
            name, within(parent), kind, attributes=_plain(attributes), links=links, start_time=min(since, until)
        )
        if error is not None:
            span.set_status(StatusCode.ERROR, clipped(error, MAX_TEXT))
        span.end(until)


class _Submitting(Submit):
    def __init__(self, span: Span, given: str | None) -> None:
        # One that is not recorded stands for nothing: the caller's own is handed on instead.
        own = span.get_span_context()
        super().__init__(written(own) if own.is_valid and (span.is_recording() or given is None) else given)
        self._span = span

    @harmless
    def about(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(_plain(attributes))

    @harmless
    def failed(self, error: Exception) -> None:
        code = error.code if isinstance(error, OrchestratorError) else type(error).__name__
        self._span.set_attribute("error.type", code)
        if isinstance(error, Unavailable) or not isinstance(error, OrchestratorError):
            self._span.set_status(StatusCode.ERROR, clipped(error, MAX_TEXT))  # others are the caller's doing

    @harmless
    def end(self) -> None:
        self._span.end()


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _of_claim(claim: Claim) -> dict[str, Any]:
    return {"job.id": claim.job_id, "job.type": claim.type, "job.attempt": claim.attempt, "job.agent": claim.agent}


def _of_lease(claim: Claim) -> dict[str, Any]:
    lease = claim.lease
    if lease is None:
        return {"lease.mode": "none"}
    return {
        "lease.mode": lease.mode,
        "lease.memory_mb": lease.request.memory_mb,
        "lease.gpus": [gpu.gpu_uuid for gpu in lease.gpus],
        "lease.warm": bool(lease.resident),
    }
