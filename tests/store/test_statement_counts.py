"""How many statements and commits the hot paths cost: what makes batching worth it must not creep away."""

from orchestrator.store import outbox
from orchestrator.store.submit import submit_jobs
from tests.factories import done, gpu, hire, is_sqlite, new_job, submit, traffic


def statements(seen):
    return [statement for statement in seen.statements if not statement.startswith("BEGIN")]


def test_submitting_500_jobs(db):
    submit(db)
    batch = [new_job() for _ in range(500)]
    with traffic(db) as seen:
        submit_jobs(db, batch, 5)
    assert len(statements(seen)) <= 6, seen.statements
    assert seen.commits == 1


def test_claiming_16_jobs_without_leases(db):
    hand, ids = hire(db), submit(db, 16)
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
