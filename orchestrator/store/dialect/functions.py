"""Functions that each database has under a name of its own."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Boolean, String, literal, literal_column
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ColumnElement
from sqlalchemy.sql.functions import FunctionElement


def largest(*values: ColumnElement[Any]) -> ColumnElement[Any]:
    return _Largest(*values)


class _Largest(FunctionElement[Any]):
    inherit_cache = True


@compiles(_Largest, "mysql", "mariadb")
def _largest_mysql(element: _Largest, compiler: Any, **kw: Any) -> str:
    return f"greatest({compiler.process(element.clauses, **kw)})"


@compiles(_Largest, "sqlite")
def _largest_sqlite(element: _Largest, compiler: Any, **kw: Any) -> str:
    return f"max({compiler.process(element.clauses, **kw)})"


def json_field(column: ColumnElement[Any], name: str) -> ColumnElement[str]:
    """A text, number or truth of a JSON object, as text; NULL where there is none."""
    return _JsonField(column, literal_column(f"'$.{name}'"))


class _JsonField(FunctionElement[Any]):
    type = String()
    inherit_cache = True


@compiles(_JsonField, "mysql", "mariadb")
def _json_mysql(element: _JsonField, compiler: Any, **kw: Any) -> str:
    return f"json_value({compiler.process(element.clauses, **kw)})"


@compiles(_JsonField, "sqlite")
def _json_sqlite(element: _JsonField, compiler: Any, **kw: Any) -> str:
    return f"json_extract({compiler.process(element.clauses, **kw)})"


def json_has(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """Whether this text is among those of a JSON array that `json.dumps` wrote: the same characters, all of them."""
    return _JsonHas(column, literal(json.dumps(text)))


class _JsonHas(FunctionElement[Any]):
    type = Boolean()
    inherit_cache = True


@compiles(_JsonHas, "mysql", "mariadb")
def _has_mysql(element: _JsonHas, compiler: Any, **kw: Any) -> str:
    # It compares what is written, byte by byte: an equal text that was written otherwise would be another.
    return f"json_contains({compiler.process(element.clauses, **kw)})"


@compiles(_JsonHas, "sqlite")
def _has_sqlite(element: _JsonHas, compiler: Any, **kw: Any) -> str:
    column, text = (compiler.process(clause, **kw) for clause in element.clauses)
    # Of one path it would tell the value, which ends at a NUL; of two it tells what is written.
    written, wanted = f"json_extract({column}, one.fullkey, one.fullkey)", f"json_extract({text}, '$', '$')"
    return f"EXISTS (SELECT 1 FROM json_each({column}) AS one WHERE {written} = {wanted})"  # noqa: S608 - parameters
