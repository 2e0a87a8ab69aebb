"""Real GPUs, as the real binding tells of them; only the driver below it is a stand-in."""

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, GpuProcess, Health, nvml, processes

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
#: Beyond what this machine gives to processes, but not beyond what the kernel may.
STRANGER = 4_194_000


def one(gpus) -> Any:
    (gpu,) = gpus.sample()
    return gpu


def by_uuid(gpus) -> dict[str, Any]:
    return {gpu.uuid: gpu for gpu in gpus.sample()}


def held(gpu: Gpu) -> dict[int, int | None] | None:
    return None if gpu.processes is None else {process.pid: process.memory_mb for process in gpu.processes}


def test_a_gpu_as_it_is(driver, gpus):
    driver.add_gpu(A, 24_576, reserved_mb=512, name="NVIDIA A10", utilization=42, temperature=61)
    driver.set_used(A, 100)
    driver.set_processes(A, (STRANGER, 300))
    assert one(gpus) == Gpu(
        A, 0, "NVIDIA A10", 24_064, 400, (GpuProcess(STRANGER, 300, None, (STRANGER,)),), 0.42, 61, Health.OK, None
    )
    assert gpus.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus.about() == "driver 580.65.06, NVML 13.580.65.06"


# Memory.


def test_what_the_driver_keeps_is_nobodys(driver, gpus):
    driver.add_gpu(A, 10_000, reserved_mb=900)
    driver.set_used(A, 1000)
    gpu = one(gpus)
    assert (gpu.total_mb, gpu.used_mb, gpu.free_mb) == (9100, 1000, 8100)


@pytest.mark.parametrize("code", [3, 13, 25, 26, 999, 2], ids=lambda code: f"code {code}")
def test_a_driver_without_the_second_memory_question_is_asked_the_first(driver, gpus, code):
    driver.add_gpu(A, 10_000, reserved_mb=900)
    driver.set_used(A, 1000)
    driver.fail("memory_v2", code)
    gpu = one(gpus)
    assert (gpu.total_mb, gpu.used_mb, gpu.free_mb, gpu.health) == (10_000, 1900, 8100, Health.OK)


@pytest.mark.parametrize(
    "numbers",
    [{"total": 0}, {"total": 100 << 20, "used": 200 << 20}, {"total": 100 << 20, "reserved": 100 << 20}],
    ids=["nothing", "more used than there is", "all reserved"],
)
def test_numbers_that_cannot_be_true_close_the_gate(driver, gpus, numbers):
    driver.add_gpu(A)
    driver.change(A, **numbers)
    gpu = one(gpus)
    assert (gpu.health, gpu.total_mb) == (Health.UNKNOWN, 0)
    assert "nothing sensible" in gpu.health_reason


def test_memory_moves_and_the_ledger_agrees(driver, gpus):
    driver.add_gpu(A, 10_000)
    with driver.allocated(A, 3000), driver.allocated(A, 500, pid=os.getppid()):
        assert one(gpus).used_mb == driver.used_mb(A) == 3500
        assert held(one(gpus)) == {os.getpid(): 3000, os.getppid(): 500}
    assert one(gpus).used_mb == driver.used_mb(A) == 0


def test_megabytes_are_rounded_against_whoever_asks(driver, gpus):
    driver.add_gpu(A, 1000)
    driver.change(A, total=(1000 << 20) + 5, used=(10 << 20) + 1)
    gpu = one(gpus)
    assert (gpu.total_mb, gpu.free_mb) == (1000, 990)
    driver.change(A, used=(10 << 20) + 6)
    assert one(gpus).free_mb == 989
    driver._add("process", {"on": A, "pid": 101, "bytes": (10 << 20) + 1, "list": "compute"})
    assert held(one(gpus)) == {101: 11}


def test_free_memory_never_exceeds_what_may_be_leased(driver, gpus):
    driver.add_gpu(A, 10_000, reserved_mb=900)
    driver.set_used(A, -50)
    assert (one(gpus).total_mb, one(gpus).free_mb, one(gpus).used_mb) == (9100, 9100, 0)


# Unified memory.


