"""Whose memory is it: never less than what strangers hold, never more than what is in use."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gpu import Gpu, GpuProcess
from orchestrator.gpu.accounts import Holder, foreign_mb, still_held

WORKER = "node:1:aa"


def gpu(used_mb, *processes, total_mb=100_000):
    return Gpu("GPU-0", 0, "simulated", total_mb, used_mb, processes)


def blind(used_mb):
    return replace(gpu(used_mb), processes=None)


def of_slot(memory_mb, slot=1, worker=WORKER, pid=10):
    return GpuProcess(pid, memory_mb, mark=f"{worker}#{slot}", lineage=(pid, 1))


def of_nobody(memory_mb, pid=99):
    return GpuProcess(pid, memory_mb, lineage=(pid, 1))


# --- who owns a process ---


def test_a_slot_owns_its_own_processes_and_no_other_slots():
    holder = Holder(100, WORKER, slot=f"{WORKER}#1", pid=77)
    assert holder.owns(of_slot(5, slot=1))
    assert not holder.owns(of_slot(5, slot=2))
    assert not holder.owns(of_slot(5, slot=11))
    assert not holder.owns(GpuProcess(77, 5, lineage=(77,)))


def test_a_worker_owns_the_processes_of_all_its_slots_and_of_no_namesake():
    holder = Holder(100, WORKER)
    assert holder.owns(of_slot(5, slot=1)) and holder.owns(of_slot(5, slot=2))
    assert not holder.owns(of_slot(5, worker=f"{WORKER}b"))
    assert not holder.owns(of_nobody(5))


def test_a_process_id_owns_its_descendants():
    holder = Holder(100, pid=7)
    assert holder.owns(GpuProcess(7, 5, lineage=(7, 1)))
    assert holder.owns(GpuProcess(70, 5, lineage=(70, 8, 7, 1)))
    assert not holder.owns(GpuProcess(70, 5, lineage=(70, 1)))
    assert not holder.owns(GpuProcess(7, 5))  # nobody has seen its ancestors: not even itself is known


def test_a_worker_that_names_its_process_is_recognised_by_that_and_not_by_a_mark():
    """An HTTP worker: nobody marked what it starts."""
    holder = Holder(100, "box:7:aa", pid=7)
    assert holder.owns(GpuProcess(70, 5, lineage=(70, 7, 1)))
    assert not holder.owns(of_nobody(5))


@pytest.mark.parametrize(
    ("holder", "recognisable"), [(Holder(1), False), (Holder(1, WORKER), True), (Holder(1, pid=7), True)]
)
def test_a_holder_is_recognised_by_its_worker_or_process(holder, recognisable):
    assert holder.recognisable is recognisable
    assert not Holder(1).owns(GpuProcess(7, 5, lineage=(7,)))


# --- what is foreign ---


def test_without_leases_all_that_is_used_is_foreign():
    assert foreign_mb(gpu(700, of_nobody(500), of_slot(200)), [], 0) == 700
    assert foreign_mb(blind(700), [], 0) == 700
    assert foreign_mb(gpu(700), [], 0) == 700  # the driver names no process, and still it is in use


def test_what_a_lease_covers_is_not_foreign_and_what_exceeds_it_is():
    holder = Holder(1000, WORKER)
    assert foreign_mb(gpu(800, of_slot(800)), [holder], 0) == 0
    assert foreign_mb(gpu(1300, of_slot(1300)), [holder], 0) == 300
    assert foreign_mb(gpu(1250, of_slot(1000), of_nobody(250)), [holder], 0) == 250


def test_a_lease_that_is_not_used_covers_nobody_elses_memory():
    assert foreign_mb(gpu(500, of_nobody(500)), [Holder(1000, WORKER)], 0) == 500
    assert foreign_mb(gpu(500, of_nobody(500, pid=7)), [Holder(1000, pid=8)], 0) == 500


def test_leases_of_one_worker_are_one_account():
    """Its samples say which slot uses how much, not which lease covers which slot."""
    two = [Holder(1000, WORKER), Holder(500, WORKER)]
    assert foreign_mb(gpu(1500, of_slot(1500)), two, 0) == 0
    assert foreign_mb(gpu(1600, of_slot(1400, 1), of_slot(200, 2, pid=11)), two, 0) == 100


def test_warm_models_of_one_worker_are_one_account_too():
    """Each is known by its slot, but the job leases beside them are not."""
    two = [Holder(1000, WORKER, f"{WORKER}#1"), Holder(1000, WORKER, f"{WORKER}#2")]
    assert foreign_mb(gpu(1800, of_slot(1300, 1), of_slot(500, 2, pid=11)), two, 0) == 0


def test_numbers_that_do_not_add_up_are_never_less_than_nothing():
    assert foreign_mb(gpu(500, of_slot(800)), [Holder(1000, WORKER)], 0) == 0
    assert foreign_mb(gpu(500, of_slot(800)), [Holder(1000, WORKER), Holder(100)], 0) == 0


def test_one_owner_does_not_cover_the_overuse_of_another():
    holders = [Holder(1000, WORKER), Holder(1000, "other"), Holder(1000, pid=7)]
    used = [of_slot(1500), of_slot(500, worker="other", pid=11), GpuProcess(70, 500, lineage=(70, 7))]
    assert foreign_mb(gpu(2500, *used), holders, 0) == 500


def test_a_process_that_two_leases_could_claim_is_counted_once():
    """A client inside a client, or inside a job: its memory must not hide a stranger's."""
    nested = GpuProcess(8, 1000, mark=f"{WORKER}#1", lineage=(8, 7, 1))
    for pair in ([Holder(1000, pid=7), Holder(1000, pid=8)], [Holder(1000, WORKER), Holder(1000, pid=8)]):
        assert foreign_mb(gpu(1600, nested, of_nobody(600)), pair, 0) == 600


