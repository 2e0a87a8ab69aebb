"""Nodes, GPUs and workers: alive while they say so, and no longer."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier, Thread
from typing import Any

import pytest
from sqlalchemy import insert, text

from orchestrator.batch_sizes import Sizes, to_text
from orchestrator.errors import WorkerLost
from orchestrator.gpu import GpuProcess
from orchestrator.store import gpus, nodes, outbox, schema, worker_reads
from orchestrator.store.dialect import utc_shift
from orchestrator.store.gpus import Gate
from orchestrator.store.nodes import Worker
from tests.factories import STALE_S, Hand, gpu, hire, now, row, rows, set_job, submit
from tests.waiting import wait_until


def declare_lost(db, timeout_s=60.0, limit=10):
    return [worker.worker_id for worker in db.write(lambda conn: nodes.declare_lost(conn, timeout_s, limit))]


def test_a_heartbeat_shows_the_worker_and_its_gpus(db):
    hand = hire(db, gpu(0, total_mb=10_000, foreign_mb=700, utilization=0.5), slots=3)
    hand.beat(busy=2, done=7, failed=1)
    ((worker,), _) = db.read(worker_reads.page)
    assert (worker["status"], worker["busy"], worker["jobs_done"], worker["jobs_failed"]) == (
        "active",
        2,
        7,
        1,
    )
    assert worker["types"] == ["echo"]
    (shown,) = db.read(lambda conn: gpus.list_gpus(conn, STALE_S))
    assert (shown["total_mb"], shown["usable_mb"], shown["used_mb"], shown["foreign_mb"]) == (
        10_000,
        9000,
        700,
        700,
    )
    assert shown["fresh"] is True
    assert abs(shown["sampled_at"] - now(db)) < timedelta(seconds=STALE_S)


def test_a_heartbeat_tells_how_large_batches_were_and_a_later_one_without_news_leaves_it(db):
    hand = hire(db)
    assert db.read(worker_reads.page)[0][0]["batches"] == {}
    sizes = Sizes()
    for size in (32, 32, 8):
        sizes.count(size)
    hand.beat(batch_sizes=to_text({"many": sizes}))
    hand.beat()
    ((worker,), _) = db.read(worker_reads.page)
    assert worker["batches"] == {"many": {"calls": 3, "jobs": 72, "mean": 24.0}}
    assert "batch_sizes" not in worker
    assert db.read(worker_reads.batch_sizes) == {hand.worker_id: {"many": sizes}}


def test_a_sample_never_touches_what_is_leased(db):
    hand = hire(db, gpu())
    hand.claim(*submit(db, min_memory_mb=1000))
    processes = (GpuProcess(7, 1000, mark=f"{hand.worker_id}#1"), GpuProcess(8, 50))
    hand.sees(gpu(3, uuid="GPU-0", used_mb=1050, processes=processes), busy=1)
    (shown,) = rows(db, schema.gpus)
    assert (shown.leased_mb, shown.foreign_mb, shown.gpu_index) == (1000, 50, 3)


def test_a_silent_worker_is_lost_and_its_next_heartbeat_is_refused(db):
    silent, alive = hire(db), hire(db)
    silent.go_silent(61)
    alive.go_silent(30)
    assert declare_lost(db) == [silent.worker_id]
    assert declare_lost(db) == []
    with pytest.raises(WorkerLost):
        silent.beat()
    alive.beat()
    assert db.read(lambda conn: nodes.alive_ids(conn, [silent.worker_id, alive.worker_id, "nobody"])) == {
        alive.worker_id
    }
    assert [e.worker_id for e in rows(db, schema.audit) if e.event_type == "worker.lost"] == [silent.worker_id]


def test_a_lost_worker_that_owns_jobs_is_found_until_they_are_taken(db):
    owner, idle = hire(db), hire(db)
    owner.claim(*submit(db))
    for hand in (owner, idle):
        hand.go_silent()
    assert sorted(declare_lost(db)) == sorted([owner.worker_id, idle.worker_id])
    assert [w.worker_id for w in db.read(lambda conn: nodes.dead_owners(conn, 10))] == [owner.worker_id]


def test_jobs_are_stale_whose_owner_is_dead_in_whatever_way(db):
    def stale():
        return db.read(lambda conn: worker_reads.stale_jobs(conn, 60.0))

    alive, silent, lost, stopped = (hire(db) for _ in range(4))
    for hand, count in ((alive, 1), (silent, 1), (lost, 2), (stopped, 3)):
        hand.claim(*submit(db, count))
    submit(db, 5)
    hire(db).go_silent()
    assert stale() == 0
    lost.go_silent()
    declare_lost(db)
    assert stale() == 2
    db.write(lambda conn: nodes.deregister(conn, stopped.worker))
    assert stale() == 5
    silent.go_silent(61)
    alive.go_silent(30)
    assert stale() == 6
    (job_id,) = (job.job_id for job in rows(db, schema.jobs) if job.worker_id == alive.worker_id)
    set_job(db, job_id, worker_id="unheard-of")
    assert stale() == 7
    set_job(db, job_id, worker_id=None)
    assert stale() == 7


def test_a_worker_that_stops_in_order_is_not_lost(db):
    hand = hire(db)
    db.write(lambda conn: nodes.deregister(conn, hand.worker))
    hand.go_silent()
    assert declare_lost(db) == []
    with pytest.raises(WorkerLost):
        hand.beat()


def test_pages_show_every_worker_once_the_youngest_first(db):
    hands = [hire(db) for _ in range(6)]
    same = schema.workers.update().where(schema.workers.c.worker_id.in_([hand.worker_id for hand in hands[1:5]]))
    db.write(lambda conn: conn.execute(same.values(started_at=now(db))))
    long_gone = schema.workers.update().where(schema.workers.c.worker_id == hands[0].worker_id)
    hands[0].go_silent(4000.0)
    db.write(lambda conn: conn.execute(long_gone.values(status="stopped")))
    seen: list[dict[str, Any]] = []
    cursor = None
    while not seen or cursor is not None:
        found, cursor = db.read(lambda conn, at=cursor: worker_reads.page(conn, 2, at))
        seen += found
    assert sorted(worker["worker_id"] for worker in seen) == sorted(hand.worker_id for hand in hands[1:])
    moments = [worker["started_at"] for worker in seen]
    assert moments == sorted(moments, reverse=True)


def test_what_workers_of_a_pool_ended(db):
    mine, other = hire(db), hire(db, pool="other")
    mine.beat(done=7, failed=2)
    other.beat(done=1)
    assert db.read(lambda conn: worker_reads.ended_jobs(conn, "default")) == {mine.worker_id: (7, 2)}


def test_a_draining_worker_lives(db):
    hand = hire(db)
    hand.beat(draining=True)
    ((worker,), _) = db.read(worker_reads.page)
    assert worker["status"] == "draining"
    assert declare_lost(db) == []


def test_a_lost_worker_stays_lost_when_it_says_goodbye(db):
    hand = hire(db)
    hand.go_silent()
    declare_lost(db)
    db.write(lambda conn: nodes.deregister(conn, hand.worker))
    assert [worker.status for worker in rows(db, schema.workers)] == ["lost"]
    assert [e.event_type for e in rows(db, schema.audit) if e.worker_id == hand.worker_id][-1] == "worker.lost"


def test_a_worker_may_start_while_another_inserts_the_same_node_and_gpu(maria_db):
    """It finds neither, wants to insert both, and meets those of its neighbour when that one commits."""

    def waits_for_a_lock():
        waiting = text("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        return maria_db.read(lambda conn: int(conn.execute(waiting).one()[1]))

    node = {"node_id": "node-1", "hostname": "node-1", "gpu_backend": "sim"}
    with maria_db.engine.begin() as neighbour:
        neighbour.execute(insert(schema.nodes), node)
        worker = Worker("w", "node-1", "default", "node-1", 1, 4, ("echo",))
        starting = Thread(
            target=lambda: maria_db.write(lambda conn: nodes.register(conn, worker, nodes.Host("sim"))), name="starting"
        )
        starting.start()
        wait_until(waits_for_a_lock, what="register meets the row of its neighbour")
    starting.join(60)
    assert [w.worker_id for w in rows(maria_db, schema.workers)] == ["w"]
    with maria_db.engine.begin() as neighbour:
        gpus.record(neighbour, "node-1", [gpu()], Gate(90))
        beating = Thread(target=Hand(maria_db, worker, [gpu()]).beat, name="beating")
        beating.start()
        wait_until(waits_for_a_lock, what="the heartbeat meets the row of its neighbour")
    beating.join(60)
    assert len(rows(maria_db, schema.gpus)) == 1


def test_many_workers_of_one_new_node_start_at_once(db):
    barrier = Barrier(8)

    def start(_n):
        barrier.wait(30)
        return hire(db, gpu(0), gpu(1)).worker_id

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(start, range(8)))
    assert len(rows(db, schema.nodes)) == 1
    assert sorted(g.gpu_uuid for g in rows(db, schema.gpus)) == ["GPU-0", "GPU-1"]
    assert sorted(worker.worker_id for worker in rows(db, schema.workers)) == sorted(ids)


def test_only_an_active_worker_counts_as_slots(db):
    hire(db, slots=3)
    hire(db, slots=5).beat(draining=True)
    hire(db, slots=7).go_silent()
    declare_lost(db)
    hire(db, slots=11, pool="other")
    assert db.read(lambda conn: outbox.live_slots(conn, "default")) == 3


def test_progress_of_a_job_that_is_not_ours_is_not_written(db):
    owner, other = hire(db), hire(db)
    (claim,) = owner.claim(*submit(db))
    other.beat(progress=((claim.job_id, claim.attempt, 0.9, "mine?"),))
    assert row(db, claim.job_id).progress is None


def test_workers_are_shown_for_an_hour_after_their_end(db):
    worker = {"node_id": "n", "pool_id": "p", "hostname": "h", "pid": 1, "slots": 1, "types": "[]", "batch_sizes": "{}"}

    def fill(conn):
        for status in schema.WORKER_STATES:
            for age_s in (60.0, 7200.0):
                row = worker | {"worker_id": f"{status}-{age_s:g}", "status": status}
                conn.execute(insert(schema.workers).values(**row, last_heartbeat=utc_shift(-age_s)))

    db.write(fill)
    shown, _ = db.read(worker_reads.page)
    lately = {f"{status}-60" for status in schema.WORKER_STATES}
    assert {one["worker_id"] for one in shown} == lately | {f"{status}-7200" for status in schema.LIVE_WORKERS}
    assert db.read(worker_reads.batch_sizes).keys() == lately
