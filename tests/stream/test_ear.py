"""Reads that wait can be ended from another thread, and lose nothing by it; whatever the server allows, they work."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis

from orchestrator.errors import RedisUnavailable
from orchestrator.jobs import Ready
from orchestrator.stream.ear import AGAIN_S, Ear
from orchestrator.stream.hub import Hub
from tests.servers import Redis, Valkey
from tests.waiting import wait_until

#: Milliseconds that a read of these tests waits, and seconds in which one that is interrupted has long ended.
BLOCK_MS, SOON_S = 60_000, 30.0


class Listener:
    """One of those who wait: what it reads, and how somebody gives it something to read."""

    def __init__(self, ear: Ear, read: Callable[[], Any], give: Callable[[], object]) -> None:
        self.ear, self.read, self.give = ear, read, give
        self.heard: list[Any] = []

    def listen(self) -> threading.Thread:
        """Read once, in a thread."""
        thread = threading.Thread(target=lambda: self.heard.append(self.read()), daemon=True)
        thread.start()
        return thread


def lane_reader(hub: Hub) -> Listener:
    lane = hub.lane("default")
    reader = hub.reader(lane, "w1")
    announce = lambda: lane.announce([Ready("a", "echo", None)])
    return Listener(reader.ear, lambda: [entry.job_id for entry in reader.read(10, BLOCK_MS)], announce)


def company(hub: Hub) -> Listener:
    """It only looks; what it waited for is read by the next."""
    lane = hub.lane("default")
    reader = hub.reader(lane, "w1")
    reader.read(1, 1)  # makes the group

    def read() -> list[str | None]:
        if not lane.length():
            reader.wait_for_more(BLOCK_MS)
        return [entry.job_id for entry in reader.read(10, 1)]

    return Listener(reader.ear, read, lambda: lane.announce([Ready("a", "echo", None)]))


def events(hub: Hub) -> Listener:
    reader = hub.events("one")
    reader.read(1, 1)  # makes the group
    key = f"{hub._settings.stream_prefix}ingest_events"
    read = lambda: [delivery.fields for delivery in reader.read(10, BLOCK_MS)]
    return Listener(reader.ear, read, lambda: hub._client.xadd(key, {"type": "x"}))


def bell(hub: Hub) -> Listener:
    doorbell = hub.doorbell()
    return Listener(doorbell.ear, lambda: doorbell.listen(BLOCK_MS), lambda: hub.ring("x"))


def pools(hub: Hub) -> Listener:
    preloads = hub.preloads()
    return Listener(preloads.ear, lambda: preloads.take("one", BLOCK_MS), lambda: hub.ask_for_pools("x"))


@pytest.fixture
def patient(settings):
    """Settings of one whose reads may take as long as these tests let them."""
    return lambda url: settings(redis_url=url, redis_timeout_s=2 * BLOCK_MS / 1000, redis_block_ms=BLOCK_MS)


@pytest.fixture
def hub(redis_url, patient):
    opened = Hub(patient(redis_url))
    yield opened
    opened.close()


def blocked(raw) -> int:
    return int(raw.info("clients")["blocked_clients"])


def unblocks(raw, what="calls") -> int:
    return int(raw.info("commandstats").get("cmdstat_client|unblock", {what: 0})[what])


def interrupted(listener: Listener, raw) -> None:
    """Let it wait, and end that."""
    thread = listener.listen()
    wait_until(lambda: blocked(raw) == 1, what="it waits")
    listener.ear.interrupt()
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [lane_reader, company, events, bell, pools])
def test_a_wait_that_is_interrupted_ends_empty_and_the_next_read_works(hub, raw, kind):
    listener = kind(hub)
    interrupted(listener, raw)
    assert [bool(heard) for heard in listener.heard] == [False]
    connections = raw.info("stats")["total_connections_received"]
    listener.give()
    listener.listen().join(SOON_S)
    assert [bool(heard) for heard in listener.heard] == [False, True]
    assert raw.info("stats")["total_connections_received"] == connections, "it reads on where it waited"


@pytest.mark.parametrize("kind", [lane_reader, company, events, bell, pools])
def test_whoever_waits_for_the_end_of_a_thread_ends_its_wait(hub, raw, kind):
    listener = kind(hub)
    thread = listener.listen()
    wait_until(lambda: blocked(raw) == 1, what="it waits")
    listener.ear.release(thread, SOON_S)
    assert not thread.is_alive()
    assert [bool(heard) for heard in listener.heard] == [False]


def test_one_that_begins_to_wait_after_the_first_interrupt_is_interrupted_too(hub, raw):
    """It looked at its flag before that was set, and had not asked Redis yet."""
    listener = lane_reader(hub)
    interrupted(listener, raw)
    go, before = threading.Event(), unblocks(raw)
    late = threading.Thread(target=lambda: go.wait() and listener.read(), daemon=True)
    late.start()
    stopper = threading.Thread(target=listener.ear.release, args=(late, SOON_S), daemon=True)
    stopper.start()
    wait_until(lambda: unblocks(raw) > before, what="the interrupt that comes too early")
    go.set()
    late.join(SOON_S)
    assert not late.is_alive()
    stopper.join(SOON_S)
    assert not stopper.is_alive()


def test_a_thread_that_never_began_is_not_waited_for(hub, raw):
    listener = lane_reader(hub)
    interrupted(listener, raw)  # so that there is a connection to interrupt
    before = unblocks(raw)
    listener.ear.release(threading.Thread(target=listener.read), SOON_S)
    assert unblocks(raw) == before


def test_one_that_never_read_is_waited_for_like_any_other(hub):
    over = threading.Event()
    busy = threading.Thread(target=over.wait, daemon=True)
    busy.start()
    hub.doorbell().ear.release(busy, 0.1)
    assert busy.is_alive()
    over.set()


def test_connections_end_with_their_reader_and_no_sooner(hub, raw):
    """One that does not end in time keeps its connection: entries on their way would be lost with it."""
    listener = lane_reader(hub)
    listener.give()
    listener.read()
    number = str(listener.ear.client.client_id())
    present = lambda: [one for one in raw.client_list() if one["id"] == number]
    over = threading.Event()
    busy = threading.Thread(target=over.wait, daemon=True)
    busy.start()
    listener.ear.release(busy, 0.1)
    assert busy.is_alive()
    assert present()
    over.set()
    listener.ear.release(busy, SOON_S)
    wait_until(lambda: not present(), what="the connection is gone")


def test_a_reader_that_is_let_go_gives_its_connection_back_at_once(hub, raw):
    """Not when Python next looks for circles: until then the server counts it, and its socket would be found open."""
    reader = hub.reader(hub.lane("default"), "w1")
    reader.read(1, 1)
    number = str(reader.ear.client.client_id())
    gc.disable()
    try:
        del reader
        wait_until(lambda: number not in {one["id"] for one in raw.client_list()}, what="the connection is gone")
    finally:
        gc.enable()


def test_whoever_closes_the_hub_closes_what_its_readers_left_open(hub, raw):
    reader = hub.reader(hub.lane("default"), "w1")
    reader.read(1, 1)
    number = str(reader.ear.client.client_id())
    hub.close()
    wait_until(lambda: number not in {one["id"] for one in raw.client_list()}, what="the connection is gone")


def test_an_interrupt_finds_a_reader_that_reconnected(hub, raw):
    listener = lane_reader(hub)
    interrupted(listener, raw)
    before = listener.ear.client.client_id()
    assert raw.client_kill_filter(_id=before) == 1
    interrupted(listener, raw)
    assert listener.heard == [[], []]
    assert listener.ear.client.client_id() != before


@pytest.mark.parametrize("kind", [Redis, Valkey])
def test_an_interrupt_after_a_restart_reaches_the_reader_and_nobody_else(private_server, patient, kind):
    """A server counts its clients anew: what was our number before is a stranger's now."""
    server = private_server(kind)
    hub = Hub(patient(server.url))
    listener = lane_reader(hub)
    with server.client() as raw:
        for _ in range(100):  # higher than the numbers of those who look whether it starts
            with server.client() as one:
                one.ping()
        interrupted(listener, raw)
        number = listener.ear.client.client_id()
    server.stop()
    with pytest.raises(RedisUnavailable):
        listener.read()
    server.start()
    with server.client() as raw:
        with stranger(server, number):
            wait_until(lambda: blocked(raw) == 1, what="the stranger waits")
            listener.ear.interrupt()
            assert blocked(raw) == 1
        interrupted(listener, raw)
    assert listener.heard == [[], []]
    hub.close()


