"""Spans over a slot's pipe: JSON there, the library's objects on both sides.

A slot has no connection, and may be killed by its next job: what it has to say is with its supervisor before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.status import Status, StatusCode

from orchestrator.telemetry import traceparent
from orchestrator.telemetry.sdk import context_of, written


def pack(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    scope = span.instrumentation_scope
    return {
        "name": span.name,
        "context": written(span.context),
        "parent": written(span.parent) if span.parent else None,
        "kind": span.kind.name,
        "times": [span.start_time, span.end_time],
        "attributes": dict(span.attributes or {}),
        "events": [[event.name, event.timestamp, dict(event.attributes or {})] for event in span.events],
        "links": [[written(link.context), dict(link.attributes or {})] for link in span.links],
        "status": [span.status.status_code.name, span.status.description],
        "scope": [scope.name, scope.version] if scope else ["", None],
    }


def unpack(packed: Mapping[str, Any], resource: Resource) -> ReadableSpan:
    """Raises LookupError, TypeError or ValueError for what is no span."""
    code, description = packed["status"]
    start, end = packed["times"]
    return ReadableSpan(
        packed["name"],
        _context(packed["context"]),
        _context(packed["parent"]) if packed["parent"] else None,
        resource,
        packed["attributes"],
        [Event(name, attributes, timestamp) for name, timestamp, attributes in packed["events"]],
        [Link(_context(context), attributes) for context, attributes in packed["links"]],
        SpanKind[packed["kind"]],
        status=Status(StatusCode[code], description),
        start_time=start,
        end_time=end,
        instrumentation_scope=InstrumentationScope(*packed["scope"]),
    )


def _context(text: str) -> Any:
    known = traceparent.parse(text)
    if known is None:
        raise ValueError(f"{text[:80]!r} is no context")
    return context_of(known)
