"""The same work as one call for each job and as one call for many: nothing at all, or a fixed cost a call."""

import time
from typing import Any

from worker import handler

#: Seconds that a call costs, however many jobs it is for: launching kernels, a round trip, a tokenizer's start.
CALL_S = 0.002


@handler("plain-free")
def plain_free(_ctx: Any, payload: dict[str, Any]) -> dict[str, Any]:
    return payload


@handler("plain-2ms")
def plain_2ms(_ctx: Any, payload: dict[str, Any]) -> dict[str, Any]:
    time.sleep(CALL_S)
    return payload


@handler("batched-free", batch=32, batch_wait_ms=5)
def batched_free(_ctx: Any, payloads: list[Any]) -> list[Any]:
    return payloads


@handler("batched-2ms", batch=32, batch_wait_ms=5)
def batched_2ms(_ctx: Any, payloads: list[Any]) -> list[Any]:
    time.sleep(CALL_S)
    return payloads
