"""Jobs that wait are run in one call, and what happens to one of them does not touch its neighbours."""

import json
import signal
from pathlib import Path

import pytest
from sqlalchemy import select

from orchestrator.store import audit, schema, withdraw
from tests.factories import new_job
from tests.waiting import wait_until
from tests.worker.databases import EMBEDDED_TOO
from tests.worker.deaths import declare_dead
from tests.worker.test_worker import leased, moves

HANDLERS = """
import json, os, signal, time
from contextlib import ExitStack
from pathlib import Path
from orchestrator.gpu import simulated
from worker import Permanent, Retry, Skip, Superseded, handler

def _note(payload, **said):
    with open(payload["notes"], "a") as notes:
        notes.write(json.dumps(said) + "\\n")

def _answer(job, do):
    match do:
        case "skip":
            return Skip("nothing to do")
        case "permanent":
            return Permanent("never")
        case "retry" if job.attempt == 1:
            return Retry("later", after=0)
        case "error" if job.attempt == 1:
            return ValueError("odd")
        case "no JSON":
            return {1, 2}
        case _:
            return {"attempt": job.attempt}

def _misbehave(do):
    match do:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        case "raise":
            raise ValueError("all of you")
        case "raise Permanent":
            raise Permanent("all of you")

@handler("many", batch=16, batch_wait_ms=20)
def many(ctx, payloads):
    _note(payloads[0], type="many", jobs=[job.job_id for job in ctx.jobs], attempts=[job.attempt for job in ctx.jobs])
    orders = [payload.get("do") for payload in payloads]
    for do in orders:
        _misbehave(do)
    if "one too few" in orders:
        return [None] * (len(payloads) - 1)
    if "no list" in orders:
        return {"not": "a list"}
    return [_answer(job, do) for job, do in zip(ctx.jobs, orders)]

@handler("held", batch=16, batch_wait_ms=20)
def held(ctx, payloads):
    "The first call goes on until its gate opens or all are cancelled; cancelled jobs are told."
    told = set()
    ctx.progress(0.25, "begun")
    _note(payloads[0], type="held", jobs=[job.job_id for job in ctx.jobs], pid=os.getpid())
    if ctx.jobs[0].attempt == 1:
        while not (ctx.cancelled or Path(payloads[0]["gate"]).exists()):
            for job in ctx.jobs:
                if job.cancelled and job.job_id not in told:
                    told.add(job.job_id)
                    _note(payloads[0], told=job.job_id, all=ctx.cancelled)
            time.sleep(0.01)
    return ["left out" if job.cancelled else "ran" for job in ctx.jobs]

@handler("deaf", batch=16, batch_wait_ms=20)
def deaf(ctx, payloads):
    _note(payloads[0], type="deaf", jobs=[job.job_id for job in ctx.jobs])
    time.sleep(60 if ctx.jobs[0].attempt == 1 else 0)
    return ["ran"] * len(payloads)

@handler("files", batch=16, batch_wait_ms=20)
def files(ctx, payloads):
    _note(payloads[0], type="files", jobs=[job.job_id for job in ctx.jobs])
    while not Path(payloads[0]["gate"]).exists():
        time.sleep(0.01)
    return [_file(job, payload) for job, payload in zip(ctx.jobs, payloads)]

def _file(job, payload):
    try:
        with job.artifact(payload["path"]) as file:
            file.write(job.job_id.encode())
    except Superseded as superseded:
        return superseded

@handler("plain")
def plain(ctx, payload):
    _note(payload, type="plain", jobs=[ctx.job_id])

@handler("model", batch=16, batch_wait_ms=20, min_memory_mb=4000)
class Model:
    loaded = 0

    def load(self, ctx):
        type(self).loaded += 1
        self.memory = ExitStack()
        self.memory.enter_context(simulated.allocated(ctx.device, 3000))

    def run(self, ctx, payloads):
        _note(payloads[0], type="model", jobs=[job.job_id for job in ctx.jobs], pid=os.getpid(), loaded=self.loaded)
        for payload in payloads:
            _misbehave(payload.get("do"))
        return [ctx.device] * len(payloads)
"""


