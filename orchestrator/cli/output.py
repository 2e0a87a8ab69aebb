"""What commands print: JSON for programs, tables that fit the terminal for people."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.cli.style import STATUS_COLOURS, columns, cut, fit, painted, width_of
from orchestrator.wording import telling_line

#: Free text is not cut below this width, nor the heading of a column below the other.
MIN_WIDTH, MIN_HEADING = 10, 6
GAP = "  "
#: Columns that say nothing when they are cut, beside ids, times and numbers.
_WHOLE = frozenset({"status", "event_type", "gpu_uuid", "gpus"})
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
#: Nothing, a number, a date or a time of day.
_SHORT = re.compile(r"-|-?\d+(\.\d+)?|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d")


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def print_table(names: Sequence[str], rows: Iterable[Mapping[str, Any]], empty: str = "nothing to show") -> None:
    """One line per row, cut to the terminal's width; piped, nothing is cut."""
    lines = [[cell(row.get(name)) for name in names] for row in rows]
    if not lines:
        click.echo(empty)
        return
    limit = columns()
    if limit is not None and _whole(_widths([[name.upper() for name in names], *lines])) > limit:
        names, lines = _without_empty(names, _with_short_times(lines))
    headings, widths = [name.upper() for name in names], fitting(names, lines, limit)
    click.echo(painted(_line(headings, widths), bold=True))
    for line in lines:
        click.echo(_line(line, widths, names))


def _with_short_times(lines: list[list[str]]) -> list[list[str]]:
    today = datetime.now(UTC).date().isoformat()
    return [[short_time(text, today) for text in line] for line in lines]


def _without_empty(names: Sequence[str], lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Columns in which no row has anything make room for the others."""
    full = [n for n in range(len(names)) if any(line[n] != "-" for line in lines)] or [0]
    return [names[n] for n in full], [[line[n] for n in full] for line in lines]


def fitting(names: Sequence[str], lines: Sequence[Sequence[str]], limit: int | None) -> list[int]:
    """Widths of the columns: free text gives way first, then headings, then the last columns leave.

    Ids stay whole unless one would take more than half of the terminal: a status is to stand beside it.
    """
    widths = _widths([[name.upper() for name in names], *lines])
    if limit is None or _whole(widths) <= limit:
        return widths
    cells = _widths(lines)
    whole = [_is_whole(name, column) for name, column in zip(names, zip(*lines, strict=True), strict=True)]
    # What each column needs when its heading is cut, and what it needs at the least.
    needs = [max(cells[n], min(len(name), MIN_HEADING)) if whole[n] else widths[n] for n, name in enumerate(names)]
    least = [min(needs[n], limit // 2 if whole[n] else MIN_WIDTH) for n in range(len(names))]
    while len(widths) > 1 and _whole(least[: len(widths)]) > limit:
        widths.pop()
    shown = range(len(widths))
    _narrow(widths, {n: least[n] for n in shown if not whole[n]}, limit)
    _narrow(widths, {n: needs[n] for n in shown if whole[n]}, limit)
    _narrow(widths, {n: least[n] for n in shown}, limit)
    return [min(width, limit) for width in widths]


def _narrow(widths: list[int], least: Mapping[int, int], limit: int) -> None:
    """Take from the widest of these columns, one by one, until all fit or have the least."""
    while _whole(widths) > limit and (wide := [n for n in least if widths[n] > least[n]]):
        widths[max(wide, key=widths.__getitem__)] -= 1


def _is_whole(name: str, column: Sequence[str]) -> bool:
    if name.endswith("_id") or name in _WHOLE:
        return True
    return all(map(_SHORT.fullmatch, column))


def short_time(text: str, today: str) -> str:
    """Of a time the time of day if it is today's (UTC), else its date; any other text as it is."""
    found = _TIME.match(text)
    if found is None:
        return text
    return found[2] if found[1] == today else found[1]


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width_of, column)) for column in zip(*table, strict=True)]


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
    """One line per field that has a value, more where it is a text of several."""
    shown = {key: value for key, value in record.items() if value not in (None, [])}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        first, *rest = _lines(value)
        click.echo(f"{key.ljust(width)}{GAP}{first}")
        for line in rest:
            click.echo(f"{' ' * width}{GAP}{line}".rstrip())


def _lines(value: object) -> list[str]:
    """A text in its own lines: an error is read by people."""
    lines = value.expandtabs(4).strip("\n").splitlines() if isinstance(value, str) else []
    return [printable(line) if line else "" for line in lines] if len(lines) > 1 else [printable(value)]


def print_events(events: Iterable[Mapping[str, Any]]) -> None:
    """A job's history."""
    print_table(["ts", "event_type", "attempt", "worker_id", "actor", "details"], events)


def tell_of_next(page: Mapping[str, Any]) -> None:
    """How to go on, beside the output: what is piped stays a table."""
    if page.get("next_cursor"):
        click.echo(f"more: --cursor {page['next_cursor']}", err=True)


def cell(value: object) -> str:
    """A value in one line of a table; of a text of several, the one that says what went wrong."""
    if isinstance(value, str):
        return printable(telling_line(value))
    if isinstance(value, Mapping) and isinstance(value.get("error"), str):
        return printable({**value, "error": telling_line(value["error"])})
    return printable(value)


def printable(value: object) -> str:
    """A value in one line; nothing in it does anything to the terminal."""
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
