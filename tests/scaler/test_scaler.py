"""KEDA's external scaler, from outside: real processes, a real gRPC client."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from shutil import which

import grpc
import httpx
import pytest

from orchestrator.cli import run
from orchestrator.client.api import Api
from orchestrator.client.errors import Refused
from orchestrator.errors import Overloaded
from orchestrator.scaler import watch as watching
from orchestrator.scaler.server import CALLERS, MOST_QUEUED
from orchestrator.scaler.service import MOST_STREAMS
from tests.cluster import post
from tests.servers import free_port
from tests.waiting import wait_until


def submit(url, gold, count=1, **fields):
    jobs = [{"type": "sleep", "payload": {"seconds": 0}, "pool_id": gold["poolId"]} | fields for _ in range(count)]
    assert post(url, "/jobs/submit_batch", {"jobs": jobs})["created"] == count


def refusal(call) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value


class Heard:
    """What a stream says, with the moments at which it did."""

    def __init__(self, stream) -> None:
        self.stream = stream
        self.said: list[tuple[float, bool]] = []
        self.end: grpc.RpcError | None = None
        threading.Thread(target=self._listen, daemon=True, name="keda").start()

    def _listen(self) -> None:
        try:
            for answer in self.stream:
                self.said.append((time.monotonic(), answer.result))
        except grpc.RpcError as over:
            self.end = over

    @property
    def results(self) -> list[bool]:
        return [result for _, result in self.said]


@pytest.fixture
def gold(pool):
    """Metadata of a ScaledObject."""
    return {"poolId": pool}


@pytest.fixture
def served(shared, connect):
    """Those that go on, and a client."""
    return *shared[:3], connect(shared.address, patient=True)


@pytest.fixture
def mortal(shared, start_scaler, connect):
    """An orchestrator that may be killed or stopped, one more of the cluster, and its scaler."""
    # No port that the system gives to others: it is to be served again.
    member, url = shared.cluster.serve(port=free_port())
    scaler = start_scaler(url)
    yield member, url, scaler, connect(scaler.address())
    member.send(signal.SIGCONT)
    member.kill()


@pytest.fixture
def work(shared):
    """`work(gold)`: a worker of this pool, until the test's end."""
    started = []

    def begin(gold):
        started.append(shared.cluster.worker(worker_pool=gold["poolId"]))

    yield begin
    for worker in started:
        worker.kill()


def test_one_job_activates_a_pool_and_its_end_makes_it_idle(served, gold, work):
    _, url, _, keda = served
    submit(url, gold)
    assert keda.is_active(**gold)
    assert keda.metric("desired_workers", **gold).metricValueFloat == 1.0
    assert not keda.is_active(poolId="default")
    work(gold)
    wait_until(lambda: not keda.is_active(**gold), what="an idle pool")
    idle = keda.metric(**gold)
    assert (idle.metricName, idle.metricValue, idle.metricValueFloat) == ("desired_workers", 0, 0.0)


def test_a_paused_pool_is_not_woken_until_it_is_resumed(served, gold):
    _, url, _, keda = served
    submit(url, gold)
    paused = {"scope": "pool", "name": gold["poolId"]}
    post(url, "/control/pause", paused)
    wait_until(lambda: not keda.is_active(**gold), what="nobody is wanted")
    assert (keda.metric(**gold).metricValue, keda.metric(metric="depth", **gold).metricValue) == (0, 1)
    post(url, "/control/resume", paused)
    wait_until(lambda: keda.is_active(**gold), what="woken")


def test_the_metric_is_the_one_that_was_asked_for(served, gold):
    _, url, _, keda = served
    submit(url, gold, 150)
    spec = keda.spec(**gold)
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("desired_workers", 1, 1.0)
    assert keda.metric(**gold).metricValue == 38  # 150 jobs, four to a worker
    depth = gold | {"metric": "depth", "targetValue": "2.5"}
    spec = keda.spec(**depth)
    assert (spec.metricName, spec.targetSizeFloat) == ("depth", 2.5)
    assert keda.metric("depth", **depth).metricValueFloat == 150.0


def test_a_stream_says_how_it_is_and_every_change_within_about_a_second(served, gold, work):
    _, url, _, keda = served
    submit(url, gold)
    work(gold)
    wait_until(lambda: not keda.is_active(**gold), what="an idle pool")
    heard = Heard(keda.stream(**gold))
    wait_until(lambda: heard.results[-1:] == [False], what="idle")
    moment = time.monotonic()
    submit(url, gold, payload={"seconds": 600})
    wait_until(lambda: heard.results[-1:] == [True], what="active")
    # An answer may be half a second old, and this machine may be busy with other tests.
    assert heard.said[-1][0] - moment < 5
    assert heard.results[-2:] == [False, True]
    heard.stream.cancel()


