"""When schedules fire: through gaps and overlaps of the clock, without drift, and never without bound."""

# ruff: noqa: DTZ001 - the store's moments are UTC and have no zone

import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidInput
from orchestrator.names import is_name
from orchestrator.schedules import MAX_ID, ON_TIME, CatchUp, ScheduleSpec, Timing, fire_id, plan

ANCHOR = datetime(2026, 1, 1)
#: Set forward and back at night, by an hour, at midnight, by half an hour; or never.
ZONES = ("UTC", "Europe/Berlin", "America/Havana", "Africa/Cairo", "Australia/Lord_Howe", "Asia/Kolkata")

zones = st.sampled_from(ZONES)
moments = st.datetimes(datetime(2024, 1, 1), datetime(2028, 1, 1))
lines = st.builds(
    "{} {} {} {} {}".format,
    st.sampled_from(["0", "30", "*/15", "5,59", "*"]),
    st.sampled_from(["0", "2", "*", "*/6", "1-3", "23"]),
    st.sampled_from(["*", "1", "29", "L"]),
    st.sampled_from(["*", "2", "3,10,11"]),
    st.sampled_from(["*", "0", "1-5"]),
)
catch_ups = st.sampled_from(["skip", "last", "all"])
timings = st.builds(lambda line, zone: Timing.of(line, None, zone, ANCHOR), lines, zones) | st.builds(
    lambda every, zone: Timing.of(None, every, zone, ANCHOR), st.floats(1, 1e6), zones
)


def local(line, zone, start, count):
    """The next times as the clock on the wall shows them there."""
    timing, at, found = Timing.of(line, None, zone, ANCHOR), start, []
    for _ in range(count):
        at = timing.after(at)
        assert at is not None
        found.append(at.replace(tzinfo=UTC).astimezone(ZoneInfo(zone)).strftime("%m-%d %H:%M %Z"))
    return found


def utc(year, month, day, hour=0, minute=0):
    return datetime(year, month, day, hour, minute)


# --- cron ---


def test_a_time_that_does_not_exist_fires_right_after_the_gap():
    assert local("30 2 * * *", "Europe/Berlin", utc(2026, 3, 27, 12), 3) == [
        "03-28 02:30 CET",
        "03-29 03:00 CEST",
        "03-30 02:30 CEST",
    ]


def test_a_time_that_comes_twice_fires_once():
    assert local("30 2 * * *", "Europe/Berlin", utc(2026, 10, 24, 12), 2) == ["10-25 02:30 CEST", "10-26 02:30 CET"]
    # Asked in the hour that repeats, after it has fired.
    assert local("30 2 * * *", "Europe/Berlin", utc(2026, 10, 25, 1, 15), 1) == ["10-26 02:30 CET"]


def test_what_fires_all_the_time_goes_on_as_time_does():
    assert local("*/30 * * * *", "Europe/Berlin", utc(2026, 10, 25, 0, 1), 4) == [
        "10-25 02:30 CEST",
        "10-25 02:00 CET",
        "10-25 02:30 CET",
        "10-25 03:00 CET",
    ]


@pytest.mark.parametrize("asked", [utc(2022, 4, 14), utc(2022, 10, 1, 20), utc(2022, 10, 2, 11, 45)])
def test_half_an_hour_s_shift_hides_no_time_of_its_day(asked):
    """There clocks go from 2:00 to 2:30; whenever one asks, the evening begins at 23:00."""
    expected = ["10-02 23:00 +11", "10-02 23:15 +11", "10-02 23:30 +11", "10-02 23:45 +11", "10-09 23:00 +11"]
    assert local("*/15 23 * 3,10,11 0", "Australia/Lord_Howe", asked, 5) == expected


def test_the_29th_of_february_comes_every_four_years():
    assert Timing.of("0 0 29 2 *", None, "UTC", ANCHOR).after(utc(2026, 1, 1)) == utc(2028, 2, 29)
    assert Timing.of("0 0 29 2 *", None, "UTC", ANCHOR).after(utc(2096, 3, 1)) == utc(2104, 2, 29)


