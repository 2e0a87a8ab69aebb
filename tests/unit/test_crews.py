"""Plans for pools: what each node should run, from any state, towards one that changes nothing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.crews import Crew, NodeView, Plan, PoolView, plan, wanted
from orchestrator.placement import Cluster, GpuView
from orchestrator.pools import CHILL, OPEN, STOP, WARM, PoolState

#: Passes in which any state must have come to rest: memory that one pool gives up may let another one move.
MAX_PASSES = 5


def pool(pool_id="p", state=PoolState.RUNNING, desired=2, minimum=0, slots=1, hold_s=60.0, revision=1, **fields):
    return PoolView(pool_id, state, revision, desired, minimum, slots, hold_s, **fields)


def crew(node, revision=1, workers=1, ready=1, slots=1, **fields):
    return Crew(f"{node}-{revision}", node, revision, workers * slots, ready=ready * slots, **fields)


def nodes(*names, types=frozenset({"echo"})):
    return [NodeView(name, types=types) for name in names]


def cluster(**free_mb):
    return Cluster([GpuView(f"GPU-{node}", node, 0, 100_000, 100_000 - free, 0) for node, free in free_mb.items()])


def plan_one(view, where, gpus=None):
    (decided,) = plan([view], where, gpus or Cluster([]))
    return decided


def applied(view: PoolView, decided: Plan) -> PoolView:
    """The pool as it is read once the plan is written; its workers have not moved yet."""
    state = decided.arrow.target if decided.arrow else view.state
    return replace(
        view, state=state, assigned=decided.assigned, spawned=decided.spawned, reason=decided.reason, idle_s=view.idle_s
    )


def settled(view: PoolView) -> PoolView:
    """Every node runs what it should; workers of a closed pool leave."""
    places = view.assigned.items() if view.state in OPEN else ()
    crews = [crew(node, revision, count, count, view.slots) for (node, revision), count in places]
    return replace(view, crews=tuple(crews))


# --- how many ---


def test_a_pool_has_all_its_workers_until_it_was_idle_for_too_long():
    assert wanted(pool(desired=3, minimum=1, idle_s=59.9)) == 3
    assert wanted(pool(desired=3, minimum=1, idle_s=60.0)) == 1
    assert wanted(pool(desired=3, minimum=1, idle_s=60.0, in_demand=True)) == 3
    assert wanted(pool(desired=3, minimum=1, idle_s=60.0, crews=(crew("a", busy=1),))) == 3


@pytest.mark.parametrize("state", [PoolState.DRAINING, PoolState.STOPPED, PoolState.EVICTED])
def test_a_pool_that_is_not_open_wants_nobody(state):
    assert wanted(pool(state=state, in_demand=True)) == 0


def test_an_idle_pool_shrinks_to_its_least_and_comes_back_on_demand():
    view = settled(pool(desired=3, minimum=1, assigned={("a", 1): 2, ("b", 1): 1}, idle_s=99.0))
    idle = plan_one(view, nodes("a", "b"))
    assert (sum(idle.assigned.values()), idle.arrow) == (1, None)
    back = plan_one(replace(settled(applied(view, idle)), in_demand=True), nodes("a", "b"))
    assert sum(back.assigned.values()) == 3


def test_a_pool_of_none_is_up_at_once_and_says_why_it_is_empty():
    asleep = plan_one(pool(state=PoolState.STARTING, idle_s=99.0), nodes("a"))
    assert (asleep.arrow, asleep.assigned, asleep.reason) == (WARM, {}, "idle; the next job starts it")
    assert plan_one(pool(desired=0), nodes("a")).reason == "no workers are wanted"


def test_a_pool_that_sizes_itself_is_told_its_size():
    (decided,) = plan([pool(desired=1)], nodes("a"), Cluster([]), {"p": 3})
    assert decided.assigned == {("a", 1): 3}
    (closed,) = plan([pool(state=PoolState.DRAINING)], nodes("a"), Cluster([]), {"p": 3})
    assert (closed.workers, closed.assigned) == (0, {})


# --- where ---


def test_workers_spread_over_nodes_that_have_the_handler():
    where = [*nodes("a", "b"), NodeView("c", types=frozenset({"other"})), NodeView("d", open=False)]
    assert plan_one(pool(desired=4, type="echo"), where).assigned == {("a", 1): 2, ("b", 1): 2}
    assert plan_one(pool(desired=3), where).assigned == {("a", 1): 1, ("b", 1): 1, ("c", 1): 1}


def test_without_a_node_the_reason_says_what_to_do():
    assert "gpuorch worker" in str(plan_one(pool(), []).reason)
    assert "gpuorch worker" in str(plan_one(pool(), [NodeView("a", open=False)]).reason)
    assert "'echo'" in str(plan_one(pool(type="echo"), nodes("a", types=frozenset())).reason)


def test_workers_go_where_the_memory_is():
    view = pool(desired=3, memory_mb=1000)
    assert plan_one(view, nodes("a", "b"), cluster(a=500, b=5000)).assigned == {("b", 1): 3}


def test_workers_that_are_still_to_come_have_their_memory():
    first = pool("a", desired=1, memory_mb=1000, assigned={("x", 1): 1})
    second = pool("b", desired=1, memory_mb=1000)
    plans = plan([first, second], nodes("x", "y"), cluster(x=1500, y=1500))
    assert [decided.assigned for decided in plans] == [{("x", 1): 1}, {("y", 1): 1}]


def test_a_worker_that_waits_for_memory_moves_to_where_there_is_some():
    stuck = crew("a", ready=0, blocked=True)
    view = pool(desired=1, memory_mb=1000, assigned={("a", 1): 1}, crews=(stuck,))
    assert plan_one(view, nodes("a", "b"), cluster(a=0, b=5000)).assigned == {("b", 1): 1}
    assert plan_one(view, nodes("a", "b"), cluster(a=0, b=500)).assigned == {("a", 1): 1}
    # Of two only the one that waits moves. One worker with a slot that is ready stays whole.
    half = replace(view, desired=2, assigned={("a", 1): 2}, crews=(replace(stuck, slots=2, ready=1),))
    assert plan_one(half, nodes("a", "b"), cluster(a=0, b=5000)).assigned == {("a", 1): 1, ("b", 1): 1}
    whole = replace(view, slots=2, crews=(replace(stuck, slots=2, ready=1),))
    assert plan_one(whole, nodes("a", "b"), cluster(a=0, b=5000)).assigned == {("a", 1): 1}


def test_a_worker_whose_need_only_its_handler_knows_does_not_go_round_and_round():
    view = pool(desired=1, assigned={("a", 1): 1}, crews=(crew("a", ready=0, blocked=True),))
    assert plan_one(view, nodes("a", "b"), cluster(a=0, b=0)).assigned == {("a", 1): 1}


def test_who_leaves_is_who_is_missed_least():
    crews = (crew("a", ready=1, busy=1), crew("b", ready=0), crew("c", ready=1))
    view = pool(desired=2, assigned={("a", 1): 1, ("b", 1): 1, ("c", 1): 1}, crews=crews)
    assert plan_one(view, nodes("a", "b", "c")).assigned == {("a", 1): 1, ("c", 1): 1}
    assert plan_one(replace(view, desired=1), nodes("a", "b", "c")).assigned == {("a", 1): 1}


def test_after_a_node_is_lost_or_drained_all_is_assigned_elsewhere():
    view = settled(pool(desired=2, assigned={("a", 1): 1, ("b", 1): 1}))
    for where in (nodes("b", "c"), [NodeView("a", open=False), *nodes("b", "c")]):
        assert plan_one(view, where).assigned == {("b", 1): 1, ("c", 1): 1}


def test_pools_of_other_providers_are_assigned_to_no_node():
    decided = plan_one(pool(provider="external", desired=3), nodes("a"))
    assert (decided.workers, decided.assigned) == (3, {})


# --- swaps ---


def test_old_workers_leave_as_new_ones_become_ready_and_no_sooner():
    old = {("a", 1): 1, ("b", 1): 1}
    view = pool(revision=2, assigned=old, crews=(crew("a"), crew("b")))
    where = nodes("a", "b")
    begun = plan_one(view, where)
    assert begun.assigned == old | {("a", 2): 1, ("b", 2): 1}
    half = replace(applied(view, begun), crews=(crew("a"), crew("b"), crew("a", 2)))
    assert plan_one(half, where).assigned == {("a", 2): 1, ("b", 2): 1, ("b", 1): 1}
    whole = replace(half, crews=(*half.crews, crew("b", 2)))
    assert plan_one(whole, where).assigned == {("a", 2): 1, ("b", 2): 1}


def test_one_old_worker_leaves_early_when_the_new_one_waits_for_its_memory():
    view = pool(revision=2, assigned={("a", 1): 2, ("a", 2): 2}, crews=(crew("a", workers=2, ready=2),))
    blocked = replace(view, crews=(*view.crews, crew("a", 2, ready=0, blocked=True)))
    assert plan_one(view, nodes("a")).assigned[("a", 1)] == 2
    assert plan_one(blocked, nodes("a")).assigned[("a", 1)] == 1


def test_of_the_old_ones_those_that_never_came_up_leave_first():
    crews = (crew("a", ready=1), crew("b", workers=2, ready=0))
    view = pool(desired=1, revision=2, assigned={("a", 1): 1, ("b", 1): 2}, crews=crews)
    assert plan_one(view, nodes("a", "b")).assigned == {("a", 1): 1, ("a", 2): 1}


def test_a_new_model_of_another_type_lets_the_old_one_serve_where_only_that_is_known():
    where = [NodeView("a", types=frozenset({"old"})), NodeView("b", types=frozenset({"new"}))]
    view = pool(desired=1, revision=2, type="new", assigned={("a", 1): 1}, crews=(crew("a"),))
    assert plan_one(view, where).assigned == {("a", 1): 1, ("b", 2): 1}
    assert plan_one(view, where[:1]).assigned == {("a", 1): 1}


def test_a_new_worker_that_must_leave_does_not_let_an_old_one_go():
    where = [NodeView("a", open=False), *nodes("b")]
    view = pool(desired=1, revision=2, assigned={("a", 2): 1, ("b", 1): 1}, crews=(crew("a", 2), crew("b", 1)))
    assert plan_one(view, where).assigned == {("b", 1): 1, ("b", 2): 1}


# --- states ---


def test_states_follow_what_the_workers_are():
    cold = pool(state=PoolState.STARTING, assigned={("a", 1): 2})
    assert plan_one(cold, nodes("a")).arrow is None
    warm = replace(cold, crews=(crew("a", workers=2, ready=1),))
    decided = plan_one(warm, nodes("a"))
    assert (decided.arrow, decided.spawned, decided.reason) == (WARM, 1, "1 of 2 workers are ready")
    assert plan_one(replace(warm, state=PoolState.RUNNING, crews=()), nodes("a")).arrow is CHILL


def test_a_drained_pool_stops_when_its_last_worker_has_left():
    view = pool(state=PoolState.DRAINING, assigned={("a", 1): 1}, crews=(crew("a"),))
    leaving = plan_one(view, nodes("a"))
    assert (leaving.arrow, leaving.assigned, leaving.reason) == (None, view.assigned, "1 workers have not left yet")
    gone = plan_one(replace(view, crews=()), nodes("a"))
    assert (gone.arrow, gone.assigned, gone.reason) == (STOP, {}, None)


def test_an_idle_http_worker_is_not_in_the_way_of_the_end_of_a_drain():
    guest = replace(crew("a"), fetches=True, busy=1)
    view = pool(state=PoolState.DRAINING, crews=(guest,))
    working = plan_one(view, nodes("a"))
    assert (working.arrow, working.reason) == (None, "1 workers have not left yet")
    idle = plan_one(replace(view, assigned={("a", 1): 1}, crews=(replace(guest, busy=0),)), nodes("a"))
    assert (idle.arrow, idle.assigned, idle.reason) == (STOP, {}, None)


@pytest.mark.parametrize("state", [PoolState.STOPPED, PoolState.EVICTED])
def test_a_closed_pool_stays_closed_and_forgets_its_places_last(state):
    view = pool(state=state, assigned={("a", 1): 1}, crews=(crew("a"),))
    assert plan_one(view, nodes("a")).assigned == view.assigned
    assert plan_one(replace(view, crews=()), nodes("a")).assigned == {}
    assert plan_one(view, nodes("a")).arrow is None


def test_trouble_is_passed_on_to_people():
    view = pool(desired=1, crews=(crew("a", ready=0, trouble="no such model"),), assigned={("a", 1): 1})
    assert plan_one(view, nodes("a")).reason == "no such model"


@pytest.mark.parametrize("ready", [0, 1], ids=["blocked", "ready"])
def test_a_pool_that_no_node_could_ever_hold_says_so_until_one_comes(ready):
    """Its workers may be ready all the same: a handler that loads nothing asks for memory with its first job."""
    there = crew("a", ready=ready, trouble=None if ready else "needs 99999 MB; a/0: 24000 of 24000 MB free")
    view = pool(desired=1, type="echo", memory_mb=100_001, assigned={("a", 1): 1}, crews=(there,))
    told = plan_one(view, nodes("a"), cluster(a=0))
    words = "needs 100001 MB, which fits no GPU that is known now: the largest can lease 100000 MB, on node a"
    assert told.reason == f"{words}; ask for less, or add a node that has it"
    assert not plan_one(applied(view, told), nodes("a"), cluster(a=0)).changes(applied(view, told))
    larger = GpuView("GPU-b", "b", 0, 200_000, 200_000, 0)  # full, for now
    assert plan_one(view, nodes("a"), Cluster([*cluster(a=0).gpus(), larger])).reason == there.trouble
    far = GpuView("GPU-a", "n" * 255, 0, 100_000, 0, 0)
    assert len(str(plan_one(view, nodes("a"), Cluster([far])).reason)) == 255, "as much as its column holds"
    idle = replace(view, idle_s=99.0, assigned={}, crews=())
    assert str(plan_one(idle, nodes("a"), cluster(a=0)).reason).startswith(words), "before somebody waits for it"


@pytest.mark.parametrize("provider", ["kubernetes", "external"])
def test_the_nodes_of_other_providers_may_yet_come_with_their_workers(provider):
    idle = pool(desired=1, type="echo", memory_mb=100_001, provider=provider, idle_s=99.0)
    assert plan_one(idle, nodes("a"), cluster(a=0)).reason == "idle; the next job starts it"


def test_use_is_noted_now_and_then_and_nothing_else_is_due():
    view = settled(pool(desired=1, assigned={("a", 1): 1}, spawned=1, in_demand=True))
    decided = plan_one(view, nodes("a"))
    assert not decided.is_due(view) and not decided.changes(view)
    assert decided.is_due(replace(view, idle_s=6.0)) and not decided.changes(replace(view, idle_s=6.0))
    assert not plan_one(replace(view, in_demand=False, idle_s=6.0), nodes("a")).is_due(replace(view, in_demand=False))


# --- from any state ---

NODES = ["n0", "n1", "n2"]
SOME_TYPES = st.sampled_from([frozenset(), frozenset({"echo"}), frozenset({"echo", "other"})])
node_lists = st.builds(
    lambda flags: [NodeView(name, is_open, types) for name, (is_open, types) in zip(NODES, flags, strict=True)],
    st.tuples(*[st.tuples(st.booleans(), SOME_TYPES) for _ in NODES]),
)
free_memory = st.fixed_dictionaries({name: st.integers(0, 4000) for name in NODES})
places = st.dictionaries(st.tuples(st.sampled_from(NODES), st.integers(1, 2)), st.integers(1, 3), max_size=4)


@st.composite
def views(draw, pool_id="p", states=tuple(PoolState)):
    assigned, slots = draw(places), draw(st.integers(1, 2))
    desired = draw(st.integers(0, 4))
    crews = [
        crew(node, revision, count, draw(st.integers(0, count)), slots, blocked=draw(st.booleans()))
        for (node, revision), count in draw(st.one_of(st.just(assigned), places)).items()
    ]
    return pool(
        pool_id,
        draw(st.sampled_from(states)),
        desired,
        draw(st.integers(0, desired)),
        slots,
        revision=draw(st.integers(1, 3)),
        type=draw(st.sampled_from([None, "echo", "unknown"])),
        memory_mb=draw(st.sampled_from([0, 1000])),
        idle_s=draw(st.sampled_from([0.0, 61.0])),
        in_demand=draw(st.booleans()),
        assigned=assigned,
        crews=tuple(replace(each, busy=draw(st.integers(0, each.ready))) for each in crews),
    )


two_pools = st.tuples(views("p"), views("q"))
a_lot = settings(max_examples=100)


@a_lot
@given(two_pools, node_lists, free_memory)
def test_repeated_plans_come_to_rest(found, where, free):
    now = list(found)
    for _ in range(MAX_PASSES):
        plans = plan(now, where, cluster(**free))
        if not any(decided.changes(view) for view, decided in zip(now, plans, strict=True)):
            return
        now = [applied(view, decided) for view, decided in zip(now, plans, strict=True)]
    pytest.fail(f"still changing after {MAX_PASSES} passes: {now}")


@a_lot
@given(views(), node_lists, free_memory)
def test_one_pool_is_at_rest_after_one_plan(view, where, free):
    # While a new model waits for memory the old ones leave one by one, a plan for each.
    view = replace(view, crews=tuple(replace(each, blocked=False) for each in view.crews))
    after = applied(view, plan_one(view, where, cluster(**free)))
    assert not plan_one(after, where, cluster(**free)).changes(after)


@a_lot
@given(two_pools, node_lists, free_memory)
def test_no_plan_asks_for_too_many_or_of_those_who_cannot(found, where, free):
    known = {node.node_id: node for node in where}
    for view, decided in zip(found, plan(list(found), where, cluster(**free)), strict=True):
        if view.state not in OPEN:
            assert decided.assigned in ({}, view.assigned) and decided.workers == 0
            continue
        current = {place: count for place, count in decided.assigned.items() if place[1] == view.revision}
        able = [node for node in where if node.open and (view.type is None or view.type in node.types)]
        assert sum(current.values()) == (wanted(view) if able else 0)
        assert all(count > 0 for count in decided.assigned.values())
        assert all(known[node].open for node, _ in decided.assigned)
        assert all(known[node] in able for node, _ in current)
        # Of older revisions nothing is ever begun.
        assert all(view.assigned.get(place, 0) >= n for place, n in decided.assigned.items() if place not in current)


def kept(view, assigned):
    """Ready workers that these assignments leave alone; slots that are not ready go first."""
    slots = sum(min(c.ready, assigned.get((c.node_id, c.revision), 0) * view.slots) for c in view.crews)
    return slots // view.slots


@a_lot
@given(views(states=tuple(OPEN)), st.sets(st.sampled_from(NODES)), free_memory)
def test_a_swap_never_costs_a_ready_worker_that_is_wanted(view, capable, free):
    where = [NodeView(name, types=frozenset({"echo", "unknown"} if name in capable else ())) for name in NODES]
    current = {place for place in view.assigned if place[1] == view.revision and place[0] not in capable}
    view = replace(
        view,
        crews=tuple(replace(each, blocked=False) for each in view.crews),
        # What a node without the handler runs of the new model is no matter of swaps.
        assigned={place: count for place, count in view.assigned.items() if place not in current},
    )
    decided = plan_one(view, where, cluster(**free))
    assert kept(view, decided.assigned) >= min(wanted(view), kept(view, view.assigned))


@a_lot
@given(two_pools, node_lists, free_memory)
def test_nodes_that_do_what_they_are_told_end_with_what_is_wanted(found, where, free):
    now = list(found)
    for _ in range(MAX_PASSES):
        plans = plan(now, where, cluster(**free))
        now = [settled(applied(view, decided)) for view, decided in zip(now, plans, strict=True)]
    for view in now:
        able = [node for node in where if node.open and (view.type is None or view.type in node.types)]
        of_now = sum(count for (_, revision), count in view.assigned.items() if revision == view.revision)
        assert of_now == (wanted(view) if able else 0)
        assert not able or all(revision == view.revision for _, revision in view.assigned)
        assert view.state not in OPEN or (view.state is PoolState.RUNNING) == (view.ready > 0 or not wanted(view))
