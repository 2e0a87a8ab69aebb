"""Requests that no client of ours would send: each gets its 4xx, the next one is served, and nothing was written."""

import base64
import socket

import pytest

from tests.api.conftest import Running

pytestmark = pytest.mark.embedded_too

INVALID = (422, "invalid_input")
NOT_FOUND = (404, "not_found")
NO_JOB = (404, "job_not_found")
NO_LEASE = (404, "lease_not_found")
JSON = {"content-type": "application/json"}


def answer_to(api: Running, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    answer = api.http.request(method, path, content=body, headers=JSON if body is not None else {})
    assert answer.headers["content-type"] == "application/problem+json", (path, answer.text)
    return answer.status_code, answer.json()["code"]


def answers(api: Running, method: str, paths: list[str], body: bytes | None = None) -> set[tuple[int, str]]:
    return {answer_to(api, method, path, body) for path in paths}


CURSORS = [
    "",
    "{}",
    "[1,2]",
    "null",
    "99999-01-01T00:00:00 j",
    "0000-01-01T00:00:00 j",
    "2030-13-01T00:00:00 j",
    "2030-01-01T00:00:00",
    "9" * 200 + " j",
    "２０３０-01-01T00:00:00 j",
]


def test_a_cursor_of_somebodys_own_making(api: Running) -> None:
    """BI-16."""
    for text in CURSORS:
        cursor = base64.urlsafe_b64encode(text.encode()).decode()
        answer = api.get("/jobs", params={"cursor": cursor})
        assert (answer.status_code, answer.json()["code"]) == INVALID, text
        assert answer.json()["field"] == "cursor"


def test_queries_that_mean_nothing(api: Running) -> None:
    api.submit(job_id="j")
    bad = ["after=-1", "after=9223372036854775808", "after=1e3", "limit=0", "limit=1001", "limit=", "x=1"]
    assert answers(api, "GET", [f"/jobs/j/events?{query}" for query in bad]) == {INVALID}
    bad = ["agent=%00", "agent=%ff", "type=", f"pool_id={'x' * 129}", "status=DONE", "limit=%00", "cursor=%ff%fe"]
    assert answers(api, "GET", [f"/jobs?{query}" for query in bad]) == {INVALID}
    bad = ["wait=nan", "wait=-1", "wait=1e400", "wait=", "wait=1s", "x=1"]
    assert answers(api, "GET", [f"/jobs/j?{query}" for query in bad]) == {INVALID}


def test_paths_that_lead_nowhere(api: Running) -> None:
    """BI-6, BI-18."""
    api.submit(job_id="j")
    assert answers(
        api, "GET", ["/", "//jobs", "/jobs/", "/jobs/j/", "/JOBS", "/%", "/jobs/..%2f..%2fetc%2fpasswd"]
    ) == {NOT_FOUND}
    strange = ["%zz", "%F0%9F%98%80", "%E2%80%AEj", "j%00", "*", "{}", "x'--", "%3Cscript%3E", "J", "j" * 60_000]
    assert answers(api, "GET", [f"/jobs/{name}" for name in strange]) == {NO_JOB}


def test_methods_that_are_not_offered(api: Running) -> None:
    with api.adding_no_row():
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"):
            assert answers(api, method, ["/jobs/submit", "/leases", "/readyz"]) == {(405, "method_not_allowed")}


def test_tokens_that_open_nothing(api: Running) -> None:
    """BI-12."""
    strange = ["%00", "%ff", "%20", "x" * 60_000, "%F0%9F%98%80", "*", "'%20OR%20'1'='1"]
    with api.adding_no_row():
        for action in ("heartbeat", "release"):
            assert answers(api, "POST", [f"/leases/{token}/{action}" for token in strange]) == {NO_LEASE}
            assert answer_to(api, "POST", f"/leases//{action}") == NOT_FOUND
            assert answer_to(api, "POST", f"/leases/a%2fb/{action}", b"x" * 100_000) == NOT_FOUND


def test_bodies_of_leases_are_read_as_strictly_as_those_of_jobs(api: Running) -> None:
    """BI-1 to BI-4."""
    cases = {
        b"": (400, "malformed_body"),
        b'{"agent":"a","min_memory_mb":1,"agent":"b"}': (400, "malformed_body"),
        b'{"agent":"a","min_memory_mb":NaN}': (400, "malformed_body"),
        b'{"agent":"a","min_memory_mb":1,"ttl_seconds":1e400}': INVALID,
        b'{"agent":"\\ud800","min_memory_mb":1}': INVALID,
        b'{"agent":"a","min_memory_mb":1e0}': INVALID,
        b"[" * 10_000: (400, "malformed_body"),
        b'{"agent":"' + b"x" * 20_000 + b'"}': (413, "payload_too_large"),
    }
    with api.adding_no_row():
        assert {body: answer_to(api, "POST", "/leases", body) for body in cases} == cases


def test_a_batch_of_nonsense_stores_what_is_sound(api: Running) -> None:
    jobs = b'{"type":"echo","payload":{"x":1e400}},{"type":"echo","payload":{"x":"\\ud800"}},[],null,1,"",{"jobs":[]}'
    answer = api.http.post(
        "/jobs/submit_batch", content=b'{"jobs":[' + jobs + b',{"type":"echo","payload":{}}]}', headers=JSON
    )
    assert (answer.json()["refused"], answer.json()["created"]) == (7, 1)
    assert {item["error"]["code"] for item in answer.json()["jobs"] if "error" in item} == {"invalid_input"}
    assert api.count_jobs() == 1
    with api.adding_no_row():
        assert answer_to(api, "POST", "/jobs/submit_batch", b'{"jobs":[' + b"[]," * 5000 + b"[]]}") == (
            413,
            "payload_too_large",
        )
        assert answer_to(api, "POST", "/jobs/submit_batch", b'{"jobs":[]' + b" " * (64 << 20) + b"}") == (
            413,
            "payload_too_large",
        )


def test_moments_beyond_what_computers_used_to_count(api: Running) -> None:
    """BI-21: 2038, and the ends of the calendar."""
    for moment in ("2038-01-19T03:14:08Z", "2106-02-07T06:28:16Z", "9999-12-31T23:59:59.999999Z"):
        job_id = api.submit(earliest_start_at=moment)
        assert api.get(f"/jobs/{job_id}").json()["status"] == "pending"
    long_ago = api.submit(earliest_start_at="0001-01-01T00:00:00Z")
    assert api.get(f"/jobs/{long_ago}").status_code == 200
    for wrong in (b"4102444800", b'"2038-01-19T03:14:08+25:00"', b'"2030-02-30T00:00:00Z"', b'"2016-12-31T23:59:60Z"'):
        body = b'{"type":"echo","payload":{},"earliest_start_at":' + wrong + b"}"
        assert answer_to(api, "POST", "/jobs/submit", body) == INVALID
    assert api.count_jobs() == 4


HEAD = b"POST /jobs/submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
UPGRADE = (
    b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


HARDLY_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,  # TLS to a plain port
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"FOO /jobs HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    b"GET /jobs HTTP/1.1\r\nHost: local\0host\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n{}",
    HEAD + b"Content-Length: x\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    UPGRADE,
]


def test_bytes_that_are_hardly_http(maria_api: Running) -> None:
    host, port = maria_api.http.base_url.host, maria_api.http.base_url.port
    with maria_api.adding_no_row():
        for request_bytes in HARDLY_HTTP:
            with socket.create_connection((host, port), timeout=10) as connection:
                connection.sendall(request_bytes)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(65_536)
            status = answer.split(b"\r\n")[0].split()[1:2]
            assert not status or status[0][:1] in {b"2", b"4"}, (request_bytes[:80], answer)
            assert status[:1] != [b"400"] or (b"application/problem+json" in answer and b'"code":"' in answer)
            assert maria_api.get("/livez").status_code == 200
