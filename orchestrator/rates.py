"""How many jobs an agent may submit: a bucket that tokens drip into, one for each new job. Arithmetic only.

Over any interval of t seconds an agent gets at most `burst + rate × t` jobs in. `store.rates` keeps the buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from orchestrator.policies import AgentPolicy

#: What a sum of fractions may miss of a whole token: who waits exactly as long as told gets it.
SLACK = 1e-6


@dataclass(frozen=True)
class Limit:
    rate: float
    burst: float

    @classmethod
    def of(cls, policy: AgentPolicy) -> Self | None:
        if policy.rate is None:
            return None
        return cls(policy.rate, float(policy.burst or max(1.0, policy.rate)))


@dataclass(frozen=True)
class Bucket:
    """The tokens that were there at a moment; what counts the seconds since is the caller's choice."""

    limit: Limit
    tokens: float

    @classmethod
    def full(cls, limit: Limit) -> Self:
        return cls(limit, limit.burst)

    def after(self, seconds: float) -> Bucket:
        """Later. A clock that went back adds nothing and takes nothing; what a lower burst cannot hold is lost."""
        tokens = self.tokens + self.limit.rate * max(seconds, 0.0)
        return Bucket(self.limit, min(tokens, self.limit.burst))

    def give(self, wanted: int) -> tuple[int, Bucket]:
        """How many of them get a token, and what is left."""
        given = max(0, min(wanted, math.floor(self.tokens + SLACK)))
        return given, Bucket(self.limit, self.tokens - given)

    def less(self, tokens: int) -> Bucket:
        """When so many are spoken for."""
        return Bucket(self.limit, self.tokens - tokens)

    def refunded(self, tokens: int) -> Bucket:
        return Bucket(self.limit, min(self.tokens + tokens, self.limit.burst))

    def wait_s(self, ahead: int = 0) -> float:
        """Seconds until there is a token for the one who has so many ahead; 0 when there is one now."""
        return max(0.0, (ahead + 1 - self.tokens) / self.limit.rate)
