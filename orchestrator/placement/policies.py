"""How the nodes that fit are compared: lower is better, and the GPUs within the node are chosen by the same measure.

`best_fit`: the node that is left with the least, and its fullest GPUs, so that large requests keep finding large
holes. `spread`: the opposite, for latency rather than packing.

`fragmentation`: the node whose free capacity loses the least worth for the usual mix of requests. Best fit counts
what is left; this counts what is left *and can be used*. The worth of a node is the sum of two things:

- what the mix could use next: for every shape, the free memory of the GPUs that are large enough for it, if the host
  has the CPU and memory for it, times the share of that shape. (The gradient of "Beware of Fragmentation", USENIX ATC
  2023: free capacity minus this is its measure of fragmentation.)
- what the host could serve in the long run: free GPU memory, at most as much as the host's CPU and memory last for
  at the ratio of the mix. The first part sees a shortage only when the host has come to its end; this one sends what
  needs much CPU to where CPU is plenty, from the beginning.

Where nodes lose the same, the better fit decides; it weighs little otherwise (`NUDGE`). Without a mix fragmentation
is best fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from orchestrator.placement.mix import Mix, Takers
from orchestrator.placement.node import Node, Room
from orchestrator.placement.views import Ask

#: What a whole node left empty weighs, in GPUs: enough to settle ties, too little to buy fragments.
NUDGE = 0.1


class Policy(StrEnum):
    BEST_FIT = "best_fit"
    SPREAD = "spread"
    FRAGMENTATION = "fragmentation"


@dataclass(frozen=True, slots=True)
class Scale:
    """The largest of the cluster: what "much left" is measured by."""

    gpu_mb: int
    node_mb: int
    cpu_milli: int


@dataclass(frozen=True, slots=True)
class Choice:
    score: float
    rooms: tuple[Room, ...]


def choose(node: Node, ask: Ask, policy: Policy, mix: Mix, scale: Scale) -> Choice | None:
    """The GPUs of this node that the ask should get and how good that would be; None when it does not fit."""
    if not node.host_fits(ask):
        return None
    fitting = node.fitting(ask)
    if len(fitting) < ask.gpu_count:
        return None
    left = _left(node, ask, scale)
    if policy is Policy.SPREAD:
        return Choice(-left, tuple(sorted(fitting, key=_emptiest_first)[: ask.gpu_count]))
    if policy is Policy.BEST_FIT or not mix:
        return Choice(left, tuple(fitting[: ask.gpu_count]))
    loss, rooms = _least_loss(node, ask, fitting, mix)
    return Choice(loss + NUDGE * scale.gpu_mb * left, rooms)


def _emptiest_first(room: Room) -> tuple[int, int]:
    return -room.free_mb, room.position


def _left(node: Node, ask: Ask, scale: Scale) -> float:
    """What would be left of the node, 0 nothing to 1 the largest node empty: GPU memory, and CPU where it is known."""
    memory = (node.total_mb - ask.memory_mb * ask.gpu_count) / scale.node_mb
    if node.cpu_milli == inf:
        return memory
    return (memory + (node.cpu_milli - ask.cpu_milli) / scale.cpu_milli) / 2


def _least_loss(node: Node, ask: Ask, fitting: list[Room], mix: Mix) -> tuple[float, tuple[Room, ...]]:
    """Which GPUs lose the least worth, and how much the whole node loses by it."""
    cpu_milli, memory_mb = node.cpu_milli - ask.cpu_milli, node.memory_mb - ask.host_memory_mb
    takers, need = mix.takers(node.model, cpu_milli, memory_mb), ask.memory_mb
    worth = takers.worth
    # `fitting` begins with the fullest GPU, and sorting keeps that order where the loss is the same.
    by_loss = sorted(fitting, key=lambda room: worth(room.free_mb) - worth(room.free_mb - need))
    rooms = tuple(by_loss[: ask.gpu_count])
    frees = node.frees.copy()
    for room in rooms:
        # What is reserved is worth nothing to the mix, before as after.
        if room.reserved_for is None:
            frees.remove(room.free_mb)
            frees.append(room.free_mb - need)
    return _worth_of(node, mix) - _worth(mix, takers, frees, cpu_milli, memory_mb), rooms


def _worth_of(node: Node, mix: Mix) -> float:
    if node.worth is None or node.worth[0] is not mix:
        takers = mix.takers(node.model, node.cpu_milli, node.memory_mb)
        node.worth = mix, _worth(mix, takers, node.frees, node.cpu_milli, node.memory_mb)
    return node.worth[1]


def _worth(mix: Mix, takers: Takers, frees: list[int], cpu_milli: float, memory_mb: float) -> float:
    """What the mix could use next, and what the host could serve in the long run (see above)."""
    usable = sum(map(takers.worth, frees)) + takers.worth_to_gangs(frees)
    return usable + min(sum(frees), mix.servable_mb(cpu_milli, memory_mb))
