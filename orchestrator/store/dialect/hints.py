"""What planners are told: which index, which order. Each takes only hints of its own kind."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Select, String, Table, Update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

Keyed = TypeVar("Keyed", Select[Any], Update)


def by_key(statement: Keyed, *tables: Table) -> Keyed:
    """Find rows by their tables' primary keys, even if the planner would rather scan a small table.

    A scan that locks waits for the rows of all other transactions, and two of them deadlock.
    """
    hint, server = "FORCE INDEX (PRIMARY)", "mysql"
    if isinstance(statement, Update):
        return statement.with_hint(hint, dialect_name=server)
    for table in tables:
        statement = statement.with_hint(table, hint, server)
    return statement


def walking(statement: Keyed, table: Table, index: str) -> Keyed:
    """Go through the table along an index: as far as the limit rather than sort all of it, or in order of its locks."""
    hint, server = f"FORCE INDEX ({index})", "mysql"
    if isinstance(statement, Update):
        return statement.with_hint(hint, dialect_name=server)
    return statement.with_hint(table, hint, server)


def in_order(statement: Select[Any]) -> Select[Any]:
    """Join the tables as they are written: the small one leads, and an index of the large one must not tempt.

    The other database joins in this order by itself, having no statistics to be tempted by.
    """
    return statement.prefix_with("STRAIGHT_JOIN", dialect="mysql")


def unled(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """The column, for whose sake no index may be chosen: SQLite takes no hint of `by_key` and `walking`, only this."""
    return _Unled(column)


class _Unled(FunctionElement[Any]):
    type = String()
    inherit_cache = True


@compiles(_Unled, "mysql", "mariadb")
def _unled_mysql(element: _Unled, compiler: Any, **kw: Any) -> str:
    return str(compiler.process(element.clauses, **kw))


@compiles(_Unled, "sqlite")
def _unled_sqlite(element: _Unled, compiler: Any, **kw: Any) -> str:
    return f"+{compiler.process(element.clauses, **kw)}"
