"""Faults on the way to the stream server: flushed keys, lost replies, half-open connections, restarts."""

import socket
import time

import pytest

from orchestrator.errors import RedisUnavailable
from orchestrator.jobs import Ready
from orchestrator.stream.hub import Hub
from tests.proxy import Proxy
from tests.servers import Redis, Valkey
from tests.waiting import wait_until

#: Seconds that an answer through the proxy may take: long for a busy machine, short for who waits in vain.
TIMEOUT_S = 2.0


def ready(*names):
    return [Ready(name, "echo", None) for name in names]


def read(reader, count=100, block_ms=50):
    return [entry.job_id for entry in reader.read(count, block_ms)]


def read_until(reader, enough):
    seen = []

    def look():
        seen.extend(read(reader))
        return enough(seen)

    wait_until(look, what="reading goes on")
    return seen


def calls(raw, command):
    return raw.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


@pytest.fixture
def proxy(redis_url, raw):
    with Proxy(raw.connection_pool.connection_kwargs["port"]) as proxy:
        yield proxy


@pytest.fixture
def far(proxy, settings):
    """A hub whose way to the server leads through the proxy."""
    opened = Hub(settings(redis_url=f"redis://127.0.0.1:{proxy.port}/0", redis_timeout_s=TIMEOUT_S))
    yield opened
    opened.close()


# --- lost keys ---


@pytest.mark.parametrize("loss", ["FLUSHALL", "DEL", "XGROUP DESTROY"])
def test_a_lost_group_is_made_anew_and_reading_goes_on_without_spinning(hub, raw, loss):
    """F-10, F-11, F-12: NOGROUP answers at once, whatever BLOCK says."""
    lane = hub.lane("default")
    reader = hub.reader(lane, "w1")
    lane.announce(ready("a"))
    assert read(reader, 1) == ["a"]
    {
        "FLUSHALL": raw.flushall,
        "DEL": lambda: raw.delete(lane.key),
        "XGROUP DESTROY": lambda: raw.xgroup_destroy(lane.key, lane.group),
    }[loss]()
    before = calls(raw, "xreadgroup")
    lane.announce(ready("b"))
    seen = read_until(reader, lambda seen: "b" in seen)
    # Group destroyed: the stream is read from its beginning again, and the row behind "a" says it is taken.
    assert seen == (["a", "b"] if loss == "XGROUP DESTROY" else ["b"])
    assert [read(reader), read(reader)] == [[], []]
    assert calls(raw, "xreadgroup") - before <= 6


def test_a_group_lost_while_a_reader_waits(hub, raw):
    """redis#6887: a blocked reader of a deleted key must not wait for ever for a group that is gone."""
    lane = hub.lane("default")
    reader = hub.reader(lane, "w1")
    assert read(reader) == []
    raw.flushall()
    assert read(reader) == []
    lane.announce(ready("a"))
    assert read(reader) == ["a"]


# --- lost replies ---


def test_an_xadd_whose_reply_got_lost_is_not_sent_again(far, proxy, raw):
    """F-19: redis-py by default repeats it up to ten times, and each repetition would announce the job."""
    lane = far.lane("default")
    lane.announce(ready("first"))  # the server knows the script now: the next call is one round trip
    before = calls(raw, "xadd")
    proxy.lose_reply()
    with pytest.raises(RedisUnavailable):
        lane.announce(ready("a"))
    assert proxy.swallowed
    assert calls(raw, "xadd") - before == 1
    assert lane.length() == 2


def test_an_xreadgroup_whose_reply_got_lost_is_not_sent_again(far, proxy, raw):
    """Its repetition would get the next entries, and the first ones would be forgotten."""
    lane = far.lane("default")
    reader = far.reader(lane, "w1")
    assert read(reader) == []
    for name in "abcd":
        raw.xadd(lane.key, {"job_id": name})
    proxy.lose_reply()
    with pytest.raises(RedisUnavailable):
        reader.read(2, 50)
    assert raw.xpending(lane.key, lane.group)["pending"] == 2
    assert [read(reader, 2), read(reader, 2)] == [["a", "b"], ["c", "d"]]


def test_entries_of_a_lost_reply_are_found_among_the_own_pending_ones(far, proxy, raw):
    lane = far.lane("default")
    reader = far.reader(lane, "w1")
    assert read(reader) == []
    proxy.swallow_replies()
    raw.xadd(lane.key, {"job_id": "a"})
    raw.xadd(lane.key, {"job_id": "b"})
    with pytest.raises(RedisUnavailable):
        reader.read(10, 50)
    assert raw.xpending(lane.key, lane.group)["pending"] == 2  # delivered, as far as the server knows
    proxy.heal()
    assert read(reader) == ["a", "b"]
    raw.xadd(lane.key, {"job_id": "c"})
    assert read(reader) == ["c"]


def test_a_lost_reply_to_an_acknowledgement_is_repeated_harmlessly(far, proxy, raw):
    lane = far.lane("default")
    reader = far.reader(lane, "w1")
    lane.announce(ready("a"))
    (entry,) = reader.read(1, 50)
    proxy.swallow_replies()
    with pytest.raises(RedisUnavailable):
        lane.ack([entry.entry_id])
    proxy.heal()
    lane.ack([entry.entry_id])
    assert lane.length() == 0
    assert raw.xpending(lane.key, lane.group)["pending"] == 0


