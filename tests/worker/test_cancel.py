"""Cancelling a running job: asked, told, killed; and nothing it says afterwards counts."""

import os
import re
import signal
from pathlib import Path

import pytest

from orchestrator.store import audit, withdraw
from tests.processes import gone
from tests.waiting import wait_until
from tests.worker.deaths import declare_dead, freeze
from tests.worker.test_worker import events, leased, submit

#: A process that ends, in the flags that the kernel shows.
PF_EXITING = 0x4

HANDLERS = """
import signal, subprocess, sys, time
from pathlib import Path
from worker import Cancelled, handler

def _note(payload, word):
    with open(payload["notes"], "a") as notes:
        notes.write(word + "\\n")

@handler("polite", min_memory_mb=1000)
def polite(ctx, payload):
    _note(payload, "started")
    while not ctx.cancelled:
        time.sleep(0.01)
    _note(payload, "cleaned up")
    raise Cancelled

@handler("finishing")
def finishing(ctx, payload):
    _note(payload, "started")
    while not ctx.cancelled:
        time.sleep(0.01)
    return "done all the same"

@handler("unaware")
def unaware(ctx, payload):
    _note(payload, "started")
    try:
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass
    finally:
        _note(payload, "cleaned up")

@handler("stubborn")
def stubborn(ctx, payload):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resisting = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", resisting])
    _note(payload, f"started {child.pid}")
    time.sleep(60)

@handler("artifact")
def artifact(ctx, payload):
    with ctx.artifact(payload["path"]) as file:
        file.write(f"attempt {ctx.attempt}".encode())
        _note(payload, "started")
        while Path(payload["gate"]).exists():
            time.sleep(0.01)
    return "written"
"""


@pytest.fixture
def notes(tmp_path):
    return tmp_path / "notes"


@pytest.fixture
def cancel_step_s():
    """Longer than a busy machine lets a handler wait that looks: nobody insists."""
    return 20.0


@pytest.fixture
def worker(cluster, orchestrator, cancel_step_s, tmp_path):
    (tmp_path / "cancel_handlers.py").write_text(HANDLERS)
    return cluster.worker(path=str(tmp_path), worker_handlers=("cancel_handlers",), cancel_step_s=cancel_step_s)


def start(cluster, orchestrator, notes, type, **fields):
    job_id = submit(orchestrator, type, {"notes": str(notes)}, **fields)
    wait_until(lambda: notes.exists() and "started" in notes.read_text(), what="its handler runs")
    cluster.wait_for(job_id, "running")
    return job_id


def cancel(cluster, orchestrator, job_id):
    status = cluster.db.write(lambda conn: withdraw.cancel(conn, job_id))
    orchestrator.hub.ring("cancel")
    return status


def details(cluster, job_id):
    return cluster.db.read(lambda conn: audit.of_job(conn, job_id))[-1]["details"]


def test_a_handler_that_looks_stops_itself_and_its_lease_is_free(cluster, orchestrator, worker, notes):
    job_id = start(cluster, orchestrator, notes, "polite")
    wait_until(lambda: len(worker.slots()) == 2, what="all slots")
    slots = worker.slots()
    assert cancel(cluster, orchestrator, job_id) == "running"
    record = cluster.wait_for(job_id, "cancelled")
    assert notes.read_text().split("\n")[1] == "cleaned up"
    assert worker.slots() == slots, "a cooperative end costs no process"
    assert events(cluster, job_id)[-2:] == ["job.cancel_requested", "job.cancelled"]
    assert details(cluster, job_id)["ended_as"] == "cancelled"
    assert record["stop_seconds"] >= details(cluster, job_id)["stop_seconds"] >= 0
    assert leased(cluster) == 0


def test_a_result_that_comes_after_the_cancel_is_refused(cluster, orchestrator, worker, notes):
    job_id = start(cluster, orchestrator, notes, "finishing")
    cancel(cluster, orchestrator, job_id)
    assert "result" not in cluster.wait_for(job_id, "cancelled")
    assert details(cluster, job_id)["ended_as"] == "done"
    assert cluster.count("orchestrator_results") == 0


@pytest.mark.parametrize("cancel_step_s", [1.5])
def test_a_handler_that_does_not_look_is_interrupted_and_may_clean_up(
    cluster, orchestrator, worker, notes, cancel_step_s
):
    job_id = start(cluster, orchestrator, notes, "unaware")
    cancel(cluster, orchestrator, job_id)
    cluster.wait_for(job_id, "cancelled")
    assert "cleaned up" in notes.read_text()
    assert details(cluster, job_id)["stop_seconds"] >= cancel_step_s