@given(timings, moments)
def test_the_next_time_is_later_and_does_not_depend_on_when_one_asks(timing, moment):
    first = timing.after(moment)
    if first is None:
        return
    assert first > moment
    second = timing.after(first)
    for part in (0.0, 0.3, 0.999):
        assert timing.after(moment + part * (first - moment)) in {first} | ({second} if part else set())
    assert timing.after(first - timedelta(microseconds=1)) == first


# --- intervals ---


@given(st.floats(1, 31_536_000), st.integers(0, 10**6))
def test_an_interval_does_not_drift(every, n):
    timing = Timing.of(None, every, "UTC", ANCHOR)
    assert timing.every is not None
    try:
        at = ANCHOR + n * timing.every
        following = timing.after(at)
    except OverflowError:
        return
    assert following == ANCHOR + (n + 1) * timing.every
    assert timing.after(at - timedelta(microseconds=1)) == max(at, ANCHOR + timing.every)


# --- catching up ---


@given(timings, moments, st.floats(0, 3e6), catch_ups, st.integers(1, 20))
def test_a_plan_keeps_its_bounds(timing, moment, late_s, catch_up, most):
    due = timing.after(moment)
    if due is None:
        return
    now = due + timedelta(seconds=late_s)
    made = plan(timing, catch_up, most, due, now)
    assert len(made.fires) <= (1 if catch_up == "last" else most)
    assert all(due <= at <= now for at in made.fires)
    assert all(one < other for one, other in pairwise(made.fires))
    assert made.next_at is None or made.next_at > now
    if catch_up == "skip":
        assert all(now - at <= ON_TIME for at in made.fires)
    else:
        # Nothing lies between the last that fires and the next.
        assert timing.after(made.fires[-1]) == made.next_at


@given(timings, moments, st.floats(0, 1e5))
def test_every_time_fires_or_is_missed(timing, moment, late_s):
    due = timing.after(moment)
    if due is None:
        return
    now = due + timedelta(seconds=late_s)
    times: list[datetime] = []
    at: datetime | None = due
    while at is not None and at <= now and len(times) <= 2000:
        times.append(at)
        at = timing.after(at)
    if len(times) > 2000:
        return
    cases: list[tuple[CatchUp, int]] = [("last", 1), ("all", 3), ("all", 100)]
    for catch_up, most in cases:
        made = plan(timing, catch_up, most, due, now)
        assert list(made.fires) == times[-most:]
        assert made.missed in {None, len(times) - len(made.fires)}


HOURLY = Timing.of("0 * * * *", None, "UTC", ANCHOR)


def test_on_time_is_no_catching_up():
    due = utc(2026, 5, 1, 3)
    for catch_up in ("skip", "last", "all"):
        made = plan(HOURLY, catch_up, 10, due, due + timedelta(seconds=15))
        assert (made.fires, made.missed, made.next_at) == ((due,), 0, utc(2026, 5, 1, 4))


def test_after_an_outage():
    due, now = utc(2026, 5, 1, 3), utc(2026, 5, 1, 7, 30)
    hours = tuple(utc(2026, 5, 1, hour) for hour in range(3, 8))
    assert plan(HOURLY, "skip", 10, due, now).fires == ()
    assert plan(HOURLY, "skip", 10, due, now).missed == 5
    assert (plan(HOURLY, "last", 10, due, now).fires, plan(HOURLY, "last", 10, due, now).missed) == (hours[-1:], 4)
    assert plan(HOURLY, "all", 10, due, now).fires == hours
    assert (plan(HOURLY, "all", 2, due, now).fires, plan(HOURLY, "all", 2, due, now).missed) == (hours[-2:], 3)


