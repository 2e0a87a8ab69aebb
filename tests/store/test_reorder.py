"""A priority that changes while a job waits."""

import pytest

from orchestrator.errors import JobNotFound, JobNotWaiting
from orchestrator.store import audit, outbox, reorder
from tests.factories import hire, history, row, submit, write_as


def set_priority(db, job_id, priority):
    return write_as("somebody", db, lambda conn: reorder.set_priority(conn, job_id, priority))


def take(db, limit=10):
    return [job.job_id for job in db.write(lambda conn: outbox.take(conn, "default", limit))]


def test_a_waiting_job_moves_and_comes_back_to_its_place(db):
    first, second, third = submit(db, 3)
    rank = row(db, third).rank
    assert set_priority(db, third, 50) == ("default", 0, 50)
    assert set_priority(db, first, -50) == ("default", 0, -50)
    assert row(db, third).priority == 50
    assert set_priority(db, third, 0).before == 50
    assert row(db, third).rank == rank
    set_priority(db, third, 50)
    assert take(db) == [third, second, first]


def test_it_is_audited_once_for_each_change(db):
    (job_id,) = submit(db)
    set_priority(db, job_id, 7)
    set_priority(db, job_id, 7)
    assert history(db, job_id) == ["job.submitted", "job.priority"]
    changed = db.read(lambda conn: audit.of_job(conn, job_id))[-1]
    assert (changed["actor"], changed["details"]) == ("somebody", {"before": 0, "after": 7})


def test_who_no_longer_waits_is_left_as_it_is(db):
    hand = hire(db)
    (job_id,) = submit(db)
    (claim,) = hand.claim(job_id)
    with pytest.raises(JobNotWaiting, match="claimed"):
        set_priority(db, job_id, 50)
    hand.finish(claim)
    with pytest.raises(JobNotWaiting, match="done"):
        set_priority(db, job_id, 50)
    assert row(db, job_id).priority == 0
    with pytest.raises(JobNotFound):
        set_priority(db, "nobody", 1)