def host_memory(available: bool) -> int:
    (kilobytes,) = re.findall(
        rf"{'MemAvailable' if available else 'MemTotal'}:\s+(\d+)", Path("/proc/meminfo").read_text()
    )
    return int(kilobytes) // 1024


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA-GB10", "Orin (nvgpu)", "NVIDIA Thor"])
def test_a_gpu_without_memory_of_its_own_has_the_hosts(driver, gpus, name):
    driver.add_gpu(A, name=name)
    driver.fail("memory", 3)
    gpu = one(gpus)
    assert (gpu.health, gpu.name) == (Health.OK, f"{name} (unified memory)")
    assert gpu.total_mb == host_memory(available=False)
    assert gpu.free_mb == pytest.approx(host_memory(available=True), abs=1024)


@pytest.mark.parametrize("total_mb", [0, 999_999])
def test_what_the_driver_tells_of_unified_memory_is_not_believed(driver, gpus, total_mb):
    driver.add_gpu(A, total_mb, name="NVIDIA GB10")
    assert (one(gpus).total_mb, one(gpus).health) == (host_memory(available=False), Health.OK)


def test_any_other_gpu_that_does_not_tell_its_memory_gets_no_leases(driver, gpus):
    driver.add_gpu(A, name="NVIDIA A10")
    driver.fail("memory", 3)
    gpu = one(gpus)
    assert (gpu.health, gpu.total_mb) == (Health.UNKNOWN, 0)
    assert gpu.health_reason == "the driver does not tell the memory of this device (NOT_SUPPORTED)"


def test_a_lost_integrated_gpu_is_lost_and_not_the_hosts_memory(driver, gpus):
    driver.add_gpu(A, name="NVIDIA GB10")
    one(gpus)
    driver.fail("memory", 15, A)
    assert one(gpus).health is Health.LOST


# Processes.


def test_a_process_in_several_lists_is_counted_once(driver, gpus):
    driver.add_gpu(A)
    driver.set_processes(A, (101, 400), (102, 50))
    driver.set_processes(A, (101, 400), (103, 60), kind="graphics")
    driver.set_processes(A, (104, 70), kind="mps")
    assert held(one(gpus)) == {101: 400, 102: 50, 103: 60, 104: 70}
    assert one(gpus).used_mb == 580


def test_memory_that_the_driver_does_not_tell_is_not_zero(driver, gpus):
    driver.add_gpu(A)
    driver.set_processes(A, (101, None), (102, None), (103, 30))
    driver.set_processes(A, (102, 20), (103, None), kind="graphics")
    assert held(one(gpus)) == {101: None, 102: 20, 103: 30}


def test_ids_of_another_namespace_mean_nothing(driver, gpus, monkeypatch):
    driver.add_gpu(A)
    driver.set_processes(A, (101, 400))
    monkeypatch.setattr(processes, "driver_ids_are_ours", lambda: False)
    gpu = one(gpus)
    assert (gpu.processes, gpu.used_mb, gpu.health) == (None, 400, Health.OK)


@pytest.mark.parametrize("code", [3, 4, 999])
def test_a_refused_process_list_is_not_an_empty_one(driver, gpus, code):
    driver.add_gpu(A)
    driver.fail("compute", code)
    assert (one(gpus).processes, one(gpus).health) == (None, Health.OK)


def test_a_device_that_draws_nothing_and_knows_no_mps_still_has_a_list(driver, gpus):
    driver.add_gpu(A)
    driver.set_processes(A, (101, 400))
    driver.fail("graphics", 3)
    driver.fail("mps", 13)
    assert held(one(gpus)) == {101: 400}
    driver.heal("mps")
    driver.fail("mps", 999)
    assert one(gpus).processes is None


def test_an_older_driver_has_the_process_list_under_another_name(driver, gpus):
    driver.add_gpu(A)
    driver.set_processes(A, (101, 400))
    driver.fail("processes_v3", 13)
    assert held(one(gpus)) == {101: 400}
    driver.fail("processes_v2", 13)
    assert one(gpus).processes is None


@pytest.mark.parametrize("pid", [0, 4_294_967_295])
def test_a_list_with_impossible_ids_is_not_believed(driver, gpus, pid):
    driver.add_gpu(A)
    driver.set_processes(A, (101, 400), (pid, 7))
    assert (one(gpus).processes, one(gpus).used_mb) == (None, 407)