def test_a_pool_that_nobody_knows_yet_is_watched_and_woken_by_its_first_job(served, gold):
    _, url, _, keda = served
    heard = Heard(keda.stream(**gold))
    submit(url, {"poolId": "other"})
    error = refusal(lambda: keda.is_active(**gold))
    assert error.code() is grpc.StatusCode.NOT_FOUND and gold["poolId"] in error.details()
    assert heard.said == [] and heard.end is None
    submit(url, gold)
    wait_until(lambda: heard.results == [True], what="woken")


def test_an_orchestrator_that_is_away_is_unavailable_and_never_inactive(shared, mortal, gold):
    member, url, scaler, keda = mortal
    submit(url, gold)
    heard = Heard(keda.stream(**gold))
    wait_until(lambda: heard.results == [True], what="active")
    member.kill()

    def away() -> grpc.RpcError | None:
        try:
            assert keda.is_active(**gold), "inactive, though nobody said so"
        except grpc.RpcError as error:
            return error
        return None

    error = wait_until(away, what="an error")
    assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE and url in error.details()
    assert refusal(lambda: keda.metric(**gold)).code() is grpc.StatusCode.UNAVAILABLE
    assert keda.spec(**gold).metricName == "desired_workers"  # KEDA makes its autoscaler of this
    again, _ = shared.cluster.serve(port=int(url.rpartition(":")[2]))
    wait_until(lambda: away() is None, what="recovery")
    assert heard.results == [True] and heard.end is None
    assert scaler.process.poll() is None
    again.kill()


def test_an_orchestrator_that_hangs_keeps_nobody_waiting_for_long(mortal, gold):
    member, url, _, keda = mortal
    submit(url, gold)

    def answer() -> grpc.StatusCode | None:
        try:
            assert keda.is_active(timeout=30, **gold)
        except grpc.RpcError as error:
            return error.code()
        return None

    wait_until(lambda: answer() is None, what="an answer")
    member.send(signal.SIGSTOP)
    assert wait_until(answer, what="an error") is grpc.StatusCode.UNAVAILABLE
    member.send(signal.SIGCONT)
    wait_until(lambda: answer() is None, what="recovery")


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({}, "poolId"),
        ({"poolId": ""}, "poolId"),
        ({"poolId": "two words"}, "poolId"),
        ({"poolId": "../jobs"}, "poolId"),
        ({"poolId": "gold", "metric": "jobs"}, "metric"),
        ({"poolId": "gold", "targetValue": "0"}, "targetValue"),
        ({"poolId": "gold", "targetValue": "nan"}, "targetValue"),
        ({"poolId": "gold", "targetValue": "many"}, "targetValue"),
    ],
)
def test_metadata_that_make_no_sense_are_refused_by_name(served, metadata, word):
    keda = served[-1]
    for call in (keda.is_active, keda.spec, keda.metric, lambda **given: next(keda.stream(**given))):
        error = refusal(lambda call=call: call(**metadata))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and word in error.details()


def test_a_metric_that_it_has_not_is_refused(served, gold):
    _, url, _, keda = served
    submit(url, gold)
    assert refusal(lambda: keda.metric("cpu", **gold)).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_server_of_something_else_is_no_empty_pool(start_scaler, connect, tmp_path, gold):
    port = free_port()
    other = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)],
        stderr=subprocess.DEVNULL,
    )
    try:
        (tmp_path / "autoscale").mkdir()
        (tmp_path / "autoscale" / gold["poolId"]).write_text("{}")
        keda = connect(start_scaler(f"http://127.0.0.1:{port}").address())

        def said() -> str:
            error = refusal(lambda: keda.is_active(**gold))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return error.details()

        wait_until(lambda: "depth" in said(), what="an answer without a depth")
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_also_with_streams_open(shared, start_scaler, connect, number, gold):
    url = shared.url
    scaler = start_scaler(url)
    keda = connect(scaler.address())
    submit(url, gold)
    heard = Heard(keda.stream(**gold))
    wait_until(lambda: heard.results == [True], what="active")
    scaler.send(number)
    assert scaler.process.wait(20) == 0
    assert "Traceback" not in scaler.tail()
    wait_until(lambda: heard.end is not None or not heard.stream.is_active(), what="the stream's end")
    assert heard.results == [True]


def test_many_streams_may_be_open_at_once(served, gold):
    _, url, _, keda = served
    submit(url, gold)
    streams = [Heard(keda.stream(**gold)) for _ in range(20)]
    wait_until(lambda: all(one.results == [True] for one in streams), what="twenty streams")
    for one in streams:
        one.stream.cancel()
    assert keda.is_active(**gold)


def test_on_a_network_it_speaks_tls_only(start_scaler):
    scaler = start_scaler("http://127.0.0.1:1", "--host", "0.0.0.0")  # noqa: S104 - refused
    assert scaler.process.wait(30) == 1
    assert "--tls-cert" in scaler.tail() and "Traceback" not in scaler.tail()


def test_a_port_that_is_taken_is_told(start_scaler):
    first = start_scaler("http://127.0.0.1:1")
    port = first.address().rpartition(":")[2]
    second = start_scaler("http://127.0.0.1:1", "--port", port)
    assert second.process.wait(30) == 1
    assert port in second.tail() and "Traceback" not in second.tail()


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("orchestrator.scaler")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert run(["scaler"]) == 1
    said = capsys.readouterr().err
    assert "/path/to/clone[scaler]" in said and "Traceback" not in said


