"""W3C trace context as text (https://www.w3.org/TR/trace-context/): read with care, written as the standard wants it.

The span of an attempt has an id that is made of its job and its number, so that whoever needs it knows it: the slot
that makes the span, the next attempt that links to it, the supervisor who speaks for a slot that died.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple

#: The flag that says that the caller records this trace.
SAMPLED = 0x01

# Version, trace id, parent id, flags; ids of zeros mean "none".
_TEXT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent(NamedTuple):
    """One span of one trace, and whether it is recorded."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse(text: str | None) -> TraceParent | None:
    """None for what is absent or malformed: it must not cost a job."""
    found = _TEXT.fullmatch(text) if text else None
    return TraceParent(found[1], found[2], int(found[3], 16)) if found else None


def trace_id(text: str | None) -> str | None:
    """What log lines say of a job's trace."""
    known = parse(text)
    return known.trace_id if known else None


def of_attempt(trace: TraceParent, job_id: str, attempt: int) -> TraceParent:
    """The span of this attempt, in the trace that its job belongs to."""
    named = f"{trace.trace_id}/{job_id}/{attempt}".encode()
    span_id = int.from_bytes(blake2b(named, digest_size=8).digest()) or 1
    return trace._replace(span_id=f"{span_id:016x}")
