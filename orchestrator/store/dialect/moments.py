"""Time by the database's clock: now, before and after it, and how long ago."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, DateTime, Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement


class utc_now(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock, UTC, microseconds."""

    type = DateTime()
    inherit_cache = True


@compiles(utc_now, "mysql", "mariadb")
def _now_mysql(_element: utc_now, _compiler: Any, **_kw: Any) -> str:
    return "utc_timestamp(6)"


@compiles(utc_now, "sqlite")
def _now_sqlite(_element: utc_now, _compiler: Any, **_kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"


def clock(conn: Connection) -> datetime:
    """The same, asked for by itself."""
    now: datetime = conn.execute(select(utc_now())).scalar_one()
    return now


class utc_shift(FunctionElement[Any]):  # noqa: N801
    """`utc_shift(seconds)`: the database's clock moved by a bound number of seconds."""

    type = DateTime()
    inherit_cache = True


@compiles(utc_shift, "mysql", "mariadb")
def _shift_mysql(element: utc_shift, compiler: Any, **kw: Any) -> str:
    return f"(utc_timestamp(6) + INTERVAL (1000000 * ({compiler.process(element.clauses, **kw)})) MICROSECOND)"


@compiles(utc_shift, "sqlite")
def _shift_sqlite(element: utc_shift, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', printf('%+.3f seconds', {seconds}))"


class earlier(FunctionElement[Any]):  # noqa: N801
    """`earlier(moment, seconds)`: a column's moment, so many seconds before."""

    type = DateTime()
    inherit_cache = True


@compiles(earlier, "mysql", "mariadb")
def _earlier_mysql(element: earlier, compiler: Any, **kw: Any) -> str:
    moment, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({moment} - INTERVAL (1000000 * ({seconds})) MICROSECOND)"


@compiles(earlier, "sqlite")
def _earlier_sqlite(element: earlier, compiler: Any, **kw: Any) -> str:
    moment, seconds = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"strftime('%Y-%m-%d %H:%M:%f000', {moment}, printf('-%.3f seconds', {seconds}))"


def seconds_since(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Age of a timestamp in seconds by the database's clock."""
    return _SecondsSince(column)


class _SecondsSince(FunctionElement[Any]):
    inherit_cache = True


@compiles(_SecondsSince, "mysql", "mariadb")
def _since_mysql(element: _SecondsSince, compiler: Any, **kw: Any) -> str:
    return f"(timestampdiff(MICROSECOND, {compiler.process(element.clauses, **kw)}, utc_timestamp(6)) / 1000000)"


@compiles(_SecondsSince, "sqlite")
def _since_sqlite(element: _SecondsSince, compiler: Any, **kw: Any) -> str:
    return f"((julianday('now') - julianday({compiler.process(element.clauses, **kw)})) * 86400.0)"


def seconds_between(start: ColumnElement[Any], end: ColumnElement[Any]) -> ColumnElement[Any]:
    """From one timestamp to a later one."""
    return _SecondsBetween(start, end)


class _SecondsBetween(FunctionElement[Any]):
    type = Float()
    inherit_cache = True


@compiles(_SecondsBetween, "mysql", "mariadb")
def _between_mysql(element: _SecondsBetween, compiler: Any, **kw: Any) -> str:
    return f"(timestampdiff(MICROSECOND, {compiler.process(element.clauses, **kw)}) / 1e6)"


@compiles(_SecondsBetween, "sqlite")
def _between_sqlite(element: _SecondsBetween, compiler: Any, **kw: Any) -> str:
    start, end = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"((julianday({end}) - julianday({start})) * 86400.0)"
