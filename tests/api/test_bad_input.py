"""What must be refused, with which status and code; and nothing may have been written then."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.api import body as body_module
from orchestrator.store.database import Database
from tests.api.conftest import Running
from tests.fetching import refused
from tests.servers import MariaDB
from tests.waiting import wait_until

pytestmark = pytest.mark.embedded_too

LIMIT = 10_000


@pytest.fixture
def small(db, run_api: Callable[..., Running]) -> Running:
    """An instance with a small limit for payloads."""
    return run_api(database_url=db.settings.database_url, payload_max_bytes=LIMIT)


def job(**fields: Any) -> bytes:
    return json.dumps({"type": "echo", "payload": {}} | fields).encode()


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return b'{"type":"echo","payload":{"x":' + (opening * depth + "1" + closing * depth).encode() + b"}}"


def with_payload(text: str) -> bytes:
    return b'{"type":"echo","payload":' + text.encode() + b"}"


MALFORMED = {
    "empty": b"",
    "half": b'{"type": "echo"',
    "trailing": job() + b"x",
    "two documents": job() + job(),
    "not UTF-8": b'{"type":"echo","payload":{"x":"\xff"}}',
    "encoded surrogate": b'{"type":"echo","payload":{"x":"\xed\xa0\x80"}}',
    "UTF-16": job().decode().encode("utf-16"),
    "BOM": b"\xef\xbb\xbf" + job(),
    "NaN": with_payload('{"x": NaN}'),
    "Infinity": with_payload('{"x": -Infinity}'),
    "duplicate field": b'{"type":"echo","type":"sleep","payload":{}}',
    "duplicate key inside": with_payload('{"x": {"a": 1, "a": 2}}'),
    "integer of 5000 digits": with_payload('{"x": ' + "9" * 5000 + "}"),
    "depth 100000": nested(100_000 // 2),
    "raw newline in a string": b'{"type":"ec\nho","payload":{}}',
    "single quotes": b"{'type':'echo'}",
    "comment": b'{"type":"echo",/**/"payload":{}}',
}
INVALID = {
    "null": b"null",
    "array": b"[]",
    "string": b'"job"',
    "number": b"7",
    "no type": b'{"payload":{}}',
    "no payload": b'{"type":"echo"}',
    "payload is a list": job(payload=[]),
    "payload is text": job(payload="{}"),
    "unknown field": job(entrypoint="os:system"),
    "unknown field with half a character": b'{"type":"echo","payload":{},"\\ud800":1}',
    "depth 65": nested(65),
    "depth 1000 of objects": nested(900, '{"a":', "}"),
    "1e400": with_payload('{"x": 1e400}'),
    "lone surrogate in the payload": with_payload('{"x": "\\ud800"}'),
    "lone surrogate in a key": with_payload('{"\\ud800": 1}'),
    "lone surrogate in a tag": job(tags=["\ud800"]),
    "lone surrogate in a name": job(model_id="\ud800"),
    "empty type": job(type=""),
    "type of 65 characters": job(type="x" * 65),
    "type with a newline": job(type="echo\nERROR fake line"),
    "type that ends in a newline": job(type="echo\n"),
    "type is a path": job(type="../echo"),
    "id of 129 characters": job(job_id="x" * 129),
    "empty id": job(job_id=""),
    "id with a slash": job(job_id="a/b"),
    "id with a space": job(job_id="a "),
    "id with zero width": job(job_id="a\u200bb"),
    "id with a homoglyph": job(job_id="jоb"),
    "id is a number": job(job_id=7),
    "pool with braces": job(pool_id="{}"),
    "pool with a star": job(pool_id="*"),
    "pool of 10000": job(pool_id="x" * 9000),
    "agent with markup": job(agent="<script>"),
    "agent with SQL": job(agent="x' OR '1'='1"),
    "agent with NUL": job(agent="a\0b"),
    "priority above": job(priority=101),
    "priority float": job(priority=1.5),
    "priority bool": job(priority=True),
    "priority word": job(priority="URGENT"),
    "attempts zero": job(max_attempts=0),
    "attempts huge": job(max_attempts=10**18),
    "attempts text": job(max_attempts="3"),
    "memory negative": job(min_memory_mb=-1),
    "memory above 2^31": job(min_memory_mb=2**31),
    "memory above 2^63": job(min_memory_mb=2**63),
    "no GPUs": job(gpu_count=0),
    "1000 GPUs": job(gpu_count=1000),
    "fallback as number": job(cpu_fallback=1),
    "runtime zero": job(max_runtime_sec=0),
    "runtime negative": job(max_runtime_sec=-1),
    "runtime infinite": b'{"type":"echo","payload":{},"max_runtime_sec":1e400}',
    "time without zone": job(earliest_start_at="2030-01-01T00:00:00"),
    "no time": job(earliest_start_at="soon"),
    "time before year 1": job(earliest_start_at="0001-01-01T00:00:00+14:00"),
    "time after year 9999": job(earliest_start_at="9999-12-31T23:59:59-14:00"),
    "33 tags": job(tags=["t"] * 33),
    "tags as text": job(tags="t"),
    "empty tag": job(tags=[""]),
    "long model": job(model_id="m" * 256),
}


def test_what_is_no_json_is_malformed(small: Running) -> None:
    assert verdicts(small, MALFORMED) == dict.fromkeys(MALFORMED, (400, "malformed_body"))


def test_what_is_no_job_is_invalid(small: Running) -> None:
    assert verdicts(small, INVALID) == dict.fromkeys(INVALID, (422, "invalid_input"))


def test_the_field_is_named(small: Running) -> None:
    named = {
        "unknown field": "entrypoint",
        "priority above": "priority",
        "time before year 1": "earliest_start_at",
    }
    for case, field in named.items():
        answer = post(small, INVALID[case]).json()
        assert answer["field"] == field
        assert field in answer["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_too_large(small: Running, chunked: bool) -> None:
    body = with_payload(json.dumps({"x": "y" * 20 * LIMIT}))
    assert len(body) > body_limit()
    content = (body[i : i + 4096] for i in range(0, len(body), 4096)) if chunked else body
    with small.adding_no_row():
        answer = small.http.post("/jobs/submit", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")


def test_an_endless_body_is_refused_while_it_still_comes(small: Running) -> None:
    chunk = b"10000\r\n" + b"y" * 0x10000 + b"\r\n"
    with small.adding_no_row(), raw(small) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        for _ in range(2 * body_limit() // 0x10000):
            connection.sendall(chunk)
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]  # there was no last chunk


def test_a_payload_beyond_the_limit_is_too_large(small: Running) -> None:
    assert verdicts(small, {"": with_payload(json.dumps({"x": "y" * LIMIT}))}) == {"": (413, "payload_too_large")}


def test_a_payload_at_the_limit_may_come_escaped(db, run_api: Callable[..., Running]) -> None:
    limit = 200_000
    api = run_api(database_url=db.settings.database_url, payload_max_bytes=limit)
    fits = {"x": "й" * ((limit - 8) // 2)}
    body = json.dumps({"type": "echo", "payload": fits}).encode()
    assert len(body) > limit * 2.9
    answer = post(api, body)
    assert answer.status_code == 202
    assert api.get(f"/jobs/{answer.json()['job_id']}").json()["payload"] == fits


def test_an_announced_length_is_refused_before_the_body_comes(small: Running) -> None:
    with small.adding_no_row(), raw(small) as connection:
        connection.sendall(head(f"Content-Length: {10**12}"))
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


def test_a_body_that_never_ends_is_given_up_on(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "ARRIVAL_LIMIT_S", 0.2)
    with small.adding_no_row(), raw(small) as connection:
        connection.sendall(head("Content-Length: 100") + b"{")
        answer = read_all(connection)
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"body_timeout" in answer


NOT_PLAIN = [
    {"content-type": ""},
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "application/json; charset=latin-1"},
    {"content-type": "application/json", "content-encoding": "gzip"},
]


def test_only_plain_json_is_taken(small: Running) -> None:
    with small.adding_no_row():
        for headers in NOT_PLAIN:
            answer = small.http.post("/jobs/submit", content=job(), headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type"), headers


def test_json_in_utf8_may_say_so(small: Running) -> None:
    headers = {"content-type": "application/JSON; charset=UTF-8"}
    assert small.http.post("/jobs/submit", content=job(), headers=headers).status_code == 202


def test_odd_but_valid_payloads_come_back_as_they_were(api: Running) -> None:
    texts = ["\0", "\u202e\u200b😀", "é" * 1000, "</script>"]
    payload = {
        "": {"": []},
        "zero": -0.0,
        "big": 2**64,
        "texts": texts,
        "deep": json.loads("[" * 30 + "]" * 30),
    }
    job_id = api.submit(payload=payload)
    assert api.get(f"/jobs/{job_id}").json()["payload"] == payload


def test_the_deepest_allowed_payload_is_stored(api: Running) -> None:
    deepest: Any = 1
    for _ in range(63):
        deepest = [deepest]
    job_id = api.submit(payload={"x": deepest})
    assert api.get(f"/jobs/{job_id}").json()["payload"] == {"x": deepest}


# --- helpers ---


def body_limit() -> int:
    from orchestrator.api.submit import ENVELOPE
    from orchestrator.jsontext import ESCAPED

    return ENVELOPE + ESCAPED * LIMIT


def post(api: Running, body: bytes) -> Any:
    return api.http.post("/jobs/submit", content=body, headers={"content-type": "application/json"})


def verdicts(api: Running, bodies: dict[str, bytes]) -> dict[str, tuple[int, str]]:
    """Status and code for each body; every answer must be a whole problem, and nothing is written."""
    seen = {}
    with api.adding_no_row():
        for name, body in bodies.items():
            answer = post(api, body)
            assert answer.headers["content-type"] == "application/problem+json", (name, answer.text)
            assert answer.json().keys() >= {"type", "title", "status", "detail", "code"}, name
            seen[name] = (answer.status_code, answer.json()["code"])
    return seen


def head(framing: str) -> bytes:
    lines = ["POST /jobs/submit HTTP/1.1", "Host: localhost", "Content-Type: application/json", framing]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def raw(api: Running) -> socket.socket:
    return socket.create_connection((api.http.base_url.host, api.http.base_url.port), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(4096):
        received += chunk
    return received


def test_a_payload_that_the_database_does_not_take_is_refused_with_what_to_do(
    mariadb: MariaDB, maria_db: Database, run_api: Callable[..., Running]
) -> None:
    with mariadb.taking(1 << 20):
        api = run_api(database_url=str(maria_db.settings.database_url))
        for _ in range(2):
            answer = api.post("/jobs/submit", {"type": "echo", "payload": {"text": "\n" * 400_000}})
            assert "raise its max_allowed_packet" in refused(answer, 413, "payload_too_large")
        api.submit()


def test_a_client_that_leaves_within_its_body_is_no_error(maria_api: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    url = maria_api.http.base_url
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(b"POST /jobs/submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        connection.sendall(b'Content-Length: 100\r\n\r\n{"type":')
    told = "client left before its request was whole"
    wait_until(lambda: any(record.message == told for record in caplog.records), what="it was seen")
    assert [record.message for record in caplog.records if record.levelname in {"WARNING", "ERROR"}] == []
