"""A picture of the comparison: grouped bars of loads and of waits per case, as SVG, on a logarithmic scale."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log10
from typing import Protocol
from xml.sax.saxutils import escape

TITLE = "Loads of models, and waits, when more models are asked for than there are GPUs"
COLOURS = {"FIFO": "#7b8794", "LRU": "#b7791f", "ours": "#1f77b4"}
OPTIMUM = "fewest in order of arrival (Belady)"
PANEL_PX, ROW_PX, BAR_PX, LEFT_PX, TOP_PX, GAP_PX, FOOT_PX = 330, 74, 16, 270, 80, 80, 50


class Compared(Protocol):
    @property
    def policy(self) -> str: ...
    @property
    def loads(self) -> int: ...
    @property
    def in_order(self) -> float: ...
    @property
    def p99_s(self) -> float: ...


def draw(cases: Mapping[str, Sequence[Compared]]) -> str:
    width, height = LEFT_PX + 2 * (PANEL_PX + GAP_PX), _row_y(len(cases)) + FOOT_PX
    loads = {title: [(row.policy, float(row.loads)) for row in rows] for title, rows in cases.items()}
    waits_s = {title: [(row.policy, row.p99_s) for row in rows] for title, rows in cases.items()}
    optima = [rows[0].loads / rows[0].in_order for rows in cases.values()]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 25, TITLE, size=16, weight="bold"),
        *_legend(),
        *_panel("models loaded (logarithmic)", loads, 0, optima),
        *_panel("p99 wait until a job runs, seconds (logarithmic)", waits_s, 1),
        *(_text(10, _row_y(number) + 31, title) for number, title in enumerate(cases)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw_waits(cases: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """One panel: the p99 waits of each group of jobs."""
    width, height = LEFT_PX + PANEL_PX + GAP_PX, _row_y(len(cases)) + FOOT_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(10, 25, "How long jobs wait in a lane, by order of arrival and by rank", size=16, weight="bold"),
        *_panel("p99 wait, seconds (logarithmic)", cases, 0),
        *(_text(10, _row_y(number) + 22, f"{title}") for number, title in enumerate(cases)),
        *(_text(10 + 70 * n, 50, name, colour=COLOURS[name]) for n, name in enumerate(("FIFO", "ours"))),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> Iterator[str]:
    for number, (policy, colour) in enumerate(COLOURS.items()):
        yield f'<rect x="{10 + 70 * number}" y="42" width="12" height="12" fill="{colour}"/>'
        yield _text(26 + 70 * number, 53, policy)
    x = 10 + 70 * len(COLOURS)
    yield _mark(x + 6, 40, 16)
    yield _text(x + 16, 53, OPTIMUM)


def _panel(
    name: str, cases: Mapping[str, Sequence[tuple[str, float]]], place: int, marks: Sequence[float] = ()
) -> Iterator[str]:
    left, bottom = LEFT_PX + place * (PANEL_PX + GAP_PX), _row_y(len(cases)) - 8
    decades = max(ceil(log10(max(value for bars in cases.values() for _, value in bars))), 1)
    decade_px = PANEL_PX / decades
    yield _text(left + PANEL_PX / 2, bottom + 40, name, anchor="middle", weight="bold")
    for decade in range(decades + 1):
        x = left + decade_px * decade
        yield f'<line x1="{x:.1f}" y1="{TOP_PX - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        yield _text(x, bottom + 18, f"{10**decade:,}", anchor="middle")
    for number, bars in enumerate(cases.values()):
        for line, (policy, value) in enumerate(bars):
            yield from _bar(left, _row_y(number) + line * (BAR_PX + 2), decade_px, value, COLOURS[policy])
    for number, value in enumerate(marks):
        yield _mark(left + decade_px * log10(max(value, 1)), _row_y(number) - 3, 3 * (BAR_PX + 2) + 4)


def _bar(left: float, top: float, decade_px: float, value: float, colour: str) -> Iterator[str]:
    width = decade_px * log10(max(value, 1))
    yield f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{BAR_PX}" fill="{colour}"/>'
    # Inside the bar where there is room: beside it, a mark or the next panel may be.
    inside = width > 60
    yield _text(
        left + 4 if inside else left + width + 4, top + 12, f"{value:,.0f}", colour="white" if inside else "black"
    )


def _mark(x: float, top: float, length: float) -> str:
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + length}" stroke="black" stroke-width="2"/>'


def _row_y(number: int) -> int:
    return TOP_PX + ROW_PX * number


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 12,
    colour: str = "black",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
