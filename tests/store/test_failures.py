"""Everything that failed is started over together: failed jobs and dead letters, within what is allowed."""

from datetime import timedelta
from functools import reduce

import pytest
from sqlalchemy import insert, select, update

from orchestrator.api.bulk import Chosen
from orchestrator.jobs import Status
from orchestrator.store import audit, backlog, dead_letters, failures, schema
from orchestrator.store.backlog import Left
from orchestrator.store.failures import Filter
from tests.factories import many_jobs, now, write_as


def ended(db, prefix: str, status: str, count: int = 1, **columns) -> list[str]:
    base = {"job_id": lambda i: f"{prefix}-{i}", "status": status, "queued": None, "attempt": 2, "attempts": 2}
    many_jobs(db, count, **(base | columns))
    ids = [f"{prefix}-{i}" for i in range(count)]
    if status == "dead_letter":
        letters = [{"job_id": job_id, "reason": "transient", "attempts": 2} for job_id in ids]
        db.write(lambda conn: conn.execute(insert(schema.dead_letters), letters))
    return ids


def choose(db, wanted=None, limit=100, redrive_max=3) -> Chosen:
    found = []
    for status in (wanted or Filter()).statuses:
        chosen = Chosen(limit, redrive_max)
        chosen.add(db.read(lambda conn, status=status: failures.look(conn, wanted or Filter(), status, None))[0])
        found.append(chosen)
    return reduce(Chosen.join, found)


def start_over(db, wanted=None, limit=100, redrive_max=3, delay=lambda _n: 0.0):
    ids = choose(db, wanted, limit, redrive_max).ids
    return write_as("ann", db, lambda conn: failures.redrive(conn, ids, redrive_max, delay))


def statuses(db) -> dict[str, str]:
    rows = db.read(lambda conn: conn.execute(select(schema.jobs.c.job_id, schema.jobs.c.status)).all())
    return {row.job_id: row.status for row in rows}


def test_failed_jobs_and_dead_letters_start_over_and_nothing_else_does(db):
    ended(db, "failed", "failed", 2)
    ended(db, "dead", "dead_letter", 2)
    ended(db, "done", "done")
    ended(db, "cancelled", "cancelled")
    removed = start_over(db)
    assert sorted(removed.job_ids) == ["dead-0", "dead-1", "failed-0", "failed-1"]
    assert statuses(db) == {
        **dict.fromkeys(removed.job_ids, "pending"),
        "done-0": "done",
        "cancelled-0": "cancelled",
    }
    assert db.read(dead_letters.depth) == 0
    (event,) = db.read(lambda conn: audit.of_job(conn, "failed-0"))
    assert (event["event_type"], event["actor"], event["details"]) == ("job.redriven", "ann", {"redrives": 1})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Filter(), ["a-0", "b-0", "c-0"]),
        (Filter(type="other"), ["a-0"]),
        (Filter(agent="ann"), ["b-0"]),
        (Filter(pool_id="gold"), ["c-0"]),
        (Filter(error_kind="timeout"), ["b-0"]),
        (Filter(statuses=(Status.DEAD_LETTER,)), ["c-0"]),
        (Filter(type="other", agent="ann"), []),
    ],
)
def test_filters(db, wanted, found):
    ended(db, "a", "failed", type="other")
    ended(db, "b", "failed", agent="ann", error_kind="timeout")
    ended(db, "c", "dead_letter", lane="gold")
    chosen = choose(db, wanted)
    assert (sorted(chosen.ids), chosen.matched) == (found, len(found))


def test_who_was_started_over_often_enough_stays(db):
    ended(db, "tired", "failed", redrives=3)
    ended(db, "fresh", "failed", redrives=2)
    assert choose(db).told() == {"matched": 2, "exhausted": 1}
    assert start_over(db).job_ids == ["fresh-0"]
    # Also when it is named, by somebody who looked before the last of its restarts.
    assert db.write(lambda conn: failures.redrive(conn, ["tired-0"], 3, lambda _n: 0.0)).job_ids == []


def test_a_job_that_was_started_over_meanwhile_is_left_alone(db):
    ids = ended(db, "failed", "failed", 2)
    db.write(
        lambda conn: conn.execute(
            update(schema.jobs).where(schema.jobs.c.job_id == ids[0]).values(status="running", queued=None)
        )
    )
    assert db.write(lambda conn: failures.redrive(conn, ids, 3, lambda _n: 0.0)).job_ids == ["failed-1"]
    assert statuses(db)["failed-0"] == "running"


def test_the_oldest_of_both_kinds_are_chosen(db):
    moment = now(db)
    ended(db, "failed", "failed", 5, created_at=lambda i: moment + timedelta(seconds=2 * i))
    ended(db, "dead", "dead_letter", 5, created_at=lambda i: moment + timedelta(seconds=2 * i + 1))
    chosen = choose(db, limit=4)
    assert (chosen.ids, chosen.matched) == (["failed-0", "dead-0", "failed-1", "dead-1"], 10)


def test_what_is_left_of_a_lane(db):
    ended(db, "ready", "pending", 3, queued="ready")
    ended(db, "announced", "pending", 2, queued="announced")
    ended(db, "blocked", "pending", 1, queued="blocked", blocked_on="capacity")
    ended(db, "later", "pending", 4, queued="delayed")
    ended(db, "mine", "running", 2)
    ended(db, "elsewhere", "pending", 9, queued="ready", lane="gold")
    ended(db, "over", "done", 9)
    assert db.read(lambda conn: backlog.left(conn, "default")) == Left(5, 1, 4, 2)
    assert db.read(lambda conn: backlog.left(conn, "default", most=2)).total == 7
    assert db.read(lambda conn: backlog.left(conn, "nowhere")).total == 0


def test_tasks_of_a_workflow_are_neither_counted_nor_in_the_way(db):
    """They start over with their workflow; the oldest of all, they would fill every choice."""
    ended(db, "task", "failed", 3, workflow_id="w")
    ended(db, "failed", "failed", 1)
    assert choose(db).matched == 1
    assert start_over(db, limit=1).job_ids == ["failed-0"]
    # Also when they are named.
    assert db.write(lambda conn: failures.redrive(conn, ["task-0"], 3, lambda _n: 0.0)).job_ids == []
