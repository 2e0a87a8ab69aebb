"""`gpuorch serve` and `gpuorch worker`: the two programs of a production installation."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from orchestrator.cli import versions
from orchestrator.cli.options import OF_WORKERS, with_settings
from orchestrator.cli.schema import checked, packet_problem, require_schema, upgrade
from orchestrator.config import Loaded
from orchestrator.embedded.directory import require_redis_of_holder
from orchestrator.errors import Unavailable
from orchestrator.identity import node_id
from orchestrator.modules import require_modules
from orchestrator.settings import Settings
from orchestrator.store.database import Database
from orchestrator.telemetry import logs

log = logging.getLogger(__name__)


@click.command()
@with_settings("host", "port", "database_url", "redis_url", "log_level", "log_format")
@click.option("--migrate/--no-migrate", "migrate_first", help="Bring the schema up to date first (default: no).")
def serve(loaded: Loaded, *, migrate_first: bool) -> None:
    """Serve the HTTP API and stand for leader. Needs a migrated database and Redis."""
    settings = loaded.settings
    logs.configure(settings)
    require_redis(settings)
    with checked(settings, create=migrate_first) as db:
        if migrate_first:
            upgrade(db)
        require_schema(db)
        _tell_of_packets(db)
    run_api(settings, lambda url: click.echo(f"gpuorch serves {url}"))


@click.command()
@with_settings(*OF_WORKERS)
def worker(loaded: Loaded) -> int:
    """Run jobs on this machine: one supervisor, a child process per slot."""
    # The worker imports the orchestrator, never the reverse, save this command.
    from worker.supervisor import run

    logs.configure(loaded.settings, node_id=node_id(loaded.settings))
    require_modules(loaded.settings.worker_handlers)
    require_redis(loaded.settings)
    _require_tables(loaded.settings)
    # Handlers are found beside the person who starts the worker, as with `python -m`.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a text, as sys.path holds
    return run(loaded.settings)


def require_redis(settings: Settings) -> None:
    """Raises ConfigError when it is too old, or another than that of the `gpuorch dev` that holds this database."""
    require_redis_of_holder(settings)
    versions.require_redis(settings)


def _require_tables(settings: Settings) -> None:
    """Raises ConfigError when the database is too old or was not migrated; one that is away the worker waits for."""
    with suppress(Unavailable), checked(settings) as db:
        require_schema(db)
        _tell_of_packets(db)


def _tell_of_packets(db: Database) -> None:
    """Large payloads are refused and large results fail their jobs; all the rest works."""
    if problem := packet_problem(db):
        log.warning("max_allowed_packet is too small", extra={"error": problem})


def run_api(settings: Settings, ready: Callable[[str], None], stopping: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; both end it in order and return here."""
    from orchestrator.api.server import serve as serve_api

    def answers(url: str) -> None:
        ready(url)
        if _heard:
            signal.raise_signal(_heard[0])

    stop_on_sigterm()
    serve_api(settings, answers, stopping)


#: What ends a program in order; a closed terminal becomes the second.
_UNWINDING = (signal.SIGINT, signal.SIGTERM)
#: Those that came. Where Python cannot let a KeyboardInterrupt through (a callback of the garbage collector, of a
#: module that is being imported) it is told of and lost, and whoever starts for seconds passes through many of these.
_heard: list[int] = []


def _unwind(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    signal.default_int_handler(number, frame)


def stop_on_sigterm() -> None:
    """Before and after the HTTP server, which has its own handlers, SIGTERM unwinds like Ctrl-C."""
    signal.signal(signal.SIGTERM, _unwind)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless a shell started us in the background
        signal.signal(signal.SIGINT, _unwind)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a closed terminal, unless nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


@contextmanager
def undisturbed() -> Iterator[None]:
    """A signal that would unwind waits for the end of this.

    Libraries that clean up after themselves report a Ctrl-C in the middle of it as an error of theirs, with a trace.
    """
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in _UNWINDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])
