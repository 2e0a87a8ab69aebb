"""The slots' thread: it starts them, hears their answers, watches their clocks and buries them.

One thread owns all of it. It starts every process (the kernel's parent-death signal follows the *thread* that
started a child), waits for answers and exits together, enforces time limits, and starts anew what died.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from orchestrator.backoff import doubled
from orchestrator.leases import ResidentSlot
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End
from orchestrator.telemetry import logs
from worker.handlers import Batching
from worker.lifeline import Lifeline
from worker.nursery import Nursery
from worker.post import Model
from worker.process import SlotProcess
from worker.roster import Roster
from worker.run import Batch, Run
from worker.starts import PATIENCE_S, Starts
from worker.strays import Sweeper

log = logging.getLogger(__name__)

#: Seconds between looks at time limits, and at least as many: answers may come much more often.
TICK_S, LEAST_TICK_S = 0.1, 0.02
#: A job is written down as running when it has run this long; one that ends sooner needs no such write.
RUNNING_AFTER_S = 0.05
#: A slot that cannot start is tried again after 0.5, 1, 2 … at most this many seconds.
MAX_RESPAWN_DELAY_S = 30.0
#: Seconds after which it is told that a slot imports or loads still. It is waited for: large models take their time.
LONG_S = 60.0


class DoesNotLoad(Exception):
    """What a slot's process raised, with its trace as text: here it is only told."""


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
    #: A handler asks something of which the database knows (`worker.questions`); `SlotPool.answer` tells it.
    asked: Callable[[Claim, dict[str, Any], str], None]
    #: Jobs that were dispatched and found no slot.
    put_back: Callable[[Batch], None] = lambda _batch: None
    #: The slot of that mark is up, and takes jobs once `load` gave it its model.
    unloaded: Callable[[str], None] = lambda _mark: None
    #: A model was loaded, in so many seconds, or could not be.
    loaded: Callable[[ResidentSlot | None, float], None] = lambda _model, _seconds: None
    load_failed: Callable[[str], None] = lambda _error: None
    #: The process of these jobs ended under them; `ended` follows.
    died: Callable[[Run, Sequence[End]], None] = lambda _run, _ends: None
    #: A slot did not find a module of its handlers, which this names.
    missed: Callable[[str], None] = lambda _why: None
    #: Spans that were made in a slot, as JSON.
    spanned: Callable[[str], None] = lambda _spans: None


