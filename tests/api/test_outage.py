"""The database dies, freezes and comes back; the server starts and stops."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from orchestrator.api.server import listen, serve
from orchestrator.errors import ConfigError
from orchestrator.settings import Settings
from tests.api.conftest import Running
from tests.factories import gpu, hire
from tests.plain import http
from tests.proxy import Proxy
from tests.servers import MariaDB, Redis
from tests.waiting import wait_until

pytestmark = pytest.mark.embedded_too

JOB = {"type": "echo", "payload": {}}


@pytest.fixture
def mortal(
    private_server: Callable[[type[MariaDB]], MariaDB],
    private_database: Callable[[str], str],
    run_api: Callable[..., Running],
) -> tuple[Running, MariaDB]:
    """An instance whose database may be killed."""
    server = private_server(MariaDB)
    return run_api(database_url=private_database(server.url), db_timeout_s=4.0), server


def calls(api: Running, job_id: str) -> dict[str, Callable[[], httpx.Response]]:
    return {
        "submit": lambda: api.post("/jobs/submit", JOB),
        "batch": lambda: api.post("/jobs/submit_batch", {"jobs": [JOB]}),
        "get": lambda: api.get(f"/jobs/{job_id}"),
        "page": lambda: api.get("/jobs"),
        "autoscale": lambda: api.get("/autoscale/default"),
        "lease": lambda: api.post("/leases", {"agent": "a", "min_memory_mb": 1}),
        "release": lambda: api.post("/leases/x/release"),
        "leader": lambda: api.get("/control/leader"),
        "cancel": lambda: api.post(f"/jobs/{job_id}/cancel"),
        "retry": lambda: api.post(f"/jobs/{job_id}/retry"),
        "dlq": lambda: api.get("/dlq"),
        "redrive": lambda: api.post("/dlq/redrive", {"filter": {}}),
        "purge": lambda: api.post("/dlq/purge", {"filter": {}, "dry_run": True}),
    }


def test_a_dead_database_is_a_503_and_everything_recovers(mortal: tuple[Running, MariaDB]) -> None:
    api, mariadb = mortal
    job_id = api.submit()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(api.get, f"/jobs/{job_id}", params={"wait": 50})
        wait_until(lambda: len(api.backend.waiters), what="somebody waits")
        mariadb.kill()
        assert waiting.result(15).status_code == 503
    started = time.monotonic()
    for name, call in calls(api, job_id).items():
        answer = call()
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable"), name
        assert int(answer.headers["retry-after"]) >= 1
        assert "3306" not in answer.text and str(mariadb.port) not in answer.text
    assert time.monotonic() - started < 15
    assert api.get("/livez").status_code == 200
    assert api.get("/readyz").status_code == 503
    assert api.get("/health").json()["status"] == "down"
    metrics = api.get("/metrics")
    assert "gpu_orchestrator_database_up 0.0" in metrics.text
    assert "gpu_orchestrator_build_info" in metrics.text
    assert "gpu_orchestrator_job_queue_depth" not in metrics.text
    mariadb.start()
    wait_until(lambda: api.get("/readyz").status_code == 200, timeout=20, what="ready again")
    wait_until(lambda: api.get("/health").json()["status"] == "ok", timeout=20, what="led again")
    assert api.post("/jobs/submit", JOB).status_code == 202
    assert api.get(f"/jobs/{job_id}").json()["status"] == "pending"


@pytest.mark.parametrize("call", ["heartbeat", "submit"])
def test_a_connection_that_died_in_silence_is_nobodys_outage(mariadb, private_database, run_api, call) -> None:
    """A worker that speaks HTTP would be declared dead before the orchestrator gave up waiting."""
    with Proxy(mariadb.port) as proxy:
        url = private_database(mariadb.create_database("silence")).replace(f":{mariadb.port}/", f":{proxy.port}/")
        api: Running = run_api(database_url=url, db_timeout_s=100.0, worker_timeout_s=6.0)
        worker_id = api.post("/workers/register", {"slots": 1, "types": ["echo"]}).json()["worker_id"]
        bodies = {"heartbeat": ("/workers/heartbeat", {"worker_id": worker_id}), "submit": ("/jobs/submit", JOB)}
        proxy.strand()
        assert api.post(*bodies[call]).is_success
        proxy.heal()  # also what leads


def test_a_frozen_database_is_a_503_within_the_limit(mortal: tuple[Running, MariaDB]) -> None:
    api, mariadb = mortal
    hire(api.db, gpu(0))
    job_id = api.submit()
    os.kill(mariadb.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(16) as threads:
            started = time.monotonic()
            answers = [threads.submit(call) for call in calls(api, job_id).values()]
            answers.append(threads.submit(api.get, f"/jobs/{job_id}", params={"wait": 50}))
            assert {answer.result(20).status_code for answer in answers} == {503}
            assert time.monotonic() - started < 3 * api.db.settings.db_timeout_s
        assert api.get("/livez").status_code == 200
        assert "gpu_orchestrator_database_up 0.0" in api.get("/metrics").text
    finally:
        os.kill(mariadb.pid, signal.SIGCONT)
    wait_until(lambda: api.get("/readyz").status_code == 200, timeout=30, what="ready again")
    wait_until(lambda: api.post("/jobs/submit", JOB).status_code == 202, timeout=30, what="submits again")


# --- serve ---

PROGRAM = """
from orchestrator.api.server import serve
from orchestrator.config import load
from orchestrator.telemetry import logs
settings = load().settings
logs.configure(settings)
serve(settings, ready=lambda url: print(url, flush=True))
print("closed", flush=True)
"""


@contextmanager
def served(settings: Settings) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command, env = [sys.executable, "-c", PROGRAM], os.environ | settings.environment()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_serve_reports_its_port_and_closes_in_order(
    db_url: str, redis_server: Redis, settings: Callable[..., Settings]
) -> None:
    number = signal.SIGINT if db_url.startswith("sqlite") else signal.SIGTERM  # neither database minds which
    with served(settings(database_url=db_url, redis_url=redis_server.url, port=0)) as (process, url):
        assert url.startswith("http://127.0.0.1:") and not url.endswith(":0")
        job = http.post(f"{url}/jobs/submit", json=JOB)
        assert job.status_code == 202
        wait_until(lambda: http.get(f"{url}/control/leader").json()["alive"], what="it leads")
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read().strip() == "closed"


def test_a_taken_port_is_a_configuration_error(settings: Callable[..., Settings], tmp_path) -> None:
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* is taken; .*--port, ORCH_PORT, or PORT= of `make run`"):
            serve(settings(port=port, database_url=f"sqlite:///{tmp_path / 'never.db'}"))
    assert not (tmp_path / "never.db").exists()


@pytest.mark.parametrize("address", ["192.0.2.7", "0.0.0.0", "::", "fe80::1%eth0"])  # noqa: S104 - to refuse them
def test_a_name_that_is_no_loopback_address_here_is_not_listened_on(address, monkeypatch) -> None:
    """Whoever edits /etc/hosts would put an API without keys on the network."""
    found = [(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: pytest.fail("it was bound"))
    with pytest.raises(ConfigError, match=f"localhost is {address} here.*/etc/hosts.*--host"):
        listen("localhost", 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.9"])
def test_a_loopback_address_is_listened_on(host) -> None:
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] in {"127.0.0.1", "127.0.0.9", "::1"}
