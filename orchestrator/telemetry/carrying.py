"""Spans over a slot's pipe: JSON there, the library's objects on both sides.

A slot has no connection, and may be killed by its next job: what it has to say is with its supervisor before that.
A handler may give its spans any name, time and value. Both sides keep what a receiver can be told, up to a size: the
slot, so that its pipe is not full of it, and the supervisor, since a slot may say anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind
from opentelemetry.trace.status import Status, StatusCode

from orchestrator.telemetry import traceparent
from orchestrator.telemetry.guard import harmless
from orchestrator.telemetry.sdk import MAX_TEXT, clipped, context_of, written

#: Characters of a name or a key, items of a list or a mapping, and levels that these may nest.
MAX_NAME, MAX_ITEMS, MAX_DEPTH = 256, 128, 4
#: Characters of one frame of spans, and so of one span.
MAX_FRAME = 256 * 1024


# ── a slot's side ───────────────────────────────────────────────────────────────────────────────────────────────────


def frames(spans: Iterable[ReadableSpan]) -> Iterator[tuple[str, int]]:
    """Texts of at most `MAX_FRAME`, and how many spans each has; those that have none of it are left out."""
    some: list[str] = []
    size = 0
    for span in spans:
        text = _written_out(span)
        if text is None:
            continue
        if some and size + len(text) + 2 > MAX_FRAME:
            yield f"[{','.join(some)}]", len(some)
            some, size = [], 0
        some.append(text)
        size += len(text) + 1
    if some:
        yield f"[{','.join(some)}]", len(some)


@harmless
def _written_out(span: ReadableSpan) -> str | None:
    """Without its events, if it is too large with them; None if it is too large even so."""
    packed = pack(span)
    for one in (packed, packed | {"events": []}):
        text = json.dumps(one)
        if len(text) + 2 <= MAX_FRAME:
            return text
    return None


def pack(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    scope = span.instrumentation_scope
    links = [(written(link.context), link.attributes) for link in span.links]
    return {
        "name": clipped(span.name, MAX_NAME),
        "context": written(span.context),
        "parent": written(span.parent) if span.parent else None,
        "kind": span.kind.name,
        "times": [_plain(span.start_time), _plain(span.end_time)],
        "attributes": _attributes(span.attributes),
        "events": [
            [clipped(event.name, MAX_NAME), _plain(event.timestamp), _attributes(event.attributes)]
            for event in span.events
        ],
        # Whoever has no caller links to nobody: that is no link.
        "links": [[context, _attributes(about)] for context, about in links if traceparent.parse(context)],
        "status": [span.status.status_code.name, _perhaps(span.status.description, MAX_TEXT)],
        "scope": [clipped(scope.name, MAX_NAME), _perhaps(scope.version, MAX_NAME)] if scope else ["", None],
    }


# ── its supervisor's side ───────────────────────────────────────────────────────────────────────────────────────────


def unpack(packed: Mapping[str, Any], resource: Resource) -> ReadableSpan:
    """One that can be encoded, whatever it is. Raises an Exception of any kind for what is no span."""
    code, description = packed["status"]
    scope, version = packed["scope"]
    start, end = packed["times"]
    if not (_is_time(start) and _is_time(end)):
        raise ValueError("its times are none")
    return ReadableSpan(
        clipped(packed["name"], MAX_NAME),
        _context(packed["context"]),
        _context(packed["parent"]) if packed["parent"] else None,
        resource,
        _attributes(packed["attributes"]),
        [
            Event(clipped(name, MAX_NAME), _attributes(about), timestamp)
            for name, timestamp, about in packed["events"]
            if _is_time(timestamp)
        ],
        [Link(_context(context), _attributes(about)) for context, about in packed["links"]],
        SpanKind[packed["kind"]],
        status=Status(StatusCode[code], _perhaps(description, MAX_TEXT)),
        start_time=start,
        end_time=end,
        instrumentation_scope=InstrumentationScope(clipped(scope, MAX_NAME), _perhaps(version, MAX_NAME)),
    )


def _context(text: str) -> SpanContext:
    known = traceparent.parse(text)
    if known is None:
        raise ValueError(f"{text[:80]!r} is no context")
    return context_of(known)


def _is_time(value: object) -> bool:
    """Nanoseconds, as a receiver takes them."""
    return type(value) is int and 0 <= value < 2**63


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attributes(given: Mapping[Any, Any] | None) -> dict[str, Any]:
    return {clipped(key, MAX_NAME): _plain(value) for key, value in (given or {}).items()}


def _plain(value: object, depth: int = MAX_DEPTH) -> Any:
    """As JSON and a receiver have it."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else hex(value)[:MAX_TEXT]
    if depth and isinstance(value, Mapping):
        return {clipped(key, MAX_NAME): _plain(one, depth - 1) for key, one in islice(value.items(), MAX_ITEMS)}
    if depth and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(one, depth - 1) for one in islice(value, MAX_ITEMS)]
    return clipped(value, MAX_TEXT)


def _perhaps(value: object, size: int) -> str | None:
    return None if value is None else clipped(value, size)
