"""The leader's care for caps: policies that changed, holders that died, counts that are wrong."""

import json

import pytest
from sqlalchemy import insert, update

from orchestrator.leader import delivery, duties
from orchestrator.policies import Book, Scope, parse
from orchestrator.store import policies, schema
from orchestrator.store.caps import care, held
from tests.factories import hire, row, rows, set_job, submit
from tests.leader.test_duties import announced


def put(db, context, key, most):
    db.write(lambda conn: policies.put(conn, Scope.CONCURRENCY, key, parse(Scope.CONCURRENCY, {"max": most})))
    context.policies.expire()


@pytest.fixture
def scene(db, context):
    """Three jobs of an agent that may run one."""
    put(db, context, "agent:a", 1)
    hand, ids = hire(db), submit(db, 3, agent="a")
    hand.book = Book(1, caps={"agent:a": 1})
    hand.offer(*ids)
    assert duties.keep_caps(context) == 0
    return hand, ids


def waiting(db, ids):
    return [row(db, job_id).queued for job_id in ids]


@pytest.mark.parametrize(("most", "ready"), [(2, 1), (9, 2), (None, 2), (1, 0), (0, 0)])
def test_a_cap_that_is_raised_or_removed_lets_jobs_go_and_they_are_announced(db, raw, context, scene, most, ready):
    _, ids = scene
    if most is None:
        db.write(lambda conn: policies.remove(conn, Scope.CONCURRENCY, "agent:a"))
        context.policies.expire()
    else:
        put(db, context, "agent:a", most)
    assert duties.keep_caps(context) == ready
    assert waiting(db, ids[1:]) == ["ready"] * ready + ["blocked"] * (2 - ready)
    delivery.publish(context)
    assert len(announced(raw)) == ready


def test_a_holder_that_dies_gives_its_seat_to_the_next(db, context, scene):
    hand, ids = scene
    hand.go_silent()
    set_job(db, ids[0], worker_id="a-worker-that-nobody-knows")
    for _ in range(2):
        delivery.reclaim(context)
    duties.keep_caps(context)
    assert [cap.in_use for cap in rows(db, schema.concurrency_caps)] == [0]
    assert waiting(db, ids)[:2] == ["ready", "ready"]


def test_wrong_counts_are_corrected_and_idle_keys_forgotten(db, context, scene):
    _, ids = scene
    for wrong in (0, 5):
        db.write(lambda conn, wrong=wrong: conn.execute(update(schema.concurrency_caps).values(in_use=wrong)))
        duties.keep_caps(context)
        assert [cap.in_use for cap in rows(db, schema.concurrency_caps)] == [1]
    assert duties.forget_caps(context) == 0
    db.write(lambda conn: policies.remove(conn, Scope.CONCURRENCY, "agent:a"))
    context.policies.expire()
    assert duties.forget_caps(context) == 0
    set_job(db, ids[0], status="failed", held_caps=None)
    duties.keep_caps(context)
    assert duties.forget_caps(context) == 1


# --- what is looked for before anything is done, each by itself ---


def test_a_key_that_counts_nobody_is_corrected_without_any_policy(db, context):
    db.write(lambda conn: conn.execute(insert(schema.concurrency_caps), {"cap_key": "agent:a", "in_use": 3}))
    duties.keep_caps(context)
    assert [cap.in_use for cap in rows(db, schema.concurrency_caps)] == [0]


def test_a_job_that_sits_where_no_row_is_gets_one_without_any_policy(db, context):
    hand, (job_id,) = hire(db), submit(db)
    hand.claim(job_id)
    set_job(db, job_id, held_caps='["agent:a"]')
    duties.keep_caps(context)
    assert [(cap.cap_key, cap.in_use) for cap in rows(db, schema.concurrency_caps)] == [("agent:a", 1)]


def test_a_job_that_waits_for_a_cap_of_old_is_let_go_without_any_policy(db, context):
    (job_id,) = submit(db)
    set_job(db, job_id, queued="blocked", blocked_on="cap:agent:a")
    assert duties.keep_caps(context) == 1
    assert waiting(db, [job_id]) == ["ready"]


def test_a_job_that_ran_before_there_was_any_cap_sits_there_too(db, context):
    hand, (job_id,) = hire(db), submit(db, agent="a")
    hand.claim(job_id)
    put(db, context, "agent:a", 1)
    assert duties.keep_caps(context) == 1
    assert row(db, job_id).held_caps == '["agent:a"]'


def test_a_job_that_is_claimed_again_meanwhile_keeps_the_seats_of_its_new_claim(db, monkeypatch):
    """The leader looks without locks: what it saw may be over when it writes."""
    hand, (job_id,) = hire(db), submit(db, concurrency_keys=["host:a", "host:b", "host:c"])
    hand.book = Book(1, caps={"host:a": 1})
    (claim,) = hand.claim(job_id)
    seen = db.read(lambda conn: [*held.of_owned(conn)])
    hand.hand_back(claim)
    hand.book = Book(2, caps={"host:b": 1})
    hand.claim(job_id)
    monkeypatch.setattr(held, "of_owned", lambda _conn: iter(seen))
    db.write(lambda conn: care.seat_late(conn, Book(3, caps={"host:a": 1, "host:c": 1}), 10))
    assert json.loads(row(db, job_id).held_caps) == ["host:b", "host:a", "host:c"]
