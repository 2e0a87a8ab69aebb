"""What is asked of a lane, as an autoscaler sees it."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from orchestrator.errors import LaneNotFound
from orchestrator.pools import PoolSpec
from orchestrator.scaling import LATELY_S, desired_workers
from orchestrator.store import load, outbox, pools, schema, withdraw
from tests.factories import gpu, hire, many_jobs, now, row, rows, set_job, submit
from tests.fetchers import enlist


def of(db, lane="default", **given):
    return db.read(lambda conn: load.of_lane(conn, lane, 4, **given))


def announce(db, lane="default", count=1000):
    return db.write(lambda conn: outbox.take(conn, lane, count))


def ended(db, job_id, ago_s, took_s):
    """As if it had been submitted and had ended so long ago."""
    at = now(db) - timedelta(seconds=ago_s)
    set_job(db, job_id, finished_at=at, created_at=at - timedelta(seconds=took_s))


def test_a_name_that_nobody_ever_used_is_no_empty_lane(db):
    with pytest.raises(LaneNotFound):
        of(db, "typo")


def test_the_lane_of_jobs_without_a_pool_is_always_known(db):
    found = of(db)
    assert (found.depth, found.workers, found.slots, desired_workers(found)) == (0, 0, 4.0, 0)


def test_a_lane_is_known_by_its_jobs_its_workers_or_its_pool(db):
    submit(db, pool_id="jobs")
    hire(db, pool="workers")
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="pool", slots=3, min_workers=1, max_workers=2)))
    assert [of(db, lane).depth for lane in ("jobs", "workers", "pool")] == [1, 0, 0]
    known = of(db, "pool")
    assert (known.slots, known.minimum, known.maximum, known.open) == (3.0, 1, 2, True)


def test_depth_is_what_runs_and_what_may_run(db):
    hand = hire(db, slots=2)
    first, second, *_ = submit(db, 5)
    submit(db, 3, pool_id="other")
    submit(db, 2, earliest_start_at=(now(db) + timedelta(hours=1)).isoformat() + "Z")
    announce(db, count=3)
    claims = hand.claim(first, second)
    hand.start(claims[0])
    found = of(db)
    assert (found.waiting, found.running, found.delayed, found.depth) == (3, 2, 2, 5)
    assert (found.workers, found.busy_workers, found.slots, found.at_least) == (1, 1, 2.0, False)
    hand.finish(*claims)
    assert of(db).depth == 3


def test_what_is_due_counts_although_nobody_let_it_go_yet(db):
    (job_id,) = submit(db, earliest_start_at=(now(db) + timedelta(hours=1)).isoformat() + "Z")
    assert (of(db).depth, of(db).delayed) == (0, 1)
    set_job(db, job_id, not_before=now(db) - timedelta(seconds=1))
    assert (of(db).depth, of(db).delayed) == (1, 0)
    submit(db, pool_id="other")
    assert of(db, "other").depth == 1


def test_a_flood_of_others_that_nobody_let_go_hides_nobody(db):
    """More are overdue elsewhere than are counted, and longer: what is due here must not read as nothing."""
    (mine,) = submit(db, pool_id="mine", earliest_start_at=(now(db) + timedelta(hours=1)).isoformat() + "Z")
    many_jobs(db, 10, lane="flood", queued="delayed", not_before=now(db) - timedelta(hours=1))
    set_job(db, mine, not_before=now(db) - timedelta(seconds=1))
    found = of(db, "mine", most=10)
    assert (found.depth, found.delayed, found.at_least) == (1, 0, True)
    found = of(db, "mine", most=20)
    assert (found.depth, found.delayed, found.at_least) == (1, 0, False)


def test_what_waits_for_memory_is_work_and_what_waits_for_a_time_is_not(db):
    """INV-24. A retry's pause and `earliest_start_at` are for no worker to end; memory and a handler it may bring."""
    hand = hire(db, gpu(total_mb=10_000, foreign_mb=9000))
    retried, large, strange = submit(db)[0], submit(db, min_memory_mb=5000)[0], submit(db)[0]
    submit(db, earliest_start_at=(now(db) + timedelta(hours=1)).isoformat() + "Z")
    hand.fail(*hand.claim(retried), retry_after_s=60.0)
    hand.offer(large)
    hand.offer(strange, memory_mb=None)
    set_job(db, large, created_at=now(db) - timedelta(seconds=40))
    assert [row(db, job_id).queued for job_id in (retried, large, strange)] == ["delayed"] * 3
    found = of(db)
    assert (found.depth, found.delayed, found.at_least) == (2, 2, False)
    assert found.oldest_wait_s == pytest.approx(40, abs=10)
    assert desired_workers(found) == 1


def test_those_put_off_are_seen_among_many_that_wait_for_a_time(db):
    """They come sooner; and when too many come soon to see them all, what waits is not said to be nothing."""
    (mine,) = submit(db, pool_id="mine")
    hire(db, pool="mine").offer(mine, memory_mb=None)
    many_jobs(db, 10, lane="mine", queued="delayed", not_before=now(db) + timedelta(hours=1))
    assert (of(db, "mine", most=10).depth, of(db, "mine", most=10).delayed) == (1, 9)
    many_jobs(db, 10, lane="flood", queued="delayed", not_before=now(db), job_id=lambda i: f"flood-{i}")
    assert of(db, "mine", most=10).depth == 10


