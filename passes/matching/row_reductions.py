"""One number for each row, computed from the row: its maximum, its sum, the logarithm of its sum of exponentials.

Grammar; the axes are those of the source x:

    per_row :=                                             as large as x, but for the axes of size 1
      1     row
      2   | Expand(row)                                    as large as x; also with Identity behind it
    row :=
      3     reduction(x, axes)                             keeps the axes, with size 1, or drops them
      4   | Identity(row) | reshaped(row) | Expand(row)    reshaped: the RESHAPES of movers.py; Expand to the same size
      5   | Max(row, -inf)                                 jax writes it there
      6   | Cast(row), row of Cast(x)                      a sum of 16 bits in a wider type, as jax writes it

Elements keep their order through all of these, so that a row of another rank may be put in place later (4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import is_op, places_of
from fa_compiler.passes.layout.views import WIDENING
from fa_compiler.passes.ops.movers import RESHAPES
from fa_compiler.passes.values.patterns import Bind, Number, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

X = Bind("x")
SHIFTED = Op("Sub", X, Bind("row_max"))
ABOVE_NOTHING = Op("Max", X, Number(-math.inf))  # 5
SUMS = ("ReduceSum", "ReduceL1")
"""Equal for exponentials, none of which is negative."""


def shifted_by(
    value: ir.Value, reduction: str, info: ShapeInfo, clamped_max: tuple[ir.Value, ir.Node] | None = None
) -> tuple[tuple[int, ...], ir.Value, tuple[ir.Node, ...]] | None:
    """For `x - reduction(x, axes)`: the axes, x and the nodes. With `clamped_max`, a maximum and the node that bounds
    it, `x - bound(maximum)` is read in the same way (sink_totals.py)."""
    found = match(SHIFTED, value, info)
    if found is None:
        return None
    row_max, holding = (found["row_max"], ()) if clamped_max is None else (clamped_max[0], clamped_max[1:])
    per_row = reduced(row_max, (reduction,), found["x"], info)
    return None if per_row is None else (per_row[0], found["x"], (*per_row[1], *holding, *found.nodes))


def reduced(
    value: ir.Value, reductions: Sequence[str], source: ir.Value, info: ShapeInfo
) -> tuple[tuple[int, ...], tuple[ir.Node, ...]] | None:
    """The axes of `source` over which `value` is a per_row reduction, and the nodes."""
    row, repeating = unrepeated(value)  # 1 and 2
    start, moving = row_source(row, info)
    found = reduction_of(start, reductions, source, info)
    if found is None or not is_per_row(value, found[0], source, info):
        return None
    return found[0], (*found[1], *moving, *repeating)


def unrepeated(value: ir.Value) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Case 2: the row that a per_row repeats, and the nodes that do so; the value itself and () where none does."""
    nodes: list[ir.Node] = []
    current = value
    while is_op(node := current.producer(), "Identity") and node.inputs[0] is not None:
        nodes.insert(0, node)
        current = node.inputs[0]
    if not is_op(node, "Expand") or node.inputs[0] is None:
        return value, ()
    return node.inputs[0], (node, *nodes)


def row_source(row: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Cases 4 and 5: what a row's layout starts from, and the nodes of the layout."""
    nodes: list[ir.Node] = []
    while is_op(node := row.producer(), "Identity", *RESHAPES, "Max", "Expand"):
        found = match(ABOVE_NOTHING, row, info) if node.op_type == "Max" else None
        inner = node.inputs[0] if node.op_type != "Max" else None if found is None else found["x"]
        if inner is None or (node.op_type == "Expand" and not info.shape(inner) == info.shape(row) is not None):
            break
        nodes.insert(0, node)
        row = inner
    return row, tuple(nodes)


def reduction_of(
    value: ir.Value, reductions: Sequence[str], source: ir.Value, info: ShapeInfo
) -> tuple[tuple[int, ...], tuple[ir.Node, ...]] | None:
    """Cases 3 and 6: the axes of `source` over which `value` reduces it, and the nodes; at least one axis."""
    node, shape = value.producer(), info.shape(source)
    nodes: tuple[ir.Node, ...] = ()
    if is_op(node, "Cast") and info.dtype(value) == info.dtype(source) is not None:
        if node.inputs[0] is None:
            return None
        inner, layout = row_source(node.inputs[0], info)
        widening = cast_reduced_by(inner)
        if widening is None or (info.dtype(source), info.dtype(widening.outputs[0])) not in WIDENING:
            return None
        reduction = inner.producer()
        assert reduction is not None
        nodes, node, start = (widening, reduction, *layout, node), reduction, widening.inputs[0]
    else:
        start = None if node is None or not node.inputs else node.inputs[0]
    if not is_op(node, *reductions) or start is not source or shape is None:
        return None
    axes = tuple(sorted(set(places_of(node, len(shape)) or ())))
    return (axes, nodes or (node,)) if axes else None


def cast_reduced_by(total: ir.Value) -> ir.Node | None:
    """The Cast of what a sum adds up; None where there is none."""
    node = total.producer()
    summed = node.inputs[0] if is_op(node, *SUMS) else None
    widening = None if summed is None else summed.producer()
    return widening if is_op(widening, "Cast") else None


def is_per_row(value: ir.Value, axes: Sequence[int], source: ir.Value, info: ShapeInfo) -> bool:
    """Has a value the shape of a per_row for these axes of `source`?"""
    shape, own = info.shape(source), info.shape(value)
    row, repeating = unrepeated(value)
    if shape is None or own is None:
        return False
    kept = tuple(Dim(1) if place in axes else size for place, size in enumerate(shape))
    return info.shape(row) == kept and (not repeating or own in (kept, shape))
