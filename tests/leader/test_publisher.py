"""The publisher: a bounded window in the stream, the backlog in the database, and nothing lost in between."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, timedelta
from threading import Barrier

import pytest
from sqlalchemy import update

from orchestrator.errors import RedisUnavailable
from orchestrator.leader import delivery
from orchestrator.publisher import Publisher
from orchestrator.store import outbox, schema
from orchestrator.store.dialect import utc_shift
from orchestrator.stream.hub import Hub
from tests.factories import hire, now, row, set_job, submit, traffic
from tests.servers import free_port
from tests.waiting import wait_until


def announced(raw, key="stream:orchestrator:inference_jobs"):
    return [fields["job_id"] for _id, fields in raw.xrange(key)]


def age(db, *job_ids, seconds=60.0):
    """As if these had been announced a while ago."""
    for job_id in job_ids:
        if row(db, job_id).queued == "announced":
            set_job(db, job_id, published_at=utc_shift(-seconds))


def test_the_stream_holds_a_window_and_the_database_the_backlog(db, publisher, raw):
    ids = submit(db, 150)
    assert publisher.publish("default") == 20  # lane_window_min of these tests
    assert announced(raw) == ids[:20]
    assert publisher.publish("default") == 0
    assert row(db, ids[20]).queued == "ready"


def test_the_window_holds_what_full_batches_take(db, publisher, raw):
    submit(db, 150)
    publisher.reaches("default", 64)
    assert publisher.publish("default") == 64
    publisher.reaches("default", 1000)
    assert publisher.publish("default") == 0  # lane_window_max is 100, and more than half of that is there


@pytest.mark.parametrize(("slots", "window"), [(0, 20), (3, 20), (30, 60), (500, 100)])
def test_the_window_follows_the_slots_that_are_alive_within_its_bounds(db, publisher, raw, slots, window):
    submit(db, 150)
    if slots:
        hire(db, slots=slots)
    assert publisher.publish("default") == len(announced(raw)) == window


@pytest.mark.parametrize(("slots", "window"), [(0, 2), (1, 2), (2, 4)])
def test_few_slots_have_few_entries_ahead_by_default(db, hub, config, raw, slots, window):
    least = type(config).model_fields["lane_window_min"].default
    publisher = Publisher(db, hub, config.model_copy(update={"lane_window_min": least}))
    submit(db, 50)
    if slots:
        hire(db, slots=slots)
    assert publisher.publish("default") == len(announced(raw)) == window


def test_a_job_whose_latest_start_is_near_goes_first_in_every_other_place(db, hub, config, raw):
    publisher = Publisher(db, hub, config.model_copy(update={"lane_window_min": 4}))
    usual = submit(db, 10)
    soon = (now(db) + timedelta(seconds=3)).replace(tzinfo=UTC).isoformat()
    urgent = submit(db, 6, deadline_at=soon)
    assert publisher.publish("default") == 4
    first = announced(raw)
    assert set(first[:2]) <= set(urgent)
    assert first[2:] == usual[:2]


def test_urgent_jobs_are_looked_for_a_few_times_a_second_and_not_with_each_take(db, hub, config, raw, monkeypatch):
    publisher = Publisher(db, hub, config)
    submit(db, 50)
    lane = hub.lane("default")
    reader = hub.reader(lane, "w")

    def looks(takes):
        with traffic(db) as seen:
            for _ in range(takes):
                assert publisher.publish("default") > 0
                lane.ack([entry.entry_id for entry in reader.read(100, 20)])
        return sum("start_by <=" in statement for statement in seen.statements)

    monkeypatch.setattr("orchestrator.publisher.URGENT_EVERY_S", 60.0)
    assert looks(2) == 1
    monkeypatch.setattr("orchestrator.publisher.URGENT_EVERY_S", 0.0)
    assert looks(1) == 1


def test_what_leaves_the_window_is_replaced_in_order_of_rank(db, hub, publisher, raw):
    ids = submit(db, 40)
    publisher.publish("default")
    lane = hub.lane("default")
    lane.ack([entry.entry_id for entry in hub.reader(lane, "w").read(100, 20)])
    (urgent,) = submit(db, priority="HIGH")
    publisher.publish("default")
    assert announced(raw) == [urgent, *ids[20:39]]


def test_lanes_have_windows_of_their_own(db, publisher, raw):
    submit(db, 30, pool_id="big")
    (small,) = submit(db, pool_id="small")
    publisher.publish("big")
    publisher.publish("small")
    assert announced(raw, "stream:orchestrator:inference_jobs:small") == [small]
    assert len(announced(raw, "stream:orchestrator:inference_jobs:big")) == 20


def test_publishers_at_the_same_moment_announce_each_job_once(db, hub, config, open_database, raw):
    ids = submit(db, 60)
    publishers = [Publisher(database, hub, config) for database in (db, open_database(config.database_url))] * 3
    barrier = Barrier(6)

    def publish(publisher):
        barrier.wait(30)
        return publisher.publish("default")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(publish, publishers))
    seen = announced(raw)
    assert len(seen) == len(set(seen))
    assert 20 <= len(seen) <= 60
    assert set(seen) <= set(ids)


def test_a_nudge_publishes_and_the_thread_survives_a_server_that_is_away(db, hub, config, raw):
    away = Hub(config.model_copy(update={"redis_url": f"redis://127.0.0.1:{free_port()}/0"}))
    ids = submit(db, 3)
    publisher = Publisher(db, away, config)
    publisher.start()
    publisher.nudge("default")
    wait_until(lambda: not publisher._nudged, what="the nudge is taken")
    publisher._hub = hub
    publisher.nudge("default")
    wait_until(lambda: announced(raw) == ids, what="the next nudge publishes")
    publisher.close()
    away.close()
    assert not publisher._thread.is_alive()


def test_idle_lanes_are_looked_at_together_and_what_was_forgotten_there_is_announced(db, hub, config, raw):
    for number in range(20):
        submit(db, pool_id=f"pool-{number}")
    db.write(lambda conn: conn.execute(update(schema.jobs).values(status="done", queued=None)))
    ids = submit(db, pool_id="pool-7")
    # Nobody looks a second time, however slow the machine is.
    publisher = Publisher(db, hub, config.model_copy(update={"redis_block_ms": 60_000}))
    with traffic(db) as seen:
        for number in range(20):
            publisher.idle(f"pool-{number}")
        publisher.start()
        key = "stream:orchestrator:inference_jobs:pool-7"
        wait_until(lambda: announced(raw, key) == ids, what="what was forgotten is announced")
        for _ in range(20):
            publisher.idle("pool-7")
        publisher.close()
    assert seen.commits <= 2, seen.statements


# --- what a crash leaves ---


def test_a_crash_between_update_and_xadd_is_repaired(db, context, publisher, raw):
    """F-3: the row says announced, and no entry is there."""
    ids = submit(db, 3)
    db.write(lambda conn: outbox.take(conn, "default", 2))
    assert delivery.repair(context) == 0  # young: its XADD may be on the way
    age(db, *ids)
    assert delivery.repair(context) == 2
    assert delivery.repair(context) == 0
    publisher.publish("default")
    assert sorted(announced(raw)) == sorted(ids)


def test_an_xadd_that_fails_leaves_rows_that_are_repaired(db, context, publisher, hub, monkeypatch):
    ids = submit(db, 3)

    def lost(_jobs):
        raise RedisUnavailable("away")

    monkeypatch.setattr(hub.lane("default"), "announce", lost)
    with pytest.raises(RedisUnavailable):
        publisher.publish("default")
    monkeypatch.undo()
    age(db, *ids)
    assert delivery.repair(context) == 3
    assert publisher.publish("default") == 3


def test_everything_flushed_is_announced_again(db, context, publisher, hub, raw):
    """INV-7, F-10: entries waiting, delivered and worked on are all gone; only those not owned come back."""
    hand, ids = hire(db), submit(db, 30)
    publisher.publish("default")
    hub.reader(hub.lane("default"), hand.worker_id).read(3, 20)
    (claim,) = hand.claim(ids[0])
    raw.flushall()
    age(db, *ids)
    assert delivery.repair(context) == 19
    assert publisher.publish("default") == 20
    assert announced(raw) == ids[1:21]
    hand.finish(claim)
    assert row(db, ids[0]).status == "done"


def test_what_is_in_the_stream_is_not_announced_twice(db, context, publisher, hub, raw):
    ids = submit(db, 10)
    publisher.publish("default")
    hub.reader(hub.lane("default"), "w").read(4, 20)  # delivered counts as present
    age(db, *ids)
    assert delivery.repair(context) == 0
    assert announced(raw) == ids


def test_the_loss_of_one_entry_among_many_is_found(db, context, publisher, raw):
    ids = submit(db, 10)
    publisher.publish("default")
    entries = raw.xrange("stream:orchestrator:inference_jobs")
    raw.xdel("stream:orchestrator:inference_jobs", entries[4][0])
    age(db, *ids)
    assert delivery.repair(context) == 1
    assert row(db, ids[4]).queued == "ready"