def test_a_process_of_unknown_size_holds_at_most_what_nobody_else_does():
    holder = Holder(1000, WORKER)
    assert foreign_mb(gpu(800, of_slot(None)), [holder], 0) == 0
    assert foreign_mb(gpu(1500, of_slot(None)), [holder], 0) == 500
    assert foreign_mb(gpu(800, of_slot(None), of_nobody(300)), [holder], 0) == 300
    assert foreign_mb(gpu(800, of_slot(300, 1), of_slot(None, 2, pid=11)), [holder], 0) == 0


def test_two_owners_of_unknown_size_cover_only_what_is_known_of_them():
    """Nobody can tell them apart: neither may hide what the other holds."""
    assert foreign_mb(gpu(800, of_slot(None), of_nobody(None)), [Holder(1000, WORKER)], 0) == 800
    mixed = gpu(800, of_slot(300, 1), of_slot(None, 2, pid=11), of_nobody(None))
    assert foreign_mb(mixed, [Holder(1000, WORKER)], 0) == 500


def test_where_nobody_can_look_growth_is_the_leases_until_it_exceeds_them():
    holder = Holder(1000, WORKER)
    assert foreign_mb(blind(0), [holder], 0) == 0
    assert foreign_mb(blind(900), [holder], 0) == 0
    assert foreign_mb(blind(1200), [holder], 0) == 200


def test_what_was_foreign_before_stays_so_when_a_lease_comes_that_nobody_can_see():
    holder = Holder(1000)
    assert foreign_mb(gpu(400, of_nobody(400)), [holder], 400) == 400
    assert foreign_mb(gpu(1100, of_nobody(400), of_nobody(700, pid=98)), [holder], 400) == 400
    assert foreign_mb(gpu(1500, of_nobody(1500)), [holder], 400) == 500
    assert foreign_mb(gpu(100, of_nobody(100)), [holder], 400) == 100  # it left


def test_seen_and_unseen_leases_side_by_side():
    holders = [Holder(1000, WORKER), Holder(500)]
    sample = gpu(1800, of_slot(1200), of_nobody(600))
    assert foreign_mb(sample, holders, 0) == 300  # 200 of overuse and 600 unknown, less 500 that may be the lease's
    assert foreign_mb(sample, holders, 700) == 700


SIZES = st.integers(0, 50)
PROCESSES = st.lists(
    st.builds(
        GpuProcess,
        pid=st.integers(1, 9),
        memory_mb=st.none() | SIZES,
        mark=st.sampled_from([None, None, "a#1", "a#2", "b#1"]),
        lineage=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda process: process.pid,
).map(tuple)
HOLDERS = st.lists(
    st.builds(Holder, SIZES, worker_id=st.sampled_from([None, "a", "b"]), pid=st.none() | st.integers(1, 9)),
    max_size=5,
)


@st.composite
def samples(draw):
    processes = draw(st.none() | PROCESSES)
    known = sum(process.memory_mb or 0 for process in processes or ())
    return replace(gpu(known + draw(SIZES)), processes=processes)


@given(samples(), HOLDERS, SIZES)
def test_foreign_is_never_negative_nor_more_than_is_used(sample, holders, before):
    assert 0 <= foreign_mb(sample, holders, before) <= sample.used_mb


@given(samples(), HOLDERS, SIZES)
def test_leases_cover_no_more_than_they_hold(sample, holders, before):
    assert foreign_mb(sample, holders, before) >= sample.used_mb - sum(holder.memory_mb for holder in holders)


@given(samples(), HOLDERS.map(lambda holders: [one for one in holders if one.recognisable]), SIZES)
def test_what_strangers_are_seen_to_hold_is_foreign(sample, holders, before):
    strangers = [p for p in sample.processes or () if not any(holder.owns(p) for holder in holders)]
    assert sample.processes is None or foreign_mb(sample, holders, before) >= sum(p.memory_mb or 0 for p in strangers)


@given(samples(), HOLDERS, SIZES, st.integers(0, 300))
def test_what_was_foreign_stays_so_where_somebody_cannot_be_seen(sample, holders, before, memory_mb):
    """However large the lease: only memory that goes away is foreign no longer."""
    without = foreign_mb(sample, holders, before)
    assert foreign_mb(sample, [*holders, Holder(memory_mb)], before) >= min(without, before)


@given(samples(), HOLDERS, SIZES)
def test_one_more_lease_never_makes_more_memory_foreign(sample, holders, before):
    for more in (Holder(10, "a"), Holder(10, pid=3)):
        if sample.processes is not None:
            assert foreign_mb(sample, [*holders, more], before) <= foreign_mb(sample, holders, before)


# --- whether an ended lease holds memory still ---


def test_processes_that_are_seen_hold_an_ended_lease():
    sample = gpu(100, of_slot(100, slot=1))
    assert still_held(sample, Holder(100, WORKER, f"{WORKER}#1"), running=())
    assert still_held(sample, Holder(100, WORKER), running=())
    assert not still_held(sample, Holder(100, WORKER, f"{WORKER}#2"), running=[f"{WORKER}#2"])
    assert not still_held(gpu(100), Holder(100, WORKER), running=())
    assert still_held(gpu(0, of_slot(None)), Holder(100, WORKER), running=())  # of unknown size


def test_where_nobody_can_look_the_slots_that_run_decide():
    holder = Holder(100, WORKER, f"{WORKER}#1")
    assert still_held(blind(100), holder, running=[f"{WORKER}#1"])
    assert not still_held(blind(100), holder, running=[f"{WORKER}#2"])
    assert not still_held(blind(100), Holder(100, pid=7), running=())
