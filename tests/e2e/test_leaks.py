"""What logs never hold: payloads, results, passwords, tokens of leases. Real processes, at debug level, in trouble."""

import json
import re
import secrets
from pathlib import Path

import pymysql
import pytest

from orchestrator.settings import Settings
from tests.cluster import Cluster, post
from tests.conftest import SHORT
from tests.plain import http
from tests.servers import MariaDB, Redis
from tests.tables import make_tables
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
#: Whose lines are about what a leader did in its term.
DUTIES = ("orchestrator.leader.duties", "orchestrator.leader.delivery")


@pytest.fixture
def marks() -> dict[str, str]:
    return {kind: f"{kind}MARK{secrets.token_hex(8)}" for kind in ("payload", "result", "error", "mariadb", "redis")}


@pytest.fixture
def mariadb(private_server, marks) -> MariaDB:
    server = private_server(MariaDB)
    execute(server, f"CREATE USER me@'127.0.0.1' IDENTIFIED BY '{marks['mariadb']}'")
    execute(server, "GRANT ALL ON *.* TO me@'127.0.0.1'")
    return server


@pytest.fixture
def cluster(private_server, mariadb, marks, tmp_path: Path):
    redis = private_server(Redis)
    with redis.client() as client:
        client.config_set("requirepass", marks["redis"])
    settings = Settings(
        **SHORT,
        database_url=f"mysql+pymysql://me:{marks['mariadb']}@127.0.0.1:{mariadb.port}/orchestrator?charset=utf8mb4",
        redis_url=f"redis://:{marks['redis']}@127.0.0.1:{redis.port}/0",
        gpu_backend="sim:1x24576",
        log_level="debug",
    )
    opened = Cluster(settings, tmp_path, forked=True)
    make_tables(opened.db.engine)
    yield opened
    opened.close()


def execute(server: MariaDB, *statements: str) -> None:
    with server.connect() as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def lines(log: Path) -> list[dict]:
    """Of a process that logs JSON; its other lines are what commands print."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.mark.timeout(180)
def test_no_output_holds_a_secret_or_a_payload_whatever_goes_wrong(cluster, mariadb, marks):
    api, url = cluster.serve(log_format="json")
    worker = cluster.worker(log_format="console")
    twin = cluster.worker(log_format="json", node_id="twin", worker_pool="twin")
    secret = {"secret": marks["payload"]}

    def submit(job_id, type="echo", payload=secret, **fields):
        body = {"job_id": job_id, "type": type, "payload": payload} | fields
        assert http.post(f"{url}/jobs/submit", json=body, headers=TRACEPARENT).status_code == 202

    # The ordinary life, and every bad end; with either of the two.
    for mark, lane in (("", {}), ("-twin", {"pool_id": "twin"})):
        submit(f"fine{mark}", **lane)
        cluster.wait_for(f"fine{mark}", "done")
        failing = secret | {"message": marks["error"]}
        submit(f"dead{mark}", "fail", failing, max_attempts=2, retry_base_sec=0.1, **lane)
        cluster.wait_for(f"dead{mark}", "dead_letter")
    submit("wrong", "fail", secret | {"kind": "permanent", "message": marks["error"]})
    cluster.wait_for("wrong", "failed")
    submit("crash", "crash", max_attempts=1)
    cluster.wait_for("crash", "dead_letter")
    # A worker over HTTP.
    mine = post(url, "/workers/register", {"slots": 1, "types": ["shout"], "pool_id": "http"})["worker_id"]
    submit("remote", "shout", pool_id="http")
    post(url, "/jobs/claim", {"worker_id": mine, "wait_seconds": 20})
    post(url, "/jobs/remote/complete", {"worker_id": mine, "attempt": 1, "result": {"x": marks["result"]}})
    # A lease, and a request that is refused.
    lease = wait_until(
        lambda: (
            (found := post(url, "/leases", {"agent": "a", "min_memory_mb": 10, "ttl_seconds": 60}))["granted"] and found
        ),
        what="a lease",
    )
    post(url, f"/leases/{lease['token']}/heartbeat", None)
    post(url, f"/leases/{lease['token']}/release", None)
    headers = {"Authorization": f"Bearer {marks['error']}"}
    http.post(f"{url}/jobs/submit", json={"type": "x", "payload": marks["payload"]}, headers=headers)

    # Statements that fail with values in them, on both sides; then no database at all.
    execute(mariadb, "RENAME TABLE orchestrator.orchestrator_results TO orchestrator.hidden")
    submit("unwritten")
    submit("unwritten-twin", pool_id="twin")
    for member in (worker, twin):
        member.says("could not be written")
    execute(mariadb, "RENAME TABLE orchestrator.hidden TO orchestrator.orchestrator_results")
    execute(mariadb, "RENAME TABLE orchestrator.orchestrator_jobs TO orchestrator.hidden")
    body = {"job_id": "refused", "type": "echo", "payload": secret}
    assert http.post(f"{url}/jobs/submit", json=body, headers=TRACEPARENT).status_code >= 500
    execute(mariadb, "RENAME TABLE orchestrator.hidden TO orchestrator.orchestrator_jobs")
    mariadb.kill()
    assert http.post(f"{url}/jobs/submit", json=body, headers=TRACEPARENT).status_code == 503
    mariadb.start()
    wait_until(
        lambda: http.post(f"{url}/jobs/submit", json=body, headers=TRACEPARENT).status_code == 202,
        what="a submit",
    )
    cluster.wait_for("refused", "done")
    for member in (worker, twin, api):
        member.stop()

    output = "".join(member.log.read_text() for member in (api, worker, twin))
    found = {kind for kind, mark in (marks | {"token": lease["token"]}).items() if mark in output}
    assert found == set()
    assert "Traceback" in output  # there was something to hide
    told = [*lines(api.log), *lines(twin.log)]
    assert len(told) > 10
    shown = {(line["event"], line.get("job_id")) for line in told}
    by_console = worker.log.read_text()
    for event, job_id in [("job done", "fine"), ("job retried", "dead"), ("job dead-lettered", "dead")]:
        assert re.search(rf": {event} .*\bjob_id={job_id} ", by_console), (event, job_id)
        assert (event, f"{job_id}-twin") in shown
    assert ("job done", "remote") in shown
    assert all(line["node_id"] == "twin" for line in lines(twin.log))
    # What was handed back before it started has no trace to tell of.
    ours = [line for line in lines(twin.log) if line["event"].startswith("job ") and line["event"] != "job handed back"]
    assert ours
    assert all({"job_id", "attempt", "worker_id", "pool_id", "trace_id"} <= line.keys() for line in ours)
    assert {line["trace_id"] for line in ours} == {TRACE}
    assert all("epoch" in line for line in told if line["logger"].startswith(DUTIES))


def test_the_database_would_have_told(mariadb, marks):
    """Such errors do quote what they were given: the test above looks for something that is there to be found."""
    with pytest.raises(pymysql.err.ProgrammingError, match=marks["payload"]):
        execute(mariadb, f"SELECT FROM '{marks['payload']}'")
