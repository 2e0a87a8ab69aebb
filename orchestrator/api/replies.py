"""Answers: JSON with times in UTC, written with a Z."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        try:
            return _dump(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which a client may have sent as a name
            return _dump(content, ensure_ascii=True).encode()


def page_of(noun: str, found: Sequence[Mapping[str, Any]], key: str, limit: int) -> Json:
    """A page in order of `key`; its last row is the cursor of the next one, if there may be more."""
    return Json({noun: found, "next_cursor": found[-1][key] if len(found) == limit else None})


def _dump(content: Any, *, ensure_ascii: bool) -> str:
    return json.dumps(content, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":"), default=_plain)


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return utc_text(value)
    message = f"{type(value).__name__} is no JSON"
    raise TypeError(message)


def utc_text(moment: datetime) -> str:
    """ISO 8601 with Z. The store's times have no zone because all of them are UTC."""
    naive = moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
    return f"{naive.isoformat(timespec='microseconds')}Z"
