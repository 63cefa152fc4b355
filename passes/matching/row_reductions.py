"""One number for each row, computed from the row: its maximum, its sum, the logarithm of its sum of
exponentials.

    row_max = x.amax(-1, keepdim=True)
    total = e.float().sum(-1, keepdim=True).to(e.dtype)

Grammar; the axes are those of the source x:

    per_row :=                                             as large as x, but for the axes of size 1
      1     row
      2   | Expand(row)                                    as large as x; also with Identity behind
                                                           it
    row :=
      3     reduction(x, axes)                             keeps the axes, with size 1, or drops
                                                           them
      4   | Identity(row) | reshaped(row) | Expand(row)    reshaped: the RESHAPES of movers.py;
                                                           Expand to the same size
      5   | Max(row, -inf)                                 jax writes it there
      6   | Cast(row), row of Cast(x)                      a sum of 16 bits in a wider type, as jax
                                                           writes it

Elements keep their order through all of these, so that a row of another rank may be put in place
later (4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import is_op, nodes_of_type, operand_at, places_of
from fa_compiler.passes.layout.views import WIDENING
from fa_compiler.passes.ops.movers import RESHAPES
from fa_compiler.passes.values.patterns import Bind, Number, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

X = Bind("x")
SHIFTED = Op("Sub", X, Bind("row_max"))
ABOVE_NOTHING = Op("Max", X, Number(-math.inf))  # 5
SUMS = ("ReduceSum", "ReduceL1")
"""Equal for exponentials, none of which is negative."""


Reduction = tuple[tuple[int, ...], tuple[ir.Node, ...]]
"""The axes that are reduced, and the nodes that do so, in order."""


def shifted_by(
    value: ir.Value,
    reduction: str,
    info: ShapeInfo,
    clamped_max: tuple[ir.Value, ir.Node] | None = None,
) -> tuple[tuple[int, ...], ir.Value, tuple[ir.Node, ...]] | None:
    """For `x - reduction(x, axes)`: the axes, x and the nodes. With `clamped_max`, a maximum and
    the node that bounds it, `x - bound(maximum)` is read in the same way (sink_totals.py)."""
    difference = match(SHIFTED, value, info)
    if difference is None:
        return None
    row_max, *holding = clamped_max or (difference["row_max"],)
    per_row = reduced(row_max, (reduction,), difference["x"], info)
    if per_row is None:
        return None
    axes, nodes = per_row
    return axes, difference["x"], (*nodes, *holding, *difference.nodes)


def reduced(
    value: ir.Value, reductions: Sequence[str], source: ir.Value, info: ShapeInfo
) -> Reduction | None:
    """The axes of `source` over which `value` is a per_row reduction, and the nodes."""
    row, repeating = unrepeated(value)  # 1 and 2
    start, moving = row_source(row, info)
    reduction = reduction_of(start, reductions, source, info)
    if reduction is None or not is_per_row(value, reduction[0], source, info):
        return None
    return reduction[0], (*reduction[1], *moving, *repeating)


def unrepeated(value: ir.Value) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Case 2: the row that a per_row repeats, and the nodes that do so; the value itself and ()
    where none does."""
    nodes: list[ir.Node] = []
    current = value
    while is_op(node := current.producer(), "Identity"):
        nodes.insert(0, node)
        current = operand_at(node, 0)
    if not is_op(node, "Expand"):
        return value, ()
    return operand_at(node, 0), (node, *nodes)


def row_source(row: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Cases 4 and 5: what a row's layout starts from, and the nodes of the layout."""
    nodes: list[ir.Node] = []
    while (node := row.producer()) is not None and (inner := _laid_out(node, info)) is not None:
        nodes.insert(0, node)
        row = inner
    return row, tuple(nodes)


def _laid_out(node: ir.Node, info: ShapeInfo) -> ir.Value | None:
    """Cases 4 and 5: the row that a node lays out in another way; None for other nodes."""
    source, result = operand_at(node, 0), node.outputs[0]
    if is_op(node, "Max"):
        above = match(ABOVE_NOTHING, result, info)
        return None if above is None else above["x"]
    same_size = is_op(node, "Expand") and info.shape(source) == info.shape(result) is not None
    return source if same_size or is_op(node, "Identity", *RESHAPES) else None


def reduction_of(
    value: ir.Value, reductions: Sequence[str], source: ir.Value, info: ShapeInfo
) -> Reduction | None:
    """Cases 3 and 6: the axes of `source` over which `value` reduces it, and the nodes; at least
    one axis."""
    last = value.producer()
    if is_op(last, "Cast") and info.dtype(value) == info.dtype(source) is not None:
        nodes = _widened_sum(last, source, info)
    else:
        nodes = (last,) if last is not None and operand_at(last, 0) is source else ()
    shape = info.shape(source)
    reduction = next(nodes_of_type(nodes, *reductions), None)
    if reduction is None or shape is None:
        return None
    axes = tuple(sorted(set(places_of(reduction, len(shape)) or ())))
    return (axes, nodes) if axes else None


def _widened_sum(last: ir.Node, source: ir.Value, info: ShapeInfo) -> tuple[ir.Node, ...]:
    """Case 6: the nodes that sum up a tensor in a wider type, where this Cast is the last of them;
    else ()."""
    row, layout = row_source(operand_at(last, 0), info)
    total, widening = row.producer(), cast_reduced_by(row)
    if total is None or widening is None or widening.inputs[0] is not source:
        return ()
    types = info.dtype(source), info.dtype(widening.outputs[0])
    return (widening, total, *layout, last) if types in WIDENING else ()


def cast_reduced_by(total: ir.Value) -> ir.Node | None:
    """The Cast of what a sum adds up; None where there is none."""
    node = total.producer()
    if not is_op(node, *SUMS):
        return None
    widening = operand_at(node, 0).producer()
    return widening if is_op(widening, "Cast") else None


def is_per_row(value: ir.Value, axes: Sequence[int], source: ir.Value, info: ShapeInfo) -> bool:
    """Has a value the shape of a per_row for these axes of `source`?"""
    shape, own = info.shape(source), info.shape(value)
    row, repeating = unrepeated(value)
    if shape is None:
        return False
    kept = list(shape)
    for place in axes:
        kept[place] = Dim(1)
    return info.shape(row) == tuple(kept) and (not repeating or own in (tuple(kept), shape))
