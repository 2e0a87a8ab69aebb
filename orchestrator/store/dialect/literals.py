"""How values stand in the text of a statement: by a mark, or written out where the driver can write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Dialect


def mark(dialect: Dialect) -> str:
    """What stands for a value that is sent beside the text."""
    return "?" if dialect.paramstyle == "qmark" else "%s"


def largest_statement(conn: Connection) -> int | None:
    """The bytes that one statement may not reach; None where there is no such limit."""
    limit: int | None = getattr(conn.connection.driver_connection, "max_packet", None)
    return limit


def writer(conn: Connection) -> Callable[[Any], str] | None:
    """What writes a value into a text that has marks too; None where every value is sent beside it."""
    escape = getattr(conn.connection.driver_connection, "escape", None)
    return escape and (lambda value: escape(value).replace("%", "%%"))
