"""What becomes of slots and leases around a job, one part at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.errors import GpuUnavailable, Overloaded
from orchestrator.gpu import GpuProcess
from orchestrator.gpu.backends import NoGpus
from orchestrator.gpu.processes import MARK, describe
from orchestrator.gpu.watch import Watch
from orchestrator.jobs import ErrorKind
from orchestrator.leases import GpuShare, Granted, LeaseRequest, Remains, ResidentSlot
from orchestrator.store.claim import Claim
from orchestrator.store.settle import End, Outcome
from worker import strays
from worker.custody import Custody, Departure
from worker.flags import Flags
from worker.process import SlotProcess

GPU = GpuShare("GPU-0", 0)
MODEL = ResidentSlot("model:w#1:1", "small", None, 4000, (GPU,))
ECHO = Claim("job-1", 1, "echo", "{}", "a", None, None, None, None)


class Slots:
    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append(f"{name} {given[0]}")


class Bug(NoGpus):
    def sample(self) -> Any:
        raise KeyError("MemAvailable")


@pytest.fixture
def watch():
    watches = Watch(Bug(), 5.0)
    yield watches
    watches.close()


def test_a_bug_of_the_backend_strands_no_job(watch):
    """Unknown is an answer: the end is written, and the slot does not wait for ever."""
    slots, notes = Slots(), list[Any]()
    keeper = Custody(watch, slots, notes.append)  # type: ignore[arg-type]
    keeper.after(Departure("w#1", "job:1:1", (GPU,), ECHO, (End("job-1", 1, Outcome.DONE),)))
    keeper.close(5.0)
    assert slots.told == ["retire w#1"]
    assert [note.left.remains for note in notes] == [Remains.PROCESSES]


def test_a_bug_of_the_backend_is_no_room(watch):
    lease = Granted(LeaseRequest("a", 4000, 60.0), "gpu", "node-1", (GPU,), None)  # type: ignore[arg-type]
    claim = ECHO._replace(lease=lease)
    refused = Custody(watch, Slots(), print).no_room([claim])  # type: ignore[arg-type]
    assert "broke: KeyError" in refused["job-1"]
    with pytest.raises(GpuUnavailable):
        watch.sample()


def test_an_end_that_cannot_be_told_does_not_undo_those_before_it():
    slots, notes = Slots(), list[Any]()

    def note(event):
        if event.job_id == "job-2":
            raise Overloaded("closed")
        notes.append(event)

    seen = SimpleNamespace(holders=lambda uuids: dict.fromkeys(uuids, ()))
    keeper = Custody(seen, slots, note)  # type: ignore[arg-type]
    gone = [Departure(f"w#{n}", f"job:{n}:1", (GPU,), ECHO, (End(f"job-{n}", 1, Outcome.DONE),)) for n in (1, 2, 3)]
    assert [type(answer) for answer in keeper._look_after(gone)] == [type(None), Overloaded, type(None)]
    assert slots.told == ["reuse w#1", "reuse w#2", "reuse w#3"]
    keeper.close(1.0)


def test_a_process_that_we_may_not_kill_is_left_alone(monkeypatch):
    def refuse(*_given):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    mine = describe(os.getpid(), None)
    assert not strays._kill(mine)


# --- a job without a lease, in a slot that keeps a model ---


@pytest.fixture
def slot():
    """Its process is long gone: signals reach nobody."""
    return SlotProcess(SimpleNamespace(pid=2**22 + 1), None, Flags(), "w#1", ready=True, resident=MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize("lose", [lambda slot: slot.lose_lease(), lambda slot: slot.lose_gpu({"GPU-0"})])
def test_it_is_not_charged_with_what_happens_to_the_model(slot, lose):
    slot.take((ECHO,))
    lose(slot)
    assert slot.dying
    assert [end.outcome for end in slot.run.ends_of_dead(-9)] == [Outcome.HANDED_BACK]


def test_a_model_alone_ends_too(slot):
    slot.lose_lease()
    assert slot.dying


def test_a_job_on_a_lost_gpu_fails(slot):
    lease = Granted(LeaseRequest("a", 4000, 60.0), "gpu", "node-1", (GPU,), None)  # type: ignore[arg-type]
    claim = ECHO._replace(lease=lease._replace(resident=MODEL.key))
    slot.take((claim,))
    slot.lose_gpu({"GPU-0"})
    assert [end.error_kind for end in slot.run.ends_of_dead(-9)] == [ErrorKind.GPU_LOST]


# --- whose process is it? ---


def test_a_child_with_an_environment_of_its_own_is_its_slots():
    inner = [sys.executable, "-c", "print(flush=True); input()"]
    outer = f"import subprocess; subprocess.run({inner!r}, env={{}})"
    with subprocess.Popen(
        [sys.executable, "-c", outer], env={MARK: "w#7"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        (pid,) = map(int, Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())
        assert describe(pid, 100) == GpuProcess(pid, 100, "w#7", describe(pid, None).lineage)
        child.stdin.write(b"\n")
        child.stdin.close()