class Bench:
    """Jobs of the handlers above, and what these wrote down."""

    def __init__(self, cluster, orchestrator, folder: Path) -> None:
        self.cluster, self.orchestrator, self.folder = cluster, orchestrator, folder
        self.notes_file, self.gate = folder / "notes", folder / "gate"
        self.notes_file.touch()
        self.at_work = False
        (folder / "batch_handlers.py").write_text(HANDLERS)

    def submit(self, *jobs):
        """All at once, and announced, so that the first slot finds them together; their ids."""
        payload = {"notes": str(self.notes_file), "gate": str(self.gate)}
        made = [new_job(**{"type": "many"} | job | {"payload": payload | job.get("payload", {})}) for job in jobs]
        self.orchestrator.submit(made).result(10)
        if not self.at_work:  # else some may be over before we look
            wait_until(lambda: self.announced() == len(made), what="all announced")
        return [job.job_id for job in made]

    def announced(self):
        return self.orchestrator.hub.lane("default").length()

    def work(self, **given):
        given = {"worker_slots": 1, "worker_handlers": ("batch_handlers",), "gpu_backend": "sim:1x24576"} | given
        self.at_work = True
        return self.cluster.worker(path=str(self.folder), **given)

    def notes(self, key="jobs"):
        said = [json.loads(line) for line in self.notes_file.read_text().splitlines()]
        return [note for note in said if key in note]

    def calls(self):
        return [note["jobs"] for note in self.notes()]

    def began(self, job_id):
        wait_until(lambda: any(job_id in jobs for jobs in self.calls()), what="its call")

    def cancel(self, *job_ids):
        """In one transaction: no heartbeat sees some of them."""
        self.cluster.db.write(lambda conn: [withdraw.cancel(conn, job_id) for job_id in job_ids])

    def done(self, *job_ids):
        return [self.cluster.wait_for(job_id, "done") for job_id in job_ids]


@pytest.fixture
def bench(cluster, orchestrator, tmp_path):
    return Bench(cluster, orchestrator, tmp_path)


def doing(*orders, **fields):
    return [{"payload": {"do": do}} | fields for do in orders]


# --- one call, many ends ---


@EMBEDDED_TOO
def test_waiting_jobs_run_in_one_call_and_each_ends_by_itself(bench, cluster):
    fine, skip, never, retry, error, odd, last = ids = bench.submit(
        *doing(None, "skip", "permanent", "retry", "error", "no JSON", None, retry_base_sec=0.01, min_memory_mb=1000)
    )
    bench.work()
    bench.done(fine, retry, error, last)
    ends = {job_id: cluster.job(job_id) for job_id in ids}
    assert bench.calls()[0] == ids
    assert ends[fine]["result"] == ends[last]["result"] == {"attempt": 1}
    assert ends[retry]["result"] == ends[error]["result"] == {"attempt": 2}
    assert (ends[skip]["status"], ends[never]["status"]) == ("skipped", "failed")
    assert (ends[odd]["status"], ends[odd]["error_kind"]) == ("failed", "bad_result")
    assert [end["attempts"] for end in ends.values()] == [1, 1, 1, 2, 2, 1, 1]
    assert moves(cluster, fine) == ["job.submitted", "job.claimed", "job.done"]
    assert cluster.db.read(lambda conn: audit.of_job(conn, fine))[1]["details"]["batch_size"] == 7
    wait_until(lambda: (bench.announced(), leased(cluster)) == (0, 0), what="all acknowledged, all memory back")


def test_one_batch_is_filled_before_the_next_slot_gets_any(bench):
    ids = bench.submit(*[{}] * 20)
    bench.work(worker_slots=3)
    bench.done(*ids)
    assert sorted(len(call) for call in bench.calls()) == [4, 16]


