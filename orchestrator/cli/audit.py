"""`gpuorch audit …`: everything that happened, and what happens now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.cli import completion
from orchestrator.cli.http import with_api
from orchestrator.cli.options import as_json
from orchestrator.cli.output import GAP, cell, print_json, print_table, short_time
from orchestrator.cli.style import columns, cut, fit
from orchestrator.client.api import Api

_LISTED = ("ts", "event_type", "job_id", "pool_id", "attempt", "worker_id", "actor", "details")
#: Columns of lines that come one by one: nobody knows how wide those after them will be.
_WIDTHS = (27, 18, 24, 12, 7, 24, 16)
#: The same on a terminal, where a time is short.
_NARROW = (10, *_WIDTHS[1:])
#: Pages that are looked at for events that may be rare; each is a bounded part of the trail.
MOST_PAGES = 20
#: Seconds between two looks for what is new.
LOOK_EVERY_S = 1.0
#: Events that are asked for at a time.
PAGE = 1000

Event = dict[str, Any]


@click.group()
def audit() -> None:
    """The audit trail: everything that happened."""


@audit.command()
@click.option("-n", "--lines", type=click.IntRange(0, 10_000), default=20, show_default=True, help="So many at first.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens, until Ctrl-C.")
@click.option("--event", "event_type", metavar="TYPE", help="Only these: job.done, or all of a kind: pool.*")
@click.option("--job", "job_id", shell_complete=completion.job_ids, help="Only what happened to this job.")
@click.option("--pool", "pool_id", shell_complete=completion.pool_ids, help="Only this pool's.")
@click.option("--worker", "worker_id", help="Only what this worker did.")
@click.option("--actor", help="Only what this one asked for.")
@with_api
@as_json
def tail(api: Api, *, lines: int, follow: bool, as_json: bool, **filters: Any) -> None:
    """Show the latest events, oldest of them first. With --follow and --json: an object to a line."""
    found, start = _latest(api, filters, lines)
    if not follow:
        if as_json:
            print_json({"events": found})
        else:
            print_table(_LISTED, found, empty="no events")
        return
    tell = _tell_json if as_json else _tell
    if not as_json:
        click.echo(_row([name.upper() for name in _LISTED]))
    tell(found)
    for event in _following(api, filters, start, {one["id"] for one in found}):
        tell([event])


def _latest(api: Api, filters: dict[str, Any], count: int) -> tuple[list[Event], int]:
    """So many, oldest first, and the id after which they go on."""
    found: list[Event] = []
    cursor = start = None
    for _ in range(MOST_PAGES):
        page = api.get("/audit", filters | {"limit": min(max(count - len(found), 1), PAGE), "cursor": cursor})
        start = page["next_after"] if start is None else start
        found += page["events"]
        cursor = page["next_cursor"]
        if len(found) >= count or cursor is None:
            break
    else:
        click.echo("only the latest part of the trail was looked at", err=True)
    return found[:count][::-1], start or 0


def _following(api: Api, filters: dict[str, Any], after: int, told: set[int]) -> Iterator[Event]:
    """What happens; `told` was shown already, and what is older than that is of no interest."""
    oldest = min(told, default=after + 1)
    while True:
        page = api.get("/audit", filters | {"limit": PAGE, "after": after})
        yield from (event for event in page["events"] if event["id"] >= oldest and event["id"] not in told)
        if page["next_after"] == after:
            time.sleep(LOOK_EVERY_S)
        after = page["next_after"]


def _tell_json(events: Iterable[Event]) -> None:
    for event in events:
        click.echo(json.dumps(event, ensure_ascii=False))


def _tell(events: Iterable[Event]) -> None:
    for event in events:
        click.echo(_row([cell(event.get(name)) for name in _LISTED]))


def _row(cells: list[str]) -> str:
    """Columns of a fixed width, and short times; piped, nothing is cut."""
    limit = columns()
    if limit is None:
        return GAP.join(f"{text:<{width}}" for text, width in zip(cells, (*_WIDTHS, 0), strict=True)).rstrip()
    cells = [short_time(cells[0], datetime.now(UTC).date().isoformat()), *cells[1:]]
    parts = [fit(text, width) for text, width in zip(cells, _NARROW, strict=False)]
    return cut(GAP.join([*parts, cells[-1]]), limit).rstrip()
