"""Real GPUs, as the real binding tells of them; only the driver below it is a stand-in."""

from orchestrator.gpu import Gpu, GpuProcess, Health

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"


def one(gpus) -> Gpu:
    (gpu,) = gpus.sample()
    return gpu


def test_a_gpu_as_it_is(driver, gpus):
    driver.add_gpu(A, 24_576, reserved_mb=512, name="NVIDIA A10", utilization=42, temperature=61)
    driver.set_used(A, 100)
    driver.set_processes(A, (4_000_001, 300))
    assert one(gpus) == Gpu(
        A, 0, "NVIDIA A10", 24_064, 400, (GpuProcess(4_000_001, 300, None, (4_000_001,)),), 0.42, 61, Health.OK, None
    )
