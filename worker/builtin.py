"""Job types for trying and testing the system. There is deliberately no `shell` among them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from orchestrator.gpu import simulated
from worker import Cancelled, Context, Permanent, Retry, Skip, handler


@handler("echo")
def echo(_ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Returns its payload."""
    return payload


@handler("sleep")
def sleep(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Sleeps `seconds`, reporting progress; stops when it is cancelled."""
    seconds = float(payload.get("seconds", 1.0))
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        if ctx.cancelled:
            raise Cancelled(f"after {passed:.1f} of {seconds:g} seconds")
        ctx.progress(passed / seconds)
        time.sleep(min(0.05, seconds - passed))
    return {"slept": seconds}


@handler("fail")
def fail(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Fails as `kind` says (transient, permanent, retry, skip), for the first `times` attempts."""
    if ctx.attempt > int(payload.get("times", 1_000_000)):
        return {"attempt": ctx.attempt}
    message = str(payload.get("message", "failed as asked"))
    match payload.get("kind", "transient"):
        case "permanent":
            raise Permanent(message)
        case "skip":
            raise Skip(message)
        case "retry":
            raise Retry(message, after=float(payload.get("after", 0.0)))
        case _:
            raise RuntimeError(message)


@handler("crash")
def crash(_ctx: Context, payload: dict[str, Any]) -> None:
    """Kills its own process, as a segfault or the kernel's OOM killer would."""
    os.kill(os.getpid(), int(payload.get("signal", signal.SIGKILL)))
    time.sleep(60)  # the signal is on its way


@handler("allocate", min_memory_mb=1024)
def allocate(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Holds `memory_mb` of its simulated GPU for `seconds`."""
    memory_mb = int(payload.get("memory_mb", 1024))
    if ctx.device in (None, "cpu"):
        raise Permanent("allocate needs a GPU lease")
    with simulated.allocated(str(ctx.device), memory_mb):
        time.sleep(float(payload.get("seconds", 0.1)))
    return {"device": ctx.device, "memory_mb": memory_mb}