class SlotPool(Roster):
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
        nursery: Nursery | None = None,
    ) -> None:
        """`starts` and `nursery` are shared by all who run slots on this node; absent, it has its own."""
        super().__init__(count, cancel_step_s, model)
        self._starts = starts or Starts()
        self._nursery = nursery or Nursery()
        self._owns_nursery = nursery is None
        self._name = name
        self._started = 0
        self._lifeline = lifeline
        self._command = command
        self._environment = environment
        self._events = events
        with ExitStack() as undoing:
            self._selector = undoing.enter_context(selectors.DefaultSelector())
            self._wake_r, self._wake_w = os.pipe()
            undoing.pop_all()
        os.set_blocking(self._wake_w, False)
        self._respawn_at = 0.0
        self._looked_at_clocks = 0.0
        self._sweeper = Sweeper()
        self._thread = logs.thread(self._loop, "slots")

    def start(self) -> None:
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._thread.start()

    # ── called by other threads ─────────────────────────────────────────────────────────────────────────────

    def resize(self, count: int) -> None:
        """Have so many slots. Those that are too many go when they are free, the least useful first."""
        with self._changed:
            if self._closing:
                return  # its pipe may be another's by now
            # The places of those that were evicted go first; who comes in addition is to be warm.
            self._evicted = 0 if count > self._count else max(self._evicted + count - self._count, 0)
            self._count = count
            staying = self._staying()
            for slot in sorted(staying, key=_usefulness)[: max(len(staying) - count, 0)]:
                self._dismiss(slot)
            self._wake()

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
        if not self._thread.is_alive():
            self._selector.close()  # its thread did at its end, unless it never began
        self._sweeper.close(timeout_s)
        if self._owns_nursery:
            self._nursery.close()
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
        self._put_back(math.inf)
        self._selector.close()

    def _turn(self) -> None:
        self._respawn()
        for key, _ in self._selector.select(TICK_S):
            slot: SlotProcess | None = key.data
            if slot is None:
                os.read(self._wake_r, 4096)
            elif key.fd == slot.process.pidfd:
                self._bury(slot)
            else:
                self._hear(slot)
        now = time.monotonic()
        if now >= self._looked_at_clocks + LEAST_TICK_S:
            self._looked_at_clocks = now
            self._look_at_clocks(now)

    def _respawn(self) -> None:
        while self._may_start():
            self._started += 1
            mark = f"{self._name}#{self._started}"
            try:
                slot = SlotProcess.start(self._nursery, self._command, self._environment, self._lifeline, mark)
            except Exception as error:
                self._starts.give()
                self._fail_to_start(f"no slot could be started: {error}")
                if isinstance(error, OSError):
                    return
                raise
            with self._changed:
                self._slots.append(slot)
                if self._closing or self._surplus():  # somebody wanted fewer while it was being started
                    self._dismiss(slot)
            self._selector.register(slot.pipe, selectors.EVENT_READ, slot)
            self._selector.register(slot.process.pidfd, selectors.EVENT_READ, slot)

    def _may_start(self) -> bool:
        wanted = not (self._closing or self._sealed) and self._missing()
        return wanted and time.monotonic() >= self._respawn_at and self._starts.take()

    def _started_up(self, slot: SlotProcess) -> None:
        """It is up, or gone, or takes too long: another one may start."""
        if slot.starting:
            slot.starting = False
            self._starts.give()

    def _missing(self) -> bool:
        return self._manned() < self._count

    def _surplus(self) -> bool:
        return self._manned() > self._count

    def _manned(self) -> int:
        return sum(not slot.leaving for slot in self._slots)

    def _hear(self, slot: SlotProcess) -> None:
        try:
            for frame in slot.pipe.receive_now():
                self._understand(slot, *frame)
        except (EOFError, OSError, ValueError, TypeError, LookupError):
            self._selector.unregister(slot.pipe)
            slot.kill()  # a slot that cannot be understood is as good as dead, and its job ends as such

    def _understand(self, slot: SlotProcess, head: dict[str, Any], body: str) -> None:
        if "hello" in head:
            self._started_up(slot)
            self.memory, self.pinned = head["hello"], frozenset(head["pinned"])
            self.batching = Batching.declared(head["batches"])
            self._seat(slot, head["classes"])
        elif "silent" in head:
            self.silent.add(str(head["silent"]))
        elif "unfit" in head:
            slot.unfit, slot.unfit_trace = str(head["unfit"]), head.get("trace")
            if head["missing"]:
                self._events.missed(slot.unfit)
        elif "loaded" in head:
            slot.loading, slot.idle_since = False, time.monotonic()
            slot.resident_since = slot.idle_since
            self._release(slot)
            self._events.loaded(slot.resident, float(head["loaded"]))
        elif "load_failed" in head:
            self._events.load_failed(str(head["load_failed"]))
            slot.kill()  # what it has loaded of it must not stay
        elif "spans" in head:
            self._events.spanned(body)
        elif slot.run is None:
            return  # late news of a job that was answered for
        elif "progress" in head:
            self._events.progressed(slot.run.claims[head["place"]], *head["progress"])
        elif "question" in head:
            self._events.asked(slot.run.claims[head["place"]], head, body)
        elif not slot.run.verdicts:
            self._end(slot, slot.run, head["ends"] if "ends" in head else [head["end"]], body)

    def _end(self, slot: SlotProcess, run: Run, endings: list[dict[str, Any]], body: str) -> None:
        ends = run.ends(endings, body)
        with self._changed:
            self._hand.saw(ends[0].run_seconds)
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
            slot.late = None
            slot.unloaded = not taken and self._model is not None and self._model.type in classes
        if slot.unloaded:
            self._events.unloaded(slot.mark)
        else:
            self._release(slot)

    def _bury(self, slot: SlotProcess) -> None:
        """A slot's process ended: sweep its group, answer for its job, make room for a new one."""
        slot.kill()  # first, or children that hold its pipe could keep us reading
        self._drain(slot)
        self._started_up(slot)
        code = slot.process.reap()
        self._sweeper.sweep(slot.mark)
        for source in (slot.process.pidfd, slot.pipe):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        os.close(slot.process.pidfd)
        slot.pipe.close()
        slot.flags.close()
        if not (slot.ready or slot.leaving or self._closing):  # nobody wanted it to end
            why = slot.unfit or f"a slot ended with code {code} before it could take jobs"
            self._fail_to_start(why, slot.unfit_trace)
        with self._changed:
            run, slot.run = slot.run, None
            self._slots.remove(slot)
            if slot in self._free:
                self._free.remove(slot)
            self._changed.notify_all()
        if run is not None:
            ends = run.ends_of_dead(code)
            self._events.died(run, ends)
            self._events.ended(run.claims, ends, slot.mark, False)
        elif slot.resident is not None and not slot.inspected:
            self._events.left(slot.resident, slot.mark)

    def _fail_to_start(self, why: str, trace: str | None = None) -> None:
        """The trace is told once for all slots and tries that fail alike; each of them in a line."""
        self._failures += 1
        delay = doubled(0.5, self._failures - 1, MAX_RESPAWN_DELAY_S)
        self._respawn_at = time.monotonic() + delay
        self.trouble = f"{why}; next try in {delay:g} s"
        news = None if trace in (None, self._traced) else DoesNotLoad(f"\n{trace}")
        self._traced = trace or self._traced
        log.error("slot does not start", extra={"reason": why, "pause_s": delay}, exc_info=news)

    def _drain(self, slot: SlotProcess) -> None:
        """Hear what it said just before its end: the job may have finished."""
        while slot.pipe in self._selector.get_map() and slot.pipe.is_readable:
            self._hear(slot)

    def _look_at_clocks(self, now: float) -> None:
        leases_over = now > self._lifeline.leased_until
        with self._changed:
            for slot in self._slots:
                slot.look_at_clock(now)
                if now - slot.born > PATIENCE_S:
                    self._started_up(slot)
                if now - slot.began > LONG_S and not (slot.ready or slot.unloaded or slot.late):
                    self._tell_of_late(slot)
                if leases_over:
                    slot.lose_lease()
                if slot.run is not None and now - slot.run.since >= RUNNING_AFTER_S:
                    self._tell_of_running(slot.run)

        self._put_back(now)

    def _tell_of_running(self, run: Run) -> None:
        """Of jobs that take longer than a moment, once, unless they are over already."""
        if run.noted or run.verdicts:
            return
        run.noted = True
        self._hand.saw_other()
        for claim in run.claims:
            self._events.started(claim)

    def _tell_of_late(self, slot: SlotProcess) -> None:
        what = f"loads {self._model.type!r}" if slot.loading and self._model else "imports its handlers"
        slot.late = f"slot {slot.process.pid} {what}, for more than {LONG_S:g} s now"
        log.warning("slot takes long", extra={"reason": slot.late})

    def _put_back(self, now: float) -> None:
        with self._changed:
            late = self._hand.overdue(now)
            if late:
                self._changed.notify_all()
        for batch in late:
            self._events.put_back(batch)

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b".")
        except BlockingIOError:
            return  # it is awake


def _usefulness(slot: SlotProcess) -> tuple[bool, bool, float]:
    """Those that take no jobs yet go first, then the free, the longest idle of them before the others."""
    return slot.ready, slot.occupied, slot.idle_since
