"""Plans when GPU memory is short: who waits moves where there is room, and old models make room for new ones."""

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.crews import Crew, NodeView, Plan, PoolView, plan
from orchestrator.placement import Cluster, GpuView
from orchestrator.placement.node import Node
from orchestrator.pools import PoolState

NODES = [NodeView("a"), NodeView("b")]


def pool(**given: object) -> PoolView:
    usual = PoolView("chat", PoolState.RUNNING, 1, 2, 0, 1, 600.0, memory_mb=4000)
    return replace(usual, **given)  # type: ignore[arg-type]


def planned(view: PoolView, free_mb: dict[str, int]) -> Plan:
    gpus = [GpuView(f"GPU-{node}", node, 0, 20_000, 20_000 - free, 0) for node, free in free_mb.items()]
    return plan([view], NODES, Cluster(gpus))[0]


def test_a_worker_without_room_moves_although_another_of_its_pool_is_ready_beside_it():
    view = pool(assigned={("a", 1): 2}, crews=(Crew("w", "a", 1, 2, ready=1, blocked=True),))
    assert planned(view, {"a": 0, "b": 8000}).assigned == {("a", 1): 1, ("b", 1): 1}


def test_a_worker_of_which_a_slot_is_ready_stays():
    view = pool(desired=1, slots=2, assigned={("a", 1): 1}, crews=(Crew("w", "a", 1, 2, ready=1, blocked=True),))
    assert planned(view, {"a": 0, "b": 8000}).assigned == {("a", 1): 1}


def test_nobody_moves_to_where_there_is_no_room_either():
    view = pool(assigned={("a", 1): 2}, crews=(Crew("w", "a", 1, 2, ready=1, blocked=True),))
    assert planned(view, {"a": 0, "b": 1000}).assigned == {("a", 1): 2}


def swapping(view: PoolView, *guests: Crew) -> PoolView:
    """As the next look finds it: what was let go is gone, and the new model waits for memory still."""
    decided = planned(view, {"a": 0, "b": 0}).assigned
    old = sum(count for (_, revision), count in decided.items() if revision == 1)
    crews = (Crew("old", "a", 1, old, ready=old),) if old else ()
    return replace(view, assigned=decided, crews=(*crews, Crew("new", "a", 2, 3, blocked=True), *guests))


def test_old_models_leave_one_after_the_other_as_long_as_the_new_one_waits_for_memory():
    """The new one may be larger than the old: one that leaves need not make room enough."""
    view = pool(revision=2, desired=3, assigned={("a", 1): 3, ("a", 2): 3})
    view = replace(view, crews=(Crew("old", "a", 1, 3, ready=3), Crew("new", "a", 2, 3, blocked=True)))
    left = []
    for _ in range(4):
        view = swapping(view)
        left.append(view.assigned.get(("a", 1), 0))
    assert left == [2, 1, 0, 0]


@pytest.mark.parametrize(
    "guest",
    [
        Crew("http", "a", 0, 4, fetches=True),
        Crew("http", "(none)", 0, 4, busy=4, fetches=True),
        Crew("--pool, before the pool", "a", 0, 4),
        Crew("--pool, elsewhere", "c", 1, 4, ready=4),
        Crew("--pool, follows the swap", "a", 2, 4, ready=4),
    ],
    ids=lambda crew: f"{crew.worker_id}-{crew.node_id}",
)
def test_workers_that_no_plan_sent_do_not_pass_for_old_models_on_their_way_out(guest):
    view = pool(revision=2, desired=3, assigned={("a", 1): 3, ("b", 2): 3})
    view = replace(view, crews=(Crew("old", "a", 1, 3, ready=3), Crew("new", "b", 2, 3, blocked=True), guest))
    left = []
    for _ in range(4):
        view = swapping(view, guest)
        left.append(sum(count for (_, revision), count in view.assigned.items() if revision == 1))
    assert left == [2, 1, 0, 0]


def test_no_further_old_model_leaves_while_one_is_on_its_way_out():
    view = pool(revision=2, desired=2, assigned={("b", 1): 1, ("a", 2): 2})
    parting = Crew("parting", "a", 1, 1)
    view = replace(view, crews=(parting, Crew("old", "b", 1, 1, ready=1), Crew("new", "a", 2, 2, blocked=True)))
    assert planned(view, {"a": 0, "b": 0}).assigned == {("b", 1): 1, ("a", 2): 2}


def test_a_worker_needs_room_for_all_of_its_slots():
    view = pool(desired=1, slots=3)
    assert planned(view, {"a": 8000, "b": 12_000}).assigned == {("b", 1): 1}


def test_a_worker_that_fits_nowhere_as_a_whole_goes_where_most_of_it_fits():
    view = pool(desired=1, slots=3)
    assert planned(view, {"a": 4000, "b": 8000}).assigned == {("b", 1): 1}


def test_what_a_worker_of_several_slots_takes_is_not_promised_to_the_next():
    first, second = pool(pool_id="first", desired=1, slots=3), pool(pool_id="second", desired=1)
    gpus = [
        GpuView(f"GPU-{node}", node, 0, 20_000, 20_000 - free, 0) for node, free in {"a": 4000, "b": 12_000}.items()
    ]
    assert [one.assigned for one in plan([first, second], NODES, Cluster(gpus))] == [{("b", 1): 1}, {("a", 1): 1}]


@pytest.mark.parametrize("free_mb", [0, 3 * 4000])
def test_a_full_cluster_is_not_looked_through_for_every_worker(monkeypatch, free_mb):
    looks: Counter[str] = Counter()
    fits = Node.fits

    def counted(node, ask):
        looks[node.node_id] += 1
        return fits(node, ask)

    monkeypatch.setattr(Node, "fits", counted)
    where = [NodeView(f"n{n}") for n in range(50)]
    gpus = [GpuView(f"GPU-{node.node_id}", node.node_id, 0, free_mb, 0, 0) for node in where]
    view = pool(desired=200, slots=4)  # no node has room for a whole one
    assert sum(plan([view], where, Cluster(gpus))[0].assigned.values()) == 200
    assert max(looks.values()) < 40
