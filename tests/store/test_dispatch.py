"""Claims and reports of HTTP workers: what they cost others, and what survives a lost commit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import event

from orchestrator.errors import WorkerExists, WorkerLost, WorkerNotFound
from orchestrator.pools import PoolSpec
from orchestrator.store import crews, dispatch, pools, registry, schema
from orchestrator.store.claim import claim_jobs
from orchestrator.store.dispatch import Claiming, Fetch
from orchestrator.store.nodes import NO_NODE, Worker
from orchestrator.store.registry import Told
from tests.factories import POLICY, gpu, hire, history, is_sqlite, many_jobs, now, row, rows, set_job, status, submit
from tests.fetchers import claimant, enlist
from tests.waiting import wait_until


def test_a_look_merges_what_is_announced_and_what_is_not_by_rank(db):
    many_jobs(db, 10, rank=lambda i: 10 - i, queued=lambda i: "announced" if i % 3 else "ready")
    assert [job.rank for job in db.read(lambda conn: dispatch.look(conn, "default", 10))] == list(range(1, 11))


def test_what_is_overdue_is_not_offered(db):
    late, fine = submit(db, 2)
    set_job(db, late, expires_at=now(db) - timedelta(seconds=1))
    assert [job.job_id for job in db.read(lambda conn: dispatch.dispatchable(conn, "default", None, 10))] == [fine]


def test_a_claim_whose_commit_is_unknown_is_found_again_and_leaves_no_stray(db):
    """The connection broke during COMMIT: the work is run again, as `Database.write` does."""
    remote, ids = enlist(db), submit(db, 6)
    work = Claiming([Fetch(remote.worker_id, 2)], claimant)
    db.write(work)
    (again,) = db.write(work)
    assert [(claim.job_id, claim.attempt) for claim in again] == [(ids[0], 2), (ids[1], 2)]
    assert [status(db, job_id) for job_id in ids] == ["claimed"] * 2 + ["pending"] * 4
    assert row(db, ids[0]).attempts == 1


def test_one_worker_that_died_does_not_keep_the_others_from_their_jobs(db):
    dead, gone, alive = enlist(db), enlist(db), enlist(db)
    submit(db, 5)
    db.write(
        lambda conn: conn.execute(
            schema.workers.update().where(schema.workers.c.worker_id == dead.worker_id).values(status="lost")
        )
    )
    db.write(lambda conn: registry.deregister(conn, gone.worker_id, POLICY))
    names = [dead.worker_id, "nobody", alive.worker_id, gone.worker_id]
    answers = db.write(Claiming([Fetch(name, 2) for name in names], claimant))
    assert [type(answer) for answer in answers] == [WorkerLost, WorkerNotFound, list, WorkerLost]
    assert len(answers[2]) == 2


def test_those_who_wait_are_told_once_a_job_and_the_dead_at_once(db):
    one, two, blind = enlist(db), enlist(db), enlist(db, types=("other",))
    waiting = [one.worker_id, two.worker_id, blind.worker_id, "nobody"]

    def woken():
        return db.read(lambda conn: dispatch.openings(conn, waiting)) - {"nobody"}

    assert woken() == set()
    submit(db, 1)
    assert len(woken()) == 1
    submit(db, 5)
    assert woken() == {one.worker_id, two.worker_id}
    submit(db, 1, type="other", min_memory_mb=10)
    assert blind.worker_id not in woken()  # it has no GPU
    assert "nobody" in db.read(lambda conn: dispatch.openings(conn, waiting))


def woken(db, *remotes):
    return db.read(lambda conn: dispatch.openings(conn, [remote.worker_id for remote in remotes]))


def test_a_job_whose_reader_has_no_handler_is_offered_to_who_reads_nothing(db):
    """Readers are quicker whenever it is ready: between two of them it waits for its next turn, and may be had."""
    remote, blind, (job_id,) = enlist(db), enlist(db, types=("other",)), submit(db)
    hire(db, type="other").offer(job_id, memory_mb=None)
    assert row(db, job_id).queued == "delayed"
    assert woken(db, remote, blind) == {remote.worker_id}
    assert blind.fetch() == []
    assert [claim.job_id for claim in remote.fetch(2)] == [job_id]
    job = row(db, job_id)
    assert (job.status, job.queued, job.not_before, job.attempts) == ("claimed", None, None, 1)


def test_it_is_found_again_when_the_commit_of_its_claim_is_unknown(db):
    remote, (job_id,) = enlist(db), submit(db)
    hire(db, type="other").offer(job_id, memory_mb=None)
    work = Claiming([Fetch(remote.worker_id, 2)], claimant)
    with pytest.raises(ZeroDivisionError):
        db.write(lambda conn: work(conn) and 1 // 0)  # rolled back, after the work was done
    assert row(db, job_id).queued == "delayed"
    (again,) = db.write(work)
    assert [claim.job_id for claim in again] == [job_id]


def test_what_waits_for_a_time_for_memory_or_elsewhere_is_not_offered_early(db):
    hand = hire(db, gpu(total_mb=10_000, foreign_mb=9000))
    retried, large = submit(db)[0], submit(db, min_memory_mb=5000)[0]
    (other,) = submit(db, pool_id="other")
    hand.fail(*hand.claim(retried), retry_after_s=1.0)
    hand.offer(large)
    hire(db, pool="other").offer(other, memory_mb=None)
    remote = enlist(db, node="node-1")
    assert woken(db, remote) == set()
    assert remote.fetch(4) == []
    assert [row(db, job_id).queued for job_id in (retried, large, other)] == ["delayed"] * 3


def test_a_worker_gets_no_more_jobs_than_it_has_slots_beside_those_it_owns(db):
    remote, other, _ = enlist(db, slots=2), enlist(db), submit(db, 6)
    assert len(other.fetch()) == 1
    (first,) = remote.fetch()
    assert woken(db, remote) == {remote.worker_id}
    answers = db.write(Claiming([Fetch(remote.worker_id, 4)] * 2, claimant))
    assert [len(answer) for answer in answers] == [1, 0]
    assert remote.fetch() == [] and woken(db, remote) == set()
    remote.finish(first)
    assert woken(db, remote) == {remote.worker_id}
    assert len(remote.fetch(4)) == 1


def close_pool(db, state="draining"):
    db.write(lambda conn: conn.execute(schema.worker_pools.update().values(status=state)))


@pytest.mark.parametrize("state", ["draining", "stopped", "evicted"])
def test_a_closed_pool_gives_no_jobs_and_says_why(db, state):
    db.write(lambda conn: pools.create(conn, PoolSpec(pool_id="gold")))
    remote, _ = enlist(db, pool="gold"), submit(db, 2, pool_id="gold")
    assert len(remote.fetch()) == 1
    close_pool(db, state)
    assert remote.fetch() == []
    assert db.read(lambda conn: dispatch.why_none(conn, remote.worker_id)) == f"pool gold is {state}"
    # Woken for what it does not get, it would ask again and again.
    assert db.read(lambda conn: dispatch.openings(conn, [remote.worker_id])) == set()
    close_pool(db, "running")
    assert len(remote.fetch()) == 1


def test_a_drained_node_gives_no_jobs_and_says_why(db):
    hire(db)
    remote, elsewhere = enlist(db, node="node-1"), enlist(db)
    submit(db, 3)
    assert len(remote.fetch()) == 1
    db.write(lambda conn: crews.drain_nodes(conn, ["node-1"], 60.0))
    assert remote.fetch() == []
    both = [remote.worker_id, elsewhere.worker_id]
    assert [db.read(lambda conn, w=w: dispatch.why_none(conn, w)) for w in both] == ["node node-1 is drained", None]
    assert db.read(lambda conn: dispatch.openings(conn, both)) == {elsewhere.worker_id}
    assert len(elsewhere.fetch()) == 1
    db.write(lambda conn: crews.resume_nodes(conn, ["node-1"]))
    assert len(remote.fetch()) == 1
    assert db.read(lambda conn: dispatch.why_none(conn, "nobody")) is None


def test_a_row_in_somebody_elses_hands_is_passed_over(maria_db, beside):
    """A neighbour that claims, cancels or ends a job holds its row: nobody waits for that."""
    remote, hand, ids = enlist(maria_db), hire(maria_db), submit(maria_db, 3)
    claims = beside(lambda conn: claim_jobs(conn, hand.by, ids[:2], lambda _type: 0), lambda: remote.fetch(3))
    assert [claim.job_id for claim in claims] == ids[2:]


def test_a_job_that_needs_no_gpu_does_not_wait_for_one(maria_db, beside):
    """Whether a worker's node has GPUs is looked up, not locked: heartbeats write those rows all the time."""
    hire(maria_db, gpu())
    remote, _ = enlist(maria_db, node="node-1"), submit(maria_db)
    used = schema.gpus.update().values(used_mb=1)
    assert len(beside(lambda conn: conn.execute(used), remote.fetch)) == 1


