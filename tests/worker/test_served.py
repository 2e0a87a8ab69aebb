"""Served models: a server of the operator's own, started under the slot's lease and asked over HTTP."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.store import audit, withdraw
from tests.processes import gone
from tests.waiting import wait_until
from tests.worker.test_worker import leased, submit
from worker import Cancelled, Context, OutOfTime, Permanent, served, server, serving
from worker.flags import Flags
from worker.handlers import Registered, _registry
from worker.lifeline import Lifeline
from worker.ports import free_port, listens
from worker.server import (
    PortTaken,
    ServerBusy,
    ServerExited,
    ServerFailed,
    ServerMissing,
    ServerNotReady,
    ServerOutOfMemory,
    ServerSilent,
    exit_error,
)
from worker.serving import Recipe, ServedModel
from worker.slot import Slot
from worker.wire import Channel

SCRIPT = str(Path(__file__).with_name("model_server.py"))


def context(**given):
    return Context("job-1", "chat", 1, "tester", **given)


def late_once(so):
    """The context of a job whose time is over as soon as that is so, and not before, however busy this machine is."""

    def look():
        if so():
            ctx._began = -math.inf
        return False

    ctx = context(max_runtime_sec=3600.0, _is_cancelled=look)
    return ctx


@contextmanager
def prepared(*switches, command=None, start_timeout_s=30.0, **recipe):
    """A served model that is not loaded yet; whatever becomes of it, its server does not outlive the test."""
    command = command or [sys.executable, SCRIPT, "--port", "{port}", *switches]

    class Model(ServedModel):
        pass

    Model.recipe = Recipe(command, "/v1/chat", start_timeout_s=start_timeout_s, **recipe)
    model = Model()
    try:
        yield model
    finally:
        model.unload()


@pytest.fixture
def model():
    """Start a model with these switches: `model("--say", "hello")`."""
    opened = []

    def start(*switches, **recipe):
        entered = prepared(*switches, **recipe)
        opened.append(entered)
        return entered.__enter__()

    yield start
    for entered in opened:
        entered.__exit__(None, None, None)


@pytest.fixture(scope="module")
def shared():
    """One server for all tests after which it lives on."""
    with prepared(headers={"X-Key": "secret"}) as ready:
        ready.load(context())
        yield ready


def pids(monkeypatch):
    """The processes of servers that are started from now on."""
    started = []

    class Noted(server.Server):
        def __init__(self, command):
            super().__init__(command)
            started.append(self.pid)

    monkeypatch.setattr(serving, "Server", Noted)
    return started


# ── registering ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def registry(monkeypatch):
    before = dict(_registry)
    yield _registry
    _registry.clear()
    _registry.update(before)


def test_a_command_is_registered_like_any_class(registry):
    served("chat", ["vllm", "--port", "{port}"], path="/v1/chat/completions", min_memory_mb=16_000, pinned=True)
    assert isinstance(registry["chat"], Registered)
    assert (registry["chat"].min_memory_mb, registry["chat"].pinned, registry["chat"].is_class) == (16_000, True, True)
    with pytest.raises(ValueError, match=r"two handlers: .*served\('chat'\)"):
        served("chat", ["other"], path="/")


@pytest.mark.parametrize(
    "argument", ["{payload}", "{}", "{port.__class__}", "{port!r}", "{port:{device}}", "{", '{"a": 1}']
)
def test_a_placeholder_that_nobody_fills_is_refused_when_it_is_registered(argument):
    with pytest.raises(ValueError, match=r"brace|format|expected"):
        served("chat", ["serve", argument], path="/v1/chat")


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": "vllm serve"},
        {"command": []},
        {"path": "v1"},
        {"health": "health"},
        {"start_timeout_s": 0},
        {"answer_timeout_s": -1},
    ],
)
def test_what_cannot_work_is_refused_when_it_is_registered(wrong):
    with pytest.raises(ValueError):
        Recipe(**{"command": ["serve"], "path": "/v1"} | wrong)


def test_arguments_name_port_model_and_device():
    recipe = Recipe(["serve", "{model_id}", "--port={port}", "{device}", '{{"a": 1}}'], "/")
    filled = recipe.arguments(context(model_id="meta/llama-3.1:8b", device="GPU-1"), 8000)
    assert filled == ["serve", "meta/llama-3.1:8b", "--port=8000", "GPU-1", '{"a": 1}']


@pytest.mark.parametrize(
    "model_id", [None, "--trust-remote-code", "/etc/passwd", "a/../../b", "a;reboot", "a b", "$(x)", "a\n", "a\0", "é"]
)
def test_a_job_does_not_write_the_command(model_id):
    with pytest.raises(Permanent, match="model"):
        Recipe(["serve", "{model_id}"], "/").arguments(context(model_id=model_id), 1)


def test_an_operator_may_list_the_models():
    recipe = Recipe(["serve", "{model_id}"], "/", models=("/data/llama",))
    assert recipe.arguments(context(model_id="/data/llama"), 1) == ["serve", "/data/llama"]
    with pytest.raises(Permanent, match="'llama' is none"):
        recipe.arguments(context(model_id="llama"), 1)


def test_a_command_without_a_model_takes_any_job():
    assert Recipe(["serve"], "/").arguments(context(model_id="--x"), 1) == ["serve"]


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_loaded_when_it_says_so(model):
    started = model("--unready", "3")
    started.load(context())
    assert started.healthy()
    assert started.run(context(), {"n": 1})["payload"] == {"n": 1}


@pytest.mark.parametrize(
    ("switches", "error", "told"),
    [
        (
            ["--exit", "3", "--say", "no such model"],
            ServerExited,
            r"exited with code 3; its last output:\nno such model",
        ),
        (["--exit", "4"], ServerExited, "exited with code 4; it printed nothing"),
        (["--daemonize"], ServerExited, "must stay in the foreground"),
        (
            ["--exit", "1", "--say", "CUDA out of memory. Tried …"],
            ServerOutOfMemory,
            r"\(CUDA out of memory\. Tried …\)",
        ),
        (["--kill"], ServerOutOfMemory, r"signal 9 \(Killed\)(.|\n)*when memory runs out"),
    ],
)
def test_one_that_ends_while_it_loads_says_why(model, switches, error, told):
    loading = model(*switches)
    with pytest.raises(error, match=told) as raised:
        loading.load(context())
    assert type(raised.value) is error
    assert not loading.healthy()


def test_what_it_said_last_is_waited_for(monkeypatch):
    class Lagging(server.Server):
        def _read(self):
            self._process.wait()
            time.sleep(0.2)
            super()._read()

    monkeypatch.setattr(server, "LAST_WORDS_S", 30.0)
    with pytest.raises(ServerExited, match="goodbye"):
        Lagging(["sh", "-c", "echo goodbye; exit 1"]).check(wait_s=30)


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB: cudaMalloc failed: out of memory",
        "RuntimeError: CUDA error: out of memory",
        "torch.cuda.OutOfMemoryError",
        "hipErrorOutOfMemory",
        "vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_want_of_memory_is_known_by_what_servers_say(line):
    error = exit_error(1, ["loading", line, *["Traceback"] * 200])
    assert type(error) is ServerOutOfMemory
    assert line[:40] in str(error)


@pytest.mark.parametrize("output", [[], ["memory: 24 GB", "KeyError: 'x'"]])
def test_other_ends_are_no_want_of_memory(output):
    assert type(exit_error(1, output)) is ServerExited


def test_one_that_never_gets_healthy_is_given_up_with_what_it_said(model, monkeypatch):
    loading = model("--unready", "1000000", "--say", "loading shard 1", start_timeout_s=3600.0)
    started = pids(monkeypatch)

    def monotonic():
        """Its time is over when it has said something."""
        return time.monotonic() + (3600.0 if loading._server and loading._server._output else 0.0)

    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with pytest.raises(ServerNotReady, match=r"within 3600 s; its last output:\nloading shard 1"):
        loading.load(context())
    assert gone(*started)


def test_a_health_check_that_is_never_answered_ends_at_the_limit_too(model, monkeypatch):
    with stranger(None) as port:
        monkeypatch.setattr(serving, "free_port", lambda: port)
        loading = model(command=["sleep", "60"], start_timeout_s=0.3)
        with pytest.raises(ServerNotReady):
            loading.load(context())


def test_a_cancelled_job_does_not_wait_for_the_model(model, monkeypatch, tmp_path):
    loading = model("--load-until", str(tmp_path / "never"))
    started = pids(monkeypatch)
    with pytest.raises(Cancelled):
        loading.load(context(_is_cancelled=lambda: bool(started)))
    assert gone(*started)


def test_a_program_that_is_not_there_is_named(model):
    with pytest.raises(ServerMissing, match="'no-such-server'"):
        model(command=["no-such-server"]).load(context())


@pytest.mark.parametrize("switch", [[], ["--lines"]], ids=["one line", "lines"])
def test_one_that_floods_its_output_neither_waits_nor_fills_memory(model, switch):
    flooding = model("--flood", "20", *switch)
    flooding.load(context())
    assert 0 < sum(map(len, flooding._server._output)) <= server.LINES_KEPT * server.LINE_BYTES
    assert flooding.run(context(), {})


@contextmanager
def stranger(status):
    """Somebody else's server: answers everything alike, or, without a status, never."""
    leave = threading.Event()

    class Alike(BaseHTTPRequestHandler):
        def do_GET(self):
            if status is None:
                leave.wait(30)
            self.send_response(status or 500)
            self.end_headers()

        def log_message(self, *_args):
            pass

    class Listening(ThreadingHTTPServer):
        allow_reuse_port = False

    with Listening(("127.0.0.1", 0), Alike) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.02,), name="stranger")
        thread.start()
        try:
            yield other.server_address[1]
        finally:
            leave.set()
            other.shutdown()
            thread.join()


