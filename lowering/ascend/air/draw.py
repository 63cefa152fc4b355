"""A drawing of a GE graph: a Graphviz file, or an SVG of our own.

In the SVG, an operator is one row below the lowest of its producers. A row is ordered by the mean positions of the
producers, which keeps most edges short. Constants and the names of NetOutput are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import pairwise

from fa_compiler.lowering.ascend.air.decode import CONSTANTS
from fa_compiler.lowering.ascend.air.show import tensor
from fa_compiler.lowering.ascend.graph import Graph, Model, Op
from fa_compiler.op_registry import names

_WIDTH, _HEIGHT, _GAP, _ROW = 190, 40, 20, 80
"""In pixels: the width and height of a box, the space beside it, and the distance of rows."""

_SWEEPS = 4
"""How often the rows are ordered; more rounds change little."""


def draw(model: Model, suffix: str) -> str:
    """The drawing of a model's graphs for a file of that suffix. Raises ValueError for any suffix but .dot and .svg."""
    if suffix == ".dot":
        return _dot(model)
    if suffix == ".svg":
        return _svg(model)
    raise ValueError(f"a drawing is a .svg or a .dot, not {suffix or 'a file without suffix'}")


def _drawn(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.type not in CONSTANTS]


def _label(op: Op) -> tuple[str, str]:
    shape = tensor(op.output_descs[-1]) if op.output_descs else ""
    return f"{op.type}", op.name if op.type == "Data" and not shape else f"{op.name} {shape}".strip()


def _edges(graph: Graph) -> Iterator[tuple[str, str]]:
    drawn = {op.name for op in _drawn(graph)}
    for op in _drawn(graph):
        sources = [source.op for source in op.inputs if source is not None]
        for source in dict.fromkeys([*sources, *op.controls]):
            if source in drawn:
                yield source, op.name


def _dot(model: Model) -> str:
    lines = ["digraph model {", "  node [shape=box];"]
    for number, graph in enumerate(model.graphs):
        lines += [f"  subgraph cluster_{number} {{", f"    label={json.dumps(graph.name)};"]
        for op in _drawn(graph):
            lines.append(f"    {_id(number, op.name)} [label={json.dumps(chr(10).join(_label(op)))}{_fill(op)}];")
        lines += [f"    {_id(number, source)} -> {_id(number, target)};" for source, target in _edges(graph)]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _id(number: int, name: str) -> str:
    return json.dumps(f"{number}/{name}")


def _fill(op: Op) -> str:
    return ', style=filled, fillcolor="#cfe8cf"' if op.type in names() else ""


def _svg(model: Model) -> str:
    body: list[str] = []
    top, width = 0, 0
    for graph in model.graphs:
        rows = _rows(graph)
        body.append(f'<text x="8" y="{top + 24}" font-weight="bold">{escape(graph.name)}</text>')
        places = {
            name: (column * (_WIDTH + _GAP) + _GAP, top + 40 + row * _ROW)
            for row, line in enumerate(rows)
            for column, name in enumerate(line)
        }
        for source, target in _edges(graph):
            (x1, y1), (x2, y2) = places[source], places[target]
            ends = f'x1="{x1 + _WIDTH // 2}" y1="{y1 + _HEIGHT}" x2="{x2 + _WIDTH // 2}" y2="{y2}"'
            body.append(f'<line {ends} stroke="#888" marker-end="url(#tip)"/>')
        for op in _drawn(graph):
            body += _box(op, *places[op.name])
        top += 60 + len(rows) * _ROW
        width = max(width, max(map(len, rows), default=0) * (_WIDTH + _GAP) + _GAP)
    tip = (
        '<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6z"/></marker>'
    )
    size = f'width="{width}" height="{top}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<defs>{tip}</defs>", *body, "</svg>", ""])


def _box(op: Op, x: int, y: int) -> Iterator[str]:
    title, below = _label(op)
    fill = "#cfe8cf" if op.type in names() else "#eee"
    yield f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{fill}" stroke="#444">'
    yield f"<title>{escape(below)}</title></rect>"
    yield f'<text x="{x + 6}" y="{y + 16}" font-weight="bold">{escape(title)}</text>'
    shown = below if len(below) <= 32 else f"{below[:29]}..."
    yield f'<text x="{x + 6}" y="{y + 32}">{escape(shown)}</text>'


def _rows(graph: Graph) -> list[list[str]]:
    """The operators by row, each row in order. The edges of a loop, which no valid file has, are ignored."""
    import networkx as nx  # the import takes a tenth of a second; other commands do not need it

    below = nx.DiGraph()
    below.add_nodes_from(op.name for op in _drawn(graph))
    below.add_edges_from(_edges(graph))
    while not nx.is_directed_acyclic_graph(below):
        below.remove_edge(*nx.find_cycle(below)[-1])
    rows: list[list[str]] = [list(row) for row in nx.topological_generations(below)]
    for _ in range(_SWEEPS):
        for above, line in pairwise(rows):
            column = {name: number for number, name in enumerate(above)}
            line.sort(key=lambda name: _middle([column[other] for other in below.pred[name] if other in column]))
    return rows


def _middle(columns: list[int]) -> float:
    return sum(columns) / len(columns) if columns else 0.0