def test_a_heartbeat_leaves_a_worker_draining_that_somebody_drains(db):
    remote = enlist(db)
    db.write(lambda conn: conn.execute(schema.workers.update().values(status="draining")))
    assert db.write(lambda conn: registry.heartbeats(conn, [Told(remote.worker_id, busy=1)])) == [None]
    (worker,) = rows(db, schema.workers)
    assert (worker.status, worker.busy) == ("draining", 1)


def test_of_two_that_find_an_id_free_one_gets_it(maria_db):
    """The second looked before the first wrote: only the key of the table stands between them."""
    worker = Worker("mine", NO_NODE, "default", "box", 0, 1, ("echo",))
    overtaken: list[bool] = []

    def overtake(_conn, _cursor, statement, *_rest):
        if statement.startswith(("DELETE FROM workers", "INSERT INTO workers")) and not overtaken:
            overtaken.append(True)
            maria_db.write(lambda conn: registry.register(conn, worker))

    event.listen(maria_db.engine, "before_cursor_execute", overtake)
    try:
        with pytest.raises(WorkerExists):
            maria_db.write(lambda conn: registry.register(conn, worker))
    finally:
        event.remove(maria_db.engine, "before_cursor_execute", overtake)
    assert overtaken and len(rows(maria_db, schema.workers)) == 1


