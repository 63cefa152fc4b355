"""Probabilities that are masked after the softmax and divided by what is left of them, as jax2onnx
writes a mask.

    x = scores.softmax(-1) * mask
    p = x / x.sum(-1, keepdim=True)

Grammar; the code cites the numbers of the cases. Nothing but the sum and the division reads x,
nothing but the guard and the division reads the sum:

    x :=
      1     Mul(probabilities, m)
      2   | Where(m, probabilities, 0) | Where(m, 0, probabilities)
    renormalised :=
      3     Div(x, sum)                                                sum := ReduceSum(x, keys, keepdims=1)
      4   | Where(some, Div(x, Where(some, sum, 1)), 0)                some := Greater(sum, 0)

This is the softmax of scores masked by -inf, and its rows without keys are NaN or, with the guard,
0, as long as no probability is rounded to 0 beside a masked key of a far greater score. That is the
user's to say, by `--assume bounded-scores`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    int_attr,
    is_op,
    nodes_of_type,
    operand_at,
    others_of,
    output_of,
    places_of,
    selections_of,
    sole,
)
from fa_compiler.passes.values.patterns import Bind, Number, Op, is_closed, match
from fa_compiler.passes.values.shapes import ShapeInfo

X = Bind("x")
SUM = Op("ReduceSum", X, open_end=True, name="sum")
SOME = Op("Greater", SUM, Number(0.0), name="some")
QUOTIENT = Op("Div", X, SUM)  # 3
# 4
GUARDED = Op("Where", SOME, Op("Div", X, Op("Where", Bind("some"), SUM, Number(1.0))), Number(0.0))


@dataclass(frozen=True)
class Renormalised:
    """Probabilities are kept where `condition`, as a truth value, equals `keep`; `nodes` in order,
    the mask's first.

    `axis` is the one that is summed over; with `zeros` rows without keys are 0, else NaN.
    """

    condition: ir.Value
    keep: bool
    axis: int
    zeros: bool
    nodes: tuple[ir.Node, ...]

    @property
    def output(self) -> ir.Value:
        """The probabilities after the mask and the division."""
        return self.nodes[-1].outputs[0]


def renormalised(value: ir.Value, node: ir.Node, info: ShapeInfo) -> Renormalised | None:
    """How the only reader of probabilities masks them, if they are divided by their sum after
    it."""
    masked, x = _masked(value, node, info), node.outputs[0]
    divide = _sole_reader(x, "Div")
    if masked is None or divide is None:
        return None
    last = _sole_reader(divide.outputs[0], "Where")
    for pattern, end, zeros in ((QUOTIENT, divide, False), (GUARDED, last, True)):
        division = match(pattern, output_of(end), info, {"x": x})
        if division is None or not is_closed(nodes := (node, *division.nodes)):
            continue
        axis = _summed_axis(division["sum"].producer(), info)
        return None if axis is None else Renormalised(*masked, axis, zeros, nodes)
    return None


def _summed_axis(total: ir.Node | None, info: ShapeInfo) -> int | None:
    """The one axis that a sum runs over and keeps, with size 1; None where it is none or
    several."""
    if total is None or int_attr(total, "keepdims", 1) != 1:
        return None
    return sole(places_of(total, len(info.sizes(operand_at(total, 0)))) or ())


def _masked(value: ir.Value, node: ir.Node, info: ShapeInfo) -> tuple[ir.Value, bool] | None:
    """Cases 1 and 2: the condition, and whether it keeps where it is true."""
    if is_op(node, "Mul"):
        others = others_of(node, value)
        return (others[0], True) if others and info.scalar(others[0]) is None else None
    for condition, kept, dropped, keep in selections_of(node):
        if kept is value and info.scalar(dropped) == 0.0:
            return condition, keep
    return None


def _sole_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    return sole(nodes_of_type(distinct_consumers(value), op_type))
