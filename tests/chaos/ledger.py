"""The handlers' own ledger: one line per start and per end, outside of the system under test."""

import json
import os
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """`mono` is the host's monotonic clock, the same for all processes. `nonce` is in the result of a done job."""

    job_id: str
    attempt: int
    event: str
    pid: int
    mono: float
    nonce: str = ""


def write(path: str, line: Line) -> None:
    """One write with O_APPEND: lines of several processes do not mix, and a killed one leaves a whole line or none."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def read(path: Path) -> list[Line]:
    return [Line(*json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []
