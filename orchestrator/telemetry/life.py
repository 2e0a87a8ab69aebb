"""Lines about what becomes of jobs. The ordinary end is told at debug level, and costs nothing when that is off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from orchestrator import jobs
from orchestrator.jobs import Arrow
from orchestrator.telemetry import logs

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
    return {"job_id": claim.job_id, "attempt": claim.attempt, "trace_id": logs.trace_id(claim.trace_context)}


def settled(
    items: Iterable[Settled], trace_of: Callable[[str], str | None] = lambda _: None, **about: str | None
) -> None:
    """What attempts led to; `about` is what all their lines share."""
    quiet = not log.isEnabledFor(logging.DEBUG)
    for item in items:
        if not quiet or item.arrow is not jobs.FINISH:
            end = item.end
            ended(item.arrow, end, str(end.error_kind) if end.error_kind else None, trace_of(end.job_id), **about)


def ended(arrow: Arrow | None, end: End, kind: str | None, trace_id: str | None = None, **about: str | None) -> None:
    """What became of one attempt; no arrow: it owned its job no longer, and nothing was written."""
    level, event = EVENTS.get(arrow, EVENTS[None])
    if log.isEnabledFor(level):
        ids = {"job_id": end.job_id, "attempt": end.attempt, "trace_id": trace_id, "error_kind": kind}
        log.log(level, event, extra=ids | about)
