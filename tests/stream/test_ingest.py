"""The stream of events: each goes to one reader, at least once, whatever becomes of readers and keys."""

import pytest

from orchestrator.errors import RedisUnavailable
from orchestrator.stream.hub import Hub
from orchestrator.stream.ingest import GROUP
from tests.servers import Redis, Valkey
from tests.waiting import wait_until

KEY = "stream:orchestrator:ingest_events"


def add(raw, *names):
    return [raw.xadd(KEY, {"type": name, "payload": "{}"}) for name in names]


def read(events, count=100, block_ms=20):
    return [delivery.fields[b"type"].decode() for delivery in events.read(count, block_ms)]


@pytest.fixture
def events(hub):
    """A reader whose group exists."""
    opened = hub.events("one")
    opened.read(1, 1)
    yield opened
    opened.ear.close()


@pytest.fixture
def other(hub):
    opened = hub.events("two")
    yield opened
    opened.ear.close()


def test_names_are_those_of_the_contract(raw, events):
    assert [group["name"] for group in raw.xinfo_groups(KEY)] == ["cg:ingest:orchestrator"]


def test_what_came_before_the_first_reader_is_read(hub, raw):
    add(raw, "early")
    events = hub.events("one")
    assert [read(events), read(events)] == [[], ["early"]]
    events.ear.close()


def test_an_event_goes_to_one_reader(raw, events, other):
    add(raw, "a", "b", "c")
    assert (read(events, 1), read(other), read(events)) == (["a"], ["b", "c"], [])


def test_acknowledging_deletes(raw, events):
    (entry_id,) = add(raw, "a")
    read(events)
    events.acknowledge([entry_id])
    events.acknowledge([])
    assert (raw.xlen(KEY), raw.xpending(KEY, GROUP)["pending"]) == (0, 0)


def test_what_a_dead_reader_left_is_taken_over_in_parts(raw, events, other):
    add(raw, "a", "b", "c")
    read(events)
    assert other.take_over(60_000, 10) == []
    taken = []
    while found := other.take_over(0, 2):
        taken += [delivery.fields[b"type"] for delivery in found]
        other.acknowledge([delivery.entry_id for delivery in found])
    assert taken == [b"a", b"b", b"c"]
    assert raw.xlen(KEY) == 0


def test_what_is_kept_is_not_taken_over(raw, events, other):
    ids = add(raw, "a", "b")
    read(events)
    raw.xclaim(KEY, GROUP, "one", 0, ids, idle=60_000, justid=True)
    assert events.keep(ids[:1]) == set(ids[:1])
    assert [delivery.entry_id for delivery in other.take_over(30_000, 10)] == ids[1:]


def test_keeping_tells_what_is_gone(raw, events):
    ids = add(raw, "done", "deleted", "kept")
    read(events)
    events.acknowledge(ids[:1])
    raw.xdel(KEY, ids[1])
    assert events.keep(ids) == {ids[2]}
    assert events.keep([]) == set()
    raw.flushall()
    assert events.keep(ids) == set()


def test_deleted_entries_are_no_trouble(raw, events, other, caplog):
    ids = add(raw, "a", "b")
    read(events)
    raw.xdel(KEY, ids[0])
    assert [delivery.entry_id for delivery in other.take_over(0, 10)] == ids[1:]
    assert "deleted events" in caplog.text
    assert raw.xpending(KEY, GROUP)["pending"] == 1


@pytest.mark.parametrize("loss", ["FLUSHALL", "XGROUP DESTROY"])
def test_a_lost_group_is_made_anew_at_the_beginning(raw, events, loss):
    add(raw, "a")
    assert read(events) == ["a"]
    raw.flushall() if loss == "FLUSHALL" else raw.xgroup_destroy(KEY, GROUP)
    assert events.take_over(0, 10) == []
    add(raw, "b")
    assert read(events) == []
    assert read(events) == (["b"] if loss == "FLUSHALL" else ["a", "b"])


def test_readers_that_are_gone_are_forgotten_unless_something_is_theirs(raw, events, other, monkeypatch):
    monkeypatch.setattr("orchestrator.stream.ingest.CONSUMER_IDLE_MS", 0)
    add(raw, "a")
    assert (read(other), read(events)) == (["a"], [])
    events.forget_consumers()
    assert [consumer["name"] for consumer in raw.xinfo_consumers(KEY, GROUP)] == ["two"]


@pytest.mark.parametrize("kind", [Redis, Valkey])
def test_a_restart_is_survived(private_server, settings, kind):
    server = private_server(kind)
    hub = Hub(settings(redis_url=server.url))
    events = hub.events("one")
    events.read(1, 1)
    server.stop()
    with pytest.raises(RedisUnavailable):
        events.read(1, 1)
    server.start()
    wait_until(lambda: events.read(1, 20) == [], what="reading goes on")
    events.ear.close()
    hub.close()
