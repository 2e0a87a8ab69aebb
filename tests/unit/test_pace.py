"""How far ahead a lane is announced: by slots, batches and speed; and how early a deadline must be heeded."""

import pytest

from orchestrator.pace import LONGEST_DRAIN_S, MARGIN_S, Pace


def fill(pace: Pace, unread: int, now: float) -> int:
    room = pace.room(unread, 2, 4096, now)
    if room:
        pace.filled(room, 0, now)
    return room


@pytest.mark.parametrize(
    ("slots", "reach", "window"), [(0, 0, 2), (1, 0, 2), (8, 0, 16), (8, 256, 256), (9999, 0, 4096)]
)
def test_a_window_follows_slots_and_batches_within_its_bounds(slots, reach, window):
    assert fill(Pace(slots=slots, reach=reach), 0, 0.0) == window


def test_a_closed_lane_is_announced_nothing():
    assert fill(Pace(slots=None), 0, 0.0) == 0


def test_a_window_is_refilled_when_half_of_it_is_free():
    pace = Pace(slots=4)
    fill(pace, 0, 0.0)
    assert [fill(pace, unread, 0.01) for unread in (8, 5, 4)] == [0, 0, 4]


def test_a_fast_lane_has_a_quarter_of_a_second_ahead_whatever_its_slots():
    pace, now = Pace(slots=1), 0.0
    for _ in range(400):
        now += 0.005
        taken = min(pace.left, 5)  # a thousand a second, if they are there
        fill(pace, pace.left - taken, now)
    assert 200 <= pace.window <= 300


def test_a_slow_lane_stays_at_twice_its_slots_however_often_it_is_looked_at():
    pace, now, unread = Pace(slots=2), 0.0, 0
    for second in range(600):
        now = float(second)
        unread += fill(pace, unread, now)
        if second % 60 == 59:
            unread -= 2
    assert pace.window == 4


def test_the_horizon_is_what_the_window_takes_to_drain_and_a_margin():
    pace, now, unread = Pace(slots=2), 0.0, 0
    assert pace.horizon_s == MARGIN_S
    for minute in range(20):
        now = 60.0 * minute
        unread = max(0, unread - 1)
        unread += fill(pace, unread, now)
    assert pace.horizon_s == pytest.approx(4 * 60 + MARGIN_S, rel=0.1)


def test_an_idle_time_is_not_taken_for_slowness():
    pace = Pace(slots=2)
    fill(pace, 0, 0.0)
    fill(pace, 2, 1.0)
    before = pace.between_s
    fill(pace, 0, 100_000.0)
    assert pace.between_s <= before
    assert pace.horizon_s <= LONGEST_DRAIN_S + MARGIN_S


def test_who_went_in_for_a_deadline_is_set_against_the_others():
    pace = Pace(slots=2)
    pace.room(0, 2, 4096, 0.0)
    pace.filled(4, 3, 0.0)
    assert pace.ahead == 2
    pace.filled(4, 0, 0.1)
    assert pace.ahead == 0
