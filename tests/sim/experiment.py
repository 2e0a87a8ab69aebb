"""Fill a cluster with random tasks until it overflows, and see how much of its GPUs is in use then.

The experiment of "Beware of Fragmentation" (USENIX ATC 2023), as its public simulator does it: all tasks of the trace
in random order, then more of them, drawn with replacement, until their GPU demand is 130 % of the cluster's GPUs. They
are placed one by one; who does not fit is turned away, and nobody leaves. The names of the nodes are shuffled, so that
ties fall differently with each seed.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.placement import Ask, Cluster, GpuView, HostView, Mix, Placed, Policy, RecentAsks, Refused, Shape

#: What one GPU has; tasks ask for thousandths of it.
GPU_MB = 1000
#: Demand, as a part of what the cluster has.
INFLATION = 1.3

Decide = Callable[[Cluster, Ask], Placed | Refused]


@dataclass(frozen=True)
class Machine:
    name: str
    cpu_milli: int
    memory_mb: int
    gpus: int
    model: str = ""


@dataclass(frozen=True)
class Outcome:
    allocated_percent: float
    decisions: int
    #: Processor time: the machine may have other work.
    seconds: float


def run(machines: Sequence[Machine], tasks: Sequence[Ask], decide: Decide, seed: int) -> Outcome:
    chance = random.Random(seed)
    cluster = build(machines, chance)
    capacity_mb = sum(machine.gpus for machine in machines) * GPU_MB
    used_mb = decisions = 0
    seconds = 0.0
    for ask in draw(tasks, capacity_mb * INFLATION, chance):
        began = time.process_time()
        answer = decide(cluster, ask)
        if isinstance(answer, Placed):
            cluster.take(ask, answer)
            used_mb += ask.memory_mb * ask.gpu_count
        seconds += time.process_time() - began
        decisions += 1
    return Outcome(100 * used_mb / capacity_mb, decisions, seconds)


def build(machines: Sequence[Machine], chance: random.Random) -> Cluster:
    order = chance.sample(range(len(machines)), len(machines))
    named = {f"{number:05}-{machine.name}": machine for number, machine in zip(order, machines, strict=True)}
    gpus = [
        GpuView(f"{name}/{index}", name, index, GPU_MB, 0, 0, name=machine.model)
        for name, machine in named.items()
        for index in range(machine.gpus)
    ]
    return Cluster(gpus, [HostView(name, machine.cpu_milli, machine.memory_mb) for name, machine in named.items()])


def draw(tasks: Sequence[Ask], demand_mb: float, chance: random.Random) -> Iterator[Ask]:
    left = demand_mb
    for ask in _endless(tasks, chance):
        left -= ask.memory_mb * ask.gpu_count
        if left < 0:
            return
        yield ask


def _endless(tasks: Sequence[Ask], chance: random.Random) -> Iterator[Ask]:
    yield from chance.sample(tasks, len(tasks))
    while True:
        yield chance.choice(tasks)


def by_policy(policy: Policy) -> Decide:
    """As production decides: the mix is that of the recent asks."""
    recent = RecentAsks()

    def decide(cluster: Cluster, ask: Ask) -> Placed | Refused:
        recent.add(ask)
        return cluster.place(ask, policy, recent.mix())

    return decide


def knowing(tasks: Sequence[Ask]) -> Decide:
    """By fragmentation, with the mix of the whole trace from the beginning: what the recent asks cannot know."""
    mix = Mix(Counter(Shape.of(task) for task in tasks))
    return lambda cluster, ask: cluster.place(ask, Policy.FRAGMENTATION, mix)


def at_random(seed: int) -> Decide:
    """Any node that fits: what every policy must beat."""
    chance = random.Random(seed)

    def decide(cluster: Cluster, ask: Ask) -> Placed | Refused:
        fitting = [node.node_id for node in cluster.nodes() if node.fits(ask)]
        return cluster.place(ask._replace(node_id=chance.choice(fitting)) if fitting else ask)

    return decide
