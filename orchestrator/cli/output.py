"""What commands print: JSON for programs, tables that fit the terminal for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from orchestrator.cli.style import STATUS_COLOURS, columns, cut, fit, painted, width_of

#: A column is not cut below this width.
MIN_WIDTH = 6
GAP = "  "


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def print_table(names: Sequence[str], rows: Iterable[Mapping[str, Any]], empty: str = "nothing to show") -> None:
    """One line per row, cut to the terminal's width; piped, nothing is cut."""
    lines = [[printable(row.get(name)) for name in names] for row in rows]
    if not lines:
        click.echo(empty)
        return
    widths = fitting([[name.upper() for name in names], *lines], columns())
    click.echo(painted(_line([name.upper() for name in names], widths), bold=True))
    for line in lines:
        click.echo(_line(line, widths, names))


def fitting(table: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    """Widths of the columns; the widest give way first, and the last ones leave where even that is too much."""
    widths = [max(map(width_of, column)) for column in zip(*table, strict=True)]
    if limit is None:
        return widths
    while len(widths) > 1 and _whole([min(width, MIN_WIDTH) for width in widths]) > limit:
        widths.pop()
    while _whole(widths) > limit and max(widths) > MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths


def _whole(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _line(cells: Sequence[str], widths: Sequence[int], names: Sequence[str] = ()) -> str:
    """Without spaces at its end; a status has its colour."""
    last = len(widths) - 1
    texts = [cut(cell, width) if n == last else fit(cell, width) for n, (cell, width) in enumerate(zip(cells, widths))]  # noqa: B905 - columns without a width are left out
    for n, name in enumerate(names[: len(texts)]):
        if name == "status":
            texts[n] = painted(texts[n], fg=STATUS_COLOURS.get(cells[n]))
    return GAP.join(texts).rstrip()


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
