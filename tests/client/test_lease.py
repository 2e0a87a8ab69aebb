"""`with lease(…)`: what the block sees, how long it may run, and how it hears that the lease is lost."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from orchestrator.client import Held, LeaseDenied, LeaseLost, Refused, ServerUnreachable, interrupt, lease
from orchestrator.client.asking import Grant, this_node, this_user
from orchestrator.errors import ConfigError
from orchestrator.store import schema
from tests.client.conftest import NODE, Orchestrator
from tests.cluster import Cluster
from tests.factories import gpu, hire
from tests.proxy import Proxy
from tests.servers import free_port
from tests.tables import make_tables
from tests.waiting import wait_until

#: Seconds after which a test gives up; nothing here takes nearly as long.
PATIENCE_S = 30.0
#: Seconds that a lease of these tests lives if it is to end by itself: short for somebody who waits for that.
TTL_S = 3.0


@pytest.fixture(autouse=True)
def no_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


@pytest.fixture
def kept(monkeypatch) -> float:
    """Seconds that a lease lives whose heartbeats come soon, but which no busy machine makes its holder give up."""
    monkeypatch.setattr("orchestrator.client.keeper.BEAT", 1 / 60)
    monkeypatch.setattr("orchestrator.client.keeper.RETRY", 1 / 120)
    return 30.0


def devices() -> tuple[str | None, str | None]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


def in_background(function, *arguments) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, name="test-helper")
    thread.start()
    return thread


# --- what the block sees ---


def test_a_block_with_a_gpu(server: Orchestrator):
    with lease(min_memory_mb=4000, agent="alice", ttl_seconds=30) as held:
        assert (held.mode, held.node_id, held.gpu_uuids, held.gpu_indexes) == ("gpu", NODE, ("GPU-0",), (0,))
        assert devices() == ("GPU-0", "PCI_BUS_ID")
        [row] = server.leases()
        assert (row.agent_name, row.memory_mb, row.ttl_seconds) == ("alice", 4000, 30)
        held.check()
        assert "GPU-0" in repr(held)
    assert devices() == (None, None)
    assert (server.leases(), len(server.leases("released"))) == ([], 1)
    wait_until(lambda: server.leased_mb() == 0, what="the memory is free")
    ours = {"lease-heartbeat", "lease-watch"}
    wait_until(lambda: not ours & {thread.name for thread in threading.enumerate()}, what="no thread is left")


def test_what_was_visible_before_comes_back(server: Orchestrator, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ZeroDivisionError), lease(min_memory_mb=1):
        assert devices() == ("GPU-0", "PCI_BUS_ID")
        raise ZeroDivisionError
    assert devices() == ("3", None)
    assert server.leases() == []


def test_a_lease_of_the_cpu_shows_no_gpu(server: Orchestrator):
    with lease(min_memory_mb=99_000, cpu_fallback=True) as held:
        assert (held.mode, held.gpu_uuids) == ("cpu", ())
        assert devices() == ("", "PCI_BUS_ID")


def test_several_gpus(server: Orchestrator):
    server.add_gpu()
    with lease(min_memory_mb=1, gpu_count=2) as held:
        assert devices()[0] == ",".join(held.gpu_uuids)
        assert sorted(held.gpu_uuids) == ["GPU-0", "GPU-1"]


def test_leases_inside_of_leases(server: Orchestrator):
    server.add_gpu()
    with lease(min_memory_mb=9000) as outer:
        with lease(min_memory_mb=9000) as inner:
            assert inner.gpu_uuids != outer.gpu_uuids
            assert devices()[0] == inner.gpu_uuids[0]
        assert devices()[0] == outer.gpu_uuids[0]
        assert len(server.leases()) == 1
    assert devices() == (None, None)


def test_leases_of_threads_end_in_any_order(server: Orchestrator):
    server.add_gpu()
    first, second = lease(min_memory_mb=9000), lease(min_memory_mb=9000)
    first.__enter__()
    held = second.__enter__()
    first.__exit__(None, None, None)
    assert devices()[0] == held.gpu_uuids[0]
    second.__exit__(None, None, None)
    assert devices() == (None, None)


def test_each_call_of_a_decorated_function_has_a_lease(server: Orchestrator):
    @lease(min_memory_mb=1000)
    def count(number: int) -> tuple[int, int]:
        """Doc."""
        return number, len(server.leases())

    assert (count.__name__, count.__doc__) == ("count", "Doc.")
    assert [count(1), count(2)] == [(1, 1), (2, 1)]
    with ThreadPoolExecutor(2) as threads:
        assert sorted(number for number, _ in threads.map(count, [3, 4])) == [3, 4]
    assert server.leases() == []


def test_what_a_lease_is_not_for(server: Orchestrator):
    taken = lease(min_memory_mb=1)
    with taken, pytest.raises(RuntimeError, match="again"), taken:
        pass
    with taken:  # one after the other is fine
        pass

    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="inside"):
        lease(min_memory_mb=1)(coroutine)


def test_the_defaults_are_this_machine_and_this_user(monkeypatch, tmp_path):
    monkeypatch.delenv("ORCH_NODE_ID", raising=False)
    assert this_node() == socket.gethostname()
    monkeypatch.setenv("ORCH_NODE_ID", "gpu-6")
    assert this_node() == "gpu-6"
    (tmp_path / "orchestrator.toml").write_text('node_id = "gpu-7"\n')
    monkeypatch.setenv("ORCH_CONFIG", str(tmp_path / "orchestrator.toml"))
    assert this_node() == "gpu-7", "as the worker here calls it: the file beats the environment"
    for name, agent in (("ann", "ann"), ("ann smith", "anonymous")):
        monkeypatch.setenv("LOGNAME", name)
        assert this_user() == agent


def test_the_token_is_nowhere_to_be_read(server: Orchestrator, kept: float, caplog):
    for logger in (None, "httpx", "httpcore"):  # a test before this may have configured logs, which quiets those
        caplog.set_level(logging.DEBUG, logger)

    def logged() -> str:
        return "\n".join(record.getMessage() for record in caplog.records if record.name != "uvicorn.access")

    with lease(min_memory_mb=1, ttl_seconds=kept) as held:
        token = held._keeper._grant.token
        wait_until(lambda: "/heartbeat" in logged(), what="a heartbeat was logged")
        assert token not in repr(held) + repr(held._keeper._grant)
    assert "/leases/***/release" in logged()
    assert token not in logged()


# --- denied ---


def test_denied_says_the_reason_with_its_numbers(server: Orchestrator):
    with pytest.raises(LeaseDenied) as denied, lease(min_memory_mb=9001, wait_s=0):
        pass
    assert denied.value.code == "lease_denied"
    assert "9001" in str(denied.value) and "the largest can lease 9000 MB" in str(denied.value)
    assert "9001" in denied.value.reason
    assert "Wait longer" not in str(denied.value)


def test_what_waiting_does_not_mend_is_told_aloud(server: Orchestrator, caplog: pytest.LogCaptureFixture):
    with pytest.raises(LeaseDenied), lease(min_memory_mb=9001, wait_s=0.1):
        pass
    with lease(min_memory_mb=9000), pytest.raises(LeaseDenied, match="Wait longer"), lease(min_memory_mb=1, wait_s=0.1):
        pass
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "the largest can lease 9000 MB" in told[0]


def test_a_wait_ends_in_a_lease(server: Orchestrator):
    told: list[str] = []
    first = lease(min_memory_mb=9000)
    first.__enter__()

    def release_when_waited_for(reason: str) -> None:
        told.append(reason)
        first.__exit__(None, None, None)

    with lease(min_memory_mb=9000, wait_s=PATIENCE_S, on_wait=release_when_waited_for) as held:
        assert held.mode == "gpu"
    assert len(told) == 1 and "0 of 9000 MB free" in told[0]


def test_a_wait_has_an_end(server: Orchestrator):
    told: list[str] = []
    with lease(min_memory_mb=9000):
        started = time.monotonic()
        with pytest.raises(LeaseDenied), lease(min_memory_mb=1, wait_s=4.0, on_wait=told.append):
            pass
        assert time.monotonic() - started >= 4.0
    assert len(told) == 1  # the same reason is told once


def test_a_server_that_restarts_does_not_end_a_wait(server: Orchestrator):
    with (
        Proxy(int(server.url.rpartition(":")[2])) as proxy,
        lease(min_memory_mb=9000, on_lost=lambda _: None),  # to be ended, to make room
    ):
        told: list[str] = []

        def go_away(reason: str) -> None:
            told.append(reason)
            if len(told) == 1:
                proxy.refuse()
            elif "cannot reach" in reason:
                proxy.heal()
                server.end_leases()

        url = f"http://127.0.0.1:{proxy.port}"
        with lease(min_memory_mb=9000, url=url, wait_s=PATIENCE_S, on_wait=go_away):
            assert any("cannot reach" in reason for reason in told)


def test_nobody_waits_for_a_server_that_never_answered():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable, match="gpuorch dev"), lease(min_memory_mb=1, url=url, wait_s=None):
        pass


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://"])
def test_an_address_that_is_none(url):
    with pytest.raises(ConfigError), lease(min_memory_mb=1, url=url):
        pass


def test_a_wrong_request_is_refused_at_once(server: Orchestrator):
    with pytest.raises(Refused) as refused, lease(min_memory_mb=-1):
        pass
    assert (refused.value.status, refused.value.code) == (422, "invalid_input")
    assert devices() == (None, None)


def test_a_grant_that_comes_too_late_is_given_back(server: Orchestrator):
    """Its time is counted from before it was asked for."""
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        proxy.slow(0.5)
        with (
            pytest.raises(LeaseDenied, match="took as long as the lease lasts"),
            lease(min_memory_mb=1, url=f"http://127.0.0.1:{proxy.port}", ttl_seconds=0.5, wait_s=0),
        ):
            pass
    assert server.leases() == []


def test_time_is_counted_from_before_the_request_and_ends_early():
    grant = Grant("t", "gpu", NODE, ("GPU-0",), (0,), ttl_s=10.0, asked_at=100.0)
    assert grant.until == 108.0
    assert Grant("t", "gpu", NODE, (), (), ttl_s=60.0, asked_at=100.0).until == 155.0


# --- kept ---


def test_heartbeats_come_by_themselves(server: Orchestrator, kept: float):
    with lease(min_memory_mb=1, ttl_seconds=kept) as held:
        [first] = server.leases()
        beats: set[object] = set()

        def look() -> bool:
            beats.update(row.last_heartbeat for row in server.leases())
            return len(beats) >= 5

        wait_until(look, timeout=PATIENCE_S, what="heartbeats")
        [last] = server.leases()
        assert last.expires_at > first.expires_at
        held.check()


def test_heartbeats_come_while_the_block_hogs_the_interpreter(server: Orchestrator, kept: float):
    with lease(min_memory_mb=1, ttl_seconds=kept) as held:
        keeper, end = held._keeper, time.monotonic() + PATIENCE_S
        renewed = {keeper._until}
        while len(renewed) < 3:
            sum(range(1000))
            renewed.add(keeper._until)
            assert time.monotonic() < end
        held.check()
        assert len(server.leases()) == 1


def test_a_restart_of_the_server_within_the_time_to_live_loses_nothing(cluster_settings, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("orchestrator.client.keeper.BEAT", 1 / 20)  # soon, and yet time for a restart
    settings = cluster_settings.model_copy(update={"database_url": f"sqlite:///{tmp_path / 'cluster.db'}"})
    cluster = Cluster(settings, tmp_path, forked=True)
    try:
        make_tables(cluster.db.engine)
        node = hire(cluster.db, gpu(0), node=NODE)
        port = free_port()
        first, url = cluster.serve(port=port)
        orchestrator = Orchestrator(url, cluster.db, node)
        with lease(min_memory_mb=1, url=url, node_id=NODE, ttl_seconds=60.0) as held:
            first.kill()
            missed = lambda: "heartbeat of the GPU lease failed" in caplog.text
            wait_until(missed, timeout=PATIENCE_S, what="the server is missed")
            [before] = orchestrator.leases()
            cluster.serve(port=port)
            renewed = lambda: orchestrator.leases()[0].expires_at > before.expires_at
            wait_until(renewed, timeout=60.0, what="a heartbeat after the restart")
            held.check()
        assert orchestrator.leases() == []
    finally:
        cluster.close()


def test_heartbeats_that_fail_are_tried_again_in_time(server: Orchestrator, kept: float, caplog):
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with lease(min_memory_mb=1, url=url, ttl_seconds=kept) as held:
            proxy.refuse()
            wait_until(lambda: caplog.text.count("heartbeat of the GPU lease failed") >= 2, what="two failures")
            proxy.heal()
            [before] = server.leases()
            renewed = lambda: server.leases()[0].expires_at > before.expires_at
            wait_until(renewed, what="a heartbeat after the outage")
            held.check()


# --- lost ---


def test_lost_in_a_sleep_of_the_main_thread(server: Orchestrator, kept: float):
    before = signal.getsignal(signal.SIGURG)
    started = time.monotonic()
    with pytest.raises(LeaseLost) as lost, lease(min_memory_mb=1, ttl_seconds=kept) as held:
        in_background(server.end_leases)
        time.sleep(600)
    assert time.monotonic() - started < 60
    assert "410 lease_ended" in lost.value.reason and lost.value.code == "lease_lost"
    assert held.lost.is_set() and "lost" in repr(held)
    with pytest.raises(LeaseLost, match="410"):
        held.check()
    assert devices() == (None, None)
    assert signal.getsignal(signal.SIGURG) is before


@pytest.mark.parametrize("wait", ["lock", "event", "socket", "busy"])
def test_lost_in_whatever_the_main_thread_waits_for(server: Orchestrator, kept: float, wait):
    blocked = threading.Lock()
    blocked.acquire()
    one, other = socket.socketpair()
    waits: dict[str, Callable[[], object]] = {
        "lock": blocked.acquire,
        "event": threading.Event().wait,
        "socket": lambda: one.recv(1),
        "busy": lambda: [None for _ in iter(int, 1)],
    }
    with one, other, pytest.raises(LeaseLost), lease(min_memory_mb=1, ttl_seconds=kept):
        in_background(server.end_leases)
        waits[wait]()


def test_a_signal_that_came_before_the_wait_began_is_sent_again(server: Orchestrator, kept: float, monkeypatch):
    monkeypatch.setattr(interrupt, "AGAIN_S", 0.05)
    ring = interrupt._ring
    rung: list[int] = []

    def all_but_the_first() -> None:
        if rung:
            ring()
        rung.append(1)

    monkeypatch.setattr(interrupt, "_ring", all_but_the_first)
    with pytest.raises(LeaseLost), lease(min_memory_mb=1, ttl_seconds=kept):
        in_background(server.end_leases)
        time.sleep(600)
    wait_until(lambda: "lease-heartbeat" not in {one.name for one in threading.enumerate()}, what="it is heard once")


def test_lost_in_a_busy_loop_of_another_thread(server: Orchestrator, kept: float):
    seen: list[BaseException] = []
    entered = threading.Event()

    def hold() -> None:
        try:
            with lease(min_memory_mb=1, ttl_seconds=kept):
                entered.set()
                while True:
                    sum(range(100))
        except LeaseLost as lost:
            seen.append(lost)

    thread = in_background(hold)
    assert entered.wait(PATIENCE_S)
    server.end_leases()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    [lost] = seen
    assert isinstance(lost, LeaseLost) and "410" in lost.reason
    assert type(lost).__name__ == "LeaseLost"


def test_a_thread_that_is_gone_is_not_mistaken_for_its_successor(monkeypatch):
    """Its number may be that of another one by now."""
    raised: list[object] = []
    monkeypatch.setattr(interrupt, "_raise_in", lambda *given: raised.append(given))
    made: list[interrupt.Interrupt] = []
    in_background(lambda: made.append(interrupt.of_this_thread())).join(PATIENCE_S)
    made[0].send("lost")
    assert raised == []


def test_an_except_exception_does_not_swallow_it(server: Orchestrator, kept: float):
    with pytest.raises(LeaseLost), lease(min_memory_mb=1, ttl_seconds=kept):
        in_background(server.end_leases)
        while True:
            with suppress(Exception):
                time.sleep(600)


def test_a_lease_that_nobody_knows_is_lost(server: Orchestrator, kept: float):
    def forget() -> None:
        server.db.write(lambda conn: conn.execute(schema.lease_gpus.delete()))
        server.db.write(lambda conn: conn.execute(schema.leases.delete()))

    with pytest.raises(LeaseLost, match="lease_not_found"), lease(min_memory_mb=1, ttl_seconds=kept):
        in_background(forget)
        time.sleep(600)


@pytest.mark.parametrize("fault", ["refuse", "stall"])
def test_a_server_that_is_away_for_too_long_costs_the_lease_before_it_ends(server: Orchestrator, fault, monkeypatch):
    """The holder stops while the memory is still its own, also when a request hangs."""
    # Soon, after some heartbeats, and long before the end: there is time to look.
    monkeypatch.setattr("orchestrator.client.keeper.BEAT", 1 / 16)
    monkeypatch.setattr("orchestrator.client.asking.MARGIN", 0.7)
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with pytest.raises(LeaseLost, match="no heartbeat"), lease(min_memory_mb=1, url=url, ttl_seconds=7.0):
            try:
                getattr(proxy, fault)()
                time.sleep(600)
            finally:
                still_held = len(server.leases())
        proxy.heal()
    assert still_held == 1
    wait_until(lambda: not server.leases(), what="nobody renews it: it ends by itself")


def test_a_frozen_holder_hears_of_it_as_soon_as_it_runs_again(server: Orchestrator, spawn):
    program = f"""
