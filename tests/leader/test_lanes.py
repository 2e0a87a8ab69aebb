"""Lanes are made by whoever names them: those that nobody uses cost the leader nothing, and are forgotten (INV-25)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import insert, update

from orchestrator import publisher as publishing
from orchestrator.errors import LaneNotFound, RedisUnavailable, StaleEpoch
from orchestrator.jobs import ErrorKind
from orchestrator.leader import delivery, duties, retention
from orchestrator.leader.context import BATCH
from orchestrator.pools import PoolSpec, PoolState
from orchestrator.store import backlog, dead_letters, lanes, leadership, load, pools, schema
from orchestrator.store.dialect import utc_shift
from orchestrator.stream import hub as hubs
from tests.factories import (
    hire,
    many_jobs,
    row,
    rows,
    set_job,
    status,
    submit,
    traffic,
)

PREFIX = "stream:orchestrator:"


def key(lane):
    return f"{PREFIX}inference_jobs:{lane}"


def keys(raw, lane):
    """What Redis has of a lane."""
    return raw.keys(f"*inference_jobs:{lane}*")


def entries(raw, lane):
    return [fields["job_id"] for _id, fields in raw.xrange(key(lane))]


def known(db):
    return db.read(backlog.lanes_by_age)


def clock(db, lane):
    return {one.lane: one.virtual_time for one in rows(db, schema.lanes)}.get(lane)


def forget(context):
    """As the leader does: again at once, as long as there is more."""
    for _ in range(100):
        if duties.forget_old(context) < BATCH:
            return
    pytest.fail("it never ends")


def use(db, context, lane="mine", count=1):
    """Let a job go through a lane: it is announced, and cancelled."""
    ids = submit(db, count, pool_id=lane)
    context.publisher.publish(lane)
    delivery.reclaim(context)
    for job_id in ids:
        set_job(db, job_id, status="cancelled")


# --- what they cost ---


def many_lanes(db, count):
    names = [f"unused-{number:04}" for number in range(count)]
    many_jobs(db, count, lane=lambda i: names[i], status="cancelled", queued=None)
    db.write(lambda conn: conn.execute(insert(schema.lanes), [{"lane": name} for name in names]))


def cost(db, raw, context, duty):
    """Commands to Redis and transactions of one run."""
    context.looked_at.clear()
    before = raw.info("stats")["total_commands_processed"]
    with traffic(db) as seen:
        duties.find(duty).run(context)
    return raw.info("stats")["total_commands_processed"] - before, len(seen.statements)


@pytest.mark.parametrize("duty", ["publish", "repair", "reclaim", "reconcile"])
def test_500_lanes_that_nobody_uses_cost_no_command_and_no_transaction(db, raw, context, duty):
    hire(db)
    submit(db)
    duties.find(duty).run(context)
    before = cost(db, raw, context, duty)
    many_lanes(db, 500)
    assert cost(db, raw, context, duty) == before


def test_a_lane_that_somebody_serves_is_looked_at_in_every_turn_and_the_others_a_few_at_a_time(
    db, raw, context, monkeypatch
):
    monkeypatch.setattr(lanes, "SOME", 2)
    names = [f"lane-{number}" for number in range(5)]
    ids = {name: submit(db, pool_id=name) for name in names}
    hire(db, pool="lane-4")
    delivery.publish(context)
    assert [name for name in names if entries(raw, name)] == ["lane-0", "lane-1", "lane-4"]
    delivery.publish(context)
    delivery.publish(context)
    assert {name: entries(raw, name) for name in names} == ids
    raw.delete(*map(key, names))
    for (job_id,) in ids.values():
        set_job(db, job_id, published_at=utc_shift(-60.0))
    assert [delivery.repair(context) for _ in range(3)] == [3, 2, 0]


def test_what_a_dead_reader_held_in_a_lane_that_nobody_serves_is_announced_anew(db, hub, raw, context, publisher):
    reader, (job_id,) = hire(db, pool="mine"), submit(db, pool_id="mine")
    publisher.publish("mine")
    lane = hub.lane("mine")
    (entry,) = hub.reader(lane, reader.worker_id).read(1, 20)
    raw.xclaim(key("mine"), lane.group, reader.worker_id, 0, [entry.entry_id], idle=3_600_000, justid=True)
    reader.go_silent()
    context.term.write(lambda conn: conn.execute(update(schema.workers).values(status="lost")))
    assert delivery.reclaim(context) == 1
    assert row(db, job_id).queued == "ready"
    assert entries(raw, "mine") == []


def test_a_process_keeps_a_bounded_number_of_lanes_in_memory(db, hub, publisher, monkeypatch):
    monkeypatch.setattr(hubs, "MAX_LANES", 10)
    monkeypatch.setattr(publishing, "MAX_LANES", 10)
    publisher.reaches("mine", 7)
    for number in range(50):
        hub.lane(f"lane-{number}")
        publisher.publish(f"lane-{number}")
    assert len(hub._lanes) <= 10
    assert len(publisher._pace) <= 11
    assert publisher._pace["mine"].reach == 7


# --- forgetting ---


def test_a_lane_that_nobody_uses_is_forgotten_in_the_database_and_in_redis(db, raw, context):
    use(db, context, count=3)
    assert len(keys(raw, "mine")) == 2
    forget(context)
    assert known(db) == []
    assert rows(db, schema.lane_accounts) == []
    assert keys(raw, "mine") == []


def stays_for_a_job(db, **columns):
    (job_id,) = submit(db, pool_id="mine")
    set_job(db, job_id, **columns)


def stays_for_a_pool(db):
    submit(db, pool_id="mine")
    db.write(lambda conn: conn.execute(update(schema.jobs).values(status="done", queued=None)))
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="mine", type="echo")))


def stays_for_a_worker(db):
    submit(db, pool_id="mine")
    db.write(lambda conn: conn.execute(update(schema.jobs).values(status="done", queued=None)))
    hire(db, pool="mine")
    db.write(lambda conn: conn.execute(update(schema.workers).values(status="stopped")))


STAYS: dict[str, Callable[[Any], None]] = {
    "ready": partial(stays_for_a_job, queued="ready"),
    "announced": partial(stays_for_a_job, queued="announced"),
    "delayed": partial(stays_for_a_job, queued="delayed", not_before=utc_shift(60.0)),
    "blocked": partial(stays_for_a_job, queued="blocked", blocked_on="nothing"),
    "claimed": partial(stays_for_a_job, status="claimed", attempt=1),
    "running": partial(stays_for_a_job, status="running", attempt=1),
    "a pool": stays_for_a_pool,
    "a worker that is remembered": stays_for_a_worker,
}


@pytest.mark.parametrize("why", STAYS)
def test_a_lane_with_work_a_pool_or_a_worker_stays(db, context, why):
    STAYS[why](db)
    forget(context)
    assert known(db) == ["mine"]
    assert len(rows(db, schema.lane_accounts)) == 1


def test_a_lane_whose_pool_is_over_and_whose_workers_are_forgotten_goes(db, context):
    stays_for_a_pool(db)
    db.write(lambda conn: conn.execute(update(schema.worker_pools).values(status=PoolState.STOPPED)))
    forget(context)
    assert known(db) == []


def test_the_default_lane_stays(db, raw, context, publisher):
    (job_id,) = submit(db)
    publisher.publish("default")
    set_job(db, job_id, status="cancelled")
    forget(context)
    assert known(db) == ["default"]
    assert raw.xlen(f"{PREFIX}inference_jobs") == 1


def test_a_few_lanes_go_at_a_time_until_all_are_gone(db, context, monkeypatch):
    monkeypatch.setattr(lanes, "SOME", 3)
    many_lanes(db, 10)
    assert duties.forget_old(context) >= BATCH, "the next look should follow at once"
    assert len(known(db)) == 7
    forget(context)
    assert known(db) == []


def test_a_lane_of_many_agents_goes_in_several_transactions(db, context, monkeypatch):
    monkeypatch.setattr(lanes, "ACCOUNTS", 3)
    for number in range(7):
        submit(db, pool_id="b", agent=f"agent-{number}")
    submit(db, pool_id="a")
    submit(db, pool_id="c")
    db.write(lambda conn: conn.execute(update(schema.jobs).values(status="cancelled", queued=None)))
    left = []
    for _ in range(4):
        retention.forget_lanes(context.term, context.hub, "")
        left.append((known(db), len(rows(db, schema.lane_accounts))))
        assert clock(db, "b") in {1000, None}, "no agent's next job goes before what it had there"
    assert left == [(["b", "c"], 6), (["b", "c"], 3), (["c"], 0), ([], 0)]


def test_nothing_is_forgotten_while_redis_is_away(db, hub, context, monkeypatch):
    use(db, context)

    def away(_epoch):
        raise RedisUnavailable("away")

    monkeypatch.setattr(hub.lane("mine"), "drop", away)
    with pytest.raises(RedisUnavailable):
        forget(context)
    assert known(db) == ["mine"]


def test_an_autoscaler_hears_of_a_forgotten_lane_as_long_as_its_jobs_are_remembered(db, context):
    use(db, context)
    forget(context)
    assert db.read(lambda conn: load.of_lane(conn, "mine", 1)).depth == 0
    db.write(lambda conn: conn.execute(schema.jobs.delete()))
    with pytest.raises(LaneNotFound):
        db.read(lambda conn: load.of_lane(conn, "mine", 1))


# --- the fence ---


def test_a_leader_that_was_replaced_forgets_nothing(db, raw, context):
    use(db, context)
    before = keys(raw, "mine")
    lock = context.settings.leader_lock
    db.write(lambda conn: leadership.take(conn, lock, "successor", 60.0, lock_held=True))
    with pytest.raises(StaleEpoch):
        retention.forget_lanes(context.term, context.hub, "")
    assert (known(db), keys(raw, "mine")) == (["mine"], before)


def test_a_newer_epoch_in_redis_keeps_both_the_stream_and_the_row(db, raw, context):
    use(db, context)
    raw.set(f"{{{key('mine')}}}:epoch", context.term.epoch + 1)
    with pytest.raises(StaleEpoch):
        retention.forget_lanes(context.term, context.hub, "")
    assert known(db) == ["mine"]
    assert len(entries(raw, "mine")) == 1


# --- coming back ---


def run_all(db, hub, hand, lane):
    """Read what is announced, and do it; in which order."""
    got = [entry.job_id for entry in hub.reader(hub.lane(lane), hand.worker_id).read(10, 20)]
    hand.finish(*hand.claim(*got))
    return got


def test_a_job_for_a_lane_that_was_forgotten_runs(db, hub, context):
    use(db, context)
    forget(context)
    (job_id,) = submit(db, pool_id="mine")
    assert known(db) == ["mine"]
    delivery.publish(context)
    assert run_all(db, hub, hire(db, pool="mine"), "mine") == [job_id]
    assert status(db, job_id) == "done"


def test_a_dead_letter_of_a_forgotten_lane_goes_before_those_that_came_since(db, hub, context, publisher):
    """Its rank is of the lane that was; a clock that began anew would put everybody before it."""
    hand, ids = hire(db, pool="mine"), submit(db, 20, pool_id="mine", max_attempts=1)
    publisher.publish("mine")
    *done, dead = hand.claim(*ids)
    hand.finish(*done)
    hand.fail(dead, ErrorKind.TRANSIENT)
    hub.reader(hub.lane("mine"), hand.worker_id).read(100, 20)
    db.write(lambda conn: conn.execute(schema.workers.delete()))
    forget(context)
    assert known(db) == []
    later = submit(db, 2, pool_id="mine", agent="another")
    db.write(lambda conn: dead_letters.redrive(conn, [dead.job_id], 3, lambda _n: 0.0))
    delivery.publish(context)
    assert run_all(db, hub, hire(db, pool="mine"), "mine") == [dead.job_id, *later]


def test_a_cancelled_job_of_a_forgotten_lane_goes_before_those_that_came_since(db, hub, context):
    """It was never announced, so the lane's clock had not come to it: its agent's account had."""
    *_, last = ids = submit(db, 20, pool_id="mine")
    for job_id in ids:
        set_job(db, job_id, status="cancelled")
    forget(context)
    later = submit(db, 2, pool_id="mine", agent="another")
    db.write(lambda conn: dead_letters.redrive_one(conn, last, 3))
    delivery.publish(context)
    assert run_all(db, hub, hire(db, pool="mine"), "mine") == [last, *later]


def test_a_dead_letter_brings_its_lane_back(db, raw, context, publisher):
    """Nobody else would: it waits for a moment, so nobody is nudged, and nobody serves the lane."""
    hand, (job_id,) = hire(db, pool="mine"), submit(db, pool_id="mine", max_attempts=1)
    hand.fail(hand.claim(job_id)[0], ErrorKind.TRANSIENT)
    db.write(lambda conn: conn.execute(schema.workers.delete()))
    forget(context)
    db.write(lambda conn: dead_letters.redrive(conn, [job_id], 3, lambda _n: 60.0))
    assert known(db) == ["mine"]
    set_job(db, job_id, not_before=utc_shift(-1.0))
    delivery.publish(context)
    assert entries(raw, "mine") == [job_id]


def test_a_redrive_does_not_move_the_clock_of_a_lane_that_is_there(db, context, publisher):
    use(db, context, "far", 30)
    forget(context)
    (job_id,) = submit(db, pool_id="mine")
    set_job(db, job_id, status="failed")
    db.write(
        lambda conn: conn.execute(update(schema.lanes).where(schema.lanes.c.lane == "mine").values(virtual_time=7))
    )
    db.write(lambda conn: dead_letters.redrive_one(conn, job_id, 3))
    assert clock(db, "mine") == 7
