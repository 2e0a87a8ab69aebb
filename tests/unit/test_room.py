"""Making room: what a starving request reserves, and which idle models are unloaded for a waiting one."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement import Ask, Cluster, GpuView, HostView, Placed, Resident, evictions, refusal, reservation


def gpu(index=0, free=10_000, node="n", usable=20_000, **fields):
    return GpuView(f"GPU-{node}-{index}", node, index, usable, usable - free, 0, **fields)


def resident(key, *uuids, memory_mb=5000, idle_s=100.0, resident_s=1000.0, pinned=False):
    return Resident(key, uuids, memory_mb, idle_s, resident_s, pinned)


def keys(residents):
    return [one.key for one in residents]


def test_a_reservation_takes_what_lacks_least():
    cluster = Cluster([gpu(0, 100, "a"), gpu(0, 9000, "b"), gpu(1, 4000, "b")])
    assert reservation(cluster, Ask(15_000)) == (gpu(0, 9000, "b"),)
    assert reservation(cluster, Ask(15_000, gpu_count=2)) == (gpu(0, 9000, "b"), gpu(1, 4000, "b"))
    assert reservation(cluster, Ask(15_000, node_id="a")) == (gpu(0, 100, "a"),)


def test_nothing_is_reserved_that_could_never_hold_it():
    never = [
        gpu(0, usable=14_999),
        gpu(1, fresh=False),
        gpu(2, health="lost"),
        gpu(3, quarantined=True),
        gpu(4, reserved_for="other"),
        gpu(5)._replace(foreign_mb=5001),
        gpu(6, name="T4"),
    ]
    ask = Ask(15_000, key="me", models=frozenset({""}))
    assert reservation(Cluster(never), ask) is None
    assert reservation(Cluster([*never, gpu(7, reserved_for="me")]), ask) == (gpu(7, reserved_for="me"),)
    assert reservation(Cluster([gpu()]), Ask(15_000, gpu_count=2)) is None
    assert reservation(Cluster([gpu()]), Ask(0, gpu_count=0)) is None
    assert reservation(Cluster([gpu()]), Ask(15_000, node_id="x")) is None


def test_a_closed_gate_opens_again_but_an_open_one_is_better():
    assert reservation(Cluster([gpu(gated=True)]), Ask(15_000)) == (gpu(gated=True),)
    assert reservation(Cluster([gpu(0, gated=True), gpu(1, 0)]), Ask(15_000)) == (gpu(1, 0),)


def test_the_longest_idle_goes_first():
    cluster = Cluster([gpu(0, 0), gpu(1, 0)])
    residents = [resident("young", "GPU-n-0", idle_s=10), resident("old", "GPU-n-1", idle_s=90)]
    assert keys(evictions(cluster, Ask(5000), residents)) == ["old"]


def test_one_large_goes_rather_than_two_small():
    cluster = Cluster([gpu(0, 0), gpu(1, 0)])
    residents = [
        resident("small 1", "GPU-n-0", memory_mb=3000, idle_s=90),
        resident("small 2", "GPU-n-0", memory_mb=3000, idle_s=80),
        resident("large", "GPU-n-1", memory_mb=6000, idle_s=10),
    ]
    assert keys(evictions(cluster, Ask(6000), residents)) == ["large"]
    assert keys(evictions(cluster, Ask(6000), residents[:2])) == ["small 1", "small 2"]


def test_nobody_goes_for_nothing():
    full = Cluster([gpu(0, 0)])
    idle = resident("idle", "GPU-n-0")
    assert evictions(Cluster([gpu(0, 5000)]), Ask(5000), [idle]) == ()
    assert evictions(full, Ask(5001), [idle]) == ()
    assert evictions(full, Ask(5000), [replace(idle, pinned=True)]) == ()
    assert evictions(full, Ask(5000), [replace(idle, resident_s=59)], min_resident_s=60) == ()
    assert evictions(Cluster([gpu(0, 0, fresh=False)]), Ask(5000), [idle]) == ()
    assert evictions(full, Ask(5000, node_id="other"), [idle]) == ()
    assert evictions(Cluster([gpu(0, 0)], [HostView("n", 500)]), Ask(5000, cpu_milli=501), [idle]) == ()


def test_several_gpus_are_freed_together():
    cluster = Cluster([gpu(0, 0), gpu(1, 0), gpu(2, 0)])
    residents = [resident("wide", "GPU-n-0", "GPU-n-1", idle_s=5), resident("single", "GPU-n-2", idle_s=99)]
    assert keys(evictions(cluster, Ask(5000, gpu_count=2), residents)) == ["wide"]
    assert keys(evictions(cluster, Ask(5000, gpu_count=3), residents)) == ["single", "wide"]


def test_more_models_than_can_be_tried_still_leave_none_in_vain():
    cluster = Cluster([gpu(0, 0)])
    residents = [resident(f"m{n:02}", "GPU-n-0", memory_mb=500, idle_s=n) for n in range(40)]
    assert keys(evictions(cluster, Ask(2000), residents)) == ["m39", "m38", "m37", "m36"]


UUIDS = [f"GPU-{node}-{index}" for node in "ab" for index in range(2)]
RESIDENTS = st.lists(
    st.builds(
        Resident,
        st.uuids().map(str),
        st.sampled_from([(UUIDS[0],), (UUIDS[1],), (UUIDS[2],), (UUIDS[0], UUIDS[1]), (UUIDS[2], UUIDS[3])]),
        memory_mb=st.integers(1, 30),
        idle_s=st.floats(0, 100),
        resident_s=st.floats(0, 100),
        pinned=st.booleans(),
    ),
    max_size=6,
)


@given(RESIDENTS, st.lists(st.integers(-10, 60), min_size=4, max_size=4), st.integers(1, 90), st.integers(1, 2))
def test_evictions_are_lawful_enough_and_none_is_in_vain(residents, frees, memory_mb, count):
    views = []
    for uuid, free in zip(UUIDS, frees, strict=True):
        held = sum(one.memory_mb for one in residents if uuid in one.gpu_uuids)
        views.append(GpuView(uuid, uuid[4], int(uuid[6]), max(held + free, 0), held, 0))
    ask = Ask(memory_mb, count)

    def fits_without(gone):
        freed = {uuid: sum(one.memory_mb for one in gone if uuid in one.gpu_uuids) for uuid in UUIDS}
        after = [view._replace(leased_mb=view.leased_mb - freed[view.gpu_uuid]) for view in views]
        return isinstance(Cluster(after).place(ask), Placed)

    lawful = [one for one in residents if not one.pinned and one.resident_s >= 20]
    chosen = evictions(Cluster(views), ask, residents, min_resident_s=20)
    assert set(keys(chosen)) <= set(keys(lawful))
    assert bool(chosen) == (not fits_without([]) and fits_without(lawful))
    if chosen:
        assert fits_without(chosen)
        assert not any(fits_without([other for other in chosen if other is not one]) for one in chosen)


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4), st.integers(1, 90), st.integers(1, 3))
def test_a_reservation_is_of_one_node_and_could_hold_it(leased, memory_mb, count):
    views = [GpuView(uuid, uuid[4], int(uuid[6]), 60, used, 0) for uuid, used in zip(UUIDS, leased, strict=True)]
    ask = Ask(memory_mb, count)
    kept = reservation(Cluster(views), ask)
    assert (kept is not None) == (memory_mb <= 60 and count <= 2)
    if kept:
        assert len({view.node_id for view in kept}) == 1
        assert len({view.gpu_uuid for view in kept}) == count
        assert all(refusal(view._replace(leased_mb=0), ask) is None for view in kept)
