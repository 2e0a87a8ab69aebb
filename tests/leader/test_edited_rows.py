"""BI-21: rows that somebody edited by hand.

What the tables do not refuse (`test_constraints`) heals by itself, or is named and left out while all else goes on.
"""

import json
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from orchestrator.leader import duties
from orchestrator.policies import Scope, parse
from orchestrator.store import policies, schema
from orchestrator.store.dialect import utc_shift
from tests.factories import gpu, hire, now, row, rows, status, submit
from tests.leader.test_duties import announced
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
    assert duties.reclaim(context) == 1
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


def test_keys_that_are_no_names_keep_no_lane_from_being_announced(db, raw, context):
    cap = parse(Scope.CONCURRENCY, {"max": 1})
    db.write(lambda conn: policies.put(conn, Scope.CONCURRENCY, "host:one", cap))
    job_ids = submit(db, 3)
    keys = json.dumps([5, None, ["host:one"], "host:one"])
    edit(db, update(schema.jobs).where(schema.jobs.c.job_id == job_ids[0]).values(concurrency_keys=keys))
    duties.publish(context)
    assert announced(raw) == job_ids
    hand = hire(db)
    hand.book = db.read(policies.read_book)
    hand.claim(*job_ids)
    assert json.loads(row(db, job_ids[0]).held_caps) == ["host:one"]
    edit(db, update(schema.jobs).where(schema.jobs.c.job_id == job_ids[0]).values(held_caps=keys))
    duties.keep_caps(context)
    assert [(cap.cap_key, cap.in_use) for cap in rows(db, schema.concurrency_caps)] == [("host:one", 1)]


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
