"""Lines about what becomes of jobs. The ordinary end is told at debug level, and costs nothing when that is off."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from orchestrator import jobs
from orchestrator.jobs import Arrow
from orchestrator.telemetry.traceparent import trace_id

if TYPE_CHECKING:  # the store stands above
    from orchestrator.store.settle import End, Settled

log = logging.getLogger(__name__)

#: Arrow → how loud its line is, and the event. Errors' texts are the handlers' own, and may quote a payload: the rows
#: have them, a line has only the kind.
EVENTS: dict[Arrow | None, tuple[int, str]] = {
    jobs.FINISH: (logging.DEBUG, "job done"),
    jobs.SKIP: (logging.INFO, "job skipped"),
    jobs.RETRY: (logging.INFO, "job retried"),
    jobs.HAND_BACK: (logging.DEBUG, "job handed back"),
    jobs.STOP: (logging.INFO, "job cancelled"),
    jobs.FAIL: (logging.WARNING, "job failed"),
    jobs.BURY: (logging.WARNING, "job dead-lettered"),
    None: (logging.INFO, "late report dropped"),
}


class Claimed(Protocol):
    """An attempt that owns its job."""

    @property
    def job_id(self) -> str: ...

    @property
    def attempt(self) -> int: ...

    @property
    def trace_context(self) -> str | None: ...


def about(claim: Claimed) -> dict[str, object]:
    """The fields of a line about an attempt."""
    return {"job_id": claim.job_id, "attempt": claim.attempt, "trace_id": trace_id(claim.trace_context)}


def settled(items: Iterable[Settled], **fields: str | None) -> None:
    """What attempts led to; `fields` are what all their lines share."""
    quiet = not log.isEnabledFor(logging.DEBUG)
    for item in items:
        if not quiet or item.arrow is not jobs.FINISH:
            ended(item.arrow, item.end, **fields)


def ended(arrow: Arrow | None, end: End, **fields: str | None) -> None:
    """What became of one attempt; no arrow: it owned its job no longer, and nothing was written."""
    level, event = EVENTS.get(arrow, EVENTS[None])
    if log.isEnabledFor(level):
        log.log(level, event, extra=about(end) | {"error_kind": end.error_kind and str(end.error_kind)} | fields)
