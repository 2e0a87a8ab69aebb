"""Deadlines: jobs whose latest start is near are announced first, and only while they may be announced."""

from datetime import UTC, timedelta

import pytest

from orchestrator.jobs import ErrorKind
from orchestrator.store import blocked, outbox, schema
from orchestrator.store.outbox import Urgent
from tests.factories import hire, now, row, rows, submit, traffic


def dated(db, seconds, count=1, **fields):
    deadline = now(db).replace(tzinfo=UTC) + timedelta(seconds=seconds)
    return submit(db, count, deadline_at=deadline.isoformat(), **fields)


def take(db, limit, urgent=None):
    return [job.job_id for job in db.write(lambda conn: outbox.take(conn, "default", limit, urgent))]


def clock(db):
    (lane,) = rows(db, schema.lanes)
    return lane.virtual_time


def latest_start(db, job_id):
    job = row(db, job_id)
    return job.start_by and (job.deadline_at - job.start_by).total_seconds()


def test_the_nearest_latest_starts_go_first_as_many_as_may_and_do_not_move_the_clock(db):
    usual = submit(db, 5)
    (calm,) = dated(db, 3600)
    (long,) = dated(db, 600, expected_duration_sec=550)
    (near,) = dated(db, 80)
    assert take(db, 2, Urgent(2, 100.0)) == [long, near]
    assert clock(db) == 0
    (next_near,) = dated(db, 90)
    assert take(db, 3, Urgent(1, 100.0)) == [next_near, *usual[:2]]
    assert take(db, 10) == [*usual[2:], calm]


def test_an_urgent_job_is_taken_once_also_when_its_rank_is_first(db):
    (near,) = dated(db, 50)
    (other,) = submit(db)
    assert take(db, 2, Urgent(1, 100.0)) == [near, other]


def test_other_lanes_have_deadlines_of_their_own(db):
    (mine,), _theirs = submit(db), dated(db, 50, pool_id="other")
    assert take(db, 5, Urgent(3, 100.0)) == [mine]


def test_the_latest_start_is_known_while_a_job_is_ready_or_announced(db):
    hand = hire(db)
    (job_id,) = dated(db, 600, expected_duration_sec=30)
    assert latest_start(db, job_id) == pytest.approx(30)
    take(db, 1)
    assert latest_start(db, job_id) == pytest.approx(30)
    (claim,) = hand.claim(job_id)
    assert row(db, job_id).start_by is None
    hand.hand_back(claim)
    assert latest_start(db, job_id) == pytest.approx(30, abs=0.01)
    (claim,) = hand.claim(job_id)
    hand.fail(claim, ErrorKind.TRANSIENT, retry_after_s=3600)
    assert (row(db, job_id).queued, row(db, job_id).start_by) == ("delayed", None)


def test_it_comes_back_when_a_delayed_or_blocked_job_may_be_announced(db):
    hand = hire(db)
    (job_id,) = dated(db, 600, expected_duration_sec=30)
    (claim,) = hand.claim(job_id)
    hand.fail(claim, ErrorKind.TRANSIENT, retry_after_s=0.0005)
    db.write(lambda conn: conn.execute(schema.jobs.update().values(queued="delayed", not_before=now(db))))
    assert db.write(lambda conn: outbox.promote_due(conn, 10)) == 1
    assert latest_start(db, job_id) == pytest.approx(30, abs=0.01)
    db.write(lambda conn: blocked.park(conn, [job_id], "x", "why"))
    assert row(db, job_id).start_by is None
    db.write(lambda conn: blocked.let_go(conn, [job_id]))
    assert latest_start(db, job_id) == pytest.approx(30, abs=0.01)


def test_a_job_without_a_deadline_has_no_latest_start(db):
    hand = hire(db)
    (job_id,) = submit(db, expected_duration_sec=30)
    hand.hand_back(*hand.claim(job_id))
    assert row(db, job_id).start_by is None


def test_a_deadline_before_the_calendar_is_no_error(db):
    (job_id,) = submit(db, deadline_at="1500-01-01T00:00:00Z", expected_duration_sec=31_536_000)
    assert row(db, job_id).start_by.year == 1499


def test_a_take_that_looks_for_urgent_jobs_costs_one_statement_more(db):
    submit(db, 20)
    with traffic(db) as seen:
        take(db, 10, Urgent(5, 10.0))
    assert len([s for s in seen.statements if not s.startswith("BEGIN")]) <= 4, seen.statements
