"""Slots that come and go as their pool is resized, with real processes."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.waiting import wait_until
from worker.lifeline import Lifeline
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
    wait_until(starts.take, what="a place")
    assert starts.take()


def test_a_resize_that_comes_after_the_end_is_ignored():
    lifeline = Lifeline()
    pool = SlotPool(0, "worker", [], {}, EVENTS, 1.0, lifeline)
    pool.start()
    pool.close()
    pool.resize(3)
    lifeline.close()
