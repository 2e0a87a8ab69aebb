"""Statements of the hot path, compiled once and executed by the driver itself.

SQLAlchemy builds and caches statements well, but what it does for every execution costs more than the statement
itself when a job needs seven of them. A `Hot` statement is written with SQLAlchemy like any other, compiled once per
database and length of its list, and then only filled in. Listeners hear of it and errors are wrapped as always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import ClauseElement, ColumnElement, Connection, Dialect, Select, Table, bindparam, literal

from orchestrator.store.dialect import largest_statement, mark, writer

#: Parameters one statement may have: SQLite's limit, which MariaDB does not reach either.
MAX_PARAMETERS = 32_000
#: Characters of one INSERT, and how many bytes of the largest statement each may take: four, or two if it is escaped,
#: and as much again for all the rest. A server usually takes 16 MiB.
MAX_CHARACTERS = 2_000_000
BYTES_EACH = 8
#: Ids in one statement, where nobody knows how many there are.
MANY_IDS = 1000
#: From so many rows on it pays to look for what they have in common.
MANY_ROWS = 8

T = TypeVar("T")
Listed = Sequence[ColumnElement[Any]]
Processor = Callable[[Any], Any]
Parameters = dict[str, Any] | tuple[Any, ...]


def some_at_a_time(items: Sequence[T], many: int | None = None) -> Iterator[Sequence[T]]:
    """In order, as many at a time as one statement should name: `MANY_IDS` unless it is said."""
    many = many or MANY_IDS
    return (items[first : first + many] for first in range(0, len(items), many))


def among(column: ColumnElement[T], values: Collection[T]) -> ColumnElement[bool]:
    """IN, of constants: each a parameter of its own, where SQLAlchemy would write a list out at every execution."""
    return column.in_([literal(value) for value in sorted(values)])  # type: ignore[type-var]  # names, in any order


class Hot:
    """A statement over a list of ids, or without one; `build` writes it for the bindparams of a list of any length."""

    def __init__(self, build: Callable[[Listed], ClauseElement]) -> None:
        self._build = build
        self._compiled: dict[tuple[str, int], _Compiled] = {}

    def run(self, conn: Connection, ids: Sequence[str | int] = (), **scalars: Any) -> int:
        """How many rows it matched."""
        compiled = self._for(conn, ids, scalars)
        return _execute(conn, compiled.sql, compiled.fill(ids, scalars))[0]

    def rows(self, conn: Connection, ids: Sequence[str | int] = (), **scalars: Any) -> Sequence[Sequence[Any]]:
        """What a SELECT finds, its columns of the types that they have in the schema."""
        compiled = self._for(conn, ids, scalars)
        return compiled.convert(_execute(conn, compiled.sql, compiled.fill(ids, scalars))[1])

    def _for(self, conn: Connection, ids: Sequence[str | int], scalars: Mapping[str, Any]) -> _Compiled:
        # Few sizes, so few texts; the last id stands in for the missing.
        size = 1 << (len(ids) - 1).bit_length() if ids else 0
        key = (conn.dialect.name, size)
        compiled = self._compiled.get(key)
        if compiled is None:
            names = [f"id_{i}" for i in range(size)]
            statement = self._build([bindparam(name) for name in names])
            compiled = self._compiled[key] = _Compiled(statement, conn, names, scalars)
        return compiled


class _Compiled:
    """The text for one database and one length, and where each parameter goes."""

    def __init__(
        self, statement: ClauseElement, conn: Connection, names: list[str], scalars: Mapping[str, Any]
    ) -> None:
        compiled: Any = statement.compile(dialect=conn.dialect)
        self.sql: str = str(compiled)
        variable = {*names, *scalars}
        written = compiled.construct_params(_check=False)
        self._constants = {name: value for name, value in written.items() if name not in variable}
        self._order: list[str] | None = compiled.positiontup
        self._names = names
        self._processors = _result_processors(statement, conn.dialect) if isinstance(statement, Select) else {}

    def fill(self, ids: Sequence[str | int], scalars: Mapping[str, Any]) -> Parameters:
        padded = [*ids, *list(ids[-1:]) * (len(self._names) - len(ids))]
        values = {**self._constants, **scalars, **dict(zip(self._names, padded, strict=True))}
        return values if self._order is None else tuple(values[name] for name in self._order)

    def convert(self, found: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        return [self._converted(row) for row in found] if self._processors else found

    def _converted(self, row: Sequence[Any]) -> Sequence[Any]:
        values = list(row)
        for column, convert in self._processors.items():
            values[column] = convert(values[column])
        return values


def _execute(conn: Connection, sql: str, parameters: Parameters) -> tuple[int, Sequence[Sequence[Any]]]:
    """How many rows matched, and those that a SELECT found; whatever goes wrong is SQLAlchemy's to judge."""
    if not conn.in_transaction():
        conn.begin()  # as every other execution does, so that a rollback knows of it
    cursor = conn.connection.cursor()
    try:
        for hear in conn.dispatch.before_cursor_execute:
            sql, parameters = hear(conn, cursor, sql, parameters, None, False)
        if not any(execute(cursor, sql, parameters, None) for execute in conn.dialect.dispatch.do_execute):
            cursor.execute(sql, parameters)
        answer = cursor.rowcount, cursor.fetchall() if cursor.description else ()
    except BaseException as error:  # noqa: BLE001 - raised again, one way or another
        # It wraps every error that comes with a statement; those that are not the driver's must stay what they are.
        statement = sql if isinstance(error, conn.dialect.loaded_dbapi.Error) else None
        conn._handle_dbapi_exception(error, statement, parameters, cursor, None)  # noqa: SLF001 - no other way to it
    cursor.close()
    return answer


