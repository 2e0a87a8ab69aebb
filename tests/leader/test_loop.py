"""The leader's threads: duties run while the term lasts, and a broken one does not stop the others."""

import logging

import pytest
from sqlalchemy import delete, update

from orchestrator.errors import DatabaseUnavailable
from orchestrator.leader import loop
from orchestrator.leader.duties import DUTIES, Duty
from orchestrator.leader.loop import LeaderLoop
from orchestrator.leader.term import Candidate
from orchestrator.publisher import Publisher
from orchestrator.store import leadership, schema
from orchestrator.store.clock import AHEAD_S
from tests.factories import hire, row, status, submit
from tests.waiting import wait_until


@pytest.fixture
def config(db_url, redis_url, settings):
    """A term that no busy machine ends."""
    return settings(database_url=db_url, redis_url=redis_url, leader_ttl_s=30.0)


@pytest.fixture
def leaders(db_url, hub, config, open_database):
    made = []

    def make(holder="leader"):
        opened = open_database(db_url)
        made.append(LeaderLoop(opened, hub, Publisher(opened, hub, config), config, holder))
        made[-1].start()
        return made[-1]

    yield make
    for leader in made:
        leader.close()


def leading(db, config):
    return db.read(lambda conn: leadership.current(conn, config.leader_lock))


def test_a_leader_publishes_rescues_and_resigns(db, raw, config, leaders):
    hand, (job_id,) = hire(db), submit(db)
    hand.go_silent(-0.9 * AHEAD_S)  # it speaks for as long as this takes
    leader = leaders()
    wait_until(lambda: raw.xlen("stream:orchestrator:inference_jobs") == 1, what="the job is announced")
    hand.claim(job_id)
    hand.go_silent()
    wait_until(lambda: status(db, job_id) == "pending", what="the dead worker's job waits again")
    assert row(db, job_id).crashes == 1
    epoch = leader.term.epoch
    leader.close()
    assert leader.term is None
    assert (leading(db, config).alive, leading(db, config).epoch) == (False, epoch)


def test_the_dead_are_found_although_the_clock_was_set_back(db, raw, leaders):
    """F-31: all that was written before lies an hour ahead. Who lives says so again."""
    dead, alive = hire(db), hire(db)
    lost, kept = submit(db, 2)
    dead.claim(lost)
    alive.claim(kept)
    for hand in (dead, alive):
        hand.go_silent(-3600.0)
    leaders()

    def rescued():
        alive.beat(busy=1)
        return status(db, lost) == "pending"

    wait_until(rescued, what="the dead worker's job waits again")
    assert (status(db, kept), row(db, kept).attempt) == ("claimed", 1)


def test_the_next_leader_takes_over_and_does_the_duties(db, raw, config, leaders):
    one = leaders("one")
    wait_until(lambda: one.term, what="one leads")
    other = leaders("other")
    one.close()
    wait_until(lambda: other.term, what="the other one leads")
    assert other.term.epoch == 2
    submit(db)
    wait_until(lambda: raw.xlen("stream:orchestrator:inference_jobs") == 1, what="the job is announced")


def test_a_duty_that_breaks_or_fails_does_not_stop_the_others(raw, leaders, monkeypatch, caplog):
    runs = {"breaks": 0, "fails": 0, "works": 0}

    def breaks(_context):
        runs["breaks"] += 1
        raise RuntimeError("a bug")

    def fails(_context):
        runs["fails"] += 1
        raise DatabaseUnavailable("away")

    def works(_context):
        runs["works"] += 1
        return 0

    table = tuple(Duty(f.__name__, lambda _s: 0.01, f) for f in (breaks, fails, works))
    monkeypatch.setattr(loop, "DUTIES", table)
    caplog.set_level(logging.WARNING)
    leaders()
    wait_until(lambda: min(runs.values()) >= 3, what="every duty runs again")
    assert "a bug" in caplog.text
    assert len(DUTIES) > len(table)


def test_a_duty_that_fails_again_and_again_is_told_once_and_so_is_its_success(
    hub, config, open_database, db_url, caplog
):
    caplog.set_level(logging.INFO, "orchestrator.leader.loop")
    opened = open_database(db_url)
    leader = LeaderLoop(opened, hub, Publisher(opened, hub, config), config, "leader")
    leader._candidate.tick()
    away, answers = DatabaseUnavailable("away"), iter("fff.f.")
    away.add_note("lane a")

    def flickers(_context):
        if next(answers) == "f":
            raise away
        return 7

    duty = Duty("flickers", lambda _s: 0.0, flickers)
    context = leader._current_context()
    assert context is not None
    assert [leader._run(duty, context) for _ in range(6)] == [0, 0, 0, 7, 0, 7]
    assert [record.message for record in caplog.records] == ["duty failed", "duty works again"] * 2
    assert vars(caplog.records[0])["error"] == "away, lane a"
    leader.close()


def test_no_duty_runs_without_a_term(db, config, leaders, monkeypatch, caplog):
    monkeypatch.setattr(Candidate, "tick", lambda _self: None)
    ran = []

    def never(_context):
        ran.append(1)
        return 0

    monkeypatch.setattr(loop, "DUTIES", (Duty("never", lambda _s: 0.0, never),))
    leader = leaders()
    leader._threads[1].join(0.3)
    assert leader._threads[1].is_alive()
    assert ran == []


def test_an_election_that_breaks_is_tried_again(leaders, monkeypatch, caplog):
    tick, broken = Candidate.tick, [True]

    def break_once(self):
        if broken:
            broken.pop()
            raise RuntimeError("a bug in the election")
        tick(self)

    monkeypatch.setattr(Candidate, "tick", break_once)
    leader = leaders()
    wait_until(lambda: leader.term, what="it leads all the same")
    assert "a bug in the election" in caplog.text


def test_an_epoch_set_back_in_the_database_is_made_good(db, hub, raw, leaders, config):
    """BI-21: Redis remembers a higher epoch and refuses the new one; after a while nobody could lead any more."""
    lane = hub.lane("default")
    submit(db)
    leader = leaders()
    wait_until(lambda: lane.length() == 1, what="the job is announced")
    lane.ack_as_leader(50, ["1-1"])
    db.write(lambda conn: conn.execute(update(schema.leadership).values(epoch=3)))
    raw.xadd(lane.key, {"job_id": "nobody-knows"})
    hub.reader(lane, "dead").read(10, 20)
    wait_until(lambda: "nobody-knows" not in lane.survey(10).coming, what="the leader removes what nobody will finish")
    wait_until(lambda: leader.term, what="it leads")
    assert leader.term.epoch == leading(db, config).epoch > 50


def test_a_leadership_row_that_was_deleted_is_made_anew(db, leaders, config):
    leader = leaders()
    wait_until(lambda: leader.term, what="it leads")
    db.write(lambda conn: conn.execute(delete(schema.leadership)))
    wait_until(lambda: leading(db, config).alive and leader.term, what="it leads again")
