"""What commands print: JSON for programs, tables that fit the terminal for people."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

#: A column is not cut below this width.
MIN_WIDTH = 6
GAP = "  "


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], empty: str = "nothing to show") -> None:
    """One line per row, cut to the terminal's width; piped, nothing is cut."""
    lines = [[printable(row.get(column)) for column in columns] for row in rows]
    if not lines:
        click.echo(empty)
        return
    table = [[column.upper() for column in columns], *lines]
    widths = _widths(table, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    for line in table:
        cells = [cut(text, width).ljust(width) for text, width in zip(line, widths, strict=True)]
        click.echo(GAP.join(cells).rstrip())


def print_record(record: Mapping[str, Any]) -> None:
    """One line per field that has a value."""
    shown = {key: value for key, value in record.items() if value not in (None, [])}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        click.echo(f"{key.ljust(width)}{GAP}{printable(value)}")


def print_events(events: Iterable[Mapping[str, Any]]) -> None:
    """A job's history."""
    print_table(["ts", "event_type", "attempt", "worker_id", "actor", "details"], events)


def tell_of_next(page: Mapping[str, Any]) -> None:
    """How to go on, beside the output: what is piped stays a table."""
    if page.get("next_cursor"):
        click.echo(f"more: --cursor {page['next_cursor']}", err=True)


def _widths(table: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while limit and sum(widths) + len(GAP) * (len(widths) - 1) > limit and max(widths) > MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def printable(value: object) -> str:
    """A value as a cell; nothing in it does anything to the terminal."""
    if value is None or value == "":
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, default=_plain, ensure_ascii=False)
    # Names and errors come from clients: an escape sequence in them must not reach the terminal.
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    # Times of the store have no zone because all of them are UTC.
    return f"{value.isoformat()}Z" if isinstance(value, datetime) else str(value)
