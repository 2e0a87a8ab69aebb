"""Checks for tables that are there and in use: what migrations add them with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text


class Check(NamedTuple):
    """A rule of a column, and the column's whole definition, which MariaDB wants to hear again."""

    table: str
    column: str
    definition: str
    rule: str

    @property
    def sql(self) -> str:
        return f"CHECK ({self.rule})"


def add_checks(conn: Connection, checks: Sequence[Check]) -> None:
    """Give tables these checks. Raises CommandError, before anything changes, that names a row which one would refuse.

    MariaDB looks at no row that is there: one like that could be neither changed nor ended from then on.
    """
    for table, several in _by_table(checks):
        _refuse_others(conn, table, several)
    for table, several in _by_table(checks):
        (_make_anew if conn.dialect.name == "sqlite" else _modify)(conn, table, several)


def _by_table(checks: Iterable[Check]) -> list[tuple[str, list[Check]]]:
    return [(table, list(several)) for table, several in groupby(checks, attrgetter("table"))]


def _refuse_others(conn: Connection, table: str, checks: Sequence[Check]) -> None:
    """One look at all rows, of which there may be millions; more only where something is wrong."""
    if _first(conn, table, "1", " AND ".join(f"({check.rule})" for check in checks)) is None:
        return
    for check in checks:
        if (found := _first(conn, table, check.column, check.rule)) is not None:
            raise CommandError(
                f"a row of {table} has {check.column} = {found[0]!r}, which means nothing ({_named(found[1])}):"
                f" make it so that {check.rule}, and migrate again"
            )


def _first(conn: Connection, table: str, column: str, rule: str) -> tuple[object, dict[str, object]] | None:
    """Of the first row that breaks the rule this column and the key."""
    keys = inspect(conn).get_pk_constraint(table)["constrained_columns"]
    others = f"SELECT {column}, {', '.join(keys)} FROM {table} WHERE NOT ({rule}) LIMIT 1"  # noqa: S608 - names of ours
    found = conn.execute(text(others)).one_or_none()
    return found and (found[0], dict(zip(keys, found[1:], strict=True)))


def _named(key: dict[str, object]) -> str:
    return ", ".join(f"{column} {value!r}" for column, value in key.items())


def _modify(conn: Connection, table: str, checks: Sequence[Check]) -> None:
    """Checks of columns alone: one of the table would have MariaDB copy all rows while nobody can write."""
    changes = ", ".join(f"MODIFY {check.column} {check.definition} {check.sql}" for check in checks)
    conn.exec_driver_sql(f"ALTER TABLE {table} {changes}")


def _make_anew(conn: Connection, table: str, checks: Sequence[Check]) -> None:
    """SQLite adds a check to no table that is there."""
    texts = text("SELECT sql FROM sqlite_master WHERE tbl_name = :table AND type = :type AND sql IS NOT NULL")
    made = conn.execute(texts, {"table": table, "type": "table"}).scalar_one()
    indexes = conn.execute(texts, {"table": table, "type": "index"}).scalars().all()
    rules = "".join(f",\n\t{check.sql}" for check in checks)
    conn.exec_driver_sql(f"ALTER TABLE {table} RENAME TO without_check")
    conn.exec_driver_sql(f"{made.rstrip().removesuffix(')')}{rules}\n)")
    conn.exec_driver_sql(f"INSERT INTO {table} SELECT * FROM without_check")  # noqa: S608 - a name of ours
    conn.exec_driver_sql("DROP TABLE without_check")
    for index in indexes:
        conn.exec_driver_sql(index)
