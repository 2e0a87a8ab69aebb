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

from bisect import insort
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple

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


class Choice(NamedTuple):
    """Of one node: the GPUs that would take the ask, and how good that would be."""

    score: float
    rooms: list[Room]


def choose(node: Node, ask: Ask, policy: Policy, mix: Mix, scale: Scale) -> Choice | None:
    """The best GPUs of this node for the ask; None when it does not fit."""
    if not node.fits(ask):
        return None
    fitting, left = node.fitting(ask), _left(node, ask, scale)
    if policy is Policy.SPREAD:
        return Choice(-left, sorted(fitting, key=lambda room: -room.free_mb)[: ask.gpu_count])
    if policy is Policy.BEST_FIT or not mix:
        return Choice(left, fitting[: ask.gpu_count])
    before = mix.takers(node.model, node.cpu_milli, node.memory_mb)
    after = mix.takers(node.model, node.cpu_milli - ask.cpu_milli, node.memory_mb - ask.host_memory_mb)
    losses = [(_loss_of(room, ask, after), room) for room in fitting]
    losses = [min(losses)] if ask.gpu_count == 1 else sorted(losses)[: ask.gpu_count]
    rooms = [room for _, room in losses]
    if before is after and not after.gangs:  # then GPUs lose each for itself, and only those that are given
        next_mb = sum([loss for loss, _ in losses])
    else:
        next_mb = before.worth_of(node.frees) - after.worth_of(_frees_without(node, ask, rooms))
    return Choice(next_mb + _lasting_mb_lost(node, ask, rooms, mix) + NUDGE * scale.gpu_mb * left, rooms)


def _left(node: Node, ask: Ask, scale: Scale) -> float:
    """What would be left of the node, 0 nothing to 1 the largest node empty: GPU memory, and CPU where it is known."""
    memory = (node.total_mb - ask.memory_mb * ask.gpu_count) / scale.node_mb
    if node.cpu_milli == inf:
        return memory
    return (memory + (node.cpu_milli - ask.cpu_milli) / scale.cpu_milli) / 2


def _loss_of(room: Room, ask: Ask, takers: Takers) -> float:
    """What one GPU would lose. What is reserved is worth nothing to the mix, before as after."""
    return takers.loss(room.free_mb, ask.memory_mb) if room.reserved_for is None else 0.0


def _frees_without(node: Node, ask: Ask, rooms: list[Room]) -> tuple[int, ...]:
    """What anybody could use of the node when these GPUs were given."""
    frees = list(node.frees)
    for room in rooms:
        if room.reserved_for is None:
            frees.remove(room.free_mb)
            insort(frees, room.free_mb - ask.memory_mb)
    return tuple(frees)


def _lasting_mb_lost(node: Node, ask: Ask, rooms: list[Room], mix: Mix) -> float:
    """What the host could serve in the long run, and no more."""
    given_mb = ask.memory_mb * sum([room.reserved_for is None for room in rooms])
    before_mb = servable_mb = mix.servable_mb(node.cpu_milli, node.memory_mb)
    if ask.cpu_milli or ask.host_memory_mb:
        servable_mb = mix.servable_mb(node.cpu_milli - ask.cpu_milli, node.memory_mb - ask.host_memory_mb)
    return min(node.total_mb, before_mb) - min(node.total_mb - given_mb, servable_mb)
