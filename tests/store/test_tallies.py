"""Totals: every event of the audit trail is counted once, late ones too, whoever leads and whatever breaks."""

import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import delete, func, insert, text, update

from orchestrator import tallies as rules
from orchestrator.errors import StaleEpoch
from orchestrator.jobs import ErrorKind
from orchestrator.leader.term import borrow
from orchestrator.store import audit, dead_letters, leadership, outbox, schema, tallies, withdraw
from orchestrator.store.audit import Event
from orchestrator.store.dialect import utc_shift
from orchestrator.store.settle import End, Outcome
from orchestrator.store.submit import Verdict, submit_jobs
from orchestrator.tallies import LATENCY, RUN, SUM, WAIT, Hole, Ids
from tests.factories import POLICY, hire, new_job, rows, set_job, submit
from tests.waiting import wait_until


def fold(db, **given):
    return db.write(lambda conn: tallies.fold(conn, **given))


def totals(db):
    return db.read(tallies.totals)


def total(db, name, type="", label=""):
    return totals(db).get((name, type, label), 0)


def observed(db, name, type="echo"):
    """How many, and their seconds together."""
    found = {label: value for (total, of, label), value in totals(db).items() if (total, of) == (name, type)}
    return sum(value for label, value in found.items() if label != SUM), found.get(SUM, 0.0)


def cursor(db):
    return db.read(tallies._cursor)


@pytest.fixture
def db(db):
    return counted_so_far(db)


@pytest.fixture
def maria_db(maria_db):
    return counted_so_far(maria_db)


def counted_so_far(db):
    """A server goes on counting where other tests left off: the ids before are no holes of this one."""
    record(db, Event("test.began"))
    began = {"name": "audit", "position": db.read(tallies._newest), "holes": "[]"}
    db.write(lambda conn: conn.execute(insert(schema.tally_cursor), began))
    return db


def record(db, *events):
    db.write(lambda conn: audit.record(conn, events))


def age_events(db, seconds, *event_types):
    """As if these had happened so long ago."""
    of = schema.audit.c.event_type.in_(event_types)
    db.write(lambda conn: conn.execute(update(schema.audit).where(of).values(ts=utc_shift(-seconds))))


# --- what is counted ---


def test_what_happens_to_jobs_is_counted_by_type(db):
    hand = hire(db)
    ok, again, bad, dead, skipped = submit(db, 5, max_attempts=2)
    (other,) = submit(db, type="embed")
    claims = dict(
        zip((ok, again, bad, dead, skipped, other), hand.claim(ok, again, bad, dead, skipped, other), strict=True)
    )
    hand.finish(claims[ok], claims[other])
    hand.fail(claims[again], ErrorKind.TIMEOUT, retry_after_s=0.0)
    hand.fail(claims[bad], ErrorKind.PERMANENT)
    hand.fail(claims[dead], retry_after_s=0.0)
    hand.fail(*hand.claim(dead))
    hand.record(ends=[End(skipped, 1, Outcome.SKIPPED, error="no")])
    (ended_at,) = [one.ts for one in rows(db, schema.audit) if one.event_type == "job.skipped"]
    set_job(db, skipped, started_at=ended_at - timedelta(seconds=2))
    (cancelled,) = submit(db)
    db.write(lambda conn: withdraw.cancel(conn, cancelled))
    assert fold(db) > 0
    assert (total(db, rules.SUBMITS, "echo"), total(db, rules.SUBMITS, "embed")) == (6, 1)
    ended = {
        label: value for (name, type, label), value in totals(db).items() if (name, type) == (rules.FINISHES, "echo")
    }
    assert ended == {"done": 1, "failed": 1, "dead_letter": 1, "skipped": 1, "cancelled": 1}
    assert total(db, rules.FINISHES, "embed", "done") == 1
    assert (total(db, rules.RETRIES, "", "timeout"), total(db, rules.RETRIES, "", "transient")) == (1, 1)
    assert observed(db, LATENCY)[0] == 5
    assert observed(db, WAIT)[0] == 5  # first claims only
    # Five attempts were measured; of the one that skipped nobody told, so its claim and its end say.
    assert observed(db, RUN)[0] == 6
    assert observed(db, RUN)[1] == pytest.approx(2.5 + 2.0, abs=0.01)


