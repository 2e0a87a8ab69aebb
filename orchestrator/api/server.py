"""One orchestrator behind one HTTP server, from binding the port to the last disconnect.

Order: port, orchestrator, HTTP; backwards at the end. Long polls are let go first, so that stopping never
waits for jobs; what was accepted is committed before the database is closed.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from orchestrator.api.app import create_app
from orchestrator.api.protocol import Protocol
from orchestrator.daemon import Orchestrator
from orchestrator.errors import ConfigError
from orchestrator.setting_values import WHY_LOOPBACK
from orchestrator.settings import Settings

log = logging.getLogger(__name__)

#: Seconds that requests get to end when the server stops.
GRACE_S = 5

Ready = Callable[[str], None]
Stopping = Callable[[], None]


def serve(settings: Settings, ready: Ready | None = None, stopping: Stopping | None = None) -> None:
    """Run until SIGTERM or SIGINT; `ready` gets the URL once it answers, `stopping` is called when it begins to end.

    Raises ConfigError when the port cannot be had; nothing was started then.
    """
    with listen(settings.host, settings.port) as listener:
        orchestrator = Orchestrator(settings)
        try:
            orchestrator.start()
            HttpServer(create_app(orchestrator), listener, ready, stopping).run()
        finally:
            orchestrator.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; nothing else has been started when it fails.

    Without keys it must be a loopback address. Settings see to addresses, but what a name means is said elsewhere.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(address[0]).is_loopback:
            hint = "mend /etc/hosts, or choose an address with --host 127.0.0.1 or ORCH_HOST"
            raise ConfigError(f"{host} is {address[0]} here, which is no loopback address: {WHY_LOOPBACK}; {hint}")
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            other = "--port, ORCH_PORT, or PORT= of `make run` (0 picks a free one)"
            hint = f"stop what listens there, or choose another with {other}"
            raise ConfigError(f"port {port} of {host} is taken; {hint}") from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is bound already. `should_exit = True` ends it from another thread."""

    def __init__(
        self, app: FastAPI, listener: socket.socket, ready: Ready | None = None, stopping: Stopping | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # tokens of leases are part of paths
            server_header=False,
            proxy_headers=False,  # whoever reaches a loopback address could forge them
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._app = app
        self._listener = listener
        self._ready, self._stopping = ready, stopping

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with self.capture_signals():  # also while its loop begins and ends: a KeyboardInterrupt would break it there
            super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        url = url_of(self._listener)
        log.info("listening", extra={"url": url})
        if self._ready is not None:
            self._ready(url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._stopping is not None:
            self._stopping()
        self._app.state.backend.stop_waiting()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second one changes nothing: uvicorn would break off what is about to end anyway, and log the pieces."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn, but without raising the signal again: it would kill us before we closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
