"""What those who make spans share: the provider, chosen ids, and text as the library's objects."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, Tracer

from orchestrator import __version__
from orchestrator.telemetry import traceparent
from orchestrator.telemetry.traceparent import TraceParent

#: Characters of an attribute, and of an error, that a span keeps.
MAX_TEXT = 4000
#: What a span keeps of what a handler gives it. Each job of a batch is a link.
LIMITS = SpanLimits(
    max_span_attributes=64,
    max_events=32,
    max_links=128,
    max_event_attributes=16,
    max_link_attributes=16,
    max_attribute_length=MAX_TEXT,
)


class Ids(RandomIdGenerator):
    """Random, save for the one span whose id was chosen just before, by the same thread."""

    def __init__(self) -> None:
        self._chosen = threading.local()

    def choose(self, span_id: str) -> None:
        self._chosen.span_id = int(span_id, 16)

    def generate_span_id(self) -> int:
        chosen: int | None = self._chosen.__dict__.pop("span_id", None)
        return super().generate_span_id() if chosen is None else chosen


def provider_for(processor: SpanProcessor, service: str, ids: Ids, sample_pct: float = 100.0) -> TracerProvider:
    """What makes spans; the caller's decision about a trace counts more than the share that is sampled."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_pct / 100)),
        resource=Resource.create(
            {
                "service.name": service,
                "service.version": __version__,
                "host.name": socket.gethostname(),
                "process.pid": os.getpid(),
            }
        ),
        shutdown_on_exit=False,  # that would wait for a receiver that hangs
        id_generator=ids,
        span_limits=LIMITS,
    )
    provider.add_span_processor(processor)
    return provider


def tracer_of(provider: TracerProvider) -> Tracer:
    return provider.get_tracer("gpuorch", __version__)


def within(parent: TraceParent | None) -> Any:
    """The library's context for children of this span; an empty one makes the first of a trace."""
    if parent is None:
        return trace.set_span_in_context(trace.INVALID_SPAN)
    return trace.set_span_in_context(NonRecordingSpan(context_of(parent)))


def context_of(known: TraceParent) -> SpanContext:
    ids = int(known.trace_id, 16), int(known.span_id, 16)
    return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(known.flags))


def written(known: SpanContext) -> str:
    return str(TraceParent(f"{known.trace_id:032x}", f"{known.span_id:016x}", int(known.trace_flags) & 0xFF))


def clipped(value: object, size: int) -> str:
    """Text that can be encoded, whatever it is."""
    return str(value)[:size].encode(errors="replace").decode()


def links_to_last(parent: TraceParent, job_id: str, attempt: int) -> list[Link]:
    """To the span of the attempt before, whoever made it."""
    if attempt < 2:
        return []
    last = context_of(traceparent.of_attempt(parent, job_id, attempt - 1))
    return [Link(last, {"link.kind": "retry_of", "job.attempt": attempt - 1})]


def is_error(outcome: str, error_kind: str | None) -> bool:
    """Also of a batch that failed as a whole, though its jobs are handed back without blame."""
    return outcome == "failed" or (outcome == "handed_back" and error_kind is not None)
