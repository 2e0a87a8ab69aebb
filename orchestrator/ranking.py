"""Order within a lane: one number per job, the smallest goes first.

A rank is the moment of arrival in microseconds, moved by priority. A priority buys a *bounded* head start (or
delay), so nothing starves: every job's rank is passed by the clock in the end. Ties keep the order of arrival
within one submission because later jobs get later microseconds.
"""

from __future__ import annotations

from datetime import UTC, datetime

#: Seconds of head start that one point of priority buys: HIGH (50) overtakes at most 5 minutes of arrivals.
SECONDS_PER_POINT = 6

PRIORITY_NAMES = {"LOW": -50, "NORMAL": 0, "HIGH": 50}


def rank(arrived: datetime, priority: int, position: int = 0) -> int:
    """The sort key of a job that arrived at `arrived` (database clock) as number `position` of its batch."""
    micros = int(arrived.replace(tzinfo=UTC).timestamp() * 1_000_000)
    return micros + position - priority * SECONDS_PER_POINT * 1_000_000
