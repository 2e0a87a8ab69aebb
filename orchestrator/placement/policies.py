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


def score(node: Node, ask: Ask, policy: Policy, mix: Mix, scale: Scale) -> float | None:
    """How good it would be to place the ask on this node; None when it does not fit."""
    if not node.fits(ask):
        return None
    left = _left(node, ask, scale)
    if policy is Policy.SPREAD:
        return -left
    if policy is Policy.BEST_FIT or not mix:
        return left
    return _loss(node, ask, mix) + NUDGE * scale.gpu_mb * left


def pick(node: Node, ask: Ask, policy: Policy, mix: Mix) -> list[Room]:
    """The GPUs of a node that fits, by the same measure. Sorting keeps the fullest first where that is equal."""
    fitting = node.fitting(ask)
    if policy is Policy.SPREAD:
        fitting.sort(key=lambda room: -room.free_mb)
    elif policy is Policy.FRAGMENTATION and mix:
        return _cheapest(fitting, ask, _takers_after(node, ask, mix))
    return fitting[: ask.gpu_count]


def _left(node: Node, ask: Ask, scale: Scale) -> float:
    """What would be left of the node, 0 nothing to 1 the largest node empty: GPU memory, and CPU where it is known."""
    memory = (node.total_mb - ask.memory_mb * ask.gpu_count) / scale.node_mb
    if node.cpu_milli == inf:
        return memory
    return (memory + (node.cpu_milli - ask.cpu_milli) / scale.cpu_milli) / 2


def _takers_after(node: Node, ask: Ask, mix: Mix) -> Takers:
    """Those whom the host could serve when it had served the ask."""
    return mix.takers(node.model, node.cpu_milli - ask.cpu_milli, node.memory_mb - ask.host_memory_mb)


def _cheapest(fitting: list[Room], ask: Ask, takers: Takers) -> list[Room]:
    """Those that lose least, each for itself. What is reserved is worth nothing to the mix, before as after."""
    worth, need = takers.worth, ask.memory_mb
    losses = {free: worth(free) - worth(free - need) for free in {room.free_mb for room in fitting}}

    def loss(room: Room) -> float:
        return losses[room.free_mb] if room.reserved_for is None else 0.0

    return [min(fitting, key=loss)] if ask.gpu_count == 1 else sorted(fitting, key=loss)[: ask.gpu_count]


def _loss(node: Node, ask: Ask, mix: Mix) -> float:
    """What the whole node would lose."""
    takers, frees = _takers_after(node, ask, mix), list(node.frees)
    for room in _cheapest(node.fitting(ask), ask, takers):
        if room.reserved_for is None:
            frees.remove(room.free_mb)
            frees.append(room.free_mb - ask.memory_mb)
    frees.sort()
    servable_mb = mix.servable_mb(node.cpu_milli - ask.cpu_milli, node.memory_mb - ask.host_memory_mb)
    return _worth_of(node, mix) - _worth(tuple(frees), takers, servable_mb)


def _worth_of(node: Node, mix: Mix) -> float:
    if node.worth is None or node.worth[0] is not mix:
        takers = mix.takers(node.model, node.cpu_milli, node.memory_mb)
        node.worth = mix, _worth(node.frees, takers, mix.servable_mb(node.cpu_milli, node.memory_mb))
    return node.worth[1]


def _worth(frees: tuple[int, ...], takers: Takers, servable_mb: float) -> float:
    """What the mix could use next, and what the host could serve in the long run (see above)."""
    return takers.worth_of(frees) + min(sum(frees), servable_mb)
