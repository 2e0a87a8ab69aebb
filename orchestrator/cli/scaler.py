"""`gpuorch scaler`: KEDA's external scaler."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from orchestrator.cli.http import with_url
from orchestrator.cli.options import with_settings
from orchestrator.config import Loaded
from orchestrator.errors import ConfigError
from orchestrator.telemetry import logs

_File = click.Path(path_type=Path)


@click.command()
@with_settings("log_level", "log_format")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=9009, show_default=True, help="0 picks a free one.")
@click.option("--tls-cert", type=_File, metavar="FILE", help="Certificate; needed on any address but loopback.")
@click.option("--tls-key", type=_File, metavar="FILE", help="Its key.")
@click.option(
    "--tls-ca", type=_File, metavar="FILE", help="Authority of the clients' certificates, which they then need."
)
@with_url
def scaler(
    loaded: Loaded, *, url: str, host: str, port: int, tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None
) -> None:
    """Serve KEDA's external-push protocol; what it tells comes from the orchestrator at --url.

    Needs the extra `scaler`: pip install '/path/to/clone[scaler]'
    """
    try:
        from orchestrator.scaler.server import Tls, serve
    except ImportError as missing:
        raise ConfigError(f"{missing}; install the extra: pip install '/path/to/clone[scaler]'") from None
    if (tls_cert is None) != (tls_key is None) or (tls_ca and not tls_cert):
        raise click.UsageError("--tls-cert and --tls-key belong together, and --tls-ca to them")
    logs.configure(loaded.settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    tls = Tls(tls_cert, tls_key, tls_ca) if tls_cert and tls_key else None
    serve(url, host, port, tls, stop, lambda address: click.echo(f"gpuorch scaler listens on {address}"))
