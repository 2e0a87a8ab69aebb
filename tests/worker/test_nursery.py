"""Where slots are born: what a forked process shares with its siblings, what not, and what if the nursery dies."""

import errno
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from orchestrator.gpu.processes import describe
from tests.processes import children, few_files, files, gone, parent
from tests.waiting import wait_until
from tests.worker.test_worker import submit
from worker import nursery as nurseries
from worker.nursery import KILLED, Nursery
from worker.wire import Channel

HANDLERS = """
import os, random, subprocess, sys, time
from pathlib import Path
from worker import handler

CHILD = [sys.executable, "-c", "import os; print(os.environ['GPUORCH_SLOT'])"]

@handler("about")
def about(ctx, payload):
    if payload["note"]:
        Path(payload["note"]).write_text(str(os.getpid()))
    while not all(Path(note).exists() for note in payload["until"]):
        time.sleep(0.01)
    files = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    open_files = [str(file.readlink()) for file in files if file.is_symlink() and int(file.name) > 2]
    return {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "random": random.random(),
        "settings": [name for name in os.environ if name.startswith("ORCH_")],
        "shown": Path("/proc/self/environ").read_bytes().count(b"\\0ORCH_"),
        "mark": os.environ["GPUORCH_SLOT"],
        "child": subprocess.check_output(CHILD, text=True).strip(),
        "sockets": sum(name.startswith("socket:") for name in open_files),
    }
"""


@pytest.fixture
def no_processes(tmp_path, monkeypatch):
    """While this file is there, the nursery gets no process from the kernel."""
    monkeypatch.setenv("NO_PROCESSES", str(tmp_path / "no_processes"))
    return tmp_path / "no_processes"


@pytest.fixture
def nursery(no_processes):
    one = Nursery(["tests.worker.no_processes"])
    yield one
    one.close()


@pytest.fixture
def bear(nursery):
    """A slot with builtin handlers, and our end of its channel: `bear("w#1")`."""
    opened = []

    def start(mark="w#1", **environment):
        ours, theirs = Channel.pair()
        files = [os.memfd_create(name, 0) for name in ("lifeline", "flags")]
        for fd in files:
            os.ftruncate(fd, 4096)
        try:
            child = nursery.bear(["1000", "{}"], [theirs.fileno(), *files], environment, mark)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in files:
                os.close(fd)
        opened.append((ours, child))
        return child, ours

    yield start
    for ours, child in opened:
        ours.close()
        os.close(child.pidfd)


def test_a_slot_wears_its_own_mark(bear):
    (one, first), (two, second) = bear("w#1"), bear("worker-with-a-long-name-" + "x" * 130 + "#2")
    first.receive()
    second.receive()
    assert describe(one.pid, None).mark == "w#1"
    assert describe(two.pid, None).mark == "worker-with-a-long-name-" + "x" * 130 + "#2"
    assert describe(parent(one.pid), None).mark is None


def test_a_slot_leads_its_group_from_the_first_moment(bear):
    """Whoever kills it kills the group: one that is not there yet would be left alive."""
    for number in range(10):
        child, _ = bear(f"w#{number}")
        assert os.getpgid(child.pid) == child.pid


def test_how_a_slot_ended_is_told_when_it_is_reaped(bear):
    (asked, pipe), (killed, _) = bear(), bear()
    pipe.receive()
    pipe.send({"stop": True})
    os.killpg(killed.pid, signal.SIGKILL)
    wait_until(lambda: gone(asked.pid) and gone(killed.pid), what="their end")
    assert Path(f"/proc/{asked.pid}").exists()  # its number is nobody else's yet
    assert (asked.reap(), killed.reap()) == (0, -signal.SIGKILL)
    assert not Path(f"/proc/{asked.pid}").exists()


def test_slots_die_with_their_nursery_and_the_next_is_born_by_another(bear):
    child, _ = bear()
    os.kill(parent(child.pid), signal.SIGKILL)
    wait_until(lambda: gone(child.pid), what="its end")
    assert child.reap() == KILLED
    again, pipe = bear()
    assert "hello" in pipe.receive()[0]
    assert parent(again.pid) != parent(os.getpid())


def test_whoever_asks_all_processes_to_stop_does_not_end_the_slots(bear):
    """A service manager may: the supervisor lets jobs end first, and its slots with them."""
    child, pipe = bear()
    pipe.receive()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(parent(child.pid), number)
    again, _ = bear("w#2")
    assert parent(again.pid) == parent(child.pid)
    assert not gone(child.pid)


def test_a_nursery_that_does_not_answer_is_replaced(bear, nursery):
    child, _ = bear()
    frozen = parent(child.pid)
    os.kill(frozen, signal.SIGSTOP)
    end = nursery._process._end
    assert end.gettimeout() == nurseries.PATIENCE_S
    end.settimeout(0.1)  # of this one alone: the next may take its time to start
    _, pipe = bear()
    assert "hello" in pipe.receive()[0]
    wait_until(lambda: gone(frozen) and gone(child.pid), what="the end of the frozen one, and of its slots")


