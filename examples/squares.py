"""A map and the task that collects it.

PYTHONPATH=examples ORCH_WORKER_HANDLERS=squares make run
gpuorch jobs submit sum-of-squares --payload '{"count": 1000}'
"""

from __future__ import annotations

from typing import Any

from worker import Context, handler


@handler("sum-of-squares")
def sum_of_squares(ctx: Context, payload: dict[str, Any]) -> dict[str, Any]:
    """Adds a task for each 100 numbers, and one that gets their results. They exist once this one has succeeded."""
    added = ctx.map("squares", range(payload["count"]), chunk=100, then="total")
    return {"tasks": added.tasks, "total": added.job_id}


@handler("squares")
def squares(_ctx: Context, payload: dict[str, Any]) -> int:
    """A part: `index`, and of a range `start`, `stop` and `step`; of other items `items`."""
    return sum(n * n for n in range(payload["start"], payload["stop"], payload["step"]))


@handler("total")
def total(ctx: Context, _payload: dict[str, Any]) -> dict[str, Any]:
    """Runs once, when all parts have ended; their results come in order, a page at a time."""
    return {"total": sum(ctx.results)}
