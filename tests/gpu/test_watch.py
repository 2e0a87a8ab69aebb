"""A driver that hangs blocks nobody, and is believed again when it returns."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, GpuProcess, Health
from orchestrator.gpu.backends import NoGpus
from orchestrator.gpu.watch import Watch
from tests.factories import gpu
from tests.waiting import wait_until

A = "GPU-aaaa"
#: Seconds that a driver may take: one that hangs, and one that answers, however slow the machine.
LIMIT_S, PATIENT_S = 0.3, 30.0


@pytest.fixture
def watch(driver, gpus):
    driver.add_gpu(A, 10_000)
    watch = Watch(gpus, PATIENT_S)
    yield watch
    driver.heal()
    watch.close()


@pytest.fixture
def hang(driver, watch, monkeypatch):
    """`hang("memory")`: from now on the driver does not return from this call, and nobody waits for long."""

    def begin(call):
        monkeypatch.setattr(watch, "_limit_s", LIMIT_S)
        driver.hang(call)

    return begin


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
def test_a_call_that_hangs_blocks_nobody_and_work_goes_on_when_it_returns(driver, watch, gpus, hang, call, monkeypatch):
    watch.sample()
    gpus._close()  # so that the driver is opened by the next call
    hang(call)
    waited, reason = took(watch.sample)
    assert LIMIT_S <= waited < PATIENT_S
    assert re.fullmatch(r"the GPU driver has not answered for \d+\.\d s", reason)
    wait_until(lambda: time.monotonic() > watch._running.started + LIMIT_S, what="the call has hung for as long, too")
    with monkeypatch.context() as patched:
        wait = Mock(wraps=watch._changed.wait)
        patched.setattr(watch._changed, "wait", wait)
        for ask in (watch.sample, lambda: watch.free_mb([A]), lambda: watch.holders([A]), watch.about):
            took(ask)
        assert not wait.called, "they are told at once"
    assert len([thread for thread in threading.enumerate() if thread.name == "gpu-watch"]) == 1
    driver.heal()
    monkeypatch.setattr(watch, "_limit_s", PATIENT_S)
    assert wait_until(lambda: answers(watch.sample))[0].health is Health.OK
    assert watch.free_mb([A]) == {A: 10_000}


def test_the_reason_says_for_how_long(watch, hang):
    hang("memory")
    took(watch.sample)
    wait_until(lambda: took(watch.sample)[1] >= "the GPU driver has not answered for 1.0 s")


def test_while_it_hangs_the_last_known_gpus_are_closed(driver, watch, hang):
    assert watch.last_known("nobody has looked yet") == []
    driver.add_gpu("GPU-bbbb", bus=0x81)
    watch.sample()
    driver.lose("GPU-bbbb")
    watch.sample()
    hang("memory")
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


class Gated(NoGpus):
    """Answers when it is let, with the number of the question as the memory in use."""

    def __init__(self) -> None:
        self.asked = 0
        self.let = threading.Semaphore(0)

    def sample(self) -> list[Gpu]:
        self.asked += 1
        number = self.asked
        assert self.let.acquire(timeout=20.0)
        return [gpu(total_mb=1000, used_mb=number, uuid=A, processes=(GpuProcess(number, number),))]


def waiting(watch: Watch) -> int:
    """How many threads wait for news."""
    return len(vars(watch._changed)["_waiters"])


def test_who_asks_while_another_is_answered_shares_the_next_answer():
    """Not the one under way: it may have been read before they asked."""
    backend = Gated()
    watch = Watch(backend, limit_s=30.0)
    questions = [
        (watch.sample, lambda answer: answer[0].used_mb),
        (lambda: watch.free_mb([A]), lambda answer: 1000 - answer[A]),
        (lambda: watch.holders([A]), lambda answer: answer[A][0].pid),
    ]
    with ThreadPoolExecutor(31) as pool:
        first = pool.submit(watch.sample)
        wait_until(lambda: backend.asked == 1, what="a sample under way")
        later = [(pool.submit(ask), number_of) for ask, number_of in 10 * questions]
        wait_until(lambda: waiting(watch) == 31, what="all others waiting")
        backend.let.release()
        assert first.result(10.0)[0].used_mb == 1
        wait_until(lambda: backend.asked == 2, what="the next sample")
        last = pool.submit(watch.sample)
        wait_until(lambda: waiting(watch) == 31, what="one more")
        backend.let.release()
        assert {number_of(future.result(10.0)) for future, number_of in later} == {2}
        backend.let.release()
        assert last.result(10.0)[0].used_mb == 3
    assert backend.asked == 3
    watch.close()


def test_a_question_that_nobody_waits_for_any_more_is_still_answered_to_the_next():
    """It had not begun when the next one asked."""
    backend = Gated()
    watch = Watch(backend, limit_s=LIMIT_S)
    took(watch.sample)
    took(watch.sample)
    backend.let.release(100)
    assert wait_until(lambda: answers(watch.sample))[0].used_mb > 1
    watch.close()


def test_a_bug_of_the_backend_does_not_end_the_watch():
    class Broken(NoGpus):
        def about(self) -> str:
            raise ZeroDivisionError

    watch = Watch(Broken(), PATIENT_S)
    with pytest.raises(GpuUnavailable, match="broke: ZeroDivisionError"):
        watch.about()
    assert watch.sample() == []
    watch.close()


def test_after_close_nobody_waits():
    watch = Watch(NoGpus(), limit_s=30.0)
    watch.close()
    assert not watch._thread.is_alive()
    assert "stopping" in took(watch.sample)[1]


def test_close_does_not_wait_for_a_driver_that_hangs(watch, hang):
    hang("memory")
    took(watch.sample)
    before = time.monotonic()
    watch.close()
    assert time.monotonic() - before < PATIENT_S
