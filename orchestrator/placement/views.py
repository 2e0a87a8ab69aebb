"""What placement sees of GPUs and hosts, what is asked of it, and why a GPU or a host says no."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why a request has no GPU. The codes are stable: clients, metrics and alerts know them."""

    NO_GPU = "no_gpu"
    STALE = "stale"
    UNHEALTHY = "unhealthy"
    QUARANTINED = "quarantined"
    GATE_CLOSED = "gate_closed"
    RESERVED = "reserved"
    NO_MEMORY = "no_memory"
    WRONG_MODEL = "wrong_model"
    HOST_CPU = "host_cpu"
    HOST_MEMORY = "host_memory"
    # Only the store says these: no GPU that is known has so much, were all of it free; there was room, and other
    # requests took it first.
    TOO_LARGE = "too_large"
    CONTENDED = "contended"


#: GPUs, or nodes, that a refusal names in its text: enough to understand it, whatever the size of the cluster.
SHOWN = 4


class GpuView(NamedTuple):
    """A GPU as placement sees it."""

    gpu_uuid: str
    node_id: str
    gpu_index: int
    usable_mb: int
    leased_mb: int
    foreign_mb: int
    health: str = "ok"
    fresh: bool = True
    #: The model of the GPU, e.g. "NVIDIA A100-SXM4-80GB".
    name: str = ""
    quarantined: bool = False
    #: Its gate is closed: memory was over the limit lately.
    gated: bool = False
    #: The key of the only request that may use it.
    reserved_for: str | None = None

    @property
    def free_mb(self) -> int:
        return self.usable_mb - self.leased_mb - self.foreign_mb

    @property
    def in_service(self) -> bool:
        """Whether it may take anything at all. Unknown is not free."""
        return self.fresh and self.health == "ok" and not self.quarantined and not self.gated

    def with_lease(self, memory_mb: int) -> GpuView:
        return self._replace(leased_mb=self.leased_mb + memory_mb)

    def without(self, memory_mb: int) -> GpuView:
        """A closed gate opens when models leave. If they stayed because of it, it would never open."""
        return self._replace(leased_mb=max(self.leased_mb - memory_mb, 0), gated=self.gated and not memory_mb)


@dataclass(frozen=True, slots=True)
class HostView:
    """What a node has left besides its GPUs. None: the node does not report it, so it does not limit."""

    node_id: str
    cpu_milli_free: int | None = None
    memory_mb_free: int | None = None


class Ask(NamedTuple):
    """A request: so much memory on each of `gpu_count` GPUs of one node, and so much of the host."""

    memory_mb: int
    gpu_count: int = 1
    #: Only this node will do.
    node_id: str | None = None
    #: Who asks. A GPU that is reserved for this key is open to it and closed to all others.
    key: str = ""
    #: Names of the GPUs that will do; empty: any.
    models: frozenset[str] = frozenset()
    cpu_milli: int = 0
    host_memory_mb: int = 0
    #: Nodes where what it runs is loaded already: preferred among those that fit.
    warm_nodes: frozenset[str] = frozenset()


def refusal(gpu: GpuView, ask: Ask) -> tuple[Reason, str] | None:
    """Why this GPU cannot take its part of the request; None when it can."""
    if not gpu.in_service:
        return _out_of_service(gpu)
    if gpu.reserved_for not in (None, ask.key):
        return Reason.RESERVED, "it is reserved for another request"
    if ask.models and gpu.name not in ask.models:
        return Reason.WRONG_MODEL, f"it is of the model {gpu.name or 'unknown'}"
    if gpu.free_mb < ask.memory_mb:
        return Reason.NO_MEMORY, f"{max(gpu.free_mb, 0)} of {gpu.usable_mb} MB free"
    return None


def _out_of_service(gpu: GpuView) -> tuple[Reason, str]:
    if not gpu.fresh:
        return Reason.STALE, "its last sample is stale"
    if gpu.quarantined:
        return Reason.QUARANTINED, "it is quarantined"
    if gpu.health != "ok":
        return Reason.UNHEALTHY, f"it is {gpu.health}"
    return Reason.GATE_CLOSED, "its gate is closed: its memory was over the limit lately"


def too_large_for_all(ask: Ask, known: Iterable[GpuView]) -> str | None:
    """How it asks for more than there is on any node, were all of it free; None: some node could hold it."""
    # A GPU that was never well has not told its size yet.
    known = [gpu for gpu in known if gpu.usable_mb > 0 and (not ask.models or gpu.name in ask.models)]
    if not known:
        return None
    largest = max(known, key=lambda gpu: gpu.usable_mb)
    each = f" on each of {ask.gpu_count} GPUs of one node" if ask.gpu_count > 1 else ""
    wanted, help_ = f"needs {ask.memory_mb} MB{each}", "ask for less, or add a node that has it"
    if largest.usable_mb < ask.memory_mb:
        have = f"the largest can lease {largest.usable_mb} MB, on node {largest.node_id}"
        return f"{wanted}, which fits no GPU that is known now: {have}; {help_}"
    [(node, most)] = Counter(gpu.node_id for gpu in known if gpu.usable_mb >= ask.memory_mb).most_common(1)
    if most < ask.gpu_count:
        return f"{wanted}, and no node that is known now has so many: at most {most}, on node {node}; {help_}"
    return None


def where_gpus_are(ask: Ask, known: Iterable[GpuView]) -> str:
    """What helps who asks where no GPU is known."""
    nodes = sorted({gpu.node_id for gpu in known})
    where = "there" if ask.node_id else "where GPUs are"
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    others = f"; nodes that have some: {', '.join(nodes[:SHOWN])}{more}" if nodes else ""
    return f"a worker must run {where}, and tell of them{others}"


def is_too_large(reason: str) -> bool:
    """Whether it is an answer of `too_large_for_all`, which lasts, and not one of want of room now."""
    return re.match(r"needs \d+ MB[^,;]*, (which fits no GPU|and no node) that is known now", reason) is not None


def host_refusal(host: HostView, ask: Ask) -> tuple[Reason, str] | None:
    """Why this host cannot take the request; None when it can, or does not report what it has."""
    if host.cpu_milli_free is not None and host.cpu_milli_free < ask.cpu_milli:
        return Reason.HOST_CPU, f"{max(host.cpu_milli_free, 0)} of {ask.cpu_milli} needed CPU milli free on its host"
    if host.memory_mb_free is not None and host.memory_mb_free < ask.host_memory_mb:
        return Reason.HOST_MEMORY, f"{max(host.memory_mb_free, 0)} of {ask.host_memory_mb} needed MB free on its host"
    return None
