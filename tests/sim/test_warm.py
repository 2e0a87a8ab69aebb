"""The promises of warm pools: fewer loads than queues need without them, no longer waits, and nobody starves."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.warmth import Terms, decide, worth
from tests.sim import requests
from tests.sim.bars import draw
from tests.sim.pools import TICK_S, Simulation
from tests.sim.queues import fewest_in_any_order, fewest_in_order, fifo, pace
from tests.sim.requests import Request, compressed, levelled
from tests.sim.warm import AIM, LOAD_S, Row, quantile, verdict

SOME = st.lists(st.tuples(st.floats(0, 60), st.sampled_from("abcdef"), st.floats(1, 30)), min_size=1, max_size=40).map(
    lambda rows: [Request(at_s, model, run_s) for at_s, (_, model, run_s) in zip(_times(rows), rows, strict=True)]
)
LOADS = dict.fromkeys("abcdef", 10.0)


def _times(rows):
    return itertools.accumulate(gap_s for gap_s, _, _ in rows)


def sequence(models):
    return [Request(float(number), model, 1.0) for number, model in enumerate(models)]


def test_belady_by_hand():
    assert fewest_in_order(sequence("abcabc"), 2) == 4
    assert fewest_in_order(sequence("aabbaa"), 1) == 3
    assert fewest_in_order(sequence("abab"), 2) == 2


@settings(max_examples=60)
@given(SOME, st.integers(1, 3))
def test_nobody_comes_below_the_bounds(some, gpus):
    replays = [
        fifo(some, gpus, LOADS),
        fifo(some, gpus, LOADS, affinity=True),
        Simulation(gpus, LOADS).replay(some),
    ]
    for replay in replays[:2]:
        assert replay.loads >= fewest_in_order(some, gpus)
    for replay in replays:
        assert len(replay.waits_s) == len(some)
        assert replay.loads >= fewest_in_any_order(some, gpus, max(replay.waits_s))


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 5), st.floats(0.5, 1.0), st.floats(5, 40), st.floats(0, 600))
def test_a_flood_of_hot_jobs_starves_nobody(gpus, colds, load, run_s, begin_s):
    """The bound stated in `worth`, for jobs of models that nobody has loaded, arriving all at once into a flood."""
    every_s = run_s / gpus / load
    hot = [Request(number * every_s, "hot", run_s) for number in range(int(3000 / every_s))]
    cold = [Request(begin_s, f"cold{number}", run_s) for number in range(colds)]
    terms = Terms(resident_min_s=30, patience_s=60)
    load_s = {one.model: 10.0 for one in [*hot, *cold]}
    lines: list[worth.Line] = []

    def noting(pools, workers, cluster, terms):
        lines.append(worth.Line.of(pools, len(workers)))
        return decide(pools, workers, cluster, terms)

    waits_s = _waits_by_model(sorted([*hot, *cold]), gpus, load_s, terms, noting)
    overdue_s = max(*(line.due_s(terms) for line in lines), worth.UNFAIR * max(waits_s["hot"]))
    turn_s = terms.resident_min_s + 10.0 + run_s + TICK_S
    assert max(max(waits_s[one.model]) for one in cold) <= overdue_s + turn_s * colds + turn_s


def _waits_by_model(some, gpus, load_s, terms, decide):
    found: dict[str, list[float]] = {one.model: [] for one in some}

    class Noting(Simulation):
        def _run(self, slot):
            found[slot.lane.model].append(self.now_s - slot.lane.waiting[0].at_s)
            super()._run(slot)

    Noting(gpus, load_s, terms, decide).replay(some)
    return found


def test_an_hour_takes_as_long_as_its_work():
    some = [Request(0.0, "a", 10.0), Request(1800.0, "a", 30.0), Request(7200.0, "a", 5.0)]
    assert [one.at_s for one in levelled(some)] == [0.0, 20.0, 40.0]


@pytest.mark.parametrize(("loads", "p99_s", "met"), [(AIM, 9, True), (AIM + 0.01, 9, False), (AIM, 11, False)])
def test_the_aim_is_met_by_few_loads_and_no_longer_waits(loads, p99_s, met):
    rows = [Row("FIFO", 9, 3, 1, 1, 10, 1, 1, 1), Row("ours", 9, loads, 1, 1, p99_s, 1, 1, 1)]
    assert verdict(rows).startswith("aim met" if met else "aim NOT met")


def test_a_picture_shows_every_policy():
    rows = [Row(name, 10**n, 1, 1, 1, 10.0**n, 1, 1, 1) for n, name in enumerate(("FIFO", "LRU", "ours"), start=1)]
    picture = draw({"4 GPUs <&>": rows})
    assert picture.startswith("<svg") and picture.endswith("</svg>\n")
    assert "4 GPUs &lt;&amp;&gt;" in picture and "1,000" in picture


@pytest.mark.skipif(requests.absent() is not None, reason=f"the trace is absent: {requests.absent()}")
def test_a_part_of_the_trace_needs_a_fraction_of_the_loads_and_no_longer_waits():
    some = requests.requests()
    assert (len(some), len({one.model for one in some})) == (26_793, 86)
    some = levelled(some[10_000:12_000])
    load_s = dict.fromkeys({one.model for one in some}, LOAD_S)
    some = compressed(some, pace(some, 8, load_s, 0.75))
    plain, ours = fifo(some, 8, load_s), Simulation(8, load_s).replay(some)
    assert ours.loads < plain.loads / 2
    assert quantile(sorted(ours.waits_s), 0.99) <= quantile(sorted(plain.waits_s), 0.99)
