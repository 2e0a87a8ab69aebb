"""Warm models: they stay on the GPU under a lease, serve the next job of their type, and leave when others need it."""

import os
import signal

import pytest
from sqlalchemy import select

from orchestrator.leases import Denied, Granted, LeaseRequest, Terms
from orchestrator.store import grants, leases, schema
from tests.processes import gone
from tests.waiting import wait_until
from tests.worker.test_worker import leased, submit

HANDLERS = """
import os
from contextlib import ExitStack
from orchestrator.gpu import simulated
from worker import handler

class Model:
    loaded = 0

    def load(self, ctx):
        type(self).loaded += 1
        self.memory = ExitStack()
        self.memory.enter_context(simulated.allocated(ctx.device, 3000))

    def run(self, ctx, payload):
        if payload.get("fail"):
            raise RuntimeError("broke")
        return {"pid": os.getpid(), "loaded": self.loaded, "device": ctx.device}

    def unload(self):
        self.memory.close()

@handler("small", min_memory_mb=4000)
class Small(Model):
    pass

@handler("large", min_memory_mb=20000)
class Large(Model):
    pass

@handler("pinned", min_memory_mb=20000, pinned=True)
class Pinned(Model):
    pass

@handler("anywhere", min_memory_mb=4000)
class Anywhere:
    def load(self, ctx):
        self.device = ctx.device

    def run(self, ctx, payload):
        return {"device": ctx.device, "loaded_for": self.device}

kept = ExitStack()

@handler("leaks", min_memory_mb=4000)
def leaks(ctx, payload):
    kept.enter_context(simulated.allocated(ctx.device, 3000))
    return {"pid": os.getpid()}
"""


#: Of those who wait for the end of a worker that is silent.
SOON = pytest.mark.parametrize("worker_timeout_s", [1.0])


@pytest.fixture
def start(cluster, tmp_path):
    (tmp_path / "warm_models.py").write_text(HANDLERS)

    def worker(**given):
        usual = {"worker_slots": 1, "resident_min_s": 0.0, "gpu_backend": "sim:1x24576"}
        given = usual | given
        started = cluster.worker(path=str(tmp_path), worker_handlers=("warm_models",), **given)
        # Where a slot is missing still, the model of another would have to leave.
        all_up = schema.workers.c.ready == given["worker_slots"]
        wait_until(lambda: cluster.count("workers", all_up), what="all its slots")
        return started

    return worker


def run(cluster, orchestrator, type, **fields):
    return cluster.wait_for(submit(orchestrator, type, {}, **fields), "done")["result"]


def held(cluster):
    query = select(schema.leases).where(schema.leases.c.state == "active", schema.leases.c.ending_as.is_(None))
    return cluster.db.read(lambda conn: conn.execute(query).all())


def gpus(cluster):
    return cluster.db.read(lambda conn: conn.execute(select(schema.gpus)).all())


def test_a_model_stays_and_serves_the_next_job_of_its_type(cluster, orchestrator, start):
    start()
    first = run(cluster, orchestrator, "small")
    (lease,) = held(cluster)
    assert (lease.resident, lease.job_id, lease.job_type, lease.memory_mb) == (True, None, "small", 4000)
    again = submit(orchestrator, "small", {})
    assert cluster.wait_for(again, "done")["result"] == first
    assert first["loaded"] == 1
    assert [kept.token for kept in held(cluster)] == [lease.token]
    assert cluster.job(again)["attempts"] == 1
    wait_until(lambda: (gpus(cluster)[0].used_mb, gpus(cluster)[0].foreign_mb) == (3000, 0), what="a sample")
    assert leased(cluster) == 4000


def test_a_model_outlives_a_job_that_fails(cluster, orchestrator, start):
    start()
    failed = submit(orchestrator, "small", {"fail": True}, max_attempts=1)
    cluster.wait_for(failed, "dead_letter")
    assert run(cluster, orchestrator, "small")["loaded"] == 1
    assert len(held(cluster)) == 1


def test_another_model_of_the_same_type_is_another_model(cluster, orchestrator, start):
    start(worker_slots=2)
    one = run(cluster, orchestrator, "small", model_id="one")
    two = run(cluster, orchestrator, "small", model_id="two")
    assert one["pid"] != two["pid"]
    assert run(cluster, orchestrator, "small", model_id="one")["pid"] == one["pid"]
    assert sorted(lease.model_id for lease in held(cluster)) == ["one", "two"]


def test_jobs_without_a_lease_use_its_slot_and_leave_it_alone(cluster, orchestrator, start):
    start()
    first = run(cluster, orchestrator, "small")
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")
    assert run(cluster, orchestrator, "small") == first


def test_a_job_that_needs_its_slot_gets_it(cluster, orchestrator, start):
    start()
    first = run(cluster, orchestrator, "small", model_id="one")
    second = run(cluster, orchestrator, "small", model_id="two")
    assert first["pid"] != second["pid"]
    assert [lease.model_id for lease in held(cluster)] == ["two"]
    wait_until(lambda: leased(cluster) == 4000, what="the memory of the first back")


