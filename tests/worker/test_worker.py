"""A worker as a real process: outcomes, crashes, time limits, leases, and leaving in order."""

import math
import re
import signal
import threading
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import func, select

from orchestrator.daemon import Orchestrator
from orchestrator.store import audit, schema
from tests.factories import new_job
from tests.processes import alive, gone
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO
from worker import hand
from worker.node import Node
from worker.post import Post
from worker.process import SlotProcess
from worker.session import Session

GATED = ("tests.worker.gated_handlers",)


def submit(orchestrator, type, payload, **fields):
    job = new_job(type=type, payload=payload, **fields)
    orchestrator.submit([job]).result(10)
    return job.job_id


def events(cluster, job_id):
    return [event["event_type"] for event in cluster.db.read(lambda conn: audit.of_job(conn, job_id))]


def moves(cluster, job_id):
    """What became of it, but for that it ran: that is told only of what takes longer than a moment, on this machine."""
    return [event for event in events(cluster, job_id) if event != "job.running"]


def wait_for_heartbeat(cluster):
    """The next of any worker."""
    latest = select(func.max(schema.workers.c.last_heartbeat))
    look = lambda: cluster.db.read(lambda conn: conn.execute(latest).scalar_one())
    before = look()
    wait_until(lambda: look() > before, what="a heartbeat")


def leased(cluster):
    return cluster.db.read(lambda conn: sum(conn.execute(select(schema.gpus.c.leased_mb)).scalars()))


@EMBEDDED_TOO
def test_every_way_a_handler_can_end(cluster, orchestrator, raw):
    cluster.worker()
    done = submit(orchestrator, "echo", {"hello": "wörld"}, min_memory_mb=2000)
    skipped = submit(orchestrator, "fail", {"kind": "skip", "message": "nothing to do"})
    failed = submit(orchestrator, "fail", {"kind": "permanent", "message": "never"})
    retried = submit(orchestrator, "fail", {"kind": "transient", "times": 1})
    asked = submit(orchestrator, "fail", {"kind": "retry", "after": 0.05, "times": 1})
    used_up = submit(orchestrator, "fail", {"message": "again and again"}, max_attempts=2)

    record = cluster.wait_for(done, "done")
    assert record["result"] == {"hello": "wörld"}
    assert moves(cluster, done) == ["job.submitted", "job.claimed", "job.done"]
    assert cluster.wait_for(skipped, "skipped")["last_error"] == "nothing to do"
    assert cluster.wait_for(failed, "failed")["error_kind"] == "permanent"
    assert cluster.wait_for(retried, "done")["attempts"] == 2
    assert cluster.wait_for(asked, "done")["result"] == {"attempt": 2}
    buried = cluster.wait_for(used_up, "dead_letter")
    assert (buried["attempts"], "again and again" in buried["last_error"]) == (2, True)
    assert wait_until(lambda: raw.xlen("stream:orchestrator:dlq") == 1)
    assert wait_until(lambda: leased(cluster) == 0 and cluster.count("orchestrator_leases") == 0)
    assert wait_until(lambda: orchestrator.hub.lane("default").length() == 0)


@EMBEDDED_TOO
def test_a_job_that_kills_its_process_twice_is_buried_and_the_worker_lives(cluster, orchestrator):
    cluster.worker()
    crashing = submit(orchestrator, "crash", {}, min_memory_mb=100)
    record = cluster.wait_for(crashing, "dead_letter")
    assert (record["crashes"], record["error_kind"]) == (2, "worker_lost")
    assert "SIGKILL" in record["last_error"]
    assert leased(cluster) == 0
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")


def test_a_job_over_its_time_limit_is_killed_with_its_children(cluster, orchestrator, tmp_path):
    (tmp_path / "slow_handlers.py").write_text(
        "import subprocess, time\n"
        "from worker import handler\n"
        "@handler('child')\n"
        "def child(ctx, payload):\n"
        "    return subprocess.Popen(['sleep', '600']).pid\n"
        "@handler('slow')\n"
        "def slow(ctx, payload):\n"
        "    time.sleep(600)\n"
    )
    cluster.worker(path=str(tmp_path), worker_handlers=("slow_handlers",), worker_slots=1)
    # By a job before it: it might be killed before it has one.
    child = cluster.wait_for(submit(orchestrator, "child", {}), "done")["result"]
    assert alive(child)
    slow = submit(orchestrator, "slow", {}, max_runtime_sec=0.2, max_attempts=1)
    record = cluster.wait_for(slow, "dead_letter")
    assert record["error_kind"] == "timeout"
    # Killed with the group; whoever adopted it may take a moment to collect it.
    wait_until(lambda: gone(child), what="the end of its child")


