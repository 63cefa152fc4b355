"""Small plots with axes as SVG, for pages with a white or a dark background and for the width of a phone.

A picture is a light card with dark words, so it can be read on any background. At its own size it is 420 pixels wide,
and its letters are as large as those of a page on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 420, 250
"""The size of one pair of axes with its words, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 40
"""The margins around the axes."""
ROW, NARROW = 17, 22
"""The height of a row of the legend, and the most letters of a name in one of two columns."""
COLOURS = ("#0b6e4f", "#1d4ed8", "#b45309", "#7e22ce", "#be123c", "#0e7490", "#4d7c0f", "#52525b", "#a16207")
"""Dark enough to be read on the card as lines and as words."""
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:13px}.grid{stroke:#e2e2e2}"
    ".line{fill:none;stroke-width:2}.note{fill:#555}"
)


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` with its name and unit. `ticks` are the numbers at it, `words` what stands there."""

    name: str
    low: float
    high: float
    ticks: Sequence[float]
    words: Sequence[str]
    log: bool = True

    def share(self, value: float) -> float:
        """The place of a value, from 0 to 1. What is outside stands at the edge."""
        change: Callable[[float], float] = math.log if self.log else float
        low, high = change(self.low), change(self.high)
        return min(1.0, max(0.0, (change(max(value, self.low)) - low) / (high - low)))


@dataclass
class Chart:
    """A pair of axes with lines and points."""

    title: str
    x: Axis
    y: Axis
    parts: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], colour: str, name: str = "", dashes: str = "") -> None:
        """A line through points; with a name it is in the legend."""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (self._place(*point) for point in points))
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<path class="line" d="{path}" stroke="{colour}"{dash}/>')
        self._named(name, colour)

    def point(self, x: float, y: float, colour: str, note: str, name: str = "", hollow: bool = False) -> None:
        """A point with a note that a browser shows under the pointer."""
        left, top = self._place(x, y)
        fill = "#fff" if hollow else colour
        self.parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.5" fill="{fill}" stroke="{colour}" '
                          f'stroke-width="1.5"><title>{escape(note)}</title></circle>')  # fmt: skip
        self._named(name, colour)

    def word(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Words above a place of the chart."""
        left, top = self._place(x, y)
        self.parts.append(f'<text class="note" x="{left:.1f}" y="{top - 4:.1f}" '
                          f'text-anchor="{anchor}">{escape(text)}</text>')  # fmt: skip

    def body(self) -> tuple[list[str], int]:
        """The elements of the chart, and its height with its legend."""
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        made = [f'<text class="title" x="8" y="18">{escape(self.title)}</text>']
        for tick, text in zip(self.x.ticks, self.x.words, strict=True):
            left = LEFT + self.x.share(tick) * (right - LEFT)
            made.append(f'<path class="grid" d="M{left:.1f} {TOP}V{bottom}"/>')
            made.append(f'<text x="{left:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(text)}</text>')
        for tick, text in zip(self.y.ticks, self.y.words, strict=True):
            top = bottom - self.y.share(tick) * (bottom - TOP)
            made.append(f'<path class="grid" d="M{LEFT} {top:.1f}H{right}"/>')
            made.append(f'<text x="{LEFT - 5}" y="{top + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        made.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#555"/>')
        made.append(
            f'<text x="{(LEFT + right) / 2}" y="{bottom + 32}" text-anchor="middle">{escape(self.x.name)}</text>'
        )
        made.append(f'<text transform="translate(12 {(TOP + bottom) / 2}) rotate(-90)" '
                    f'text-anchor="middle">{escape(self.y.name)}</text>')  # fmt: skip
        return [*made, *self.parts, *self._legend()], HEIGHT + ROW * -(-len(self.legend) // self._columns) + 6

    def _place(self, x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP
        return LEFT + self.x.share(x) * wide, HEIGHT - BOTTOM - self.y.share(y) * high

    def _named(self, name: str, colour: str) -> None:
        if name and (name, colour) not in self.legend:
            self.legend.append((name, colour))

    @property
    def _columns(self) -> int:
        """Those of the legend."""
        return 2 if all(len(name) <= NARROW for name, _ in self.legend) else 1

    def _legend(self) -> list[str]:
        made = []
        for index, (name, colour) in enumerate(self.legend):
            row, column = divmod(index, self._columns)
            x, y = LEFT + column * (WIDTH - LEFT) // 2, HEIGHT + 10 + ROW * row
            made.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{colour}"/>')
            made.append(f'<text x="{x + 15}" y="{y}">{escape(name)}</text>')
        return made


def picture(charts: Sequence[Chart]) -> str:
    """The charts under each other on one card."""
    made, top = [], 0
    for chart in charts:
        body, height = chart.body()
        made.append(f'<g transform="translate(0 {top})">' + "".join(body) + "</g>")
        top += height
    name = escape("; ".join(chart.title for chart in charts), {'"': "&quot;"})
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
            f'role="img" aria-label="{name}">'
            f'<style>{STYLE}</style><rect width="{WIDTH}" height="{top}" rx="8" fill="#fdfdfd"/>'
            + "\n".join(made) + "</svg>\n")  # fmt: skip
