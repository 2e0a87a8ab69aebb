"""Whose memory is it? Pure arithmetic over one sample of a GPU and the leases on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.gpu import Gpu, GpuProcess


@dataclass(frozen=True)
class Holder:
    """Who leased memory on one GPU, and how its processes are recognised: by a slot, a worker or a process id.

    None of these: nobody can tell its processes from those of strangers.
    """

    memory_mb: int
    worker_id: str | None = None
    slot: str | None = None
    pid: int | None = None

    @property
    def recognisable(self) -> bool:
        return bool(self.worker_id or self.pid)

    def owns(self, process: GpuProcess) -> bool:
        if self.slot:
            return process.mark == self.slot
        if self.worker_id:
            return process.worker_id == self.worker_id
        return self.pid is not None and self.pid in process.lineage


def foreign_mb(gpu: Gpu, holders: Sequence[Holder], before: int) -> int:
    """Memory in use that no lease covers; `before` is what this was at the last sample.

    What a holder uses beyond its lease is foreign too: it takes room that others count on. Where processes cannot be
    told apart, what was foreign before stays so, and only growth beyond the leases adds to it: unknown is not zero,
    but a lease that is being used as it should be is not counted twice either.
    """
    unseen = [holder for holder in holders if gpu.processes is None or not holder.recognisable]
    covered = sum(_covered(gpu, group) for group in _by_owner([h for h in holders if h not in unseen]))
    rest = max(gpu.used_mb - covered, 0)
    if not unseen:
        return rest
    return min(rest, max(rest - sum(holder.memory_mb for holder in unseen), before))


def _by_owner(holders: Sequence[Holder]) -> list[list[Holder]]:
    """Leases of one worker are one account: its samples do not say which of its slots runs under which lease."""
    groups: dict[tuple[str | None, int | None], list[Holder]] = {}
    for holder in holders:
        groups.setdefault((holder.worker_id, None if holder.worker_id else holder.pid), []).append(holder)
    return list(groups.values())


def _covered(gpu: Gpu, leases: Sequence[Holder]) -> int:
    """How much of the memory in use these leases, all of one owner, account for."""
    leased = sum(lease.memory_mb for lease in leases)
    owner = Holder(leased, leases[0].worker_id, None, leases[0].pid)
    processes = gpu.processes or ()
    own = [process for process in processes if owner.owns(process)]
    known = sum(process.memory_mb or 0 for process in own)
    if any(process.memory_mb is None for process in own):
        # The driver names our process but no number: at most what nobody else is known to use.
        others = [process.memory_mb for process in processes if process not in own]
        known = 0 if None in others else max(gpu.used_mb - sum(size or 0 for size in others), known)
    return min(known, leased)


def still_held(gpu: Gpu, holder: Holder, running: Collection[str], live: Sequence[Holder] = ()) -> bool:
    """Whether processes of an ended lease may hold memory here still.

    `live` are the leases here that go on: what a program, or a worker whose slot nobody knows, uses under those is no
    longer the ended one's. Where processes cannot be told apart, the slots that are known to run decide.
    """
    if gpu.processes is None:
        return holder.slot in running if holder.slot else False
    own = [process for process in gpu.processes if holder.owns(process)]
    others = [] if holder.slot else [lease for lease in live if any(lease.owns(process) for process in own)]
    if not others:
        return bool(own)
    return sum(process.memory_mb or 0 for process in own) > sum(lease.memory_mb for lease in others)