def test_nothing_is_counted_twice(db):
    hand = hire(db)
    hand.finish(*hand.claim(*submit(db, 3)))
    fold(db)
    before = totals(db)
    assert fold(db) == 0
    assert totals(db) == before
    assert not db.read(tallies.waiting)


def test_a_fold_counts_so_many_and_the_next_one_goes_on(db):
    submit(db, 25)
    assert [fold(db, most=10) for _ in range(4)] == [10, 10, 5, 0]
    assert total(db, rules.SUBMITS, "echo") == 25


def test_times_fall_into_their_buckets(db):
    hand = hire(db)
    ids = submit(db, 3)
    for job_id, seconds in zip(ids, (0.3, 45.0, 9000.0), strict=True):
        set_job(db, job_id, created_at=utc_shift(-seconds))
    hand.finish(*hand.claim(*ids))
    fold(db)
    for name in (LATENCY, WAIT):
        found = {label: value for (total, _, label), value in totals(db).items() if total == name}
        assert found.pop(SUM) == pytest.approx(9045.3, abs=20)
        assert found["60.0"] == 1 and found["+Inf"] == 1 and sum(found.values()) == 3
    assert total(db, RUN, "echo", "0.5") == 3


# --- where waiting begins ---


def test_a_delayed_job_waits_from_when_it_is_due(db):
    hand = hire(db)
    (job_id,) = submit(db, earliest_start_at="2999-01-01T00:00:00Z")
    details = func.replace(schema.audit.c.details, "2999", "2020")
    set_job(db, job_id, created_at=utc_shift(-7200.0), not_before=utc_shift(-1.0))
    db.write(
        lambda conn: conn.execute(
            update(schema.audit).where(schema.audit.c.details.is_not(None)).values(details=details)
        )
    )
    db.write(lambda conn: outbox.promote_due(conn, 10))
    hand.finish(*hand.claim(job_id))
    fold(db)
    count, seconds = observed(db, WAIT)
    assert count == 1 and seconds > 86_400 * 365  # since 2020, and not since its submit two hours ago
    assert observed(db, LATENCY)[1] == pytest.approx(7200, abs=20)


def test_a_job_that_was_never_delayed_waits_from_its_submit_also_when_it_was_announced_anew(db):
    hand = hire(db)
    (job_id,) = submit(db)
    db.write(lambda conn: outbox.take(conn, "default", 1))
    db.write(lambda conn: outbox.unpublish(conn, [job_id]))
    set_job(db, job_id, created_at=utc_shift(-40.0))
    hand.claim(job_id)
    fold(db)
    assert observed(db, WAIT) == (1, pytest.approx(40, abs=20))


def test_a_task_waits_from_when_it_was_let_go(db):
    hand = hire(db)
    (job_id,) = submit(db)
    set_job(db, job_id, created_at=utc_shift(-7200.0), ready_at=utc_shift(-40.0), needs=2)
    hand.claim(job_id)
    fold(db)
    assert observed(db, WAIT) == (1, pytest.approx(40, abs=20))


def test_of_a_task_that_became_ready_again_since_nothing_is_said(db):
    hand = hire(db)
    (job_id,) = submit(db)
    hand.claim(job_id)
    set_job(db, job_id, created_at=utc_shift(-7200.0), ready_at=utc_shift(40.0), needs=2)
    fold(db)
    assert observed(db, WAIT) == (0, 0)


# --- starting over ---