def test_a_gpu_that_vanishes_while_its_processes_are_read_is_lost(driver, gpus):
    driver.add_gpu(A)
    driver.fail("processes", 15)
    assert one(gpus).health is Health.LOST


# Identity.


def test_the_index_is_the_place_on_the_bus_and_not_in_the_list(driver, gpus):
    driver.add_gpu(A, bus=0x81)
    driver.add_gpu(B, bus=0x0A)
    driver.add_gpu(C, bus=0x41)
    assert [(gpu.index, gpu.uuid) for gpu in gpus.sample()] == [(0, B), (1, C), (2, A)]
    driver.reorder(C, A, B)
    assert [(gpu.index, gpu.uuid) for gpu in gpus.sample()] == [(0, B), (1, C), (2, A)]


def test_cards_that_changed_places_are_known_by_their_uuids(driver, gpus):
    driver.add_gpu(A, 10_000, bus=0x0A)
    driver.add_gpu(B, 20_000, bus=0x41)
    gpus.sample()
    driver.change(A, bus="00000000:41:00.0")
    driver.change(B, bus="00000000:0A:00.0")
    assert [(gpu.index, gpu.uuid, gpu.total_mb) for gpu in gpus.sample()] == [(0, B, 20_000), (1, A, 10_000)]


def test_a_lost_card_leaves_its_index_to_nobody(driver, gpus):
    for uuid, bus in ((A, 0x0A), (B, 0x41), (C, 0x81)):
        driver.add_gpu(uuid, bus=bus)
    gpus.sample()
    driver.lose(B)
    assert [(gpu.index, gpu.uuid, gpu.health) for gpu in gpus.sample()] == [
        (0, A, Health.OK),
        (1, B, Health.LOST),
        (2, C, Health.OK),
    ]


# GPUs that go and come.


def test_a_gpu_that_fell_off_the_bus_is_reported_lost_until_it_is_back(driver, gpus):
    driver.add_gpu(A, 10_000, name="NVIDIA A10")
    driver.add_gpu(B, bus=0x81)
    driver.set_used(A, 4000)
    gpus.sample()
    driver.lose(A)
    for _ in range(3):
        lost = by_uuid(gpus)[A]
        assert (lost.uuid, lost.index, lost.name, lost.total_mb) == (A, 0, "NVIDIA A10", 10_000)
        assert (lost.health, lost.processes) == (Health.LOST, None)
        assert "fell off the bus" in lost.health_reason
    assert by_uuid(gpus)[B].health is Health.OK
    driver.heal()
    assert (by_uuid(gpus)[A].health, by_uuid(gpus)[A].health_reason) == (Health.OK, None)


def test_a_gpu_that_is_no_longer_listed_is_lost(driver, gpus):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    driver.remove(A)
    assert by_uuid(gpus)[A].health is Health.LOST
    assert "no longer knows this device" in by_uuid(gpus)[A].health_reason
    with pytest.raises(GpuUnavailable, match="no longer knows this device"):
        gpus.free_mb([A, B])


def test_a_driver_that_is_reloaded_needs_no_restart_of_ours(driver, gpus):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    driver.unload()
    for expected in ("is gone; it is opened again", "driver is not loaded", "driver is not loaded"):
        sample = gpus.sample()
        assert [gpu.health for gpu in sample] == [Health.UNKNOWN, Health.UNKNOWN]
        assert all(expected in gpu.health_reason for gpu in sample)
    driver.heal()
    assert [gpu.health for gpu in gpus.sample()] == [Health.OK, Health.OK]


@pytest.mark.parametrize("code", [1, 9])
def test_a_driver_that_goes_while_a_gpu_is_read_is_opened_anew(driver, gpus, code):
    driver.add_gpu(A)
    gpus.sample()
    driver.fail("memory", code)
    assert one(gpus).health is Health.UNKNOWN
    assert gpus._events is None
    driver.heal()
    assert one(gpus).health is Health.OK


