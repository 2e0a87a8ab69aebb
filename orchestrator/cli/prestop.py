"""`gpuorch drain-worker`: what a pod runs before it is stopped, so that its jobs end where they are."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import click

from orchestrator.identity import WORKER_PROCESS

#: Seconds between two looks.
LOOK_EVERY_S = 0.1
#: Seconds that a worker may need from its start until it can be told.
START_S = 10.0
_HOW = "name the worker's with --pid; it is the number in its id, host:pid:nonce (gpuorch workers list)"


@click.command()
@click.option(
    "--pid", type=click.IntRange(1), default=1, show_default=True, help="Process of the worker; a container's is 1."
)
@click.option("--timeout", type=click.FloatRange(0), default=3600.0, show_default=True, help="Seconds to wait.")
def drain_worker(pid: int, timeout: float) -> None:
    """Tell the worker on this machine to take no more jobs, and wait until its last has ended and it is gone.

    For a pod's preStop hook. After the timeout the exit code is 1 and the worker still runs; SIGTERM, which
    Kubernetes sends next, lets it hand its jobs back. A process that cannot be told is no worker: after 10 seconds the
    exit code is 1.
    """
    began = time.monotonic()
    _tell(pid, began + min(timeout, START_S))
    while not _is_gone(pid):
        if time.monotonic() >= began + timeout:
            raise click.ClickException(f"process {pid} is still there; send it SIGTERM to make it hand its jobs back")
        time.sleep(LOOK_EVERY_S)
    click.echo("the worker is gone")


def _tell(pid: int, deadline: float) -> None:
    """Send the signal to a worker that is ready for it, and to nobody else: who is none would die of it."""
    while not _is_gone(pid):
        if _status(pid).get("Name") == WORKER_PROCESS:
            os.kill(pid, signal.SIGUSR1)
            return
        if time.monotonic() >= deadline:
            raise click.ClickException(f"process {pid} is no gpuorch worker that can be drained; {_HOW}")
        time.sleep(LOOK_EVERY_S)
    raise click.ClickException(f"no process {pid}; {_HOW}")


def _status(pid: int) -> dict[str, str]:
    """What the kernel says of a process; nothing when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _is_gone(pid: int) -> bool:
    """Also when only its parent has not noticed yet."""
    return _status(pid).get("State", "X")[0] in "XZ"
