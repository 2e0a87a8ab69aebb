"""Handlers and slots that misbehave, and a supervisor that cannot act: no job is stranded, no memory used twice."""

import os
import signal

import pytest
from sqlalchemy import func, make_url, select, text

from orchestrator.store import schema, withdraw
from orchestrator.store.dialect import seconds_since
from tests.factories import new_job
from tests.processes import alive, parent
from tests.proxy import Proxy
from tests.waiting import wait_until
from tests.worker.databases import locked_gpus
from tests.worker.test_worker import events, submit

HANDLERS = """
import os, signal, struct, subprocess, sys, time
from worker import Retry, handler

def _note(payload):
    with open(payload["notes"], "a") as notes:
        notes.write(f"{os.getpid()}\\n")

@handler("later")
def later(ctx, payload):
    if ctx.attempt == 1:
        raise Retry("busy", after="0.1")  # text, as it came in somebody's header
    return "done"

@handler("hold", min_memory_mb=9000)
def hold(ctx, payload):
    _note(payload)
    time.sleep(60)

@handler("half")
def half(ctx, payload):
    if payload["how"] == "killed" and os.fork() == 0:
        time.sleep(60)  # a child that inherited the pipe
    os.write(int(sys.argv[1]), struct.pack("!i", 900_000) + b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL if payload["how"] == "killed" else signal.SIGSTOP)
    time.sleep(60)

@handler("warm")
class Warm:
    def load(self, ctx):
        self.engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def run(self, ctx, payload):
        if self.engine.poll() is not None:
            raise RuntimeError("the engine is gone")
        _note(payload)
        while payload["long"]:
            time.sleep(0.02)
"""


#: Of those who wait for the end of a worker that is silent, or of its leases.
SOON = pytest.mark.parametrize("worker_timeout_s", [2.0])


@pytest.fixture
def start(cluster, orchestrator, tmp_path):
    (tmp_path / "unruly_handlers.py").write_text(HANDLERS)
    given = {
        "worker_handlers": ("unruly_handlers", "tests.worker.gated_handlers"),
        "gpu_backend": "sim:1x10500",
        "worker_heartbeat_s": 0.6,
        "claim_idle_ms": 1500,
    }
    return lambda **more: cluster.worker(path=str(tmp_path), **given | more)


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes"
    path.touch()
    return path


def port_of(cluster) -> int:
    return int(make_url(cluster.settings.database_url).port or 3306)


def behind(cluster, proxy):
    """The database's URL through the proxy."""
    return make_url(cluster.settings.database_url).set(port=proxy.port).render_as_string(hide_password=False)


def pids(notes):
    return [int(line) for line in notes.read_text().split()]


def test_a_pause_that_is_no_number_is_left_to_the_usual_backoff(cluster, orchestrator, start):
    start()
    record = cluster.wait_for(submit(orchestrator, "later", {}), "done")
    assert (record["attempt"], record["crashes"]) == (2, 0)


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_half_an_answer_holds_up_nobody_else(cluster, orchestrator, start, how):
    """A slot that is frozen in the middle of its answer, or dies there while a child keeps the pipe open."""
    start()
    unfinished = submit(orchestrator, "half", {"how": how}, max_attempts=1)
    cluster.wait_for(unfinished, "dead_letter")
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")


def test_a_job_that_was_terminated_leaves_no_broken_engine_to_the_next(cluster, orchestrator, start, notes):
    start(worker_slots=1, cancel_step_s=0.3)
    long = submit(orchestrator, "warm", {"notes": str(notes), "long": True})
    wait_until(lambda: pids(notes), what="it runs")
    cluster.db.write(lambda conn: withdraw.cancel(conn, long))
    orchestrator.hub.ring("cancel")
    cluster.wait_for(long, "cancelled")
    following = submit(orchestrator, "warm", {"notes": str(notes), "long": False}, max_attempts=1)
    cluster.wait_for(following, "done")


@pytest.mark.parametrize(("seconds", "grace_s", "status"), [(600, 1.0, "pending"), (0.2, 60.0, "done")])
def test_a_claim_that_comes_while_the_worker_stops_is_finished_or_handed_back(
    cluster, orchestrator, start, seconds, grace_s, status
):
    worker = start(worker_grace_s=grace_s)
    job = new_job(type="sleep", payload={"seconds": seconds}, min_memory_mb=100)
    waits = text("SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'UPDATE gpus SET leased%'")
    with locked_gpus(cluster):
        orchestrator.submit([job]).result(10)
        wait_until(lambda: cluster.db.read(lambda conn: conn.execute(waits).scalar_one()), what="a claim that waits")
        worker.send(signal.SIGTERM)
    assert worker.process.wait(30) == 0
    record = cluster.wait_for(job.job_id, status)
    assert (record["attempts"], record["crashes"]) == (int(status == "done"), 0)


