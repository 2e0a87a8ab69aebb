"""How many workers a lane should have: cases of the policy, and what holds whatever is asked."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.scaling import POLICY, Load, desired_workers

counts = st.integers(0, 20_000)
seconds = st.floats(0, 1e6)


@st.composite
def loads(draw, /, **fixed):
    workers = draw(st.integers(0, 500))
    minimum = draw(st.integers(0, 20))
    return Load(
        **{
            "waiting": draw(counts),
            "running": draw(counts),
            "delayed": draw(counts),
            "blocked": draw(counts),
            "oldest_wait_s": draw(seconds),
            "mean_latency_s": draw(st.none() | seconds),
            "workers": workers,
            "busy_workers": draw(st.integers(0, workers + 5)),
            "draining": draw(st.integers(0, 5)),
            "slots": draw(st.floats(1, 64)),
            "minimum": minimum,
            "maximum": draw(st.none() | st.integers(minimum, 100)),
            "open": draw(st.booleans()),
            "paused": draw(st.booleans()),
        }
        | fixed
    )


def wanted(**fields):
    return desired_workers(Load(**fields))


@pytest.mark.parametrize(
    ("fields", "workers"),
    [
        ({}, 0),
        ({"waiting": 1}, 1),  # wakes from zero
        ({"waiting": 50}, 1),  # fifty, nobody has waited long yet
        ({"waiting": 101, "slots": 4}, 26),  # more than a hundred: a slot for each
        ({"waiting": 100, "slots": 4}, 1),  # a hundred are not more than a hundred
        ({"waiting": 8, "running": 4, "workers": 1, "busy_workers": 1, "slots": 4, "mean_latency_s": 2.5}, 3),
        ({"waiting": 8, "running": 4, "workers": 1, "busy_workers": 1, "slots": 4, "mean_latency_s": 2.0}, 1),
        ({"waiting": 8, "running": 4, "workers": 1, "busy_workers": 1, "slots": 4, "oldest_wait_s": 2.5}, 3),
        # Slow, but everybody has a slot: more workers would change nothing.
        ({"running": 4, "workers": 1, "busy_workers": 1, "slots": 4, "mean_latency_s": 600.0}, 1),
        ({"running": 150, "workers": 5, "busy_workers": 5, "slots": 40}, 5),
        ({"running": 130, "workers": 5, "busy_workers": 4, "slots": 40}, 5),
        # Half of the slots are in use: as many as there are.
        ({"running": 10, "workers": 5, "busy_workers": 5, "slots": 4}, 5),
        # One of forty is in use: down, but nobody who is busy.
        ({"running": 1, "workers": 10, "busy_workers": 1, "slots": 4}, 1),
        ({"running": 3, "workers": 10, "busy_workers": 3, "slots": 4}, 3),
        ({"workers": 10, "slots": 4}, 0),
        ({"workers": 10, "slots": 4, "minimum": 2}, 2),
        ({"waiting": 5000, "maximum": 7}, 7),
        ({"waiting": 5000, "open": False, "workers": 2, "busy_workers": 1}, 1),
        ({"delayed": 5000, "blocked": 5000}, 0),
        # Paused: nobody could start what waits.
        ({"waiting": 5000, "paused": True}, 0),
        ({"waiting": 5000, "paused": True, "workers": 2, "slots": 4}, 2),
        ({"waiting": 5000, "paused": True, "workers": 1, "busy_workers": 2}, 2),
        ({"waiting": 5000, "paused": True, "minimum": 3}, 3),
        ({"running": 1, "paused": True, "workers": 10, "busy_workers": 1, "slots": 4}, 1),
    ],
)
def test_the_policy(fields, workers):
    assert wanted(**fields) == workers


@given(loads())
def test_never_fewer_than_are_busy(load):
    assert desired_workers(load) >= load.busy_workers


@given(loads(open=True, maximum=None))
def test_zero_only_when_nothing_runs_or_may_run(load):
    if load.running or (load.waiting and not load.paused):
        assert desired_workers(load) >= 1
    elif not load.waiting:
        assert desired_workers(load) == max(load.minimum, load.busy_workers)


@given(loads(paused=True, minimum=0))
def test_never_up_while_paused(load):
    assert desired_workers(load) <= max(load.workers, load.busy_workers, min(load.running, 1))


@given(loads(open=True))
def test_between_the_limits_unless_more_are_busy(load):
    desired = desired_workers(load)
    assert desired >= load.minimum
    assert load.maximum is None or desired <= max(load.maximum, load.busy_workers)


@given(loads(open=True, maximum=None, minimum=0))
def test_never_more_slots_than_jobs_when_it_grows(load):
    desired = desired_workers(load)
    if desired > max(load.workers, load.busy_workers, 1):
        assert desired == math.ceil(load.depth / load.slots)
        assert load.depth > POLICY.max_depth or (
            max(load.mean_latency_s or 0.0, load.oldest_wait_s) > POLICY.max_latency_s
        )


@given(loads(open=True), st.integers(1, 1000))
def test_more_jobs_never_mean_fewer_workers(load, more):
    longer = Load(**{**vars(load), "waiting": load.waiting + more})
    assert desired_workers(longer) >= desired_workers(load)
