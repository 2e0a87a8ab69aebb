"""What keeps tracing from costing a job: its faults end here, and are told of once in a while.

Whoever tells what happened to a job (to `telemetry.spans`, `telemetry.attempts`) has just committed it, answers for it
or hears its slot: nothing that goes wrong with a span may go wrong there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from orchestrator.telemetry.seldom import Seldom

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Losses:
    """Counts spans that nobody will see."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._count = 0
        self._seldom = Seldom()

    def add(self, count: int) -> None:
        self._count += count
        if count and self._seldom.due():
            log.warning("spans lost", extra={"spans": self._count, "endpoint": self._endpoint})
            self._count = 0


_broke = Seldom()


def harmless(function: Callable[P, T]) -> Callable[P, T | None]:
    """None in place of whatever it raises. What is no Exception passes: so the end of a job is asked for."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # a handler may have put anything into its spans
            if _broke.due():
                log.warning("tracing broke", exc_info=error)
            return None

    return guarded
