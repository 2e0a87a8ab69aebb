"""Slots that come and go as their pool is resized, with real processes."""

import json
from collections.abc import Iterator

import pytest

from tests.waiting import wait_until
from worker.lifeline import Lifeline
from worker.slots import SlotEvents, SlotPool


def ignore(*_told: object) -> None:
    """Nobody listens."""


@pytest.fixture
def slots() -> Iterator[SlotPool]:
    lifeline = Lifeline()
    command = ["100000", json.dumps({"adapter": None, "variant": None})]
    pool = SlotPool(8, "worker", command, {}, SlotEvents(ignore, ignore, ignore, ignore, ignore), 1.0, lifeline)
    pool.start()
    yield pool
    pool.close()
    lifeline.close()


def test_slots_that_were_dismissed_before_they_were_up_do_not_count_as_failures(slots):
    wait_until(lambda: len(slots.marks()) == 8, what="eight processes")
    slots.resize(0)
    wait_until(lambda: not slots.marks(), what="all gone")
    slots.resize(1)
    wait_until(lambda: slots.usable() == 1, timeout=25.0, what="one slot; after eight failures it would wait for 30 s")
    assert slots.trouble is None


def test_a_resize_that_comes_after_the_end_is_ignored():
    lifeline = Lifeline()
    pool = SlotPool(0, "worker", [], {}, SlotEvents(ignore, ignore, ignore, ignore, ignore), 1.0, lifeline)
    pool.start()
    pool.close()
    pool.resize(3)
    lifeline.close()
