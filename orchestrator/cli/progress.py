"""How something goes that takes a while: a bar on a terminal, elsewhere a line for each change. On standard error."""

from __future__ import annotations

import shutil
import sys
from typing import Self

import click

from orchestrator.cli.output import cut, printable

#: Columns of the bar.
BAR = 20


class Progress:
    """One line that is written over and over, or lines; `with` leaves the terminal at the beginning of a line."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._last is not None:
            click.echo(err=True)

    def show(self, share: float, text: str, change: object) -> None:
        """`change` is what a line of its own is worth; a terminal sees every text."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"\r{cut(f'{_bar(share)} {printable(text)}', width):<{width}}", err=True, nl=False)
        elif change != self._last:
            click.echo(printable(text), err=True)
        self._last = change


def _bar(share: float) -> str:
    filled = round(BAR * min(max(share, 0.0), 1.0))
    return f"[{'#' * filled}{'.' * (BAR - filled)}]"