def test_a_job_that_is_started_over_is_timed_anew(db):
    hand = hire(db)
    (job_id,) = submit(db, max_attempts=1)
    (claim,) = hand.claim(job_id)
    hand.fail(claim)
    set_job(db, job_id, created_at=utc_shift(-7200.0))
    age_events(db, 7200.0, "job.submitted")
    age_events(db, 7000.0, "job.claimed")
    age_events(db, 6900.0, "job.dead_letter")
    db.write(lambda conn: dead_letters.redrive_one(conn, job_id, 3, None))
    (again,) = hand.claim(job_id)
    hand.finish(again)
    fold(db)
    assert total(db, rules.SUBMITS, "echo") == 1
    assert total(db, rules.RETRIES, "", "redrive") == 1
    assert (total(db, rules.FINISHES, "echo", "dead_letter"), total(db, rules.FINISHES, "echo", "done")) == (1, 1)
    # 300 s and 200 s of its first life; next to nothing of the second.
    assert observed(db, LATENCY) == (2, pytest.approx(300, abs=20))
    assert observed(db, WAIT) == (2, pytest.approx(200, abs=20))


def test_a_second_attempt_is_no_first_claim(db):
    hand = hire(db)
    (job_id,) = submit(db)
    hand.hand_back(*hand.claim(job_id))
    hand.claim(job_id)
    fold(db)
    assert observed(db, WAIT)[0] == 1
    assert totals(db).keys() & {(rules.RETRIES, "", reason) for reason in rules.REASONS} == set()
    assert observed(db, RUN)[0] == 0


# --- the lost ---


def test_what_became_of_the_jobs_of_a_lost_worker(db):
    hand = hire(db)
    ids = submit(db, 4)
    claims = hand.claim(*ids)
    set_job(db, ids[1], crashes=1)
    db.write(lambda conn: withdraw.cancel(conn, ids[2]))
    hand.fail(claims[3], ErrorKind.WORKER_LOST)  # its process died, its worker lives
    hand.lose()
    fold(db)
    assert [total(db, rules.RECLAIMS, "", outcome) for outcome in ("retried", "buried", "cancelled")] == [1, 1, 1]
    assert total(db, rules.RETRIES, "", "worker_lost") == 2
    assert observed(db, RUN)[0] == 1  # nobody saw the lost ones end


# --- many types ---


def test_types_beyond_the_first_two_hundred_share_a_label(db):
    types = [f"t{(i * 7) % 300:03}" for i in range(300)]
    batch = [new_job(job_id=f"job-{i:03}", type=type) for i, type in enumerate(types)]
    assert set(submit_jobs(db, batch, POLICY)) == {Verdict.CREATED}
    while fold(db, most=97):
        pass
    named = {type for name, type, _ in totals(db) if name == rules.SUBMITS}
    assert len(named) == 201
    assert named == {*types[:200], "other"}
    assert total(db, rules.SUBMITS, "other") == 100
    submit(db, type="t000")
    submit(db, type="zz-new")
    fold(db)
    assert (total(db, rules.SUBMITS, "t000"), total(db, rules.SUBMITS, "other")) == (2, 101)


def test_a_job_that_is_gone_has_the_other_type(db):
    (job_id,) = submit(db)
    db.write(lambda conn: conn.execute(delete(schema.jobs)))
    record(db, Event("job.cancelled", job_id=job_id))
    fold(db)
    assert total(db, rules.FINISHES, "other", "cancelled") == 1
    assert observed(db, LATENCY, "other")[0] == 0


# --- once, whatever breaks ---


class _Killed(Exception):
    pass


def test_a_fold_that_dies_before_its_commit_has_counted_nothing(db, monkeypatch):
    submit(db, 3)
    before = cursor(db)

    def die(*_given):
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(tallies, "_move", die)
        with pytest.raises(_Killed):
            fold(db)
    assert totals(db) == {} and cursor(db) == before
    fold(db)
    assert total(db, rules.SUBMITS, "echo") == 3


