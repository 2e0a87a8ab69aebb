"""A picture of the comparison: grouped bars of loads and of waits per case, as SVG, on a logarithmic scale."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log10
from typing import Protocol
from xml.sax.saxutils import escape

COLOURS = {"FIFO": "#9aa5b1", "LRU": "#d9a441", "ours": "#1f77b4"}
PANEL_PX, ROW_PX, BAR_PX, LEFT_PX, TOP_PX, GAP_PX = 330, 74, 16, 230, 70, 70


class Compared(Protocol):
    @property
    def policy(self) -> str: ...
    @property
    def loads(self) -> int: ...
    @property
    def p99_s(self) -> float: ...


def draw(cases: Mapping[str, Sequence[Compared]]) -> str:
    width, height = LEFT_PX + 2 * (PANEL_PX + GAP_PX), TOP_PX + ROW_PX * len(cases) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
        *_panel(
            "models loaded", {title: [(row.policy, row.loads) for row in rows] for title, rows in cases.items()}, 0
        ),
        *_panel("p99 wait, s", {title: [(row.policy, row.p99_s) for row in rows] for title, rows in cases.items()}, 1),
        *(_text(10, _row_y(number) + 28, title) for number, title in enumerate(cases)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend() -> Iterator[str]:
    for number, (policy, colour) in enumerate(COLOURS.items()):
        yield f'<rect x="{10 + 70 * number}" y="14" width="12" height="12" fill="{colour}"/>'
        yield _text(26 + 70 * number, 25, policy)


def _panel(name: str, cases: Mapping[str, Sequence[tuple[str, float]]], place: int) -> Iterator[str]:
    left = LEFT_PX + place * (PANEL_PX + GAP_PX)
    decades = ceil(log10(max(value for bars in cases.values() for _, value in bars)))
    yield _text(left, 25, f"{name} (logarithmic)", weight="bold")
    for decade in range(decades + 1):
        x = left + PANEL_PX * decade / decades
        yield f'<line x1="{x}" y1="{TOP_PX - 8}" x2="{x}" y2="{_row_y(len(cases)) - 8}" stroke="#ddd"/>'
        yield _text(x, TOP_PX - 14, f"{10**decade:,}", anchor="middle")
    for number, bars in enumerate(cases.values()):
        for line, (policy, value) in enumerate(bars):
            yield from _bar(left, _row_y(number) + line * (BAR_PX + 2), PANEL_PX / decades, value, COLOURS[policy])


def _bar(left: float, top: float, decade_px: float, value: float, colour: str) -> Iterator[str]:
    width = decade_px * log10(max(value, 1))
    yield f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{BAR_PX}" fill="{colour}"/>'
    yield _text(left + width + 4, top + 12, f"{value:,.0f}")


def _row_y(number: int) -> int:
    return TOP_PX + ROW_PX * number


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="12" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )
