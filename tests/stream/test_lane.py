"""A lane: entries announce jobs, a group delivers them, acknowledging removes them."""

from contextlib import contextmanager

import pytest
from redis.exceptions import ResponseError

from orchestrator.errors import RedisUnavailable, StaleEpoch
from orchestrator.jobs import Ready
from orchestrator.stream.hub import Hub
from orchestrator.stream.lane import LEADER, Entry, Idle
from tests.waiting import wait_until


def ready(*names):
    return [Ready(name, "echo", None) for name in names]


def read(reader, count=100, block_ms=20):
    """All there is, as job ids; the first read of a consumer may show its own pending entries instead."""
    return [entry.job_id for entry in reader.read(count, block_ms)]


def pending(raw, lane):
    return raw.xpending(lane.key, lane.group)["pending"]


@pytest.fixture
def lane(hub):
    return hub.lane("default")


@pytest.fixture
def reader(hub, lane):
    return hub.reader(lane, "w1")


# --- names ---


def test_keys_and_groups_are_those_of_the_contract(hub):
    default, pool = hub.lane("default"), hub.lane("big")
    assert (default.key, default.group) == ("stream:orchestrator:inference_jobs", "cg:inference")
    assert (pool.key, pool.group) == ("stream:orchestrator:inference_jobs:big", "cg:inference:big")
    assert hub.lane("big") is pool


def test_the_prefix_is_a_setting(settings, redis_url, raw):
    other = Hub(settings(redis_url=redis_url, stream_prefix="mine:"))
    other.lane("default").announce(ready("j"))
    other.close()
    assert raw.keys("*") == ["mine:inference_jobs"]


# --- announce and read ---


def test_an_entry_names_the_job_and_carries_no_payload(lane, raw):
    lane.announce([Ready("j1", "embed", None), Ready("j2", "embed", "00-trace-01")])
    entries = [fields for _id, fields in raw.xrange(lane.key)]
    assert entries == [
        {"job_id": "j1", "type": "embed"},
        {"job_id": "j2", "type": "embed", "trace": "00-trace-01"},
    ]


def test_a_group_sees_what_was_announced_before_it_existed(lane, reader):
    lane.announce(ready("early"))
    assert read(reader) == ["early"]


def test_each_entry_goes_to_one_consumer_in_order(hub, lane, reader):
    other = hub.reader(lane, "w2")
    lane.announce(ready("a", "b", "c", "d"))
    assert [read(reader, 1), read(other, 2), read(reader, 5)] == [["a"], ["b", "c"], ["d"]]


def test_no_more_than_asked_for_is_read(lane, reader, raw):
    lane.announce(ready("a", "b", "c"))
    assert read(reader, 2) == ["a", "b"]
    assert pending(raw, lane) == 2


def test_an_idle_read_waits_its_time_and_returns_nothing(reader, raw):
    assert read(reader, block_ms=50) == []
    before = raw.info("commandstats")["cmdstat_xreadgroup"]["calls"]
    assert [read(reader, block_ms=50) for _ in range(3)] == [[], [], []]
    assert raw.info("commandstats")["cmdstat_xreadgroup"]["calls"] - before == 3


def test_a_lane_is_created_by_its_first_reader(reader, lane, raw):
    assert read(reader) == []
    assert [group["name"] for group in raw.xinfo_groups(lane.key)] == [lane.group]


# --- acknowledge ---


def test_acknowledging_deletes(lane, reader, raw):
    lane.announce(ready("a", "b"))
    entries = reader.read(10, 20)
    lane.ack([entries[0].entry_id])
    assert [fields["job_id"] for _id, fields in raw.xrange(lane.key)] == ["b"]
    assert pending(raw, lane) == 1
    lane.ack([])
    lane.ack([entry.entry_id for entry in entries])
    assert (lane.length(), pending(raw, lane)) == (0, 0)


def test_a_late_acknowledgement_of_the_old_entry_does_not_hurt_the_new_one(lane, reader, raw):
    lane.announce(ready("j"))
    (old,) = reader.read(1, 20)
    lane.announce(ready("j"))
    (new,) = reader.read(1, 20)
    lane.ack([old.entry_id])
    lane.ack([old.entry_id])
    assert [entry_id for entry_id, _ in raw.xrange(lane.key)] == [new.entry_id]
    assert pending(raw, lane) == 1