def killed(pid):
    """Whether no line of it runs any more: it got SIGKILL, ends, or has ended. A busy machine may take its time."""
    try:
        (pending,) = re.findall(r"SigPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(pending, 16) & 1 << (signal.SIGKILL - 1) or int(flags) & PF_EXITING or gone(pid))


@pytest.mark.parametrize("cancel_step_s", [0.3])
def test_a_handler_that_resists_is_killed_with_its_children_before_the_job_counts_as_cancelled(
    cluster, orchestrator, worker, notes, cancel_step_s
):
    job_id = start(cluster, orchestrator, notes, "stubborn")
    child = int(notes.read_text().split()[1])
    cancel(cluster, orchestrator, job_id)
    record = cluster.wait_for(job_id, "cancelled")
    assert killed(child)
    wait_until(lambda: gone(child), what="its end")
    assert (record["crashes"], details(cluster, job_id)["ended_as"]) == (0, "failed")
    assert details(cluster, job_id)["stop_seconds"] >= 2 * cancel_step_s
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")


def test_without_the_bell_the_next_heartbeat_brings_the_cancel(cluster, orchestrator, worker, notes):
    job_id = start(cluster, orchestrator, notes, "polite")
    cluster.db.write(lambda conn: withdraw.cancel(conn, job_id))
    cluster.wait_for(job_id, "cancelled")


def test_a_cancelled_job_of_a_dead_worker_is_cancelled_not_retried(cluster, orchestrator, worker, notes):
    job_id = start(cluster, orchestrator, notes, "polite")
    freeze(cluster, worker)
    cluster.db.write(lambda conn: withdraw.cancel(conn, job_id))
    declare_dead(cluster, worker, signal.SIGSTOP)
    cluster.wait_for(job_id, "cancelled")
    worker.kill()
    assert "job.retry" not in events(cluster, job_id)


def test_a_slot_that_somebody_terminates_is_no_cancelled_job(cluster, orchestrator, worker, notes):
    job_id = start(cluster, orchestrator, notes, "unaware", max_attempts=1)
    # Which of its slots runs the job is the worker's secret: idle ones take no notice.
    for pid in worker.slots():
        os.kill(pid, signal.SIGTERM)
    assert cluster.wait_for(job_id, "dead_letter")["error_kind"] == "transient"


# ── artifacts ───────────────────────────────────────────────────────────────────────────────────────────────────


def write(cluster, orchestrator, notes, gate, path, **fields):
    payload = {"notes": str(notes), "gate": str(gate), "path": str(path)}
    job_id = submit(orchestrator, "artifact", payload, **fields)
    wait_until(lambda: notes.exists() and "started" in notes.read_text(), what="its handler runs")
    return job_id


def test_an_artifact_appears_whole_when_its_job_is_done(cluster, orchestrator, worker, notes, gate, tmp_path):
    path = tmp_path / "out" / "model.bin"
    path.parent.mkdir()
    job_id = write(cluster, orchestrator, notes, gate, path)
    assert not path.exists()
    gate.unlink()
    cluster.wait_for(job_id, "done")
    assert path.read_text() == "attempt 1"
    assert [entry.name for entry in path.parent.iterdir() if entry.name.endswith(".part")] == []


def test_a_cancelled_attempt_puts_nothing_in_place(cluster, orchestrator, worker, notes, gate, tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("from before")
    job_id = write(cluster, orchestrator, notes, gate, path)
    cluster.wait_for(job_id, "running")
    cluster.db.write(lambda conn: withdraw.cancel(conn, job_id))
    gate.unlink()
    cluster.wait_for(job_id, "cancelled")
    assert path.read_text() == "from before"


def test_an_attempt_that_was_given_away_puts_nothing_in_place(cluster, orchestrator, worker, notes, gate, tmp_path):
    path = tmp_path / "model.bin"
    job_id = write(cluster, orchestrator, notes, gate, path)
    cluster.wait_for(job_id, "running")
    declare_dead(cluster, worker, signal.SIGSTOP)  # its slots go on
    wait_until(lambda: cluster.job(job_id)["status"] == "pending", what="given away")
    gate.unlink()
    cluster.worker(path=str(tmp_path), worker_handlers=("cancel_handlers",))
    cluster.wait_for(job_id, "done")
    worker.send(signal.SIGCONT)
    worker.says("declared dead")
    assert path.read_text() == "attempt 2"
