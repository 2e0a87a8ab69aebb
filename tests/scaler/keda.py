"""KEDA's arithmetic, as far as a number of replicas depends on it; written from its documentation and Kubernetes'.

- A trigger is active when its value is strictly above its activation value; an object when one of its triggers is.
- Zero to one and back is KEDA's: one as soon as it is active, zero when it was not for `cooldownPeriod`.
- One to many is the HorizontalPodAutoscaler's. By average: ceil(value / target); by value: ceil(replicas x value /
  target). Within a tenth of the target nothing changes. The trigger that wants most decides, within the limits.
- After `failureThreshold` failures in a row there are as many as the fallback says, or as there are if that is more.
"""

import math
from dataclasses import dataclass
from typing import Any

TOLERANCE = 0.1


@dataclass
class Trigger:
    target: float
    activation: float = 0.0
    average: bool = True

    def wants(self, value: float, replicas: int) -> int:
        """By the HorizontalPodAutoscaler, which only looks while there are pods."""
        ratio = value / (self.target * (replicas if self.average else 1))
        if abs(ratio - 1) <= TOLERANCE:
            return replicas
        return math.ceil(round(ratio * replicas, 9))


class ScaledObject:
    def __init__(self, spec: dict[str, Any], *triggers: Trigger) -> None:
        self.spec = spec
        self.triggers = triggers
        self.replicas = 0
        self._active_at = -math.inf
        self._failures = 0

    def poll(self, now: float, *values: float | None) -> int:
        """One look at all triggers, None for one that fails; how many replicas there are then."""
        if None in values:
            self._failures += 1
            return self._fall_back()
        self._failures = 0
        known = [value for value in values if value is not None]
        if any(value > trigger.activation for trigger, value in zip(self.triggers, known, strict=True)):
            self._active_at = now
            self.replicas = max(self.replicas, 1)
        elif now - self._active_at >= self.spec["cooldownPeriod"]:
            self.replicas = self.spec["minReplicaCount"]
        if self.replicas:
            wanted = max(t.wants(value, self.replicas) for t, value in zip(self.triggers, known, strict=True))
            self.replicas = min(max(wanted, self.spec["minReplicaCount"], 1), self.spec["maxReplicaCount"])
        return self.replicas

    def _fall_back(self) -> int:
        fallback = self.spec["fallback"]
        if self._failures >= fallback["failureThreshold"]:
            self.replicas = max(self.replicas, fallback["replicas"])
        return self.replicas