def test_other_types_keep_their_turn(bench):
    """Nothing overtakes what fits nowhere, and nothing of it is read: another worker could run it."""
    ids = bench.submit({}, {}, {"type": "plain"}, {}, {}, {"type": "held"}, {})
    bench.gate.touch()
    bench.work()
    bench.done(*ids)
    assert bench.calls() == [ids[:2], [ids[2]], ids[3:5], [ids[5]], [ids[6]]]


def test_jobs_for_different_models_take_turns(bench):
    ids = bench.submit(*[{"model_id": model} for model in "abab"])
    bench.work()
    bench.done(*ids)
    assert sorted(bench.calls()) == sorted([ids[::2], ids[1::2]])


# --- nobody knows who did it ---


@EMBEDDED_TOO
def test_a_poison_that_kills_its_process_is_found_and_its_neighbours_are_done(bench, cluster):
    ids = bench.submit(*doing(*[None] * 5, "die", *[None] * 5, min_memory_mb=1000))
    poison = ids[5]
    bench.work(worker_slots=2)
    record = cluster.wait_for(poison, "dead_letter")
    neighbours = bench.done(*[job_id for job_id in ids if job_id != poison])
    # By what was charged: a slow machine hands a claim back, uncharged, and the next has another number.
    assert (record["crashes"], record["attempts"]) == (2, 2)
    assert {(job["attempts"], job["crashes"]) for job in neighbours} == {(1, 0)}
    assert [len(call) for call in bench.calls()] == [11] + [1] * 12
    assert moves(cluster, ids[0])[1:3] == ["job.claimed", "job.handed_back"]
    wait_until(lambda: leased(cluster) == 0, what="all memory back")


def test_a_call_that_fails_as_a_whole_charges_nobody_but_who_did_it(bench, cluster):
    ends = {"raise": "dead_letter", "raise Permanent": "failed", "one too few": "dead_letter", "no list": "dead_letter"}
    batches = [doing(None, do, None, model_id=do, max_attempts=1) for do in ends]
    ids = bench.submit(*[job for batch in batches for job in batch])
    bench.work()
    for culprit, status in zip(ids[1::3], ends.values(), strict=True):
        assert cluster.wait_for(culprit, status)["attempts"] == 1
    others = bench.done(*ids[::3], *ids[2::3])
    assert {(job["attempts"], job["error_kind"]) for job in others} == {(1, "batch")}
    assert "its batch of 3 failed as a whole: ValueError: all of you" in others[0]["last_error"]
    assert sorted(len(call) for call in bench.calls()) == [1] * 12 + [3] * 4


# --- cancel, time limits, shutdown ---


def test_one_that_is_cancelled_may_be_left_out_and_all_of_them_end_the_call(bench, cluster):
    ids = bench.submit(*[{"type": "held"}] * 3)
    bench.work(cancel_step_s=20.0)
    bench.began(ids[1])
    wait_until(lambda: cluster.job(ids[2])["progress"] == 0.25, what="progress of each")
    bench.cancel(ids[1])
    wait_until(lambda: bench.notes("told") == [{"told": ids[1], "all": False}], what="it was told")
    bench.gate.touch()
    cluster.wait_for(ids[1], "cancelled")
    assert [job["result"] for job in bench.done(ids[0], ids[2])] == ["ran", "ran"]
    assert len(bench.calls()) == 1
    bench.gate.unlink()
    ids = bench.submit(*[{"type": "held"}] * 3)
    for job_id in ids:
        bench.began(job_id)
    bench.cancel(*ids)
    for job_id in ids:
        cluster.wait_for(job_id, "cancelled")
    assert not bench.gate.exists()  # it returned because nobody wanted it any more


def test_a_deaf_call_is_made_to_stop_when_all_are_cancelled(bench, cluster):
    """By SIGTERM, which raises Cancelled in it; for one of several its neighbours would be told to stop, too."""
    ids = bench.submit(*[{"type": "deaf"}] * 2)
    bench.work(cancel_step_s=0.2)
    bench.began(ids[0])
    bench.cancel(*ids)
    for job_id in ids:
        cluster.wait_for(job_id, "cancelled")
    assert len(bench.calls()) == 1


