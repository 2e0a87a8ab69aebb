"""PyMySQL's connection, quicker where time goes: writing hundreds of values into a statement, and connecting."""

from __future__ import annotations

import fcntl
import re
import socket
import ssl
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import NoneType
from typing import Any

from pymysql.connections import Connection
from pymysql.constants import CR, ER, SERVER_STATUS
from pymysql.converters import escape_string
from pymysql.err import DataError, OperationalError


class QuickConnection(Connection):  # type: ignore[misc]  # the driver has no types
    """Every value is written exactly as its parent would."""

    def escape(self, obj: Any, mapping: Any = None) -> str:
        write = _USUAL.get(type(obj))
        if write is None or self.server_status & SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES:
            return str(super().escape(obj, mapping))
        return write(obj)

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        """Who names no authority has none checked: reading those of the system would take longer than all the rest."""
        try:
            context: ssl.SSLContext = super()._create_ssl_ctx(sslp) if sslp else _encrypting()
        except (OSError, ValueError) as error:  # what it cannot read it does not name
            files = " ".join(f"ssl_{key}={sslp[key]}" for key in ("ca", "cert", "key") if sslp.get(key))
            raise OperationalError(CR.CR_SSL_CONNECTION_ERROR, f"{files}: {error}") from error
        return context


class WatchedConnection(QuickConnection):
    """Knows since when it waits for an answer; other threads may look at it, and cut it."""

    #: Monotonic times: when it was opened, when the last question was sent that has no answer yet, and when it was last
    #: found that the server is at work on it.
    opened_at: float
    asked_at: float | None = None
    vouched_at = float("-inf")
    #: Which one it leads to, and the number of its session there.
    server: str
    session: int
    #: Bytes on their way, as last looked at.
    _unsent = 0
    #: Bytes of the largest statement that the server takes in this session; None: not known yet.
    max_packet: int | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        self.opened_at = time.monotonic()
        super().__init__(*args, **named)

    def sends(self) -> bool:
        """Whether what was asked still moves towards the server: fewer or more bytes are left than at the last look."""
        before, sock = self._unsent, self._sock
        self._unsent = 0 if sock is None else _unsent(sock)
        return self._unsent not in (0, before)

    def cut(self) -> None:
        """Whoever waits for an answer finds the end of the connection."""
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # gone already
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of an encrypted one would touch its state

    def _execute_command(self, command: int, sql: Any) -> None:
        if self.max_packet is not None and len(sql) + 1 >= self.max_packet:
            # The server would close the connection, as if it were away: whoever tries again would do so for ever.
            raise DataError(ER.NET_PACKET_TOO_LARGE, too_large(len(sql), self.max_packet))
        super()._execute_command(command, sql)
        self.asked_at = time.monotonic()

    def _read_ok_packet(self) -> Any:
        try:
            return super()._read_ok_packet()
        finally:
            self.asked_at = None

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        try:
            return super()._read_query_result(unbuffered)
        finally:
            self.asked_at = None


def too_large(size: int, most: int) -> str:
    what = f"a statement of {size} bytes, and the database takes less than {most}"
    return f"{what}: raise its max_allowed_packet, or pass a reference to the data"


def _unsent(sock: socket.socket) -> int:
    """Bytes that the other side has not said it got; 0 where the system does not tell."""
    size = bytearray(4)
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, size)
    except OSError:
        return 0
    return int.from_bytes(size, sys.byteorder)


@cache
def _encrypting() -> ssl.SSLContext:
    """Encrypts where the server can, whoever it is; what the driver makes anew for each connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


_must_be_escaped = re.compile("[\0\n\r\x1a\"'\\\\]").search


def _text(value: str) -> str:
    # Looking is cheaper than translating, and nearly all that is written are names and numbers.
    return f"'{value}'" if _must_be_escaped(value) is None else f"'{escape_string(value)}'"


_USUAL: dict[type, Callable[[Any], str]] = {str: _text, int: str, NoneType: lambda _: "NULL"}