def test_while_a_gpu_is_silent_the_driver_is_opened_anew_from_time_to_time(driver, gpus, monkeypatch):
    start = Mock(side_effect=nvml.start)
    monkeypatch.setattr(nvml, "start", start)
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    for _ in range(3):
        gpus.sample()
    assert start.call_count == 1
    driver.lose(A)
    for _ in range(3):
        gpus.sample()
    assert start.call_count == 3
    gpus._reopen_s = 3600.0
    gpus.sample()
    assert start.call_count == 3


def test_a_node_without_a_driver_says_why_it_has_no_gpus(driver, gpus):
    driver.fail("init", 9)
    for ask in (gpus.sample, gpus.about, lambda: gpus.free_mb([A]), lambda: gpus.holders([A])):
        with pytest.raises(GpuUnavailable, match="the NVIDIA driver is not loaded"):
            ask()
    driver.add_gpu(A)
    driver.heal()
    assert one(gpus).health is Health.OK


def test_a_driver_without_gpus_has_none(driver, gpus):
    assert gpus.sample() == []


def test_a_health_that_changed_is_told_once(driver, gpus, caplog):
    driver.add_gpu(A)
    gpus.sample()
    driver.lose(A)
    for _ in range(3):
        gpus.sample()
    driver.heal()
    gpus.sample()
    told = [record.health for record in caplog.records if record.message == "GPU health changed"]
    assert told == ["lost", "ok"]


def test_a_card_that_cannot_be_identified_is_told_once(driver, gpus, caplog):
    driver.add_gpu(A)
    driver.fail("uuid", 4, A)
    for _ in range(3):
        assert gpus.sample() == []
    (told,) = [record for record in caplog.records if "does not identify" in record.message]
    assert "no permission" in told.reason


# MIG.


def split(driver) -> None:
    driver.add_gpu(A, 40_000, bus=0x0A, name="NVIDIA A100", mig=1)
    driver.add_gpu(B, 24_000, bus=0x41)
    driver.add_slice("MIG-1", A, 0, 20_000, name="NVIDIA A100 MIG 3g.20gb")
    driver.add_slice("MIG-2", A, 2, 10_000, name="NVIDIA A100 MIG 2g.10gb")


def test_slices_are_gpus_of_their_own_and_their_card_is_none(driver, gpus):
    split(driver)
    driver.set_processes("MIG-2", (101, 700))
    sample = gpus.sample()
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.total_mb, gpu.used_mb) for gpu in sample] == [
        (1, B, "NVIDIA A10", 24_000, 0),
        (100, "MIG-1", "NVIDIA A100 MIG 3g.20gb", 20_000, 0),
        (102, "MIG-2", "NVIDIA A100 MIG 2g.10gb", 10_000, 700),
    ]
    assert [held(gpu) for gpu in sample] == [{}, {}, {101: 700}]
    assert [(gpu.utilization, gpu.temperature_c) for gpu in sample[1:]] == [(None, 40)] * 2
    assert gpus.free_mb(["MIG-2"]) == {"MIG-2": 9300}


def test_the_profile_of_a_slice_is_told_also_by_drivers_that_do_not_name_it(driver, gpus):
    driver.add_gpu(A, 40_960, name="NVIDIA A100", mig=1)
    driver.add_slice("MIG-1", A, 0, 4864, name="NVIDIA A100", slices=1)
    assert one(gpus).name == "NVIDIA A100 MIG 1g.5gb"


def test_a_slice_that_vanishes_is_lost(driver, gpus):
    split(driver)
    gpus.sample()
    driver.remove("MIG-1")
    found = by_uuid(gpus)
    assert (found["MIG-1"].health, found["MIG-1"].health_reason) == (Health.LOST, "the MIG slice was removed")
    assert (found["MIG-1"].total_mb, found["MIG-1"].index) == (20_000, 100)
    assert (found["MIG-2"].health, found[B].health) == (Health.OK, Health.OK)


def test_slices_that_cannot_be_listed_are_unknown_and_not_gone(driver, gpus):
    split(driver)
    gpus.sample()
    driver.fail("slice", 999, A)
    found = by_uuid(gpus)
    assert [found[uuid].health for uuid in ("MIG-1", "MIG-2", B)] == [Health.UNKNOWN, Health.UNKNOWN, Health.OK]


