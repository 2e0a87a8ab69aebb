"""A job that writes down in a file when it began and when it ended: the handlers' own ledger."""

import os
import time
from typing import Any

from worker import Context, handler


@handler("counted")
def counted(_ctx: Context, payload: dict[str, Any]) -> None:
    _note(payload["ledger"], "+", payload["keys"])
    time.sleep(payload["seconds"])
    _note(payload["ledger"], "-", payload["keys"])


def _note(ledger: str, sign: str, keys: list[str]) -> None:
    """One write of one line, appended: lines of others do not mix with it."""
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{time.monotonic()} {sign} {' '.join(keys)}\n".encode())
    os.close(file)
