"""Insert rows, or change those that exist, by one statement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Table
from sqlalchemy.dialects import mysql, sqlite

#: What rows that exist take, made of the new values by their names.
Computed = Callable[[Any], dict[str, Any]]


def upsert(conn: Connection, table: Table, rows: Sequence[dict[str, Any]], computed: Computed) -> None:
    """Insert rows by one statement; those that exist take all new values, but for what `computed` makes of both."""
    taken = [name for name in rows[0] if not table.c[name].primary_key]
    conn.execute(_upserted(conn, table, rows, lambda new: {name: new[name] for name in taken} | computed(new)))


def upsert_returning(
    conn: Connection, table: Table, rows: list[dict[str, Any]], computed: Computed, returned: Sequence[str]
) -> Sequence[Row[Any]]:
    """The same, but those that exist take only what is computed; and what the rows are after it, in any order."""
    # One row is written as one: the text of that is known already, that of several is made each time.
    values = rows if len(rows) > 1 else rows[0]
    columns = [table.c[name] for name in returned]
    return conn.execute(_upserted(conn, table, values, computed).returning(*columns)).all()


def _upserted(conn: Connection, table: Table, values: Any, computed: Computed) -> Any:
    if conn.dialect.name == "sqlite":
        added = sqlite.insert(table).values(values)
        key = [column.name for column in table.primary_key]
        return added.on_conflict_do_update(index_elements=key, set_=computed(added.excluded))
    given = mysql.insert(table).values(values)
    return given.on_duplicate_key_update(computed(given.inserted))
