"""A job that ends when its test says so: no clock of the test's races a machine that is busy."""

import subprocess
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


@handler("leaves")
def leaves(_ctx: Context, payload: dict[str, Any]) -> None:
    """Has a child in a session of its own, which no kill of the slot's group reaches."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(payload["pid"]).write_text(str(child.pid))
    while Path(payload["gate"]).exists():
        time.sleep(0.01)