def test_a_job_that_needs_its_memory_gets_it_the_least_recently_used_first(cluster, orchestrator, start):
    start(worker_slots=4)
    for model in ("old", "new"):
        run(cluster, orchestrator, "small", model_id=model)
    run(cluster, orchestrator, "small", model_id="old")  # now "new" is the older one
    run(cluster, orchestrator, "small", model_id="third", min_memory_mb=15_000)
    assert sorted(lease.model_id for lease in held(cluster)) == ["old", "third"]
    assert leased(cluster) == 19_000


def test_a_pinned_model_leaves_for_nobody(cluster, orchestrator, start):
    start(worker_slots=2)
    first = run(cluster, orchestrator, "pinned")
    waiting = submit(orchestrator, "large", {})
    wait_until(lambda: "needs 20000 MB" in (cluster.job(waiting)["wait_reason"] or ""), what="a reason to wait")
    assert run(cluster, orchestrator, "pinned") == first
    assert cluster.job(waiting)["status"] == "pending"


def test_a_model_stays_its_least_time(cluster, orchestrator, start):
    start(worker_slots=2, resident_min_s=3600.0)
    first = run(cluster, orchestrator, "large", model_id="one")
    waiting = submit(orchestrator, "large", {}, model_id="two")
    wait_until(lambda: cluster.job(waiting)["wait_reason"], what="a reason to wait")
    assert run(cluster, orchestrator, "large", model_id="one") == first
    assert cluster.job(waiting)["status"] == "pending"


def test_a_client_that_needs_its_memory_gets_it(cluster, orchestrator, start):
    start()
    run(cluster, orchestrator, "large")

    terms = Terms(cluster.settings.gpu_stale_s, resident_min_s=0.0)

    def ask():
        (answer,) = grants.grant_to_clients(cluster.db, [LeaseRequest("outside", 15_000, 60.0)], terms)
        return answer

    def evicts():
        denied = ask()  # on a busy machine perhaps because the last sample is old
        assert isinstance(denied, Denied)
        return denied.evicting

    wait_until(evicts, what="a model that leaves")
    wait_until(lambda: isinstance(ask(), Granted), what="room")
    assert [lease.agent_name for lease in held(cluster)] == ["outside"]


def test_the_lease_of_a_model_ends_with_its_process(cluster, orchestrator, start):
    start()
    os.kill(run(cluster, orchestrator, "small")["pid"], signal.SIGKILL)
    wait_until(lambda: leased(cluster) == 0, what="memory back")
    assert run(cluster, orchestrator, "small")["loaded"] == 1


def test_leases_of_models_end_with_their_worker(cluster, orchestrator, start):
    worker = start()
    run(cluster, orchestrator, "small")
    assert worker.stop() == 0
    assert held(cluster) == []
    assert leased(cluster) == 0


def test_a_slot_that_holds_memory_for_no_model_is_replaced(cluster, orchestrator, start):
    start()
    first = run(cluster, orchestrator, "leaks")
    wait_until(lambda: leased(cluster) == 0, what="memory back")
    assert run(cluster, orchestrator, "leaks")["pid"] != first["pid"]
    assert cluster.count("orchestrator_leases", schema.leases.c.resident) == 0


@SOON
def test_a_frozen_worker_does_not_keep_its_models(cluster, orchestrator, start):
    """Nobody renews the lease: the slot ends itself before the memory is given to others."""
    worker = start()
    first = run(cluster, orchestrator, "small")
    worker.send(signal.SIGSTOP)
    try:
        wait_until(lambda: gone(first["pid"]), what="its end")
    finally:
        worker.send(signal.SIGCONT)


@SOON
def test_a_frozen_worker_does_not_keep_a_model_beside_which_another_job_ran(cluster, orchestrator, start):
    """A job without a lease does not end that of the model: the slot must go on looking."""
    worker = start()
    first = run(cluster, orchestrator, "small")
    cluster.wait_for(submit(orchestrator, "echo", {}), "done")
    worker.send(signal.SIGSTOP)
    try:
        wait_until(lambda: gone(first["pid"]), what="its end")
    finally:
        worker.send(signal.SIGCONT)


def test_a_model_loaded_without_a_gpu_is_loaded_anew_for_one(cluster, orchestrator, start):
    start(resident_min_s=3600.0)
    blocker = cluster.db.write(
        lambda conn: grants.grant(conn, [LeaseRequest("a", 20_000, 60.0, node_id="node-1")], Terms(30.0))
    )[0]
    assert isinstance(blocker, Granted)
    on_cpu = run(cluster, orchestrator, "anywhere", cpu_fallback=True)
    assert on_cpu == {"device": "cpu", "loaded_for": "cpu"}
    cluster.db.write(lambda conn: leases.release(conn, blocker.request.token))
    on_gpu = run(cluster, orchestrator, "anywhere")
    assert on_gpu["loaded_for"] == on_gpu["device"] == "SIM-node-1-0"
