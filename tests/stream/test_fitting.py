"""Reading only what can run now: whole batches, nothing twice, nothing that others could run meanwhile."""

import pytest

from orchestrator.batching import Seats
from orchestrator.jobs import Ready
from orchestrator.stream.lane import MAX_READ


@pytest.fixture
def lane(hub):
    return hub.lane("default")


@pytest.fixture
def reader(hub, lane):
    return hub.reader(lane, "w1")


def announce(lane, types):
    """One job a letter: `a` and `b` are batched by three, `x` is not."""
    lane.announce([Ready(f"{type}{n}", type, None) for n, type in enumerate(types)])


def read(reader, seats):
    entries = reader.read_fitting(seats)
    assert all(seats.take(entry.type) for entry in entries)
    return "".join(entry.type for entry in entries)


def seats(slots):
    return Seats(slots, {"a": 3, "b": 3})


@pytest.mark.parametrize(
    ("slots", "waiting", "taken", "blocked"),
    [
        (1, "aaaaa", "aaa", True),
        (2, "aaaaa", "aaaaa", False),
        (1, "aax", "aa", True),
        (1, "xaa", "x", True),
        (2, "axaax", "axaa", True),
        (2, "abab", "abab", False),
        (1, "abab", "a", True),
        (3, "xx", "xx", False),
        (2, "", "", False),
        (2, "aaaaaaax", "aaaaaa", True),
    ],
)
def test_entries_are_read_while_they_fit_and_no_further(lane, reader, raw, slots, waiting, taken, blocked):
    lane.ensure_group()
    announce(lane, waiting)
    places = seats(slots)
    assert read(reader, places) == taken
    assert places.blocked is blocked
    assert raw.xpending(lane.key, lane.group)["pending"] == len(taken)
    assert [entry.type for entry in reader.read(100, 1)] == list(waiting[len(taken) :])


def test_a_batch_goes_on_where_the_last_read_ended(lane, reader):
    places = seats(1)
    announce(lane, "a")
    assert read(reader, places) == "a" and places.waiting
    announce(lane, "aaa")
    assert read(reader, places) == "aa" and not places.waiting
    assert read(reader, places) == ""


def test_one_read_brings_no_more_than_one_transaction_should_claim(lane, reader):
    announce(lane, "a" * (MAX_READ + 10))
    places = Seats(2, {"a": MAX_READ})
    assert len(reader.read_fitting(places)) == MAX_READ
    assert places.blocked and not places.waiting


def test_two_readers_never_get_the_same(lane, hub):
    announce(lane, "aaaaaa")
    one, two = hub.reader(lane, "w1"), hub.reader(lane, "w2")
    found = [entry.job_id for reader in (one, two) for entry in reader.read_fitting(seats(1))]
    assert found == [f"a{n}" for n in range(6)]


def test_deleted_entries_are_no_obstacle(lane, reader, raw):
    announce(lane, "xxaaa")
    gone = [entry_id for entry_id, _ in raw.xrange(lane.key, count=2)]
    raw.xdel(lane.key, *gone)
    assert read(reader, seats(1)) == "aaa"


def test_whatever_others_write_takes_a_slot_of_its_own(lane, reader, raw):
    raw.xadd(lane.key, {"nothing": "known"})
    announce(lane, "a")
    entries = reader.read_fitting(seats(2))
    assert [(entry.job_id, entry.type) for entry in entries] == [(None, ""), ("a0", "a")]


@pytest.mark.parametrize("destroy", ["DEL", "XGROUP DESTROY"])
def test_a_lost_group_is_created_anew(lane, reader, raw, destroy):
    announce(lane, "a")
    assert read(reader, seats(1)) == "a"
    if destroy == "DEL":
        raw.delete(lane.key)
    else:
        raw.xgroup_destroy(lane.key, lane.group)
        raw.xtrim(lane.key, 0)
    assert reader.read_fitting(seats(1)) == []
    announce(lane, "b")
    assert read(reader, seats(1)) == "b"


def test_waiting_takes_nothing_from_anybody(lane, reader, raw):
    lane.ensure_group()
    reader.wait_for_more(1)
    announce(lane, "a")
    reader.wait_for_more(1)
    assert raw.xpending(lane.key, lane.group)["pending"] == 0


def test_whoever_waits_longer_than_a_connection_does_is_not_cut_off(settings, reader):
    reader.wait_for_more(round(1000 * settings().redis_timeout_s) + 500)
