"""A job type whose jobs share calls."""

from typing import Any

from worker import handler


@handler("gather", batch=8, batch_wait_ms=20)
def gather(_ctx: Any, payloads: list[Any]) -> list[Any]:
    return payloads
