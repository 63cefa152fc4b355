"""A drawing of a GE graph: a Graphviz file, or an SVG (lowering/drawing.py). Constants are left
out."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fa_compiler.lowering.ascend.air.decode import CONSTANTS
from fa_compiler.lowering.ascend.air.show import tensor
from fa_compiler.lowering.ascend.graph import Graph, Model, Op
from fa_compiler.lowering.drawing import Arrow, Box, sheet
from fa_compiler.op_registry import names


def draw(model: Model, suffix: str) -> str:
    """The drawing of a model's graphs for a file of that suffix. Raises ValueError for any suffix
    but .dot and .svg."""
    if suffix == ".dot":
        return _dot(model)
    if suffix == ".svg":
        return _svg(model)
    raise ValueError(f"a drawing is a .svg or a .dot, not {suffix or 'a file without suffix'}")


def _drawn(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.type not in CONSTANTS]


def _label(op: Op) -> tuple[str, str]:
    shape = tensor(op.output_descs[-1]) if op.output_descs else ""
    return (
        f"{op.type}",
        op.name if op.type == "Data" and not shape else f"{op.name} {shape}".strip(),
    )


def _edges(graph: Graph) -> Iterator[tuple[str, str]]:
    drawn = {op.name for op in _drawn(graph)}
    for op in _drawn(graph):
        for source in dict.fromkeys(op.sources):
            if source in drawn:
                yield source, op.name


def _dot(model: Model) -> str:
    lines = ["digraph model {", "  node [shape=box];"]
    for number, graph in enumerate(model.graphs):
        lines += [f"  subgraph cluster_{number} {{", f"    label={json.dumps(graph.name)};"]
        for op in _drawn(graph):
            lines.append(
                f"    {_id(number, op.name)} [label={json.dumps(chr(10).join(_label(op)))}{_fill(op)}];"
            )
        lines += [
            f"    {_id(number, source)} -> {_id(number, target)};"
            for source, target in _edges(graph)
        ]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _id(number: int, name: str) -> str:
    return json.dumps(f"{number}/{name}")


def _fill(op: Op) -> str:
    return ', style=filled, fillcolor="#cfe8cf"' if op.type in names() else ""


def _svg(model: Model) -> str:
    drawings = []
    for graph in model.graphs:
        boxes = [
            Box(op.name, op.type, tuple(_lines(op)), _label(op)[1], _kind(op))
            for op in _drawn(graph)
        ]
        drawings.append(
            (graph.name, boxes, [Arrow(source, target) for source, target in _edges(graph)])
        )
    return sheet(drawings)


def _lines(op: Op) -> Iterator[str]:
    """The name and the type of the last output."""
    yield op.name
    if op.output_descs and (shape := tensor(op.output_descs[-1])):
        yield shape


def _kind(op: Op) -> str:
    return "fused" if op.type in names() else ""
