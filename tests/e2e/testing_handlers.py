"""Handlers of a project that tests itself with `orchestrator.testing`."""

from worker import Context, handler


@handler("double")
def double(ctx: Context, payload: dict) -> dict:
    return {"doubled": 2 * payload["n"], "device": str(ctx.device)}
