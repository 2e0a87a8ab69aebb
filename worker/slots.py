"""The supervisor's side of its slots: start them, hand them jobs, hear their answers, end them.

One thread owns all of it. It starts every process (the kernel's parent-death signal follows the *thread* that
started a child), waits for answers and exits together, enforces time limits, and starts anew what died.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.leases import ResidentSlot
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End
from worker import wire
from worker.handlers import Batching
from worker.lifeline import Lifeline
from worker.post import Model
from worker.process import SlotProcess, loading
from worker.run import Batch, Run
from worker.starts import PATIENCE_S, Starts

log = logging.getLogger(__name__)

#: Seconds between looks at time limits.
TICK_S = 0.1
#: A job is written down as running when it has run this long; one that ends sooner needs no such write.
RUNNING_AFTER_S = 0.05
#: Jobs of less than this many seconds are worth waiting for.
QUICK_S = 0.002
#: Seconds that a slot which must go gets to unload its model.
STOP_S = 5.0
#: A slot that cannot start is tried again after 0.5, 1, 2 … at most this many seconds.
MAX_RESPAWN_DELAY_S = 30.0


@dataclass(frozen=True)
class SlotEvents:
    """Whom the slots tell. Called from the slots' thread; must not block."""

    started: Callable[[Claim], None]
    #: Jobs of one call ended in the slot of that mark, whose handler may keep a model in memory. A slot whose jobs held
    #: a lease takes no other until `reuse`, `settle_in` or `retire` says what is to become of it.
    ended: Callable[[Batch, Sequence[End], str, bool], None]
    #: A slot that kept a model warm is gone.
    left: Callable[[ResidentSlot, str], None]
    progressed: Callable[[Claim, float, str], None]
    #: A handler wants to know whether its job is still its own; `SlotPool.answer` tells it.
    asked: Callable[[Claim, int], None]
    #: The slot of that mark is up, and takes jobs once `load` gave it its model.
    unloaded: Callable[[str], None] = lambda _mark: None
    #: A model was loaded, in so many seconds, or could not be.
    loaded: Callable[[ResidentSlot | None, float], None] = lambda _model, _seconds: None
    load_failed: Callable[[str], None] = lambda _error: None