@contextmanager
def stranger(server: Redis, number: int) -> Iterator[None]:
    """A client with this number, which waits."""
    with ExitStack() as clients:
        connect = lambda: clients.enter_context(redis.Redis(port=server.port, socket_timeout=None))
        client = connect()
        while client.client_id() < number:
            client = connect()
        assert client.client_id() == number
        waiting = threading.Thread(target=client.blpop, args=(["something"],), daemon=True)
        waiting.start()
        yield
        with server.client() as giver:
            giver.rpush("something", "at last")
        waiting.join(SOON_S)


@contextmanager
def user(raw, url: str, *rules: str) -> Iterator[str]:
    """The address for somebody who may do everything but this."""
    raw.execute_command("ACL", "SETUSER", "narrow", "on", "nopass", "~*", "&*", "+@all", *rules)
    try:
        yield url.replace("redis://", "redis://narrow:x@")
    finally:
        raw.execute_command("ACL", "DELUSER", "narrow")


def test_one_who_may_not_know_its_number_reads_all_the_same(raw, redis_url, patient):
    with user(raw, redis_url, "-client|id") as url:
        hub = Hub(patient(url))
        listener = lane_reader(hub)
        listener.give()
        assert listener.read() == ["a"]
        assert hub.reader(hub.lane("default"), "w2").read(1, 1) == []
        before = unblocks(raw)
        listener.ear.interrupt()
        assert unblocks(raw) == before
        hub.close()


