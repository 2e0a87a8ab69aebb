"""Requests that are not meant for us, and the framework's own refusals."""

import socket

from tests.api.conftest import Running

JOB = {"type": "echo", "payload": {}}


def test_only_our_own_names_are_answered(maria_api: Running) -> None:
    port = maria_api.http.base_url.port
    ours = [
        "localhost",
        f"localhost:{port}",
        "LOCALHOST",
        f"127.0.0.1:{port}",
        "127.9.9.9",
        "[::1]:80",
        "[::1]",
    ]
    for host in ours:
        assert maria_api.get("/livez", headers={"host": host}).status_code == 200, host
    foreign = [
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "localhost@evil.example",
        "10.0.0.1",
        "0.0.0.0",  # noqa: S104 - a name to refuse
        "2130706433",
        "localhost:",
        "localhost:80:80",
        "[::2]",
        "local host",
        "",
    ]
    with maria_api.adding_no_row():
        for host in foreign:
            answer = maria_api.post("/jobs/submit", JOB, headers={"host": host})
            assert (answer.status_code, answer.json()["code"]) == (421, "wrong_host"), host
            assert maria_api.get("/metrics", headers={"host": host}).status_code == 421, host


def test_a_request_has_exactly_one_host(maria_api: Running) -> None:
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection((maria_api.http.base_url.host, maria_api.http.base_url.port), 10) as raw:
            raw.sendall(f"GET /livez HTTP/1.1\r\n{hosts}\r\n".encode())
            assert raw.recv(4096).split()[1] in {b"400", b"421"}, hosts


def test_pages_of_other_origins_change_nothing(maria_api: Running) -> None:
    own = str(maria_api.http.base_url).rstrip("/")
    for origin in (
        "https://evil.example",
        "null",
        "http://localhost:1",
        f"{own}.evil.example",
        own.replace("http", "https"),
    ):
        answer = maria_api.post("/jobs/submit", JOB, headers={"origin": origin})
        assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin"), origin
        assert maria_api.post("/leases/x/release", headers={"origin": origin}).status_code == 403
    forged = {"origin": own.replace("http", "https"), "x-forwarded-proto": "https"}
    assert maria_api.post("/jobs/submit", JOB, headers=forged).status_code == 403
    assert maria_api.count_jobs() == 0
    assert maria_api.post("/jobs/submit", JOB, headers={"origin": own}).status_code == 202
    assert maria_api.get("/livez", headers={"origin": "https://evil.example"}).status_code == 200


def test_what_does_not_exist_is_a_problem_too(maria_api: Running) -> None:
    def seen(method: str, path: str) -> tuple[int, str, str]:
        answer = maria_api.http.request(method, path)
        return answer.status_code, answer.json()["code"], answer.headers["content-type"]

    problem = "application/problem+json"
    assert seen("GET", "/") == (404, "not_found", problem)
    assert seen("GET", "/nothing/here") == (404, "not_found", problem)
    assert seen("GET", "/jobs/") == (404, "not_found", problem)
    assert seen("DELETE", "/jobs") == (405, "method_not_allowed", problem)
    assert "GET" in maria_api.http.request("DELETE", "/jobs").headers["allow"]


def test_a_verb_that_was_taken_for_an_id_is_told_by_its_methods(maria_api: Running) -> None:
    verbs = ("submit", "submit_batch", "claim", "wait", "retry_failed")
    for path in (*(f"/jobs/{verb}" for verb in verbs), "/dlq/redrive", "/control/pause", "/workers/register"):
        answer = maria_api.get(path)
        assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed"), path
        assert answer.headers["allow"] == "POST", path
    assert maria_api.get("/jobs/nothing").status_code == 404
    unknown = maria_api.post("/jobs/submit", JOB | {"workflow_id": "nothing"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "workflow_not_found")


def test_a_job_may_be_called_like_a_verb(maria_api: Running) -> None:
    maria_api.submit(job_id="submit")
    assert maria_api.get("/jobs/submit").json()["job_id"] == "submit"