def test_a_fold_whose_answer_was_lost_counts_once(db, lose_commits):
    submit(db, 3)
    lose_commits(1)
    fold(db)
    assert total(db, rules.SUBMITS, "echo") == 3


def test_a_leader_that_was_replaced_counts_nothing(db):
    config = db.settings
    first = borrow(db, config, "first")
    submit(db, 3)
    epoch = db.write(lambda conn: leadership.take(conn, config.leader_lock, "second", 60.0, lock_held=True))
    with pytest.raises(StaleEpoch):
        first.write(tallies.fold)
    assert totals(db) == {}
    second = borrow(db, config, "second")
    assert second.epoch == epoch
    second.write(tallies.fold)
    assert total(db, rules.SUBMITS, "echo") == 3


def test_a_trail_that_was_cut_off_goes_on(db):
    submit(db, 3)
    fold(db)
    db.write(lambda conn: conn.execute(delete(schema.audit)))
    fold(db)
    submit(db, 2)
    fold(db)
    assert total(db, rules.SUBMITS, "echo") == 5


# --- holes ---


@contextmanager
def held_open(db, *events):
    """A transaction that has written these events and not committed yet; `end(commit=…)`."""
    connection = db.engine.connect()
    transaction = connection.begin()
    audit.record(connection, events)

    def end(*, commit):
        transaction.commit() if commit else transaction.rollback()

    try:
        yield end
    finally:
        connection.close()


def test_an_event_that_commits_late_is_counted_and_holds_nobody_up(maria_db):
    (job_id,) = submit(maria_db)
    fold(maria_db)
    with held_open(maria_db, Event("job.done", job_id=job_id, attempt=1)) as end:
        submit(maria_db, 2)
        fold(maria_db)
        assert total(maria_db, rules.SUBMITS, "echo") == 3
        assert [hole.last - hole.first for hole in cursor(maria_db).holes][-1] == 0
        assert maria_db.read(tallies.folded_up_to) < cursor(maria_db).holes[-1].first
        assert maria_db.read(tallies.waiting)
        end(commit=True)
    assert fold(maria_db) == 1
    assert total(maria_db, rules.FINISHES, "echo", "done") == 1
    fold(maria_db)
    assert total(maria_db, rules.FINISHES, "echo", "done") == 1


def test_an_id_that_was_rolled_back_holds_nobody_up_and_is_forgotten(maria_db, monkeypatch):
    submit(maria_db)
    fold(maria_db)
    with held_open(maria_db, Event("job.done"), Event("job.done")) as end:
        submit(maria_db, 2)
        end(commit=False)
    fold(maria_db)
    assert total(maria_db, rules.SUBMITS, "echo") == 3
    hole = cursor(maria_db).holes[-1]
    assert hole.last - hole.first == 1
    assert maria_db.read(tallies.lag_s) == 0
    monkeypatch.setattr(rules, "HOLE_S", 0.0)
    fold(maria_db)
    assert cursor(maria_db).holes == ()
    assert maria_db.read(tallies.folded_up_to) == cursor(maria_db).position - 1
    assert not maria_db.read(tallies.waiting)


def test_late_events_that_commit_between_two_statements_of_a_fold_are_counted_once(maria_db, monkeypatch):
    (job_id,) = submit(maria_db)
    fold(maria_db)
    add = tallies._add
    submit(maria_db)  # there are events on both sides of the hole
    with held_open(maria_db, Event("job.done", job_id=job_id, attempt=1)) as end:
        submit(maria_db, 2)

        def commit_first(conn, found):
            end(commit=True)
            monkeypatch.setattr(tallies, "_add", add)
            add(conn, found)

        monkeypatch.setattr(tallies, "_add", commit_first)
        fold(maria_db)
    assert total(maria_db, rules.FINISHES, "echo", "done") == 0
    fold(maria_db)
    fold(maria_db)
    assert total(maria_db, rules.FINISHES, "echo", "done") == 1


