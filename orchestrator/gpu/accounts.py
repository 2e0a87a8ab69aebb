"""Whose memory is it? Pure arithmetic over one sample of a GPU and the leases on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
        if self.pid is not None:
            return self.pid in process.lineage
        return self.worker_id is not None and process.worker_id == self.worker_id


def foreign_mb(gpu: Gpu, holders: Sequence[Holder], before: int) -> int:
    """Memory in use that no lease covers; `before` is what this was at the last sample.

    What a holder uses beyond its lease is foreign too: it takes room that others count on. Where processes cannot be
    told apart, what was foreign before stays so, and only growth beyond the leases adds to it: unknown is not zero,
    but a lease that is being used as it should be is not counted twice either.
    """
    unseen = [holder for holder in holders if gpu.processes is None or not holder.recognisable]
    covered = sum(_covered(gpu, account) for account in _accounts(gpu, [h for h in holders if h not in unseen]))
    rest = max(gpu.used_mb - covered, 0)
    if not unseen:
        return rest
    return min(rest, max(rest - sum(holder.memory_mb for holder in unseen), before))


@dataclass
class _Account:
    leased_mb: int
    own: set[GpuProcess]


def _accounts(gpu: Gpu, holders: Sequence[Holder]) -> list[_Account]:
    """Leases that could claim the same processes are one account, or memory would be covered twice.

    Leases of one worker, whose samples do not say which of its slots runs under which lease; a client that runs
    inside a job or inside another client.
    """
    accounts: list[_Account] = []
    for holder in holders:
        owner = replace(holder, slot=None)
        account = _Account(holder.memory_mb, {process for process in gpu.processes or () if owner.owns(process)})
        for other in [other for other in accounts if other.own & account.own]:
            accounts.remove(other)
            account = _Account(account.leased_mb + other.leased_mb, account.own | other.own)
        accounts.append(account)
    return accounts


def _covered(gpu: Gpu, account: _Account) -> int:
    """How much of the memory in use the leases of this account cover."""
    known = sum(process.memory_mb or 0 for process in account.own)
    if any(process.memory_mb is None for process in account.own):
        # The driver names our process but no number: at most what nobody else is known to use.
        others = [process.memory_mb for process in gpu.processes or () if process not in account.own]
        known = known if None in others else max(gpu.used_mb - sum(size or 0 for size in others), known)
    return min(known, account.leased_mb)


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
    # A number that the driver does not tell is left to the other leases; what exceeds them is foreign anyway.
    return sum(process.memory_mb or 0 for process in own) > sum(lease.memory_mb for lease in others)
