"""The process that `gpuorch scaler` is: a port for KEDA, and the watch behind it."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc

from orchestrator.client.api import Api
from orchestrator.errors import ConfigError
from orchestrator.scaler.service import MOST_STREAMS, Scaler, handlers
from orchestrator.scaler.watch import Watch

#: Threads beside those of streams, for calls that ask once.
CALLERS = 16
#: Calls that may wait for a thread; whoever comes beyond them is refused at once (RESOURCE_EXHAUSTED).
MOST_QUEUED = 64
#: Seconds that calls under way get when it is stopped.
GRACE_S = 2.0


@dataclass(frozen=True)
class Tls:
    """Files; with `ca`, clients must show a certificate that it signed."""

    cert: Path
    key: Path
    ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        try:
            pair = self.key.read_bytes(), self.cert.read_bytes()
            trusted = self.ca.read_bytes() if self.ca else None
        except OSError as missing:
            raise ConfigError(f"TLS: {missing}") from None
        return grpc.ssl_server_credentials([pair], trusted, require_client_auth=trusted is not None)


def serve(url: str, host: str, port: int, tls: Tls | None, stop: threading.Event, ready: Callable[[str], None]) -> None:
    """Until `stop`. Raises ConfigError."""
    if tls is None and not _is_loopback(host):
        raise ConfigError(f"host {host}: on a network it speaks TLS only; give --tls-cert and --tls-key")
    with closing(Api(url)) as api, closing(Watch(api)) as watch:
        threads = ThreadPoolExecutor(MOST_STREAMS + CALLERS, thread_name_prefix="scaler-rpc")
        server = grpc.server(
            threads,
            handlers=[handlers(Scaler(watch))],
            options=[("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=MOST_STREAMS + CALLERS + MOST_QUEUED,
        )
        address = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
        bound = _bind(server, address, tls)
        watch.start()
        server.start()
        ready(address.rpartition(":")[0] + f":{bound}")
        stop.wait()
        watch.close()  # streams end, and nobody waits for an answer any more
        server.stop(GRACE_S).wait(2 * GRACE_S)
        threads.shutdown(wait=False, cancel_futures=True)


def _bind(server: grpc.Server, address: str, tls: Tls | None) -> int:
    try:
        bound: int = server.add_secure_port(address, tls.credentials()) if tls else server.add_insecure_port(address)
    except RuntimeError as refused:
        raise ConfigError(f"cannot listen on {address}: {refused}") from None
    if not bound:
        raise ConfigError(f"cannot listen on {address}")
    return bound


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