def test_two_folds_at_once_take_turns(maria_db):
    """The leader's, and one that an operator runs by hand under the same term."""
    submit(maria_db, 3)
    # Not innodb_lock_waits: that shows the same old rows to whoever looks often.
    waits = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
    with maria_db.engine.connect() as connection, connection.begin():
        tallies.fold(connection)
        second = threading.Thread(target=fold, args=(maria_db,))
        second.start()
        wait_until(lambda: int(maria_db.read(lambda conn: conn.execute(text(waits)).one())[1]), what="the second waits")
    second.join(30)
    assert total(maria_db, rules.SUBMITS, "echo") == 3


def test_many_writers_and_a_leader_that_folds_all_the_while(maria_db):
    def work(n):
        for i in range(20):
            with maria_db.engine.connect() as connection, connection.begin() as transaction:
                audit.record(connection, [Event("job.rerun", job_id=f"{n}-{i}")] * 3)
                if i % 4 == 0:
                    transaction.rollback()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        fold(maria_db, most=20)
    while maria_db.read(tallies._newest) > cursor(maria_db).position:
        fold(maria_db)
    fold(maria_db)
    stored = sum(event.event_type == "job.rerun" for event in rows(maria_db, schema.audit))
    assert stored == 4 * 15 * 3
    assert total(maria_db, rules.RETRIES, "", "rerun") == stored


def test_more_holes_than_anybody_remembers(db, monkeypatch):
    monkeypatch.setattr(rules, "MAX_HOLES", 5)
    base = cursor(db).position + 1000
    spread = [{"id": base + 2 * i, "event_type": "job.rerun"} for i in range(300)]
    db.write(lambda conn: conn.execute(insert(schema.audit), spread))
    fold(db)
    assert total(db, rules.RETRIES, "", "rerun") == 300
    assert [hole.first for hole in cursor(db).holes] == [base + n for n in (589, 591, 593, 595, 597)]
    db.write(lambda conn: conn.execute(insert(schema.audit), [{"id": base + 595, "event_type": "job.rerun"}]))
    fold(db)
    assert total(db, rules.RETRIES, "", "rerun") == 301


def test_what_is_left_of_a_hole():
    left = rules.still_missing([Hole(10, 20, 5.0)], 30, [Ids(12, 13), Ids(20, 20)], [Ids(33, 40), Ids(42, 42)], 6.0)
    assert left == [Hole(10, 11, 5.0), Hole(14, 19, 5.0), Hole(31, 32, 6.0), Hole(41, 41, 6.0)]
    assert rules.still_missing(left, 42, [], [], 65.5) == [Hole(31, 32, 6.0), Hole(41, 41, 6.0)]


# --- how far ---


def test_the_lag_is_the_age_of_the_oldest_event_that_is_not_counted(db):
    assert db.read(tallies.lag_s) == 0
    submit(db, 2)
    age_events(db, 300.0, "job.submitted")
    assert db.read(tallies.lag_s) == pytest.approx(300, abs=20)
    fold(db)
    assert db.read(tallies.lag_s) == 0


def test_up_to_where_the_trail_may_be_deleted(db):
    began = cursor(db).position
    submit(db, 3)
    assert db.read(tallies.folded_up_to) == began - 1
    fold(db)
    assert db.read(tallies.folded_up_to) == began + 2
    # What is deleted then is counted, and what comes after it goes on counting.
    db.write(lambda conn: conn.execute(delete(schema.audit).where(schema.audit.c.id <= began + 2)))
    submit(db, 2)
    fold(db)
    assert total(db, rules.SUBMITS, "echo") == 5


def test_a_trail_that_nobody_has_counted_is_counted_from_its_beginning(db):
    db.write(lambda conn: conn.execute(delete(schema.tally_cursor)))
    assert db.read(tallies.waiting) and db.read(tallies.folded_up_to) == 0
    submit(db, 3)
    fold(db)
    assert total(db, rules.SUBMITS, "echo") == 3