@contextmanager
def counting(raw, command):
    """How often the server ran this command meanwhile."""

    def calls():
        return raw.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]

    before = calls()
    yield lambda: calls() - before


def test_a_leader_acknowledges_under_its_epoch_and_an_older_one_is_refused(lane, reader, raw):
    lane.announce(ready("a", "b", "c"))
    first, second, third = (entry.entry_id for entry in reader.read(10, 20))
    lane.ack_as_leader(7, [first])
    lane.ack_as_leader(8, [second])
    with pytest.raises(StaleEpoch):
        lane.ack_as_leader(7, [third])
    assert [entry_id for entry_id, _ in raw.xrange(lane.key)] == [third]
    assert pending(raw, lane) == 1
    with counting(raw, "set") as writes:
        lane.ack_as_leader(8, [third])
    assert writes() == 0, "the epoch stands there already"
    lane.ack_as_leader(9, [])
    assert lane.length() == 0
    with pytest.raises(StaleEpoch):
        lane.ack_as_leader(5, [third])


def test_epochs_are_compared_as_numbers(lane, reader):
    lane.announce(ready("a", "b"))
    first, second = (entry.entry_id for entry in reader.read(10, 20))
    lane.ack_as_leader(9, [first])
    lane.ack_as_leader(10, [second])
    assert lane.length() == 0


def test_scripts_survive_script_flush(lane, reader, raw):
    """F-20."""
    lane.announce(ready("a"))
    (entry,) = reader.read(1, 20)
    raw.script_flush()
    lane.ack_as_leader(1, [entry.entry_id])
    raw.script_flush()
    assert lane.forget_consumer("w1") is True


# --- idle entries ---


def walk(lane, idle_ms=0, count=5):
    entries, deleted, cursor, steps = [], [], "0-0", 0
    while True:
        step = lane.take_idle(1, cursor, idle_ms, count)
        entries += step.entries
        deleted += step.deleted
        cursor, steps = step.cursor, steps + 1
        if cursor == "0-0":
            return entries, deleted, steps
        assert steps < 1000


def test_the_walk_over_idle_entries_reaches_all_of_them(lane, reader):
    """docket#467: beginning at 0-0 every time, entries behind the first COUNT × 10 were never reached."""
    names = [f"j{n}" for n in range(120)]
    lane.announce(ready(*names))
    reader.read(200, 20)
    entries, deleted, steps = walk(lane, count=5)
    assert [entry.job_id for entry in entries] == names
    assert deleted == []
    assert steps >= 24


def test_a_walk_past_many_busy_entries_still_reaches_the_idle_one(hub, lane, raw):
    """One step looks at COUNT × 10 entries: it may return nothing and yet not be at the end."""
    names = [f"j{n}" for n in range(120)]
    lane.announce(ready(*names))
    entries = hub.reader(lane, "w1").read(200, 20)
    raw.xclaim(lane.key, lane.group, "w1", 0, [entries[-1].entry_id], idle=60_000, justid=True)
    idle, _, steps = walk(lane, idle_ms=30_000, count=5)
    assert [entry.job_id for entry in idle] == ["j119"]
    assert steps >= 3


def test_deleted_entries_are_reported_by_the_walk(lane, reader, raw):
    """INV-8: otherwise they would vanish from the pending list without a word."""
    lane.announce(ready("a", "b", "c"))
    entries = reader.read(10, 20)
    raw.xdel(lane.key, entries[1].entry_id)
    taken, deleted, _ = walk(lane)
    assert [entry.job_id for entry in taken] == ["a", "c"]
    assert deleted == [entries[1].entry_id]


def test_only_entries_idle_long_enough_are_taken(lane, reader):
    lane.announce(ready("a"))
    reader.read(1, 20)
    assert walk(lane, idle_ms=60_000) == ([], [], 1)
    assert lane.take_idle(1, "0-0", 0, 10).entries[0].job_id == "a"


def test_a_lane_that_does_not_exist_has_nothing_idle(lane):
    assert walk(lane) == ([], [], 1)
    assert lane.idle_consumers(0) == []
    assert (lane.length(), lane.survey(10).coming) == (0, set())


