"""Handlers that take as long to import, or to load, as there are files."""

import os
import time
from pathlib import Path
from typing import Any

from worker import Context, handler


def _wait(variable: str) -> None:
    while variable in os.environ and Path(os.environ[variable]).exists():
        time.sleep(0.01)


_wait("IMPORT_GATE")


@handler("heavy")
class Heavy:
    def load(self, _ctx: Context) -> None:
        _wait("LOAD_GATE")

    def run(self, _ctx: Context, _payload: Any) -> None:
        """Nobody asks for it."""
