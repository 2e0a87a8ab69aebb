"""A job that ends when its test says so: no clock of the test's races a machine that is busy."""

import time
from pathlib import Path
from typing import Any

from worker import Context, handler


@handler("gated")
def gated(ctx: Context, payload: dict[str, Any]) -> int:
    """Lasts for as long as the file `gate` is there."""
    while Path(payload["gate"]).exists():
        time.sleep(0.01)
    return ctx.attempt
