"""Warmth: who gets a worker and who leaves for it. Lawful, without flapping, and nobody starves."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.placement import Ask, Cluster, GpuView
from orchestrator.warmth import Average, Pool, Rate, State, Terms, Worker, decide, worth

TERMS = Terms(resident_min_s=30, patience_s=60)


def pool(name, *, mb=10, gpus=1, **fields):
    return Pool(name, Ask(mb, gpus), **{"max_workers": 4, "run_s": 10.0, "load_s": 20.0, **fields})


def worker(key, name, *gpus, mb=10, state=State.IDLE, idle_s=100.0, resident_s=1000.0, leaving=False):
    idle_s = idle_s if state is State.IDLE else 0.0
    return Worker(key, name, tuple(f"g{gpu}" for gpu in gpus), mb, state, idle_s, resident_s, leaving)


def cluster(count, workers=(), mb=10):
    """GPUs of one node, with what the workers hold."""
    held = {f"g{n}": sum(one.memory_mb for one in workers if f"g{n}" in one.gpu_uuids) for n in range(count)}
    return Cluster(GpuView(uuid, "n", n, mb, held[uuid], 0) for n, uuid in enumerate(held))


def decided(pools, workers=(), gpus=1):
    return decide(pools, workers, cluster(gpus, workers), TERMS)


def started(decision):
    return [start.pool_id for start in decision.starts]


def left(decision):
    return [leave.key for leave in decision.leaves]


def test_a_cold_pool_starts_where_there_is_room_with_a_reason():
    decision = decided([pool("a", waiting=2, oldest_wait_s=3)])
    (start,) = decision.starts
    assert start.placed.gpus[0].gpu_uuid == "g0"
    assert start.reason == decision.sizes["a"].reason == "2 jobs wait, the oldest for 3 s"
    assert decision.sizes["a"].workers == 1


def test_nobody_starts_without_work_except_for_a_minimum():
    decision = decided([pool("a"), pool("b", min_workers=2)], gpus=4)
    assert started(decision) == ["b", "b"]
    assert decision.starts[0].reason == "0 of at least 2 workers"


def test_a_minimum_comes_before_those_who_wait():
    assert started(decided([pool("a", waiting=9, oldest_wait_s=999), pool("b", min_workers=1)])) == ["b"]


def test_workers_are_added_only_while_those_present_would_need_long():
    short = pool("a", waiting=8, oldest_wait_s=10)
    long = replace(short, waiting=40)
    here = [worker("w", "a", 0, state=State.BUSY)]
    assert started(decided([short], here, gpus=4)) == []
    assert started(decided([replace(short, waiting=9)], here, gpus=4)) == ["a"]
    assert 1 <= len(started(decided([long], here, gpus=4))) <= 3
    assert started(decided([replace(long, max_workers=1)], here, gpus=4)) == []


def test_a_worker_that_loads_is_not_started_twice():
    here = [worker("w", "a", 0, state=State.LOADING, resident_s=0)]
    assert started(decided([pool("a", waiting=1, oldest_wait_s=500)], here, gpus=4)) == []


def test_a_cold_job_waits_until_a_swap_pays_then_the_least_asked_for_leaves():
    warm = [worker("w1", "often", 0, idle_s=500), worker("w2", "seldom", 1, idle_s=5)]
    rates = [pool("often", arrivals_per_s=0.1), pool("seldom", arrivals_per_s=0.0001)]
    young = decided([*rates, pool("cold", waiting=1, oldest_wait_s=1)], warm, gpus=2)
    assert left(young) == []
    assert "nobody who would leave" in young.sizes["cold"].reason
    # Half a job waits for each worker, so a second of loading costs 1.5: of its own 20, and of 6 that will be missed.
    assert left(decided([*rates, pool("cold", waiting=1, oldest_wait_s=39)], warm, gpus=2)) == []
    (leave,) = decided([*rates, pool("cold", waiting=1, oldest_wait_s=40)], warm, gpus=2).leaves
    assert (leave.key, leave.idle, leave.room_for) == ("w2", True, "cold")
    assert leave.reason == "cold needs the room: 1 jobs wait, the oldest for 40 s"


def test_a_surplus_worker_goes_before_the_only_one():
    warm = [worker("w1", "two", 0), worker("w2", "two", 1), worker("w3", "one", 2)]
    pools = [pool("two", arrivals_per_s=0.01), pool("one", arrivals_per_s=0.01)]
    assert left(decided([*pools, pool("cold", waiting=1, oldest_wait_s=59)], warm, gpus=3)) in (["w1"], ["w2"])


def test_room_that_is_being_made_is_waited_for():
    pools = [pool("a"), pool("cold", waiting=1, oldest_wait_s=500)]
    here = [worker("w1", "a", 0, leaving=True), worker("w2", "a", 1)]
    decision = decided(pools, here, gpus=2)
    assert (started(decision), left(decision)) == ([], [])
    assert decision.sizes["cold"].workers == 1
    assert decision.sizes["cold"].reason.endswith("room is being made")


def test_warm_models_serve_what_is_queued_for_them_until_a_cold_job_is_overdue():
    hot = pool("hot", waiting=2, oldest_wait_s=20, arrivals_per_s=1)
    here = [worker("w", "hot", 0, state=State.BUSY)]
    # One queue would take 3 × (10 + 20) s; twice that is too long, and so is twice as long as the others wait.
    assert left(decided([hot, pool("cold", waiting=1, oldest_wait_s=179)], here)) == []
    (leave,) = decided([hot, pool("cold", waiting=1, oldest_wait_s=180)], here).leaves
    assert (leave.key, leave.idle) == ("w", False)
    assert left(decided([replace(hot, oldest_wait_s=91), pool("cold", waiting=1, oldest_wait_s=180)], here)) == []


def test_with_a_short_line_a_cold_job_is_overdue_when_its_patience_ends():
    hot = pool("hot", waiting=2, oldest_wait_s=20, max_workers=8)
    here = [worker(f"w{n}", "hot", n, state=State.BUSY) for n in range(8)]
    assert left(decided([hot, pool("cold", waiting=1, oldest_wait_s=59)], here, gpus=8)) == []
    assert len(left(decided([hot, pool("cold", waiting=1, oldest_wait_s=60)], here, gpus=8))) == 1


def test_in_a_jam_pools_wait_until_more_of_their_jobs_share_a_load():
    warm = [worker("w1", "a", 0), worker("w2", "jam", 1, state=State.BUSY)]
    cold = pool("cold", waiting=1, oldest_wait_s=100)
    calm, jammed = pool("jam", waiting=1), pool("jam", waiting=500, oldest_wait_s=2000, max_workers=1)
    assert left(decided([pool("a"), cold, calm], warm, gpus=2)) == ["w1"]
    assert left(decided([pool("a"), cold, jammed], warm, gpus=2)) == []
    assert left(decided([pool("a"), replace(cold, waiting=200, oldest_wait_s=2000), jammed], warm, gpus=2)) == ["w1"]


@pytest.mark.parametrize(
    ("owner", "state"),
    [
        ({"pinned": True}, {}),
        ({"min_workers": 1}, {}),
        ({}, {"resident_s": 29.0}),
        ({}, {"state": State.LOADING, "resident_s": 0.0}),
    ],
)
def test_who_must_stay_stays_however_long_others_wait(owner, state):
    pools = [pool("a", **owner), pool("cold", waiting=100, oldest_wait_s=1e6)]
    assert left(decided(pools, [worker("w", "a", 0, **state)])) == []


def test_idle_workers_leave_after_their_hold_down_to_the_minimum():
    here = [worker(f"w{n}", "a", n, idle_s=100 * n) for n in range(4)]
    held = decided([pool("a", hold_s=150)], here, gpus=4)
    assert left(held) == ["w3", "w2"]
    assert held.leaves[0].reason == "idle for 300 s"
    assert held.sizes["a"].workers == 2
    assert left(decided([pool("a", hold_s=0, min_workers=3)], here, gpus=4)) == ["w3"]
    assert left(decided([pool("a", hold_s=0, pinned=True)], here, gpus=4)) == []


def test_workers_beyond_the_maximum_and_of_drained_pools_leave_the_idle_first():
    here = [worker("busy", "a", 0, state=State.BUSY), worker("idle", "a", 1)]
    assert left(decided([pool("a", max_workers=1)], here, gpus=2)) == ["idle"]
    drained = decided([pool("a", min_workers=2, drained=True, waiting=5)], here, gpus=2)
    assert [(leave.key, leave.idle) for leave in drained.leaves] == [("idle", True), ("busy", False)]
    assert drained.sizes["a"] == (0, "drained")
    assert left(decided([], here, gpus=2)) == ["idle", "busy"]


def test_several_gpus_are_made_free_together():
    here = [worker("w0", "a", 0), worker("w1", "b", 1), worker("w2", "c", 2, state=State.BUSY)]
    wide = pool("wide", gpus=2, waiting=1, oldest_wait_s=50)
    assert sorted(left(decided([pool("a"), pool("b"), pool("c"), wide], here, gpus=3))) == ["w0", "w1"]


def test_a_rate_fades_and_an_average_moves():
    rate = Rate()
    for second in range(0, 36_000, 10):
        rate.add(second)
    assert rate.per_s(36_000) == pytest.approx(0.1, rel=0.01)
    assert rate.per_s(36_000 + 3600) == pytest.approx(0.1 / 2.718, rel=0.01)
    average = Average(30.0)
    average.add(10.0)
    assert average.value == 10.0
    average.add(20.0)
    assert average.value == 12.0


def test_the_part_that_finds_all_servers_busy():
    assert worth.blocked(5.0, 0) == 1.0
    assert worth.blocked(1.0, 1) == 0.5
    assert worth.blocked(2.0, 2) == pytest.approx(0.4)


NAMES = "abcd"
GPUS = 5
# Made once: drawing takes most of the time of what follows, and making what is drawn from takes a part of that.
SELDOM = st.sampled_from([False, False, False, True])
POOLS = [
    st.builds(
        pool,
        st.just(name),
        mb=st.sampled_from([4, 5, 10]),
        gpus=st.integers(1, 2),
        min_workers=st.integers(0, 2),
        max_workers=st.integers(2, 4),
        hold_s=st.sampled_from([0.0, 50.0, 1e9]),
        pinned=SELDOM,
        drained=SELDOM,
        waiting=st.integers(0, 60),
        oldest_wait_s=st.floats(0, 4000),
        arrivals_per_s=st.floats(0, 1),
    )
    for name in NAMES
]
OWNERS = st.lists(st.integers(0, len(NAMES) - 1), max_size=8)
ANY, AT_WORK = st.sampled_from(list(State)), st.sampled_from([State.BUSY, State.LOADING])
IDLE_S, RESIDENT_S = st.floats(0, 100), st.sampled_from([0.0, 29.0, 30.0, 500.0])


@st.composite
def scenes(draw):
    pools = [draw(one) for one in POOLS]
    workers, free = [], dict.fromkeys(range(GPUS), 10)
    for number, place in enumerate(draw(OWNERS)):
        owner = pools[place]
        room = [gpu for gpu, mb in free.items() if mb >= owner.ask.memory_mb][: owner.ask.gpu_count]
        if len(room) < owner.ask.gpu_count:
            continue
        for gpu in room:
            free[gpu] -= owner.ask.memory_mb
        workers.append(
            worker(
                f"w{number}",
                owner.pool_id,
                *room,
                mb=owner.ask.memory_mb,
                state=draw(AT_WORK if owner.waiting else ANY),
                idle_s=draw(IDLE_S),
                resident_s=draw(RESIDENT_S),
                leaving=draw(SELDOM),
            )
        )
    return pools, workers


@settings(max_examples=300)
@given(scenes())
def test_a_decision_is_lawful(scene):
    pools, workers = scene
    decision = decided(pools, workers, GPUS)
    by_key, by_name = {one.key: one for one in workers}, {one.pool_id: one for one in pools}
    assert len(set(left(decision))) == len(left(decision))
    for leave in decision.leaves:
        one, owner = by_key[leave.key], by_name[leave.pool_id]
        assert not one.leaving
        assert leave.reason
        assert leave.idle == (one.state is State.IDLE)
        if leave.room_for:
            assert not owner.pinned and leave.room_for != leave.pool_id
            assert one.state is not State.LOADING and one.resident_s >= TERMS.resident_min_s
            taker = by_name[leave.room_for]
            if one.state is State.BUSY:
                assert taker.oldest_wait_s >= TERMS.patience_s
                assert taker.oldest_wait_s > owner.oldest_wait_s
    for one in pools:
        staying = [w for w in workers if w.pool_id == one.pool_id and not w.leaving and w.key not in left(decision)]
        came, present = (
            started(decision).count(one.pool_id),
            sum(w.pool_id == one.pool_id and not w.leaving for w in workers),
        )
        size = decision.sizes[one.pool_id]
        assert size.reason
        assert len(staying) + came <= size.workers <= max(one.max_workers, 0)
        if one.drained:
            assert size.workers == 0
        else:
            assert len(staying) >= min(one.min_workers, present), "nobody is sent below a minimum"


@settings(max_examples=100)
@given(scenes(), st.randoms(use_true_random=False))
def test_the_same_facts_in_any_order_lead_to_the_same_decision(scene, chance):
    pools, workers = scene
    shuffled = decide(
        chance.sample(pools, len(pools)), chance.sample(workers, len(workers)), cluster(GPUS, workers), TERMS
    )
    assert shuffled == decided(pools, workers, GPUS)


@settings(max_examples=200)
@given(scenes())
def test_while_nothing_changes_decisions_come_to_rest(scene):
    """No flapping: what one decision starts, no later one of the same demand sends away again and again."""
    pools, workers = scene
    number = 0
    decision = decided(pools, workers, GPUS)
    for _ in range(30):
        decision = decided(pools, workers, GPUS)
        if not decision.starts and not decision.leaves and not any(one.leaving for one in workers):
            return
        gone = {*left(decision), *(one.key for one in workers if one.leaving)}
        workers = [_later(one, pools) for one in workers if one.key not in gone]
        for start in decision.starts:
            number += 1
            gpus = [int(view.gpu_uuid[1:]) for view in start.placed.gpus]
            mb = next(one.ask.memory_mb for one in pools if one.pool_id == start.pool_id)
            fresh = worker(f"new{number}", start.pool_id, *gpus, mb=mb, state=State.LOADING, resident_s=0.0)
            workers.append(fresh)
    pytest.fail(f"still not at rest: {decision}")


def _later(one, pools):
    """A minute on, it has loaded, and works if there is work."""
    has_work = any(owner.pool_id == one.pool_id and owner.waiting for owner in pools)
    return replace(one, state=State.BUSY if has_work else State.IDLE, idle_s=0.0, resident_s=one.resident_s + 60)


def test_a_crowd_is_told_apart_by_name_only():
    """Equal pools are served in the order of their names, whatever the order in which they are listed."""
    pools = [pool(f"p{n}", waiting=1, oldest_wait_s=5) for n in range(9)]
    random.Random(1).shuffle(pools)
    assert started(decided(pools, gpus=3)) == ["p0", "p1", "p2"]