def test_mig_turned_off_and_on(driver, gpus):
    split(driver)
    gpus.sample()
    driver.change(A, mig=0)
    found = by_uuid(gpus)
    assert {uuid: gpu.health for uuid, gpu in found.items()} == {
        A: Health.OK,
        B: Health.OK,
        "MIG-1": Health.LOST,
        "MIG-2": Health.LOST,
    }
    driver.change(A, mig=1)
    found = by_uuid(gpus)
    assert {uuid: gpu.health for uuid, gpu in found.items()} == {
        A: Health.LOST,
        B: Health.OK,
        "MIG-1": Health.OK,
        "MIG-2": Health.OK,
    }
    assert found[A].health_reason == "MIG was turned on; the slices of this card are GPUs of their own"


def test_a_slice_without_an_answer_is_not_taken_for_unified_memory(driver, gpus):
    driver.add_gpu(A, mig=1, name="NVIDIA Thor")
    driver.add_slice("MIG-1", A, 0, 1000, name="NVIDIA Thor MIG 1g.1gb")
    driver.fail("memory", 3)
    assert one(gpus).health is Health.UNKNOWN


def test_with_their_card_all_slices_are_lost(driver, gpus):
    split(driver)
    gpus.sample()
    driver.lose(A)
    assert {uuid: gpu.health for uuid, gpu in by_uuid(gpus).items()} == {
        B: Health.OK,
        "MIG-1": Health.LOST,
        "MIG-2": Health.LOST,
    }


# Faults that the driver reports.


@pytest.mark.parametrize("number", [48, 46, 63, 74, 94, 95, 119, 140])
def test_an_xid_makes_its_gpu_unhealthy_until_the_driver_is_loaded_anew(driver, gpus, number):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    driver.xid(A, number)
    for _ in range(3):
        found = by_uuid(gpus)
        assert (found[A].health, found[B].health) == (Health.UNHEALTHY, Health.OK)
        assert found[A].health_reason.startswith(f"XID {number}: ")
    driver.unload()
    gpus.sample()
    driver.heal()
    assert by_uuid(gpus)[A].health is Health.OK


def test_an_xid_is_not_forgotten_because_the_driver_was_ill_for_a_moment(driver, gpus):
    driver.add_gpu(A)
    gpus.sample()
    driver.xid(A, 48)
    assert one(gpus).health is Health.UNHEALTHY
    driver.fail("count", 999)
    assert one(gpus).health is Health.UNKNOWN
    driver.heal()
    assert one(gpus).health is Health.UNHEALTHY


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 109])
def test_an_xid_that_a_program_caused_is_its_own_matter(driver, gpus, number):
    driver.add_gpu(A)
    gpus.sample()
    driver.xid(A, number)
    assert one(gpus).health is Health.OK


def test_xid_79_is_a_lost_gpu_also_while_it_still_answers(driver, gpus):
    driver.add_gpu(A)
    gpus.sample()
    driver.xid(A, 48)
    driver.xid(A, 79)
    for _ in range(3):
        assert one(gpus).health is Health.LOST
        assert one(gpus).health_reason.startswith("XID 79: ")


def test_a_reset_is_seen_by_a_gpu_that_answers_again(driver, gpus):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    driver.xid(A, 79)
    driver.xid(B, 48)
    driver.lose(A)
    assert [gpu.health for gpu in gpus.sample()] == [Health.LOST, Health.UNHEALTHY]
    driver.heal()
    assert [gpu.health for gpu in gpus.sample()] == [Health.OK, Health.UNHEALTHY]


def test_an_xid_of_a_slice_is_not_that_of_its_neighbours(driver, gpus):
    split(driver)
    gpus.sample()
    driver.xid(A, 94, instance=5)  # of MIG-2
    found = by_uuid(gpus)
    assert (found["MIG-1"].health, found["MIG-2"].health) == (Health.OK, Health.UNHEALTHY)
    driver.xid(A, 48)
    assert by_uuid(gpus)["MIG-1"].health is Health.UNHEALTHY