def test_one_who_may_not_interrupt_waits_as_long_as_the_read_does_and_asks_once(raw, redis_url, patient):
    with user(raw, redis_url, "-client|unblock") as url:
        hub = Hub(patient(url))
        listener = lane_reader(hub)
        thread = listener.listen()
        wait_until(lambda: blocked(raw) == 1, what="it waits")
        before = unblocks(raw, "rejected_calls")
        stopper = threading.Thread(target=listener.ear.release, args=(thread, SOON_S), daemon=True)
        stopper.start()
        wait_until(lambda: unblocks(raw, "rejected_calls") > before, what="it asked")
        stopper.join(5 * AGAIN_S)
        assert thread.is_alive() and stopper.is_alive()
        listener.give()
        stopper.join(SOON_S)
        assert not stopper.is_alive() and not thread.is_alive()
        assert unblocks(raw, "rejected_calls") - before == 1
        hub.close()


@pytest.mark.parametrize("kind", [Redis, Valkey])
def test_a_server_that_is_gone_keeps_nobody_who_stops(private_server, patient, kind):
    server = private_server(kind)
    hub = Hub(patient(server.url))
    listener = lane_reader(hub)
    with server.client() as raw:
        interrupted(listener, raw)
    over = threading.Event()
    busy = threading.Thread(target=over.wait, daemon=True)
    busy.start()
    server.kill()
    listener.ear.release(busy, 0.1)
    over.set()
    with pytest.raises(RedisUnavailable):
        hub.ping()
    hub.close()


def test_other_errors_than_those_of_the_server_are_not_hidden(hub, raw, monkeypatch):
    listener = lane_reader(hub)
    interrupted(listener, raw)

    def breaks(_number: int) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(hub._client, "client_unblock", breaks)
    with pytest.raises(RuntimeError, match="a bug"):
        listener.ear.interrupt()
