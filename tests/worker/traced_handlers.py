"""Handlers that use the span they are given."""

from pathlib import Path
from typing import Any, cast

from opentelemetry import trace

from worker import Context, handler


@handler("traced")
def traced(ctx: Context, payload: dict[str, Any]) -> str | None:
    """Marks its span, makes one below it, fails as often as it is told to; its result is the trace that it saw."""
    trace.get_current_span().set_attribute("tokens", 7)
    with trace.get_tracer(__name__).start_as_current_span("decode"):
        trace.get_current_span().add_event("half way")
    if ctx.attempt <= payload.get("times", 0):
        raise ValueError("not yet")
    return ctx.trace_context


@handler("traced-batch", batch=3, batch_wait_ms=1000)
def traced_batch(ctx: Any, payloads: list[dict[str, Any]]) -> list[Any]:
    trace.get_current_span().add_event("together")
    Path(payloads[0]["seen"]).write_text(str(len(payloads)))
    return [
        ValueError("a bad one") if one.get("bad") else job.trace_context
        for one, job in zip(payloads, ctx.jobs, strict=True)
    ]


@handler("traced-oddly")
def oddly(ctx: Context, payload: dict[str, Any]) -> str:
    """Makes spans that no receiver takes, and some that it does; counts how often it runs."""
    with Path(payload["seen"]).open("a") as seen:
        seen.write(f"{ctx.attempt}\n")
    tracer, nobody, odd = trace.get_tracer(__name__), trace.INVALID_SPAN_CONTEXT, cast(Any, "soon")
    with tracer.start_as_current_span("of nobody", links=[trace.Link(nobody, {"link.kind": "caller"})]):
        trace.get_current_span().add_event("once", timestamp=odd)
    tracer.start_span("backwards", start_time=-5).end(-9)
    tracer.start_span("half a character \ud800").end()
    with tracer.start_as_current_span("of many words") as span:
        for _ in range(100):
            span.add_event("said", {f"{number}": "v" * 4000 for number in range(16)})
    return "fine"


@handler("traced-adding")
def adding(ctx: Context, payload: dict[str, Any]) -> None:
    for _ in range(2):
        ctx.spawn("traced")
