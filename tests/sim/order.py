"""`make sim`: how long jobs wait in a lane, by agent and priority, in order of arrival and in order of rank.

python -m tests.sim.order [--plot order.svg] [--seed 7]

A discrete-event simulation. Ranks, windows, horizons and what may jump ahead are production's own functions
(`orchestrator.ranking`, `orchestrator.pace`); only servers and clocks are simulated.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from orchestrator.pace import Pace
from orchestrator.ranking import PRIORITY_NAMES, cost
from tests.sim.bars import draw_waits
from tests.sim.lane import Job, Lane, Publisher

NAMES = {points: name for name, points in PRIORITY_NAMES.items()}


@dataclass(frozen=True)
class Case:
    title: str
    slots: int
    jobs: list[Job]
    weights: dict[str, float] = field(default_factory=dict)


class Row(NamedTuple):
    case: str
    agent: str
    priority: str
    jobs: int
    policy: str
    p50_s: float
    p99_s: float
    longest_s: float
    late: int


def simulate(case: Case, *, ranked: bool = True) -> list[Job]:
    """The case's jobs with their starts; without `ranked` in order of arrival, and all are announced at once."""
    jobs = [replace(job, cost=job.cost if ranked else 1.0) for job in case.jobs]
    lane = Lane(dict(case.weights))
    publisher = Publisher(lane, Pace(slots=case.slots))
    free, ends, queue = case.slots, list[float](), sorted(jobs, key=lambda job: (job.arrives, job.number))
    waiting: list[Job] = []
    position, now = 0, 0.0
    while position < len(queue) or ends or waiting or publisher.stream or lane.ready:
        upcoming = [queue[position].arrives] if position < len(queue) else []
        now = min([*upcoming, *ends[:1]], default=now)
        while ends and ends[0] <= now:
            heappop(ends)
            free += 1
        while position < len(queue) and queue[position].arrives <= now:
            lane.submit([queue[position]]) if ranked else waiting.append(queue[position])
            position += 1
        while free:
            if ranked:
                publisher.publish(now)
            source = publisher.stream if ranked else waiting
            if not source:
                break
            started = source.pop(0)
            started.started = now
            free -= 1
            heappush(ends, now + started.takes)
        if ranked:
            publisher.publish(now)
    return jobs


def table(case: Case) -> list[Row]:
    rows = []
    for policy, ranked in (("FIFO", False), ("ours", True)):
        groups: dict[tuple[str, int], list[Job]] = {}
        for job in simulate(case, ranked=ranked):
            groups.setdefault((job.agent, job.priority), []).append(job)
        rows += [_row(case.title, *group, policy, jobs) for group, jobs in sorted(groups.items())]
    return rows


def _row(title: str, agent: str, priority: int, policy: str, jobs: list[Job]) -> Row:
    waits = sorted(job.waited for job in jobs)
    late = sum(job.started is not None and job.started > job.start_by for job in jobs)
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))]
    name = NAMES.get(priority, str(priority))
    return Row(title, agent, name, len(jobs), policy, statistics.median(waits), p99, waits[-1], late)


# --- cases ---


def flood(chance: random.Random) -> Case:
    """One agent submits thousands at once; two others come as usual, one of them with a few that are HIGH."""
    jobs = [Job(n, "flood", 10.0, chance.uniform(0.5, 1.5)) for n in range(4000)]
    jobs += [Job(5000 + n, "steady", n * 1.0, chance.uniform(0.5, 1.5)) for n in range(400)]
    jobs += [Job(6000 + n, "rare", n * 10.0, 1.0, PRIORITY_NAMES["HIGH" if n % 4 == 0 else "LOW"]) for n in range(40)]
    return Case("flood by one agent", 8, jobs)


def mixed(chance: random.Random) -> Case:
    """Jobs of a second and jobs of a minute, of which each agent's share is measured in time."""
    jobs = [_timed(n, "small", n * 0.2, chance.uniform(0.5, 1.5)) for n in range(3000)]
    jobs += [_timed(4000 + n, "large", n * 12.0, chance.uniform(40, 80)) for n in range(50)]
    return Case("mixed sizes, weights 3:1", 4, jobs, {"small": 3.0})


def deadlines(chance: random.Random) -> Case:
    """A lane with a backlog of minutes, and jobs among it that must start within a minute or two."""
    jobs = [_timed(n, "batch", n * 0.1, chance.uniform(0.5, 1.5)) for n in range(3000)]
    for n in range(100):
        arrives = n * 3.0
        takes = chance.uniform(0.5, 1.5)
        job = _timed(4000 + n, "batch", arrives, takes)
        jobs.append(replace(job, priority=-1, deadline=arrives + takes + chance.uniform(45, 120)))
    return Case("deadlines (priority -1)", 4, jobs)


def slow(chance: random.Random) -> Case:
    """Two slots, jobs of minutes: whoever comes with HIGH must not wait for a window announced long ago."""
    jobs = [_timed(n, "usual", 0.0, chance.uniform(60, 180)) for n in range(60)]
    jobs += [_timed(100 + n, "other", 600.0 + 900 * n, 60.0, PRIORITY_NAMES["HIGH"]) for n in range(4)]
    return Case("slow lane", 2, jobs)


def _timed(number: int, agent: str, arrives: float, takes: float, priority: int = 0) -> Job:
    return Job(number, agent, arrives, takes, priority, cost(None, takes, 1))


CASES: tuple[Callable[[random.Random], Case], ...] = (flood, mixed, deadlines, slow)


def report(rows: Iterable[Row]) -> None:
    head = ("case", "agent", "priority", "jobs", "order", "p50 s", "p99 s", "longest", "too late")
    print("{:26} {:8} {:>8} {:>6} {:6} {:>9} {:>9} {:>9} {:>8}".format(*head))
    for row in rows:
        print("{:26} {:8} {:>8} {:6} {:6} {:9,.1f} {:9,.1f} {:9,.1f} {:8}".format(*row))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.order", description=__doc__)
    parser.add_argument("--plot", type=Path, help="write the p99 waits as SVG")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rows = [row for case in CASES for row in table(case(random.Random(options.seed)))]
    report(rows)
    if options.plot:
        groups: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            groups.setdefault(f"{row.case}: {row.agent} {row.priority}", []).append((row.policy, row.p99_s))
        options.plot.write_text(draw_waits(groups), encoding="utf-8")
        print(f"wrote {options.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
