"""Comparisons of the least of several integers: each of them is compared, and all have to hold.

    mask = minimum(padding[:, None, :], causal)
    scores = where(mask > 0, scores, -1e9)

KerasHub merges padding into a causal mask so. The causal mask is found where it is a condition of
its own. Grammar; the code cites the numbers of the cases:

    compared :=
      1     Greater(least, c) | GreaterOrEqual(least, c)     c one number, of no more dimensions
                                                     than the least
    least :=
      2     Min(a, b, ...)                           of int32 or int64
      3   | Cast(least)                              to float32, once
      4   | Unsqueeze(least) | Squeeze(least) | Slice(least) | Transpose(least) | Reshape(least) |
          Expand(least)
    emitted
      5     And(compared(a), compared(b), ...), and the operators of case 4 on this truth value

The least of integers is above c if each of them is. A cast to float32 may round, but of two
integers the smaller one does not become the larger one. So both hold the same truth values. A cast
to a boolean asks whether the least is 0, and says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import is_op, operand_at, operands
from fa_compiler.passes.prepare.changes import change_found
from fa_compiler.passes.values.shapes import ShapeInfo

MOVED_BY = ("Unsqueeze", "Squeeze", "Slice", "Transpose", "Reshape", "Expand")
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True)
class _Compared:
    """What `node` gives: all of `parts`, compared as floats or integers, and then moved by
    `moves`."""

    node: ir.Node
    parts: tuple[ir.Value, ...]
    dtype: ir.DataType
    moves: tuple[ir.Node, ...]

    def replace(self, builder: Builder) -> list[ir.Node]:
        """Put case 5 in the place of the comparison. Returns the comparison."""
        builder.replace(self.node.outputs[0], self._emitted(builder))
        return [self.node]

    def _emitted(self, builder: Builder) -> ir.Value:
        """Case 5."""
        bound = operand_at(self.node, 1)
        truths = [
            builder.op(self.node.op_type, [builder.cast(part, self.dtype), bound])
            for part in self.parts
        ]
        result = reduce(lambda one, other: builder.op("And", [one, other]), truths)
        for move in self.moves:
            result = builder.again(move, [result, *operands(move)[1:]])
        return result


def compare_each(graphs: Sequence[ir.Graph], info: ShapeInfo, names: Names) -> bool:
    """Compare each of several integers in place of the least of them. Returns whether anything
    changed; then `info` does not know all of the graphs."""
    return change_found(graphs, info, names, _compared, _Compared.replace)


def _compared(node: ir.Node, info: ShapeInfo) -> _Compared | None:
    """Case 1; None for other nodes."""
    if not is_op(node, "Greater", "GreaterOrEqual"):
        return None
    value, bound = operands(node)
    if info.scalar(bound) is None or node.outputs[0].is_graph_output():
        return None
    dtype, moves = info.dtype(value), list[ir.Node]()
    while not is_op(maker := value.producer(), "Min"):
        if is_op(maker, "Cast") and info.dtype(value) == ir.DataType.FLOAT:  # 3
            value = operand_at(maker, 0)
            if info.dtype(value) not in INTEGERS:
                return None
        elif is_op(maker, *MOVED_BY):  # 4
            moves.append(maker)
            value = operand_at(maker, 0)
        else:
            return None
    if dtype is None or info.dtype(value) not in INTEGERS or len(maker.inputs) < 2:  # 2
        return None
    # 1: the bound would give the parts more dimensions
    if len(info.sizes(bound)) > len(info.sizes(value)):
        return None
    return _Compared(node, tuple(operands(maker)), dtype, tuple(reversed(moves)))