def ports(monkeypatch, taken, times, tell=lambda: None):
    """The first so many ports that are chosen have just been taken."""
    chosen: list[int] = []

    def choose():
        chosen.append(taken if len(chosen) < times else free_port())
        if chosen[-1] != taken:
            tell()
        return chosen[-1]

    monkeypatch.setattr(serving, "free_port", choose)
    return chosen


def test_a_port_that_another_took_is_given_up_for_the_next(model, monkeypatch):
    with stranger(404) as taken:
        chosen = ports(monkeypatch, taken, times=2)
        started = model()
        started.load(context())
        assert started.run(context(), {})["args"] == ["--port", str(chosen[-1])]
        assert len(chosen) == 3


def test_the_health_of_another_is_not_its_own(model, monkeypatch, tmp_path):
    """It still loads, and somebody else answers 200 on its port: jobs would go to a model they did not ask for."""
    with stranger(200) as taken:
        ports(monkeypatch, taken, times=1, tell=(tmp_path / "loaded").touch)
        started = model("--load-until", str(tmp_path / "loaded"))
        started.load(context())
        assert started.run(context(), {"n": 1})["payload"] == {"n": 1}


def test_ports_are_not_tried_for_ever(model, monkeypatch):
    with stranger(404) as taken:
        chosen = ports(monkeypatch, taken, times=1000)
        with pytest.raises(PortTaken, match="in use"):
            model().load(context())
        assert len(chosen) == serving.PORT_TRIES


