"""Probabilities that are masked after the softmax and divided by what is left of them, as jax2onnx writes a mask.

Grammar; the code cites the numbers of the cases. Nothing but the sum and the division reads x, nothing but the guard
and the division reads the sum:

    x :=
      1     Mul(probabilities, m)
      2   | Where(m, probabilities, 0) | Where(m, 0, probabilities)
    renormalised :=
      3     Div(x, sum)                                                sum := ReduceSum(x, keys, keepdims=1)
      4   | Where(some, Div(x, Where(some, sum, 1)), 0)                some := Greater(sum, 0)

This is the softmax of scores masked by -inf, and its rows without keys are NaN or, with the guard, 0, as long as no
probability is rounded to 0 beside a masked key of a far greater score. That is the user's to say, by
`--assume bounded-scores`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import distinct_consumers, int_attr, is_op, places_of
from fa_compiler.passes.values.patterns import Bind, Number, Op, is_closed, match
from fa_compiler.passes.values.shapes import ShapeInfo

X = Bind("x")
SUM = Op("ReduceSum", X, open_end=True, name="sum")
SOME = Op("Greater", SUM, Number(0.0), name="some")
QUOTIENT = Op("Div", X, SUM)  # 3
GUARDED = Op("Where", SOME, Op("Div", X, Op("Where", Bind("some"), SUM, Number(1.0))), Number(0.0))  # 4


@dataclass(frozen=True)
class Renormalised:
    """Probabilities are kept where `condition`, as a truth value, equals `keep`; `nodes` in order, the mask's first.

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
    """How the only reader of probabilities masks them, if they are divided by their sum after it."""
    masked, x = _masked(value, node, info), node.outputs[0]
    divide = None if masked is None else _only(x, "Div")
    if masked is None or divide is None:
        return None
    last = _only(divide.outputs[0], "Where")
    for pattern, end, zeros in ((QUOTIENT, divide, False), (GUARDED, last, True)):
        found = None if end is None else match(pattern, end.outputs[0], info, {"x": x})
        if found is None or not is_closed(nodes := (node, *found.nodes)):
            continue
        total, shape = found["sum"].producer(), info.shape(x)
        axes = None if total is None else places_of(total, len(shape or ()))
        if total is None or axes is None or len(axes) != 1 or int_attr(total, "keepdims", 1) != 1:
            return None
        return Renormalised(*masked, axes[0], zeros, nodes)
    return None


def _masked(value: ir.Value, node: ir.Node, info: ShapeInfo) -> tuple[ir.Value, bool] | None:
    """Cases 1 and 2: the condition, and whether it keeps where it is true."""
    if is_op(node, "Mul"):
        other = next((each for each in node.inputs if each is not None and each is not value), None)
        return None if other is None or info.scalar(other) is not None else (other, True)
    if not is_op(node, "Where") or node.inputs[0] is None:
        return None
    for keep, index in ((True, 1), (False, 2)):
        if node.inputs[index] is value and _is(node.inputs[3 - index], 0.0, info):
            return node.inputs[0], keep
    return None


def _is(value: ir.Value | None, number: float, info: ShapeInfo) -> bool:
    return value is not None and info.scalar(value) == number


def _only(value: ir.Value, op_type: str) -> ir.Node | None:
    found = [node for node in distinct_consumers(value) if is_op(node, op_type)]
    return found[0] if len(found) == 1 else None