def test_a_result_that_is_not_json_too_large_or_too_deep_fails_for_good(cluster, orchestrator, tmp_path):
    """It may nest as deep as a payload."""
    (tmp_path / "odd_handlers.py").write_text(
        "from worker import handler\n"
        "@handler('odd')\n"
        "def odd(ctx, payload):\n"
        "    return {'nan': float('nan'), 'set': {1}, 'large': 'x' * 2_000_000}[payload['which']]\n"
        "@handler('deep')\n"
        "def deep(ctx, payload):\n"
        "    value = 1\n"
        "    for _ in range(payload['levels']):\n"
        "        value = [value]\n"
        "    return value\n"
        "@handler('leaves')\n"
        "def leaves(ctx, payload):\n"
        "    raise SystemExit(3)\n"
    )
    cluster.worker(path=str(tmp_path), worker_handlers=("odd_handlers",))
    ids = [submit(orchestrator, "odd", {"which": which}) for which in ("nan", "set", "large")]
    fine, too_deep = (submit(orchestrator, "deep", {"levels": levels}) for levels in (64, 900))
    leaves = submit(orchestrator, "leaves", {}, max_attempts=1)
    for job_id in [*ids, too_deep]:
        record = cluster.wait_for(job_id, "failed")
        assert (record["error_kind"], record["attempts"]) == ("bad_result", 1)
    cluster.wait_for(fine, "done")
    record = cluster.wait_for(leaves, "dead_letter")
    assert (record["error_kind"], record["crashes"]) == ("transient", 0)


def test_a_class_loads_once_per_slot(cluster, orchestrator, tmp_path):
    (tmp_path / "warm_handlers.py").write_text(
        "from worker import handler\n"
        "@handler('warm')\n"
        "class Warm:\n"
        "    loads = 0\n"
        "    def load(self, ctx):\n"
        "        type(self).loads += 1\n"
        "    def run(self, ctx, payload):\n"
        "        return self.loads\n"
    )
    cluster.worker(path=str(tmp_path), worker_handlers=("warm_handlers",), worker_slots=1)
    ids = [submit(orchestrator, "warm", {}) for _ in range(3)]
    assert [cluster.wait_for(job_id, "done")["result"] for job_id in ids] == [1, 1, 1]


def test_the_leased_gpu_is_the_one_the_handler_sees_and_its_memory_is_sampled(cluster, orchestrator):
    cluster.worker()
    job_id = submit(orchestrator, "allocate", {"memory_mb": 3000, "seconds": 600}, min_memory_mb=4000)
    cluster.wait_for(job_id, "running")

    def sampled():
        rows = cluster.db.read(lambda conn: conn.execute(select(schema.gpus)).all())
        return [row for row in rows if (row.leased_mb, row.used_mb, row.foreign_mb) == (4000, 3000, 0)]

    assert len(wait_until(sampled, what="sampled memory")) == 1


def test_a_job_without_room_waits_with_a_reason_and_runs_when_there_is_room(cluster, orchestrator):
    cluster.worker()
    first = [submit(orchestrator, "sleep", {"seconds": 600}, min_memory_mb=20000) for _ in range(2)]
    for job_id in first:
        cluster.wait_for(job_id, "running")
    # Both GPUs are full, and so are both slots: a second worker on the node has free slots but no memory.
    cluster.worker()
    waiting = submit(orchestrator, "echo", {}, min_memory_mb=10000)

    def told():
        """On a busy machine the first reason may be that a sample is old."""
        reason = cluster.job(waiting)["wait_reason"] or ""
        return "needs 10000 MB" in reason and "2118 of 22118 MB free" in reason

    wait_until(told, what=lambda: f"a reason: {cluster.job(waiting)}")
    assert cluster.job(waiting)["attempts"] == 0
    fallback = submit(orchestrator, "echo", {}, min_memory_mb=10000, cpu_fallback=True)
    cluster.wait_for(fallback, "done")


