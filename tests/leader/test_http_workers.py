"""HTTP workers beside streams and duties: nothing starves, nothing grows, nothing runs for ever."""

import dataclasses
import time
from datetime import timedelta

import pytest

from orchestrator.errors import NotOwner
from orchestrator.leader import duties
from orchestrator.pools import PoolSpec
from orchestrator.store import crews, outbox, pools, schema, withdraw
from orchestrator.store.claim import Claim, NotClaimed
from tests.factories import active_leases, gpu, hire, history, now, row, rows, set_job, submit
from tests.fetchers import enlist

KEY = "stream:orchestrator:inference_jobs"


def run(context, name):
    return duties.find(name).run(context)


# --- streams ---


def test_a_lane_that_nobody_reads_is_served_and_its_stream_stays_small(db, raw, context, publisher):
    """Entries of jobs that were fetched stay, fill the window, and the rest is taken without being announced."""
    remote, ids = enlist(db), submit(db, 100)
    got = []
    while jobs := remote.fetch(15):
        got += [job.job_id for job in jobs]
        assert {answer.status for answer in remote.finish(*jobs)} == {"done"}
        run(context, "publish")
        run(context, "repair")
        run(context, "reclaim")
        assert raw.xlen(KEY) <= context.settings.lane_window_min
    assert got == ids


def test_http_workers_do_not_widen_the_window_of_a_stream_they_never_read(db):
    hire(db, slots=4)
    enlist(db, slots=100)
    assert db.read(lambda conn: outbox.live_slots(conn, "default")) == 4


def test_a_lane_with_both_kinds_of_workers_gives_every_job_to_one_of_them(db, hub, context, publisher):
    remote, hand, ids = enlist(db), hire(db), submit(db, 100)
    lane = hub.lane("default")
    reader = hub.reader(lane, hand.worker_id)
    fetched: list[str] = []
    read: list[str] = []
    turns = 0
    while len(fetched) + len(read) < len(ids):
        turns += 1
        publisher.publish("default")
        fetched += [job.job_id for job in remote.fetch(3)]  # the very ones that were announced
        entries = reader.read(5, 20)
        answers = hand.offer(*[entry.job_id for entry in entries])
        assert all(isinstance(answer, Claim) or answer == NotClaimed("already claimed") for answer in answers.values())
        read += [job_id for job_id, answer in answers.items() if isinstance(answer, Claim)]
        lane.ack([entry.entry_id for entry in entries])
        assert turns < 100, "somebody starves"
    assert sorted(fetched + read) == sorted(ids)
    assert len(read) > 20
    while entries := reader.read(50, 20):
        lane.ack([entry.entry_id for entry in entries])
    assert lane.length() == 0


def test_a_reader_that_comes_late_drops_what_was_fetched_meanwhile(db, hub, publisher):
    remote, ids = enlist(db), submit(db, 30)
    publisher.publish("default")
    remote.finish(*remote.fetch(30))
    late = submit(db, 1)
    hand, lane = hire(db), hub.lane("default")
    reader = hub.reader(lane, hand.worker_id)
    while entries := reader.read(50, 20):
        answers = hand.offer(*[entry.job_id for entry in entries])
        lane.ack([entry.entry_id for entry in entries])
        assert set(answers) <= {*ids, *late}
        publisher.publish("default")
    assert row(db, late[0]).worker_id == hand.worker_id


# --- limits ---


def age(db, claim, seconds):
    set_job(db, claim.job_id, claimed_at=now(db) - timedelta(seconds=seconds))


@pytest.mark.parametrize("signed", [True, False])
def test_an_attempt_that_ran_too_long_is_a_timeout_and_gives_its_memory_back(db, context, signed):
    hire(db, gpu())
    remote, (late, early) = enlist(db, node="node-1"), submit(db, 2, max_runtime_sec=20, min_memory_mb=100)
    claims = remote.fetch(2)
    for claim in claims if signed else ():
        remote.sign(claim)
    age(db, claims[0], 21)
    age(db, claims[1], 10)
    assert run(context, "time_limits") == 1
    found = row(db, late)
    assert (found.status, found.error_kind, found.attempts) == ("pending", "timeout", 1)
    assert "20 seconds" in found.last_error
    assert row(db, early).status in {"claimed", "running"}
    assert [lease.job_id for lease in active_leases(db)] == [early]
    assert isinstance(remote.finish(claims[0])[0], NotOwner)
    assert run(context, "time_limits") == 0


def test_a_cancelled_attempt_that_ran_too_long_ends_as_cancelled(db, context):
    remote, (job_id,) = enlist(db), submit(db, max_runtime_sec=1)
    (claim,) = remote.fetch()
    db.write(lambda conn: withdraw.cancel(conn, job_id))
    age(db, claim, 2)
    run(context, "time_limits")
    assert row(db, job_id).status == "cancelled"


def test_an_attempt_that_its_worker_never_heard_of_is_retried(db, context):
    """The answer to its claim was lost; heartbeats of a worker that does not know it would keep it for ever."""
    remote, ids = enlist(db), submit(db, 3)
    unheard, signed, young = remote.fetch(3)
    remote.sign(signed)
    age(db, unheard, 31)
    age(db, signed, 31)
    age(db, young, 20)
    assert run(context, "time_limits") == 1
    assert [row(db, job_id).status for job_id in ids] == ["pending", "running", "claimed"]
    assert history(db, unheard.job_id)[-1] == "job.retry"
    assert "no sign" in row(db, unheard.job_id).last_error