def test_a_connection_cut_in_the_middle_of_a_read(far, proxy, raw):
    lane = far.lane("default")
    reader = far.reader(lane, "w1")
    assert read(reader) == []
    proxy.cut()
    raw.xadd(lane.key, {"job_id": "a"})
    seen = []

    def keep_reading():
        try:
            seen.extend(read(reader))
        except RedisUnavailable:
            return False
        return seen == ["a"]

    wait_until(keep_reading, what="the reader reconnects and reads")


# --- half-open ---


def test_a_half_open_connection_ends_a_blocked_read_in_time(far, proxy, raw):
    """F-18, vexa#267: a consumer that waits on a dead socket for ever."""
    lane = far.lane("default")
    reader = far.reader(lane, "w1")
    assert read(reader) == []
    proxy.stall()
    started = time.monotonic()
    with pytest.raises(RedisUnavailable):
        reader.read(10, 200)
    assert time.monotonic() - started < 4 * TIMEOUT_S
    proxy.heal()
    raw.xadd(lane.key, {"job_id": "a"})
    assert read(reader) == ["a"]


def test_the_kernel_looks_after_connections_on_which_nobody_asks(hub):
    """Those of the pool, and those whose read waits."""
    reader = hub.reader(hub.lane("default"), "w1")
    assert read(reader) == []
    for client in (hub._client, reader.ear.client):
        connection = client.connection_pool.get_connection()
        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection._sock.gettimeout(), "what they are asked ends, however"
        client.connection_pool.release(connection)
    reader.ear.close()


def test_half_open_connections_of_the_pool_are_replaced(far, proxy):
    lane = far.lane("default")
    lane.announce(ready("a"))
    proxy.stall()
    with pytest.raises(RedisUnavailable):
        lane.length()
    proxy.heal()
    assert lane.length() == 1
    assert proxy.accepted >= 2


def test_errors_name_the_server_and_hide_the_password(settings):
    hidden = Hub(settings(redis_url="redis://:s3cr3t@127.0.0.1:1/0"))
    with pytest.raises(RedisUnavailable) as refused:
        hidden.ping()
    hidden.close()
    assert "127.0.0.1:1" in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


# --- restarts ---


@pytest.mark.parametrize("kind", [Redis, Valkey])
@pytest.mark.parametrize("keeps_data", [True, False], ids=["with its data", "empty"])
def test_a_restarted_server_is_found_again(private_server, settings, kind, keeps_data):
    """F-8, F-9; celery#8030: workers that silently stop consuming after a restart."""
    server = private_server(kind)
    hub = Hub(settings(redis_url=server.url))
    lane = hub.lane("default")
    reader = hub.reader(lane, "w1")
    lane.announce(ready("a"))
    assert read(reader, 1) == ["a"]
    if not keeps_data:
        server.flush()
    server.stop()
    with pytest.raises(RedisUnavailable):
        read(reader)
    with pytest.raises(RedisUnavailable):
        hub.ping()
    server.start()
    lane.announce(ready("b"))
    expected = ["a", "b"] if keeps_data else ["b"]
    read_until(reader, lambda seen: seen == expected)
    hub.close()


def test_a_server_too_busy_to_answer_in_time_is_unavailable(hub, raw):
    """F-17."""
    lane = hub.lane("default")
    lane.announce(ready("a"))
    started = time.monotonic()
    raw.client_pause(4000, all=True)
    with pytest.raises(RedisUnavailable):
        lane.length()
    assert time.monotonic() - started < 4, "not only when it answers again"
    wait_until(lambda: _answers(lane), what="the server answers again")


def _answers(lane):
    try:
        return lane.length() == 1
    except RedisUnavailable:
        return False


# --- failovers ---


@pytest.mark.parametrize("kind", [Redis, Valkey])
def test_a_demoted_primary_is_left_for_its_successor(private_server, settings, kind):
    """Its name leads to the new primary, but the connections there are stay with the old one, which is well."""
    old, new = private_server(kind), private_server(kind)
    with Proxy(old.port) as proxy:
        hub = Hub(settings(redis_url=f"redis://127.0.0.1:{proxy.port}/0"))
        lane = hub.lane("default")
        reader = hub.reader(lane, "w1")
        lane.announce(ready("a"))
        assert read(reader) == ["a"]
        with old.client() as client:
            client.replicaof("127.0.0.1", new.port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", what="it follows")
        proxy.target = new.port
        for refused in (lambda: lane.announce(ready("b")), lambda: read(reader)):
            with pytest.raises(RedisUnavailable, match="read only replica"):
                refused()
            refused()
        lane.announce(ready("c"))
        wait_until(lambda: "c" in read(reader), what="the successor is read")
        hub.close()


@pytest.mark.parametrize(
    ("setting", "value", "usual", "complaint"),
    [("maxmemory", 1, 0, "maxmemory"), ("min-replicas-to-write", 1, 0, "replicas")],
)
def test_a_server_that_answers_but_takes_no_writes_is_unavailable(hub, raw, setting, value, usual, complaint):
    """F-16: a ping alone would call it well."""
    hub.ping()
    raw.config_set(setting, value)
    try:
        assert raw.ping()
        with pytest.raises(RedisUnavailable, match=complaint):
            hub.ping()
    finally:
        raw.config_set(setting, usual)
    hub.ping()
    assert raw.keys() == []


def test_a_user_who_may_not_probe_is_believed(hub, raw, settings, redis_url):
    raw.execute_command("ACL", "SETUSER", "narrow", "on", "nopass", "~*", "+ping")
    try:
        narrow = Hub(settings(redis_url=redis_url.replace("redis://", "redis://narrow:x@")))
        narrow.ping()
        narrow.close()
    finally:
        raw.execute_command("ACL", "DELUSER", "narrow")
