"""How something goes that takes a while: a bar on a terminal, elsewhere a line for each change. On standard error."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from typing import Self

import click

from orchestrator.cli.output import printable
from orchestrator.cli.style import fit, width_of

#: Columns of the bar.
BAR = 20


class Progress:
    """One line that is written over and over, or lines; `with` leaves the terminal at the beginning of a line.

    Threads may share one: what they say and show does not mix.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last: object = None
        self._shown = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._shown:
            click.echo(err=True)
            self._shown = ""

    def show(self, share: float | None, text: str, change: object) -> None:
        """`change` is what a line of its own is worth; a terminal sees every text. No share, no bar."""
        with self._lock:
            if self._terminal:
                self._shown = printable(text) if share is None else f"{_bar(share)} {printable(text)}"
                self._draw()
            elif change != self._last:
                click.echo(printable(text), err=True)
            self._last = change

    def say(self, text: str) -> None:
        """A line that stays, above the one that changes."""
        with self._lock:
            if self._shown:
                click.echo(f"\r{fit(printable(text), max(self._width, width_of(printable(text))))}", err=True)
                self._draw()
            else:
                click.echo(printable(text), err=True)

    @property
    def _width(self) -> int:
        return shutil.get_terminal_size().columns - 1

    def _draw(self) -> None:
        click.echo(f"\r{fit(self._shown, self._width)}", err=True, nl=False)


class Pace:
    """How fast a count grows: over the last seconds, not since the beginning."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()

    def of(self, count: float, now: float | None = None) -> float:
        """Per second, with this count now; 0 before there is anything to compare with."""
        now = time.monotonic() if now is None else now
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        then, before = self._seen[0]
        return (count - before) / (now - then) if now > then else 0.0


def duration(seconds: float) -> str:
    """In the two largest units: 45 s, 3 m 20 s, 2 h 5 m, 3 d 4 h."""
    whole = max(0, round(seconds))
    for unit, size, below, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {below}"
    return f"{whole} s"


def _bar(share: float) -> str:
    filled = round(BAR * min(max(share, 0.0), 1.0))
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"
