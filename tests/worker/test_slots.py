"""Slots that come and go as their pool is resized, with real processes."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.jobs import ErrorKind
from orchestrator.store.claim import Claim
from orchestrator.store.settle import Outcome
from tests.processes import children, few_files, files
from tests.waiting import wait_until
from worker import hand, process, wire
from worker.lifeline import Lifeline
from worker.nursery import Nursery
from worker.post import Model
from worker.process import SlotProcess
from worker.slots import LONG_S, MAX_RESPAWN_DELAY_S, SlotEvents, SlotPool
from worker.starts import Starts


def ignore(*_told: object) -> None:
    """Nobody listens."""


EVENTS = SlotEvents(ignore, ignore, ignore, ignore, ignore)
COMMAND = ["100000", json.dumps({"adapter": None, "variant": None})]


@pytest.fixture
def eight() -> Iterator[Callable[[Starts], SlotPool]]:
    """Eight slots, of which as many may start at once as one says."""
    with ExitStack() as stack:

        def start(starts: Starts) -> SlotPool:
            lifeline = Lifeline()
            pool = SlotPool(8, "worker", COMMAND, {}, EVENTS, 1.0, lifeline, starts=starts)
            stack.callback(lifeline.close)
            stack.callback(pool.close)
            pool.start()
            return pool

        yield start


@contextmanager
def one_slot(events: SlotEvents = EVENTS, *handlers: str) -> Iterator[tuple[SlotPool, Lifeline]]:
    """A pool whose only slot is up, and what vouches for it."""
    with ExitStack() as stack:
        lifeline = Lifeline()
        stack.callback(lifeline.close)
        slots = SlotPool(1, "worker", [*COMMAND, *handlers], {}, events, 1.0, lifeline)
        stack.callback(slots.close)
        slots.start()
        wait_until(lambda: slots.usable() == 1, timeout=25.0, what="a slot")
        yield slots, lifeline


def test_slots_that_were_dismissed_before_they_were_up_do_not_count_as_failures(eight):
    slots = eight(Starts(8))
    wait_until(lambda: len(slots.marks()) == 8, what="eight processes")
    slots.resize(0)
    wait_until(lambda: not slots.marks(), what="all gone")
    slots.resize(1)
    wait_until(lambda: slots.usable() == 1, timeout=25.0, what="one slot; after eight failures it would wait for 30 s")
    assert slots.trouble is None


@pytest.mark.parametrize("failure", [OSError, ValueError])
def test_starts_that_fail_hold_up_nobody_for_ever(monkeypatch, eight, failure, caplog):
    """As many as may start at once: when there are processes to be had again, slots start."""
    bear, failures, told = Nursery.bear, iter(range(2)), threading.Event()

    def fail_at_first(self, *given):
        if next(failures, None) is not None or not told.is_set():
            raise failure("no more processes")
        return bear(self, *given)

    monkeypatch.setattr(Nursery, "bear", fail_at_first)
    slots = eight(Starts(2))
    wait_until(lambda: slots.trouble, what="that it is told")
    assert "no more processes" in slots.trouble
    told.set()
    wait_until(lambda: slots.usable() == 8, what="all slots")
    assert slots.trouble is None
    assert ("slots broke" in caplog.text) == (failure is ValueError)  # a bug is shown with its trace


def test_starts_that_failed_all_night_are_tried_again():
    """No number may be too large: the slot that failed would stay in the list, and no other would start."""
    lifeline = Lifeline()
    slots = SlotPool(1, "worker", COMMAND, {}, EVENTS, 1.0, lifeline)
    slots._failures = 2000
    slots._fail_to_start("no more processes")
    assert slots.trouble == f"no more processes; next try in {MAX_RESPAWN_DELAY_S:g} s"
    slots.close()
    lifeline.close()


def test_slots_start_a_few_at_a_time_and_all_come_up(eight):
    slots, most = eight(Starts(2)), 0

    def all_up() -> bool:
        nonlocal most
        with slots._changed:  # none comes or goes between the two looks
            up = slots.usable()
            most = max(most, len(slots.marks()) - up)
        return bool(up == 8)

    wait_until(all_up, timeout=60.0, what="eight slots")
    assert most <= 2


def test_slots_that_die_while_they_start_let_others_start(eight):
    starts = Starts(2)
    slots = eight(starts)
    wait_until(lambda: len(slots.marks()) >= 2, what="two processes")
    slots.resize(0)
    wait_until(lambda: not slots.marks(), what="all gone")
    for _ in range(2):  # one more may have been on its way when they were told to go
        wait_until(starts.take, what="a place")


def test_a_slot_that_was_being_started_when_fewer_were_wanted_goes(monkeypatch, eight):
    bear, born = Nursery.bear, []

    def resize_meanwhile(self, *given):
        born.append(bear(self, *given))
        slots.resize(0)
        return born[-1]

    slots = eight(Starts(8))
    wait_until(lambda: slots.usable() == 8, what="all slots")
    slots.resize(0)
    wait_until(lambda: not slots.marks(), what="none")
    monkeypatch.setattr(Nursery, "bear", resize_meanwhile)
    slots.resize(1)
    wait_until(lambda: born and not Path(f"/proc/{born[0].pid}").exists(), what="the end of the one that came too late")
    wait_until(lambda: not slots.marks(), what="none again")


def test_a_resize_that_comes_after_the_end_is_ignored():
    lifeline = Lifeline()
    pool = SlotPool(0, "worker", [], {}, EVENTS, 1.0, lifeline)
    pool.start()
    pool.close()
    pool.resize(3)
    lifeline.close()


@pytest.mark.parametrize("broken", [MemoryError, ValueError, BrokenPipeError])
def test_a_slot_that_cannot_be_told_its_job_dies_and_answers_for_it_once(monkeypatch, broken):
    ended: list[object] = []
    events = replace(EVENTS, ended=lambda *told: ended.append(told))
    with ExitStack() as stack:
        lifeline = Lifeline()
        stack.callback(lifeline.close)
        lifeline.extend(time.monotonic() + 1000.0, 1)
        slots = SlotPool(1, "worker", COMMAND, {}, events, 1.0, lifeline)
        stack.callback(slots.close)
        slots.start()
        wait_until(lambda: slots.usable() == 1, timeout=25.0, what="a slot")
        with monkeypatch.context() as patched:
            patched.setattr(wire.Channel, "send", Mock(side_effect=broken))
            assert slots.dispatch((Claim("j", 1, "echo", "{}", "a", None, None, None, None),))
        wait_until(lambda: ended, what="the end of the job")
        wait_until(lambda: slots.usable() == 1, timeout=25.0, what="another slot")
        assert len(ended) == 1 and not slots.busy()


@pytest.mark.parametrize("batch", ["", "j0"])
def test_a_job_that_its_slot_gets_when_nobody_vouches_for_it_any_more_does_not_begin(tmp_path, batch):
    """As after a freeze between the claim and its start: the job runs elsewhere by then."""
    ended: list[Any] = []
    events = replace(EVENTS, ended=lambda _jobs, ends, *_how: ended.extend(ends))
    kind = "marks-many" if batch else "marks"
    first = Claim(
        "j0", 1, kind, json.dumps({"file": str(tmp_path / "begun")}), "a", None, None, None, None, batch=batch
    )
    with one_slot(events, "tests.worker.marking_handlers") as (slots, lifeline):
        frozen = slots._slots[0].process.pid
        os.kill(frozen, signal.SIGSTOP)
        jobs = (first, first._replace(job_id="j1")) if batch else (first,)
        assert slots.dispatch(jobs)
        lifeline.vouch(time.monotonic())
        os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: ended, what="its answer")
        assert [(end.outcome, end.error_kind) for end in ended] == [(Outcome.HANDED_BACK, None)] * len(jobs)
        assert not (tmp_path / "begun").exists()
        lifeline.vouch(time.monotonic() + 1000.0)
        wait_until(lambda: slots.dispatch((first._replace(attempt=2),)), what="the same slot, free again")
        wait_until(lambda: len(ended) > len(jobs), what="its end")
        assert ended[-1].outcome is Outcome.DONE and (tmp_path / "begun").read_text() == "2"


def test_what_jobs_took_and_one_that_takes_longer_decide_whether_others_are_claimed_ahead(gate):
    ended: list[Any] = []
    events = replace(EVENTS, ended=lambda _jobs, ends, *_how: ended.extend(ends))
    brief = Claim("j", 1, "echo", "{}", "a", None, None, None, None)
    with one_slot(events, "tests.worker.gated_handlers") as (slots, _):
        assert slots.dispatch((brief,))
        wait_until(lambda: ended, what="its end")
        assert slots._hand._usual_s == pytest.approx(ended[0].run_seconds * hand.WEIGHT)
        for _ in range(hand.IN_A_ROW):
            slots._hand.saw(0.0)
        assert slots._hand.open
        wait_until(lambda: not slots.busy(), what="a free slot")
        assert slots.dispatch((brief._replace(type="gated", payload=json.dumps({"gate": str(gate)})),))
        wait_until(lambda: not slots._hand.open, what="that it is known to run for longer than a moment")
        gate.unlink()


def test_a_slot_that_does_not_read_the_answer_to_its_question_is_killed(monkeypatch):
    """Half of an answer would leave it waiting for the rest, and its job running for ever."""
    with one_slot() as (slots, _):
        (slot,) = slots._slots
        with monkeypatch.context() as patched:
            patched.setattr(wire.Channel, "send", Mock(side_effect=BlockingIOError))
            slot.send({"question": 1})
        wait_until(lambda: slot not in slots._slots, what="its end")


def test_a_frozen_slot_that_does_not_take_its_job_is_replaced(monkeypatch):
    monkeypatch.setattr(process, "SEND_TIMEOUT_S", 1)
    ended: list[Any] = []
    with one_slot(replace(EVENTS, ended=lambda _jobs, ends, *_how: ended.extend(ends))) as (slots, _):
        (frozen,) = slots.marks()
        os.kill(slots._slots[0].process.pid, signal.SIGSTOP)
        # Larger than a pipe: sending it to somebody who does not read would last for ever.
        large = Claim("j", 1, "echo", f'"{"x" * 900_000}"', "a", None, None, None, None)
        threading.Thread(target=slots.dispatch, args=((large,),), daemon=True).start()
        wait_until(lambda: ended, what="its end")
        assert [(end.job_id, end.error_kind) for end in ended] == [("j", ErrorKind.WORKER_LOST)]
        wait_until(lambda: slots.usable() == 1 and frozen not in slots.marks(), what="another slot")


@pytest.mark.parametrize("free", range(5))
def test_a_start_without_files_leaves_nothing_behind(nursery, free):
    """However far it came. With the last of them the slot lives already, and cannot be watched."""
    lifeline = Lifeline()
    before = files(os.getpid())
    with few_files(os.getpid(), free), pytest.raises(OSError, match="open files"):
        SlotProcess.start(nursery, COMMAND, {}, lifeline, "w#1")
    assert files(os.getpid()) == before
    assert nursery._process and not children(nursery._process._process.pid)
    lifeline.close()


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    one.start()
    yield one
    one.close()


def test_a_slot_starts_when_there_are_files_again(nursery):
    with ExitStack() as stack:
        lifeline = Lifeline()
        stack.callback(lifeline.close)
        slots = SlotPool(0, "worker", COMMAND, {}, EVENTS, 1.0, lifeline, starts=Starts(1), nursery=nursery)
        stack.callback(slots.close)
        slots.start()
        with few_files(os.getpid(), 4):
            slots.resize(1)
            trouble = wait_until(lambda: slots.trouble, what="that it is told")
        assert trouble and "open files" in trouble
        wait_until(lambda: slots.usable() == 1, what="a slot")


def test_a_slot_that_takes_long_is_told_of_once_and_waited_for(caplog, gate, tmp_path):
    heavy = tmp_path / "heavy"
    heavy.touch()
    command = [*COMMAND, "tests.worker.hanging_handlers"]
    environment = {"IMPORT_GATE": str(gate), "LOAD_GATE": str(heavy)}
    with ExitStack() as stack:
        lifeline = Lifeline()
        stack.callback(lifeline.close)
        slots = SlotPool(1, "worker", command, environment, EVENTS, 1.0, lifeline, Model("heavy"))
        stack.callback(slots.close)
        slots.start()
        (mark,) = wait_until(slots.marks, what="a process")
        (slot,) = slots._slots

        def told_after(seconds: float) -> str | None:
            slots._look_at_clocks(slot.began + seconds)
            return slots.late

        assert told_after(LONG_S - 1) is None
        imports = f"slot {slot.process.pid} imports its handlers, for more than 60 s now"
        assert [told_after(LONG_S + more) for more in (1, 2)] == [imports, imports]
        gate.unlink()
        wait_until(lambda: slots.awaits_load(mark), what="that it is up")
        assert told_after(LONG_S + 1) is None  # it waits for memory, of which others tell
        slot.began -= 2 * LONG_S  # as if it had done so for long
        slots.load(mark, None)
        slots._look_at_clocks(time.monotonic())
        assert slots.late is None
        loads = f"slot {slot.process.pid} loads 'heavy', for more than 60 s now"
        assert [told_after(LONG_S + more) for more in (1, 2)] == [loads, loads]
        heavy.unlink()
        wait_until(lambda: slots.usable() == 1, what="the slot")
        assert slots.marks() == {mark} and slots.late is None
        assert [one.reason for one in caplog.records if one.message == "slot takes long"] == [imports, loads]


def test_a_slot_that_was_being_started_at_the_end_is_not_waited_for(monkeypatch):
    """It came after all others had been told to go, and would wait for its model."""
    bear = Nursery.bear

    def close_meanwhile(self, *given):
        child = bear(self, *given)
        closing.start()
        wait_until(lambda: slots._closing, what="that it closes")
        with slots._changed:
            return child  # those that were there have been told

    monkeypatch.setattr(Nursery, "bear", close_meanwhile)
    lifeline = Lifeline()
    command = [*COMMAND, "tests.worker.hanging_handlers"]
    slots = SlotPool(1, "worker", command, {}, EVENTS, 1.0, lifeline, Model("heavy"))
    closing = threading.Thread(target=slots.close, args=(600.0,), daemon=True)
    slots.start()
    wait_until(lambda: closing.ident and not closing.is_alive(), what="its end")
    lifeline.close()


def test_no_slot_is_started_where_no_more_jobs_are_taken_in(monkeypatch, eight):
    slots = eight(Starts(8))
    wait_until(lambda: slots.usable() == 8, what="all slots")
    slots.seal()
    monkeypatch.setattr(Nursery, "bear", Mock(side_effect=AssertionError("one was started")))
    turns = Mock(side_effect=slots._turn)
    monkeypatch.setattr(slots, "_turn", turns)
    os.kill(slots._slots[0].process.pid, signal.SIGKILL)
    wait_until(lambda: len(slots.marks()) == 7, what="the end of one")
    seen = turns.call_count
    wait_until(lambda: turns.call_count > seen + 1, what="another look")
    assert slots.trouble is None
