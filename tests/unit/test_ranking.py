"""Rank: order within an agent, shares between agents, bounds for everybody."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator import ranking
from orchestrator.ranking import PRIORITY_NAMES, UNIT, charge, cost, moved, rank, reached, urgent_places
from tests.sim.lane import Job, Lane

PRIORITIES = st.integers(-100, 100)
AGENTS = st.sampled_from("abc")
COSTS = st.floats(0.01, 50)
WEIGHTS = st.fixed_dictionaries({agent: st.floats(0.1, 10) for agent in "abc"})
#: Submissions of some jobs each, and takes of so many in between.
STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(AGENTS, COSTS, PRIORITIES), min_size=1, max_size=6),
        st.integers(1, 10),
    ),
    max_size=30,
)
#: The farthest that a job may jump ahead of another of the same tag, in units.
FARTHEST = 200 * ranking.UNITS_PER_POINT


def run(steps, weights) -> tuple[list[Job], list[Job]]:
    """All jobs in order of arrival, and in order of their starts."""
    lane = Lane(weights)
    arrived: list[Job] = []
    started: list[Job] = []
    for step in steps:
        if isinstance(step, int):
            started += lane.take(step)
        else:
            batch = [Job(len(arrived) + n, agent, cost=c, priority=p) for n, (agent, c, p) in enumerate(step)]
            arrived += batch
            lane.submit(batch)
    return arrived, started + lane.take(len(arrived))


# --- order ---


@given(STEPS, WEIGHTS)
def test_first_come_first_served_within_an_agent_and_a_priority(steps, weights):
    arrived, started = run(steps, weights)
    assert sorted(job.number for job in started) == [job.number for job in arrived]
    for agent in "abc":
        for priority in {job.priority for job in started}:
            own = [job.number for job in started if (job.agent, job.priority) == (agent, priority)]
            assert own == sorted(own)


@given(STEPS, WEIGHTS, st.lists(st.integers(1, 10), max_size=50))
def test_the_order_does_not_depend_on_who_publishes_how_much_at_a_time(steps, weights, sizes):
    submits = [step for step in steps if not isinstance(step, int)]
    _, at_once = run(submits, weights)
    _, by_pieces = run([*submits, *sizes], weights)
    assert [job.number for job in at_once] == [job.number for job in by_pieces]


@given(STEPS, WEIGHTS)
def test_virtual_time_never_passes_what_still_waits(steps, weights):
    """So whoever comes new is not put behind a backlog that it should share the lane with."""
    lane = Lane(weights)
    for step in steps:
        before = lane.virtual_time
        if isinstance(step, int):
            lane.take(step)
        else:
            lane.submit([Job(0, agent, cost=c, priority=p) for agent, c, p in step])
        assert before <= lane.virtual_time
        assert all(lane.virtual_time <= max(job.rank, job.tag) for job in lane.ready)


@given(st.integers(0, 10**12), PRIORITIES, PRIORITIES)
def test_higher_priority_goes_first_among_equals(tag, one, other):
    assert (rank(tag, one) < rank(tag, other)) == (one > other)


def test_high_overtakes_300_units_and_no_more():
    high = PRIORITY_NAMES["HIGH"]
    assert rank(299 * UNIT, high) < rank(0, 0) < rank(301 * UNIT, high)


def test_a_head_start_is_not_charged_to_the_account():
    lane = Lane()
    lane.submit([Job(0, "a", priority=50), Job(1, "a")])
    assert lane.accounts["a"] == 2 * UNIT


@given(st.integers(0, 10**12), PRIORITIES, PRIORITIES)
def test_a_priority_that_changes_moves_a_job_to_where_it_would_have_been(tag, before, after):
    assert moved(rank(tag, before), before, after) == rank(tag, after)


# --- shares ---


def starts(order, agent, first, count):
    return sum(job.agent == agent for job in order[first : first + count])


@given(st.floats(0.5, 8), st.integers(1, 40))
@settings(max_examples=50)
def test_agents_that_wait_share_by_weight(weight, batch):
    lane = Lane({"a": 1.0, "b": weight})
    for _ in range(1200 // batch):
        lane.submit([Job(0, "a") for _ in range(batch)])
    for _ in range(1200 // batch):
        lane.submit([Job(0, "b") for _ in range(batch)])
    order = lane.take(1000)
    share = weight / (1 + weight)
    for first in range(0, 1000, 250):
        assert starts(order, "b", first, 250) == pytest.approx(250 * share, abs=2.5)


@given(st.floats(0.5, 8), st.integers(0, 500))
@settings(max_examples=50)
def test_who_comes_late_gets_its_share_from_then_on_and_no_more(weight, later):
    lane = Lane({"late": weight})
    lane.submit([Job(0, "early") for _ in range(800)])
    lane.take(later)
    lane.submit([Job(0, "late") for _ in range(300)])
    assert starts(lane.take(300), "late", 0, 300) == pytest.approx(300 * weight / (1 + weight), abs=2.5)


@given(COSTS)
@settings(max_examples=50)
def test_shares_are_of_service_not_of_jobs(size):
    lane = Lane()
    lane.submit([Job(0, "small") for _ in range(1000)])
    lane.submit([Job(0, "large", cost=size) for _ in range(1000)])
    order = lane.take(1000)
    used = {agent: sum(job.cost for job in order if job.agent == agent) for agent in ("small", "large")}
    assert used["small"] == pytest.approx(used["large"], abs=2 * max(size, 1), rel=0.05)


def test_a_lane_that_was_idle_gives_nobody_credit():
    """An agent that was away for a million units of others' service does not get them now."""
    lane = Lane()
    lane.submit([Job(0, "rare"), *(Job(0, "busy") for _ in range(3000))])
    lane.take(2000)
    lane.submit([Job(0, "rare") for _ in range(1000)])
    assert starts(lane.take(400), "rare", 0, 400) == pytest.approx(200, abs=2)


