"""`gpuorch run`: any command under a GPU lease."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

from orchestrator.cli.command import Command, NotGone, find
from orchestrator.cli.http import with_url
from orchestrator.client import Held, lease

#: Exit code when the lease was lost and the command ended for it: "try again", in the words of sysexits.h.
LOST = 75
#: Seconds between two lines about why we wait; the reason holds numbers that may change every second.
TELL_EVERY_S = 10.0

_UNABLE = {126: "is not to be executed", 127: "command not found"}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--min-memory-mb", type=click.IntRange(1), required=True, help="GPU memory the command needs.")
@click.option("--gpu-count", type=click.IntRange(1), default=1, show_default=True, help="GPUs with that much, each.")
@click.option("--cpu-fallback", is_flag=True, help="Run without a GPU rather than wait for one.")
@click.option("--agent", help="On whose behalf.  [default: the user]")
@click.option("--node", "node_id", help="This machine among the nodes.  [default: setting node_id, or host name]")
@click.option(
    "--ttl",
    "ttl_seconds",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds the memory stays taken when this machine is gone.",
)
@click.option("--wait", "wait_s", type=click.FloatRange(0), help="Seconds to wait for room.  [default: no limit]")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds between SIGTERM and SIGKILL when the lease is lost.",
)
@with_url
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], *, grace_s: float, **wanted: Any) -> int:
    """Run COMMAND under a GPU lease: wait for room, run it on the leased GPU, release it when all of it is gone.

    \b
    gpuorch run --min-memory-mb 8000 -- python train.py --epochs 3

    Exits as the command does: its code, 128 + number after a signal, 127 not found, 126 not executable. 75 when the
    lease was lost and the command ended for it; 1 when no lease was granted, 3 when the server cannot be reached.
    """  # noqa: D301 - \b is click's
    program = find(command[0])
    if isinstance(program, int):
        _say(f"{command[0]}: {_UNABLE[program]}")
        return program
    with _ending_by_signals(), lease(**wanted, on_wait=_teller(), on_lost=_wake) as held:
        running = Command(program, command, held.lost.is_set, grace_s)
        try:
            code = running.run()
        except NotGone:
            # Not through the block's end: their memory must not be given to others as long as the lease lives.
            _say("processes of the command cannot be killed; the lease is not released and ends by itself")
            os._exit(1)
    if running.was_ended:
        _say(f"the lease was lost ({held.reason}); the command was ended")
        return LOST
    return code


def _say(text: str) -> None:
    click.echo(f"gpuorch run: {text}", err=True)


def _teller() -> Callable[[str], None]:
    """Says why we wait, but not every second."""
    quiet_until = 0.0

    def tell(reason: str) -> None:
        nonlocal quiet_until
        if time.monotonic() >= quiet_until:
            quiet_until = time.monotonic() + TELL_EVERY_S
            _say(f"waiting: {reason}")

    return tell


def _wake(held: Held) -> None:
    """The command's keeper takes signals one by one, and looks at the lease after each."""
    _say(f"the lease is lost ({held.reason}); ending the command")
    os.kill(os.getpid(), signal.SIGCHLD)


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """While we wait, and until the command takes over, a signal unwinds like Ctrl-C: what was granted is released."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    # Those that were ignored when we were started (nohup) stay so.
    ours = [one for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(one) != signal.SIG_IGN]
    before = {one: signal.signal(one, end) for one in ours}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