class SlotPool:
    def __init__(
        self,
        count: int,
        name: str,
        command: list[str],
        environment: dict[str, str],
        events: SlotEvents,
        cancel_step_s: float,
        lifeline: Lifeline,
        model: Model | None = None,
        *,
        starts: Starts | None = None,
    ) -> None:
        self._count = count
        self._starts = starts or Starts()
        self._model = model
        #: Slots that were evicted for others: who takes their place loads nothing before a job needs it.
        self._evicted = 0
        self._name = name
        self._started = 0
        self._lifeline = lifeline
        self._cancel_step_s = cancel_step_s
        self._command = command
        self._environment = environment
        self._events = events
        self._slots: list[SlotProcess] = []
        self._free: list[SlotProcess] = []
        self._changed = threading.Condition()  # over a lock that its holder may take again
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._closing = False
        self._failures = 0
        self._respawn_at = 0.0
        #: Why slots do not start; None when they do.
        self.trouble: str | None = None
        #: Moving average of how long jobs run.
        self._usual_run_s = 0.0
        #: Default need in MB by job type, as the slots' handlers declare it; empty until the first slot is up.
        self.memory: dict[str, int] = {}
        #: Types whose models leave for nobody.
        self.pinned: frozenset[str] = frozenset()
        self.batching = Batching()
        self._thread = threading.Thread(target=self._loop, name="slots", daemon=True)

    def start(self) -> None:
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._thread.start()

    def wait_known(self, timeout_s: float) -> bool:
        """Wait until the handlers are known: the first slot is up."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.memory or self._closing, timeout_s))

    # ── called by other threads ─────────────────────────────────────────────────────────────────────────────

    def wait_free(self, timeout_s: float, linger_s: float = 0.0) -> int:
        """Free slots, waiting up to `timeout_s` for the first.

        When the running jobs are likely to end within `linger_s`, waits that long for them too: one claim for
        sixteen jobs costs little more than one for eight.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closing, timeout_s)
            if self._free and self.quick:
                self._changed.wait_for(lambda: len(self._free) == len(self._slots) or self._closing, linger_s)
            return len(self._free)

    def vacancies(self) -> tuple[list[ResidentSlot], int]:
        """Of the free slots, the models that some keep warm, the most recently used first, and how many are blank."""
        with self._changed:
            warm = sorted((slot for slot in self._free if slot.resident), key=lambda slot: -slot.idle_since)
            return [slot.resident for slot in warm if slot.resident], len(self._free) - len(warm)

    def dispatch(self, batch: Batch) -> bool:
        """Give jobs to a free slot that may run them; False when there is none (any more)."""
        with self._changed:
            slot = None if self._closing else self._slot_for(batch[0])
            if slot is None:
                return False
            self._free.remove(slot)
            slot.take(batch)
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
            head = loading(self._model.type, self._model.model_id, model)
        found.send({"load": head})
        return True

    def resize(self, count: int) -> None:
        """Have so many slots. Those that are too many go when they are free, the least useful first."""
        with self._changed:
            if self._closing:
                return  # its pipe may be another's by now
            # The places of those that were evicted go first; who comes in addition is to be warm.
            self._evicted = 0 if count > self._count else max(self._evicted + count - self._count, 0)
            self._count = count
            staying = [slot for slot in self._slots if not (slot.leaving or slot.dying)]
            for slot in sorted(staying, key=_usefulness)[: max(len(staying) - count, 0)]:
                self._dismiss(slot)
            self._wake()

    def _dismiss(self, slot: SlotProcess) -> None:
        slot.leaving = True
        if slot in self._free:
            self._free.remove(slot)
            slot.stop(STOP_S)
        elif not slot.occupied:
            slot.kill()  # nothing runs there yet

    @property
    def count(self) -> int:
        return self._count

    def usable(self) -> int:
        """Slots that take jobs, or run one."""
        with self._changed:
            return sum(slot.ready and not (slot.dying or slot.leaving) for slot in self._slots)

    def lose_gpus(self, uuids: Collection[str]) -> None:
        """End what runs or is kept on GPUs that are lost."""
        with self._changed:
            for slot in self._slots:
                slot.lose_gpu(uuids)

    def marks(self) -> set[str]:
        """Slots whose processes live."""
        with self._changed:
            return {slot.mark for slot in self._slots}

    def resident(self) -> tuple[str, ...]:
        """The leases of the models that slots keep."""
        with self._changed:
            return tuple(slot.resident.key for slot in self._slots if slot.resident)

    def cancel(self, job_id: str, attempt: int) -> None:
        """Stop this job, gently at first. Its end comes like any other; asking again changes nothing."""
        with self._changed:
            for slot in self._slots:
                if slot.runs(job_id, attempt):
                    slot.cancel(job_id, self._cancel_step_s)

    def answer(self, claim: Claim, question: int, owns: bool) -> None:
        """Tell the slot that runs this job whether the job is still its own."""
        with self._changed:
            for slot in self._slots:
                if slot.runs(claim.job_id, claim.attempt):
                    slot.send({"owns": owns, "question": question})

    def memory_for(self, type: str) -> int | None:
        """Default need in MB of this job type's handler; None when there is no handler."""
        return self.memory.get(type)

    def size_of(self, type: str) -> int:
        """Jobs in a full batch of this type; 0 when its handler takes them one by one."""
        return self.batching.sizes.get(type, 0)

    @property
    def quick(self) -> bool:
        """Whether jobs usually end within a few milliseconds."""
        return self._usual_run_s < QUICK_S

    def busy(self) -> int:
        with self._changed:
            return sum(slot.occupied for slot in self._slots)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False when something still does after `timeout_s`."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while any(slot.occupied for slot in self._slots):
                if time.monotonic() >= deadline:
                    return False
                self._changed.wait(TICK_S)
            return True

    def hand_back(self, reason: str) -> None:
        """Kill the process groups of all running jobs, which may run elsewhere."""
        with self._changed:
            for slot in self._slots:
                slot.hand_back(reason)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all slots: asked first, killed after a moment."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for slot in self._slots:
                if not slot.occupied and slot.ready:
                    slot.send({"stop": True})
                elif not slot.occupied:
                    slot.kill()  # it starts or loads: there is nothing to wait for
        self._join(timeout_s)
        with self._changed:
            for slot in self._slots:
                slot.hand_back("its worker was stopped")
                slot.kill()
        self._join(timeout_s)
        for fd in (self._wake_r, self._wake_w):
            os.close(fd)

    def _join(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout_s)

    # ── the slots' own thread ───────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        while not (self._closing and not self._slots):
            try:
                self._turn()
            except Exception:
                # Without this thread no job would ever end here; it is shown, and the next turn tries again.
                log.exception("slots broke")
                time.sleep(TICK_S)
        self._selector.close()

    def _turn(self) -> None:
        self._respawn()
        for key, _ in self._selector.select(TICK_S):
            slot: SlotProcess | None = key.data
            if slot is None:
                os.read(self._wake_r, 4096)
            elif key.fd == slot.pidfd:
                self._bury(slot)
            else:
                self._hear(slot)
        self._look_at_clocks()

    def _respawn(self) -> None:
        while self._may_start():
            self._started += 1
            mark = f"{self._name}#{self._started}"
            slot = SlotProcess.start(self._command, self._environment, self._lifeline, mark)
            with self._changed:
                self._slots.append(slot)
            self._selector.register(slot.pipe, selectors.EVENT_READ, slot)
            self._selector.register(slot.pidfd, selectors.EVENT_READ, slot)

    def _may_start(self) -> bool:
        return not self._closing and self._missing() and time.monotonic() >= self._respawn_at and self._starts.take()

    def _started_up(self, slot: SlotProcess) -> None:
        """It is up, or gone, or takes too long: another one may start."""
        if slot.starting:
            slot.starting = False
            self._starts.give()

    def _missing(self) -> bool:
        return sum(not slot.leaving for slot in self._slots) < self._count

    def _hear(self, slot: SlotProcess) -> None:
        try:
            self._understand(slot, *wire.receive(slot.pipe))
        except (EOFError, OSError, ValueError, TypeError, LookupError):
            self._selector.unregister(slot.pipe)
            slot.kill()  # a slot that cannot be understood is as good as dead, and its job ends as such

    def _understand(self, slot: SlotProcess, head: dict[str, Any], body: str) -> None:
        if "hello" in head:
            self._started_up(slot)
            self.memory, self.pinned = head["hello"], frozenset(head["pinned"])
            self.batching = Batching.declared(head["batches"])
            self._seat(slot, head["classes"])
        elif "loaded" in head:
            slot.loading, slot.idle_since = False, time.monotonic()
            slot.resident_since = slot.idle_since
            self._release(slot)
            self._events.loaded(slot.resident, float(head["loaded"]))
        elif "load_failed" in head:
            self._events.load_failed(str(head["load_failed"]))
            slot.kill()  # what it has loaded of it must not stay
        elif slot.run is None:
            return  # late news of a job that was answered for
        elif "progress" in head:
            self._events.progressed(slot.run.claims[head["place"]], *head["progress"])
        elif "owns" in head:
            self._events.asked(slot.run.claims[head["place"]], head["owns"])
        elif not slot.run.verdicts:
            self._end(slot, slot.run, head["ends"] if "ends" in head else [head["end"]], body)

    def _end(self, slot: SlotProcess, run: Run, endings: list[dict[str, Any]], body: str) -> None:
        ends = run.ends(endings, body)
        self._usual_run_s += (ends[0].run_seconds - self._usual_run_s) / 16
        if run.lead.gpus:
            with self._changed:
                slot.run, slot.inspected = None, True
        else:
            self._release(slot)
        self._events.ended(run.claims, ends, slot.mark, bool(endings[0].get("keeps")))

    def _seat(self, slot: SlotProcess, classes: Collection[str]) -> None:
        """A slot is up: it loads its pool's model, or takes jobs at once."""
        with self._changed:
            self._changed.notify_all()
            taken, self._evicted = self._evicted > 0, max(self._evicted - 1, 0)
            slot.unloaded = not taken and self._model is not None and self._model.type in classes
        if slot.unloaded:
            self._events.unloaded(slot.mark)
        else:
            self._release(slot)

    def _release(self, slot: SlotProcess) -> None:
        with self._changed:
            slot.ready, slot.run, slot.inspected = True, None, False
            self._failures, self.trouble = 0, None
            if slot.worn:
                slot.kill()
            elif slot.leaving:
                slot.stop(STOP_S)
            elif self._closing:
                slot.send({"stop": True})
            elif not slot.dying:
                self._free.append(slot)
            if len(self._free) in (1, len(self._slots)) or self._closing:
                self._changed.notify_all()  # waking everybody for each slot would cost more than the job

    def _bury(self, slot: SlotProcess) -> None:
        """A slot's process ended: sweep its group, answer for its job, make room for a new one."""
        slot.kill()  # first, or children that hold its pipe could keep us reading
        self._drain(slot)
        self._started_up(slot)
        code = slot.process.wait()
        for source in (slot.pidfd, slot.pipe):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        os.close(slot.pidfd)
        slot.pipe.close()
        slot.flags.close()
        if not (slot.ready or slot.leaving or self._closing):  # nobody wanted it to end
            self._failures += 1
            delay = min(0.5 * 2 ** (self._failures - 1), MAX_RESPAWN_DELAY_S)
            self._respawn_at = time.monotonic() + delay
            self.trouble = f"a slot ended with code {code} before it could take jobs; next try in {delay:g} s"
            log.error("slot does not start", extra={"exit_code": code, "next_try_s": delay})
        with self._changed:
            run, slot.run = slot.run, None
            self._slots.remove(slot)
            if slot in self._free:
                self._free.remove(slot)
            self._changed.notify_all()
        if run is not None:
            self._events.ended(run.claims, run.ends_of_dead(code), slot.mark, False)
        elif slot.resident is not None and not slot.inspected:
            self._events.left(slot.resident, slot.mark)

    def _drain(self, slot: SlotProcess) -> None:
        """Hear what it said just before its end: the job may have finished."""
        while slot.pipe in self._selector.get_map() and slot.pipe.poll():
            self._hear(slot)

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        leases_over = now > self._lifeline.leased_until
        with self._changed:
            for slot in self._slots:
                slot.look_at_clock(now)
                if now - slot.born > PATIENCE_S:
                    self._started_up(slot)
                if leases_over:
                    slot.lose_lease()
                run = slot.run
                if run is not None and not (run.noted or run.verdicts) and now - run.since >= RUNNING_AFTER_S:
                    run.noted = True
                    for claim in run.claims:
                        self._events.started(claim)

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b".")
        except BlockingIOError:
            return  # it is awake


def _usefulness(slot: SlotProcess) -> tuple[bool, bool, float]:
    """Those that take no jobs yet go first, then the free, the longest idle of them before the others."""
    return slot.ready, slot.occupied, slot.idle_since
