"""A node while a cluster is being filled: its GPUs, what its host has left, and who fits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable
from math import inf
from typing import NamedTuple

from orchestrator.placement.views import Ask, GpuView, HostView, Reason, host_refusal, refusal


class Room(NamedTuple):
    """Free memory on a GPU in service. Sorts by how little it is, then by the GPU's place on the node."""

    free_mb: int
    position: int
    name: str
    reserved_for: str | None


class Node:
    """Changes only by `take` and `free`, which count up `version`: who remembers something of it sees it is old."""

    __slots__ = (
        "cpu_milli",
        "frees",
        "gpus",
        "host",
        "memory_mb",
        "model",
        "node_id",
        "plain",
        "rooms",
        "total_mb",
        "version",
    )

    def __init__(self, node_id: str, gpus: Iterable[GpuView], host: HostView) -> None:
        self.node_id = node_id
        self.gpus = sorted(gpus, key=lambda gpu: (gpu.gpu_index, gpu.gpu_uuid))
        self.host = host
        #: Scores take a node's GPUs to be of one model; whether a GPU fits is decided by its own.
        self.model = self.gpus[0].name if self.gpus else ""
        self.version = 0
        self._look()
        self._sum_up()

    def _look(self) -> None:
        #: Nothing but a lack of memory can keep a request from its GPUs.
        self.plain = all(gpu.in_service and gpu.reserved_for is None for gpu in self.gpus)
        self.rooms = sorted(
            [
                Room(free_mb, position, gpu.name, gpu.reserved_for)
                for position, gpu in enumerate(self.gpus)
                if gpu.in_service and (free_mb := gpu.free_mb) >= 0
            ]
        )

    def _sum_up(self) -> None:
        """Derive what scores need again and again."""
        #: What anybody may use.
        self.frees = tuple(room.free_mb for room in self.rooms if room.reserved_for is None)
        self.total_mb = sum(self.frees)
        self.cpu_milli: float = inf if self.host.cpu_milli_free is None else self.host.cpu_milli_free
        self.memory_mb: float = inf if self.host.memory_mb_free is None else self.host.memory_mb_free

    def fits(self, ask: Ask) -> bool:
        """Whether the host and enough GPUs can take the ask."""
        count = ask.gpu_count
        if self.cpu_milli < ask.cpu_milli or self.memory_mb < ask.host_memory_mb or len(self.rooms) < count:
            return False
        if self.plain and not ask.models:
            return count == 0 or self.rooms[-count].free_mb >= ask.memory_mb
        return len(self.fitting(ask)) >= count

    def fitting(self, ask: Ask) -> list[Room]:
        """The GPUs that can take their part, the fullest first."""
        if self.plain and not ask.models:
            return self.rooms[bisect_left(self.frees, ask.memory_mb) :]
        need, models = ask.memory_mb, ask.models
        return [
            room
            for room in self.rooms
            if room.free_mb >= need
            and (room.reserved_for is None or room.reserved_for == ask.key)
            and (not models or room.name in models)
        ]

    def take(self, ask: Ask, given: Iterable[GpuView]) -> None:
        uuids = {gpu.gpu_uuid for gpu in given}
        for room in [room for room in self.rooms if self.gpus[room.position].gpu_uuid in uuids]:
            self.gpus[room.position] = self.gpus[room.position].with_lease(ask.memory_mb)
            self.rooms.remove(room)
            insort(self.rooms, room._replace(free_mb=room.free_mb - ask.memory_mb))
        if ask.cpu_milli or ask.host_memory_mb:
            cpu_milli, memory_mb = self.host.cpu_milli_free, self.host.memory_mb_free
            self.host = HostView(
                self.node_id,
                None if cpu_milli is None else cpu_milli - ask.cpu_milli,
                None if memory_mb is None else memory_mb - ask.host_memory_mb,
            )
        self.version += 1
        self._sum_up()

    def free(self, uuids: Collection[str], memory_mb: int) -> None:
        """As if so much were no longer leased on each of these GPUs. A gate closed for their sake opens."""
        for position, gpu in enumerate(self.gpus):
            if gpu.gpu_uuid in uuids:
                self.gpus[position] = gpu.without(memory_mb)
        self._look()
        self.version += 1
        self._sum_up()

    def looks(self) -> object:
        """Equal for nodes that any policy must treat the same."""
        return tuple(self.rooms), self.model, self.cpu_milli, self.memory_mb

    def refusal(self, gpu: GpuView, ask: Ask) -> tuple[Reason, str] | None:
        return refusal(gpu, ask) or host_refusal(self.host, ask)

    def why_not(self, ask: Ask) -> Reason:
        """What stands against the ask here, of all that does what stands against most GPUs."""
        if len(self.gpus) < ask.gpu_count:
            return Reason.NO_GPU
        if host := host_refusal(self.host, ask):
            return host[0]
        if self.plain and not ask.models:
            return Reason.NO_MEMORY
        return dominant(answer[0] for gpu in self.gpus if (answer := refusal(gpu, ask)))


def dominant(reasons: Iterable[Reason | None]) -> Reason:
    """The most frequent one; of equally frequent ones that which `Reason` names first."""
    counts = Counter(reasons)
    return max(Reason, key=lambda reason: counts[reason])
