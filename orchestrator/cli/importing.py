"""`gpuorch jobs import`: a file of jobs, with a progress bar, rejects, and an end that can be gone on from."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import click

from orchestrator.cancellation import Cancellation
from orchestrator.cli import REFUSED, UNREACHABLE
from orchestrator.cli.http import with_api
from orchestrator.cli.options import as_json
from orchestrator.cli.output import print_json, printable
from orchestrator.cli.progress import Pace, Progress, duration
from orchestrator.client.api import Api
from orchestrator.client.importing import NAME_CHARACTERS, THREADS, Importing, Line, Refusal, Settled, name_of, read
from orchestrator.client.submitting import PATIENCE_S
from orchestrator.errors import ConfigError, InvalidInput, OrchestratorError, Unavailable
from orchestrator.names import is_name

#: Seconds between two lines about the progress where there is no terminal, and between two bars where there is one.
TELL_EVERY_S, DRAW_EVERY_S = 5.0, 0.1
#: Refused lines that are told of one by one; a file of a million wrong ones is no message.
MOST_TOLD = 20


@dataclass
class Totals:
    """`through`: the line up to which everything is settled."""

    lines: int = 0
    created: int = 0
    existing: int = 0
    refused: int = 0
    through: int = 0
    offset: int = 0

    def add(self, settled: Settled) -> None:
        self.lines += settled.lines
        self.created += settled.created
        self.existing += settled.existing
        self.refused += len(settled.refused)
        self.through, self.offset = settled.number, settled.offset

    def text(self) -> str:
        return f"{self.created:,} created, {self.existing:,} existing, {self.refused:,} refused"


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option("--name", help="What ids of lines without a job_id begin with.  [default: the file's name]")
@click.option("--rejects", type=click.Path(path_type=Path, dir_okay=False), help="Write refused lines to this file.")
@click.option("--from-line", type=click.IntRange(1), default=1, help="Pass over the lines before this one.")
@click.option(
    "--threads",
    type=click.IntRange(0),
    default=THREADS,
    show_default=True,
    help="Requests at the same time; 0: as GPUORCH_THREADS says, else as many as CPUs.",
)
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(0),
    default=PATIENCE_S,
    show_default=True,
    help="Seconds to wait for a server that is away or says to come again later.",
)
@with_api
@as_json
def import_jobs(
    api: Api,
    file: Path,
    *,
    name: str | None,
    rejects: Path | None,
    from_line: int,
    threads: int,
    patience_s: float,
    as_json: bool,
) -> int:
    """Submit the jobs in FILE (- for standard input), a JSON object to a line.

    Running it again makes no job twice: a line without a job_id gets one made of --name, its number and its content.
    Lines that are refused are told of and passed over (exit 1). Ctrl-C lets what is on its way settle and says how to
    go on. Jobs keep their order with --threads 1, and nearly so otherwise.
    """
    called = _name(file, name)
    stop = Cancellation()
    with ExitStack() as opened, _Signals(stop) as signals:
        source = opened.enter_context(_opened(file))
        report = opened.enter_context(_Report(file, rejects, _size_of(source)))
        importing = Importing(api, patience_s, stop, on_wait=report.waits)
        error: Exception | None = None
        try:
            for settled in importing.settled(signals.watched(read(source, from_line)), called, threads):
                report.add(settled)
        except _Interrupted:
            pass  # `signals` knows
        except ConfigError as wrong:
            raise click.UsageError(str(wrong)) from None
        except InvalidInput:
            raise  # nothing was begun that could be gone on with
        except OrchestratorError as failed:
            error = failed
    return _end(report, signals.number, error, as_json=as_json)


def _end(report: _Report, signal_number: int | None, error: Exception | None, *, as_json: bool) -> int:
    totals = report.totals
    unfinished = error or report.error
    complete = unfinished is None and signal_number is None
    if as_json:
        print_json(asdict(totals) | {"complete": complete, "error": None if unfinished is None else str(unfinished)})
    else:
        click.echo(f"{totals.lines:,} lines: {totals.text()}")
    if unfinished is not None:
        click.echo(f"gpuorch: {printable(str(unfinished))}", err=True)
    if not complete:
        seen = f"up to line {totals.through} everything is settled" if totals.through else "nothing is settled"
        ways = f"run it again to go on, or pass over what is done: --from-line {totals.through + 1}"
        click.echo(f"stopped; {seen}. No job is made twice: {ways}", err=True)
    if signal_number is not None:
        return 128 + signal_number
    if isinstance(error, Unavailable) or report.away:
        return UNREACHABLE
    return REFUSED if totals.refused or not complete else 0


def _name(file: Path, name: str | None) -> str | None:
    """None when lines must have ids of their own: what comes through a pipe has no name."""
    if name is None:
        return None if str(file) == "-" else name_of(str(file))
    if not is_name(name) or len(name) > NAME_CHARACTERS:
        raise click.BadParameter(f"at most {NAME_CHARACTERS} of A-Z a-z 0-9 . _ : -", param_hint="--name")
    return name


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    if str(file) == "-":
        yield sys.stdin.buffer
        return
    try:
        source = file.open("rb")
    except OSError as error:
        raise click.BadParameter(f"{file}: {error.strerror}", param_hint="FILE") from None
    with source:
        yield source


def _size_of(source: IO[bytes]) -> int | None:
    """None for a pipe, whose end nobody knows."""
    try:
        found = os.fstat(source.fileno())
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


class _Signals:
    """Ctrl-C and SIGTERM let what is on its way settle; the second one ends it at once."""

    def __init__(self, stop: Cancellation) -> None:
        self.number: int | None = None
        self._stop = stop
        self._reading = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {one: signal.signal(one, self._hear) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def watched(self, lines: Iterator[Line]) -> Iterator[Line]:
        """A pipe may have nothing to read for hours, and nobody waits for that."""
        while not self._stop.cancelled:
            self._reading = True
            try:
                line = next(lines, None)
            except _Interrupted:
                return
            finally:
                self._reading = False
            if line is None:
                return
            yield line

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        self._stop.cancel("interrupted")
        if self._reading:
            raise _Interrupted


class _Interrupted(KeyboardInterrupt):
    """A signal came while we read."""


class _Report:
    """Counts, the bar or lines, and the lines that were refused."""

    def __init__(self, file: Path, rejects: Path | None, size: int | None) -> None:
        self.totals = Totals()
        self.error: str | None = None
        self.away = False
        self._size = size
        self._label = "standard input" if str(file) == "-" else file.name
        self._rejects_path = rejects
        self._rejects: IO[bytes] | None = None
        self._told = 0
        self._progress = Progress()
        self._pace, self._bytes = Pace(), Pace()
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        if self._rejects_path is not None:
            try:
                self._rejects = self._rejects_path.open("wb")
            except OSError as error:
                raise click.BadParameter(f"{error.filename}: {error.strerror}", param_hint="--rejects") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self.totals.lines:
            self._draw()
        self._progress.close()
        if self._told > MOST_TOLD:
            click.echo(f"… and {self._told - MOST_TOLD:,} more refused lines", err=True)
        if self._rejects is not None:
            self._rejects.close()

    def add(self, settled: Settled) -> None:
        self.totals.add(settled)
        self.error, self.away = settled.error, settled.away
        for refusal in settled.refused:
            self._refuse(refusal)
        if time.monotonic() - self._drawn_at >= DRAW_EVERY_S:
            self._draw()

    def waits(self, reason: str) -> None:
        self._progress.say(f"waiting: {reason}")

    def _refuse(self, refusal: Refusal) -> None:
        self._told += 1
        if self._told <= MOST_TOLD:
            self._progress.say(f"{self._label}:{refusal.number}: {refusal.reason}")
        if self._rejects is not None:
            self._rejects.write(refusal.raw + b"\n")

    def _draw(self) -> None:
        now = self._drawn_at = time.monotonic()
        rate, speed = self._pace.of(self.totals.lines), self._bytes.of(self.totals.offset)
        parts = [f"{self.totals.lines:,} lines", self.totals.text(), f"{rate:,.0f} lines/s"]
        if self._size is None:
            self._progress.show(None, ", ".join(parts), change=int(now / TELL_EVERY_S))
            return
        share = min(self.totals.offset / max(self._size, 1), 1.0)
        parts.insert(0, f"{100 * share:.0f} %")
        parts += [f"{duration((self._size - self.totals.offset) / speed)} left"] if speed and share < 1 else []
        self._progress.show(share, ", ".join(parts), change=int(now / TELL_EVERY_S))