def test_a_nursery_ends_when_nobody_can_ask_it_any_more(bear, nursery):
    child, _ = bear()
    mother = parent(child.pid)
    nursery._process._end.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: gone(mother) and gone(child.pid), what="their end")


def test_slots_live_on_when_there_is_no_process_for_another(bear, no_processes):
    child, pipe = bear("w#1")
    no_processes.touch()
    with pytest.raises(OSError, match="no more processes"):
        bear("w#2")
    no_processes.unlink()
    again, _ = bear("w#3")
    assert parent(again.pid) == parent(child.pid)
    assert "hello" in pipe.receive()[0]


@pytest.mark.parametrize("free", [2, 3], ids=["for those of the slot", "to watch the slot by"])
def test_slots_live_on_when_their_nursery_has_no_file(bear, free):
    child, pipe = bear("w#1")
    mother = parent(child.pid)
    wait_until(lambda: "pidfd" not in "".join(files(mother).values()), what="that it has handed out the first")
    before = files(mother)
    with few_files(mother, free), pytest.raises(OSError, match="open files"):
        bear("w#2")
    again, _ = bear("w#3")
    assert parent(again.pid) == mother
    assert children(mother) == {child.pid, again.pid}
    wait_until(lambda: files(mother) == before, what="that it has closed the files of the one that was not born")
    assert "hello" in pipe.receive()[0]


def test_slots_live_on_when_their_nursery_cannot_be_asked_for_another(bear, monkeypatch):
    child, _ = bear("w#1")
    send = Mock(side_effect=OSError(errno.ENOBUFS, "no memory for a message"))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no memory for a message"):
        patched.setattr(socket, "send_fds", send)
        bear("w#2")
    send.assert_called_once()  # whoever asks again has to wait before
    again, _ = bear("w#3")
    assert parent(again.pid) == parent(child.pid)


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def worker(cluster, tmp_path):
    (tmp_path / "nursery_handlers.py").write_text(HANDLERS)
    return cluster.worker(path=str(tmp_path), worker_handlers=("nursery_handlers",), worker_slots=4)


def run(cluster, orchestrator, *notes):
    """What the slot that ran it says; with several `notes` in as many slots at once, each of which waits for all."""
    jobs = [submit(orchestrator, "about", {"note": note, "until": notes}) for note in notes or (None,)]
    return [cluster.wait_for(job, "done")["result"] for job in jobs]


def test_slots_share_nothing_that_they_must_not(cluster, orchestrator, worker, tmp_path):
    seen = run(cluster, orchestrator, str(tmp_path / "one"), str(tmp_path / "two"))
    assert [len({one[what] for one in seen}) for what in ("pid", "random", "mark")] == [2, 2, 2]
    assert all(one["child"] == one["mark"] for one in seen)
    assert all(one["group"] == one["pid"] for one in seen)
    assert [(one["settings"], one["shown"], one["sockets"]) for one in seen] == [([], 0, 1)] * 2


def test_a_worker_outlives_its_nursery(cluster, orchestrator, worker):
    first = run(cluster, orchestrator)[0]["pid"]
    os.kill(parent(first), signal.SIGKILL)
    wait_until(lambda: gone(first), what="its end")
    assert run(cluster, orchestrator)[0]["pid"] != first


def test_a_slot_that_cannot_be_forked_costs_no_job_of_its_neighbours(cluster, orchestrator, worker, tmp_path):
    begun, enough = tmp_path / "begun", tmp_path / "enough"
    job_id = submit(orchestrator, "about", {"note": str(begun), "until": [str(enough)]})
    wait_until(lambda: begun.exists() and begun.read_text(), what="it runs")
    wait_until(lambda: len(worker.slots()) == 4, what="all slots")
    (mother,) = children(worker.process.pid)
    with few_files(mother, 3):
        os.kill((worker.slots() - {int(begun.read_text())}).pop(), signal.SIGKILL)
        worker.says("no slot could be started")
    wait_until(lambda: len(worker.slots()) == 4, what="all slots again")
    enough.touch()
    record = cluster.wait_for(job_id, "done")
    assert (record["attempt"], record["crashes"]) == (1, 0)
    assert children(worker.process.pid) == {mother}


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_outlives_a_worker_that_is_killed(cluster, orchestrator, worker, frozen):
    slot = run(cluster, orchestrator)[0]["pid"]
    mother = parent(slot)
    if frozen:
        os.kill(mother, signal.SIGSTOP)
    worker.kill()
    wait_until(lambda: gone(slot) and gone(mother), what="their end")


def test_a_slot_that_cannot_be_told_of_does_not_live_and_costs_no_other(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def no_memory(*_):
        raise OSError(errno.ENOBUFS, "no buffer space")

    monkeypatch.setattr(socket, "send_fds", no_memory)
    with ours, theirs, subprocess.Popen(["sleep", "600"], start_new_session=True) as slot:
        try:
            nurseries._tell_of(theirs, slot.pid, os.pidfd_open(slot.pid))
            assert gone(slot.pid)
        finally:
            slot.kill()
        assert json.loads(ours.recv(1000)) == {"failed": [errno.ENOBUFS, "no buffer space"]}
