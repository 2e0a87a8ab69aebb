"""BI-21: rows that somebody edited by hand.

What the tables do not refuse (`test_constraints`) heals by itself, or is named and left out while all else goes on.
"""

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from orchestrator.leader import delivery, duties
from orchestrator.policies import Book, Scope, parse
from orchestrator.publisher import CHUNK
from orchestrator.store import outbox, policies, schema
from orchestrator.store.caps import Glance
from orchestrator.store.claim import NotClaimed
from orchestrator.store.dialect import utc_shift
from tests.factories import gpu, hire, many_jobs, now, row, rows, spoil_job, status, submit
from tests.store.test_schedules import get, outage, put
from tests.store.test_spawning import begin, flow_of, of_type


def leased_mb(db):
    return db.read(lambda conn: conn.execute(select(schema.gpus.c.leased_mb)).scalar_one())


def edit(db, statement):
    db.write(lambda conn: conn.execute(statement))


def test_a_job_whose_lease_was_forgotten_still_ends_and_the_memory_returns(db, context):
    hand = hire(db, gpu())
    (job_id,) = submit(db, min_memory_mb=1000)
    (claim,) = hand.claim(job_id)
    edit(db, update(schema.jobs).values(lease_token=None))
    hand.finish(claim)
    assert status(db, job_id) == "done"
    edit(db, update(schema.leases).values(expires_at=utc_shift(-1.0)))
    duties.purge_leases(context)
    hand.beat()
    assert leased_mb(db) == 0


def test_a_lease_whose_job_is_gone_ends_by_itself(db, context):
    hand = hire(db, gpu())
    (job_id,) = submit(db, min_memory_mb=1000)
    hand.claim(job_id)
    edit(db, delete(schema.jobs))
    edit(db, update(schema.leases).values(expires_at=utc_shift(-1.0)))
    duties.purge_leases(context)
    hand.beat()
    assert leased_mb(db) == 0


def test_a_lease_of_a_gpu_nobody_knows_ends_by_itself(db, context):
    hire(db, gpu())
    lease = {"token": "t", "agent_name": "a", "memory_mb": 5, "ttl_seconds": 1.0, "expires_at": utc_shift(-1.0)}
    edit(db, insert(schema.leases).values(**lease))
    edit(db, insert(schema.lease_gpus).values(token="t", gpu_uuid="GPU-nowhere", memory_mb=5))
    assert duties.purge_leases(context) == 1
    assert duties.purge_leases(context) == 0
    assert leased_mb(db) == 0


@pytest.mark.parametrize("owner", [None, "nobody-knows", "deleted"])
def test_a_job_whose_owner_cannot_be_found_is_taken_back(db, context, owner):
    hand = hire(db)
    (job_id,) = submit(db)
    hand.claim(job_id)
    if owner == "deleted":
        edit(db, delete(schema.workers))
    else:
        edit(db, update(schema.jobs).values(worker_id=owner))
    assert delivery.reclaim(context) == 1
    assert status(db, job_id) == "pending"


def test_an_account_that_does_not_cover_its_leases_stops_no_end_and_no_purge(db, context):
    hand = hire(db, gpu())
    first, second = submit(db, 2, min_memory_mb=1000)
    (claim,) = hand.claim(first)
    hand.claim(second)
    edit(db, update(schema.gpus).values(leased_mb=0))
    hand.finish(claim)
    assert status(db, first) == "done"
    edit(db, update(schema.leases).values(expires_at=utc_shift(-1.0)))
    assert duties.purge_leases(context) == 1
    assert leased_mb(db) == 0


#: What no check of a table can tell from sense, and what is said of it.
BROKEN_SCHEDULES: dict[str, tuple[dict[str, Any], str]] = {
    "no cron line": ({"cron": "every day", "every_seconds": None}, "cron: "),
    "no time zone": ({"timezone": "Mars/Olympus"}, "time zone"),
    "an anchor at the end of all time": ({"anchor_at": datetime(9999, 12, 31, 23, 59)}, "OverflowError: "),  # noqa: DTZ001
    "no JSON": ({"job": "{"}, "JSONDecodeError: "),
    "no object": ({"job": "5"}, "TypeError: "),
}