def test_a_port_belongs_to_its_listener_and_its_ancestors():
    with stranger(200) as port:
        assert listens(os.getpid(), port)
        assert listens(os.getppid(), port)
        assert not listens(os.getpid(), port + 1 if port < 65_535 else port - 1)


SHARING = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True):
    print("listens", flush=True)
    sys.stdin.read()
"""


def test_a_port_that_is_shared_belongs_to_nobody():
    """Servers that let others share their port would get each other's jobs."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as first:
        port = first.getsockname()[1]
        command = [sys.executable, "-c", SHARING, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
            assert second.stdin is not None and second.stdout is not None
            assert second.stdout.readline() == b"listens\n"
            shared = listens(second.pid, port)
            first.close()
            alone = listens(second.pid, port)
            second.stdin.close()
    assert (shared, alone) == (False, True)


# ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_payload_is_posted_and_the_answer_is_the_result(shared, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    result = shared.run(context(), {"text": "größe"})
    assert (result["payload"], result["path"]) == ({"text": "größe"}, "/v1/chat")
    assert (result["headers"]["x-key"], result["headers"]["content-type"]) == ("secret", "application/json")


@pytest.mark.parametrize(
    ("payload", "result"),
    [
        ({"answer": 200, "body": "plain"}, {"text": "plain"}),
        ({"answer": 200, "body": "{half"}, {"text": "{half"}),
        ({"answer": 204}, {"text": ""}),
        ({"answer": 201, "body": "[1]"}, [1]),
    ],
)
def test_what_is_no_json_is_text(shared, payload, result):
    assert shared.run(context(), payload) == result


def test_a_deeply_nested_answer_is_text_too(shared):
    body = "[" * 100_000
    assert shared.run(context(), {"answer": 200, "body": body}) == {"text": body}


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_that_it_refuses_fails_for_good(shared, status):
    with pytest.raises(Permanent, match=f"answered {status}: no such thing") as raised:
        shared.run(context(), {"answer": status, "body": "no such thing", "more": 100_000})
    assert len(str(raised.value)) < 2100


def test_a_redirect_is_not_followed(shared):
    with pytest.raises(Permanent, match=r"to http://elsewhere\.test/, but redirects are not followed"):
        shared.run(context(), {"answer": 307, "headers": {"Location": "http://elsewhere.test/"}})


@pytest.mark.parametrize("status", [408, 429, 503])
@pytest.mark.parametrize(
    ("headers", "after"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
    ],
)
def test_a_busy_one_says_when_to_come_again(shared, status, headers, after):
    with pytest.raises(ServerBusy) as raised:
        shared.run(context(), {"answer": status, "headers": headers})
    assert raised.value.after == after
    assert shared.healthy()


def test_an_error_of_its_own_is_tried_again_and_it_stays(shared):
    with pytest.raises(ServerFailed, match="answered 500: oops"):
        shared.run(context(), {"answer": 500, "body": "oops"})
    assert shared.healthy()


def test_a_connection_that_it_drops_is_tried_again_and_it_stays(shared, monkeypatch):
    monkeypatch.setattr(serving, "EXIT_SHOWS_S", 0.1)
    with pytest.raises(ServerFailed, match="broke the connection"):
        shared.run(context(), {"drop": True})
    assert shared.healthy()


@pytest.mark.parametrize("payload", [{"answer": 200, "more": 1001}, {"endless": True}])
def test_an_answer_larger_than_a_result_is_not_read_to_its_end(shared, payload):
    with pytest.raises(Permanent, match="more than 1000 bytes"):
        shared.run(context(result_limit=1000), payload)
    assert shared.run(context(result_limit=1000), {"answer": 200, "more": 1000}) == {"text": "x" * 1000}


def test_a_refusal_of_a_long_payload_is_heard(shared):
    with pytest.raises(Permanent, match="answered 413: too long for me"):
        shared.run(context(), {"text": "x" * 30_000_000})


def test_a_cancelled_job_leaves_the_server_at_once_and_it_stays(shared, tmp_path):
    notes = tmp_path / "notes"
    with pytest.raises(Cancelled):
        shared.run(context(_is_cancelled=notes.exists), {"hang": str(notes)})
    wait_until(lambda: "gone" in notes.read_text(), what="the server sees that nobody waits")
    assert shared.run(context(), {})


def test_a_job_that_is_out_of_time_leaves_the_server_and_it_stays(shared, tmp_path):
    """Killing the slot would take the model with it."""
    notes = tmp_path / "notes"
    with pytest.raises(OutOfTime, match=r"max_runtime_sec = 3600\b"):
        shared.run(late_once(notes.exists), {"hang": str(notes)})
    wait_until(lambda: "gone" in notes.read_text(), what="the server sees that nobody waits")
    assert shared.healthy()
    assert shared.run(context(max_runtime_sec=3600.0), {})


def test_a_job_that_is_out_of_time_while_the_model_loads_does_not_wait_for_it(model, monkeypatch, tmp_path):
    loading = model("--load-until", str(tmp_path / "never"))
    started = pids(monkeypatch)
    with pytest.raises(OutOfTime):
        loading.load(late_once(lambda: bool(started)))
    assert gone(*started)


def test_one_that_was_frozen_until_the_job_was_out_of_time_is_loaded_no_more(frozen, monkeypatch):
    monkeypatch.setattr(serving, "HEALTH_S", 0.2)
    monkeypatch.setattr(server, "STOP_S", 0.1)
    with pytest.raises(OutOfTime):
        frozen[0].run(context(max_runtime_sec=0.3), {})
    assert not frozen[0].healthy()


@pytest.fixture
def patient(monkeypatch):
    """A server that breaks the connection is given all the time it needs to end."""
    monkeypatch.setattr(serving, "EXIT_SHOWS_S", 30.0)


@pytest.mark.usefixtures("patient")
def test_one_that_ends_in_the_middle_says_why_and_is_loaded_no_more(model):
    dying = model()
    dying.load(context())
    with pytest.raises(ServerExited, match=r"exited with code 3; its last output:\nassertion failed"):
        dying.run(context(), {"exit": 3, "say": "assertion failed"})
    assert not dying.healthy()


@pytest.mark.usefixtures("patient")
def test_one_that_closes_its_connections_before_it_ends_says_why_too(model):
    dying = model()
    dying.load(context())
    with pytest.raises(ServerOutOfMemory):
        dying.run(context(), {"close": 0.3})


def test_one_that_is_no_longer_healthy_is_loaded_no_more(model, monkeypatch):
    failing = model()
    started = pids(monkeypatch)
    failing.load(context())
    with pytest.raises(ServerFailed, match="the engine is dead"):
        failing.run(context(), {"sick": True})
    assert not failing.healthy()
    assert gone(*started)


def test_one_that_does_not_answer_is_loaded_no_more(model, tmp_path, monkeypatch):
    hanging = model(answer_timeout_s=0.2)
    started = pids(monkeypatch)
    hanging.load(context())
    with pytest.raises(ServerSilent, match=r"within 0\.2 s"):
        hanging.run(context(), {"hang": str(tmp_path / "notes")})
    assert not hanging.healthy()
    assert gone(*started)


#: Longer than the kernel's buffers: a server that does not read gets only the beginning.
LONG = {"text": "x" * 20_000_000}


@pytest.fixture
def frozen(model):
    """A model whose server is stopped, and what makes it go on."""
    stopped = model()
    stopped.load(context())
    pid = stopped._server.pid
    os.kill(pid, signal.SIGSTOP)
    yield stopped, lambda: os.kill(pid, signal.SIGCONT)
    with suppress(ProcessLookupError):  # it may have been killed
        os.kill(pid, signal.SIGCONT)


def test_one_that_is_frozen_does_not_hold_a_cancelled_job(frozen):
    looks = iter([False] * 5)
    with pytest.raises(Cancelled):
        frozen[0].run(context(_is_cancelled=lambda: next(looks, True)), LONG)


def test_one_that_reads_slowly_gets_the_whole_payload(frozen):
    looks = iter([False] * 5)

    def go_on():
        if next(looks, True):
            frozen[1]()
        return False

    assert frozen[0].run(context(_is_cancelled=go_on, result_limit=30_000_000), LONG)["payload"] == LONG


def test_one_that_resists_is_killed(model, monkeypatch):
    monkeypatch.setattr(server, "STOP_S", 0.1)
    stubborn = model("--stubborn")
    started = pids(monkeypatch)
    stubborn.load(context())
    stubborn.unload()
    assert gone(*started)
    stubborn.unload()  # twice does no harm


# ── a slot and its models ───────────────────────────────────────────────────────────────────────────────────────


class Fragile:
    """A handler that may break, and says so."""

    log: list[str] = []  # noqa: RUF012 - emptied by each test
    well: bool | None = True

    def load(self, ctx):
        self.log.append("load")

    def run(self, ctx, payload):
        Fragile.well = payload.get("well", True)
        if payload.get("fail"):
            raise RuntimeError("failed")
        return "done"

    def healthy(self):
        return self.well

    def unload(self):
        self.log.append("unload")
        Fragile.well = True


@pytest.fixture
def run_in_slot():
    """Run a job of a handler in a slot that nobody listens to: how it ended, and its result."""
    ours, theirs = Channel.pair()

    def run(target, body="{}", result_limit=1000, **job):
        new = Slot(ours, {"it": Registered("it", target, 0)}, Flags(), lifeline, result_limit)
        known = slots.setdefault(target, new)
        return known._run_job({"job_id": "job-1", "type": "it", "attempt": 1, "agent": "tester"} | job, body)

    slots: dict[Any, Slot] = {}
    lifeline = Lifeline()
    yield run
    lifeline.close()
    ours.close()
    theirs.close()


@pytest.fixture
def attempt(run_in_slot):
    Fragile.log, Fragile.well = [], True
    return lambda body: run_in_slot(Fragile, body)[0]["end"]


def test_a_model_that_broke_while_idle_is_loaded_anew(attempt):
    assert attempt("{}")["keeps"]
    Fragile.well = False
    assert attempt("{}")["outcome"] == "done"
    assert Fragile.log == ["load", "unload", "load"]


def test_a_model_that_does_not_say_how_it_is_stays_loaded(attempt):
    for _ in range(3):
        Fragile.well = None
        assert attempt("{}")["keeps"]
    assert Fragile.log == ["load"]


def test_a_model_that_broke_with_its_job_is_not_kept(attempt):
    ending = attempt('{"fail": true, "well": false}')
    assert (ending["outcome"], ending["keeps"]) == ("failed", False)
    assert Fragile.log == ["load", "unload"]


def test_a_model_that_is_well_after_its_job_failed_is_kept(attempt):
    assert attempt('{"fail": true}')["keeps"]
    assert Fragile.log == ["load"]


def test_a_handler_that_leaves_in_time_ends_as_timed_out(run_in_slot):
    def slow(ctx, _payload):
        while not ctx.out_of_time:
            time.sleep(0.01)
        raise OutOfTime("not done yet")

    ending = run_in_slot(slow, max_runtime_sec=0.1)[0]["end"]
    assert (ending["outcome"], ending["error_kind"]) == ("failed", "timeout")


def test_a_job_is_out_of_time_a_moment_before_it_is_killed():
    now = time.monotonic()
    assert not context(max_runtime_sec=1000.0, _began=now - 900.0).out_of_time
    assert context(max_runtime_sec=1000.0, _began=now - 999.9).out_of_time
    assert context(max_runtime_sec=1.0, _began=now - 0.95).out_of_time
    assert not context(_began=now - 1e6).out_of_time


def test_a_handler_knows_how_long_a_result_may_be(run_in_slot):
    assert run_in_slot(lambda ctx, _payload: ctx.result_limit, result_limit=12_345)[1] == "12345"


# ── whole workers ───────────────────────────────────────────────────────────────────────────────────────────────

HANDLERS = """
import sys, time
from worker import Context, served

# Who may run for more than 20 s has as many to leave: on a busy machine half a second is nothing.
usual = Context.out_of_time.fget

def out_of_time(ctx):
    limit_s = ctx.max_runtime_sec or 0
    return time.monotonic() - ctx._began > limit_s - 20 if limit_s > 20 else usual(ctx)

Context.out_of_time = property(out_of_time)
SERVER = [sys.executable, {script!r}, "--port", "{{port}}", "--memory", "3000"]
served("chat", SERVER, path="/v1/chat", min_memory_mb=4000)
served("named", [*SERVER, "--model", "{{model_id}}"], path="/v1/chat", min_memory_mb=4000)
served("tight", [*SERVER, "--oom-until", {tries!r}], path="/v1/chat", min_memory_mb=4000)
"""


@pytest.fixture
def worker(cluster, orchestrator, tmp_path):
    module = HANDLERS.format(script=SCRIPT, tries=str(tmp_path / "tries"))
    (tmp_path / "served_models.py").write_text(module)
    return cluster.worker(
        path=str(tmp_path),
        worker_handlers=("served_models",),
        worker_slots=1,
        resident_min_s=0.0,
        gpu_backend="sim:1x24576",
    )


def audited(cluster, job_id):
    return cluster.db.read(lambda conn: audit.of_job(conn, job_id))


def run(cluster, orchestrator, type="chat", payload=None, **fields):
    return cluster.wait_for(submit(orchestrator, type, payload or {}, **fields), "done")["result"]


def test_a_server_stays_warm_and_one_that_died_is_replaced(cluster, orchestrator, worker):
    first = run(cluster, orchestrator)
    assert first["device"] == "SIM-node-1-0"
    assert os.getpgid(first["pid"]) in worker.slots(), (
        "whoever kills the slot's group kills the server and all of its own"
    )
    assert run(cluster, orchestrator)["pid"] == first["pid"]
    assert leased(cluster) == 4000
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: gone(first["pid"]), what="its end")
    again = submit(orchestrator, "chat", {})
    assert cluster.wait_for(again, "done")["result"]["pid"] != first["pid"]
    assert cluster.job(again)["attempts"] == 1
    assert leased(cluster) == 4000


