"""Looks at the GPU itself before a leased job starts and after it ended: what the database knows is a second old.

Before: memory that a stranger took meanwhile is not there, whatever the lease says. After: a slot that still holds
memory keeps it as a warm model, or is ended, and its lease lasts until the memory is seen to be free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import GpuUnavailable, Overloaded
from orchestrator.gpu import Gpu, GpuProcess
from orchestrator.gpu.watch import Watch
from orchestrator.leases import GpuShare, Remains, ResidentSlot, model_lease_key
from orchestrator.store.batcher import Batcher
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End, Left, Release
from worker.slots import SlotPool
from worker.strays import end_processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Departure:
    """Leased jobs that ended, or a warm model that left: in which slot, and whether their handler keeps a model."""

    slot: str
    key: str
    gpus: tuple[GpuShare, ...]
    #: Any of the jobs of one call, and how each of them ended; last the one whose lease it is.
    claim: Claim | None = None
    ends: tuple[End, ...] = ()
    keeps: bool = False
    pinned: bool = False


class Custody:
    def __init__(self, watch: Watch, slots: SlotPool, note: Callable[[End | Release], None]) -> None:
        self._watch = watch
        self._slots = slots
        self._note = note
        self._departures: Batcher[Departure, None] = Batcher("custody", self._look_after)

    def after(self, departure: Departure) -> None:
        """Find out what was left, and only then write the end down."""
        self._departures.post(departure)

    def close(self, timeout_s: float) -> None:
        self._departures.close(timeout_s)

    # ── before ──────────────────────────────────────────────────────────────────────────────────────────────

    def no_room(self, claims: Sequence[Claim]) -> dict[str, str]:
        """Of claims with a fresh lease, those whose memory is not really there, and why."""
        fresh = [claim for claim in claims if claim.gpus and not _under_warm_model(claim)]
        if not fresh:
            return {}
        uuids = sorted({gpu.gpu_uuid for claim in fresh for gpu in claim.gpus})
        try:
            free = dict(self._watch.free_mb(uuids))
        except GpuUnavailable as unknown:
            return {claim.job_id: str(unknown) for claim in fresh}
        refused: dict[str, str] = {}
        for claim in fresh:
            need = _memory_mb(claim)
            short = [gpu for gpu in claim.gpus if free[gpu.gpu_uuid] < need]
            if short:
                seen = ", ".join(f"GPU {gpu.gpu_index} has {free[gpu.gpu_uuid]} MB free" for gpu in short)
                refused[claim.job_id] = f"needs {need} MB, but {seen}: others took it just now"
            else:
                for gpu in claim.gpus:
                    free[gpu.gpu_uuid] -= need
        return refused

    # ── after ───────────────────────────────────────────────────────────────────────────────────────────────

    def _look_after(self, departures: list[Departure]) -> list[Exception | None]:
        uuids = sorted({gpu.gpu_uuid for departure in departures for gpu in departure.gpus})
        try:
            held: Mapping[str, tuple[GpuProcess, ...] | None] = self._watch.holders(uuids)
        except GpuUnavailable as unknown:
            log.warning("what is left on the GPU is unknown", extra={"error": str(unknown)})
            held = dict.fromkeys(uuids)
        return [self._let_go(one, [held.get(gpu.gpu_uuid) for gpu in one.gpus]) for one in departures]

    def _let_go(self, departure: Departure, holders: Sequence[tuple[GpuProcess, ...] | None]) -> Exception | None:
        left = Left(_remains(departure, holders), departure.slot)
        if left.remains is Remains.MODEL and departure.claim is not None:
            left = self._settle_in(departure, departure.claim)
        elif left.remains is Remains.NOTHING:
            self._slots.reuse(departure.slot)
        else:
            self._slots.retire(departure.slot)
        try:
            for end in departure.ends[:-1]:
                self._note(end)
            last = departure.ends[-1]._replace(lease_key=departure.key, left=left) if departure.ends else None
            self._note(last or Release(departure.key, left))
        except Overloaded as closed:  # told to nobody else, and not done again: its slot may run the next job by now
            return closed
        return None

    def _settle_in(self, departure: Departure, claim: Claim) -> Left:
        key = departure.key if _under_warm_model(claim) else model_lease_key(departure.slot)
        model = ResidentSlot(key, claim.type, claim.model_id, _memory_mb(claim), departure.gpus)
        if not self._slots.settle_in(departure.slot, model):
            return Left(Remains.PROCESSES, departure.slot)  # it died meanwhile
        return Left(Remains.MODEL, departure.slot, key, claim.type, claim.model_id, departure.pinned)

    def end_strays(self, sample: Sequence[Gpu], worker_id: str) -> None:
        """Kill this worker's processes on the GPUs whose slot is gone."""
        running = self._slots.marks()
        mine = {p for gpu in sample for p in gpu.processes or () if p.worker_id == worker_id}
        end_processes(process for process in mine if process.mark not in running)


def _remains(departure: Departure, holders: Sequence[tuple[GpuProcess, ...] | None]) -> Remains:
    """Unknown is not nothing."""
    unknown = any(processes is None for processes in holders)
    holds = any(process.mark == departure.slot for processes in holders for process in processes or ())
    if not (holds or unknown):
        return Remains.NOTHING
    return Remains.MODEL if departure.keeps else Remains.PROCESSES


def _under_warm_model(claim: Claim) -> bool:
    return claim.lease is not None and claim.lease.resident is not None


def _memory_mb(claim: Claim) -> int:
    return claim.lease.request.memory_mb if claim.lease else 0
