"""The mix: what was asked lately, cheap to keep, bounded, and the same object until it changed by enough."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement import Ask, Mix, RecentAsks, Shape
from orchestrator.placement.mix import FEWEST_ASKS, MOST_SHAPES


def asked(recent, memory_mb, times):
    for _ in range(times):
        recent.add(Ask(memory_mb))


def test_a_few_asks_make_no_mix():
    recent = RecentAsks(200)
    asked(recent, 100, FEWEST_ASKS - 1)
    assert not recent.mix()
    asked(recent, 100, 1)
    assert recent.mix().shares == {Shape(100): 1.0}


def test_a_mix_stays_the_same_object_until_the_asks_are_others():
    recent = RecentAsks(100)
    asked(recent, 100, 100)
    mix = recent.mix()
    asked(recent, 200, 15)
    assert recent.mix() is mix
    asked(recent, 200, 15)
    assert recent.mix().shares == {Shape(100): pytest.approx(0.7), Shape(200): pytest.approx(0.3)}


def test_old_asks_are_forgotten():
    recent = RecentAsks(100)
    asked(recent, 100, 500)
    asked(recent, 200, 100)
    assert recent.mix().shares == {Shape(200): 1.0}
    assert len(recent._recent) == 100 and len(recent._counts) == 1


def test_a_shape_is_not_who_asks_nor_where():
    assert Shape.of(Ask(5, 2, node_id="a", key="k", warm_nodes=frozenset("b"))) == Shape.of(Ask(5, 2))


def test_a_mix_keeps_the_most_usual_shapes():
    mix = Mix({Shape(n): n for n in range(1, MOST_SHAPES + 11)})
    assert len(mix.shares) == MOST_SHAPES
    assert Shape(10) not in mix.shares and Shape(11) in mix.shares
    assert sum(mix.shares.values()) == pytest.approx(1.0)


def test_an_empty_mix_is_false_and_answers():
    mix = Mix()
    assert not mix
    assert mix.takers("", 1, 1).worth(5) == 0
    assert not Mix({Shape(5): 0.0})


def test_what_is_too_small_for_all_is_worth_nothing():
    takers = Mix({Shape(10): 3.0, Shape(40): 1.0}).takers("", 1000, 1000)
    assert [takers.worth(free) for free in (9, 10, 39, 40)] == [
        0,
        pytest.approx(7.5),
        pytest.approx(39 * 0.75),
        pytest.approx(40),
    ]


def test_a_host_without_cpu_makes_gpus_worthless():
    mix = Mix({Shape(10, cpu_milli=4000): 1.0, Shape(10, cpu_milli=1000): 1.0})
    assert [mix.takers("", cpu, 0).worth(10) for cpu in (999, 1000, 4000)] == [0, pytest.approx(5), pytest.approx(10)]
    assert mix.takers("", 3999, 0) is mix.takers("", 1500, 0)


def test_several_gpus_are_worth_something_together_only():
    takers = Mix({Shape(10, gpu_count=2): 1.0}).takers("", 0, 0)
    assert takers.worth(10) == 0
    assert takers.worth_of((9, 10)) == 0
    assert takers.worth_of((9, 10, 12)) == pytest.approx(22)


def test_the_host_serves_at_the_usual_ratio():
    mix = Mix({Shape(10, cpu_milli=1000, host_memory_mb=100): 1.0})
    assert mix.servable_mb(2000, 100) == pytest.approx(10)
    assert mix.servable_mb(2000, float("inf")) == pytest.approx(20)
    assert mix.servable_mb(-1, 100) == 0


def test_what_nobody_asks_for_or_reports_does_not_limit():
    unlimited = float("inf")
    assert Mix({Shape(10): 1.0}).servable_mb(0, -5) == unlimited
    assert Mix({Shape(0, gpu_count=0, cpu_milli=5): 1.0}).servable_mb(unlimited, unlimited) == unlimited
    assert Mix({Shape(0, gpu_count=0, cpu_milli=5): 1.0}).servable_mb(10, unlimited) == 0


@given(st.lists(st.integers(1, 5), max_size=300), st.integers(1, 80))
def test_the_counts_are_those_of_the_last_asks(sizes, window):
    recent = RecentAsks(window)
    for size in sizes:
        recent.add(Ask(size))
        mix = recent.mix()
        assert not mix or sum(mix.shares.values()) == pytest.approx(1.0)
    last = sizes[-window:]
    assert dict(recent._counts) == {Shape(size): last.count(size) for size in last}


def test_many_threads_may_add():
    recent = RecentAsks(100)

    def add(size):
        for _ in range(500):
            recent.add(Ask(size))
            recent.mix()

    threads = [threading.Thread(target=add, args=(size,)) for size in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(recent._counts.values()) == len(recent._recent) == 100


def test_a_mix_that_lives_long_does_not_grow(monkeypatch):
    monkeypatch.setattr("orchestrator.placement.mix.MOST_ANSWERS", 10)
    monkeypatch.setattr("orchestrator.placement.mix.MOST_HOSTS", 10)
    mix = Mix({Shape(10, cpu_milli=n): 1.0 for n in range(40)})
    for n in range(1000):
        assert mix.takers("", n % 40, 0).worth_of((n,)) == pytest.approx(n * (n % 40 + 1) / 40 if n >= 10 else 0)
        assert len(mix._takers) <= 10 and len(mix._answers) <= 10
