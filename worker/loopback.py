"""One HTTP exchange with a server on this machine that whoever waits for it can break off.

Not through a proxy, whatever the environment says, and without following redirects: nothing leaves the machine.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.ports import HOST

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: Seconds between two looks around while there is nothing to read.
LOOK_EVERY_S = 0.1
#: Seconds in which the kernel takes a connection for a server that lives, busy or not.
CONNECT_S = 5.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    #: Cut after `limit` + 1 bytes: longer than `limit` means too long.
    body: bytes


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes | None = None
    #: The longest body of an answer that is of use.
    limit: int = 65_536
    timeout_s: float = 5.0


def ask(port: int, request: Request, headers: Mapping[str, str], look: Callable[[], None]) -> Answer:
    """Send a request and wait for its answer; `look` is called several times a second and ends it by raising.

    The connection is closed whatever happens: most servers stop working for a client that is gone. Raises OSError
    or HTTPException when it breaks, TimeoutError when the time is over.
    """
    with closing(_Connection(port, look, time.monotonic() + request.timeout_s)) as connection:
        # A server that refuses a long body answers without reading it: what it said is there all the same.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(request.method, request.path, request.body, dict(headers))
        with connection.getresponse() as response:
            return Answer(response.status, response.headers, response.read(request.limit + 1))


class _Connection(http.client.HTTPConnection):
    def __init__(self, port: int, look: Callable[[], None], until: float) -> None:
        super().__init__(HOST, port)
        self._look, self._until = look, until

    def connect(self) -> None:
        self.sock = _Socket(self._look, self._until)
        self.sock.settimeout(CONNECT_S)
        self.sock.connect((self.host, self.port))
        self.sock.settimeout(LOOK_EVERY_S)


class _Socket(socket.socket):
    """Waits in short steps and looks around before each. A timeout that its reader saw would break the reader."""

    def __init__(self, look: Callable[[], None], until: float) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self._look, self._until = look, until

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        while True:
            self._check()
            with suppress(TimeoutError):
                return super().recv_into(buffer, nbytes, flags)

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            self._check()
            with suppress(TimeoutError):
                rest = rest[self.send(rest, flags) :]

    def _check(self) -> None:
        self._look()
        if time.monotonic() > self._until:
            raise TimeoutError("no answer in time")
