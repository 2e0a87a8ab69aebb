"""Order within a lane: one number per job, the smallest goes first. Self-clocked fair queueing, as pure functions.

Numbers are service: what jobs cost, in thousandths of a unit. A lane has a clock of its own, its *virtual time*: how
far the service came that was announced. An agent has an account in each lane: the *tag* of its last job. A new job's
tag is

    max(virtual time of the lane, the agent's last tag) + cost / weight

and its rank is the tag, moved by its priority. The account is not moved. So an agent's jobs of one priority run in
order of arrival; agents that wait share the lane by their weights, whatever each of them floods it with; and whoever
comes late begins at the clock, neither behind the backlog of others nor with a credit for the time it was away. A
priority buys a *bounded* head start (or delay), so nothing starves: the clock passes every rank in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: Numbers to one unit of service, which is a job that says nothing about its cost.
UNIT = 1000
#: What a job may cost, in units: nothing is free, and no column overflows by what somebody claims.
LEAST_COST, MOST_COST = 0.01, 86_400.0
#: Units of head start that one point of priority buys: HIGH (50) overtakes at most 300 units of service.
UNITS_PER_POINT = 6

#: Points that a priority may have, above and below nothing; some have names.
MAX_PRIORITY = 100
PRIORITY_NAMES = {"LOW": -50, "NORMAL": 0, "HIGH": 50}


def cost(cost_units: float | None, expected_duration_sec: float | None, gpu_count: int) -> float:
    """Units of service a job takes: what it says, else the time it expects on so many GPUs, else one."""
    if cost_units is not None:
        wanted = cost_units
    elif expected_duration_sec is not None:
        wanted = expected_duration_sec * gpu_count
    else:
        wanted = 1.0
    return min(max(wanted, LEAST_COST), MOST_COST)


def charge(cost: float, weight: float) -> int:
    """What a job adds to its agent's account. At least 1, so that no two jobs of an agent have the same tag."""
    return max(1, round(cost * UNIT / weight))


def opened(virtual_time: int, last_tag: int) -> int:
    """Where an agent's next jobs begin."""
    return max(virtual_time, last_tag)


def tags(begin: int, charges: Iterable[int]) -> Iterator[int]:
    """The tags of an agent's jobs, one behind the other."""
    for one in charges:
        begin += one
        yield begin


def head_start(priority: int) -> int:
    return priority * UNITS_PER_POINT * UNIT


def rank(tag: int, priority: int) -> int:
    """What a lane is sorted by."""
    return tag - head_start(priority)


def reached(ranked: int, priority: int) -> int:
    """How far a lane's clock may go when this job is announced.

    One that jumped ahead does not move it to its tag: what it overtook has not been served. One that was held back
    does not move it beyond its tag: a delay is not service.
    """
    return min(ranked, ranked + head_start(priority))


def moved(ranked: int, before: int, after: int) -> int:
    """The rank of a job whose priority changes while it waits; its place among those of the same is kept."""
    return ranked + head_start(before) - head_start(after)


def urgent_places(room: int, ahead: int) -> int:
    """How many of the next `room` places in a window jobs may take whose deadline is near.

    Every other place at most, or a stream of those would starve everybody; `ahead` counts how many more of them than
    of others went in before.
    """
    return max(0, min(room, (room + 1 - ahead) // 2))
