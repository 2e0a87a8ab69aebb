"""Requests whose head has no end, or takes for ever: they are let go, and others are served meanwhile."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from orchestrator.api import protocol
from orchestrator.api.protocol import HEAD_LIMIT
from tests.api.conftest import Running

START = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(maria_api: Running) -> Iterator[Connect]:
    opened = []

    def connection() -> socket.socket:
        url = maria_api.http.base_url
        opened.append(socket.create_connection((url.host, url.port), timeout=20))
        return opened[-1]

    yield connection
    for one in opened:
        one.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "ARRIVAL_LIMIT_S", 0.3)


def answered(connection: socket.socket) -> bytes:
    """All that is said until the other side hangs up."""
    said = b""
    while some := connection.recv(65_536):
        said += some
    return said


def one_answer(connection: socket.socket) -> bytes:
    said = connection.recv(65_536)
    while b'"ok"}' not in said:
        said += connection.recv(65_536)
    return said


def is_let_go(connection: socket.socket, drops: bytes) -> bool:
    """Whether one that says a little all the time is closed at last."""
    over = threading.Event()

    def drip() -> None:
        try:
            while not over.wait(0.05):
                connection.sendall(drops)
        except OSError:
            over.set()

    dripping = threading.Thread(target=drip)
    dripping.start()
    closed = over.wait(20)
    over.set()
    dripping.join()
    return closed


def head_of(size: int) -> bytes:
    return START + b"X: " + b"x" * (size - len(START) - len(b"X: \r\n\r\n")) + b"\r\n\r\n"


def test_a_head_that_is_too_large_is_refused(maria_api: Running, connect: Connect) -> None:
    longest = connect()
    longest.sendall(head_of(HEAD_LIMIT - 1))
    assert one_answer(longest).startswith(b"HTTP/1.1 200 ")
    for head in (head_of(HEAD_LIMIT + 1), START + b"X: " + b"x" * (HEAD_LIMIT - len(START) - 3)):
        connection = connect()
        connection.sendall(head)
        answer = answered(connection)
        assert answer.startswith(b"HTTP/1.1 431 ") and b'"code":"headers_too_large"' in answer
        assert b"application/problem+json" in answer
    assert maria_api.get("/livez").status_code == 200


def test_whoever_is_refused_and_goes_on_writing_is_told_and_let_go(connect: Connect, hasty: None) -> None:
    connection = connect()
    connection.sendall(head_of(10 * HEAD_LIMIT))
    assert answered(connection).startswith(b"HTTP/1.1 431 ")
    assert is_let_go(connection, b"x")


def test_a_second_head_is_counted_anew(connect: Connect) -> None:
    connection = connect()
    for _ in range(3):
        connection.sendall(head_of(HEAD_LIMIT // 2))
        assert one_answer(connection).startswith(b"HTTP/1.1 200 ")
    connection.sendall(head_of(HEAD_LIMIT + 1)[:HEAD_LIMIT])
    assert answered(connection).startswith(b"HTTP/1.1 431 ")


def test_trailers_without_an_end_are_let_go(connect: Connect) -> None:
    connection = connect()
    connection.sendall(b"POST /jobs/submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: " + b"x" * 2 * HEAD_LIMIT)
    with suppress(ConnectionError):  # of what it did not read we may be told so
        assert answered(connection) == b""


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("begun", [b"", b"GET", START, START + b"X: y", b"\r\n"])
def test_a_connection_without_a_whole_head_is_closed(connect: Connect, begun: bytes) -> None:
    connection = connect()
    connection.sendall(begun)
    assert answered(connection) == b""


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("first", "drops"),
    [
        (START + b"X: ", b"x"),
        (START + b"\r\n" + START + b"X: ", b"x"),  # the second on its connection
        (START + b"\r\n", b"\r\n"),
        (START + b"Content-Length: 1000000\r\n\r\n", b"x"),  # a body that nobody reads
    ],
    ids=["first", "second", "empty lines", "unread body"],
)
def test_drops_keep_no_connection_open(connect: Connect, first: bytes, drops: bytes) -> None:
    connection = connect()
    connection.sendall(first)
    assert is_let_go(connection, drops)


def test_whoever_waits_for_an_answer_is_not_hurried(maria_api: Running, connect: Connect, hasty: None) -> None:
    job_id = maria_api.submit(earliest_start_at="2999-01-01T00:00:00Z")
    connection = connect()
    connection.sendall(b"GET /jobs/%s?wait=1.5 HTTP/1.1\r\nHost: localhost\r\n\r\n" % job_id.encode())
    assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_a_body_has_its_own_time(maria_api: Running, connect: Connect, hasty: None) -> None:
    connection, body = connect(), b'{"type":"echo","payload":{}}'
    head = (
        b"POST /jobs/submit HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    connection.sendall(head % len(body))
    over = threading.Event()
    assert not over.wait(1.0)  # three times as long as a head may take
    connection.sendall(body)
    assert connection.recv(65_536).startswith(b"HTTP/1.1 202 ")
