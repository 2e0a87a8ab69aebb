"""Handlers that add tasks, and some that do so badly."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from worker import Context, Permanent, handler


@handler("square")
def square(_ctx: Context, payload: dict[str, Any]) -> list[int]:
    numbers = payload["items"] if "items" in payload else range(payload["start"], payload["stop"], payload["step"])
    if payload.get("refuse") in numbers:
        raise Permanent("refused")
    return [number * number for number in numbers]


@handler("add-up")
def add_up(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Adds the numbers of all parts; `order` are the first of each, `again` says that it can be gone through twice."""
    parts = list(ctx.results)
    again = sum(1 for _ in ctx.results.details())
    total = sum(sum(part) for part in parts if part is not None)
    return payload | {"sum": total, "order": [part and part[0] for part in parts[:50]], "again": again}


@handler("map-squares")
def map_squares(ctx: Context, payload: dict[str, Any]) -> int:
    """`items` or `range`; fails or dies behind it as asked, for the first `times` attempts."""
    given: Any = range(*payload["range"]) if "range" in payload else payload["items"]
    if payload.get("iterator"):
        given = iter(given)
    shared = {"refuse": payload["refuse"]} if "refuse" in payload else {}
    then = ("add-up", {"by": ctx.attempt}) if payload.get("then", True) else None
    critical = payload.get("critical", True)
    added = ctx.map("square", given, chunk=payload.get("chunk", 10), then=then, payload=shared, critical=critical)
    ctx.flush()
    if ctx.attempt <= payload.get("times", 0):
        if payload["how"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("as asked")
    while "gate" in payload and Path(payload["gate"]).exists():
        time.sleep(0.01)
    return added.tasks


@handler("chain")
def chain(ctx: Context, payload: dict[str, Any]) -> list[str]:
    """Adds tasks that wait for one another, each of which tells what it got."""
    first = ctx.spawn("echo", {"n": 1})
    second = ctx.spawn("echo", {"n": 2}, priority="HIGH")
    both = ctx.spawn("gather", {"name": "both"}, depends_on=[second, first])
    last = ctx.spawn("gather", {"name": "last"}, depends_on=both)
    return [one.job_id for one in (first, second, both, last)]


@handler("gather")
def gather(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    return {"name": payload.get("name"), "got": list(ctx.results)}


@handler("by-name")
def by_name(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    return {name: ctx.results[name] for name in payload["names"]}


@handler("add-nonsense")
def add_nonsense(ctx: Context, payload: dict[str, Any]) -> None:
    ctx.spawn("echo", {}, **payload)
