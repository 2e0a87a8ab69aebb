"""What `gpuorch top` shows: a look at the server becomes lines that fit. Pure; `top` asks and draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from orchestrator.cli.bars import gpu_lines
from orchestrator.cli.output import printable
from orchestrator.cli.progress import duration
from orchestrator.cli.style import STATUS_COLOURS, cut, fit, painted, width_of
from orchestrator.jobs import Status

#: Shown also when there is none.
_ALWAYS = (Status.PENDING, Status.CLAIMED, Status.RUNNING, Status.DONE)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Look:
    """What the server said; `error` when it says nothing any more, and the rest is what it said last."""

    url: str
    stats: Row
    workers: Sequence[Row]
    gpus: Sequence[Row]
    leader: Row
    paused: Sequence[Row] = ()
    error: str | None = None
    #: Jobs that workers ended, per second.
    done_rate: float = 0.0
    failed_rate: float = 0.0
    clock: str = ""
    alive: Sequence[Row] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alive", [one for one in self.workers if one["status"] in {"active", "draining"}])


def frame(look: Look, width: int, height: int, hint: str = "") -> list[str]:
    """Lines no wider than the screen, and no more than it has; `hint` is its last."""
    head = [cut_painted(line, width) for line in _head(look, width)]
    tables = [table for table in (_lanes(look, width), _workers(look, width), _gpus(look, width)) if table]
    room = height - len(head) - bool(hint)
    body: list[str] = []
    for table, lines in zip(tables, shares([len(table) + 1 for table in tables], room), strict=True):
        body += _shortened(table, lines - 1, width) if lines > 1 else []
    shown = [*head, *body[: max(room, 0)]]
    if not hint:
        return shown[:height]
    return [*shown[: height - 1], *[""] * (height - 1 - len(shown)), cut(hint, width)]


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """How many lines each table gets: what it wants, as long as the smaller ones are not squeezed for it."""
    given = [0] * len(wanted)
    left, open_ = room, [n for n, lines in enumerate(wanted) if lines]
    while left > 0 and open_:
        for n in list(open_):
            if left <= 0:
                break
            given[n] += 1
            left -= 1
            if given[n] == wanted[n]:
                open_.remove(n)
    return given


def _head(look: Look, width: int) -> Iterable[str]:
    title = f"gpuorch top  {look.url}"
    yield painted(title, bold=True) + " " * max(1, width - len(title) - len(look.clock)) + look.clock
    if look.error:
        yield painted(f"no answer: {look.error}", fg="red")
    else:
        yield _leader(look.leader)
    counts, more = look.stats["status"], set(look.stats["at_least"])
    shown = [name for name in Status if counts.get(name) or name in _ALWAYS]
    parts = [f"{name} {painted(_number(counts.get(name, 0), name in more), bold=True)}" for name in shown]
    yield "jobs    " + "  ".join(parts)
    slots, busy = (sum(int(one.get(key) or 0) for one in look.alive) for key in ("slots", "busy"))
    ends = f"{look.done_rate:.1f} done/s" + (f", {look.failed_rate:.1f} failed/s" if look.failed_rate else "")
    yield f"workers {len(look.alive)} alive, {busy} of {slots} slots busy, {ends}"
    if troubled := [one["trouble"] for one in look.alive if one.get("trouble")]:
        yield painted(f"trouble {len(troubled)} of {len(look.alive)} workers: {printable(troubled[0])}", fg="red")
    if look.paused:
        yield painted(f"paused  {', '.join(printable(one['key']) for one in look.paused)}", fg="yellow")


def _leader(leader: Row) -> str:
    if not leader.get("alive"):
        return painted(f"leader  nobody leads (last epoch {leader.get('epoch')})", fg="red")
    return f"leader  {printable(leader['holder'])}, epoch {leader['epoch']}"


def _lanes(look: Look, width: int) -> list[str]:
    """The deepest first."""
    rows = sorted(look.stats["pools"].items(), key=lambda one: (-one[1]["pending"], one[0]))
    numbers = ("pending", "claimed", "running")
    room = max(8, width - 10 * len(numbers) - 14)
    lines = [
        fit(printable(lane), room)
        + "".join(f"{counts[name]:>10}" for name in numbers)
        + f"{_age(counts.get('oldest_pending_seconds')):>14}"
        for lane, counts in rows
    ]
    title = fit("LANE", room) + "".join(f"{name.upper():>10}" for name in numbers) + f"{'OLDEST WAIT':>14}"
    return [title, *lines] if lines else ["no jobs wait or run"]


def _workers(look: Look, width: int) -> list[str]:
    rows = sorted(look.alive, key=lambda one: (-int(one["busy"]), str(one["worker_id"])))
    pool = min(16, width // 8)
    bar = max(4, min(12, width // 10))
    room = max(8, width - pool - bar - 38)
    title = f"{fit('WORKER', room)} {fit('POOL', pool)} {fit('STATUS', 9)}{fit('BUSY', bar + 6)}"
    title += f"{'DONE':>8}{'FAILED':>7}{'SEEN':>6}"
    lines = []
    for one in rows:
        slots, busy = int(one["slots"]), int(one["busy"])
        filled = round(bar * busy / slots) if slots else 0
        status = painted(fit(printable(one["status"]), 9), fg=STATUS_COLOURS.get(str(one["status"])))
        lines.append(
            f"{fit(printable(one['worker_id']), room)} {fit(printable(one['pool_id']), pool)} {status}"
            f"{painted('#' * filled, fg='cyan')}{'.' * (bar - filled)}{f'{busy}/{slots}':>6}"
            f"{_short(int(one['jobs_done'])):>8}{_short(int(one['jobs_failed'])):>7}{_seen(one):>6}"
        )
    return [title, *lines] if lines else ["no workers"]


def _seen(worker: Row) -> str:
    age = worker.get("heartbeat_age_seconds")
    return "-" if age is None else f"{max(0.0, float(age)):.0f} s"


def _gpus(look: Look, width: int) -> list[str]:
    lines = list(gpu_lines(list(look.gpus), width)) if look.gpus else ["no gpus"]
    return ["GPUS", *lines] if look.gpus else lines


def _shortened(table: list[str], lines: int, width: int) -> list[str]:
    """An empty line, the table's first lines, and how many are missing."""
    title, *rows = table
    shown = ["", painted(title, bold=True) if rows else title, *rows]
    if len(table) > lines:
        missing = len(table) - lines + 1
        shown = [*shown[:lines], f"… {missing} more"]
    return [cut_painted(line, width) for line in shown]


def cut_painted(line: str, width: int) -> str:
    """Cut to the width, which colours do not count for; a line that is too wide loses them."""
    bare = click.unstyle(line)
    return line if width_of(bare) <= width else cut(bare, width)


def _number(count: int, at_least: bool) -> str:
    return f"{count}{'+' if at_least else ''}"


def _short(count: int) -> str:
    return f"{count}" if count < 1_000_000 else f"{count / 1e6:.1f}M"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