def test_after_an_outage_signs_may_come_first(db, context):
    remote, _ = enlist(db), submit(db)
    (claim,) = remote.fetch()
    age(db, claim, 3600)
    young = dataclasses.replace(context, term=dataclasses.replace(context.term, began=time.monotonic()))
    assert run(young, "time_limits") == 0
    assert run(context, "time_limits") == 1


def test_limits_of_our_own_workers_are_kept_at_home(db, context):
    """There the time of a job begins when its slot gets it, and its end is seen by the process that ends."""
    hand, (job_id,) = hire(db), submit(db, max_runtime_sec=1)
    (claim,) = hand.claim(job_id)
    age(db, claim, 3600)
    before = rows(db, schema.jobs)
    assert run(context, "time_limits") == 0
    assert rows(db, schema.jobs) == before


# --- drains ---


def drain_pool(db, timeout_s):
    db.write(lambda conn: pools.drain(conn, "gold", timeout_s))


def pool_state(db):
    (pool,) = rows(db, schema.worker_pools)
    return pool.status, pool.status_reason


@pytest.fixture
def serving(db):
    """An HTTP worker of a pool with a job."""
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold", provider="external")))
    hire(db, gpu())
    remote = enlist(db, pool="gold", node="node-1")
    submit(db, pool_id="gold", min_memory_mb=100)
    (claim,) = remote.fetch()
    return remote, claim


def is_handed_back(db, claim):
    found = row(db, claim.job_id)
    if found.status != "pending":
        return False
    assert (found.attempts, found.worker_id, found.error_kind) == (0, None, None)
    assert history(db, claim.job_id)[-1] == "job.handed_back"
    assert active_leases(db) == []
    return True


@pytest.mark.parametrize("signed", [True, False])
def test_an_evicted_pool_takes_its_jobs_back(db, context, serving, signed):
    remote, claim = serving
    if signed:
        remote.sign(claim)
    run(context, "reconcile")
    assert not is_handed_back(db, claim)
    db.write(lambda conn: pools.evict(conn, "gold"))
    run(context, "reconcile")
    assert is_handed_back(db, claim)
    assert isinstance(remote.sign(claim), NotOwner)
    assert isinstance(remote.finish(claim)[0], NotOwner)
    assert is_handed_back(db, claim)
    assert run(context, "reconcile") == 0


def test_a_drained_pool_takes_its_jobs_back_when_its_time_is_over_and_stops_although_an_http_worker_stays(
    db, context, serving
):
    remote, claim = serving
    drain_pool(db, 60.0)
    run(context, "reconcile")
    assert not is_handed_back(db, claim)
    assert pool_state(db) == ("draining", "1 workers have not left yet")  # it never told that it is busy
    drain_pool(db, 0.0)
    run(context, "reconcile")
    assert is_handed_back(db, claim)
    assert pool_state(db) == ("stopped", None)
    assert remote.fetch() == []
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold", provider="external")))
    assert [again.attempt for again in remote.fetch()] == [2]


def test_a_drained_pool_stops_when_the_job_of_its_http_worker_has_ended(db, context, serving):
    remote, claim = serving
    drain_pool(db, 60.0)
    remote.finish(claim)
    run(context, "reconcile")
    assert (row(db, claim.job_id).status, pool_state(db)) == ("done", ("stopped", None))


def test_a_drained_node_takes_its_jobs_back_when_its_time_is_over(db, context, serving):
    remote, claim = serving
    db.write(lambda conn: crews.drain_nodes(conn, ["node-1"], 60.0))
    run(context, "reconcile")
    assert not is_handed_back(db, claim)
    db.write(lambda conn: crews.drain_nodes(conn, ["node-1"], 0.0))
    run(context, "reconcile")
    assert is_handed_back(db, claim)
    assert isinstance(remote.finish(claim)[0], NotOwner)


def test_a_cancelled_job_of_an_evicted_pool_ends_as_cancelled(db, context, serving):
    _, claim = serving
    db.write(lambda conn: withdraw.cancel(conn, claim.job_id))
    db.write(lambda conn: pools.evict(conn, "gold"))
    run(context, "reconcile")
    assert row(db, claim.job_id).status == "cancelled"


def test_our_own_workers_hand_back_by_themselves(db, context):
    """They end its process first."""
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold")))
    hand, (job_id,) = hire(db, pool="gold"), submit(db, pool_id="gold")
    hand.claim(job_id)
    db.write(lambda conn: crews.drain_nodes(conn, None, 0.0))
    db.write(lambda conn: pools.evict(conn, "gold"))
    run(context, "reconcile")
    assert row(db, job_id).status == "claimed"


def test_a_silent_http_worker_is_lost_with_its_jobs(db, context):
    remote, (job_id,) = enlist(db), submit(db)
    remote.fetch()
    change = schema.workers.update().where(schema.workers.c.worker_id == remote.worker_id)
    db.write(lambda conn: conn.execute(change.values(last_heartbeat=now(db) - timedelta(seconds=31))))
    run(context, "reclaim")
    found = row(db, job_id)
    assert (found.status, found.error_kind, found.crashes) == ("pending", "worker_lost", 1)
