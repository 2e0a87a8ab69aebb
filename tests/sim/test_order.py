"""The simulation of order: what its cases are there to show."""

import random
from xml.dom.minidom import parseString

import pytest

from tests.sim import order
from tests.sim.bars import draw_waits


@pytest.fixture(scope="module")
def rows():
    found = [row for case in order.CASES for row in order.table(case(random.Random(7)))]
    return {(row.case.split()[0], row.agent, row.priority, row.policy): row for row in found}


def test_a_flood_delays_nobody_else(rows):
    assert rows["flood", "steady", "NORMAL", "ours"].p99_s < 10
    assert rows["flood", "steady", "NORMAL", "FIFO"].p99_s > 100
    high, low = (rows["flood", "rare", priority, "ours"] for priority in ("HIGH", "LOW"))
    assert high.p99_s < 3 < low.longest_s < rows["flood", "flood", "NORMAL", "ours"].longest_s


def test_small_jobs_need_not_wait_for_large_ones(rows):
    assert rows["mixed", "small", "NORMAL", "ours"].p99_s < rows["mixed", "small", "NORMAL", "FIFO"].p99_s / 2


def test_deadlines_are_met_that_can_be(rows):
    assert rows["deadlines", "batch", "-1", "FIFO"].late > 50
    assert rows["deadlines", "batch", "-1", "ours"].late == 0


def test_in_a_slow_lane_who_is_urgent_waits_for_a_window_of_few(rows):
    assert rows["slow", "other", "HIGH", "ours"].longest_s <= 6 * 180
    assert rows["slow", "other", "HIGH", "FIFO"].longest_s > 2000


def test_all_jobs_start_and_slots_are_never_idle_while_jobs_wait():
    case = order.flood(random.Random(1))
    ends = {}
    for ranked in (False, True):
        jobs = order.simulate(case, ranked=ranked)
        assert all(job.started is not None and job.started >= job.arrives for job in jobs)
        ends[ranked] = max(job.started + job.takes for job in jobs if job.started is not None)
    assert ends[True] == pytest.approx(ends[False], rel=0.01)


def test_the_picture_is_a_picture():
    picture = parseString(draw_waits({"a & b": [("FIFO", 12.0), ("ours", 0.0)]}))  # noqa: S318 - our own
    assert picture.getElementsByTagName("rect")