def test_idle_entries_belong_to_the_leader_afterwards(lane, reader, raw):
    lane.announce(ready("a"))
    reader.read(1, 20)
    lane.take_idle(1, "0-0", 0, 10)
    assert [c["name"] for c in raw.xpending(lane.key, lane.group)["consumers"]] == [LEADER]


def test_a_leader_that_was_replaced_takes_nothing_over(lane, reader, raw):
    lane.announce(ready("a"))
    reader.read(1, 20)
    lane.ack_as_leader(8, ["1-1"])
    with pytest.raises(StaleEpoch):
        lane.take_idle(7, "0-0", 0, 10)
    assert [c["name"] for c in raw.xpending(lane.key, lane.group)["consumers"]] == ["w1"]
    assert len(lane.take_idle(8, "0-0", 0, 10).entries) == 1


# --- consumers ---


def test_a_consumer_with_pending_entries_is_not_forgotten(lane, reader, raw):
    """redis#9745: deleting it would destroy them."""
    lane.announce(ready("a"))
    (entry,) = reader.read(1, 20)
    assert lane.idle_consumers(0) == []
    assert lane.forget_consumer("w1") is False
    assert pending(raw, lane) == 1
    lane.ack([entry.entry_id])
    assert lane.idle_consumers(0) == ["w1"]
    assert lane.idle_consumers(60_000) == []
    assert lane.forget_consumer("w1") is True
    assert raw.xinfo_consumers(lane.key, lane.group) == []


def test_announced_jobs_are_known_delivered_or_not(lane, reader):
    lane.announce(ready("a", "b", "c"))
    reader.read(1, 20)
    assert lane.survey(10).coming == {"a", "b", "c"}
    assert lane.survey(2).coming == {"a", "b"}
    assert lane.length() == 3


def test_entries_that_nobody_will_get_are_told_apart(lane, reader, raw):
    """F-13: a deleted consumer takes its pending entries along; XGROUP SETID may jump over those not yet read."""
    lane.ensure_group()
    lane.announce(ready("held", "lost", "jumped"))
    held, lost = reader.read(2, 20)
    raw.xclaim(lane.key, lane.group, "w2", 0, [lost.entry_id])
    raw.xgroup_delconsumer(lane.key, lane.group, "w2")
    raw.xgroup_setid(lane.key, lane.group, "$")
    lane.announce(ready("new"))
    assert lane.survey(10).coming == {"held", "new"}
    assert len(lane.survey(10).skipped) == 2
    assert held.entry_id not in lane.survey(10).skipped


# --- garbage ---


@pytest.mark.parametrize(
    "fields",
    [
        {"hello": "world"},
        {"job_id": ""},
        {"job_id": b"\xff\xfe\x00"},
        {b"\xff": b"\x00" * 1000},
        {"job_id": "ключ"},
    ],
)
def test_garbage_is_delivered_as_an_entry_without_a_job(lane, reader, raw, fields):
    """BI-20: whoever can write to the stream must not be able to stop it."""
    entry_id = raw.xadd(lane.key, fields)
    lane.announce(ready("good"))
    assert reader.read(10, 20)[0] == Entry(entry_id, None)
    assert lane.survey(10).coming == {"good"}
    assert [entry.job_id for entry in walk(lane)[0]] == [None, "good"]
    lane.ack([entry_id])
    assert lane.length() == 1


def test_an_entry_deleted_while_pending_is_read_back_without_a_job(hub, lane, raw):
    lane.announce(ready("a", "b"))
    entries = hub.reader(lane, "w1").read(10, 20)
    raw.xdel(lane.key, entries[0].entry_id)
    assert [entry.job_id for entry in hub.reader(lane, "w1").read(10, 20)] == [None, "b"]


def test_a_key_of_another_type_is_an_error_not_a_crash(hub, lane, raw):
    raw.set(lane.key, "not a stream")
    for call in (
        lambda: lane.ack(["1-1"]),
        lambda: lane.ack_as_leader(1, ["1-1"]),
        lambda: hub.reader(lane, "w").read(1, 20),
    ):
        with pytest.raises(RedisUnavailable):
            call()


LAST = "18446744073709551615-18446744073709551615"


