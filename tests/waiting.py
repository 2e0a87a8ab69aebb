"""Waiting for a fact instead of sleeping for luck."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds between two looks, at least and at most: a part of what was waited already, so that what comes soon is seen
#: soon and what comes late does not cost a processor that somebody else needs to make it come.
INTERVALS_S = (0.005, 0.05)
PART = 0.05
#: Seconds after which a fact will not come any more. A limit of what is waited for, never of the machine's speed: it is
#: long, since only failures take that long.
PATIENCE_S = 30.0


def wait_until(
    predicate: Callable[[], T], *, timeout: float = PATIENCE_S, what: str | Callable[[], str] = "condition"
) -> T:
    """Call `predicate` until it returns something truthy, and return that.

    Raises AssertionError with `what` (called then, if it is a function) and the last value after `timeout` seconds.
    The last look comes after the deadline, so that a slow machine cannot turn a fact into a failure.
    """
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        last_look = waited >= timeout
        value = predicate()
        if value:
            return value
        if last_look:
            wanted = what() if callable(what) else what
            raise AssertionError(f"{wanted}: not within {timeout:g} s; last value: {value!r}")
        shortest, longest = INTERVALS_S
        time.sleep(min(max(waited * PART, shortest), longest))
