"""Request bodies: bytes are counted while they arrive, and only one reading of the JSON is possible.

Refused: what JSON does not have (NaN, Infinity), what two parsers read differently (a key that occurs twice,
a byte order mark, invalid UTF-8) and compressed bodies, whose size on arrival says nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from orchestrator.api.problems import BodyTooSlow, MalformedBody, UnsupportedMediaType, invalid_model
from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.jsontext import strict_json

#: Seconds a body may take to arrive.
ARRIVAL_LIMIT_S = 30.0
#: Bytes from which a body is parsed in a thread, so that other requests need not wait for it.
LARGE = 65_536

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, limit: int) -> Any:
    """The body as JSON. Raises UnsupportedMediaType, PayloadTooLarge, BodyTooSlow or MalformedBody."""
    _require_json(request)
    raw = await _read(request, limit)
    return parse(raw) if len(raw) < LARGE else await asyncio.to_thread(parse, raw)


async def read_model(request: Request, kind: type[M], limit: int) -> M:
    """The body as this model. Raises InvalidInput, and what `read_json` does."""
    try:
        return kind.model_validate(await read_json(request, limit))
    except ValidationError as wrong:
        raise invalid_model(wrong) from None


def documented(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI of a body that the handler reads itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _require_json(request: Request) -> None:
    kind, *parameters = request.headers.get("content-type", "").lower().split(";")
    charsets = {text.strip() for text in parameters if "charset" in text}
    if kind.strip() != "application/json" or charsets - {"charset=utf-8", 'charset="utf-8"'}:
        raise UnsupportedMediaType("send Content-Type: application/json, in UTF-8")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("send the body as it is, without Content-Encoding")


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(ARRIVAL_LIMIT_S):
            # What was announced is not believed: chunked bodies announce nothing.
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {ARRIVAL_LIMIT_S:g} seconds") from None
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes; pass a reference to the data", "body")


def parse(raw: bytes) -> Any:
    """Raises MalformedBody."""
    try:
        return strict_json(raw, "the body")
    except InvalidInput as wrong:
        raise MalformedBody(wrong.message) from None
