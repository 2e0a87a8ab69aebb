"""Spans, if anybody wants them: off, and next to free, unless `otlp_endpoint` is set.

    submit ── orchestrator.dispatch, wait, claim, job, settle ── and once more for each further attempt

A request's `traceparent` becomes the parent of the span `submit`, whose context is stored with the job and travels with
it: row, stream entry, claim, slot. All that happens to the job then is a child of `submit`, wherever it happens; what a
handler does is a child of `job`. A context that is not sampled is handed on and leads to no span.

Slots hand their spans to their supervisor, who sends them with its own: a slot has no connection, and the next job may
kill it. The library behind it is loaded by `start` (in a slot by `start_slot`) and by nobody else. Where tracing is
off, `spans()` is None, and a caller asks for nothing more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from orchestrator.telemetry import traceparent

if TYPE_CHECKING:
    from orchestrator.jobs import Ready
    from orchestrator.settings import Settings
    from orchestrator.telemetry.attempts import Attempts
    from orchestrator.telemetry.spans import Spans

#: What a nursery loads for its slots, so that each has it when it is born.
PRELOADED = ("orchestrator.telemetry.attempts",)

_lock = threading.Lock()
_spans: Spans | None = None
#: Who started it here: an orchestrator and a worker may share a process.
_users = 0


def accepted(header: str | None) -> str | None:
    """A caller's `traceparent`; None for a malformed one, as the standard wants it."""
    return header if traceparent.parse(header) else None


def spans() -> Spans | None:
    """None while nobody traces here."""
    return _spans


def start(settings: Settings, service: str) -> Callable[[], None]:
    """Trace in this process, if the settings say where to; how to stop it. Raises ConfigError without the library."""
    global _users, _spans  # noqa: PLW0603 - one for the process, as logging is
    if settings.otlp_endpoint is None:
        return _nothing
    require_library()
    from orchestrator.telemetry import exporting
    from orchestrator.telemetry.spans import Spans

    with _lock:
        _users += 1
        if _spans is None:
            exporter = exporting.exporter_to(settings.otlp_endpoint)
            _spans = Spans(exporter, service, settings.trace_sample_pct)
    return _Stop()


def answers(endpoint: str) -> bool:
    """Whether a receiver takes spans there. Raises ConfigError without the library."""
    require_library()
    from orchestrator.telemetry import exporting

    return exporting.probe(endpoint)


def require_library() -> None:
    if find_spec("opentelemetry.sdk") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError("otlp_endpoint is set, and tracing is not installed; pip install '/path/to/clone[tracing]'")


def _nothing() -> None:
    """Nothing was started."""


class _Stop:
    """Once, however often it is called."""

    def __init__(self) -> None:
        self._left = False

    def __call__(self) -> None:
        global _users, _spans  # noqa: PLW0603
        with _lock:
            if self._left:
                return
            self._left = True
            _users -= 1
            last, _spans = (None, _spans) if _users else (_spans, None)
        if last is not None:
            last.close()


# ── submits ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Submit:
    """A submit under way. `context` is what is stored with its jobs."""

    def __init__(self, context: str | None) -> None:
        self.context = context

    def about(self, attributes: Mapping[str, Any]) -> None:
        """Say what it is about. Nobody listens, if nobody traces."""


@contextmanager
def submitting(given: str | None, **attributes: Any) -> Iterator[Submit]:
    """`given` is the caller's context, checked. Without tracing it is stored as it is."""
    if _spans is None:
        yield Submit(given)
        return
    with _spans.submitting(given, attributes) as submit:
        yield submit


def dispatching(lane: str, jobs: Sequence[Ready], since: int) -> AbstractContextManager[None]:
    """These jobs are being announced, since that moment."""
    return nullcontext() if _spans is None else _spans.dispatching(lane, jobs, since)


def added_by(trace_context: str | None, job_id: str, attempt: int) -> str | None:
    """The context of jobs that an attempt added: children of its span, where there is one."""
    known = traceparent.parse(trace_context) if _spans is not None else None
    return str(traceparent.of_attempt(known, job_id, attempt)) if known and known.sampled else trace_context


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────────


def moment() -> int:
    """Now, as spans have it: nanoseconds of this host's clock."""
    return time.time_ns()


def ago(seconds: float) -> int:
    return time.time_ns() - round(max(seconds, 0.0) * 1e9)


# ── slots ───────────────────────────────────────────────────────────────────────────────────────────────────────


def start_slot(hand_over: Callable[[str], None], worker_id: str, pool_id: str) -> Attempts:
    """In a slot, which hands its spans over to its supervisor."""
    from orchestrator.telemetry.attempts import Attempts

    attempts = Attempts(hand_over, worker_id, pool_id)
    attempts.install()
    return attempts
