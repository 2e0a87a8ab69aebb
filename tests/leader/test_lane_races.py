"""Forgetting a lane at the very moment at which somebody uses it again: no job is lost, none loses its place."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from orchestrator.jobs import Queued
from orchestrator.policies import Book
from orchestrator.store import lanes, schema
from orchestrator.store import submit as submitting
from tests.factories import POLICY, holding, new_job, row, submit
from tests.leader.test_lanes import clock, entries, forget, keys, known, use
from tests.waiting import wait_until


@pytest.fixture
def servers():
    """In the other database one transaction writes at a time."""
    return ["mariadb", "redis"]


class Meanwhile:
    """Policies, which a submit reads between its lane's clock and the rest: the moment at which to come between."""

    def __init__(self, work):
        self._work = work

    def __call__(self, _conn):
        work, self._work = self._work, lambda: None
        work()
        return Book()


def test_a_lane_forgotten_beneath_a_submit_comes_back_with_its_job_before_those_that_follow(
    db, hub, raw, context, publisher
):
    """The submit has read the clock of a lane whose row is gone when it commits."""
    use(db, context, count=20)
    publisher.publish("mine")
    job, book = new_job(pool_id="mine"), Meanwhile(lambda: forget(context))
    submitting.submit_jobs(db, [job], POLICY, book=book)
    assert known(db) == [], "it was forgotten in between"
    later = submit(db, 2, pool_id="mine", agent="another")
    publisher.publish("mine")
    assert known(db) == ["mine"]
    assert entries(raw, "mine") == [job.job_id, *later]


def test_the_announcement_alone_brings_a_lane_back(db, raw, context, publisher):
    use(db, context)
    job, book = new_job(pool_id="mine"), Meanwhile(lambda: forget(context))
    submitting.submit_jobs(db, [job], POLICY, book=book)
    assert known(db) == []
    publisher.publish("mine")
    assert known(db) == ["mine"]
    assert clock(db, "mine") >= row(db, job.job_id).rank
    assert entries(raw, "mine") == [job.job_id]


def test_a_lane_in_which_somebody_announces_is_left_alone(db, raw, context):
    use(db, context)
    with holding(db, schema.lanes, schema.lanes.c.lane == "mine"):
        forget(context)
        assert (known(db), len(keys(raw, "mine"))) == (["mine"], 2)
    forget(context)
    assert known(db) == []


def test_an_entry_is_not_added_between_the_look_at_a_lane_and_its_deletion(db, hub, raw, context, publisher):
    """Its publisher waits for the row of the lane, and adds the entry to the stream that comes after."""
    use(db, context)

    def announce():
        (job_id,) = submit(db, pool_id="mine", agent="another")
        publisher.publish("mine")
        return job_id

    waiting = text("SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'UPDATE lanes%'")
    with ThreadPoolExecutor(1) as other, db.engine.begin() as conn:
        assert lanes.lock_unused(conn, ["mine"]) == ["mine"]
        announced = other.submit(announce)
        wait_until(lambda: announced.done() or db.read(lambda look: look.execute(waiting).scalar()), what="it waits")
        hub.lane("mine").drop(context.term.epoch)
        lanes.forget(conn, ["mine"])
        conn.commit()
        job_id = announced.result(30)
    assert entries(raw, "mine") == [job_id]
    assert known(db) == ["mine"]


def test_a_lane_is_not_forgotten_while_a_submit_there_commits(db, context):
    """Its agent's account is held: who forgets waits for it, and then sees the job."""
    use(db, context)
    job = new_job(pool_id="mine")
    rules = submitting.Rules(POLICY)
    waiting = text("SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'SELECT lane_accounts%UPDATE'")
    with ThreadPoolExecutor(1) as other, db.engine.begin() as conn:
        submitting.submit_within(conn, db, [job], rules)
        forgetting = other.submit(forget, context)
        wait_until(lambda: forgetting.done() or db.read(lambda look: look.execute(waiting).scalar()), what="it waits")
        conn.commit()
        forgetting.result(30)
    assert known(db) == ["mine"]
    assert row(db, job.job_id).queued == Queued.READY
