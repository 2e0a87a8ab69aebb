"""The promise of the default policy: it uses more of a cluster than best fit does."""

import random
import statistics

import pytest

from orchestrator.placement import Ask, Policy
from tests.sim import trace
from tests.sim.experiment import Machine, at_random, by_policy, draw, run

#: A small cluster of two kinds: many GPUs with little CPU, few GPUs with much.
MACHINES = [Machine(f"dense{n}", 64_000, 256_000, 8) for n in range(8)]
MACHINES += [Machine(f"roomy{n}", 64_000, 256_000, 2) for n in range(8)]
TASKS = [
    *[Ask(1000, 1, cpu_milli=9000, host_memory_mb=30_000)] * 40,
    *[Ask(1000, 1, cpu_milli=3000, host_memory_mb=8000)] * 20,
    *[Ask(600, 1, cpu_milli=6000, host_memory_mb=16_000)] * 20,
    *[Ask(400, 1, cpu_milli=2000, host_memory_mb=4000)] * 30,
    *[Ask(1000, 4, cpu_milli=16_000, host_memory_mb=64_000)] * 2,
    *[Ask(0, 0, cpu_milli=8000, host_memory_mb=16_000)] * 10,
]


def allocated(policy):
    return statistics.mean(run(MACHINES, TASKS, by_policy(policy), seed).allocated_percent for seed in range(10))


def test_the_default_uses_more_of_a_small_cluster_than_best_fit():
    best_fit = allocated(Policy.BEST_FIT)
    assert allocated(Policy.FRAGMENTATION) > best_fit > allocated(Policy.SPREAD)


def test_an_experiment_can_be_repeated():
    first, second = (run(MACHINES, TASKS, at_random(7), 7).allocated_percent for _ in range(2))
    assert first == second


def test_the_demand_is_what_was_asked_for_and_all_tasks_come_once_before_any_comes_twice():
    drawn = list(draw(TASKS, 200_000, random.Random(1)))
    assert 195_000 < sum(ask.memory_mb * ask.gpu_count for ask in drawn) <= 200_000
    once = drawn[: len(TASKS)]
    assert all(once.count(task) == TASKS.count(task) for task in set(TASKS))


@pytest.mark.skipif(trace.absent() is not None, reason=f"the trace is absent: {trace.absent()}")
def test_the_published_experiment_gives_the_published_figure_and_ours_is_better():
    machines, tasks = trace.machines(), trace.tasks()
    assert (len(machines), sum(machine.gpus for machine in machines), len(tasks)) == (1213, 6212, 8152)
    assert run(machines, tasks, by_policy(Policy.BEST_FIT), 0).allocated_percent == pytest.approx(93.1, abs=1)
    assert run(machines, tasks, by_policy(Policy.FRAGMENTATION), 0).allocated_percent >= 95.4
