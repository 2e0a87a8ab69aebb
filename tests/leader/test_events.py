"""Events become jobs: once each, whoever dies; poison goes to the dead letters and holds up nobody."""

import json
import time
from concurrent.futures import Future

import pytest
from redis import Redis as Client

from orchestrator import ingest
from orchestrator.daemon import Orchestrator
from orchestrator.errors import InvalidInput, Overloaded, Paused, RedisUnavailable, Unavailable
from orchestrator.ingest import Ingest
from orchestrator.policies import Scope, parse
from orchestrator.store import policies, schema
from orchestrator.store.submit import submit_jobs
from orchestrator.stream.ingest import GROUP
from orchestrator.telemetry import seldom
from tests.factories import POLICY, rows
from tests.servers import Redis
from tests.waiting import wait_until

KEY, DLQ = "stream:orchestrator:ingest_events", "stream:orchestrator:dlq"
ARTICLE = {"type": "embed", "payload": {"text": {"$field": "title"}}, "agent": "reader"}


def trigger(db, name="embed", event="article", enabled=True, **job):
    document = parse(Scope.TRIGGER, {"event": event, "job": ARTICLE | job, "enabled": enabled})
    db.write(lambda conn: policies.put(conn, Scope.TRIGGER, name, document))


def send(raw, event="article", payload='{"title": "t"}', **fields):
    return raw.xadd(KEY, {"type": event, "payload": payload} | fields)


def jobs(db):
    return {job.job_id: job for job in rows(db, schema.jobs)}


def letters(raw):
    return [(fields["reason"], fields["origin_id"]) for _id, fields in raw.xrange(DLQ)]


def left(raw):
    """Entries in the stream, and those of them that somebody holds."""
    return raw.xlen(KEY), raw.xpending(KEY, GROUP)["pending"]


class Door:
    """The way into the store: open, unless the test says what it answers."""

    def __init__(self, db):
        self._db = db
        self.says = []
        self.asked = 0
        #: By agent.
        self.refuses = {}

    def submit(self, new_jobs):
        self.asked += 1
        if refusals := [self.refuses[job.spec.agent] for job in new_jobs if job.spec.agent in self.refuses]:
            refused: Future = Future()
            refused.set_result(refusals)
            return refused
        said = self.says.pop(0) if self.says else None
        if isinstance(said, Overloaded):
            raise said
        answer: Future = Future()
        if isinstance(said, Exception):
            answer.set_exception(said)
        elif said is not None:
            answer.set_result(said)
        else:
            answer.set_result(submit_jobs(self._db, new_jobs, POLICY))
        return answer


@pytest.fixture
def door(db):
    return Door(db)


@pytest.fixture
def hire_reader(db, hub, config, door, monkeypatch):
    monkeypatch.setattr(ingest, "SOONEST_S", 0.0)
    monkeypatch.setattr(ingest, "LATEST_S", 0.0)
    hired = []

    def hire(name="one"):
        reader = Ingest(db, hub, config, policies.Copy(), door.submit, name)
        hired.append(reader)
        reader.step()  # makes the group
        return reader

    yield hire
    for reader in hired:
        reader.close()


@pytest.fixture
def reader(hire_reader):
    return hire_reader()


def test_an_event_becomes_a_job_and_leaves(db, raw, reader):
    trigger(db)
    entry_id = send(raw, event_id="a-1")
    send(raw, payload='{"title": "u"}')
    reader.step()
    found = jobs(db)
    assert json.loads(found["embed:a-1"].payload) == {"text": "t"}
    assert {(job.type, job.agent) for job in found.values()} == {("embed", "reader")}
    assert len(found) == 2
    assert entry_id not in str(raw.xrange(KEY))
    assert left(raw) == (0, 0)


def test_an_event_sets_off_all_its_triggers(db, raw, reader):
    trigger(db)
    trigger(db, "store", type="store")
    trigger(db, "off", enabled=False)
    trigger(db, "other", event="picture")
    send(raw, event_id="1")
    reader.step()
    assert jobs(db).keys() == {"embed:1", "store:1"}


def test_events_without_a_trigger_leave(db, raw, reader):
    trigger(db, event="picture")
    send(raw)
    send(raw, payload="not even JSON")
    reader.step()
    assert (jobs(db), letters(raw), left(raw)) == ({}, [], (0, 0))


def test_an_event_that_comes_twice_is_one_job(db, raw, reader):
    trigger(db)
    send(raw, event_id="1")
    send(raw, event_id="1")
    reader.step()
    assert (len(jobs(db)), letters(raw), left(raw)) == (1, [], (0, 0))


def test_who_dies_between_commit_and_acknowledgement_leaves_one_job(db, raw, hire_reader, monkeypatch):
    trigger(db)
    first, second = hire_reader("one"), hire_reader("two")
    entry_id = send(raw)

    def died(_ids):
        raise RedisUnavailable("killed")

    monkeypatch.setattr(first._events, "acknowledge", died)
    with pytest.raises(RedisUnavailable):
        first.step()
    assert (len(jobs(db)), left(raw)) == (1, (1, 1))
    raw.xclaim(KEY, GROUP, "one", 0, [entry_id], idle=60_000, justid=True)
    second._look_at = 0.0
    second.step()
    assert (len(jobs(db)), letters(raw), left(raw)) == (1, [], (0, 0))