@EMBEDDED_TOO
def test_sigterm_hands_a_running_job_back_and_it_runs_elsewhere_at_once_uncharged(cluster, orchestrator):
    first = cluster.worker(worker_grace_s=0.0)
    job_id = submit(orchestrator, "sleep", {"seconds": 600}, min_memory_mb=1000)
    cluster.wait_for(job_id, "running")
    before = cluster.job(job_id)["worker_id"]
    cluster.worker()
    assert first.stop() == 0
    record = cluster.wait_for(job_id, "running")
    assert record["worker_id"] != before
    assert (record["attempt"], record["attempts"]) == (2, 1)
    assert "job.handed_back" in events(cluster, job_id)
    workers = cluster.db.read(lambda conn: conn.execute(select(schema.workers)).all())
    assert {row.status for row in workers if row.worker_id == before} == {"stopped"}
    assert leased(cluster) == 1000


@pytest.fixture
def session(cluster):
    """A worker of two slots in this process."""
    with ExitStack() as stack:
        node = Node(cluster.settings.model_copy(update={"worker_handlers": GATED}), lambda: None)
        stack.callback(node.close)
        node.start()
        one = Session(node, Post("default", 2))
        stack.callback(one.abandon)
        yield one


class Doorkeeper:
    """Says for a worker's intake whether it may read; `rests` when it has heard that it may not."""

    def __init__(self):
        self.open, self.rests = threading.Event(), threading.Event()

    def __call__(self):
        if not self.open.is_set():
            self.rests.set()
        return self.open.is_set()


def test_jobs_claimed_ahead_go_back_uncharged_when_slow_ones_take_the_slots(
    cluster, orchestrator, session, gate, monkeypatch
):
    """The slow ones leave them no slot, and perhaps another worker has one."""
    # However busy this machine is: four jobs that end are brief ones in a row.
    monkeypatch.setattr(hand, "BRIEF_S", math.inf)
    monkeypatch.setattr(hand, "IN_A_ROW", 4)
    door = Doorkeeper()
    monkeypatch.setattr(session._intake, "_vouched", door)
    door.open.set()
    session.begin()

    def claims_ahead():
        cluster.wait_for(submit(orchestrator, "echo", {}), "done")
        return session._slots._hand.open

    wait_until(claims_ahead, what="that it claims ahead")
    door.open.clear()
    wait_until(door.rests.is_set, what="that it reads nothing")
    slow = [new_job(type="gated", payload={"gate": str(gate)}) for _ in range(2)]
    behind = [new_job(type="echo") for _ in range(8)]
    orchestrator.submit([*slow, *behind]).result(10)
    wait_until(lambda: orchestrator.hub.lane("default").length() == 10, what="all are announced")
    door.open.set()
    for job in slow:
        cluster.wait_for(job.job_id, "running")
    handed_back = schema.audit.c.event_type == "job.handed_back"
    wait_until(lambda: cluster.count("orchestrator_audit", handed_back), what="some that were claimed ahead")
    gate.unlink()
    ends = [cluster.wait_for(job.job_id, "done") for job in [*slow, *behind]]
    assert {end["attempts"] for end in ends} == {1} and {end["crashes"] for end in ends} == {0}


def test_a_job_that_no_slot_can_take_is_charged_and_costs_no_slot(cluster, orchestrator, session, monkeypatch):
    """Handed back uncharged it would come again for ever, and each time take a slot with it."""
    take = SlotProcess.take

    def picky(slot, batch):
        if batch[0].agent == "broken":
            raise TypeError("no number")
        take(slot, batch)

    monkeypatch.setattr(SlotProcess, "take", picky)
    session.begin()
    broken = [submit(orchestrator, "echo", {}, agent="broken", max_attempts=1, min_memory_mb=100) for _ in range(3)]
    ends = [cluster.wait_for(job_id, "dead_letter") for job_id in broken]
    assert {end["last_error"] for end in ends} == {"no slot could take it: TypeError: no number"}
    others = [submit(orchestrator, "echo", {}) for _ in range(2)]
    assert all(cluster.wait_for(job_id, "done") for job_id in others)
    assert session._slots.usable() == 2 and leased(cluster) == 0