import time
from orchestrator.client import LeaseLost, lease
try:
    with lease(min_memory_mb=1, ttl_seconds={TTL_S}):
        print("held", flush=True)
        time.sleep(600)
except LeaseLost as lost:
    print(lost.reason, flush=True)
"""
    holder = spawn([sys.executable, "-c", program])
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGSTOP)
    wait_until(lambda: not server.leases(), timeout=PATIENCE_S, what="the lease ends")
    holder.send_signal(signal.SIGCONT)
    # Whichever of its two threads runs first.
    assert "no heartbeat" in (told := holder.stdout.readline()) or "410" in told
    assert holder.wait(PATIENCE_S) == 0


def test_a_refusal_that_is_not_about_the_lease_does_not_cost_it(server: Orchestrator, kept: float, monkeypatch, caplog):
    with lease(min_memory_mb=1, ttl_seconds=kept) as held:
        api = held._keeper._api
        post = api.post
        answers = [404, 502]

        def through_a_proxy(path, *arguments, **how):
            return post(f"/somewhere/else/{answers.pop()}" if answers else path, *arguments, **how)

        monkeypatch.setattr(api, "post", through_a_proxy)
        [before] = server.leases()
        renewed = lambda: server.leases()[0].expires_at > before.expires_at
        wait_until(renewed, timeout=PATIENCE_S, what="a heartbeat that got through")
        held.check()
        assert "404 not_found" in caplog.text


def test_a_callback_instead_of_an_error(server: Orchestrator, kept: float):
    told: list[Held] = []
    with lease(min_memory_mb=1, ttl_seconds=kept, on_lost=told.append) as held:
        server.end_leases()
        assert held.lost.wait(PATIENCE_S)
        wait_until(lambda: told == [held], what="the callback")
        assert devices()[0] == "GPU-0"  # nothing else may become visible to what still runs
        with pytest.raises(LeaseLost):
            held.check()
    assert devices() == (None, None)


def test_a_callback_that_fails_is_logged(server: Orchestrator, kept: float, caplog):
    def broken(_held: Held) -> None:
        raise ZeroDivisionError

    with lease(min_memory_mb=1, ttl_seconds=kept, on_lost=broken):
        server.end_leases()
        wait_until(lambda: "on_lost of a GPU lease failed" in caplog.text, timeout=PATIENCE_S)


def test_the_outer_of_two_is_lost(server: Orchestrator, kept: float):
    """Its error leaves both blocks, and the inner lease is released on the way."""
    server.add_gpu()
    reached = []
    with pytest.raises(LeaseLost), lease(min_memory_mb=9000, ttl_seconds=kept) as outer:
        with lease(min_memory_mb=9000, ttl_seconds=60 * kept) as inner:  # nobody hears of it for long
            in_background(server.end_leases)
            wait_until(outer.lost.is_set, timeout=PATIENCE_S)
        reached.append("after the inner block")
    assert reached == []
    assert not inner.lost.is_set()


def test_somebody_else_s_signal_reaches_its_handler(server: Orchestrator):
    seen = []
    previous = signal.signal(signal.SIGURG, lambda *_: seen.append("mine"))
    try:
        with lease(min_memory_mb=1):
            signal.raise_signal(signal.SIGURG)
        assert seen == ["mine"]
        signal.raise_signal(signal.SIGURG)
        assert seen == ["mine", "mine"]
    finally:
        signal.signal(signal.SIGURG, previous)


# --- left ---


def test_a_lease_that_was_lost_unnoticed_is_not_a_success(server: Orchestrator, kept: float):
    after = []
    with pytest.raises(LeaseLost), lease(min_memory_mb=1, ttl_seconds=kept) as held:
        in_background(server.end_leases)
        try:
            time.sleep(600)
        except LeaseLost:
            after.append(held.lost.wait(PATIENCE_S))
    assert after == [True]


def test_the_body_s_own_error_is_not_masked(server: Orchestrator, kept: float):
    with pytest.raises(ZeroDivisionError), lease(min_memory_mb=1, ttl_seconds=kept):
        in_background(server.end_leases)
        try:
            time.sleep(600)
        except LeaseLost:
            raise ZeroDivisionError from None


def test_a_release_that_fails_is_logged_and_masks_nothing(server: Orchestrator, caplog):
    with Proxy(int(server.url.rpartition(":")[2])) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        with pytest.raises(ZeroDivisionError), lease(min_memory_mb=1, url=url, ttl_seconds=TTL_S):
            proxy.refuse()
            raise ZeroDivisionError
    assert "not released" in caplog.text
    wait_until(lambda: not server.leases(), timeout=PATIENCE_S, what="it ends by itself")


def test_leaving_does_not_wait_for_a_server_that_hangs(server: Orchestrator, caplog, monkeypatch):
    """Also where no time limit of the library's helps, as when a name is looked up."""
    monkeypatch.setattr("orchestrator.client.keeper.RELEASE_S", 0.5)
    hanging = threading.Event()
    with lease(min_memory_mb=1) as held:
        monkeypatch.setattr(held._keeper._api, "post", lambda *_, **__: hanging.wait(PATIENCE_S))
        started = time.monotonic()
    assert time.monotonic() - started < PATIENCE_S / 2
    assert "not released" in caplog.text
    hanging.set()


