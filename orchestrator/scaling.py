"""How many workers a lane should have, by what is asked of it: a pure function that autoscalers follow.

The policy, in order:

1. Nothing waits and nothing runs → the minimum, which may be zero. Anything at all → one worker at least.
2. *Up* while there are more jobs than slots, and either more than `max_depth` of them or jobs that take too long
   (`max_latency_s`): then a slot for each job. Jobs that merely run long need no more workers; they have theirs.
3. *Down* while hardly any slot is in use (`min_utilization`) and the lane is short: then a slot for each job.
4. Otherwise as many as there are, so that nothing swings.
5. Never up while the lane is paused: nobody could start what waits. Those that are there stay for its end.

Whatever comes out is never below the workers that are busy: an autoscaler that asked for fewer would have to end jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Seconds that "lately" means where latencies are concerned.
LATELY_S = 60.0


@dataclass(frozen=True)
class Policy:
    """When a lane is too long, its jobs too slow, its workers idle."""

    max_depth: int = 100
    #: Mean seconds from submit to end, or of the oldest wait: what waits that long already cannot end sooner.
    max_latency_s: float = 2.0
    #: Share of the slots.
    min_utilization: float = 0.10


POLICY = Policy()


@dataclass(frozen=True)
class Load:
    """What is asked of a lane, and who is there for it; draining workers take no jobs and are not counted as `workers`.

    `waiting` jobs may start now, or once there is memory for them; `running` ones are claimed or run. Both are exact up
    to a limit, beyond which they are "at least" (`at_least`). Those that wait for a time (`delayed`) or for something
    else (`blocked`) need no worker yet.
    """

    waiting: int = 0
    running: int = 0
    delayed: int = 0
    blocked: int = 0
    oldest_wait_s: float = 0.0
    #: Of what ended lately, submit to end; None when nothing did.
    mean_latency_s: float | None = None
    workers: int = 0
    busy_workers: int = 0
    draining: int = 0
    #: Of one worker.
    slots: float = 1.0
    minimum: int = 0
    maximum: int | None = None
    #: Whether workers would get jobs: those of a pool that drains or is closed do not.
    open: bool = True
    #: Whether somebody paused the lane: what waits counts as waiting, and cannot start.
    paused: bool = False
    at_least: bool = False

    @property
    def depth(self) -> int:
        """Never 0 while something runs or may run."""
        return self.waiting + self.running

    @property
    def capacity(self) -> float:
        return self.workers * self.slots


def desired_workers(load: Load, policy: Policy = POLICY) -> int:
    if not load.open:
        return load.busy_workers
    wanted = max(_wanted(load, policy), load.minimum)
    allowed = wanted if load.maximum is None else min(wanted, load.maximum)
    return max(allowed, load.busy_workers)


def _wanted(load: Load, policy: Policy) -> int:
    if not load.depth:
        return 0
    asked = _asked(load, policy)
    return min(asked, max(load.workers, min(load.running, 1))) if load.paused else asked


def _asked(load: Load, policy: Policy) -> int:
    needed = max(math.ceil(load.depth / load.slots), 1)
    if is_crowded(load, policy):
        return needed
    if is_idle(load, policy):
        return min(needed, max(load.workers, 1))
    return max(load.workers, 1)


def is_crowded(load: Load, policy: Policy = POLICY) -> bool:
    """More jobs than slots, and too many of them or too slow."""
    slow = max(load.mean_latency_s or 0.0, load.oldest_wait_s) > policy.max_latency_s
    return load.depth > load.capacity and (load.depth > policy.max_depth or slow)


def is_idle(load: Load, policy: Policy = POLICY) -> bool:
    return load.depth <= policy.max_depth and load.running < policy.min_utilization * load.capacity
