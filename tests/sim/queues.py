"""What others do with the same requests, and what nobody can beat."""

from bisect import bisect_left
from collections import defaultdict
from math import ceil
from typing import NamedTuple

from tests.sim.requests import Request, compressed

#: Seconds to load a model.
Loads = dict[str, float]


class Replay(NamedTuple):
    waits_s: list[float]
    loads: int
    #: Part of the GPUs' time, until the last job ended, that they ran or loaded.
    busy: float


def fifo(some: list[Request], gpus: int, load_s: Loads, *, affinity: bool = False) -> Replay:
    """One queue: the first in line takes the GPU that has been free for longest, and loads if that has another model.

    With affinity it takes a free GPU that has its model, if there is one: plain LRU.
    """
    model: list[str | None] = [None] * gpus
    free_s = [0.0] * gpus
    waits_s, loads, busy_s = [], 0, 0.0
    for one in some:
        start_s = max(one.at_s, min(free_s))
        idle = [gpu for gpu in range(gpus) if free_s[gpu] <= start_s]
        warm = [gpu for gpu in idle if affinity and model[gpu] == one.model]
        gpu = min(warm or idle, key=lambda gpu: free_s[gpu])
        if model[gpu] != one.model:
            model[gpu] = one.model
            loads += 1
            start_s += load_s[one.model]
            busy_s += load_s[one.model]
        waits_s.append(start_s - one.at_s)
        free_s[gpu] = start_s + one.run_s
        busy_s += one.run_s
    return Replay(waits_s, loads, busy_s / (gpus * max(free_s)))


def pace(some: list[Request], gpus: int, load_s: Loads, busy: float) -> float:
    """The factor of compression at which FIFO keeps the GPUs so busy, its loads counted."""
    low, high = 0.01, 1000.0
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fifo(compressed(some, middle), gpus, load_s).busy < busy else (low, middle)
    return low


def fewest_in_order(some: list[Request], gpus: int) -> int:
    """The fewest loads of anybody who starts jobs in the order of their arrival, knowing all of them beforehand.

    Whenever a job starts, its model is on one of the GPUs. So what is loaded from start to start is a way of paging
    through the sequence of models with as many frames as GPUs, and Belady's way, which replaces what is needed last,
    has the fewest faults. (It lets one copy of a model run any number of jobs at once: no real schedule may reach it.)
    """
    following = _following(some)
    loaded: dict[str, int] = {}
    loads = 0
    for number, one in enumerate(some):
        if one.model not in loaded:
            loads += 1
            if len(loaded) == gpus:
                del loaded[max(loaded, key=lambda name: loaded[name])]
        loaded[one.model] = following[number]
    return loads


def _following(some: list[Request]) -> list[int]:
    """For each request, the number of the next one of its model."""
    following, later = [0] * len(some), defaultdict[str, int](lambda: len(some))
    for number in range(len(some) - 1, -1, -1):
        following[number] = later[some[number].model]
        later[some[number].model] = number
    return following


def fewest_in_any_order(some: list[Request], gpus: int, longest_wait_s: float) -> int:
    """No fewer loads are possible for anybody, in whatever order and knowing all, who lets nobody wait for longer.

    What arrives between `a` and `b` - wait - run time has run between `a` and `b`. A model with so much work there was
    on at least work / (b - a) GPUs, rounded up, and only as many of these as there are GPUs were loaded before `a`.
    So between `a` and `b` there were at least (sum over models) - GPUs loads. This is the best sum over intervals that
    do not overlap, of all that begin and end at some of the arrivals; the first loads of all come on top.
    """
    grid = [one.at_s for one in some[:: max(len(some) // 800, 1)]]
    grid.append(some[-1].at_s + longest_wait_s + max(one.run_s for one in some) + 1.0)
    ends = sorted((one.at_s + longest_wait_s + one.run_s, one) for one in some)
    when = [end_s for end_s, _ in ends]
    best = [0] * len(grid)
    for first, begin_s in enumerate(grid):
        best[first] = max(best[first], best[first - 1] if first else 0)
        work_s: defaultdict[str, float] = defaultdict(float)
        position = bisect_left(when, begin_s)
        for last in range(first + 1, len(grid)):
            while position < len(ends) and when[position] <= grid[last]:
                one = ends[position][1]
                position += 1
                if one.at_s >= begin_s:
                    work_s[one.model] += one.run_s
            length_s = grid[last] - begin_s
            needed = sum(ceil(work / length_s) for work in work_s.values()) - gpus if len(work_s) else 0
            best[last] = max(best[last], best[first] + needed)
    return best[-1] + min(gpus, len({one.model for one in some}))