def test_a_dead_readers_events_are_taken_over(db, raw, hire_reader, hub, config):
    trigger(db)
    second = hire_reader("two")
    ids = [send(raw, event_id=str(n)) for n in range(3)]
    dead = hub.events("dead")
    dead.read(10, 20)
    dead.ear.close()
    second.step()
    assert jobs(db) == {}
    raw.xclaim(KEY, GROUP, "dead", 0, ids, idle=config.claim_idle_ms, justid=True)
    second._look_at = 0.0
    second.step()
    assert (len(jobs(db)), left(raw)) == (3, (0, 0))


@pytest.mark.parametrize(
    "bad",
    [
        {"event": "no name"},
        {"payload": "{"},
        {"payload": "{}"},
        {"payload": '{"title": "' + "x" * 2_000_000 + '"}'},
        {"payload": '{"title": "\\ud800"}'},
    ],
)
def test_poison_goes_to_the_dead_letters_and_the_others_go_on(db, raw, reader, bad):
    trigger(db)
    first, entry_id, last = send(raw, event_id="1"), send(raw, **bad), send(raw, event_id="2")
    reader.step()
    assert jobs(db).keys() == {"embed:1", "embed:2"}
    assert letters(raw) == [("bad_event", entry_id)]
    assert left(raw) == (0, 0)
    assert first < entry_id < last


def test_one_trigger_that_fails_does_not_stop_another(db, raw, reader):
    trigger(db)
    trigger(db, "store", payload={"id": {"$field": "gone"}})
    send(raw, event_id="1")
    reader.step()
    assert (jobs(db).keys(), len(letters(raw)), left(raw)) == ({"embed:1"}, 1, (0, 0))


def test_an_event_is_not_given_up_while_one_of_its_jobs_may_still_come(db, raw, reader, door):
    trigger(db)
    trigger(db, "store", payload={"id": {"$field": "gone"}})
    door.says = [[Overloaded("rate")]]
    send(raw, event_id="1")
    reader.step()
    assert (jobs(db), letters(raw), left(raw)) == ({}, [], (1, 1))
    wait_until(lambda: reader.step() or left(raw) == (0, 0), what="it is handled")
    assert (jobs(db).keys(), len(letters(raw))) == ({"embed:1"}, 1)


def test_the_same_id_with_other_content_is_a_bad_event(db, raw, reader):
    trigger(db)
    send(raw, event_id="1")
    entry_id = send(raw, event_id="1", payload='{"title": "other"}')
    reader.step()
    assert (len(jobs(db)), letters(raw)) == (1, [("bad_event", entry_id)])


@pytest.mark.parametrize(
    "refusal",
    [Overloaded("too much"), Unavailable("away"), [Overloaded("rate", 3600.0)], [Unavailable("paused")]],
    ids=["raised", "failed", "rate", "answered"],
)
def test_who_is_told_to_come_later_comes_later(db, raw, reader, door, refusal):
    trigger(db)
    door.says = [refusal, refusal]
    send(raw, event_id="1")
    reader.step()
    assert (jobs(db), letters(raw), left(raw)) == ({}, [], (1, 1))
    send(raw, event_id="2")
    wait_until(lambda: reader.step() or len(jobs(db)) == 2, what="both are let in")
    assert (letters(raw), left(raw)) == ([], (0, 0))


def test_a_permanent_refusal_is_a_bad_event(db, raw, reader, door):
    trigger(db)
    door.says = [[InvalidInput("never")]]
    entry_id = send(raw)
    reader.step()
    assert (letters(raw), left(raw)) == ([("bad_event", entry_id)], (0, 0))


def test_what_breaks_again_and_again_is_poison(db, raw, reader, door):
    trigger(db)
    door.says = [RuntimeError("bug")] * ingest.MAX_BREAKS
    entry_id = send(raw)
    wait_until(lambda: reader.step() or letters(raw), what="it is given up")
    assert (door.asked, letters(raw), left(raw)) == (ingest.MAX_BREAKS, [("bad_event", entry_id)], (0, 0))


def test_no_more_is_read_than_can_be_held(db, raw, reader, door, monkeypatch):
    trigger(db)
    monkeypatch.setattr(ingest, "MAX_HELD", 3)
    monkeypatch.setattr(ingest, "LATEST_S", 3600.0)
    door.says = [[Overloaded("rate", 3600.0)]] * 3
    for n in range(5):
        send(raw, event_id=str(n))
    for _ in range(3):
        reader.step()
    assert (door.asked, left(raw)) == (3, (5, 3))
    for held in reader._held.values():
        held.due = 0.0
    wait_until(lambda: reader.step() or left(raw) == (0, 0), what="all are handled")
    assert len(jobs(db)) == 5