@pytest.mark.parametrize("line", ["* * * * *", "* * * 1 *", "0 0 29 2 *"])
@pytest.mark.parametrize("catch_up", ["skip", "last", "all"])
def test_years_of_outage_are_no_years_of_counting(line, catch_up):
    timing = Timing.of(line, None, "Europe/Berlin", ANCHOR)
    due = timing.after(utc(2000, 1, 1))
    assert due is not None
    began = time.process_time()
    made = plan(timing, catch_up, 100, due, utc(2026, 12, 30))
    assert time.process_time() - began < 5
    assert len(made.fires) <= 100


def test_decades_of_seconds_are_counted_at_once():
    timing = Timing.of(None, 1.0, "UTC", datetime(2000, 1, 1))
    made = plan(timing, "all", 5, utc(2000, 1, 2), utc(2026, 1, 1))
    assert made.fires[-1] == utc(2026, 1, 1)
    assert (len(made.fires), made.missed) == (5, (utc(2026, 1, 1) - utc(2000, 1, 2)) // timedelta(seconds=1) - 4)


# --- ids and documents ---


@given(st.text("abc-._:", min_size=1, max_size=MAX_ID), moments)
def test_the_id_of_a_firing_is_a_name(schedule_id, at):
    assert is_name(fire_id(schedule_id, at))


def test_the_id_of_a_firing_is_readable():
    assert fire_id("nightly", utc(2026, 5, 1, 3)) == "schedule:nightly:20260501T030000Z"
    assert fire_id("n", utc(2026, 5, 1, 3) + timedelta(microseconds=5)) == "schedule:n:20260501T030000.000005Z"


JOB = {"type": "echo", "payload": {}}


def parse(**fields):
    return ScheduleSpec.parse({"job": JOB} | fields, 1000, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"cron": "*/5 * * * *"},
        {"cron": "0 3 * * MON-FRI", "timezone": "Europe/Berlin", "catch_up": "all", "catch_up_max": 100},
        {"every_seconds": 1},
        {"every_seconds": 1.5, "enabled": False},
    ],
)
def test_a_schedule_is_taken(fields):
    assert parse(**fields).model_dump(exclude_unset=True) == {"job": JOB} | fields


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "body"),
        ({"cron": "* * * * *", "every_seconds": 5}, "body"),
        ({"every_seconds": 0.5}, "every_seconds"),
        ({"every_seconds": float("inf")}, "every_seconds"),
        ({"cron": "* * * *"}, "cron"),
        ({"cron": "* * * * * *"}, "cron"),
        ({"cron": "@daily"}, "cron"),
        ({"cron": "0 0 30 2 *"}, "cron"),
        ({"cron": "0 0 31 2,4 0#5"}, None),
        ({"cron": "99 * * * *"}, "cron"),
        ({"cron": "0 0 * * *", "timezone": "Mars/Olympus"}, "timezone"),
        ({"cron": "0 0 * * *", "timezone": "../../etc/passwd"}, "timezone"),
        ({"cron": "0 0 * * *", "timezone": "Europe"}, "timezone"),
        ({"cron": "0 0 * * *", "timezone": "\0"}, "timezone"),
        ({"cron": "0 0 * * *", "catch_up": "some"}, "catch_up"),
        ({"cron": "0 0 * * *", "catch_up_max": 101}, "catch_up_max"),
        ({"cron": "0 0 * * *", "extra": 1}, "extra"),
        ({"cron": "0 0 * * *", "job": {"type": "echo"}}, "payload"),
        ({"cron": "0 0 * * *", "job": JOB | {"payload": {"a": "x" * 2000}}}, "payload"),
        ({"cron": "0 0 * * *", "job": JOB | {"job_id": "mine"}}, "job.job_id"),
        ({"cron": "0 0 * * *", "job": JOB | {"deadline_at": "2030-01-01T00:00:00Z"}}, "job.deadline_at"),
    ],
)
def test_what_is_no_schedule_is_refused_by_field(fields, field):
    if field is None:
        parse(**fields)
        return
    with pytest.raises(InvalidInput) as refused:
        parse(**fields)
    assert refused.value.field == field