@pytest.mark.parametrize("ended", ["while its job runs", "after its job"])
def test_a_worker_that_stops_leaves_no_process_of_a_handler_behind(cluster, orchestrator, gate, tmp_path, ended):
    """It left its slot's group and session, and is known by the mark in its environment."""
    told = tmp_path / "pid"
    worker = cluster.worker(worker_handlers=GATED)
    job_id = submit(orchestrator, "leaves", {"pid": str(told), "gate": str(gate)})
    cluster.wait_for(job_id, "running")
    child = int(wait_until(lambda: told.exists() and told.read_text(), what="its child"))
    if ended == "after its job":
        gate.unlink()
        cluster.wait_for(job_id, "done")
        assert alive(child)
    assert worker.stop() == 0
    assert gone(child)


@EMBEDDED_TOO
def test_a_worker_that_stops_does_not_wait_until_its_listeners_have_heard_enough(cluster, raw):
    """Both listen to Redis for a minute: one for jobs, one for the bell."""
    # A supervisor does not wait for its posts for ever; here it waits longer than this test does.
    worker = cluster.worker(redis_block_ms=60_000, redis_timeout_s=90.0, db_timeout_s=30.0)
    wait_until(lambda: raw.info("clients")["blocked_clients"] == 2, what="both listen")
    assert worker.stop(30) == 0


def test_a_slot_that_runs_nothing_goes_at_once_when_its_worker_stops(cluster, orchestrator, gate):
    """Somebody may wait for its memory: neither the longest job counts nor the read that nobody interrupts."""
    given = {"redis_block_ms": 60_000, "redis_timeout_s": 90.0, "worker_grace_s": 600.0}
    worker = cluster.worker(worker_handlers=GATED, worker_slots=2, **given)
    job_id = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(job_id, "running")
    worker.send(signal.SIGTERM)
    wait_until(lambda: len(worker.slots()) == 1, what="the end of the slot that is free")
    assert cluster.job(job_id)["status"] == "running"
    gate.unlink()
    assert worker.process.wait(30) == 0
    assert cluster.job(job_id)["attempt"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_asked_to_stop_lets_a_job_finish_that_ends_soon(cluster, orchestrator, gate, number):
    worker = cluster.worker(worker_grace_s=60.0, worker_handlers=GATED)
    job_id = submit(orchestrator, "gated", {"gate": str(gate)})
    cluster.wait_for(job_id, "running")
    worker.send(number)
    wait_until(lambda: cluster.count("workers", schema.workers.c.status == "draining"), what="it is leaving")
    gate.unlink()
    assert worker.process.wait(30) == 0
    assert (cluster.job(job_id)["status"], cluster.job(job_id)["attempt"]) == ("done", 1)


@EMBEDDED_TOO
@pytest.mark.parametrize("worker_timeout_s", [2.0])
def test_a_killed_worker_leaves_no_process_and_its_job_runs_elsewhere(cluster, orchestrator, gate):
    worker = cluster.worker(worker_handlers=GATED)
    job_id = submit(orchestrator, "gated", {"gate": str(gate)}, min_memory_mb=1000)
    cluster.wait_for(job_id, "running")
    slots = worker.slots()
    assert len(slots) == 2
    worker.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in slots), what="slots gone")
    gate.unlink()
    cluster.worker(worker_handlers=GATED)
    record = cluster.wait_for(job_id, "done")
    assert (record["attempt"], record["crashes"]) == (2, 1)
    # Nobody saw the processes end: the dead worker's lease stands until it expires.
    wait_until(lambda: leased(cluster) == 0, what="memory free again")


def test_a_slot_that_cannot_start_is_reported_and_does_not_spin(cluster, tmp_path):
    (tmp_path / "broken_handlers.py").write_text("raise RuntimeError('no such model')\n")
    given = {"worker_handlers": ("broken_handlers",), "worker_slots": 1, "log_format": "json"}
    worker = cluster._start("worker", given, str(tmp_path))

    def told():
        lines = [line for line in worker.log.read_text().splitlines() if "slot does not start" in line]
        return [datetime.fromisoformat(re.findall(r'"ts": ?"([^"]+)"', line)[0]) for line in lines]

    wait_until(lambda: len(told()) >= 3, what="a few tries")
    assert cluster.count("workers") == 0
    pauses = [(after - before).total_seconds() for before, after in pairwise(told())]
    assert pauses[0] >= 0.5 and pauses[1] >= 1.0, pauses
    assert worker.stop() == 0


