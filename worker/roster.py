"""Who the slots of a session are: which are free, what each runs or keeps warm, and which one takes a job.

Any thread may ask and tell; one lock holds it together. The slots' own thread (`slots.SlotPool`) adds those that it
started and removes those that ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any

from orchestrator.leases import ResidentSlot
from orchestrator.store.claim import Claim
from worker.hand import AHEAD, Hand, is_plain
from worker.handlers import Batching
from worker.post import Model
from worker.process import SlotProcess, loading
from worker.run import Batch

#: Seconds between looks whether anything runs still.
LOOK_EVERY_S = 0.1
#: Seconds that a slot which must go gets to unload its model.
STOP_S = 5.0


class Roster:
    def __init__(self, count: int, cancel_step_s: float, model: Model | None = None) -> None:
        self._count = count
        self._cancel_step_s = cancel_step_s
        self._model = model
        #: Slots that were evicted for others: who takes their place loads nothing before a job needs it.
        self._evicted = 0
        self._slots: list[SlotProcess] = []
        self._free: list[SlotProcess] = []
        self._hand = Hand()
        self._changed = threading.Condition()  # over a lock that its holder may take again
        self._closing = False
        #: Nobody takes jobs in any more.
        self._sealed = False
        self._failures = 0
        #: Why slots do not start; None when they do.
        self.trouble: str | None = None
        #: The trace of it that was told.
        self._traced: str | None = None
        #: Default need in MB by job type, as the slots' handlers declare it; empty until the first slot is up.
        self.memory: dict[str, int] = {}
        #: Modules that have no handlers, in words; known before those that have some.
        self.silent: set[str] = set()
        #: Types whose models leave for nobody.
        self.pinned: frozenset[str] = frozenset()
        self.batching = Batching()

    @property
    def count(self) -> int:
        return self._count

    def wait_known(self, timeout_s: float) -> bool:
        """Wait until the handlers are known: the first slot is up."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.memory or self._closing, timeout_s))

    def memory_for(self, type: str) -> int | None:
        """Default need in MB of this job type's handler; None when there is no handler."""
        return self.memory.get(type)

    def size_of(self, type: str) -> int:
        """Jobs in a full batch of this type; 0 when its handler takes them one by one."""
        return self.batching.sizes.get(type, 0)

    @property
    def quick(self) -> bool:
        """Whether jobs usually end within moments: then they are worth waiting for."""
        return self._hand.brief

    @property
    def late(self) -> str | None:
        """What to tell of a slot that takes long to start, or to load; None when none does."""
        with self._changed:
            return next((slot.late for slot in self._slots if slot.late), None)

    def usable(self) -> int:
        """Slots that take jobs, or run one."""
        with self._changed:
            return sum(slot.ready and not (slot.dying or slot.leaving) for slot in self._slots)

    def busy(self) -> int:
        with self._changed:
            return sum(slot.occupied for slot in self._slots)

    def marks(self) -> set[str]:
        """Slots whose processes live."""
        with self._changed:
            return {slot.mark for slot in self._slots}

    def resident(self) -> tuple[str, ...]:
        """The leases of the models that slots keep."""
        with self._changed:
            return tuple(slot.resident.key for slot in self._slots if slot.resident)

    # ── jobs ───────────────────────────────────────────────────────────────────────────────────────────────

    def wait_room(self, timeout_s: float, linger_s: float = 0.0) -> int:
        """How many jobs may be claimed now, waiting up to `timeout_s` for the first: as many as slots are free.

        When the running jobs are likely to end within `linger_s`, waits that long for them too: one claim for
        sixteen jobs costs little more than one for eight. When jobs are so brief that even this is too long, more may
        be claimed than slots are free.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._room() or self._closing or self._sealed, timeout_s)
            if self._free and self.quick and not self._ahead:
                self._changed.wait_for(lambda: len(self._free) == len(self._slots) or self._closing, linger_s)
            return self._room()

    def seal(self) -> None:
        """No more jobs are taken in: nobody needs to wait for room."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def _room(self) -> int:
        if not self._ahead:
            return max(len(self._free) - len(self._hand), 0)
        return 0 if self._well_filled else AHEAD * sum(not slot.slow for slot in self._staying())

    @property
    def _well_filled(self) -> bool:
        """Whether slots have more to do than one job each: about as long as the next claim takes."""
        return len(self._hand) > len(self._slots)

    @property
    def _ahead(self) -> bool:
        """Batches gather in the stream, where every worker sees them, not in a hand."""
        return self._hand.open and not self.batching.sizes

    def _staying(self) -> list[SlotProcess]:
        return [slot for slot in self._slots if not (slot.leaving or slot.dying)]

    def vacancies(self) -> tuple[list[ResidentSlot], int]:
        """The models that free slots keep warm, the most recently used first, and how many slots are blank.

        Ahead, those that are blank and busy count: they are free in a moment.
        """
        with self._changed:
            warm = sorted((slot for slot in self._free if slot.resident), key=lambda slot: -slot.idle_since)
            blank = [slot for slot in (self._staying() if self._ahead else self._free) if slot.resident is None]
            return [slot.resident for slot in warm if slot.resident], len(blank)

    def dispatch(self, batch: Batch) -> bool:
        """Give jobs to a free slot that may run them, or to the next; False when there is none (any more)."""
        with self._changed:
            if not is_plain(batch):
                self._hand.saw_other()
            slot = None if self._closing else self._slot_for(batch[0])
            if slot is None:
                return not self._closing and self._hand.keep(batch, time.monotonic())
            slot.take(batch)  # first: what cannot be taken must not cost its slot
            self._free.remove(slot)
        slot.send_jobs(batch)
        return True

    def _slot_for(self, claim: Claim) -> SlotProcess | None:
        """Under a warm model's lease: its slot. With a lease of its own: one that holds nothing. Else any."""
        if claim.lease and claim.lease.resident:
            return next((s for s in self._free if s.resident and s.resident.key == claim.lease.resident), None)
        blank = next((slot for slot in reversed(self._free) if slot.resident is None), None)
        if blank is not None or claim.gpus:
            return blank
        return self._free[-1] if self._free else None

    def _release(self, slot: SlotProcess) -> None:
        with self._changed:
            slot.ready, slot.run, slot.inspected, slot.late = True, None, False, None
            self._failures, self.trouble, self._traced = 0, None, None
            if slot.worn:
                slot.kill()
            elif slot.leaving:
                slot.stop(STOP_S)
            elif self._closing:
                slot.send({"stop": True})
            elif not slot.dying:
                self._occupy(slot)
            if len(self._free) in (1, len(self._slots)) or self._closing:
                self._changed.notify_all()  # waking everybody for each slot would cost more than the job

    def _occupy(self, slot: SlotProcess) -> None:
        """It is free: let it run what waits in hand."""
        batch = self._hand.next_for(slot)
        if batch is None:
            self._free.append(slot)
            return
        slot.take(batch)
        slot.send_jobs(batch)
        if not self._well_filled:
            self._changed.notify_all()

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop this job, gently at first. Its end comes like any other; asking again changes nothing."""
        with self._changed:
            self._hand.give_up((job_id, attempt))
            for slot in self._slots:
                if slot.runs(job_id, attempt):
                    slot.cancel(job_id, self._cancel_step_s)

    def answer(self, claim: Claim, head: dict[str, Any], body: str = "") -> None:
        """Tell the slot that runs this job what it asked for. It may be frozen: nobody else waits for it."""
        with self._changed:
            found = [slot for slot in self._slots if slot.runs(claim.job_id, claim.attempt)]
        for slot in found:
            slot.send(head, body)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False when something still does after `timeout_s`."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while self._hand or any(slot.occupied for slot in self._slots):
                if time.monotonic() >= deadline:
                    return False
                self._changed.wait(LOOK_EVERY_S)
            return True

    def hand_back(self, reason: str) -> None:
        """Kill the process groups of all running jobs, which may run elsewhere."""
        with self._changed:
            self._hand.give_up()
            for slot in self._slots:
                slot.hand_back(reason)

    def lose_gpus(self, uuids: Collection[str]) -> None:
        """End what runs or is kept on GPUs that are lost."""
        with self._changed:
            for slot in self._slots:
                slot.lose_gpu(uuids)

    # ── what a leased job leaves ───────────────────────────────────────────────────────────────────────────

    def reuse(self, mark: str) -> None:
        """Its leased job left nothing on the GPU."""
        with self._changed:
            for slot in self._inspected(mark):
                slot.resident = None
                self._release(slot)

    def settle_in(self, mark: str, model: ResidentSlot) -> bool:
        """Its leased job left a model that stays; False when the slot is gone or going."""
        with self._changed:
            found = [slot for slot in self._inspected(mark) if not (slot.dying or slot.worn)]
            for slot in found:
                slot.idle_since = time.monotonic()
                if slot.resident is None:
                    slot.resident, slot.resident_since = model, slot.idle_since
                self._release(slot)
            return bool(found)

    def retire(self, mark: str) -> None:
        """Its leased job left memory in use: the process must go. Another one takes its place."""
        with self._changed:
            for slot in self._inspected(mark):
                slot.inspected, slot.resident = False, None
                slot.kill()

    def _inspected(self, mark: str) -> list[SlotProcess]:
        return [slot for slot in self._slots if slot.mark == mark and slot.inspected]

    # ── warm models ────────────────────────────────────────────────────────────────────────────────────────

    def awaits_load(self, mark: str) -> bool:
        with self._changed:
            return any(slot.mark == mark and slot.unloaded and not slot.dying for slot in self._slots)

    def load(self, mark: str, model: ResidentSlot | None) -> bool:
        """Let a slot load its pool's model, under this lease; False when the slot is gone or going."""
        assert self._model is not None, "only slots of a pool with a model ask for it"
        with self._changed:
            found = next((s for s in self._slots if s.mark == mark and s.unloaded and not (s.dying or s.leaving)), None)
            if found is None or self._closing:
                return False
            found.unloaded, found.loading, found.resident = False, True, model
            found.began = time.monotonic()
            head = loading(self._model.type, self._model.model_id, model)
        found.send({"load": head})
        return True

    def evict(self, keys: Collection[str], idle_s: float = 0.0) -> None:
        """End free slots that keep a model warm under one of these leases, and have been idle for so long."""
        with self._changed:
            since = time.monotonic() - idle_s
            warm = [slot for slot in self._free if slot.resident and slot.resident.key in keys]
            for slot in [slot for slot in warm if slot.idle_since <= since]:
                self._unseat(slot)

    def make_blank(self, min_s: float) -> None:
        """End the warm model that was idle longest, so that another job gets its slot, unless it came just now."""
        with self._changed:
            since = time.monotonic() - min_s
            warm = [slot for slot in self._free if slot.resident and slot.resident.type not in self.pinned]
            old = [slot for slot in warm if slot.resident_since <= since]
            for slot in sorted(old, key=lambda slot: slot.idle_since)[:1]:
                self._unseat(slot)

    def _unseat(self, slot: SlotProcess) -> None:
        self._free.remove(slot)
        self._evicted += 1
        slot.kill()

    def _dismiss(self, slot: SlotProcess) -> None:
        slot.leaving = True
        if slot in self._free:
            self._free.remove(slot)
            slot.stop(STOP_S)
        elif not slot.occupied:
            slot.kill()  # nothing runs there yet
