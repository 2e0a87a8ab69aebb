"""How wide a text is on a terminal, and when it may have colour: only there, and not where NO_COLOR forbids it."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from typing import TextIO

import click

#: What a status looks like; all others have no colour.
STATUS_COLOURS = {
    "active": "green",
    "cancelled": "yellow",
    "claimed": "cyan",
    "dead_letter": "red",
    "done": "green",
    "draining": "yellow",
    "evicted": "red",
    "failed": "red",
    "lost": "red",
    "running": "cyan",
    "skipped": "yellow",
    "starting": "yellow",
}


def has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, stream: TextIO | None = None, **style: str | bool | None) -> str:
    """With `fg`, `bold` and the rest of click's styles where there may be colour; otherwise as it is."""
    given = {key: value for key, value in style.items() if value}
    if not given or not has_colour(stream or sys.stdout):
        return text
    return click.style(text, **given)  # type: ignore[arg-type]  # each of its arguments has a type of its own


def columns() -> int | None:
    """Of the terminal that standard output is; None when it is none, and nothing need be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def width_of(text: str) -> int:
    """Columns on a terminal: characters of East Asia take two, accents that join a letter none."""
    return len(text) if text.isascii() else sum(map(_width, text))


def cut(text: str, width: int) -> str:
    """At most so many columns, with … where something is missing."""
    if width_of(text) <= width:
        return text
    kept, used = "", 1
    for char in text:
        used += _width(char)
        if used > width:
            break
        kept += char
    return f"{kept}…" if width > 0 else ""


def fit(text: str, width: int) -> str:
    """Exactly so many columns."""
    short = cut(text, width)
    return short + " " * (width - width_of(short))


def _width(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
