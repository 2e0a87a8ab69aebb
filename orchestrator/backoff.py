"""How long to wait before what failed is tried again."""

from __future__ import annotations

import random

#: Doubled so often a wait is as long as any limit; 2.0 ** 1024 would be no number any more, but an error.
MOST_DOUBLINGS = 60


def doubled(first_s: float, times: int, most_s: float) -> float:
    """The first wait, doubled so many times, and never longer than `most_s`."""
    return min(first_s * 2.0 ** min(max(times, 0), MOST_DOUBLINGS), most_s)


def spread(pause_s: float) -> float:
    """Half of it at least and never more: those who failed at the same moment do not all come back at one."""
    return pause_s * random.uniform(0.5, 1.0)
