"""Schedules: what is written, and that every time fires once, whoever fires it."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from orchestrator.errors import InvalidInput, Overloaded, ScheduleNotFound, StaleEpoch
from orchestrator.leader import recurring
from orchestrator.leader.term import Term
from orchestrator.schedules import ScheduleSpec, fire_id, recurring_job
from orchestrator.store import lanes, leadership, schedules, schema
from orchestrator.store.admission import Admission
from orchestrator.store.dialect import clock
from orchestrator.store.hot import insert_rows
from orchestrator.store.policies import Copy
from orchestrator.store.submit import Rules
from tests.factories import POLICY, meeting, now, rows, submit

JOB = {"type": "echo", "payload": {"n": 1}, "pool_id": "big"}


def spec(**fields):
    rhythm = {} if "cron" in fields else {"every_seconds": 3600.0}
    return ScheduleSpec.parse({"job": JOB} | rhythm | fields, 1000, 64)


def put(db, name="s", **fields):
    return db.write(lambda conn: schedules.put(conn, name, spec(**fields)))


def get(db, name="s"):
    return db.read(lambda conn: schedules.get(conn, name))


def make(template, job_id):
    return recurring_job(template, job_id, 1000, 64)


def fire(db, *names, **how):
    rules = Rules(POLICY, **how)
    return [job.job_id for job in db.write(lambda conn: schedules.fire(conn, db, names or ["s"], make, rules))]


def due(db, limit=100):
    return db.read(lambda conn: schedules.due(conn, limit))


def outage(db, hours=0.0, name="s"):
    """As if nobody had been there for so long: its last hours are due. The first of them."""
    moment = now(db).replace(microsecond=0) - timedelta(seconds=5)
    first = moment - timedelta(hours=hours)
    change = update(schema.schedules).where(schema.schedules.c.schedule_id == name)
    db.write(lambda conn: conn.execute(change.values(anchor_at=first - timedelta(hours=1), next_fire_at=first)))
    return first


def told(db, event):
    found = select(schema.audit).where(schema.audit.c.event_type == event).order_by(schema.audit.c.id)
    return [json.loads(row.details) for row in db.read(lambda conn: conn.execute(found).all())]


def jobs(db):
    return sorted(job.job_id for job in rows(db, schema.jobs))


def term(db, holder="a"):
    leadership.ensure_row(db, "lock")
    epoch = db.write(lambda conn: leadership.take(conn, "lock", holder, 60.0, lock_held=True))
    assert epoch is not None
    return Term(db, "lock", epoch, "leader:test")


# --- operators ---


def test_a_schedule_is_kept(db):
    assert put(db, cron="0 3 * * *", timezone="Europe/Berlin")
    kept = get(db)
    assert (kept["cron"], kept["timezone"], kept["job"], kept["version"]) == ("0 3 * * *", "Europe/Berlin", JOB, 1)
    assert kept["next_fire_at"] > now(db)
    assert [row["schedule_id"] for row in db.read(lambda conn: schedules.page(conn, None, 10))] == ["s"]
    assert db.read(lambda conn: schedules.page(conn, "s", 10)) == []
    assert len(told(db, "schedule.changed")) == 1


def test_the_same_again_is_no_change(db):
    put(db)
    before = get(db)
    assert not put(db)
    assert get(db) == before


def test_another_job_keeps_the_rhythm_and_another_rhythm_begins_now(db):
    put(db)
    first = outage(db, 2)
    put(db, job=JOB | {"type": "other"})
    assert (get(db)["next_fire_at"], get(db)["version"]) == (first, 2)
    put(db, every_seconds=60.0, job=JOB)
    assert get(db)["next_fire_at"] > now(db)


def test_what_is_not_enabled_does_not_fire_and_begins_anew_later(db):
    put(db)
    outage(db, 2)
    put(db, enabled=False)
    assert (due(db), get(db)["next_fire_at"]) == ([], None)
    assert fire(db) == []  # it was found before it was changed
    put(db)
    assert get(db)["next_fire_at"] > now(db)


def test_a_deleted_schedule_is_gone(db):
    put(db)
    db.write(lambda conn: schedules.remove(conn, "s"))
    for work in (lambda conn: schedules.get(conn, "s"), lambda conn: schedules.remove(conn, "s")):
        with pytest.raises(ScheduleNotFound):
            db.write(work)


# --- firing ---


def test_what_is_due_fires_once_and_goes_on(db):
    put(db)
    assert (due(db), fire(db)) == ([], [])
    at = outage(db)
    assert due(db) == ["s"]
    assert fire(db) == [fire_id("s", at)]
    assert (due(db), fire(db)) == ([], [])
    kept = get(db)
    assert kept["next_fire_at"] == at + timedelta(hours=1)
    assert (kept["last_fired_at"], kept["last_job_id"]) == (at, fire_id("s", at))
    assert kept["last_error"] is None
    assert [event["schedule_id"] for event in told(db, "schedule.fired")] == ["s"]
    assert told(db, "schedule.missed") == []


def test_a_firing_that_is_done_again_finds_its_job(db):
    put(db)
    at = outage(db)
    fire(db)
    change = update(schema.schedules).values(next_fire_at=at)
    db.write(lambda conn: conn.execute(change))  # as a database that forgot the last commit but for the job
    assert fire(db) == []
    assert (jobs(db), due(db), len(told(db, "schedule.fired"))) == ([fire_id("s", at)], [], 1)


def test_a_commit_whose_answer_is_lost_fires_once(db, lose_commits):
    put(db)
    at = outage(db)
    lose_commits(1)
    fire(db)
    assert (jobs(db), len(told(db, "schedule.fired"))) == ([fire_id("s", at)], 1)


@pytest.mark.parametrize(
    ("catch_up", "most", "fired", "missed"),
    [("skip", 10, 1, 4), ("last", 10, 1, 4), ("all", 10, 5, 0), ("all", 2, 2, 3)],
)
def test_after_an_outage(db, catch_up, most, fired, missed):
    put(db, catch_up=catch_up, catch_up_max=most)
    first = outage(db, 4)
    times = [first + timedelta(hours=n) for n in range(5)]
    assert fire(db) == [fire_id("s", at) for at in times[-fired:]]
    assert [event["missed"] for event in told(db, "schedule.missed")] == ([missed] if missed else [])
    assert get(db)["next_fire_at"] == first + timedelta(hours=5)


def test_what_is_long_ago_is_skipped(db):
    put(db)
    first = outage(db, 4)
    change = update(schema.schedules).values(anchor_at=first - timedelta(hours=1, minutes=10))
    db.write(lambda conn: conn.execute(change))
    assert (fire(db), due(db)) == ([], [])
    assert get(db)["last_fired_at"] is None
    assert told(db, "schedule.missed")[0]["missed"] > 0


def test_a_template_that_is_accepted_no_more_says_so_and_goes_on(db):
    put(db)
    at = outage(db)

    def refuse(_template, _job_id):
        raise InvalidInput("type: no longer")

    assert db.write(lambda conn: schedules.fire(conn, db, ["s"], refuse, Rules(POLICY))) == []
    kept = get(db)
    assert (kept["last_error"], kept["enabled"], kept["next_fire_at"]) == (
        "type: no longer",
        True,
        at + timedelta(hours=1),
    )
    assert [event["error"] for event in told(db, "schedule.missed")] == ["type: no longer"]
    outage(db)
    assert len(fire(db)) == 1
    assert get(db)["last_error"] is None


def test_an_id_that_is_taken_is_told(db):
    put(db)
    at = outage(db)
    submit(db, job_id=fire_id("s", at))
    assert fire(db) == []
    assert "other content" in get(db)["last_error"]
    assert due(db) == []


def test_who_is_told_to_come_later_stays_due(db):
    put(db)
    put(db, "other")
    at = outage(db)
    outage(db, name="other")

    def admit(_conn, fresh):
        from orchestrator.admission import FREELY

        return [Overloaded("full") if ":s:" in job.job_id else FREELY for job in fresh]

    assert [job_id.split(":")[1] for job_id in fire(db, "s", "other", admit=admit)] == ["other"]
    assert (due(db), get(db)["last_error"], get(db)["next_fire_at"]) == (["s"], "full", at)
    assert told(db, "schedule.missed") == []
    assert fire(db) == [fire_id("s", at)]
    assert get(db)["last_error"] is None


def test_a_time_zone_that_is_gone_says_so_and_is_looked_at_again(db):
    put(db)
    outage(db)
    db.write(lambda conn: conn.execute(update(schema.schedules).values(timezone="Mars/Olympus")))
    assert (fire(db), due(db)) == ([], [])
    assert "time zone" in get(db)["last_error"]
    assert get(db)["next_fire_at"] > now(db)


# --- leaders ---


def lead(db, one, settings):
    return [job.job_id for job in recurring.fire_schedules(one, settings(), POLICY, Admission(Copy()), 500)]


def test_two_leaders_fire_each_time_once(db, settings):
    """The old one found what is due and was replaced before it fired."""
    put(db)
    at = outage(db)
    old = term(db, "a")
    new = term(db, "b")
    with pytest.raises(StaleEpoch):
        old.write(lambda conn: schedules.fire(conn, db, ["s"], make, Rules(POLICY)))
    assert (jobs(db), due(db)) == ([], ["s"])
    assert lead(db, new, settings) == [fire_id("s", at)]
    with pytest.raises(StaleEpoch):
        lead(db, old, settings)
    assert lead(db, new, settings) == []
    assert jobs(db) == [fire_id("s", at)]


def test_a_leader_that_is_replaced_between_looking_and_firing_fires_nothing(db, settings, monkeypatch):
    put(db)
    outage(db)
    old = term(db, "a")
    look = Term.write

    def replaced_after(one, work):
        found = look(one, work)
        monkeypatch.setattr(Term, "write", look)
        term(db, "b")
        return found

    monkeypatch.setattr(Term, "write", replaced_after)
    with pytest.raises(StaleEpoch):
        lead(db, old, settings)
    assert (jobs(db), due(db)) == ([], ["s"])


def test_one_that_breaks_does_not_hold_up_the_others(db, settings, monkeypatch, caplog):
    for name in ("a", "bad", "c"):
        put(db, name)
        outage(db, name=name)
    fire_all = schedules.fire

    def breaking(conn, on, ids, *rest):
        created = fire_all(conn, on, ids, *rest)
        if "bad" in ids:
            raise RuntimeError("the database refuses it")
        return created

    monkeypatch.setattr(schedules, "fire", breaking)
    assert sorted(job_id.split(":")[1] for job_id in lead(db, term(db), settings)) == ["a", "c"]
    assert (due(db), len(jobs(db))) == ([], 2)
    assert "refuses it" in get(db, "bad")["last_error"]
    assert [event["schedule_id"] for event in told(db, "schedule.missed")] == ["bad"]


def test_who_meets_another_at_the_first_job_of_a_lane_fires_all_the_same(maria_db, settings, monkeypatch):
    db = maria_db
    put(db)
    outage(db)

    def met(*args, **how):
        monkeypatch.setattr(lanes, "insert_rows", insert_rows)
        submit(db, pool_id=JOB["pool_id"])
        insert_rows(*args, **how)

    monkeypatch.setattr(lanes, "insert_rows", met)
    assert len(lead(db, term(db), settings)) == 1
    assert (told(db, "schedule.missed"), get(db)["last_error"]) == ([], None)


def test_two_who_make_the_same_schedule_at_once_both_do(maria_db, monkeypatch):
    monkeypatch.setattr(schedules, "clock", meeting(2, clock))  # both have found nothing before
    with ThreadPoolExecutor() as threads:
        made = list(threads.map(lambda every: put(maria_db, every_seconds=every), [60.0, 120.0]))
    assert sorted(made) == [False, True]
    assert get(maria_db)["version"] == 2


def test_a_schedule_that_is_being_changed_is_left_for_later(maria_db):
    db = maria_db
    put(db)
    outage(db)
    with db.engine.begin() as operator:
        operator.execute(select(schema.schedules).with_for_update()).all()
        assert fire(db) == []
    assert len(fire(db)) == 1


def test_finding_what_is_due_reads_only_that(maria_db):
    db = maria_db
    put(db)
    (one,) = rows(db, schema.schedules)
    for first in range(0, 2000, 100):  # a transaction that waits for a busy machine is ended by the server
        some = [one._asdict() | {"schedule_id": f"s-{n:04}"} for n in range(first, first + 100)]
        with db.engine.begin() as conn:
            conn.execute(schema.schedules.insert(), some)
    outage(db)
    assert due(db) == ["s"]
    with db.engine.connect() as conn:
        conn.exec_driver_sql("FLUSH STATUS")
        schedules.due(conn, 100)
        reads = dict(conn.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all())
    assert sum(map(int, reads.values())) < 20, reads
