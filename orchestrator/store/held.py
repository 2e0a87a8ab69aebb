"""Rows that somebody else holds, for those who would rather do without them than wait."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select


def held(conn: Connection, rows: Select[Any]) -> set[tuple[Any, ...]]:
    """Those of these rows (columns of their keys) that somebody else holds. The others are locked from now on."""
    there = {tuple(row) for row in conn.execute(rows)}
    return there - {tuple(row) for row in conn.execute(rows.with_for_update(skip_locked=True))} if there else set()
