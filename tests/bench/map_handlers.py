"""The handlers of the map's benchmark: parts that do next to nothing, and a task that checks all of their results."""

import os
from pathlib import Path
from typing import Any

from worker import Context, handler


@handler("mapped")
def mapped(ctx: Context, payload: dict[str, Any]) -> int:
    """Adds a task for each number, and one that collects."""
    return ctx.map("part", range(payload["count"]), chunk=payload.get("chunk", 1), then=("collect", payload)).tasks


@handler("part")
def part(_ctx: Context, payload: dict[str, Any]) -> int:
    return 3 * int(payload["start"])


@handler("collect")
def collect(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Whether each result is what it should be, in its place; and that it ran, in a file that only grows."""
    with Path(payload["ledger"]).open("a") as ledger:
        ledger.write(f"{ctx.job_id} {os.getpid()}\n")
    seen = wrong = 0
    chunk = payload.get("chunk", 1)
    for value in ctx.results:
        wrong += value != 3 * seen * chunk
        seen += 1
    return {"seen": seen, "wrong": wrong}