# --- bounds ---


@given(STEPS, WEIGHTS)
@settings(max_examples=200)
def test_no_job_is_overtaken_by_more_service_than_its_bound(steps, weights):
    """Of any other agent's later arrivals: what it may use until the clock passes, and one job more."""
    lane, waiting = Lane(weights), {}
    overtaken: dict[int, dict[str, float]] = {}
    number = 0
    for step in [*steps, 1000]:
        if not isinstance(step, int):
            batch = [Job(number + n, agent, cost=c, priority=p) for n, (agent, c, p) in enumerate(step)]
            number += len(batch)
            clock = lane.virtual_time
            lane.submit(batch)
            for job in batch:
                waiting[job.number] = (job, clock)
                overtaken[job.number] = {}
            continue
        for started in lane.take(step):
            waiting.pop(started.number)
            for victim, _ in waiting.values():
                if victim.number < started.number:
                    used = overtaken[victim.number]
                    used[started.agent] = used.get(started.agent, 0.0) + started.cost
                    clock = waiting[victim.number][1]
                    distance = (victim.rank - clock) / UNIT + FARTHEST / 2
                    rounding = 0.51 * number / UNIT
                    assert used[started.agent] <= weights[started.agent] * (distance + rounding) + 50


@given(PRIORITIES)
@example(-100)  # waits longest
@settings(max_examples=25)
def test_an_endless_stream_of_high_priority_starves_nobody(priority):
    lane = Lane()
    victim = Job(0, "victim", priority=priority)
    lane.submit([victim])
    for n in range(1, 2 * FARTHEST + 2):
        lane.submit([Job(n, "flood", priority=100)])
        if lane.take(1) == [victim]:
            return
    raise AssertionError("never started")


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), max_size=60))
def test_urgent_jobs_take_every_other_place_at_most(looks):
    ahead = urgent_total = total = 0
    for room, pressed in looks:
        urgent = min(urgent_places(room, ahead), pressed)
        ahead = max(0, ahead + 2 * urgent - room)
        urgent_total, total = urgent_total + urgent, total + room
        assert 0 <= urgent <= room
        assert ahead <= 1
    assert urgent_total <= total / 2 + len(looks) / 2 + 1


def test_one_urgent_job_gets_the_next_place():
    assert urgent_places(1, 0) == 1
    assert urgent_places(1, 1) == 0
    assert urgent_places(1, 0) == 1


# --- numbers ---


@given(
    st.none() | st.floats(0, 1e300),
    st.none() | st.floats(1e-300, 1e300),
    st.integers(1, 64),
    st.floats(0.01, 1000),
)
def test_a_charge_is_at_least_one_and_a_thousand_million_of_the_largest_fit_the_column(units, seconds, gpus, weight):
    assert 1 <= charge(cost(units, seconds, gpus), weight) < 2**63 / 1e9


def test_cost_is_what_a_job_says_else_its_time_on_its_gpus_else_one():
    assert cost(5.0, 100.0, 2) == 5.0
    assert cost(None, 100.0, 2) == 200.0
    assert cost(None, None, 4) == 1.0
    assert (cost(0.0, None, 1), cost(None, 1e9, 1)) == (0.01, 86_400.0)


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=50), st.integers(0, 10**15))
def test_tags_of_one_submission_follow_one_another(charges, begin):
    tags = list(ranking.tags(begin, charges))
    assert tags[0] == begin + charges[0]
    assert all(one < other for one, other in pairwise(tags))


@given(st.integers(0, 10**12), PRIORITIES)
def test_the_clock_goes_neither_to_the_tag_of_who_jumped_nor_beyond_that_of_who_was_held_back(tag, priority):
    assert reached(rank(tag, priority), priority) == min(tag, rank(tag, priority))