def _result_processors(statement: Select[Any], dialect: Dialect) -> dict[int, Processor]:
    """By column, how what this database answers becomes what the schema says."""
    types = [column.type.dialect_impl(dialect) for column in statement.selected_columns]
    found = {column: kind.result_processor(dialect, None) for column, kind in enumerate(types)}
    return {column: processor for column, processor in found.items() if processor is not None}


def insert_rows(
    conn: Connection,
    table: Table,
    rows: Sequence[dict[str, Any]],
    defaults: Mapping[str, Any] | None = None,
    bulky: str | None = None,
) -> None:
    """Insert rows by one multi-row statement, or a few when the `bulky` column holds too much for one.

    A column in which every row has its default (NULL unless named) is left out.
    """
    if not rows:
        return
    usual = defaults or {}
    used = tuple(name for name in rows[0] if any(row[name] != usual.get(name) for row in rows))
    head, processors = _insert_parts(conn.dialect, table, used)
    shared = _shared(conn, rows, used, processors)
    varying = [name for name in used if name not in shared]
    placeholder = mark(conn.dialect)
    one_row = f"({', '.join([shared.get(name, placeholder) for name in used])})"
    for part in _portions(rows, len(used), bulky, _characters(conn)):
        values = [row[name] for row in part for name in varying]
        if processors:
            convert = [processors.get(name) for name in varying] * len(part)
            values = [value if to is None else to(value) for value, to in zip(values, convert, strict=True)]
        _execute(conn, f"{head}{','.join([one_row] * len(part))}", tuple(values))


def _shared(
    conn: Connection, rows: Sequence[dict[str, Any]], used: Sequence[str], processors: Mapping[str, Processor]
) -> dict[str, str]:
    """Of many rows the columns in which all are equal: their value is written once, where the driver can write it."""
    write = writer(conn) if len(rows) >= MANY_ROWS else None
    if write is None:
        return {}
    first = rows[0]
    equal = [name for name in used if all(row[name] == first[name] for row in rows)]
    values = {name: processors[name](first[name]) if name in processors else first[name] for name in equal}
    return {name: write(value) for name, value in values.items()}


def _characters(conn: Connection) -> int:
    limit = largest_statement(conn)
    return MAX_CHARACTERS if limit is None else min(MAX_CHARACTERS, limit // BYTES_EACH)


def _portions(
    rows: Sequence[dict[str, Any]], width: int, bulky: str | None, characters: int
) -> Iterator[Sequence[dict[str, Any]]]:
    """Rows for one statement each: nearly always all of them, but megabytes would not fit a packet."""
    most = MAX_PARAMETERS // width
    first = size = 0
    for i, row in enumerate(rows) if bulky or len(rows) > most else ():
        weight = len(row[bulky]) if bulky else 0
        if i > first and (size + weight > characters or i - first >= most):
            yield rows[first:i]
            first, size = i, 0
        size += weight
    yield rows[first:]


@lru_cache(maxsize=256)
def _insert_parts(dialect: Any, table: Table, used: tuple[str, ...]) -> tuple[str, dict[str, Processor]]:
    """INSERT … VALUES, and how this database wants some values converted."""
    quote = dialect.identifier_preparer.quote
    columns = ", ".join(quote(name) for name in used)
    processors: dict[str, Processor] = {}
    for name in used:
        processor = table.c[name].type.dialect_impl(dialect).bind_processor(dialect)
        if processor is not None:
            processors[name] = processor
    head = f"INSERT INTO {quote(table.name)} ({columns}) VALUES "  # noqa: S608 - names come from the schema
    return head, processors
