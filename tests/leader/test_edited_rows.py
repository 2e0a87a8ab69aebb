"""BI-21: rows that somebody edited by hand. What the tables do not refuse (`test_constraints`) heals by itself."""

import pytest
from sqlalchemy import delete, insert, select, update

from orchestrator.leader import duties
from orchestrator.store import schema
from orchestrator.store.dialect import utc_shift
from tests.factories import gpu, hire, status, submit


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
