"""Pools on real workers: they warm up, take jobs, move, drain and leave as their rows say."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from orchestrator.pools import PoolChange, PoolSpec
from orchestrator.store import audit, crews, pools, schema
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO
from tests.worker.test_worker import events, leased, submit

HANDLERS = """
import os
import time
from contextlib import ExitStack
from pathlib import Path
from orchestrator.gpu import simulated
from worker import handler

@handler("answer", min_memory_mb=4000)
class Answer:
    def load(self, ctx):
        with Path(__file__).with_name("loads").open("a") as told:
            told.write(f"{ctx.model_id} {ctx.adapter} {ctx.variant} {os.getpid()}\\n")
        self.memory = ExitStack()
        if ctx.device:
            self.memory.enter_context(simulated.allocated(ctx.device, 500 if ctx.model_id == "small" else 3000))
        self.model = ctx.model_id
        if ctx.model_id == "broken":
            raise RuntimeError("no such model")

    def run(self, ctx, payload):
        while "gate" in payload and Path(payload["gate"]).exists():
            time.sleep(0.02)
        return {"pid": os.getpid(), "model": self.model, "variant": ctx.variant, "device": ctx.device}

    def unload(self):
        self.memory.close()
"""

#: Its post, its slots, and those who take jobs in, write them down, look after the GPU and load models.
THREADS_OF_A_POOL = 6


@pytest.fixture
def worker_timeout_s() -> float:
    """Nobody waits here for a worker to be declared dead, but for one test; and many processes start at once."""
    return 30.0


@pytest.fixture
def loads(tmp_path):
    """What was loaded so far: model, adapter, variant and pid of each."""
    file = tmp_path / "loads"
    file.touch()
    return lambda: [line.split() for line in file.read_text().splitlines()]


@pytest.fixture
def start(cluster, tmp_path, loads):
    (tmp_path / "pool_models.py").write_text(HANDLERS)

    def worker(node="node-1", **given):
        usual = {
            "worker_handlers": ("pool_models",),
            "node_id": node,
            "data_dir": tmp_path / node,
            "worker_slots": 1,
            "reconcile_interval_s": 0.2,
            "resident_min_s": 0.0,
        }
        return cluster.worker(path=str(tmp_path), **(usual | given))

    return worker


@pytest.fixture
def fast(cluster):
    """The leader looks at pools often."""
    cluster.settings = cluster.settings.model_copy(update={"reconcile_interval_s": 0.2})


@pytest.fixture
def orchestrator(fast, orchestrator):
    return orchestrator


def create(cluster, pool_id="chat", **fields):
    given: dict[str, Any] = {"type": "answer", "model_id": "m1", "desired_workers": 1, "hold_seconds": 600} | fields
    spec = PoolSpec(pool_id=pool_id, **given)
    return cluster.db.write(lambda conn: pools.create(conn, spec))


def pool(cluster, pool_id="chat"):
    return cluster.db.read(lambda conn: pools.get(conn, pool_id))


def until(cluster, condition, pool_id="chat", timeout=30.0):
    return wait_until(
        lambda: condition(pool(cluster, pool_id)),
        timeout=timeout,
        what=lambda: f"{pool(cluster, pool_id)}\n" + "\n".join(member.tail() for member in cluster._members),
    )


def warm(workers):
    return lambda row: row["status"] == "running" and row["ready_slots"] == workers


def models(cluster):
    query = select(schema.leases).where(schema.leases.c.state == "active", schema.leases.c.resident)
    return cluster.db.read(lambda conn: conn.execute(query).all())


@EMBEDDED_TOO
def test_a_pool_is_warm_before_its_first_job_and_loads_once(cluster, orchestrator, start, loads):
    start()
    create(cluster, variant="fp16", adapter="lora-1")
    until(cluster, warm(1))
    assert [load[:3] for load in loads()] == [["m1", "lora-1", "fp16"]]
    assert [lease.model_id for lease in models(cluster)] == ["m1"]
    wait_until(lambda: models(cluster)[0].idle_since is not None, what="it is known to be idle")
    results = [cluster.wait_for(submit(orchestrator, "answer", {}, pool_id="chat"), "done")["result"] for _ in range(3)]
    assert {(result["model"], result["variant"], result["pid"]) for result in results} == {
        ("m1", "fp16", int(loads()[0][3]))
    }
    assert len(loads()) == 1
    assert pool(cluster)["load_seconds"] >= 0
    assert leased(cluster) == 4000


def test_a_pool_grows_and_shrinks_without_touching_what_runs(cluster, orchestrator, start, loads, gate):
    start()
    create(cluster)
    until(cluster, warm(1))
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(job, "running")
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(desired_workers=3)))
    until(cluster, warm(3))
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(desired_workers=1)))
    until(cluster, lambda row: row["ready_slots"] == 1)
    wait_until(lambda: leased(cluster) == 4000, what="the leases of those that left are over")
    gate.unlink()
    assert cluster.wait_for(job, "done")["attempt"] == 1
    assert len(loads()) == 3


def test_a_pool_that_grows_again_does_not_wait_for_the_last_job_of_those_that_left(cluster, orchestrator, start, gate):
    start()
    create(cluster)
    until(cluster, warm(1))
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(job, "running")
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(desired_workers=0)))
    until(cluster, lambda row: [member["status"] for member in row["members"]] == ["draining"])
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(desired_workers=1)))
    until(cluster, warm(1))
    assert (cluster.job(job)["status"], cluster.job(job)["attempt"]) == ("running", 1)


def test_a_pool_that_shrinks_to_nothing_frees_idle_models_before_its_last_job_ends(cluster, orchestrator, start, gate):
    start()
    create(cluster, desired_workers=2)
    until(cluster, warm(2))
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(job, "running")
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(desired_workers=0)))
    wait_until(lambda: leased(cluster) == 4000, timeout=30, what="only the running job's model is left")
    assert cluster.job(job)["status"] == "running"


def swap_without_a_gap(cluster):
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(model_id="m2")))
    seen = []

    def swapped(row):
        seen.append(row["ready_slots"])
        return {member["revision"] for member in row["members"]} == {2} and row["ready_slots"] == 1

    until(cluster, swapped)
    assert min(seen) >= 1, seen


def test_a_swap_warms_the_new_model_before_the_old_one_leaves(cluster, orchestrator, start, loads):
    start()
    create(cluster)
    until(cluster, warm(1))
    swap_without_a_gap(cluster)
    assert [load[0] for load in loads()] == ["m1", "m2"]
    assert cluster.wait_for(submit(orchestrator, "answer", {}, pool_id="chat"), "done")["result"]["model"] == "m2"
    wait_until(lambda: leased(cluster) == 4000, what="the old model's lease is over")


def test_a_swap_without_room_for_both_goes_on_all_the_same(cluster, orchestrator, start, loads):
    start(gpu_backend="sim:1x24576")
    create(cluster, min_memory_mb=15_000)
    until(cluster, warm(1))
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(model_id="m2")))
    until(cluster, lambda row: {m["revision"] for m in row["members"]} == {2} and row["ready_slots"] == 1)
    assert [load[0] for load in loads()] == ["m1", "m2"]
    wait_until(lambda: leased(cluster) == 15_000, what="one lease")


def test_an_idle_pool_scales_to_zero_and_the_next_job_starts_it(cluster, orchestrator, start, loads):
    start()
    create(cluster)
    until(cluster, warm(1))  # from here on a second counts: loading may take longer
    cluster.db.write(lambda conn: pools.change(conn, "chat", PoolChange(hold_seconds=1)))
    until(cluster, lambda row: row["workers"] == 0 and row["status"] == "running")
    until(cluster, lambda row: "the next job starts it" in (row["status_reason"] or ""))
    wait_until(lambda: leased(cluster) == 0, what="its memory is free")
    job = submit(orchestrator, "answer", {}, pool_id="chat")
    assert cluster.wait_for(job, "done")["attempt"] == 1
    assert len(loads()) == 2


def test_sixteen_jobs_of_a_drained_node_end_elsewhere_and_a_drained_pool_lets_them(cluster, orchestrator, start, gate):
    """A node has a second's patience, which is not enough; a pool has a minute's, and takes no more."""
    start("node-1")
    create(cluster, slots=16, model_id="small", min_memory_mb=1000)
    until(cluster, warm(16), timeout=90.0)
    fields = {"pool_id": "chat", "min_memory_mb": 1000}
    jobs = [submit(orchestrator, "answer", {"gate": str(gate)}, **fields) for _ in range(16)]
    for job in jobs:
        cluster.wait_for(job, "running")
    start("node-2")
    wait_until(lambda: len(cluster.db.read(lambda conn: crews.node_views(conn, 30.0))) == 2, what="two nodes")
    cluster.db.write(lambda conn: crews.drain_nodes(conn, ["node-1"], 1.0))
    patience = select(schema.nodes.c.drain_until).where(schema.nodes.c.node_id == "node-1")
    until_when = cluster.db.read(lambda conn: conn.execute(patience).scalar_one())
    again = (schema.jobs.c.status == "running", schema.jobs.c.attempt == 2)
    wait_until(
        lambda: cluster.count("orchestrator_jobs", *again) == 16,
        timeout=90,
        what=lambda: f"all run elsewhere: {[cluster.job(job) for job in jobs]} {pool(cluster)}",
    )
    assert min(handed_back_at(cluster, job) for job in jobs) >= until_when, "each had its second"

    cluster.db.write(lambda conn: pools.drain(conn, "chat", 60.0))
    until(cluster, lambda row: {member["status"] for member in row["members"]} == {"draining"})
    late = submit(orchestrator, "answer", {}, **fields)
    gate.unlink()
    until(cluster, lambda row: row["status"] == "stopped", timeout=60.0)
    ends = [cluster.job(job) for job in jobs]
    # The second attempt is the only one that counts, and nothing but the drain of the node ended the first.
    outcomes = [(end["status"], end["attempt"], end["attempts"], end["crashes"]) for end in ends]
    assert outcomes == [("done", 2, 1, 0)] * 16
    assert {node_of(cluster, end) for end in ends} == {"node-2"}
    attempt = ["job.claimed", "job.running"]
    history = ["job.submitted", *attempt, "job.handed_back", *attempt, "job.done"]
    assert [events(cluster, job) for job in jobs] == [history] * 16
    assert (cluster.job(late)["status"], cluster.job(late)["attempt"]) == ("pending", 0)
    assert pool(cluster)["workers"] == 0
    wait_until(lambda: leased(cluster) == 0, what="memory back")
    create(cluster, slots=1, model_id="small", min_memory_mb=1000)
    cluster.wait_for(late, "done")


def handed_back_at(cluster, job_id):
    history = cluster.db.read(lambda conn: audit.of_job(conn, job_id))
    return next(event["ts"] for event in history if event["event_type"] == "job.handed_back")


def node_of(cluster, job):
    query = select(schema.workers.c.node_id).where(schema.workers.c.worker_id == job["worker_id"])
    return cluster.db.read(lambda conn: conn.execute(query).scalar_one())


def test_a_drain_that_takes_too_long_hands_back_uncharged(cluster, orchestrator, start, gate):
    start()
    create(cluster)
    until(cluster, warm(1))
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(job, "running")
    cluster.db.write(lambda conn: pools.drain(conn, "chat", 0.5))
    until(cluster, lambda row: row["status"] == "stopped")
    record = cluster.job(job)
    assert (record["status"], record["attempt"], record["attempts"]) == ("pending", 1, 0)
    assert "job.handed_back" in events(cluster, job)


def test_evicting_ends_a_pool_now_and_its_jobs_wait_uncharged(cluster, orchestrator, start, loads, gate):
    start()
    create(cluster)
    until(cluster, warm(1))
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(job, "running")
    cluster.db.write(lambda conn: pools.evict(conn, "chat"))
    orchestrator.hub.ring("pools")
    until(cluster, lambda row: row["workers"] == 0)
    assert pool(cluster)["status"] == "evicted"
    record = cluster.job(job)
    assert (record["status"], record["attempts"]) == ("pending", 0)
    wait_until(lambda: not Path(f"/proc/{loads()[0][3]}").exists(), what="its process is gone")
    wait_until(lambda: leased(cluster) == 0, what="its lease is over")


def test_draining_a_node_moves_its_share_elsewhere(cluster, orchestrator, start, gate):
    start("node-1")
    create(cluster)
    until(cluster, warm(1))
    start("node-2")
    wait_until(lambda: len(cluster.db.read(lambda conn: crews.node_views(conn, 30.0))) == 2, what="two nodes")
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    first = cluster.wait_for(job, "running")["worker_id"]
    cluster.db.write(lambda conn: crews.drain_nodes(conn, ["node-1"], 0.5))
    wait_until(
        lambda: cluster.job(job)["worker_id"] not in (None, first),
        timeout=30,
        what=lambda: f"runs elsewhere: {cluster.job(job)} {pool(cluster)}",
    )
    record = cluster.job(job)
    assert (record["attempt"], record["attempts"]) == (2, 1)
    until(cluster, lambda row: [m["node_id"] for m in row["members"] if m["status"] == "active"] == ["node-2"])
    alive = select(schema.workers.c.node_id).where(schema.workers.c.status == "active")
    wait_until(
        lambda: {node for (node,) in cluster.db.read(lambda conn: conn.execute(alive).all())} == {"node-2"},
        what="nothing runs on node-1",
    )
    cluster.db.write(lambda conn: crews.resume_nodes(conn, ["node-1"]))
    wait_until(
        lambda: "node-1" in {node for (node,) in cluster.db.read(lambda conn: conn.execute(alive).all())},
        what="node-1 takes jobs again",
    )


def test_who_waits_for_its_last_job_leaves_the_node_to_the_next(cluster, orchestrator, start, gate):
    """Otherwise pools would be planned where nobody mans them, for as long as that job runs."""
    first = start()
    create(cluster)
    until(cluster, warm(1))
    last = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(last, "running")
    first.send(signal.SIGUSR1)
    wait_until(lambda: cluster.count("workers", schema.workers.c.status == "draining"), what="it drains")
    start()
    create(cluster, "other", model_id="small")
    until(cluster, warm(1), "other")
    until(cluster, warm(1))
    assert cluster.job(last)["status"] == "running" and first.process.poll() is None
    gate.unlink()
    assert first.process.wait(30) == 0
    assert cluster.wait_for(last, "done")["attempt"] == 1
    assert warm(1)(pool(cluster)) and warm(1)(pool(cluster, "other"))  # who left took nothing along


def test_who_waits_for_its_last_job_still_hears_that_its_pool_must_go(cluster, orchestrator, start, gate):
    draining = start()
    create(cluster)
    until(cluster, warm(1))
    last = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(last, "running")
    draining.send(signal.SIGUSR1)
    wait_until(lambda: not cluster.db.read(lambda conn: crews.node_views(conn, 30.0)), what="the node is nobody's")
    cluster.db.write(lambda conn: pools.drain(conn, "chat", 0.5))
    assert draining.process.wait(30) == 0
    record = cluster.job(last)
    assert (record["status"], record["attempts"]) == ("pending", 0)


@pytest.mark.parametrize("worker_timeout_s", [2.0])
def test_a_killed_supervisor_leaves_nothing_and_its_share_moves(cluster, orchestrator, start, loads):
    doomed = start("node-1")
    create(cluster)
    until(cluster, warm(1))
    start("node-2")
    doomed.kill()
    until(cluster, lambda row: [m["node_id"] for m in row["members"]] == ["node-2"] and row["ready_slots"] == 1)
    wait_until(lambda: not Path(f"/proc/{loads()[0][3]}").exists(), what="the slot died with its supervisor")
    assert cluster.wait_for(submit(orchestrator, "answer", {}, pool_id="chat"), "done")["attempt"] == 1


def test_a_killed_slot_is_loaded_again(cluster, orchestrator, start, loads):
    start()
    create(cluster)
    until(cluster, warm(1))
    os.kill(int(loads()[0][3]), signal.SIGKILL)
    wait_until(lambda: len(loads()) == 2, what="loaded again")
    until(cluster, warm(1))
    wait_until(lambda: leased(cluster) == 4000, what="only the new lease is left")


def test_a_model_that_does_not_load_is_told_and_tried_ever_more_rarely(cluster, orchestrator, start, loads):
    start()
    create(cluster, model_id="broken")
    until(cluster, lambda row: "no such model" in (row["status_reason"] or ""))
    assert pool(cluster)["status"] == "starting"
    wait_until(lambda: len(loads()) >= 3, what="a few tries")
    pace = len(loads())
    assert pace <= 6, loads()
    wait_until(lambda: leased(cluster) == 0, what="no lease is kept for it")


def test_an_idle_model_of_a_pool_leaves_for_a_job_and_does_not_fight_for_its_place(cluster, orchestrator, start, loads):
    start(gpu_backend="sim:1x24576")
    create(cluster, min_memory_mb=20_000)
    until(cluster, warm(1))
    other = submit(orchestrator, "allocate", {"memory_mb": 1000, "seconds": 0.1}, min_memory_mb=15_000)
    assert cluster.wait_for(other, "done")["attempt"] == 1
    assert len(loads()) == 1
    job = submit(orchestrator, "answer", {}, pool_id="chat", min_memory_mb=20_000)
    cluster.wait_for(job, "done")
    assert len(loads()) == 2


def test_a_worker_that_somebody_else_started_follows_its_pool(cluster, orchestrator, start, loads, gate):
    create(cluster, provider="external")
    start(worker_pool="chat")
    until(cluster, warm(1))
    assert [load[0] for load in loads()] == ["m1"]
    assert pool(cluster)["assignments"] == []
    job = submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat")
    cluster.wait_for(job, "running")
    cluster.db.write(lambda conn: pools.drain(conn, "chat", 0.5))
    until(cluster, lambda row: row["status"] == "stopped")
    assert (cluster.job(job)["status"], cluster.job(job)["attempts"]) == ("pending", 0)
    create(cluster, provider="external")
    until(cluster, warm(1))
    cluster.wait_for(job, "running")


def test_a_worker_that_somebody_else_started_swaps_without_a_gap(cluster, orchestrator, start, loads):
    create(cluster, provider="external")
    start(worker_pool="chat")
    until(cluster, warm(1))
    swap_without_a_gap(cluster)
    assert cluster.wait_for(submit(orchestrator, "answer", {}, pool_id="chat"), "done")["result"]["model"] == "m2"


def test_a_pool_that_sizes_itself_grows_with_its_backlog_and_shrinks_again(cluster, orchestrator, start, gate):
    start()
    create(cluster, desired_workers=1, max_workers=3, min_memory_mb=4000, hold_seconds=1, autosize=True)
    jobs = [submit(orchestrator, "answer", {"gate": str(gate)}, pool_id="chat") for _ in range(12)]
    until(cluster, lambda row: row["ready_slots"] >= 2)
    gate.unlink()
    for job in jobs:
        assert cluster.wait_for(job, "done")["attempt"] == 1
    until(cluster, lambda row: row["workers"] == 0)
    wait_until(lambda: leased(cluster) == 0, what="its memory is free")


def test_what_a_node_needs_once_is_there_once(cluster, orchestrator, start):
    """Six pools have the threads that work for them, and share heartbeat, GPU watch, bell and acknowledgements."""
    worker = start()

    def threads(posts):
        """Counted when each post has said that the last of its own was started."""
        wait_until(lambda: worker.log.read_text().count("worker ready") == posts, what=f"{posts} posts")
        return len(list(Path(f"/proc/{worker.process.pid}/task").iterdir()))

    alone = threads(1)
    for number in range(6):
        create(cluster, f"pool-{number}", type="echo")
    assert threads(7) - alone <= 6 * THREADS_OF_A_POOL
