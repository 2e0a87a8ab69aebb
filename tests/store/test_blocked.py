"""Jobs that wait for something other than a slot."""

import pytest

from orchestrator.store import blocked, outbox, withdraw
from orchestrator.store.claim import NotClaimed
from tests.factories import hire, row, set_job, status, submit
from tests.fetchers import enlist


def park(db, ids, on="gate:x", reason="closed"):
    return db.write(lambda conn: blocked.park(conn, ids, on, reason))


def release(db, on="gate:x", most=100):
    def work(conn):
        ids = [job.job_id for job in blocked.first(conn, on, most)]
        blocked.let_go(conn, ids)
        return ids

    return db.write(work)


def take(db):
    return [job.job_id for job in db.write(lambda conn: outbox.take(conn, "default", 100))]


def test_what_is_parked_says_why_and_nobody_offers_it(db):
    (job_id,) = submit(db)
    assert park(db, [job_id], reason="r" * 300) == 1
    parked = row(db, job_id)
    assert (parked.queued, parked.blocked_on, parked.wait_reason) == ("blocked", "gate:x", "r" * 255)
    assert take(db) == []
    assert enlist(db).fetch() == []
    assert hire(db).offer(job_id) == {job_id: NotClaimed("already pending")}


def test_an_announced_job_is_parked_and_its_entry_leads_nowhere(db):
    (job_id,) = submit(db)
    take(db)
    assert park(db, [job_id]) == 1
    assert row(db, job_id).published_at is None
    assert db.write(lambda conn: outbox.unpublish(conn, [job_id])) == 0


def test_only_what_waits_in_its_lane_is_parked(db):
    delayed, running, ended = submit(db, 3)
    set_job(db, delayed, queued="delayed")
    hand = hire(db)
    hand.claim(running)
    hand.finish(*hand.claim(ended))
    assert park(db, [delayed, running, ended]) == 0
    assert park(db, []) == 0


def test_the_first_in_order_of_rank_are_let_go(db):
    ids = submit(db, 5)
    set_job(db, ids[4], rank=1)
    park(db, ids[:2] + ids[3:])
    park(db, [ids[2]], on="gate:y")
    assert release(db, most=0) == []
    assert release(db, most=2) == [ids[4], ids[0]]
    freed = row(db, ids[0])
    assert (freed.queued, freed.blocked_on, freed.wait_reason) == ("ready", None, None)
    assert release(db) == [ids[1], ids[3]]
    assert release(db) == []
    assert take(db) == [ids[4], ids[0], ids[1], ids[3]]


def test_whoever_holds_a_job_does_not_hold_up_the_others(maria_db):
    ids = submit(maria_db, 2)
    park(maria_db, ids)
    with maria_db.engine.begin() as other:
        withdraw.cancel(other, ids[0])
        assert release(maria_db) == [ids[1]]


@pytest.mark.parametrize("end", ["cancel", "expire"])
def test_a_blocked_job_that_is_withdrawn_waits_for_nothing(db, end):
    (job_id,) = submit(db, deadline_at="2999-01-01T00:00:00Z")
    park(db, [job_id])
    if end == "cancel":
        db.write(lambda conn: withdraw.cancel(conn, job_id))
    else:
        set_job(db, job_id, expires_at=row(db, job_id).created_at)
        assert db.write(lambda conn: withdraw.expire_overdue(conn, 10)) == 1
    assert status(db, job_id) in {"cancelled", "failed"}
    assert row(db, job_id).blocked_on is None
    assert release(db) == []


def test_what_is_waited_for_is_found_by_name_and_by_kind(db):
    for number, name in enumerate(["cap:a", "cap:b", "gate:a", "cap:b", "aa", "cap"]):
        park(db, submit(db, priority=number), on=name)

    def look(**how):
        return db.read(lambda conn: blocked.waited_for(conn, **how))

    assert look() == ["aa", "cap", "cap:a", "cap:b", "gate:a"]
    assert look(kind="cap:") == ["cap:a", "cap:b"]
    assert look(kind="cap:", after="cap:a") == ["cap:b"]
    assert look(kind="gate:", limit=1) == ["gate:a"]
    assert look(kind="nothing:") == []
