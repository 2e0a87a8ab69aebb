"""Who asks: every request acts in a name, which the audit trail keeps beside what it changed."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator import actors


class Caller:
    """ASGI middleware. The one place that decides who a request is from."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        peer = scope.get("client")
        with actors.acting(actors.of_request(peer[0] if peer else None)):
            await self._app(scope, receive, send)
