"""Jobs that leave a mark when they begin."""

from pathlib import Path
from typing import Any

from worker import BatchContext, Context, handler


@handler("marks")
def marks(ctx: Context, payload: dict[str, Any]) -> None:
    Path(payload["file"]).write_text(str(ctx.attempt))


@handler("marks-many", batch=2)
def marks_many(ctx: BatchContext, payloads: list[dict[str, Any]]) -> list[int]:
    return [Path(one["file"]).write_text(str(job.attempt)) for one, job in zip(payloads, ctx.jobs, strict=True)]
