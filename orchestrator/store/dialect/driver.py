"""PyMySQL's connection, quicker where time goes: writing hundreds of values into a statement, and connecting."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import NoneType
from typing import Any

from pymysql.connections import Connection
from pymysql.constants import SERVER_STATUS
from pymysql.converters import escape_string


class QuickConnection(Connection):  # type: ignore[misc]  # the driver has no types
    """Every value is written exactly as its parent would."""

    def escape(self, obj: Any, mapping: Any = None) -> str:
        write = _USUAL.get(type(obj))
        if write is None or self.server_status & SERVER_STATUS.SERVER_STATUS_NO_BACKSLASH_ESCAPES:
            return str(super().escape(obj, mapping))
        return write(obj)

    def cut(self) -> None:
        """From another thread: whoever reads from it finds its end."""
        if self._sock is not None:
            with suppress(OSError):  # gone already
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of an encrypted one would touch its state

    def _create_ssl_ctx(self, sslp: Any) -> ssl.SSLContext:
        """Who names no authority has none checked: reading those of the system would take longer than all the rest."""
        context: ssl.SSLContext = super()._create_ssl_ctx(sslp) if sslp else _encrypting()
        return context


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
