"""Slots that come and go as their pool is resized, with real processes."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.store.claim import Claim
from orchestrator.store.settle import Outcome
from tests.waiting import wait_until
from worker import wire
from worker.lifeline import Lifeline
from worker.nursery import Nursery
from worker.slots import SlotEvents, SlotPool
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


def test_slots_that_were_dismissed_before_they_were_up_do_not_count_as_failures(eight):
    slots = eight(Starts(8))
    wait_until(lambda: len(slots.marks()) == 8, what="eight processes")
    slots.resize(0)
    wait_until(lambda: not slots.marks(), what="all gone")
    slots.resize(1)
    wait_until(lambda: slots.usable() == 1, timeout=25.0, what="one slot; after eight failures it would wait for 30 s")
    assert slots.trouble is None


def test_starts_that_fail_hold_up_nobody_for_ever(monkeypatch, eight):
    """As many as may start at once: when there are processes to be had again, slots start."""
    bear, failures = Nursery.bear, iter([OSError("no more processes")] * 2)

    def fail_at_first(self, *given):
        if error := next(failures, None):
            raise error
        return bear(self, *given)

    monkeypatch.setattr(Nursery, "bear", fail_at_first)
    slots = eight(Starts(2))
    wait_until(lambda: slots.trouble, what="that it is told")
    assert "no more processes" in slots.trouble
    wait_until(lambda: slots.usable() == 8, what="all slots")
    assert slots.trouble is None


def test_slots_start_a_few_at_a_time_and_all_come_up(eight):
    slots, most = eight(Starts(2)), 0

    def all_up() -> bool:
        nonlocal most
        up = slots.usable()
        most = max(most, len(slots.marks()) - up)
        return bool(up == 8)

    wait_until(all_up, timeout=60.0, what="eight slots")
    assert most <= 2 + 1  # one may have come up between the two looks


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
    with ExitStack() as stack:
        lifeline = Lifeline()
        stack.callback(lifeline.close)
        slots = SlotPool(1, "worker", [*COMMAND, "tests.worker.marking_handlers"], {}, events, 1.0, lifeline)
        stack.callback(slots.close)
        slots.start()
        wait_until(lambda: slots.usable() == 1, timeout=25.0, what="a slot")
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


def test_a_slot_that_does_not_read_the_answer_to_its_question_is_killed(monkeypatch):
    """Half of an answer would leave it waiting for the rest, and its job running for ever."""
    with ExitStack() as stack:
        lifeline = Lifeline()
        stack.callback(lifeline.close)
        slots = SlotPool(1, "worker", COMMAND, {}, EVENTS, 1.0, lifeline)
        stack.callback(slots.close)
        slots.start()
        wait_until(lambda: slots.usable() == 1, timeout=25.0, what="a slot")
        (slot,) = slots._slots
        with monkeypatch.context() as patched:
            patched.setattr(wire.Channel, "send", Mock(side_effect=BlockingIOError))
            slot.send({"question": 1})
        wait_until(lambda: slot not in slots._slots, what="its end")
