"""Keyset pages. A cursor is a moment and the id that breaks its ties, as text that clients hand back.

There is no index for every filter: each would cost those who write the rows. Whoever looks for something else goes
along the index that there is (`Way`), at most `WINDOW` rows a question, and is told where to go on.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Row, Select, Table, and_, or_, select

from orchestrator.errors import InvalidInput
from orchestrator.store.dialect import walking

#: Rows that one page looks at where no index leads to those that are wanted. They lie anywhere: on a disk that is busy
#: each is a read, and all of them must be within the time limit.
WINDOW = 2_000


@dataclass(frozen=True)
class Way:
    """Along an index that ends with a moment and the table's key; the latest first, or the oldest."""

    table: Table
    index: str
    moment: Column[Any]
    key: Column[Any]
    oldest_first: bool = False

    def page(
        self,
        conn: Connection,
        query: Select[Any],
        leading: Sequence[ColumnElement[bool]],
        others: Sequence[ColumnElement[bool]],
        limit: int,
        cursor: str | None,
    ) -> tuple[Sequence[Row[Any]], str | None]:
        """Rows that meet all conditions, of which the index knows the leading ones; the cursor of the next page.

        Where there are others, a page may be short, or empty, before the end; only None is that.
        """
        ahead = [*leading, *after(cursor, self.moment, self.key, oldest_first=self.oldest_first)]
        edge = self.edge(conn, ahead, WINDOW) if others else None
        if edge is not None:
            ahead.append(self.until(edge))
        found = conn.execute(self._along(query).where(*ahead, *others).limit(limit + 1)).all()
        shown, following = split(found, limit, self.moment.name, self.key.name)
        if following is None and edge is not None:
            following = encode(*edge)
        return shown, following

    def edge(self, conn: Connection, ahead: Sequence[ColumnElement[bool]], size: int) -> tuple[datetime, str] | None:
        """The last of the next `size` rows; None if those are all. Reads entries of the index only."""
        found = conn.execute(self._along(select(self.moment, self.key)).where(*ahead).offset(size - 1).limit(2)).all()
        return (found[0][0], found[0][1]) if len(found) > 1 else None

    def until(self, edge: tuple[datetime, str]) -> ColumnElement[bool]:
        """The condition that leaves out everything behind this row."""
        at, last = edge
        if self.oldest_first:
            return or_(self.moment < at, and_(self.moment == at, self.key <= last))
        return or_(self.moment > at, and_(self.moment == at, self.key >= last))

    def _along(self, query: Select[Any]) -> Select[Any]:
        order = (self.moment, self.key) if self.oldest_first else (self.moment.desc(), self.key.desc())
        return walking(query, self.table, self.index).order_by(*order)


def after(
    cursor: str | None, moment: Column[Any], key: Column[Any], *, oldest_first: bool = False
) -> list[ColumnElement[bool]]:
    """The conditions that leave out everything up to this cursor, in a listing of the latest first, or the oldest."""
    if cursor is None:
        return []
    at, last = decode(cursor)
    if oldest_first:
        return [or_(moment > at, and_(moment == at, key > last))]
    return [or_(moment < at, and_(moment == at, key < last))]


def split(
    rows: Sequence[Row[Any]], limit: int, moment: str, key: str = "job_id"
) -> tuple[Sequence[Row[Any]], str | None]:
    """A page, of `limit` + 1 rows that were asked for, and the cursor of the next; None at the end."""
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], encode(getattr(last, moment), getattr(last, key))


def encode(moment: datetime, job_id: str) -> str:
    return base64.urlsafe_b64encode(f"{moment.isoformat()} {job_id}".encode()).decode()


def decode(cursor: str) -> tuple[datetime, str]:
    """Raises InvalidInput for anything that `encode` did not make."""
    try:
        moment, job_id = base64.urlsafe_b64decode(cursor.encode()).decode().split(" ", 1)
        return datetime.fromisoformat(moment), job_id
    except (ValueError, binascii.Error):
        message = "cursor: not one that this server gave out; start again without it"
        raise InvalidInput(message, "cursor") from None
