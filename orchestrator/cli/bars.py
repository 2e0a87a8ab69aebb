"""GPUs as people look at them: a bar each, by node, as wide as the terminal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from orchestrator.cli.output import printable
from orchestrator.cli.style import columns, cut, painted

#: Columns of a bar at most and at least, and what share of a line a GPU's name may take.
BAR_MAX, BAR_MIN, NAME_SHARE = 40, 8, 5
#: Columns for lines that go to a file: room for everything.
UNLIMITED = 400

Gpu = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of a bar: what it is called, how it looks, and where only ASCII may be printed."""

    name: str
    mark: str
    plain: str
    colour: str | None


LEASED = Part("leased", "█", "#", "cyan")
FOREIGN = Part("foreign", "▓", "x", "magenta")
FREE = Part("free", "░", ".", "green")
CLOSED = Part("closed", "╱", "/", "red")
KEPT = Part("kept back", "·", "-", None)


def print_gpus(gpus: Iterable[Gpu]) -> None:
    """Those of a node together; below them, what the marks mean."""
    rows = list(gpus)
    if not rows:
        click.echo("no gpus")
        return
    width = columns() or UNLIMITED
    for line in [*gpu_lines(rows, width), legend(width)]:
        click.echo(line)


def why_closed(gpu: Gpu) -> str | None:
    """Why it grants no lease, whatever is free on it; None when it does. What a server does not tell is not so."""
    if gpu.get("quarantined_at"):
        return _because(f"quarantined since {_time(gpu['quarantined_at'])}", gpu.get("quarantine_reason"))
    if gpu.get("health", "ok") != "ok":
        return _because(str(gpu["health"]), gpu.get("health_reason"))
    if not gpu.get("fresh", True):
        return f"not measured since {_time(gpu.get('sampled_at'))}"
    if gpu.get("gate_closed_at"):
        return f"more memory in use than the gate allows, last at {_time(gpu['gate_closed_at'])}"
    if gpu.get("reserved_for"):
        return f"reserved for {gpu['reserved_for']}"
    return None


def _because(state: str, reason: object) -> str:
    return f"{state}: {reason}" if reason else state


def _time(text: object) -> str:
    """To the second; the API tells more."""
    return f"{str(text)[:19].replace('T', ' ')} UTC"


def gpu_lines(rows: list[Gpu], width: int) -> Iterator[str]:
    """A line for each node and for each of its GPUs."""
    layout = _Layout(rows, width)
    for node, group in itertools.groupby(rows, key=lambda gpu: gpu["node_id"]):
        yield painted(cut(printable(node), width), bold=True)
        yield from map(layout.line, group)


class _Layout:
    """`  INDEX NAME BAR TEXT`: the bar gets what the longest text leaves; where that is too little, texts are cut."""

    def __init__(self, rows: list[Gpu], width: int) -> None:
        self._width = width
        self._index = max(len(str(gpu["gpu_index"])) for gpu in rows)
        self._name = min(width // NAME_SHARE, max(len(printable(gpu.get("name"))) for gpu in rows))
        left = width - len(f"  {'':{self._index}} {'':{self._name}}  ")
        self._bar = max(BAR_MIN, min(BAR_MAX, left - max(len(_text(gpu)) for gpu in rows)))
        self._text = max(0, left - self._bar)

    def line(self, gpu: Gpu) -> str:
        name = cut(printable(gpu.get("name")), self._name)
        head = f"  {gpu['gpu_index']:>{self._index}} {name:<{self._name}} "
        return f"{head}{_bar(gpu, self._bar)} {cut(_text(gpu), self._text)}"


def _text(gpu: Gpu) -> str:
    closed = why_closed(gpu)
    if closed is not None:
        return printable(closed)
    parts = [f"{_free(gpu)} of {gpu['usable_mb']} MB free"]
    parts += [f"{_memory(gpu, kind)} {kind}" for kind in ("leased", "foreign") if _memory(gpu, kind)]
    parts += [f"{100 * gpu['utilization']:.0f} % busy"] if gpu.get("utilization") is not None else []
    parts += [f"{gpu['temperature_c']} C"] if gpu.get("temperature_c") is not None else []
    return ", ".join(parts)


def _memory(gpu: Gpu, kind: str) -> int:
    return int(gpu.get(f"{kind}_mb") or 0)


def _free(gpu: Gpu) -> int:
    return max(0, int(gpu["usable_mb"]) - _memory(gpu, "leased") - _memory(gpu, "foreign"))


def _bar(gpu: Gpu, width: int) -> str:
    """To scale with the whole memory: leased, foreign, free, and what the gate keeps back."""
    free = FREE if why_closed(gpu) is None else CLOSED
    sizes = [(LEASED, _memory(gpu, "leased")), (FOREIGN, _memory(gpu, "foreign")), (free, _free(gpu))]
    total, filled, text = max(1, int(gpu["total_mb"])), 0, ""
    so_far = 0
    for part, size in sizes:
        so_far += size
        # What there is shows, be it ever so little.
        end = min(width, max(round(width * so_far / total), filled + bool(size)))
        text += _marks(part, end - filled)
        filled = end
    return text + _marks(KEPT, width - filled)


def legend(width: int) -> str:
    text, left = " ", width - 1
    for part in (LEASED, FOREIGN, FREE, KEPT, CLOSED):
        left -= len(part.name) + 4
        text += f" {_marks(part, 1)} {part.name} " if left >= 0 else ""
    return text.rstrip()


def _marks(part: Part, count: int) -> str:
    return painted((part.mark if _has_blocks() else part.plain) * count, fg=part.colour) if count > 0 else ""


def _has_blocks() -> bool:
    try:
        "█▓░╱·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
