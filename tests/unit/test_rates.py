"""Token buckets: what may pass, whatever is asked for and however the clock goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies import AgentPolicy
from orchestrator.rates import SLACK, Bucket, Limit

limits = st.builds(Limit, st.floats(0.01, 10_000), st.floats(1, 10_000))
#: (seconds until then, how many are asked for)
asked = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500)), max_size=50)


def play(bucket: Bucket, steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """(when, how many passed) of each step."""
    passed, at = [], 0.0
    for seconds, wanted in steps:
        at += seconds
        count, bucket = bucket.after(seconds).give(wanted)
        passed.append((at, count))
    return passed


@given(limits, asked)
def test_no_interval_sees_more_than_the_burst_and_what_dripped_in(limit, steps):
    passed = play(Bucket.full(limit), steps)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            total = sum(count for _, count in passed[first : last + 1])
            seconds = passed[last][0] - passed[first][0]
            assert total <= (limit.burst + limit.rate * seconds) * (1 + 1e-9) + 2 * SLACK


@given(limits, asked)
def test_who_asks_for_more_than_there_is_gets_all_there_is(limit, steps):
    bucket = Bucket.full(limit)
    for seconds, wanted in steps:
        there = bucket.after(seconds)
        count, bucket = there.give(wanted)
        assert count == wanted or bucket.tokens < 1
        assert count <= wanted
        assert bucket.tokens >= -SLACK


@given(limits, st.integers(1, 20_000), st.integers(0, 50))
def test_after_the_wait_it_is_told_it_gets_its_token_and_a_moment_earlier_it_does_not(limit, taken, ahead):
    _, bucket = Bucket.full(limit).give(taken)
    wait_s = bucket.wait_s()
    assert bucket.after(wait_s).give(1)[0] == 1
    if wait_s * limit.rate > 0.01:
        assert bucket.after(wait_s - 0.01 / limit.rate).give(1)[0] == 0
    assert bucket.wait_s(ahead) >= wait_s


@given(limits, st.integers(0, 500), st.data())
def test_a_refund_is_as_if_it_had_not_been_taken(limit, wanted, data):
    before = Bucket.full(limit).after(1)
    given_, left = before.give(wanted)
    back = data.draw(st.integers(0, given_))
    assert left.refunded(back).tokens == pytest.approx(before.give(given_ - back)[1].tokens)
    assert left.refunded(10**6).tokens == limit.burst


@given(limits, st.floats(-1e6, 0), st.integers(0, 500))
def test_a_clock_that_goes_back_neither_gives_nor_takes(limit, seconds, wanted):
    _, bucket = Bucket.full(limit).give(wanted)
    assert bucket.after(seconds) == bucket


def test_a_lower_burst_holds_less():
    assert Bucket(Limit(1, 5), tokens=50).after(0).tokens == 5


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (AgentPolicy(), None),
        (AgentPolicy(rate=5.0), Limit(5, 5)),
        (AgentPolicy(rate=0.1), Limit(0.1, 1)),
        (AgentPolicy(rate=5.0, burst=20), Limit(5, 20)),
    ],
)
def test_a_policy_without_a_burst_allows_a_second_of_it_and_one_job_at_least(policy, limit):
    assert Limit.of(policy) == limit
