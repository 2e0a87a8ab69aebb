"""Talking to a server over HTTP: the URL, what its errors mean, and what to try when it is not there."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import click
import httpx

from orchestrator.cli.options import Command
from orchestrator.errors import OrchestratorError, Unavailable
from orchestrator.settings import safe_url

DEFAULT_URL = "http://127.0.0.1:8008"
#: Seconds to connect and to answer; what a long poll waits comes on top.
TIMEOUT_S = 15.0
_NOTHING: Mapping[str, object] = MappingProxyType({})


class ServerUnreachable(Unavailable):
    code = "server_unreachable"

    def __init__(self, url: str, cause: object) -> None:
        super().__init__(
            f"cannot reach {safe_url(url)} ({cause}); is it running? Start one with `gpuorch dev` or"
            " `gpuorch serve`, or name another with --url or GPUORCH_URL"
        )


class Refused(OrchestratorError):
    """The server answered, and the answer is no."""

    def __init__(self, response: httpx.Response) -> None:
        try:
            problem = response.json()
            detail, self.code = str(problem["detail"]), str(problem["code"])
        except (ValueError, KeyError, TypeError):
            detail, self.code = f"{response.reason_phrase} (is this a gpuorch server?)", "http_error"
        super().__init__(f"{response.status_code} {self.code}: {detail}")


class Api:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # A proxy meant for the internet must not be asked for this machine.
        local = _host(url) in {"127.0.0.1", "::1", "localhost"}
        self._client = httpx.Client(base_url=self._url, timeout=TIMEOUT_S, trust_env=not local)

    def get(self, path: str, params: Mapping[str, object] = _NOTHING, wait_s: float = 0.0) -> Any:
        given = {key: _encodable(str(value)) for key, value in params.items() if value is not None}
        return self._send("GET", path, params=given, timeout=TIMEOUT_S + wait_s)

    def post(self, path: str, body: Mapping[str, object] | None = None, wait_s: float = 0.0) -> Any:
        given = {} if body is None else {"json": dict(body)}
        return self._send("POST", path, timeout=TIMEOUT_S + wait_s, **given)

    def _send(self, method: str, path: str, **how: Any) -> Any:
        if "json" in how:
            # The library's own encoder breaks on what the server would refuse by name: NaN, half a character.
            how |= {"content": json.dumps(how.pop("json")), "headers": {"Content-Type": "application/json"}}
        try:
            response = self._client.request(method, path, **how)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerUnreachable(self._url, str(error) or type(error).__name__) from None
        if not response.is_success:
            raise Refused(response)
        try:
            return response.json()
        except ValueError:
            raise Refused(response) from None


def job_path(job_id: str, *more: str) -> str:
    return "/".join(["/jobs", quote(_encodable(job_id), safe=""), *more])


def _encodable(text: str) -> str:
    """An argument that is no UTF-8 comes with halves of characters in their places; no name has those."""
    return text.encode(errors="replace").decode()


def _host(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as wrong:
        raise click.BadParameter(str(wrong), param_hint="--url") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise click.BadParameter("must be http://HOST:PORT or https://HOST", param_hint="--url")
    return parsed.host


def with_api(command: Command) -> Command:
    """The command gets an `Api` as its first argument, and the flag that says where it is."""

    @functools.wraps(command)
    def call(*args: Any, url: str, **kwargs: Any) -> Any:
        return command(Api(url), *args, **kwargs)

    option: Callable[[Command], Command] = click.option(
        "--url",
        envvar="GPUORCH_URL",
        default=DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        help="Address of the server.",
    )
    return option(call)
