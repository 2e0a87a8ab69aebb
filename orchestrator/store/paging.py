"""Cursors of keyset pages: a moment and the id that breaks its ties, as text that clients hand back unread."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime

from orchestrator.errors import InvalidInput


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
