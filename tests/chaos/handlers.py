"""What the jobs of a chaos run do. Every start and end is written to the ledger that the payload names."""

import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any

from orchestrator.gpu import simulated
from tests.chaos import ledger
from worker import Context, Permanent, Retry, Skip, handler

Act = Callable[[Context, dict[str, Any]], None]


def act(type: str, *, min_memory_mb: int = 0) -> Callable[[Act], Act]:
    def register(does: Act) -> Act:
        @handler(type, min_memory_mb=min_memory_mb)
        def run(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
            note(ctx, payload, "start")
            try:
                does(ctx, payload)
            except BaseException as error:  # a cancelled handler's too
                note(ctx, payload, "raised", type_name(error))
                raise
            nonce = secrets.token_hex(6)
            note(ctx, payload, "done", nonce)
            return {"attempt": ctx.attempt, "nonce": nonce}

        return does

    return register


def note(ctx: Context, payload: dict[str, Any], event: str, nonce: str = "") -> None:
    line = ledger.Line(ctx.job_id, ctx.attempt, event, os.getpid(), time.monotonic(), nonce)
    ledger.write(payload["ledger"], line)


def type_name(error: BaseException) -> str:
    return type(error).__name__


@act("chaos.work")
def work(ctx: Context, payload: dict[str, Any]) -> None:
    """Takes `seconds`; fails as `fails` says while the attempt is at most `times`."""
    _sleep(ctx, float(payload.get("seconds", 0.0)))
    if ctx.attempt > int(payload.get("times", 0)):
        return
    match payload["fails"]:
        case "permanent":
            raise Permanent("as asked")
        case "skip":
            raise Skip("as asked")
        case "retry":
            raise Retry("as asked", after=float(payload["after"]))
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal is on its way
        case _:
            raise RuntimeError("as asked")


@act("chaos.hold")
def hold(ctx: Context, payload: dict[str, Any]) -> None:
    """The first attempt stays until somebody kills it; the second returns at once."""
    if ctx.attempt == 1:
        _sleep(ctx, 600.0)


@act("chaos.allocate", min_memory_mb=1000)
def allocate(ctx: Context, payload: dict[str, Any]) -> None:
    with simulated.allocated(str(ctx.device), int(payload["memory_mb"])):
        _sleep(ctx, float(payload["seconds"]))


def _sleep(ctx: Context, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ctx.progress(1 - left / seconds)
        time.sleep(min(left, 0.2))
