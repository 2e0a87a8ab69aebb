"""A pod that is taken away: the preStop hook lets its jobs end where they are; whatever follows, none is lost."""

import signal
import subprocess

import pytest

from orchestrator.cli import prestop as prestop_command
from orchestrator.cli import run
from orchestrator.store import schema
from tests.factories import new_job
from tests.waiting import wait_until
from tests.worker.test_worker import events

GATED = ("tests.worker.gated_handlers",)


def submit(orchestrator, gate, count):
    jobs = [new_job(type="gated", payload={"gate": str(gate)}) for _ in range(count)]
    orchestrator.submit(jobs).result(10)
    return [job.job_id for job in jobs]


def prestop(cluster, worker, timeout_s=60.0):
    """What the kubelet runs in the container."""
    return cluster._start(f"drain-worker --pid {worker.process.pid} --timeout {timeout_s}", {})


def is_draining(cluster):
    return cluster.count("workers", schema.workers.c.status == "draining")


def test_running_jobs_end_where_they_are_and_nothing_new_begins(cluster, orchestrator, gate):
    """Long beyond the grace of a SIGTERM, and although somebody else could take them."""
    worker = cluster.worker(worker_grace_s=0.0, worker_handlers=GATED)
    running = submit(orchestrator, gate, 2)
    for job_id in running:
        cluster.wait_for(job_id, "running")
    (waiting,) = submit(orchestrator, gate, 1)
    hook = prestop(cluster, worker)
    wait_until(lambda: is_draining(cluster), what="it drains")
    # A job that its slots were too full for, with all of the drain's time to be claimed by mistake.
    assert cluster.job(waiting)["status"] == "pending"
    assert hook.process.poll() is None and worker.process.poll() is None
    gate.unlink()
    assert worker.process.wait(30) == 0
    assert (hook.process.wait(30), hook.log.read_text()) == (0, "the worker is gone\n")
    for job_id in running:
        record = cluster.job(job_id)
        assert (record["status"], record["attempt"], record["attempts"]) == ("done", 1, 1)
        assert "job.handed_back" not in events(cluster, job_id)
    assert cluster.job(waiting)["status"] == "pending"
    assert cluster.count("workers", schema.workers.c.status == "stopped") == 1


def test_a_hook_that_loses_patience_leaves_the_rest_to_sigterm(cluster, orchestrator, gate):
    """As Kubernetes does: the hook's time is over, SIGTERM, and the job runs elsewhere, uncharged."""
    worker = cluster.worker(worker_grace_s=0.2, worker_handlers=GATED)
    (job_id,) = submit(orchestrator, gate, 1)
    cluster.wait_for(job_id, "running")
    hook = prestop(cluster, worker, timeout_s=1.0)
    wait_until(lambda: is_draining(cluster), what="it drains")
    assert hook.process.wait(30) == 1 and "SIGTERM" in hook.log.read_text()
    assert cluster.job(job_id)["status"] == "running"
    assert worker.stop() == 0
    cluster.worker(worker_handlers=GATED)
    gate.unlink()
    record = cluster.wait_for(job_id, "done")
    assert (record["attempt"], record["attempts"], record["crashes"]) == (2, 1, 0)
    assert "job.handed_back" in events(cluster, job_id)


@pytest.mark.parametrize("worker_timeout_s", [2.0])
def test_a_pod_killed_in_the_middle_of_its_drain_loses_nothing(cluster, orchestrator, gate):
    worker = cluster.worker(worker_handlers=GATED)
    (job_id,) = submit(orchestrator, gate, 1)
    cluster.wait_for(job_id, "running")
    worker.send(signal.SIGUSR1)
    wait_until(lambda: is_draining(cluster), what="it drains")
    worker.kill()
    cluster.worker(worker_handlers=GATED)
    gate.unlink()
    record = cluster.wait_for(job_id, "done")
    assert (record["attempt"], record["crashes"]) == (2, 1)


def test_an_idle_worker_is_gone_at_once(cluster, orchestrator):
    worker = cluster.worker()
    hook = prestop(cluster, worker)
    assert worker.process.wait(30) == 0
    assert hook.process.wait(30) == 0


#: A shell with a trap catches every signal that would end it, and then ends.
TRAPPING = ["bash", "-c", "trap 'echo bye' EXIT; echo; read line", "gpuorch worker"]


@pytest.mark.parametrize("command", [["sleep", "60"], TRAPPING], ids=["sleep", "bash"])
def test_a_process_that_would_die_of_the_signal_is_sent_none(capsys, command):
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        if command is TRAPPING:
            assert other.stdout is not None and other.stdout.readline()  # its trap is set
        assert run(["drain-worker", "--pid", str(other.pid), "--timeout", "0.5"]) == 1
        assert other.poll() is None
        other.kill()
    assert "--pid" in capsys.readouterr().err


def test_a_shell_in_the_worker_s_place_is_told_long_before_the_timeout(monkeypatch, capsys):
    """Silence until the pod is killed would leave its worker taking jobs to the last."""
    monkeypatch.setattr(prestop_command, "START_S", 0.3)
    with subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE) as shell:
        assert run(["drain-worker", "--pid", str(shell.pid), "--timeout", "3600"]) == 1
        assert shell.poll() is None
        shell.kill()
    told = capsys.readouterr().err
    assert f"process {shell.pid} is no gpuorch worker that can be drained; name the worker's with --pid" in told
    assert "host:pid:nonce (gpuorch workers list)" in told


def test_a_worker_that_is_not_there_is_told(capsys):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert run(["drain-worker", "--pid", str(gone.pid)]) == 1
    told = capsys.readouterr().err
    assert f"no process {gone.pid}; name the worker's with --pid" in told
    assert "host:pid:nonce (gpuorch workers list)" in told
