"""Rank: first come first served within a priority, and a head start that ends."""

from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.ranking import PRIORITY_NAMES, SECONDS_PER_POINT, rank

START = datetime(2026, 1, 1)  # noqa: DTZ001 - the database's clock has no zone
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2100, 1, 1))  # noqa: DTZ001
PRIORITIES = st.integers(-100, 100)


@given(MOMENTS, st.timedeltas(timedelta(microseconds=1), timedelta(days=400)), PRIORITIES)
def test_first_come_first_served_within_a_priority(arrived, later, priority):
    assert rank(arrived, priority) < rank(arrived + later, priority)


@given(MOMENTS, PRIORITIES, st.integers(0, 999))
def test_positions_of_one_batch_keep_their_order(arrived, priority, position):
    assert rank(arrived, priority, position) < rank(arrived, priority, position + 1)


@given(MOMENTS, PRIORITIES, PRIORITIES)
def test_a_head_start_is_bounded_so_nothing_starves(arrived, one, other):
    """However high the other's priority: after this long, whoever comes new is behind."""
    bound = timedelta(seconds=200 * SECONDS_PER_POINT, microseconds=1)
    assert rank(arrived, one) < rank(arrived + bound, other)


@given(MOMENTS, PRIORITIES, PRIORITIES)
def test_higher_priority_goes_first_among_equals(arrived, one, other):
    if one > other:
        assert rank(arrived, one) < rank(arrived, other)


def test_high_overtakes_five_minutes_and_no_more():
    high = PRIORITY_NAMES["HIGH"]
    assert rank(START + timedelta(seconds=299), high) < rank(START, 0) < rank(START + timedelta(seconds=301), high)


def test_a_rank_fits_its_column():
    assert -(2**63) < rank(datetime(1970, 1, 1), 100) < rank(datetime(9999, 12, 31), -100) < 2**63  # noqa: DTZ001
