"""Drawings of dataflow graphs as SVG: boxes in rows, every arrow points down.

A box stands one row below the lowest box that it reads, and sources stand right above the first box
that reads them, or a little higher where their row would be wide. A row is ordered by the mean
position of its neighbours, which keeps most arrows short. All text stands inside of boxes, where no
arrow crosses it. The classes of boxes and arrows are names of `STYLE`, which a page may replace by
its own.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

WIDTH, GAP, BETWEEN = 184, 18, 36
"""In pixels: the width of a box, the space beside it, and the space between rows."""

TITLE, LINE, MARGIN = 16, 14, 11
"""In pixels: the height of a box's title, of each line below it, and of the space above and below
them together."""

SWEEPS = 3
"""How often the rows are ordered, downwards and upwards; more rounds change little."""

LONGEST = 24
"""Arrows over more rows than this are drawn straight: a value that every layer reads would make a
gap in every row."""

NARROW, HIGHEST = 2, 2
"""A row of more boxes than NARROW gives sources to the row above it, if that one has fewer; by
HIGHEST rows at most."""

LETTERS = 24
"""What fits into the title of a box: letters as broad as "n"."""

SMALL_LETTERS = 28
"""What fits into a line below it."""

NAME_LEFT, NAME_LETTER = 8, 8
"""In pixels: where the name of a drawing begins, and how broad an "n" of it is."""

BREADTHS = {**dict.fromkeys(" ,.:;'|()[]!/-ijlIfrt", 0.65), **dict.fromkeys("mwMW@%", 1.6)}
"""How broad letters are beside "n", about. Other capitals have CAPITAL, and those that terminals
draw over two columns have FULL."""
CAPITAL, FULL = 1.2, 1.75

STYLE = """
svg { font: 11px system-ui, sans-serif; overflow: visible }
.box rect { fill: #eee; stroke: #555 }
.box.fused rect { fill: #cfe8cf }
.box.culprit rect { stroke: #c00; stroke-width: 3 }
.arrow { stroke: #888; fill: none }
.role-query rect, .arrow.role-query { stroke: #2f6fde }
.role-key rect, .arrow.role-key { stroke: #c2410c }
.role-value rect, .arrow.role-value { stroke: #15803d }
.role-mask rect, .arrow.role-mask { stroke: #7e22ce }
.role-bias rect, .arrow.role-bias { stroke: #a16207 }
.below { font-size: 10px; fill: #555 }
.title { font-weight: bold }
"""


@dataclass(frozen=True)
class Box:
    """One operator or value. `key` is unique in the drawing, `lines` stand below the title, `hint`
    is shown when the pointer rests on the box, and `kind` holds the classes."""

    key: str
    title: str
    lines: tuple[str, ...] = ()
    hint: str = ""
    kind: str = ""

    @property
    def height(self) -> int:
        """In pixels."""
        return TITLE + LINE * len(self.lines) + MARGIN


@dataclass(frozen=True)
class Arrow:
    """What flows from one box to another."""

    source: str
    target: str
    kind: str = ""


@dataclass(frozen=True)
class Spot:
    """Where a box, or the gap through which an arrow passes, lies: its left upper corner, and its
    lower end."""

    left: float
    top: float
    bottom: float


def sheet(drawings: Sequence[tuple[str, Sequence[Box], Sequence[Arrow]]]) -> str:
    """Several drawings in a column, with their names above them."""
    top, drawn = 0.0, []
    for name, boxes, arrows in drawings:
        size, text = _drawn(boxes, arrows, name, "", f' y="{top + 32:g}"')
        drawn.append((name, top, size[0], text))
        top += size[1] + 40
    width = max((wide for _, _, wide, _ in drawn), default=0.0)
    body: list[str] = []
    for name, place, _, text in drawn:
        shown = escape(shortened(name, int((width - 2 * NAME_LEFT) / NAME_LETTER)))
        body += [f'<text class="title" x="{NAME_LEFT}" y="{place + 22:g}">{shown}</text>', text]
    extent = f'viewBox="0 0 {width:g} {top:g}" width="{width:g}" height="{top:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {extent}>'
    # text is black, also where a page is dark
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *body, "</svg>", ""])


def svg(boxes: Sequence[Box], arrows: Sequence[Arrow], name: str, style: str = STYLE) -> str:
    """One drawing. `name` is what it is called for people who cannot see it."""
    return _drawn(boxes, arrows, name, style, "")[1]


def _drawn(
    boxes: Sequence[Box], arrows: Sequence[Arrow], name: str, style: str, place: str
) -> tuple[tuple[float, float], str]:
    """The size of a drawing, and the drawing. `place` holds more attributes of it."""
    rows = layers([box.key for box in boxes], [(arrow.source, arrow.target) for arrow in arrows])
    width = max((_width(row) for row in rows), default=0.0) + 2 * GAP
    heights = {box.key: box.height for box in boxes}
    spots = dict(_spots(rows, width, heights))
    height = max((spot.bottom for spot in spots.values()), default=0.0) + GAP
    gaps: dict[tuple[str, str], list[Spot]] = {}
    for key, spot in spots.items():
        if not isinstance(key, str):
            gaps.setdefault(key[:2], []).append(spot)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(name)}"{place}>',
        *([f"<style>{style}</style>"] if style else []),
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto" '
        'markerUnits="userSpaceOnUse"><path class="tip" d="M0,0 L7,3 L0,6z"/></marker></defs>',
        *(_arrow(arrow, spots, gaps.get((arrow.source, arrow.target), ())) for arrow in arrows),
        *(line for box in boxes for line in _box(box, spots[box.key])),
        "</svg>",
    ]
    return (width, height), "\n".join(lines)


Place = str | tuple[str, str, int]
"""What stands in a row: the key of a box, or the gap through which an arrow passes, with the ends
of the arrow and the row."""


def layers(keys: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[list[Place]]:
    """The rows from top to bottom, each in order, with gaps for the arrows that pass through them.
    The edges of a loop, which no valid graph has, are ignored."""
    # the import takes a tenth of a second; who draws nothing does not need it
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(keys)
    graph.add_edges_from(edges)
    while not nx.is_directed_acyclic_graph(graph):
        graph.remove_edge(*nx.find_cycle(graph)[-1])
    row = {
        key: number for number, row in enumerate(nx.topological_generations(graph)) for key in row
    }
    _place_sources(
        {key: graph.succ[key] for key in keys if not graph.pred[key] and graph.succ[key]}, row
    )
    rows: list[list[Place]] = [[] for _ in range(max(row.values(), default=-1) + 1)]
    for key in keys:
        rows[row[key]].append(key)
    linked = nx.DiGraph()
    for source, target in graph.edges:
        gaps = _gaps(source, target, row)
        for gap in gaps:
            rows[gap[2]].append(gap)
        if gaps or row[target] - row[source] == 1:  # an arrow that is drawn straight orders nothing
            nx.add_path(linked, [source, *gaps, target])
    for _ in range(SWEEPS):
        _sort(rows, linked.pred)
        _sort(rows[::-1], linked.succ)
    return rows


def _place_sources(sources: Mapping[str, Iterable[str]], row: dict[str, int]) -> None:
    """Place sources above the first of their readers, and those of wide rows higher. Where they
    need rows above the first one, all others go down."""
    for key, readers in sources.items():
        row[key] = min(row[reader] for reader in readers) - 1
    count, first = Counter(row.values()), dict(row)
    for number in range(max(row.values(), default=-1), -HIGHEST, -1):
        movable = [key for key in sources if row[key] == number and first[key] - number < HIGHEST]
        while movable and NARROW < count[number] > count[number - 1]:
            row[movable.pop()] = number - 1
            count[number] -= 1
            count[number - 1] += 1
    top = min(row.values(), default=0)
    for key in row:
        row[key] -= top


def _gaps(source: str, target: str, row: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """The gaps of an arrow in the rows between its ends. A very long arrow has none."""
    between = range(row[source] + 1, row[target])
    return [(source, target, number) for number in between] if len(between) < LONGEST else []


def _sort(rows: Sequence[list[Place]], neighbours: Mapping[Place, Iterable[Place]]) -> None:
    """Sort each row but the first by the middle of its neighbours in the row before. Whoever has
    none keeps its place."""
    for before, line in pairwise(rows):
        column, own = _columns(before), _columns(line)
        middle = {
            place: _mean([column[end] for end in neighbours.get(place, ())], own[place])
            for place in line
        }
        line.sort(key=middle.__getitem__)


def _columns(line: Sequence[Place]) -> dict[Place, float]:
    """Where the places of a row lie, from 0 to 1."""
    return {place: (number + 0.5) / len(line) for number, place in enumerate(line)}


def _mean(numbers: Sequence[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default


def _width(row: Sequence[Place]) -> float:
    return sum(_wide(place) for place in row) + GAP * (len(row) - 1)


def _wide(place: Place) -> float:
    return WIDTH if isinstance(place, str) else 0


def _spots(
    rows: Sequence[Sequence[Place]], width: float, heights: Mapping[str, int]
) -> Iterator[tuple[Place, Spot]]:
    """The spots of the rows' places. The boxes of a row have a common upper end, and a gap is as
    high as the row."""
    top = float(GAP)
    for row in rows:
        left = (width - _width(row)) / 2
        lowest = top + max(heights[place] for place in row if isinstance(place, str))
        for place in row:
            yield place, Spot(left, top, top + heights[place] if isinstance(place, str) else lowest)
            left += _wide(place) + GAP
        top = lowest + BETWEEN


def _arrow(arrow: Arrow, spots: Mapping[Place, Spot], gaps: Iterable[Spot]) -> str:
    source, target = spots[arrow.source], spots[arrow.target]
    x, y = source.left + WIDTH / 2, source.bottom
    path = f"M{x:g},{y:g}"
    for gap in gaps:
        path += f"{_curve(x, y, gap.left, gap.top)} V{gap.bottom:g}"
        x, y = gap.left, gap.bottom
    path += _curve(x, y, target.left + WIDTH / 2, target.top)
    return f'<path class="arrow {escape(arrow.kind)}" d="{path}" marker-end="url(#tip)"/>'


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    return f" C{x1:g},{middle:g} {x2:g},{middle:g} {x2:g},{y2:g}"


def _box(box: Box, spot: Spot) -> Iterator[str]:
    yield f'<g class="box {escape(box.kind)}"><title>{escape(box.hint or box.title)}</title>'
    yield f'<rect x="{spot.left:g}" y="{spot.top:g}" width="{WIDTH}" height="{box.height}" rx="5"/>'
    middle, base = spot.left + WIDTH / 2, spot.top + TITLE + 1
    yield _text("title", middle, base, shortened(box.title))
    for number, line in enumerate(box.lines, 1):
        yield _text("below", middle, base + number * LINE, shortened(line, SMALL_LETTERS))
    yield "</g>"


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'


def shortened(text: str, letters: int = LETTERS) -> str:
    """The text, its middle left out if it is broader than so many letters: names of nodes differ at
    their ends."""
    if sum(map(_breadth, text)) <= letters:
        return text
    front = _fitting(text, (letters - 1) // 3)
    end = _fitting(text[::-1], letters - 1 - sum(map(_breadth, front)))
    return f"{front}…{end[::-1]}"


def _fitting(text: str, room: float) -> str:
    """As much of the beginning of a text as has room."""
    breadths = accumulate(map(_breadth, text))
    return text[: sum(1 for breadth in breadths if breadth <= room)]


def _breadth(letter: str) -> float:
    """How broad a letter is, beside "n"."""
    if unicodedata.east_asian_width(letter) in "WF":
        return FULL
    return BREADTHS.get(letter, CAPITAL if letter.isupper() else 1)