def test_nothing_is_raised_after_the_block(server: Orchestrator):
    """A loss that is noticed while the block is left ends inside of it, in every thread, at any moment."""
    before = signal.getsignal(signal.SIGURG)

    def hold(rounds: int) -> int:
        outside = 0
        for _ in range(rounds):
            context = lease(min_memory_mb=1)
            held = context.__enter__()
            racing = threading.Thread(target=held._keeper._lose, args=["raced"], name="test-racer")
            try:
                racing.start()
                context.__exit__(None, None, None)
            except LeaseLost:
                pass  # in __exit__ or on the way to it: where the block ends
            try:
                racing.join()
                sum(range(10_000))
            except LeaseLost:
                outside += 1
        return outside

    assert hold(15) == 0
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(hold, 15).result() == 0
    assert devices() == (None, None)
    assert signal.getsignal(signal.SIGURG) is before


def test_an_error_on_its_way_arrives_before_the_block_is_left(server: Orchestrator, monkeypatch):
    """The block's own error is not replaced by it, either."""
    monkeypatch.setattr(interrupt, "_ARRIVAL_S", PATIENCE_S)  # however long we take to send it
    closing, left = threading.Event(), threading.Event()
    held: list[interrupt.AtNextStep] = []
    outcome: list[object] = []

    def hold() -> None:
        try:
            held.append(interrupt.AtNextStep())
            held[0]._sent = True
            closing.set()
            held[0].close()
            left.set()
            outcome.append("left")
            time.sleep(0.5)
        except LeaseLost:
            outcome.append("raised outside")

    thread = in_background(hold)
    assert closing.wait(PATIENCE_S)
    left.wait(0.1)
    interrupt._raise_in(thread, held[0]._class("lost"))
    thread.join(PATIENCE_S)
    assert outcome == ["left"]


