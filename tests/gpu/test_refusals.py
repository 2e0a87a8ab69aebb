"""Every error that NVML knows × what becomes of it: in a sample, for a lease, and right before a start."""

import pynvml
import pytest
from sqlalchemy import insert

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Health
from orchestrator.gpu.reasons import reason_of
from orchestrator.leases import Denied, Granted, LeaseRequest, Terms
from orchestrator.store import grants, schema
from tests.factories import STALE_S

A, B = "GPU-aaaa", "GPU-bbbb"
NEVER_HEARD_OF = 777
CODES = {
    name.removeprefix("NVML_ERROR_"): code
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(code, int)
}
ALL = {**CODES, f"code {NEVER_HEARD_OF}": NEVER_HEARD_OF}
LOST = {"NOT_FOUND", "GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND"}
#: Words of the reason for errors that an operator is likely to meet.
ADVICE = {
    "LIB_RM_VERSION_MISMATCH": "driver and library versions differ",
    "DRIVER_NOT_LOADED": "modprobe",
    "LIBRARY_NOT_FOUND": "install the NVIDIA driver",
    "NO_PERMISSION": "/dev/nvidia",
    "UNKNOWN": "recreate it",
    "GPU_IS_LOST": "fell off the bus",
    "RESET_REQUIRED": "nvidia-smi --gpu-reset",
    f"code {NEVER_HEARD_OF}": "does not know",
}


def health_of(name: str) -> Health:
    return Health.LOST if name in LOST else Health.UNKNOWN


@pytest.mark.parametrize("name", ALL)
def test_sample_and_start(driver, gpus, name):
    """The GPU that answers with an error is closed with that reason, and opens again when the error is gone."""
    driver.add_gpu(A, 10_000)
    assert [gpu.health for gpu in gpus.sample()] == [Health.OK]
    driver.fail("memory", ALL[name], A)
    (gpu,) = gpus.sample()
    assert (gpu.uuid, gpu.total_mb, gpu.health) == (A, 10_000, health_of(name))
    assert gpu.health_reason.endswith(f"({name})")
    assert ADVICE.get(name, "") in gpu.health_reason
    with pytest.raises(GpuUnavailable) as refused:
        gpus.free_mb([A])
    assert f"is {gpu.health}: " in str(refused.value)
    driver.heal()
    assert gpus.free_mb([A]) == {A: 10_000}


@pytest.mark.parametrize("name", ALL)
def test_a_driver_that_cannot_be_opened_says_so_for_all_its_gpus(driver, gpus, name):
    """It says nothing about a single GPU, so none is lost: what runs there may go on."""
    driver.fail("init", ALL[name])
    with pytest.raises(GpuUnavailable) as refused:
        gpus.sample()
    assert str(refused.value).endswith(f"({name})")
    driver.heal()
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    driver.fail("count", ALL[name])
    driver.fail("init", ALL[name])
    for _ in range(2):
        assert [gpu.health for gpu in gpus.sample()] == [Health.UNKNOWN] * 2
    driver.heal()
    assert [gpu.health for gpu in gpus.sample()] == [Health.OK] * 2


@pytest.mark.parametrize("name", ALL)
def test_a_gpu_that_cannot_be_identified_any_more_is_closed(driver, gpus, name):
    driver.add_gpu(A)
    driver.add_gpu(B, bus=0x81)
    gpus.sample()
    driver.fail("handle", ALL[name], A)
    closed, other = gpus.sample()
    assert (closed.uuid, closed.health) == (A, health_of(name))
    assert name in {"UNINITIALIZED", "DRIVER_NOT_LOADED"} or other.health is Health.OK


@pytest.mark.parametrize("call", ["count", "handle", "uuid", "name", "pci", "mig", "memory", "ecc", "remap", "retired"])
@pytest.mark.parametrize("name", ["UNKNOWN", "NO_PERMISSION", "GPU_IS_LOST", "TIMEOUT"])
def test_whichever_question_fails_the_gate_is_closed(driver, gpus, call, name):
    driver.add_gpu(A)
    gpus.sample()
    driver.fail(call, ALL[name])
    (gpu,) = gpus.sample()
    assert gpu.health in {Health.UNKNOWN, Health.LOST}
    assert name in gpu.health_reason


@pytest.mark.parametrize("call", ["utilization", "temperature", "fields"])
def test_what_nothing_depends_on_may_fail(driver, gpus, call):
    driver.add_gpu(A)
    driver.fail(call, ALL["UNKNOWN"])
    (gpu,) = gpus.sample()
    assert gpu.health is Health.OK
    assert (gpu.utilization is None, gpu.temperature_c is None) == (call == "utilization", call == "temperature")
    driver.heal()
    driver.fail(call, ALL["GPU_IS_LOST"])
    assert gpus.sample()[0].health is Health.LOST


def test_no_lease_is_granted_on_any_of_these(db, driver, gpus):
    driver.add_gpu(A, 10_000)
    samples = {"fine": gpus.sample()[0]}
    for name, code in ALL.items():
        driver.fail("memory", code, A)
        (samples[name],) = gpus.sample()
        driver.heal()
        gpus.sample()
    db.write(lambda conn: conn.execute(insert(schema.gpus), [row(node, gpu) for node, gpu in samples.items()]))
    for node, gpu in samples.items():
        request = LeaseRequest(agent="a", memory_mb=1, ttl_s=60.0)
        (answer,) = db.write(lambda conn, r=request, n=node: grants.grant(conn, [r], Terms(STALE_S), n))
        if node == "fine":
            assert isinstance(answer, Granted)
        else:
            assert isinstance(answer, Denied)
            assert gpu.health.value in answer.reason


def row(node, gpu):
    return {
        "gpu_uuid": f"{gpu.uuid}-{node}"[:64],
        "node_id": node,
        "gpu_index": gpu.index,
        "name": gpu.name,
        "total_mb": gpu.total_mb,
        "usable_mb": gpu.total_mb,
        "used_mb": gpu.used_mb,
        "health": gpu.health.value,
        "health_reason": gpu.health_reason,
    }


def test_every_reason_has_room_in_the_database():
    longest = max((reason_of(name)[1] for name in ALL), key=len)
    assert len(longest) <= 255  # of gpus.health_reason


def test_every_error_of_the_binding_has_a_reason_of_its_own():
    unknown = "an error that this version does not know"
    assert [name for name in CODES if unknown in reason_of(name)[1]] == []
    assert unknown in reason_of("code 777")[1]
