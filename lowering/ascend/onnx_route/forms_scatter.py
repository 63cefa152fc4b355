"""Forms of ScatterND with a reduction.

ATC has two plugins for ScatterND, and the order in which it lists a folder decides between them:
one drops the reduction. The plugin of ScatterElements passes it on, and GE's operator has add and
mul.

| operator | becomes | where |
| --- | --- | --- |
| ScatterND with add or mul | ScatterElements of the flattened axes, at the index in row-major order | depth is known |
| ScatterND and ScatterElements with max or min | refused | GE has no such reduction at indices of one axis |

A maximum over comparisons of all indices would be no equal form: with NaN the result of max and min
depends on the order of the updates.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite


def flat_indices(rewrite: Rewrite) -> None:
    """ScatterND."""
    reduction, builder = rewrite.text("reduction", "none"), rewrite.builder
    if reduction not in ("add", "mul"):
        return
    data, indices, updates = (rewrite.needed(index) for index in range(3))
    depth = rewrite.shape(indices)[-1].const
    if depth is None:
        rewrite.fail("the number of indexed axes is not known; declare the shape of its indices")
    places = builder.reshape(_row_major(rewrite, data, indices, depth), [-1])
    rest = [builder.dimension(data, axis) for axis in range(depth, len(rewrite.shape(data)))]
    rows, count = _product(rewrite, data, depth), builder.shape_of(places)
    flat = _reshaped(rewrite, data, [rows, *rest])
    parts = _reshaped(rewrite, updates, [count, *rest])
    column = _reshaped(rewrite, places, [count, *[builder.ints([1])] * len(rest)])
    column = builder.expand(column, builder.shape_of(parts))
    result = rewrite.op(
        "ScatterElements", [flat, column, parts], data, {"axis": 0, "reduction": reduction}
    )
    shape = builder.shape_of(data)
    rewrite.replace(rewrite.op("Reshape", [result, shape], data, {"allowzero": 1}))


def _row_major(rewrite: Rewrite, data: ir.Value, indices: ir.Value, depth: int) -> ir.Value:
    """The index into the flattened axes; those that count from the end are counted from the
    front."""
    builder, total = rewrite.builder, None
    for axis in range(depth):
        size = builder.dimension(data, axis)
        column = builder.gather(indices, [axis], -1)
        below = builder.less(column, builder.ints([0]))
        column = builder.where(below, builder.add(column, size), column)
        if total is not None:
            column = builder.add(builder.mul(total, size), column)
        total = column
    return builder.ints([0]) if total is None else total


def _product(rewrite: Rewrite, data: ir.Value, depth: int) -> ir.Value:
    """The number of elements of the first axes, int64 [1]."""
    builder, total = rewrite.builder, rewrite.builder.ints([1])
    for axis in range(depth):
        total = builder.mul(total, builder.dimension(data, axis))
    return total


def _reshaped(rewrite: Rewrite, value: ir.Value, sizes: list[ir.Value]) -> ir.Value:
    shape = rewrite.builder.concat(sizes, 0)
    return rewrite.op("Reshape", [value, shape], value, {"allowzero": 1})