LOOKS = {
    "unread": lambda lane: lane.unread() == 0,
    "length": lambda lane: lane.length() == 0,
    "survey": lambda lane: lane.survey(10) == (set(), []),
    "take_idle": lambda lane: lane.take_idle(1, "0-0", 0, 10) == Idle("0-0", (), ()),
}


@pytest.mark.parametrize("call", ["announce", *LOOKS])
def test_a_key_of_another_type_is_put_aside_and_kept(hub, lane, raw, call):
    raw.set(lane.key, "somebody's")
    if call != "announce":
        assert LOOKS[call](lane)
        assert raw.type(lane.key) == "none"
    lane.announce(ready("a"))
    assert [entry.job_id for entry in hub.reader(lane, "w").read(1, 20)] == ["a"]
    (aside,) = raw.keys(f"{{{lane.key}}}:aside:*")
    assert raw.get(aside) == "somebody's"


def test_a_stream_without_ids_left_is_started_over(hub, lane, raw):
    """BI-20: after this entry every XADD with an id of the server's own fails, also when the entry is deleted."""
    reader = hub.reader(lane, "w")
    assert reader.read(1, 20) == []
    raw.xadd(lane.key, {"job_id": "poison"}, id=LAST)
    raw.xdel(lane.key, LAST)
    lane.announce(ready("a", "b"))
    assert lane.survey(10).coming == {"a", "b"}
    wait_until(lambda: [entry.job_id for entry in reader.read(2, 20)] == ["a", "b"], what="the lane is read again")


def test_only_what_is_beyond_use_is_started_over(lane, raw, monkeypatch):
    """Another publisher may have mended the lane between our error and our remedy."""
    lane.announce(ready("a"))
    failed = iter([ResponseError("ERR The stream has exhausted the last possible ID, unable to add more items")])
    announce = lane._announce

    def first_fails(**given):
        for error in failed:
            raise error
        return announce(**given)

    monkeypatch.setattr(lane, "_announce", first_fails)
    lane.announce(ready("b"))
    assert lane.survey(10).coming == {"a", "b"}


@pytest.mark.parametrize("nonsense", ["abc", "", "-1", "1e300", "9" * 30, "0x7f"])
def test_an_epoch_that_is_no_number_does_not_stop_the_leader(lane, reader, raw, nonsense):
    lane.announce(ready("a"))
    (entry,) = reader.read(1, 20)
    raw.set(f"{{{lane.key}}}:epoch", nonsense)
    lane.ack_as_leader(3, [entry.entry_id])
    assert lane.length() == 0
    assert raw.get(f"{{{lane.key}}}:epoch") == "3"


def test_a_new_leader_works_on_a_server_that_is_full(lane, reader, raw):
    """It can add nothing there, its epoch neither; but what it acknowledges gives memory back."""
    lane.announce(ready("a", "b"))
    (first, second) = reader.read(2, 20)
    lane.ack_as_leader(3, [first.entry_id])
    raw.config_set("maxmemory", 1)
    try:
        assert [entry.entry_id for entry in lane.take_idle(4, "0-0", 0, 10).entries] == [second.entry_id]
        lane.ack_as_leader(4, [second.entry_id])
        assert lane.length() == 0
    finally:
        raw.config_set("maxmemory", 0)


def test_an_epoch_of_another_type_does_not_stop_the_leader(lane, reader, raw):
    lane.announce(ready("a"))
    (entry,) = reader.read(1, 20)
    raw.rpush(f"{{{lane.key}}}:epoch", "3")
    lane.ack_as_leader(3, [entry.entry_id])
    assert lane.length() == 0


def test_a_refusal_tells_the_epoch_that_refused(lane, reader):
    lane.announce(ready("a"))
    (entry,) = reader.read(1, 20)
    lane.ack_as_leader(41, [entry.entry_id])
    with pytest.raises(StaleEpoch) as refused:
        lane.ack_as_leader(2, [entry.entry_id])
    assert refused.value.newest == 41


# --- the hub ---


def test_a_server_that_may_evict_streams_is_warned_about(hub, raw):
    assert hub.warnings() == []
    raw.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (warning,) = hub.warnings()
    finally:
        raw.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru" in warning
    assert "noeviction" in warning
