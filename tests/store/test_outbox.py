"""The outbox: what is ready goes to the stream in order of rank, once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from orchestrator.jobs import Queued
from orchestrator.store import backlog, lanes, outbox, schema
from orchestrator.store.dialect import utc_shift
from tests.factories import hire, many_jobs, now, row, rows, set_job, submit


def take(db, limit=100, lane="default"):
    return [job.job_id for job in db.write(lambda conn: outbox.take(conn, lane, limit))]


def promote(db, limit=100):
    return db.write(lambda conn: outbox.promote_due(conn, limit))


def announced(db, older_than_s=0.0, limit=100):
    return db.read(lambda conn: outbox.announced(conn, "default", older_than_s, limit))


def unpublish(db, ids, older_than_s=0.0):
    return db.write(lambda conn: outbox.unpublish(conn, ids, older_than_s))


def test_jobs_are_taken_in_order_of_rank_each_once(db):
    low, high = submit(db, 2, priority="LOW"), submit(db, 2, priority="HIGH")
    normal = submit(db, 2)
    assert take(db, 3) == [*high, normal[0]]
    assert take(db, 3) == [normal[1], *low]
    assert take(db) == []
    assert all(job.published_at is not None for job in rows(db, schema.jobs))


def test_a_lane_gives_only_its_own(db):
    (mine,), _other = submit(db, pool_id="mine"), submit(db, pool_id="other")
    assert take(db, lane="mine") == [mine]
    assert db.read(lambda conn: lanes.some(conn, "", Queued.READY)) == (["other"], "")


def test_an_entry_says_what_is_needed_and_no_more(db):
    (job_id,) = submit(db, payload={"secret": "s3cr3t"})
    (ready,) = db.write(lambda conn: outbox.take(conn, "default", 1))
    assert (ready.job_id, ready.type, ready.trace_context) == (job_id, "echo", None)


def test_owned_ended_and_delayed_jobs_are_not_taken(db):
    hand = hire(db)
    owned, ended, delayed, ready = submit(db, 4)
    hand.claim(owned)
    hand.finish(*hand.claim(ended))
    set_job(db, delayed, queued="delayed", not_before=utc_shift(60.0))
    assert take(db) == [ready]


def test_two_takers_never_share_a_job(db, db_url, open_database):
    many_jobs(db, 600)
    sources, barrier = [db, open_database(db_url)], Barrier(8)

    def taker(n):
        mine = []
        barrier.wait(30)
        while ids := take(sources[n % 2], 20):
            mine += ids
        return mine

    with ThreadPoolExecutor(8) as pool:
        taken = [job_id for mine in pool.map(taker, range(8)) for job_id in mine]
    # A taker that meets only locked rows stops early; what it left is there for the next one.
    taken += take(db, 600)
    assert len(taken) == len(set(taken)) == 600


def test_a_claimed_job_that_comes_back_is_ready_again(db):
    hand = hire(db)
    (job_id,) = submit(db)
    assert take(db) == [job_id]
    hand.hand_back(*hand.claim(job_id))
    assert take(db) == [job_id]


def test_delayed_jobs_become_ready_when_due_and_keep_their_rank(db):
    first, due, later = submit(db, 3)
    set_job(db, due, queued="delayed", not_before=utc_shift(-1.0))
    set_job(db, later, queued="delayed", not_before=utc_shift(60.0))
    assert take(db) == [first]
    assert [promote(db), promote(db)] == [1, 0]
    assert take(db) == [due]
    assert (row(db, later).queued, row(db, due).not_before) == ("delayed", None)


def test_promotion_is_bounded_and_earliest_first(db):
    ids = submit(db, 3)
    for n, job_id in enumerate(ids):
        set_job(db, job_id, queued="delayed", not_before=utc_shift(-10.0 - n))
    assert promote(db, 1) == 1
    assert take(db) == [ids[2]]
    assert promote(db, 10) == 2


def test_announced_shows_what_was_published_a_while_ago_and_nobody_claimed(db):
    hand = hire(db)
    waiting, claimed, fresh, _ready = submit(db, 4)
    set_job(db, waiting, queued="announced", published_at=utc_shift(-100.0))
    set_job(db, claimed, queued="announced", published_at=utc_shift(-100.0))
    set_job(db, fresh, queued="announced", published_at=utc_shift(-1.0))
    hand.claim(claimed)
    assert announced(db, 50.0) == [waiting]
    assert announced(db, 0.5) == [waiting, fresh]
    assert announced(db, 600.0) == []


def test_unpublish_leaves_alone_what_was_claimed_or_announced_anew(db):
    hand = hire(db)
    old, claimed, anew, ready = submit(db, 4)
    for job_id in (old, claimed):
        set_job(db, job_id, queued="announced", published_at=utc_shift(-100.0))
    set_job(db, anew, queued="announced", published_at=utc_shift(-1.0))
    hand.claim(claimed)
    before = [row(db, job_id) for job_id in (claimed, anew, ready)]
    assert unpublish(db, [old, claimed, anew, ready, "nobody"], 50.0) == 1
    assert [row(db, job_id) for job_id in (claimed, anew, ready)] == before
    assert (row(db, old).queued, row(db, old).published_at) == ("ready", None)
    assert unpublish(db, []) == 0


def test_depth_counts_what_waits_and_what_runs(db):
    """INV-24: announced jobs still wait, delayed ones do not yet, running ones are work."""
    hand = hire(db)
    ids = submit(db, 5)
    submit(db, 2, pool_id="other")
    take(db, 2)
    hand.claim(ids[0])
    set_job(db, ids[4], queued="delayed", not_before=utc_shift(60.0))
    lanes = db.read(lambda conn: backlog.depths(conn, ["default", "other", "nobody"]))
    assert {lane: (depth.due, depth.owned, depth.delayed) for lane, depth in lanes.items()} == {
        "default": (3, 1, 1),
        "other": (2, 0, 0),
        "nobody": (0, 0, 0),
    }


def test_depth_counts_what_a_claim_put_off(db):
    """INV-24: it is due, and waits for memory or for a worker that has its handler."""
    submit(db)
    put_off, later = submit(db, 2, pool_id="gold")
    hire(db, pool="gold").offer(put_off, memory_mb=None)
    set_job(db, put_off, created_at=utc_shift(-40.0))
    set_job(db, later, queued="delayed", not_before=utc_shift(3600.0))
    depths = db.read(lambda conn: backlog.depths(conn, ["default", "gold"]))
    assert {lane: (depth.work, depth.deferred, depth.delayed) for lane, depth in depths.items()} == {
        "default": (1, 0, 0),
        "gold": (1, 1, 1),
    }
    assert depths["gold"].oldest_deferred_s >= 40 and depths["default"].oldest_deferred_s == 0


def test_depth_is_not_said_to_be_nothing_where_too_much_comes_soon_to_see_it(db):
    (put_off,) = submit(db, pool_id="gold")
    hire(db, pool="gold").offer(put_off, memory_mb=None)
    many_jobs(db, 10, lane="flood", queued="delayed", not_before=now(db))
    names = ["gold", "flood"]
    some, all_of = (db.read(lambda conn, look=look: backlog.depths(conn, names, look)) for look in (10, 11))
    for found in (some, all_of):
        assert {lane: (depth.work, depth.delayed) for lane, depth in found.items()} == {
            "gold": (1, 0),
            "flood": (10, 0),
        }


def test_what_a_claim_put_off_may_be_let_go_early_and_meets_its_gates(db):
    hand = hire(db)
    plain, quiet, retried = submit(db)[0], submit(db)[0], submit(db)[0]
    hand.fail(*hand.claim(retried), retry_after_s=60.0)
    hand.offer(plain, quiet, memory_mb=None)
    set_job(db, quiet, constraints="{}")
    db.write(lambda conn: outbox.promote_early(conn, [plain, quiet, retried]))
    assert [row(db, job_id).queued for job_id in (plain, quiet, retried)] == ["ready", "blocked", "delayed"]
    assert row(db, plain).not_before is None
