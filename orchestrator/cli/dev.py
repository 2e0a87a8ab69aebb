"""`gpuorch dev`: the whole system in one command, with nothing else installed.

    data directory ▶ Valkey ▶ SQLite and its schema ▶ worker (child process) ▶ API and leader (this process)

It stops in the opposite order, so that the worker can still write down how its jobs ended.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click

from orchestrator.cli.child import WorkerChild
from orchestrator.cli.options import with_settings
from orchestrator.cli.schema import opened, upgrade
from orchestrator.cli.servers import run_api, stop_on_sigterm, undisturbed
from orchestrator.client.paths import DEFAULT_URL, URL_VARIABLE
from orchestrator.config import Loaded, local_database
from orchestrator.embedded.directory import DataDir
from orchestrator.embedded.valkey import Valkey
from orchestrator.errors import ConfigError
from orchestrator.modules import require_modules
from orchestrator.settings import FIELDS, Settings, variable
from orchestrator.telemetry import logs

SIMULATED = "sim:2x24576"
#: The README's: who follows both submits one job, not one id with two contents.
EXAMPLE = '{"job_id": "hello-1", "type": "echo", "payload": {"hello": "world"}}'


@click.command()
@with_settings(
    "port",
    "data_dir",
    "gpu_backend",
    "worker_handlers",
    "log_level",
    "log_format",
    worker_slots="--workers",
)
def dev(loaded: Loaded) -> None:
    """Run everything here, with SQLite, an embedded Valkey and simulated GPUs. Data stays in --data-dir."""
    stop_on_sigterm()
    try:
        _run(loaded)
    except KeyboardInterrupt:
        return  # everything was stopped on the way


def _run(loaded: Loaded) -> None:
    _note_unused(loaded)
    require_modules(loaded.settings.worker_handlers)
    _require_free_port(loaded.settings)
    with ExitStack() as running:
        settings = running.enter_context(own_servers(loaded))
        worker = WorkerChild(settings, on_refused=lambda: os.kill(os.getpid(), signal.SIGTERM))
        running.callback(_refuse_with, worker)
        running.callback(worker.stop)
        worker.start()
        run_api(settings, _announcer(settings), _tell_of_stopping)


def _refuse_with(worker: WorkerChild) -> None:
    """Its signal ends us like a Ctrl-C, but then something is wrong."""
    if worker.refused:
        raise ConfigError("the worker refuses to run; what it says above tells why")


@contextmanager
def own_servers(loaded: Loaded) -> Iterator[Settings]:
    """The data directory is ours, a Valkey runs in it, the SQLite file has our tables; settings that lead to both."""
    with ExitStack() as running:
        directory = DataDir(loaded.settings.data_dir)
        running.callback(directory.close)
        valkey = Valkey(directory)
        settings = _embedded(loaded, valkey.url)
        logs.configure(settings)
        running.callback(valkey.stop)
        valkey.start()
        with undisturbed(), opened(settings, create=True) as db:
            upgrade(db)
        yield settings


def _embedded(loaded: Loaded, redis_url: str) -> Settings:
    """What was asked for, on our own servers; quieter and with GPUs to play with unless told otherwise."""
    chosen = loaded.settings.model_dump() | {
        "database_url": local_database(loaded.settings.data_dir),
        "redis_url": redis_url,
    }
    ours = {"gpu_backend": SIMULATED, "log_level": "warning"}
    chosen |= {key: value for key, value in ours.items() if loaded.nobody_gave(key)}
    return Settings.model_validate(chosen)


def _require_free_port(settings: Settings) -> None:
    """Better told now than after everything has been started."""
    from orchestrator.api.server import listen

    listen(settings.host, settings.port).close()


def _note_unused(loaded: Loaded) -> None:
    for key in ("database_url", "redis_url"):
        if not loaded.nobody_gave(key):
            click.echo(f"gpuorch dev brings its own servers: {key} ({loaded.sources[key]}) is not used", err=True)


def _announcer(settings: Settings) -> Callable[[str], None]:
    def announce(url: str) -> None:
        click.echo(f"""
gpuorch is ready at {url}

  access  open, no authentication, loopback only
  GPUs    {_gpus(settings.gpu_backend)}
  data    {settings.data_dir.resolve()}  (kept; remove it to start anew)

Submit a job, then read it and wait for its end:

  curl -s {url}/jobs/submit \\
    -H 'Content-Type: application/json' \\
    -d '{EXAMPLE}'
  curl -s '{url}/jobs/hello-1?wait=30'

{_command_line(url, settings)}

Ctrl-C stops everything.
""")

    return announce


def _tell_of_stopping() -> None:
    """At once: jobs that run get their grace, and nobody should wonder whether Ctrl-C was heard."""
    with suppress(OSError):  # the terminal was closed
        click.echo("gpuorch dev stops: jobs that run may end, or are handed back …", err=True)


def _command_line(url: str, settings: Settings) -> str:
    """What another terminal needs for `gpuorch` to be found, and to find us."""
    lines = [] if shutil.which("gpuorch") else [f'  export PATH="{Path(sys.executable).parent}:$PATH"']
    lines += [] if url == DEFAULT_URL else [f"  export {URL_VARIABLE}={url}"]
    usual = settings.data_dir == FIELDS["data_dir"].default
    lines += [] if usual else [f"  export {variable('data_dir')}={shlex.quote(str(settings.data_dir.resolve()))}"]
    return "\n".join(["The same on the command line, in another terminal:\n", *lines, "  gpuorch jobs get hello-1"])


def _gpus(backend: str) -> str:
    """What there may be: only the worker looks, and it is just starting."""
    if backend.startswith("sim:"):
        return f"SIMULATED GPUs ({backend[4:]} MB): no real one is used"
    return "no GPUs" if backend == "none" else "those that NVML shows here, if any: see gpuorch gpus"
