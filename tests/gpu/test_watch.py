"""A driver that hangs blocks nobody, and is believed again when it returns."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, Health
from orchestrator.gpu.backends import NoGpus
from orchestrator.gpu.watch import Watch
from tests.waiting import wait_until

A = "GPU-aaaa"
LIMIT_S = 0.3


@pytest.fixture
def watch(driver, gpus):
    driver.add_gpu(A, 10_000)
    watch = Watch(gpus, LIMIT_S)
    yield watch
    driver.heal()
    watch.close()


def took(ask) -> tuple[float, str]:
    """How long it took to be refused, and why."""
    before = time.monotonic()
    with pytest.raises(GpuUnavailable) as refused:
        ask()
    return time.monotonic() - before, str(refused.value)


def answers(ask):
    try:
        return ask()
    except GpuUnavailable:
        return None


def test_it_answers_what_the_backend_answers(driver, watch):
    driver.set_used(A, 4000)
    assert [gpu.used_mb for gpu in watch.sample()] == [4000]
    assert watch.free_mb([A]) == {A: 6000}
    assert watch.holders([A]) == {A: ()}
    assert (watch.name, watch.environment()) == ("nvml", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert watch.about().startswith("driver 580")


def test_errors_of_the_backend_come_through(driver, watch):
    driver.fail("memory", 18)
    with pytest.raises(GpuUnavailable, match="versions differ"):
        watch.free_mb([A])
    driver.heal()
    assert watch.free_mb([A]) == {A: 10_000}


@pytest.mark.parametrize("call", ["init", "count", "memory", "compute", "wait"])
def test_a_call_that_hangs_blocks_nobody_and_work_goes_on_when_it_returns(driver, watch, gpus, call):
    watch.sample()
    gpus._close()  # so that the driver is opened by the next call
    driver.hang(call)
    waited, reason = took(watch.sample)
    assert LIMIT_S <= waited < LIMIT_S + 2
    assert re.fullmatch(r"the GPU driver has not answered for \d\.\d s", reason)
    for ask in (watch.sample, lambda: watch.free_mb([A]), lambda: watch.holders([A]), watch.about):
        assert took(ask)[0] < LIMIT_S
    assert len([thread for thread in threading.enumerate() if thread.name == "gpu-watch"]) == 1
    driver.heal()
    assert wait_until(lambda: answers(watch.sample))[0].health is Health.OK
    assert watch.free_mb([A]) == {A: 10_000}


def test_the_reason_says_for_how_long(driver, watch):
    driver.hang("memory")
    took(watch.sample)
    wait_until(lambda: took(watch.sample)[1] >= "the GPU driver has not answered for 1.0 s")


def test_while_it_hangs_the_last_known_gpus_are_closed(driver, watch):
    assert watch.last_known("nobody has looked yet") == []
    driver.add_gpu("GPU-bbbb", bus=0x81)
    watch.sample()
    driver.lose("GPU-bbbb")
    watch.sample()
    driver.hang("memory")
    _, reason = took(watch.sample)
    known = watch.last_known(reason)
    assert [(gpu.uuid, gpu.health, gpu.processes) for gpu in known] == [
        (A, Health.UNKNOWN, None),
        ("GPU-bbbb", Health.LOST, None),
    ]
    assert known[0].health_reason == reason
    assert known[0].total_mb == 10_000


class Slow(NoGpus):
    """Takes its time, but answers; notices two calls at once."""

    def __init__(self) -> None:
        self.inside = 0
        self.overlapped = False
        self.threads: set[str] = set()

    def sample(self) -> list[Gpu]:
        self.inside += 1
        self.overlapped |= self.inside > 1
        self.threads.add(threading.current_thread().name)
        time.sleep(0.01)
        self.inside -= 1
        return []


def test_many_may_ask_at_once_and_take_turns():
    backend = Slow()
    watch = Watch(backend, limit_s=30.0)
    with ThreadPoolExecutor(8) as pool:
        assert [future.result() for future in [pool.submit(watch.sample) for _ in range(24)]] == [[]] * 24
    assert not backend.overlapped
    assert backend.threads == {"gpu-watch"}
    watch.close()


def test_a_bug_of_the_backend_does_not_end_the_watch():
    class Broken(NoGpus):
        def about(self) -> str:
            raise ZeroDivisionError

    watch = Watch(Broken(), LIMIT_S)
    with pytest.raises(GpuUnavailable, match="broke: ZeroDivisionError"):
        watch.about()
    assert watch.sample() == []
    watch.close()


def test_after_close_nobody_waits():
    watch = Watch(NoGpus(), limit_s=30.0)
    watch.close()
    assert not watch._thread.is_alive()
    assert "stopping" in took(watch.sample)[1]


def test_close_does_not_wait_for_a_driver_that_hangs(driver, watch):
    driver.hang("memory")
    took(watch.sample)
    before = time.monotonic()
    watch.close()
    assert time.monotonic() - before < LIMIT_S + 2
