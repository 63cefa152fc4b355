"""Positions that are counted in floats and compared with each other: they are counted in integers.

    positions = arange(length, dtype="float32")
    mask = positions[:, None] >= positions

KerasHub writes a causal mask so. Grammar; the code cites the numbers of the cases:

    compared :=
      1     a comparison of moved(count) and moved(count), of one count, along two dimensions of the
            result
    moved(x) :=
      2     x | Unsqueeze(moved(x))
    count :=
      3     Range(0.0, Cast(n), 1.0)                 of float32, n an integer and a scalar: ONNX
                                               Runtime takes vectors of one number, too, and ONNX
                                               refuses them where n is known
    emitted
      4     the comparison of the same operators on Range(0, n, 1)

float32 holds all integers up to 2^24. A longer count would be rounded, and might have another
length. But its comparison with itself has the square of its length, 2^48 truth values, which no run
holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import is_op, operand_at, operands
from fa_compiler.passes.prepare.changes import change_found
from fa_compiler.passes.values.shapes import ShapeInfo

COMPARED = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def count_in_integers(graphs: Sequence[ir.Graph], info: ShapeInfo, names: Names) -> bool:
    """Count in integers what is counted in floats and compared with itself. Returns whether
    anything changed; then `info` does not know all of the graphs."""
    return change_found(graphs, info, names, _compared, _compare_integers)


def _compared(node: ir.Node, info: ShapeInfo) -> ir.Node | None:
    """Case 1: a node that compares positions; None for other nodes."""
    if not is_op(node, *COMPARED):
        return None
    left, right = (_source(value) for value in operands(node))
    if left is not right or not _is_count(left, info) or node.outputs[0].is_graph_output():
        return None
    length = info.sizes(left)
    return node if len(length) == 1 and info.sizes(node.outputs[0]).count(length[0]) == 2 else None


def _compare_integers(node: ir.Node, builder: Builder) -> list[ir.Node]:
    """Put the comparison of integers in the place of one of floats, which it returns."""
    counted = [_counted(value, builder) for value in operands(node)]
    builder.replace(node.outputs[0], builder.op(node.op_type, counted))
    return [node]


def _source(value: ir.Value) -> ir.Value:
    """Case 2: what is moved."""
    while is_op(node := value.producer(), "Unsqueeze"):
        value = operand_at(node, 0)
    return value


def _is_count(value: ir.Value, info: ShapeInfo) -> bool:
    """Case 3."""
    node = value.producer()
    if not is_op(node, "Range") or info.dtype(value) != ir.DataType.FLOAT:
        return False
    start, limit, step = operands(node)
    cast = limit.producer()
    if (info.scalar(start), info.scalar(step)) != (0.0, 1.0) or info.shape(limit) != ():
        return False
    return is_op(cast, "Cast") and info.dtype(operand_at(cast, 0)) in INTEGERS


def _counted(value: ir.Value, builder: Builder) -> ir.Value:
    """Case 4: a moved count, in integers."""
    node = value.producer()
    if is_op(node, "Unsqueeze"):
        return builder.again(node, [_counted(operand_at(node, 0), builder), *operands(node)[1:]])
    number = builder.cast(operand_at(operand_at(node, 1).producer(), 0), ir.DataType.INT64)
    zero, one = (builder.constant(np.array(each, dtype=np.int64), "number") for each in (0, 1))
    return builder.op("Range", [zero, number, one])
