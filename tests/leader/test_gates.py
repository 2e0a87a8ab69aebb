"""The leader at the gates: it looks whenever there is anything to look at, and only then. What it does: tests/store."""

import pytest
from sqlalchemy import insert

from orchestrator.leader import duties
from orchestrator.policies import EVERYWHERE, Scope, parse
from orchestrator.store import policies, schema
from tests.factories import row, rows, set_job, submit


def test_who_waits_at_a_gate_that_no_policy_has_any_more_is_let_go(db, context):
    (job_id,) = submit(db)
    set_job(db, job_id, queued="blocked", blocked_on="capacity", cost_units=1.0)
    assert duties.tend_gates(context) == 1
    assert row(db, job_id).queued == "ready"


def test_what_ended_jobs_hold_is_given_back(db, context):
    (job_id,) = submit(db)
    db.write(
        lambda conn: conn.execute(insert(schema.gate_holds), {"gate": "capacity", "job_id": job_id, "amount": 1.0})
    )
    set_job(db, job_id, status="done")
    duties.tend_gates(context)
    assert rows(db, schema.gate_holds) == []


def test_what_was_seen_of_a_gate_that_is_gone_is_forgotten(db, context):
    seen = {"name": "capacity", "closed": True, "since": None, "reason": "of old"}
    db.write(lambda conn: conn.execute(insert(schema.gate_states), seen))
    duties.tend_gates(context)
    assert rows(db, schema.gate_states) == []


@pytest.mark.parametrize("document", [{"capacity": {"units": 8}}, {"gpu_memory": {"over_pct": 90}}])
def test_a_gate_is_looked_at_before_anybody_waits_there(db, context, document):
    db.write(lambda conn: policies.put(conn, Scope.ADMISSION, EVERYWHERE, parse(Scope.ADMISSION, document)))
    context.policies.expire()
    duties.tend_gates(context)
    assert len(rows(db, schema.gate_states)) == 1
