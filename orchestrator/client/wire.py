"""Requests and answers as httpx has them, for both of its clients."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

import httpx

from orchestrator.client.errors import Refused, ServerUnreachable
from orchestrator.client.steps import TIMEOUT_S, Request
from orchestrator.errors import ConfigError

#: What it raises when no answer came.
UNANSWERED = (httpx.TransportError, httpx.InvalidURL)
_TOKEN = re.compile(r"(/leases/)[^/]+")


class Contact:
    """When the server answered last, by our monotonic clock: one that did is worth waiting for while it restarts."""

    def __init__(self) -> None:
        self.answered_at: float | None = None

    def note(self) -> None:
        self.answered_at = time.monotonic()


def connection(url: str) -> dict[str, Any]:
    """Arguments of a client of this server. Raises ConfigError as `host_of` does."""
    # A proxy meant for the internet must not be asked for this machine.
    local = host_of(url) in {"127.0.0.1", "::1", "localhost"}
    # Reading the system's authorities takes longer than most answers, and nobody asks for them here.
    verify = not (local and url.startswith("http:"))
    return {"base_url": url.rstrip("/"), "timeout": TIMEOUT_S, "trust_env": not local, "verify": verify}


def arguments(request: Request) -> dict[str, Any]:
    params = {key: encodable(str(value)) for key, value in request.params.items() if value is not None}
    how: dict[str, Any] = {"timeout": request.timeout_s} | ({"params": params} if params else {})
    if request.body is not None:
        # The library's own encoder breaks on what the server would refuse by name: NaN, half a character.
        content = request.body if isinstance(request.body, bytes) else json.dumps(dict(request.body))
        how |= {"content": content, "headers": {"Content-Type": "application/json"}}
    return how


def unreachable(url: str, error: Exception) -> ServerUnreachable:
    unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL | httpx.PoolTimeout)
    return ServerUnreachable(url, str(error) or type(error).__name__, sent=not unsent)


def answer_of(response: httpx.Response) -> Any:
    """Its JSON object. Raises Refused."""
    if not response.is_success:
        raise Refused(response)
    try:
        answer = response.json()
    except ValueError:
        raise Refused(response) from None
    if not isinstance(answer, dict):  # no answer of ours
        raise Refused(response)
    return answer


def encodable(text: str) -> str:
    """An argument that is no UTF-8 comes with halves of characters in their places; no name has those."""
    return text.encode(errors="replace").decode()


def host_of(url: str) -> str:
    """Raises ConfigError when this is no URL of a server."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as wrong:
        raise ConfigError(str(wrong)) from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ConfigError("the URL must be http://HOST:PORT or https://HOST")
    return parsed.host


class _HideTokens(logging.Filter):
    """The library logs every URL at level INFO, and whoever has a lease's token can end the lease."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                _TOKEN.sub(r"\1***", str(value)) if isinstance(value, httpx.URL) else value for value in record.args
            )
        return True


logging.getLogger("httpx").addFilter(_HideTokens())
