"""One server over HTTP: where it is, what its answers mean. The command line and the lease client speak through it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx

from orchestrator.client.errors import Refused, ServerUnreachable
from orchestrator.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8008"
#: Names the server for those who give no URL.
URL_VARIABLE = "GPUORCH_URL"
#: Seconds to connect and to answer; what a long poll waits comes on top.
TIMEOUT_S = 15.0
_NOTHING: Mapping[str, object] = MappingProxyType({})
_TOKEN = re.compile(r"(/leases/)[^/]+")


def default_url() -> str:
    return os.environ.get(URL_VARIABLE) or DEFAULT_URL


class Api:
    """Threads may share one."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigError as `host_of` does."""
        # A proxy meant for the internet must not be asked for this machine.
        local = host_of(url) in {"127.0.0.1", "::1", "localhost"}
        self.url = url.rstrip("/")
        # Reading the system's authorities takes longer than most answers, and nobody asks for them here.
        verify = not (local and self.url.startswith("http:"))
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=not local, verify=verify)

    def get(self, path: str, params: Mapping[str, object] = _NOTHING, wait_s: float = 0.0) -> Any:
        given = {key: _encodable(str(value)) for key, value in params.items() if value is not None}
        return self._send("GET", path, params=given, timeout=TIMEOUT_S + wait_s)

    def post(
        self,
        path: str,
        body: Mapping[str, object] | bytes | None = None,
        wait_s: float = 0.0,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """A body of bytes is JSON already."""
        given = {} if body is None else {"json": body if isinstance(body, bytes) else dict(body)}
        return self._send("POST", path, timeout=timeout_s + wait_s, **given)

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self._send("PUT", path, json=dict(body))

    def patch(self, path: str, body: Mapping[str, object]) -> Any:
        return self._send("PATCH", path, json=dict(body))

    def delete(self, path: str) -> Any:
        return self._send("DELETE", path)

    def close(self) -> None:
        self._client.close()

    def _send(self, method: str, path: str, **how: Any) -> Any:
        """The answer's JSON. Raises ServerUnreachable or Refused."""
        if "json" in how:
            # The library's own encoder breaks on what the server would refuse by name: NaN, half a character.
            body = how.pop("json")
            content = body if isinstance(body, bytes) else json.dumps(body)
            how |= {"content": content, "headers": {"Content-Type": "application/json"}}
        try:
            response = self._client.request(method, path, **how)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL)
            raise ServerUnreachable(self.url, str(error) or type(error).__name__, sent=not unsent) from None
        if not response.is_success:
            raise Refused(response)
        try:
            return response.json()
        except ValueError:
            raise Refused(response) from None


def job_path(job_id: str, *more: str) -> str:
    return "/".join(["/jobs", _segment(job_id), *more])


def pool_path(pool_id: str) -> str:
    return f"/workers/pool/{_segment(pool_id)}"


def schedule_path(schedule_id: str, *more: str) -> str:
    return "/".join(["/schedules", _segment(schedule_id), *more])


def lease_path(token: str, action: str) -> str:
    return f"/leases/{_segment(token)}/{action}"


def gpu_path(gpu_uuid: str, action: str) -> str:
    return f"/gpus/{_segment(gpu_uuid)}/{action}"


def policy_path(scope: str, name: str | None, *more: str) -> str:
    """`admission` has no names. Keys of caps may have slashes, which are as good as encoded ones."""
    folder = {"agent": "agents", "trigger": "triggers"}.get(scope, scope)
    return "/".join(["/policies", folder, *([] if name is None else [_segment(name)]), *more])


def _segment(name: str) -> str:
    return quote(_encodable(name), safe="")


def _encodable(text: str) -> str:
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
