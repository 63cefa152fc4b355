"""Plots as SVG, drawn by matplotlib, for pages with a white or a dark background and for the width of a phone.

A picture is a light card with dark words, so it can be read on any background. At its own size a pair of axes is 420
pixels wide, and its letters are as large as those of a page on a phone. matplotlib is in the `bench` extra; `required`
says so before anything is measured.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 420, 250
"""The size of one pair of axes with its words, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 40
"""The margins around the axes."""
ROW, NARROW = 17, 22
"""The height of a row of the legend, and the most letters of a name in one of two columns."""
COLOURS = ("#0b6e4f", "#1d4ed8", "#b45309", "#7e22ce", "#be123c", "#0e7490", "#4d7c0f", "#52525b", "#a16207")
"""Dark enough to be read on the card as lines and as words."""
CARD, GRID, NOTE = "#fdfdfd", "#e2e2e2", "#555555"
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fa_compiler",  # the same drawing gives the same file
    "font.size": 12,
    "axes.labelsize": 12,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.edgecolor": NOTE,
    "axes.axisbelow": True,
    "xtick.color": NOTE,
    "ytick.color": NOTE,
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
_SVG = "http://www.w3.org/2000/svg"


class NoMatplotlib(Exception):
    """The package that draws is not installed."""


def required() -> None:
    """Raises NoMatplotlib, which says what to install, if nothing can be drawn."""
    if find_spec("matplotlib") is None:
        raise NoMatplotlib("the plots need matplotlib; install it, or fa_compiler with its extra: fa_compiler[bench]")


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` with its name and unit. `ticks` are the numbers at it, `words` what stands there."""

    name: str
    low: float
    high: float
    ticks: Sequence[float]
    words: Sequence[str]
    log: bool = True

    def inside(self, value: float) -> float:
        """What is outside stands at the edge."""
        return min(self.high, max(self.low, value))


@dataclass(frozen=True)
class _Line:
    points: Sequence[tuple[float, float]]
    colour: str
    dashes: Sequence[float]


@dataclass(frozen=True)
class _Point:
    place: tuple[float, float]
    colour: str
    note: str
    hollow: bool


@dataclass(frozen=True)
class _Word:
    place: tuple[float, float]
    text: str
    anchor: str


@dataclass
class Chart:
    """A pair of axes with lines and points."""

    title: str
    x: Axis
    y: Axis
    parts: list[_Line | _Point | _Word] = field(default_factory=list)
    legend: dict[tuple[str, str], None] = field(default_factory=dict)
    """The names and their colours, in order."""

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, name: str = "", dashes: Sequence[float] = ()
    ) -> None:
        """A line through points; with a name it is in the legend."""
        self.parts.append(_Line([self._inside(*point) for point in points], colour, dashes))
        self._named(name, colour)

    def point(self, x: float, y: float, colour: str, note: str, name: str = "", hollow: bool = False) -> None:
        """A point with a note that a browser shows under the pointer."""
        self.parts.append(_Point(self._inside(x, y), colour, note, hollow))
        self._named(name, colour)

    def word(self, x: float, y: float, text: str, anchor: str = "left") -> None:
        """Words above a place of the chart."""
        self.parts.append(_Word(self._inside(x, y), text, anchor))

    @property
    def columns(self) -> int:
        """Those of the legend."""
        return 2 if all(len(name) <= NARROW for name, _ in self.legend) else 1

    @property
    def height(self) -> int:
        """In pixels, with the legend."""
        return HEIGHT + ROW * -(-len(self.legend) // self.columns) + 6

    def _inside(self, x: float, y: float) -> tuple[float, float]:
        return self.x.inside(x), self.y.inside(y)

    def _named(self, name: str, colour: str) -> None:
        if name:
            self.legend.setdefault((name, colour))


class Card:
    """A picture of a size in pixels, on which axes are placed by pixels from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure((width / 72, height / 72), facecolor=CARD)  # an SVG of matplotlib has 72 units for an inch
        self._notes: dict[str, str] = {}
        self._numbers = itertools.count()

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """A pair of axes."""
        bottom = self.height - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def named(self, word: str) -> str:
        """A name for an element, which no other one has."""
        return f"{word}{next(self._numbers)}"

    def noted(self, note: str) -> str:
        """The name of an element for which a browser shows a note."""
        name = self.named("note")
        self._notes[name] = note
        return name

    def svg(self, label: str) -> str:
        """The picture; `label` says to those who do not see it what it is."""
        made = io.StringIO()
        self.figure.savefig(made, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        root = ElementTree.fromstring(made.getvalue())
        root.attrib |= {"width": f"{self.width:g}", "height": f"{self.height:g}", "role": "img", "aria-label": label}
        for element in root.iter(f"{{{_SVG}}}g"):
            if (note := self._notes.get(element.get("id", ""))) is not None:
                title = ElementTree.Element(f"{{{_SVG}}}title")
                title.text = note
                element.insert(0, title)
        return ElementTree.tostring(root, encoding="unicode") + "\n"


@contextmanager
def settings() -> Iterator[None]:
    """The style of all pictures. Raises NoMatplotlib."""
    required()
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        yield


def picture(charts: Sequence[Chart]) -> str:
    """The charts under each other on one card. Raises NoMatplotlib."""
    with settings():
        card, top = Card(WIDTH, sum(chart.height for chart in charts)), 0
        for chart in charts:
            _draw(chart, card, top)
            top += chart.height
        return card.svg("; ".join(chart.title for chart in charts))


def _draw(chart: Chart, card: Card, top: int) -> None:
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    axes = card.axes(LEFT, top + TOP, wide, high)
    card.figure.text(8 / card.width, 1 - (top + 18) / card.height, chart.title, fontsize=13, fontweight="bold")
    for axis, scale, limit, ticks, name in (
        (chart.x, axes.set_xscale, axes.set_xlim, axes.set_xticks, axes.set_xlabel),
        (chart.y, axes.set_yscale, axes.set_ylim, axes.set_yticks, axes.set_ylabel),
    ):
        scale("log" if axis.log else "linear")
        limit(axis.low, axis.high)
        ticks(list(axis.ticks), list(axis.words))
        ticks([], minor=True)
        name(axis.name)
    axes.spines[["right", "top"]].set_visible(False)
    axes.grid(color=GRID)
    axes.tick_params(length=0, pad=5)
    axes.yaxis.set_label_coords((16 - LEFT) / wide, 0.5)
    for part in chart.parts:
        _draw_part(part, axes, card)
    handles = [axes.plot([], [], "s", color=colour, label=name)[0] for name, colour in chart.legend]
    if handles:
        below = -(BOTTOM - 4) / high
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, below), ncols=chart.columns, frameon=False,
                    borderpad=0, borderaxespad=0, handlelength=1, handletextpad=0.5, labelspacing=0.3)  # fmt: skip


def _draw_part(part: _Line | _Point | _Word, axes: Axes, card: Card) -> None:
    if isinstance(part, _Line):
        style: Any = (0, tuple(part.dashes)) if part.dashes else "-"
        axes.plot(*zip(*part.points, strict=True), color=part.colour, linewidth=2, linestyle=style, clip_on=False,
                  gid=card.named("curve"))  # fmt: skip
    elif isinstance(part, _Point):
        axes.plot(*part.place, "o", markersize=7, color=part.colour, markeredgewidth=1.5, clip_on=False,
                  markerfacecolor="#ffffff" if part.hollow else part.colour, gid=card.noted(part.note))  # fmt: skip
    else:
        axes.annotate(part.text, part.place, (0, 4), textcoords="offset points", ha=part.anchor, color=NOTE)
