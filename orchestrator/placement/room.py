"""What to do when a request does not fit: which GPUs to keep for it, and which idle models to unload for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from orchestrator.placement.cluster import Cluster
from orchestrator.placement.node import Node
from orchestrator.placement.views import Ask, GpuView, host_refusal, refusal

#: Idle models of one node up to which every set of at most so many is tried; beyond it, a good one is taken.
MOST_TO_TRY = 24
LARGEST_TO_TRY = 3


@dataclass(frozen=True, slots=True)
class Resident:
    """A warm model that may be unloaded: it does nothing at the moment, or (for `warmth`) is let finish first."""

    key: str
    gpu_uuids: tuple[str, ...]
    #: On each of its GPUs.
    memory_mb: int
    idle_s: float
    resident_s: float
    pinned: bool = False
    #: What its absence is expected to cost, in whatever unit the caller counts: the cheapest go first.
    regret: float = 0.0


def reservation(cluster: Cluster, ask: Ask) -> tuple[GpuView, ...] | None:
    """The GPUs of one node that a starving request should reserve: those that lack the least room for it.

    None when no node has enough GPUs that could ever hold it. What others lease goes away, what foreign processes
    hold may not.
    """
    choices = []
    for node in cluster.nodes(ask.node_id):
        able = sorted((gpu for gpu in node.gpus if _could_hold(gpu, ask)), key=lambda gpu: _lack(gpu, ask))
        if 0 < ask.gpu_count <= len(able):
            choices.append(tuple(able[: ask.gpu_count]))
    return min(choices, key=lambda gpus: [sum(_lack(gpu, ask)[n] for gpu in gpus) for n in (0, 1)], default=None)


def _could_hold(gpu: GpuView, ask: Ask) -> bool:
    """Whether only leases stand between the GPU and its part of the request. A closed gate opens again."""
    return refusal(gpu._replace(leased_mb=0, gated=False), ask) is None


def _lack(gpu: GpuView, ask: Ask) -> tuple[bool, int, int]:
    return gpu.gated, max(ask.memory_mb - gpu.free_mb, 0), gpu.gpu_index


def evictions(
    cluster: Cluster, ask: Ask, residents: Sequence[Resident], min_resident_s: float = 0.0
) -> tuple[Resident, ...]:
    """The fewest idle models whose unloading lets the request fit, the cheapest first, then those longest idle.

    Empty when nothing is needed or nothing would help. Pinned models stay, and so do those that were loaded less than
    `min_resident_s` ago: unloading them again would only move the waiting.
    """
    if cluster.fits(ask):
        return ()
    lawful = [resident for resident in residents if not resident.pinned and resident.resident_s >= min_resident_s]
    lawful.sort(key=lambda resident: (resident.regret, -resident.idle_s, resident.key))
    if ask.gpu_count == 1 and (alone := _first_alone(cluster, ask, lawful)):
        return (alone,)
    homes = {gpu.gpu_uuid: gpu.node_id for gpu in cluster.gpus(ask.node_id)}
    choices = [
        choice
        for node_id, local in _by_home(lawful, homes).items()
        if (choice := _fewest(cluster.nodes(node_id)[0], ask, local))
    ]
    return min(choices, key=_price, default=())


def _first_alone(cluster: Cluster, ask: Ask, residents: Iterable[Resident]) -> Resident | None:
    """The first whose leaving is enough: the usual case, found without looking at whole nodes."""
    gpus = {gpu.gpu_uuid: (gpu, node) for node in cluster.nodes(ask.node_id) for gpu in node.gpus}
    for resident in residents:
        for gpu, node in [gpus[uuid] for uuid in resident.gpu_uuids if uuid in gpus]:
            if refusal(gpu.without(resident.memory_mb), ask) is None and host_refusal(node.host, ask) is None:
                return resident
    return None


def _price(choice: Sequence[Resident]) -> tuple[int, float, float]:
    return len(choice), sum(one.regret for one in choice), -min(one.idle_s for one in choice)


def _by_home(residents: Iterable[Resident], homes: Mapping[str, str]) -> dict[str, list[Resident]]:
    """The residents of each node; all GPUs of a model are of one."""
    by_home: dict[str, list[Resident]] = {}
    for resident in residents:
        for home in {homes[uuid] for uuid in resident.gpu_uuids if uuid in homes}:
            by_home.setdefault(home, []).append(resident)
    return by_home


def _fewest(node: Node, ask: Ask, local: Sequence[Resident]) -> tuple[Resident, ...]:
    """Of one node: the smallest sets are tried first, and of equally small ones those longest idle."""
    if not _fits_without(node, ask, local):
        return ()
    for size in range(1, LARGEST_TO_TRY + 1 if len(local) <= MOST_TO_TRY else 2):
        for some in combinations(local, size):
            if _fits_without(node, ask, some):
                return some
    return _enough(node, ask, local)


def _enough(node: Node, ask: Ask, local: Sequence[Resident]) -> tuple[Resident, ...]:
    """A set from which none can be spared: keep whoever need not go, those in use most lately first."""
    going = list(local)
    for resident in reversed(local):
        others = [other for other in going if other is not resident]
        if _fits_without(node, ask, others):
            going = others
    return tuple(going)


def _fits_without(node: Node, ask: Ask, gone: Iterable[Resident]) -> bool:
    freed: Counter[str] = Counter()
    for resident in gone:
        freed.update(dict.fromkeys(resident.gpu_uuids, resident.memory_mb))
    fitting = sum(refusal(gpu.without(freed[gpu.gpu_uuid]), ask) is None for gpu in node.gpus)
    return fitting >= ask.gpu_count and host_refusal(node.host, ask) is None