def test_who_is_refused_for_its_own_sake_keeps_nobody_out_and_is_not_forgotten(db, raw, reader, door, monkeypatch):
    for name in ("a", "b"):
        trigger(db, name, event=f"of-{name}", agent=name)
    monkeypatch.setattr(ingest, "MAX_HELD", 4)
    monkeypatch.setattr(ingest, "LATEST_S", 3600.0)
    door.refuses = {"a": Paused("agent:a", "", "later")}
    for n in range(10):
        send(raw, "of-a", event_id=str(n))
    send(raw, "of-b", event_id="1")
    wait_until(lambda: reader.step() or "b:1" in jobs(db), what="another's event is handled")
    assert (len(reader._held) <= 4, left(raw)) == (True, (10, 10))
    door.refuses = {}

    def later():
        """Nobody has touched them for a while."""
        for entry_id, _ in raw.xrange(KEY):
            raw.xclaim(KEY, GROUP, "one", 0, [entry_id], idle=3_600_000, justid=True)
        for held in reader._held.values():
            held.due = 0.0
        reader._look_at = 0.0
        reader.step()

    wait_until(lambda: later() or left(raw) == (0, 0), what="all are handled")
    assert (len(jobs(db)), letters(raw)) == (11, [])


def test_what_is_held_is_kept_from_others_and_dropped_when_it_is_gone(db, raw, hire_reader, door, monkeypatch):
    trigger(db)
    first, second = hire_reader("one"), hire_reader("two")
    monkeypatch.setattr(ingest, "LATEST_S", 3600.0)
    door.says = [[Overloaded("rate", 3600.0)]]
    entry_id = send(raw)
    first.step()
    raw.xclaim(KEY, GROUP, "one", 0, [entry_id], idle=60_000, justid=True)
    first._look_at = second._look_at = 0.0
    first.step()
    second.step()
    assert (first._held.keys(), second._held) == ({entry_id}, {})
    raw.flushall()
    first._look_at = 0.0
    first.step()
    assert first._held == {}


def test_a_flushed_server_is_read_on(db, raw, reader):
    trigger(db)
    raw.flushall()
    send(raw, event_id="1")
    wait_until(lambda: reader.step() or jobs(db), what="the group is made anew")
    assert left(raw) == (0, 0)


def test_a_whole_orchestrator_survives_a_restart_of_redis(db, db_url, settings, private_server):
    server = private_server(Redis)
    trigger(db)
    orchestrator = Orchestrator(settings(database_url=db_url, redis_url=server.url))
    orchestrator.start()
    try:
        with Client.from_url(server.url, decode_responses=True) as raw:
            send(raw, event_id="1")
            wait_until(lambda: jobs(db).keys() == {"embed:1"}, what="the first event is a job")
            server.stop()
            server.start()
            send(raw, event_id="2")
            wait_until(lambda: jobs(db).keys() == {"embed:1", "embed:2"}, what="the second one too")
            wait_until(lambda: left(raw) == (0, 0), what="both are acknowledged")
    finally:
        orchestrator.close()


def test_an_orchestrator_that_stops_does_not_wait_for_one_listener_after_the_other(
    db_url, redis_url, settings, monkeypatch
):
    orchestrator = Orchestrator(settings(database_url=db_url, redis_url=redis_url))
    told = []
    wait_for_events = orchestrator._ingest.close

    def close():
        told.append(orchestrator.leader._stop.is_set())
        wait_for_events()

    monkeypatch.setattr(orchestrator._ingest, "close", close)
    orchestrator.start()
    orchestrator.close()
    assert told == [True]


def test_an_orchestrator_that_stops_does_not_wait_until_its_listeners_have_heard_enough(
    db_url, redis_url, raw, settings
):
    """Both listen to Redis for a minute: ingest for events, the leader for pools."""
    times = {"redis_block_ms": 60_000, "redis_timeout_s": 90.0, "claim_idle_ms": 600_000}
    orchestrator = Orchestrator(settings(database_url=db_url, redis_url=redis_url, **times))
    orchestrator.start()
    wait_until(lambda: raw.info("clients")["blocked_clients"] == 2, what="both listen")
    begun = time.monotonic()
    orchestrator.close()
    assert time.monotonic() - begun < 30
    assert raw.info("clients")["blocked_clients"] == 0


def test_a_server_that_is_away_is_told_once_and_so_is_its_return(reader, monkeypatch, caplog):
    caplog.set_level("INFO", "orchestrator.ingest")

    def away():
        raise RedisUnavailable("redis://there: refused")

    def told():
        found = [record.message for record in caplog.records]
        caplog.clear()
        return found

    assert reader.attempt() and told() == []
    for _outage in range(2):
        with monkeypatch.context() as gone:
            gone.setattr(reader, "step", away)
            assert not any(reader.attempt() for _ in range(5))
        assert told() == ["events wait"]
        assert reader.attempt() and reader.attempt() and told() == ["events flow again"]
    monkeypatch.setattr(seldom, "WARN_EVERY_S", 0.0)  # it stays away for long
    monkeypatch.setattr(reader, "step", away)
    assert not any(reader.attempt() for _ in range(2)) and told() == ["events wait"] * 2
