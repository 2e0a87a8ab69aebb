"""How many statements and commits the hot paths cost: what makes batching worth it must not creep away."""

import pytest
from sqlalchemy import insert

from orchestrator.store import dead_letters, outbox, schema, withdraw
from orchestrator.store.submit import submit_jobs
from tests.factories import POLICY, done, gpu, hire, is_sqlite, many_jobs, new_job, submit, traffic


def statements(seen):
    return [statement for statement in seen.statements if not statement.startswith("BEGIN")]


def test_submitting_500_jobs(db):
    submit(db)
    batch = [new_job() for _ in range(500)]
    with traffic(db) as seen:
        submit_jobs(db, batch, POLICY)
    assert len(statements(seen)) <= 6, seen.statements
    assert seen.commits == 1


@pytest.mark.parametrize("fields", [{}, {"deadline_at": "2999-01-01T00:00:00Z"}])
def test_claiming_16_jobs_without_leases(db, fields):
    hand, ids = hire(db), submit(db, 16, **fields)
    with traffic(db) as seen:
        hand.claim(*ids)
    assert len(statements(seen)) <= 5, seen.statements
    assert seen.commits == 1


def test_claiming_16_jobs_with_leases_does_not_cost_a_statement_for_each(db):
    hand, ids = hire(db, gpu(0), gpu(1)), submit(db, 16, min_memory_mb=100)
    with traffic(db) as seen:
        hand.claim(*ids)
    assert len(statements(seen)) <= 12, seen.statements
    assert seen.commits == 1


def test_recording_16_finished_jobs(db):
    hand = hire(db)
    claims = hand.claim(*submit(db, 16))
    with traffic(db) as seen:
        hand.record(ends=[done(claim) for claim in claims])
    assert len(statements(seen)) <= 6, seen.statements
    assert seen.commits == 1


def test_recording_16_finished_jobs_of_which_one_was_cancelled(db):
    """The short way finds it, is rolled back, and the long one needs a statement for it alone."""
    hand = hire(db)
    claims = hand.claim(*submit(db, 16))
    db.write(lambda conn: withdraw.cancel(conn, claims[3].job_id))
    with traffic(db) as seen:
        hand.record(ends=[done(claim) for claim in claims])
    assert len(statements(seen)) <= 8, seen.statements
    assert seen.commits == 1


def test_redriving_and_purging_100_dead_letters(db):
    many_jobs(db, 200, status="dead_letter", queued=None, attempt=3, attempts=3)
    ids = [f"many-{i:06}" for i in range(200)]
    letters = [{"job_id": job_id, "reason": "timeout", "attempts": 3} for job_id in ids]
    db.write(lambda conn: conn.execute(insert(schema.dead_letters), letters))
    with traffic(db) as redriven:
        removed = db.write(lambda conn: dead_letters.redrive(conn, ids[:100], 3, lambda _n: 0.0, None))
    with traffic(db) as purged:
        removed_too = db.write(lambda conn: dead_letters.purge(conn, ids[100:], None))
    assert [len(removed.job_ids), len(removed_too.job_ids)] == [100, 100]
    assert len(statements(redriven)) <= 4, redriven.statements
    assert len(statements(purged)) <= 7, purged.statements


def test_an_idle_look_for_overdue_jobs_is_one_statement(db):
    submit(db, 3, deadline_at="2999-01-01T00:00:00Z")
    with traffic(db) as seen:
        assert db.write(lambda conn: withdraw.expire_overdue(conn, 500)) == 0
    assert len(statements(seen)) == 1, seen.statements


def test_publishing_100_jobs(db):
    submit(db, 100)
    with traffic(db) as seen:
        assert len(db.write(lambda conn: outbox.take(conn, "default", 100))) == 100
    assert len(statements(seen)) <= 3, seen.statements
    assert seen.commits == 1


def test_an_idle_publisher_costs_one_look(db):
    with traffic(db) as seen:
        db.write(lambda conn: outbox.take(conn, "default", 100))
    assert len(statements(seen)) == 1
    assert is_sqlite(db) or seen.commits == 1
