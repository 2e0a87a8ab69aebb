"""Which requests are meant for us: those whose Host is ours and that no foreign web page sent.

A browser on this machine can reach a loopback address. A page that makes its own name resolve to 127.0.0.1
(DNS rebinding) still sends its own name as Host; a page that posts across origins cannot leave out its
Origin.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.api.problems import ForeignOrigin, WrongHost, reply_to
from orchestrator.errors import OrchestratorError

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware, outside of everything that reads a request."""

    def __init__(self, app: ASGIApp, bound_host: str) -> None:
        self._app = app
        self._bound_host = bound_host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await reply_to(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> OrchestratorError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return WrongHost("the Host header must be localhost, a loopback address or the address we listen on")
        own = f"{scope['scheme']}://{hosts[0]}".lower()
        foreign = [origin for origin in headers.getlist("origin") if origin.lower() != own]
        if foreign and scope["method"] not in _SAFE:
            return ForeignOrigin("web pages of other origins may not change anything here")
        return None

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").lower()
        return name in {"localhost", self._bound_host} or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
