"""Placement: best fit, all or nothing, unknown is not free, and a reason for every refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement import GpuView, Placed, Refused, place, refusal


def gpu(index=0, free=10_000, node="n", usable=20_000, **fields):
    return GpuView(f"GPU-{node}-{index}", node, index, usable, usable - free, 0, **fields)


def chosen(answer):
    assert isinstance(answer, Placed), answer
    return [view.gpu_uuid for view in answer.gpus]


def test_the_smallest_hole_that_fits_is_taken():
    gpus = [gpu(0, 9000), gpu(1, 3000), gpu(2, 5000)]
    assert chosen(place(gpus, 4000)) == ["GPU-n-2"]
    assert chosen(place(gpus, 3000)) == ["GPU-n-1"]


def test_equal_holes_go_by_index_and_the_order_of_the_list_does_not_matter():
    gpus = [gpu(n) for n in range(4)]
    assert chosen(place(gpus, 10)) == chosen(place(gpus[::-1], 10)) == ["GPU-n-0"]


def test_several_gpus_come_from_one_node_or_not_at_all():
    spread = [gpu(0, node="a"), gpu(0, node="b")]
    assert isinstance(place(spread, 1000, gpu_count=2), Refused)
    pair = [*spread, gpu(1, 2000, node="b")]
    assert sorted(chosen(place(pair, 1000, gpu_count=2))) == ["GPU-b-0", "GPU-b-1"]
    assert isinstance(place(pair, 2001, gpu_count=2), Refused)


def test_the_node_with_the_least_room_that_fits_is_taken():
    gpus = [gpu(0, 9000, "a"), gpu(1, 9000, "a"), gpu(0, 5000, "b"), gpu(1, 5000, "b")]
    assert chosen(place(gpus, 1000, gpu_count=2)) == ["GPU-b-0", "GPU-b-1"]


def test_a_wish_for_a_node_is_kept():
    gpus = [gpu(0, 5000, "a"), gpu(0, 9000, "b")]
    assert chosen(place(gpus, 1000, node_id="b")) == ["GPU-b-0"]
    assert place(gpus, 1000, node_id="c") == Refused("no GPU is known on node c")


def test_foreign_memory_is_not_ours():
    view = GpuView("u", "n", 0, usable_mb=10_000, leased_mb=1000, foreign_mb=4000)
    assert view.free_mb == 5000
    assert isinstance(place([view], 5001), Refused)
    assert isinstance(place([view], 5000), Placed)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fresh": False}, "its last sample is stale"),
        ({"health": "lost"}, "it is lost"),
        ({"health": "quarantined"}, "it is quarantined"),
        ({"free": 10}, "10 of 20000 MB free"),
        ({"free": -500}, "0 of 20000 MB free"),
    ],
)
def test_a_refusal_says_why(fields, reason):
    view = gpu(**fields)
    assert refusal(view, 100) == reason
    assert place([view], 100) == Refused(f"needs 100 MB; n/0: {reason}")


def test_a_refusal_shows_a_few_gpus_and_counts_the_rest():
    answer = place([gpu(n, 10) for n in range(9)], 100)
    assert isinstance(answer, Refused)
    assert answer.reason.endswith("n/3: 10 of 20000 MB free and 5 more")


def test_a_refusal_of_several_says_which_would_fit():
    answer = place([gpu(0, 500), gpu(1, 50)], 100, gpu_count=2)
    assert answer == Refused("needs 100 MB on each of 2 GPUs of one node; n/0: fits, n/1: 50 of 20000 MB free")


def test_without_any_gpu():
    assert place([], 1) == Refused("no GPU is known on the cluster")


VIEWS = st.builds(
    GpuView,
    st.uuids().map(str),
    st.sampled_from("ab"),
    st.integers(0, 7),
    usable_mb=st.integers(0, 100),
    leased_mb=st.integers(0, 120),
    foreign_mb=st.integers(0, 120),
    health=st.sampled_from(["ok", "ok", "ok", "lost"]),
    fresh=st.sampled_from([True, True, False]),
)


@given(
    st.lists(VIEWS, max_size=8, unique_by=lambda view: view.gpu_uuid),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3)), max_size=12),
)
def test_no_sequence_of_placements_exceeds_a_gpu(views, requests):
    current = {view.gpu_uuid: view for view in views}
    for memory, count in requests:
        answer = place(list(current.values()), memory, count)
        fitting = [v for v in current.values() if v.fresh and v.health == "ok" and v.free_mb >= memory]
        if isinstance(answer, Refused):
            assert all(sum(v.node_id == node for v in fitting) < count for node in "ab")
            continue
        assert len({view.gpu_uuid for view in answer.gpus}) == count
        assert len({view.node_id for view in answer.gpus}) == 1
        for view in answer.gpus:
            assert view in fitting
            current[view.gpu_uuid] = view.with_lease(memory)
    for view in views:
        grown = current[view.gpu_uuid].leased_mb - view.leased_mb
        assert grown == 0 or current[view.gpu_uuid].free_mb >= 0