# ── memory that was given away must not be in use ───────────────────────────────────────────────────────────────


def memory_is_used_by_one_at_a_time(cluster, orchestrator, start, notes, block, **first):
    """The first worker holds the GPU and is cut off; whoever gets the memory next, the first is gone by then."""
    start(worker_slots=1, **first)
    submit(orchestrator, "hold", {"notes": str(notes)}, max_attempts=1)
    wait_until(lambda: pids(notes), what="the first runs")
    start(worker_slots=1)
    submit(orchestrator, "hold", {"notes": str(notes)})
    block()
    wait_until(lambda: len(pids(notes)) > 1, what="the second runs")
    assert not alive(pids(notes)[0])


@SOON
def test_a_worker_that_cannot_reach_the_database_ends_leased_jobs_in_time(cluster, orchestrator, start, notes):
    with Proxy(port_of(cluster)) as proxy:
        through = behind(cluster, proxy)
        memory_is_used_by_one_at_a_time(cluster, orchestrator, start, notes, proxy.stall, database_url=through)


@SOON
def test_slots_of_a_frozen_supervisor_end_their_leased_jobs_themselves(cluster, orchestrator, start, notes):
    def freeze():
        # Its first slot wrote the note; that one's parent is the nursery, and the supervisor the parent of that.
        os.kill(parent(parent(pids(notes)[0])), signal.SIGSTOP)

    memory_is_used_by_one_at_a_time(cluster, orchestrator, start, notes, freeze)


@SOON
def test_a_leased_job_that_nobody_vouches_for_is_handed_back_uncharged(cluster, orchestrator, start, notes):
    with Proxy(port_of(cluster)) as proxy:
        start(worker_slots=1, database_url=behind(cluster, proxy))
        job_id = submit(orchestrator, "hold", {"notes": str(notes)})
        wait_until(lambda: pids(notes), what="it runs")
        orchestrator.leader.close()  # nobody declares it dead
        proxy.stall()
        wait_until(lambda: not alive(pids(notes)[0]), what="its process is gone")
        proxy.heal()
        wait_until(lambda: "job.handed_back" in events(cluster, job_id), what="handed back")
        assert cluster.job(job_id)["crashes"] == 0


@SOON
def test_a_job_without_a_lease_survives_a_database_that_is_away(cluster, orchestrator, start, gate):
    with Proxy(port_of(cluster)) as proxy:
        start(worker_slots=1, database_url=behind(cluster, proxy))
        job_id = submit(orchestrator, "gated", {"gate": str(gate)})
        cluster.wait_for(job_id, "running")
        orchestrator.leader.close()  # nobody declares it dead
        proxy.stall()
        wait_until(lambda: silent_s(cluster) > cluster.settings.job_lease_ttl_s, what="a lease would be over")
        proxy.heal()
        gate.unlink()
        assert cluster.wait_for(job_id, "done")["attempt"] == 1


@pytest.mark.parametrize("worker_timeout_s", [12.0])
def test_a_worker_whose_connections_died_in_silence_keeps_its_job(cluster, orchestrator, start, gate):
    """However long its other questions may take: it is heard again before the leader gives it up."""
    with Proxy(port_of(cluster)) as proxy:
        start(worker_slots=1, database_url=behind(cluster, proxy), db_timeout_s=600.0)
        job_id = submit(orchestrator, "gated", {"gate": str(gate)})
        cluster.wait_for(job_id, "running")
        proxy.strand()
        before = proxy.accepted
        wait_until(lambda: proxy.accepted > before, what="another connection")
        silent = heard(cluster)
        wait_until(lambda: heard(cluster) > silent, what="a heartbeat")
        assert cluster.count("workers", schema.workers.c.status == "lost") == 0
        assert [cluster.job(job_id)[what] for what in ("status", "attempt")] == ["running", 1]


def heard(cluster):
    """When the youngest heartbeat came."""
    return cluster.db.read(lambda conn: conn.execute(select(func.max(schema.workers.c.last_heartbeat))).scalar_one())


def silent_s(cluster):
    """How long ago that was."""
    age_s = seconds_since(func.max(schema.workers.c.last_heartbeat))
    return float(cluster.db.read(lambda conn: conn.execute(select(age_s)).scalar_one()))