def test_a_server_that_dies_with_its_job_leaves_the_gpu_and_says_why(cluster, orchestrator, worker):
    died = submit(orchestrator, "chat", {"exit": 3, "say": "assertion failed"}, max_attempts=2)
    record = cluster.wait_for(died, "dead_letter")
    assert (record["attempts"], record["crashes"], record["error_kind"]) == (2, 0, "transient")
    assert record["last_error"].startswith("ServerExited: the model server exited with code 3")
    assert "assertion failed" in record["last_error"]
    wait_until(lambda: leased(cluster) == 0, what="its memory back")


def test_want_of_memory_is_tried_again_after_a_pause(cluster, orchestrator, worker, tmp_path):
    job_id = submit(orchestrator, "tight", {}, retry_base_sec=0.5)
    record = cluster.wait_for(job_id, "done")
    assert record["attempts"] == 2
    retried = next(one for one in audited(cluster, job_id) if one["event_type"] == "job.retry")
    assert retried["details"]["error"].startswith("ServerOutOfMemory: the model server ran out of memory (torch.OutOf")
    assert len((tmp_path / "tries").read_text().split()) == 2, "one start per attempt"


def test_a_cancel_leaves_the_server_and_its_worker_takes_it_along(cluster, orchestrator, worker, tmp_path):
    notes = tmp_path / "notes"
    hanging = submit(orchestrator, "named", {"hang": str(notes)}, model_id="llama")
    wait_until(notes.exists, what="the request", timeout=30)
    cluster.db.write(lambda conn: withdraw.cancel(conn, hanging))
    cluster.wait_for(hanging, "cancelled")
    pid = run(cluster, orchestrator, "named", model_id="llama")["pid"]
    assert notes.read_text() == f"gone {pid}", "the same server, which knows that nobody waits"
    worker.kill()
    wait_until(lambda: gone(pid), what="its end")


def test_a_time_limit_ends_the_request_and_the_server_only_if_it_does_not_let_go(
    cluster, orchestrator, worker, tmp_path
):
    pid = run(cluster, orchestrator)["pid"]
    late = submit(orchestrator, "chat", {"hang": str(tmp_path / "notes")}, max_runtime_sec=20.5, max_attempts=1)
    assert cluster.wait_for(late, "dead_letter")["error_kind"] == "timeout"
    assert run(cluster, orchestrator)["pid"] == pid
    os.kill(pid, signal.SIGSTOP)
    late = submit(orchestrator, "chat", {}, max_runtime_sec=0.3, max_attempts=1)
    assert cluster.wait_for(late, "dead_letter")["error_kind"] == "timeout"
    wait_until(lambda: gone(pid), what="its end")
    stopped = run(cluster, orchestrator)["pid"]
    assert worker.stop() == 0
    assert gone(stopped)
