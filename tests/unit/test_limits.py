"""How much runs at the same time: who decides, and what bounds it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import limits
from orchestrator.errors import ConfigError
from orchestrator.limits import Lane, Limits, Machine

GIB = 2**30
LARGE = Machine(cpus=64, memory_bytes=256 * GIB)


# --- who decides ---


@pytest.mark.parametrize(
    ("sources", "threads"),
    [
        ({"cli": 8, "config": 6, "env": 4}, 8),
        ({"cli": 8, "env": 4}, 8),
        ({"config": 6, "env": 4}, 6),
        ({"env": 4}, 4),
        ({}, 64),
    ],
)
def test_the_flag_beats_the_configuration_beats_the_environment_beats_the_machine(sources, threads):
    assert Limits.resolve(LARGE, **sources).threads == threads


@pytest.mark.parametrize("nothing", [0, None])
def test_zero_means_not_given(nothing):
    assert Limits.resolve(LARGE, cli=nothing, config=nothing, env=5).threads == 5
    assert Limits.resolve(LARGE, cli=nothing) == Limits.resolve(LARGE)
    assert Limits.resolve(LARGE, pool_size=0, cap=0, embedding=0) == Limits.resolve(LARGE)


@pytest.mark.parametrize("name", ["cli", "config", "env", "pool_size", "cap", "embedding"])
def test_what_is_negative_is_refused_by_name(name):
    said = {"cli": "--threads", "env": "GPUORCH_THREADS"}.get(name, name)
    with pytest.raises(ConfigError, match=f"{said}.*= -1: must not be negative; 0 means the default"):
        Limits.resolve(LARGE, **{name: -1})  # type: ignore[arg-type]


def test_the_negative_environment_is_refused_when_it_decides():
    with pytest.raises(ConfigError):
        Limits.resolve(LARGE, env=-3)


# --- what bounds requests ---


def test_a_small_pool_bounds_requests_and_items():
    few = Limits.resolve(LARGE, cli=64, pool_size=4)
    assert (few.io.concurrency, few.items) == (16, 16)


def test_oversubscribing_lifts_that_up_to_the_platform():
    many = Limits.resolve(LARGE, cli=200, cap=128, pool_size=4, io_oversubscribe=True)
    assert (many.items, many.io.concurrency) == (128, 64)


@pytest.mark.parametrize(("gib", "cap"), [(15.99, 16), (16, 32), (31.99, 32), (32, 64), (256, 64)])
def test_memory_bounds_requests(gib, cap):
    machine = Machine(64, int(gib * GIB))
    assert limits.io_default_cap(machine, pool_size=100) == cap
    assert Limits.resolve(machine, cli=1000, cap=1000, pool_size=100).io.concurrency == cap


@pytest.mark.parametrize(("pool_size", "cap"), [(0, 1), (1, 4), (16, 64), (17, 64)])
def test_the_pool_times_four_within_the_platform(pool_size, cap):
    assert limits.io_default_cap(LARGE, pool_size) == cap


# --- lanes ---


@pytest.mark.parametrize(("threads", "io", "cpu"), [(1, 8, 16), (2, 8, 16), (3, 12, 16), (8, 32, 32), (16, 64, 64)])
def test_four_are_in_the_house_for_each_that_runs(threads, io, cpu):
    found = Limits.resolve(LARGE, cli=threads)
    assert found.io == Lane(threads, io)
    assert found.cpu == Lane(threads, cpu)
    assert found.embedding == Lane(threads, cpu)


def test_the_cpu_lane_is_that_of_items():
    found = Limits.resolve(LARGE, cli=50, pool_size=2)
    assert (found.cpu.concurrency, found.items) == (8, 8)


def test_a_model_may_have_a_number_of_its_own():
    assert Limits.resolve(LARGE, cli=8, embedding=3).embedding == Lane(3, 16)
    assert Limits.resolve(LARGE, cli=8, embedding=500, cap=40).embedding == Lane(40, 160)


@pytest.mark.parametrize(("cpus", "proc"), [(1, 1), (3, 3), (4, 4), (64, 4)])
def test_child_processes_have_a_lane_of_their_own(cpus, proc):
    assert Limits.resolve(Machine(cpus, GIB), cli=30).proc == Lane(proc, proc * 4)


@given(
    st.builds(Machine, st.integers(1, 1024), st.integers(1, 2**44)),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 1000),
    st.booleans(),
)
def test_whatever_is_given_something_runs_and_nothing_is_unbounded(machine, threads, cap, pool_size, oversubscribe):
    found = Limits.resolve(machine, cli=threads, cap=cap, pool_size=pool_size, io_oversubscribe=oversubscribe)
    lanes = (found.io, found.cpu, found.embedding, found.proc)
    assert all(1 <= lane.concurrency <= lane.pending <= max(16, 4 * lane.concurrency) for lane in lanes)
    assert found.io.concurrency <= 64 and found.proc.concurrency <= 8
    assert found.cpu.concurrency <= (cap or 64)


@pytest.mark.parametrize(("concurrency", "pending"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_a_lane_that_lets_nothing_through_is_refused(concurrency, pending):
    with pytest.raises(ConfigError, match="would wait for ever"):
        Lane(concurrency, pending)


# --- here ---


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    monkeypatch.delenv("GPUORCH_THREADS", raising=False)
    monkeypatch.delenv("GPUORCH_IO_OVERSUBSCRIBE", raising=False)


def test_programs_without_settings_read_the_environment(monkeypatch):
    assert limits.of_this_process().threads == len(os.sched_getaffinity(0))
    monkeypatch.setenv("GPUORCH_THREADS", "40")
    assert limits.of_this_process().threads == 40
    assert limits.of_this_process().io.concurrency <= 16
    assert limits.of_this_process(7, config=9).threads == 7
    assert limits.of_this_process(config=9).threads == 9
    monkeypatch.setenv("GPUORCH_IO_OVERSUBSCRIBE", "true")
    assert limits.of_this_process().io.concurrency == 40


@pytest.mark.parametrize(
    ("name", "value"), [("GPUORCH_THREADS", "many"), ("GPUORCH_THREADS", "-2"), ("GPUORCH_IO_OVERSUBSCRIBE", "maybe")]
)
def test_nonsense_in_the_environment_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        limits.of_this_process()