def test_who_leaves_while_it_claims_keeps_nothing(maria_db):
    """The claim comes first: leaving waits for it, and hands back what it brought."""
    remote, (job_id,) = enlist(maria_db), submit(maria_db)
    with maria_db.engine.connect() as claiming:
        Claiming([Fetch(remote.worker_id, 1)], claimant)(claiming)
        thread = threading.Thread(
            target=lambda: maria_db.write(lambda conn: registry.deregister(conn, remote.worker_id, POLICY)),
            name="leave",
        )
        thread.start()
        others = "FROM information_schema.processlist WHERE id <> CONNECTION_ID()"
        waits = f"SELECT COUNT(*) {others} AND info LIKE 'SELECT workers.%%FOR UPDATE'"
        wait_until(lambda: claiming.exec_driver_sql(waits).scalar(), what="leaving waits for the claim")
        claiming.commit()
        thread.join(60)
    assert (status(maria_db, job_id), history(maria_db, job_id)[-1]) == ("pending", "job.handed_back")


def test_a_claim_that_was_rolled_back_leaves_what_its_worker_got_from_another_instance_meanwhile(db):
    remote, (job_id,) = enlist(db), submit(db)
    turns = iter([RuntimeError("as a deadlock would"), None])

    def claimant_or_error(fetcher):
        if error := next(turns):
            raise error
        return claimant(fetcher)

    claiming = Claiming([Fetch(remote.worker_id, 1)], claimant_or_error)
    with pytest.raises(RuntimeError):
        db.write(claiming)
    (elsewhere,) = remote.fetch()
    assert db.write(claiming) == [[]]
    assert (status(db, job_id), history(db, job_id)) == ("claimed", ["job.submitted", "job.claimed"])
    assert elsewhere.attempt == 1


@pytest.mark.parametrize("turn", range(3))
def test_fetchers_of_two_instances_and_a_reader_share_gpus_without_overbooking(db, turn):
    hand = hire(db, gpu(0, total_mb=10_000), gpu(1, total_mb=10_000))
    remotes, ids = [enlist(db, node="node-1") for _ in range(2)], submit(db, 40, min_memory_mb=1000)
    work = [lambda r=remote: r.fetch(8) for remote in remotes] + [lambda: hand.offer(*ids[:8])]
    with ThreadPoolExecutor(len(work), thread_name_prefix=f"{turn}") as threads:
        for one in [threads.submit(one) for one in work]:
            one.result()
    claimed = [job for job in rows(db, schema.jobs) if job.status == "claimed"]
    assert sum(g.leased_mb for g in rows(db, schema.gpus)) == 1000 * len(claimed)
    assert all(g.leased_mb <= g.usable_mb for g in rows(db, schema.gpus))
    assert 8 <= len(claimed) <= 18
    assert is_sqlite(db) or len({job.lease_token for job in claimed}) == len(claimed)
