"""Handlers that hold memory of the stand-in driver's cards, and say so in a file of notes."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.gpu.driver import VARIABLE, Driver
from worker import Context, handler


def driver() -> Driver:
    """The one that this process sees, as `Driver.environment()` says."""
    return Driver(Path(os.environ[VARIABLE]), Path(os.environ["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1")


def _note(ctx: Context, payload: dict[str, Any], pid: int) -> None:
    with Path(payload["notes"]).open("a") as notes:
        notes.write(f"{ctx.job_id} {ctx.attempt} {pid} {ctx.device}\n")


@handler("use")
def use(ctx: Context, payload: dict[str, Any]) -> None:
    """Hold memory; the first attempt for long, later ones not at all."""
    with driver().allocated(str(ctx.device), payload["memory_mb"]):
        _note(ctx, payload, os.getpid())
        time.sleep(payload.get("seconds", 60) if ctx.attempt == 1 else 0)


@handler("abandon")
def abandon(ctx: Context, payload: dict[str, Any]) -> None:
    """Leave a child behind that keeps the memory, in a session that no kill of the group reaches."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    driver().allocate(str(ctx.device), payload["memory_mb"], child.pid)
    _note(ctx, payload, child.pid)