def certificate(folder, name):
    """Signed by itself, for 127.0.0.1."""
    if which("openssl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("openssl is not installed")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            key,
            "-out",
            cert,
            "-days",
            "2",
            *subject,
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_with_tls_only_those_it_trusts_are_answered(shared, start_scaler, connect, tmp_path, gold):
    url = shared.url
    submit(url, gold)
    cert, key = certificate(tmp_path, "scaler")
    client, client_key = certificate(tmp_path, "keda")
    scaler = start_scaler(url, "--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(client))
    address = scaler.address()
    known = grpc.ssl_channel_credentials(cert.read_bytes(), client_key.read_bytes(), client.read_bytes())
    assert connect(address, known, patient=True).is_active(**gold)
    stranger = grpc.ssl_channel_credentials(cert.read_bytes())
    assert refusal(lambda: connect(address, stranger).is_active(**gold)).code() is grpc.StatusCode.UNAVAILABLE
    assert refusal(lambda: connect(address).is_active(**gold)).code() is grpc.StatusCode.UNAVAILABLE


def test_more_calls_than_it_has_room_for_are_refused_at_once(mortal, gold):
    """And no line of calls grows while its orchestrator hangs."""
    member, url, _, keda = mortal
    submit(url, gold)
    member.send(signal.SIGSTOP)
    call = keda._unary("IsActive", "ScaledObjectRef", "IsActiveResponse")
    room = MOST_STREAMS + CALLERS + MOST_QUEUED

    def refused() -> bool:
        """Of calls that come while the first ones wait; a busy machine may be too slow for that."""
        calls = [call.future(keda.ref(**gold), timeout=60) for _ in range(room + 100)]
        codes = Counter(one.code() for one in calls)
        assert codes.keys() <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        return len(codes) == 2

    wait_until(refused, what="some are refused at once, the others after a while")
    member.send(signal.SIGCONT)
    wait_until(lambda: call.future(keda.ref(**gold), timeout=30).code() is grpc.StatusCode.OK, what="recovery")


class Counting(Api):
    """Notes what it is asked, and knows only some pools."""

    def __init__(self, unknown=()):
        self.url = "http://x"
        self.asked: list[str] = []
        self.unknown = {f"/autoscale/{name}" for name in unknown}

    def send(self, request):
        self.asked.append(request.path)
        if request.path in self.unknown:
            raise Refused(httpx.Response(404))
        return {"depth": 1}


def test_any_number_of_objects_costs_one_question_per_pool():
    api = Counting()
    watch = watching.Watch(api)
    with watch.watching("gold"), watch.watching("gold"), watch.watching("gold"):
        watch._look(watch._pools(time.monotonic()))
    assert api.asked == ["/autoscale/gold"]


def looks(watch, *later_s):
    """What the thread does, so many seconds from now."""
    now = time.monotonic()
    for seconds in later_s:
        watch._look(watch._pools(now + seconds))


def test_a_name_that_nobody_has_is_asked_about_once_unless_a_stream_waits_for_it():
    api = Counting(unknown=("typo", "soon"))
    watch = watching.Watch(api)
    with watch.watching("soon"):
        watch._note("typo", time.monotonic())
        watch._note("gold", time.monotonic())
        looks(watch, 0.0, 1.0, 2.0, 3.0)
    assert Counter(api.asked) == {"/autoscale/soon": 4, "/autoscale/gold": 4, "/autoscale/typo": 1}
    assert "typo" not in watch._until and "typo" not in watch._answers
    watch._note("typo", time.monotonic())  # whoever names it again asks again
    looks(watch, 0.0)
    assert Counter(api.asked)["/autoscale/typo"] == 2


def test_a_new_name_is_no_reason_to_ask_about_the_others_again():
    api = Counting()
    watch = watching.Watch(api)
    watch._note("gold", time.monotonic())
    looks(watch, 0.0)
    watch._note("new", time.monotonic())
    looks(watch, 0.0, 0.1)
    assert api.asked == ["/autoscale/gold", "/autoscale/new"]


def test_what_somebody_asked_about_long_ago_is_asked_about_no_more(monkeypatch):
    api = Counting()
    monkeypatch.setattr(watching, "INTEREST_S", 0.0)
    watch = watching.Watch(api)
    with watch.watching("streamed"):
        watch._note("once", time.monotonic())
        watch._look(watch._pools(time.monotonic() + 1))
    assert api.asked == ["/autoscale/streamed"]
    assert watch._pools(time.monotonic() + 1) == []


def test_nobody_can_make_it_watch_any_number_of_pools(monkeypatch):
    monkeypatch.setattr(watching, "MOST_POOLS", 2)
    watch = watching.Watch(Counting())
    for name in ("a", "b", "a"):
        watch._note(name, 0.0)
    with pytest.raises(Overloaded):
        watch._note("c", 0.0)