def test_a_forked_child_does_not_release_its_parent_s_lease(server: Orchestrator, spawn):
    program = """
import os, sys, threading
from orchestrator.client import lease

def hold_lock():
    with held._keeper._changed:  # as a thread may that does not live on in the child
        locked.set()
        forked.wait(60)

locked, forked = threading.Event(), threading.Event()
with lease(min_memory_mb=1) as held:
    threading.Thread(target=hold_lock).start()
    locked.wait(60)
    child = os.fork()
    if child:
        forked.set()
        assert os.waitpid(child, 0)[1] == 0
        print("child ended", flush=True)
        sys.stdin.read()
if not child:
    os._exit(0)
"""
    holder = spawn([sys.executable, "-W", "ignore", "-c", program], stdin=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == "child ended\n", holder.stderr
    assert len(server.leases()) == 1
    holder.communicate()
    assert holder.returncode == 0
    assert server.leases() == []


def test_a_holder_that_is_killed_frees_its_memory_with_the_time_to_live(server: Orchestrator, spawn):
    program = f"""
import time
from orchestrator.client import lease
with lease(min_memory_mb=9000, ttl_seconds={TTL_S}):
    print("held", flush=True)
    time.sleep(600)
"""
    holder = spawn([sys.executable, "-c", program])
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(LeaseDenied), lease(min_memory_mb=9000, wait_s=0):
        pass
    holder.kill()
    holder.wait(10)
    killed = time.monotonic()
    with lease(min_memory_mb=9000, wait_s=PATIENCE_S):
        # The time to live, a purge of the leader's (0.1 s here), our own pauses, and a busy machine.
        assert time.monotonic() - killed < TTL_S + 10
    assert len(server.leases("expired")) == 1
