"""How long to wait before the next try."""

from __future__ import annotations

#: Doubled so often a pause is as long as any limit; 2.0 ** 1024 would be no number any more, but an error.
MOST_DOUBLINGS = 60


def doubled(first_s: float, times: int, most_s: float) -> float:
    """The first pause, doubled so many times, and never longer than the last."""
    return min(first_s * 2.0 ** min(max(times, 0), MOST_DOUBLINGS), most_s)