@pytest.mark.parametrize("call", ["events", "register", "wait"])
def test_without_events_there_are_still_gpus(driver, gpus, call):
    driver.add_gpu(A)
    driver.fail(call, 3)
    assert one(gpus).health is Health.OK
    assert one(gpus).health is Health.OK


def test_a_driver_that_opens_but_has_no_events_is_let_go(driver, gpus, monkeypatch):
    stop = Mock(side_effect=nvml.stop)
    monkeypatch.setattr(nvml, "stop", stop)
    driver.fail("events", 999)
    with pytest.raises(GpuUnavailable):
        gpus.sample()
    assert stop.call_count == 1


def test_a_card_is_registered_for_events_once(driver, gpus):
    driver.add_gpu(A)
    assert {one(gpus).health for _ in range(70)} == {Health.OK}


def test_events_that_cannot_be_read_close_all_gates(driver, gpus):
    driver.add_gpu(A)
    gpus.sample()
    driver.fail("wait", 999)
    assert one(gpus).health is Health.UNKNOWN
    driver.heal()
    driver.xid(A, 48)
    gpus.sample()
    driver.xid(A, 95)
    assert one(gpus).health is Health.UNHEALTHY


def test_a_lost_card_does_not_deafen_us_for_the_others(driver, gpus):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus._reopen_s = 3600.0
    gpus.sample()
    driver.lose(A)
    assert [gpu.health for gpu in gpus.sample()] == [Health.LOST, Health.OK]
    driver.xid(B, 48)
    assert [gpu.health for gpu in gpus.sample()] == [Health.LOST, Health.UNHEALTHY]


def test_a_fault_that_nobody_can_place_is_everybodys(driver, gpus, monkeypatch):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    gpus._events._cards.clear()
    driver.xid(B, 48)
    assert [gpu.health for gpu in gpus.sample()] == [Health.UNHEALTHY, Health.UNHEALTHY]


@pytest.mark.parametrize(
    ("sign", "reason"),
    [
        ({"ecc": 2}, "2 uncorrectable memory errors"),
        ({"pending": 1}, "wait for remapping"),
        ({"failed": 1}, "remapping broken memory rows failed"),
        ({"retired": 1}, "wait for retirement"),
        ({"recovery": 1}, "the driver asks for a reset of the GPU"),
        ({"recovery": 42}, "the driver asks for recovery action 42"),
    ],
    ids=str,
)
def test_broken_memory_makes_a_gpu_unhealthy(driver, gpus, sign, reason):
    driver.add_gpu(A)
    gpus.sample()
    driver.change(A, **sign)
    assert one(gpus).health is Health.UNHEALTHY
    assert reason in one(gpus).health_reason
    with pytest.raises(GpuUnavailable, match=reason):
        gpus.free_mb([A])
    driver.change(A, **dict.fromkeys(sign, 0))
    assert one(gpus).health is Health.OK


@pytest.mark.parametrize("call", ["ecc", "remap", "retired", "fields"])
def test_a_card_without_such_a_check_is_not_broken(driver, gpus, call):
    driver.add_gpu(A)
    driver.fail(call, 3)
    assert one(gpus).health is Health.OK


# Asking again, right before a start.


def test_free_memory_is_looked_up_anew(driver, gpus):
    driver.add_gpu(A, 10_000)
    driver.add_gpu(B, 20_000, bus=0x81)
    gpus.sample()
    with driver.allocated(A, 4000):
        assert gpus.free_mb([A, B]) == {A: 6000, B: 20_000}
        (process,) = gpus.holders([A])[A]
        assert (process.pid, process.memory_mb, process.lineage[0]) == (os.getpid(), 4000, os.getpid())
    assert gpus.free_mb([A]) == {A: 10_000}
    assert gpus.holders([A, B]) == {A: (), B: ()}


def test_a_gpu_of_another_node_cannot_be_asked(driver, gpus):
    driver.add_gpu(A)
    with pytest.raises(GpuUnavailable, match=f"no GPU of this node is {B}"):
        gpus.free_mb([A, B])


def test_who_holds_a_lost_gpu_is_unknown(driver, gpus):
    driver.add_gpu(A)
    gpus.sample()
    driver.lose(A)
    assert gpus.holders([A]) == {A: None}