@pytest.mark.parametrize("broken", BROKEN_SCHEDULES)
def test_a_schedule_that_cannot_fire_says_why_and_keeps_no_other_from_it(db, context, caplog, broken):
    values, why = BROKEN_SCHEDULES[broken]
    for name in ("a", "bad", "c"):
        put(db, name)
        outage(db, name=name)
    edit(db, update(schema.schedules).where(schema.schedules.c.schedule_id == "bad").values(values))
    assert duties.fire_due(context) == 2
    assert {job.job_id.split(":")[1] for job in rows(db, schema.jobs)} == {"a", "c"}
    bad = next(one for one in rows(db, schema.schedules) if one.schedule_id == "bad")
    assert why in bad.last_error and bad.next_fire_at > now(db)
    assert {one.schedule_id for one in caplog.records if hasattr(one, "schedule_id")} == {"bad"}
    assert [get(db, name)["last_error"] for name in ("a", "c")] == [None, None]


@pytest.mark.parametrize("body", ["{", "5", "{}", '{"base": "b", "entries": [{"n": 1}]}'])
def test_staged_tasks_that_cannot_be_read_end_their_workflow_and_no_other(db, context, body):
    broken = begin(db)
    whole = begin(db, hand=broken.hand)
    for attempt in (broken, whole):
        attempt.stage.spawn("part", {}, ())
        attempt.succeed()
    edit(db, update(schema.task_stages).where(schema.task_stages.c.job_id == broken.mark.job_id).values(body=body))
    duties.tend_workflows(context)
    assert len(of_type(db, "part")) == 1
    assert flow_of(db, whole)["status"] == "running"
    failed = flow_of(db, broken)
    assert failed["status"] == "failed" and "cannot be read" in failed["reason"]
    assert rows(db, schema.task_stages) == rows(db, schema.spawns) == []


#: A list passes every check of the tables, whatever is in it; the others only where nobody checks.
NO_NAMES = ["[1, null]", '{"a": 1}', '"x"', "[" * 200_000, "oops"]


def limit(db, context, most):
    policy = parse(Scope.CONCURRENCY, {"max": most})
    db.write(lambda conn: policies.put(conn, Scope.CONCURRENCY, "host:*", policy))
    context.policies.expire()


@pytest.fixture
def capped(db, context):
    limit(db, context, 2)
    return Book(1, caps={"host:*": 2})


def announced(db, ids):
    return {row(db, job_id).queued for job_id in ids} == {"announced"}


def test_keys_that_cannot_be_read_stop_nobody_from_being_announced_and_only_their_own_claim(db, context, capped):
    bad, *good = submit(db, 4, concurrency_keys=["host:a"])
    spoil_job(db, bad, concurrency_keys=NO_NAMES[0])
    others = submit(db, 2)
    delivery.publish(context)
    assert announced(db, [bad, *good[:2], *others])
    hand = hire(db)
    hand.book = capped
    assert not any(isinstance(answer, NotClaimed) for answer in hand.offer(*others).values())
    with pytest.raises(ValueError, match="concurrency_keys cannot be read"):
        hand.offer(bad)


def test_hundreds_of_jobs_with_such_keys_hold_up_nobody_behind_them(db, capped):
    many_jobs(db, 600, concurrency_keys=NO_NAMES[0], rank=lambda i: -1000 + i)
    (job_id,) = submit(db)
    for _ in range(2):
        db.write(lambda conn: outbox.take(conn, "default", CHUNK, caps=Glance(conn, capped)))
    assert announced(db, [job_id])


def test_a_job_with_such_keys_that_waits_for_a_cap_keeps_no_seat_from_others(db, context, capped):
    hand = hire(db)
    hand.book = capped
    ids = submit(db, 4, concurrency_keys=["host:a"])
    hand.offer(*ids)
    spoil_job(db, ids[2], concurrency_keys=NO_NAMES[0])
    limit(db, context, 4)
    duties.keep_caps(context)
    assert [row(db, job_id).queued for job_id in ids] == [None, None, "ready", "ready"]


@pytest.mark.parametrize("seats", NO_NAMES)
def test_seats_that_cannot_be_read_are_none_and_the_job_ends_as_ever(db, context, capped, seats):
    hand = hire(db)
    hand.book = capped
    (claim,) = hand.claim(*submit(db, concurrency_keys=["host:a"]))
    spoil_job(db, claim.job_id, held_caps=seats)
    duties.keep_caps(context)
    hand.fail(claim)
    assert status(db, claim.job_id) == "pending"