def test_a_deaf_call_is_killed_for_one_that_is_cancelled_and_its_neighbours_run_again(bench, cluster):
    ids = bench.submit(*[{"type": "deaf"}] * 3)
    bench.work(cancel_step_s=0.2)
    bench.began(ids[0])
    bench.cancel(ids[0])
    cluster.wait_for(ids[0], "cancelled")
    neighbours = bench.done(*ids[1:])
    assert {(job["attempt"], job["attempts"], job["crashes"]) for job in neighbours} == {(2, 1, 0)}
    assert bench.calls() == [ids, ids[1:]]


def test_the_time_limit_of_one_hands_back_the_others(bench, cluster):
    # Long enough for its slot to write down that it began.
    first, slow, last = ids = bench.submit(
        {"type": "deaf"}, {"type": "deaf", "max_runtime_sec": 1.5, "max_attempts": 1}, {"type": "deaf"}
    )
    bench.work()
    record = cluster.wait_for(slow, "dead_letter")
    assert (record["error_kind"], record["crashes"]) == ("timeout", 0)
    neighbours = bench.done(first, last)
    assert {(job["attempt"], job["attempts"], job["error_kind"]) for job in neighbours} == {(2, 1, None)}
    assert bench.calls() == [ids, [first, last]]


def test_a_worker_that_is_stopped_hands_all_of_it_back(bench, cluster):
    ids = bench.submit(*[{"type": "deaf", "min_memory_mb": 2000}] * 3)
    worker = bench.work(worker_grace_s=0.2)
    bench.began(ids[0])
    assert leased(cluster) == 2000
    assert worker.stop() == 0
    assert {(cluster.job(job_id)["status"], cluster.job(job_id)["attempts"]) for job_id in ids} == {("pending", 0)}
    assert leased(cluster) == 0
    bench.work()
    assert [job["result"] for job in bench.done(*ids)] == ["ran"] * 3


def test_a_supervisor_that_dies_takes_nobody_to_the_grave(bench, cluster):
    ids = bench.submit(*[{"type": "deaf"}] * 2)
    worker = bench.work()
    bench.began(ids[0])
    declare_dead(cluster, worker, signal.SIGKILL)
    bench.work(worker_slots=2)
    assert {(job["crashes"], job["attempt"]) for job in bench.done(*ids)} == {(1, 2)}
    assert sorted(bench.calls()[1:]) == sorted([job_id] for job_id in ids)


def test_each_asks_for_itself_whether_its_job_is_its_own(bench, cluster, tmp_path):
    paths = [tmp_path / name for name in ("one", "two")]
    ids = bench.submit(*[{"type": "files", "payload": {"path": str(path)}} for path in paths])
    bench.work(cancel_step_s=20.0)
    bench.began(ids[0])
    bench.cancel(ids[0])
    bench.gate.touch()
    cluster.wait_for(ids[0], "cancelled")
    bench.done(ids[1])
    assert (paths[0].exists(), paths[1].read_text()) == (False, ids[1])


# --- leases ---


def held(cluster):
    query = select(schema.leases).where(schema.leases.c.state == "active")
    return cluster.db.read(lambda conn: conn.execute(query).all())


def test_a_batch_runs_under_one_lease_and_its_model_stays_for_the_next(bench, cluster):
    first = bench.submit(*[{"type": "model"}] * 4)
    bench.work()
    bench.done(*first)
    (lease,) = held(cluster)
    assert (lease.resident, lease.job_id, lease.memory_mb, leased(cluster)) == (True, None, 4000, 4000)
    second = bench.submit(*[{"type": "model"}] * 4)
    assert {job["result"] for job in bench.done(*second)} == {"SIM-node-1-0"}
    calls = bench.notes()
    assert {(call["pid"], call["loaded"]) for call in calls} == {(calls[0]["pid"], 1)}
    assert sorted(job_id for call in calls for job_id in call["jobs"]) == sorted([*first, *second])
    wait_until(
        lambda: [(kept.token, kept.job_id) for kept in held(cluster)] == [(lease.token, None)], what="idle again"
    )