def test_handlers_do_not_get_the_settings(cluster, orchestrator, tmp_path):
    (tmp_path / "curious_handlers.py").write_text(
        "import os\n"
        "from worker import handler\n"
        "@handler('curious')\n"
        "def curious(ctx, payload):\n"
        "    return [name for name in os.environ if name.startswith('ORCH_')]\n"
    )
    cluster.worker(path=str(tmp_path), worker_handlers=("curious_handlers",))
    assert cluster.wait_for(submit(orchestrator, "curious", {}), "done")["result"] == []


def test_foreign_entries_go_to_the_dead_letters_and_hold_nothing_up(cluster, orchestrator, raw):
    cluster.worker()
    garbage = [{"nothing": "here"}, {"job_id": "nobody-knows"}, {"job_id": b"\xff\xfe"}, {"job_id": "x" * 1_000_000}]
    for fields in garbage:
        raw.xadd("stream:orchestrator:inference_jobs", fields)
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")
    wait_until(lambda: raw.xlen("stream:orchestrator:dlq") == len(garbage), what="dead letters")
    wait_until(lambda: orchestrator.hub.lane("default").length() == 0, what="an empty lane")


def test_progress_is_shown(cluster, orchestrator):
    cluster.worker()
    job_id = submit(orchestrator, "sleep", {"seconds": 30})
    assert 0 < wait_until(lambda: cluster.job(job_id)["progress"], what="progress") < 1


def test_what_a_handler_says_cannot_stop_the_heartbeat(cluster, orchestrator, tmp_path, gate):
    (tmp_path / "loud_handlers.py").write_text(
        "import time, pathlib\n"
        "from worker import handler\n"
        "@handler('loud')\n"
        "def loud(ctx, payload):\n"
        "    for value, note in ((float('nan'), 'x'), (float('inf'), ''), (0.5, 'bad \\udcff name')):\n"
        "        ctx.progress(value, note)\n"
        "        time.sleep(0.3)\n"  # another report would come too soon, and heartbeats tell of each
        "    while pathlib.Path(payload['gate']).exists():\n"
        "        time.sleep(0.01)\n"
        "    return ctx.attempt\n"
    )
    cluster.worker(path=str(tmp_path), worker_handlers=("loud_handlers",))
    job_id = submit(orchestrator, "loud", {"gate": str(gate)})
    wait_until(lambda: cluster.job(job_id)["progress"] == 0.5, what="what it said last")
    wait_for_heartbeat(cluster)
    gate.unlink()
    assert cluster.wait_for(job_id, "done")["result"] == 1


def test_any_signal_ends_only_its_own_job(cluster, orchestrator):
    cluster.worker()
    numbers = (40, signal.SIGSEGV)  # one without a name, one with
    for job_id in [submit(orchestrator, "crash", {"signal": number}) for number in numbers]:
        cluster.wait_for(job_id, "dead_letter")
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")


def test_a_crowd_of_jobs_that_never_fit_does_not_hold_up_the_rest(cluster, orchestrator):
    cluster.worker()
    crowd = [new_job(min_memory_mb=2**31 - 1) for _ in range(5 * cluster.settings.lane_window_min)]
    orchestrator.submit(crowd).result(30)
    cluster.wait_for(submit(orchestrator, "echo", {}), "done", timeout=60)


@EMBEDDED_TOO
def test_workers_keep_each_other_supplied_without_a_leader(cluster):
    """INV-21: several workers share a window; whoever finds the lane dry publishes."""
    publisherless = Orchestrator(cluster.settings)  # never started: it stores, nobody leads or publishes
    for _ in range(3):
        cluster.worker()
    publisherless.submit([new_job() for _ in range(150)]).result(10)
    wait_until(lambda: cluster.unfinished() == 0, timeout=60, what="all jobs done")
    publisherless.close()
