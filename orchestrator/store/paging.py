"""Keyset pages, latest first. A cursor is a moment and the id that breaks its ties, as text that clients hand back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Row, and_, or_

from orchestrator.errors import InvalidInput


def after(cursor: str | None, moment: Column[Any], job_id: Column[Any]) -> list[ColumnElement[bool]]:
    """The conditions that leave out everything up to this cursor."""
    if cursor is None:
        return []
    at, last = decode(cursor)
    return [or_(moment < at, and_(moment == at, job_id < last))]


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