def test_counting_stops_and_says_so(db):
    submit(db, 12)
    assert (of(db, most=10).depth, of(db, most=10).at_least) == (10, True)
    assert (of(db, most=20).depth, of(db, most=20).at_least) == (12, False)


def test_who_drains_is_no_worker_any_more(db):
    first, second, _ = submit(db, 3, pool_id="gold")
    leaving, staying, gone = (hire(db, pool="gold") for _ in range(3))
    leaving.claim(first)
    leaving.beat(busy=1, draining=True)
    staying.claim(second)
    gone.go_silent()
    found = of(db, "gold")
    assert (found.workers, found.busy_workers, found.draining) == (2, 1, 1)  # silent, but not declared lost yet


def test_who_is_busy_is_told_by_the_jobs_and_not_by_heartbeats(db):
    """A worker says how busy it is every few seconds, one that speaks HTTP perhaps never: jobs know it at once."""
    jobs = submit(db, 4)
    hand, fetcher = hire(db), enlist(db)
    claims = hand.claim(*jobs[:3])
    assert len(fetcher.fetch()) == 1
    assert (of(db).running, of(db).busy_workers) == (4, 2)
    hand.beat(busy=3)
    hand.finish(*claims)
    assert (of(db).running, of(db).busy_workers) == (1, 1)


def test_a_job_on_its_way_is_never_out_of_sight(db):
    """From those that wait to those that run and back: nobody who asks in between is told that nothing is there."""
    (job_id,) = submit(db)
    announce(db)
    hand, moved = hire(db), threading.Event()

    def move():
        try:
            for _ in range(100):
                hand.hand_back(*hand.claim(job_id))
        finally:
            moved.set()

    seen: Counter[int] = Counter()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        while not moved.is_set():
            seen[of(db).depth] += 1
        moving.result()
    assert set(seen) == {1}, seen


def test_a_pool_that_drains_wants_nobody_new(db):
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold", min_workers=1)))
    submit(db, 500, pool_id="gold")
    assert desired_workers(of(db, "gold")) == 500
    db.write(lambda conn: pools.drain(conn, "gold", 60.0))
    assert (of(db, "gold").open, desired_workers(of(db, "gold"))) == (False, 0)


def test_the_oldest_wait_is_that_of_this_lane(db):
    first, _ = submit(db, 2)
    (other,) = submit(db, pool_id="other")
    set_job(db, first, created_at=now(db) - timedelta(seconds=40))
    set_job(db, other, created_at=now(db) - timedelta(seconds=4000))
    assert of(db).oldest_wait_s == pytest.approx(40, abs=10)
    assert of(db, "other").oldest_wait_s == pytest.approx(4000, abs=10)


def test_latency_is_the_mean_of_what_ended_lately(db):
    hand = hire(db)
    jobs = submit(db, 4)
    assert of(db).mean_latency_s is None
    announce(db)
    hand.finish(*hand.claim(*jobs))
    for job_id, ago_s, took_s in zip(jobs, (1, 2, 2 * LATELY_S, 3), (2.0, 4.0, 500.0, 9.0), strict=True):
        ended(db, job_id, ago_s, took_s)
    assert of(db).mean_latency_s == pytest.approx(5.0, abs=0.01)


def test_no_latency_is_told_of_other_lanes_or_of_jobs_that_were_cancelled(db):
    jobs = submit(db, 3)
    submit(db, pool_id="other")
    announce(db)
    hand = hire(db)
    hand.finish(*hand.claim(jobs[0]))
    ended(db, jobs[0], 1, 3.0)
    db.write(lambda conn: withdraw.cancel(conn, jobs[2]))
    ended(db, jobs[2], 1, 900.0)
    assert of(db).mean_latency_s == pytest.approx(3.0, abs=0.01)
    assert of(db, "other").mean_latency_s is None


def test_a_flood_that_was_cancelled_hides_nobody(db):
    """Its ranks are far beyond the lane's clock."""
    (first,) = submit(db, agent="quiet")
    announce(db)
    hand = hire(db)
    hand.finish(*hand.claim(first))
    ended(db, first, 1, 3.0)
    clock = rows(db, schema.lanes)[0].virtual_time
    far = clock + 10_000_000
    many_jobs(db, 1500, status="cancelled", queued=None, finished_at=now(db), rank=lambda i: far + i)
    assert of(db).mean_latency_s == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("priority", ["LOW", "NORMAL", "HIGH"])
def test_latency_is_seen_at_every_priority_also_after_other_ones(db, priority):
    hand = hire(db)
    for name in ("NORMAL", priority):
        jobs = submit(db, 5, priority=name)
        announce(db)
        hand.finish(*hand.claim(*jobs))
        ago_s = 1 if name == priority else 2 * LATELY_S
        for job_id in jobs:
            ended(db, job_id, ago_s, 7.0)
        if priority == "NORMAL":
            break
    assert of(db).mean_latency_s == pytest.approx(7.0, abs=0.01)
