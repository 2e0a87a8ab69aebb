"""What was observed lately, as one number that fades: how often jobs arrive, how long they run and models load."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

#: Seconds after which an arrival counts only by 37 %.
FADE_S = 3600.0
#: Part by which a new observation moves an average.
WEIGHT = 0.2


@dataclass(slots=True)
class Rate:
    """Arrivals per second, each fading with its age.

    Also one statement to the database, for a leader that has just begun: the sum over the lane's latest jobs of
    EXP(-age / FADE_S), divided by FADE_S.
    """

    count: float = 0.0
    counted_at: float = 0.0

    def add(self, now: float, arrivals: int = 1) -> None:
        self.count = self.per_s(now) * FADE_S + arrivals
        self.counted_at = now

    def per_s(self, now: float) -> float:
        return self.count * exp(-max(now - self.counted_at, 0.0) / FADE_S) / FADE_S


@dataclass(slots=True)
class Average:
    """A moving average; before the first observation, what is usual elsewhere."""

    value: float
    observed: bool = False

    def add(self, value: float) -> None:
        self.value = self.value + WEIGHT * (value - self.value) if self.observed else value
        self.observed = True
