"""Attention sinks in the total that exponentials are divided by: softmax-plus-one, and a softmax
written out with a sink.

    row_max = scores.amax(-1, keepdim=True)
    e = (scores - row_max).exp()
    p = e / (e.sum(-1, keepdim=True) + (sink - row_max).exp())

Grammar, instead of the ReduceSum of softmax.py, where `row_max` is what was subtracted from the
scores:

    total := Add(ReduceSum(e), one)
    one :=
      1     Exp(Sub(t, row_max)) | Exp(Neg(row_max))             t one number for each head, or for
                                                                 all of them; without it the sink is
                                                                 0
      2   | Mul(c, one)                                          c > 0 one number: the sink is
                                                                 larger by log(c)
    row_max :=
      3     ReduceMax(scores)
      4   | Max(ReduceMax(scores), t)                            for t = 0 also Relu and Clip(., 0)

Sound because e / (sum(e) + exp(t - row_max)) is exp(x) / (sum(exp(x)) + exp(t)) whatever `row_max`
is: the softmax beside one more score t (sinks.py). Where exp(t - row_max) overflows, the row is 0
here and less than 1e-38 of its values there, in float32. A row whose scores are all -inf is 0
beside a sink; here that is so only where `row_max` is at least t.

Anything else added to the sum is recorded as `other`, to be declined by name: 1 + sum(e), say,
means another sink in each row, its maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import certain, operand_orders
from fa_compiler.passes.values.patterns import Bind, OneOf, Op, match, matches
from fa_compiler.passes.values.shapes import ShapeInfo

X, FLOOR, ROW_MAX = Bind("x"), Bind("floor"), Bind("row_max")
EXPONENTIAL = Op("Exp", OneOf((Op("Sub", Bind("sink"), ROW_MAX), Op("Neg", ROW_MAX))))  # 1
ONE = OneOf((EXPONENTIAL, Op("Mul", Bind("weight"), EXPONENTIAL)))  # 2
HELD = OneOf((Op("Relu", X, plain=True), Op(("Max", "Clip"), X, FLOOR, plain=True)))  # 4


@dataclass(frozen=True)
class SinkTotal:
    """A sink in a total: `value`, or `number` where there is none. `nodes` compute it, the Add the
    last.

    `clamped_max` is the maximum of the scores alone and the node that keeps what is subtracted from
    falling below the sink, where there is one. With `other` the sum is enlarged by that, and there
    is no sink.
    """

    nodes: tuple[ir.Node, ...]
    value: ir.Value | None = None
    number: float = 0.0
    clamped_max: tuple[ir.Value, ir.Node] | None = None
    other: ir.Value | None = None


def summands(total: ir.Value) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """How a total may be read as a sum and what is added to it."""
    add = total.producer()
    return operand_orders(add, "Add")


def sink_total(
    total: ir.Value, more: ir.Value, subtracted: ir.Value | None, info: ShapeInfo
) -> SinkTotal:
    """What is added to a total's sum; `subtracted` is what the scores were reduced by."""
    add = certain(total.producer())
    return _sink(more, subtracted, add, info) or SinkTotal((add,), other=more)


def _sink(
    value: ir.Value, subtracted: ir.Value | None, add: ir.Node, info: ShapeInfo
) -> SinkTotal | None:
    """Cases 1 and 2: the sink that is added to a total; None where something else is."""
    one = None if subtracted is None else match(ONE, value, info, {"row_max": subtracted})
    if one is None or subtracted is None:
        return None
    sink, weight = one.get("sink"), one.get("weight")
    number, factor = _number(sink, 0.0, info), _number(weight, 1.0, info)
    if factor is None or not 0.0 < factor < math.inf:
        return None
    nodes, clamped_max = (*one.nodes, add), _clamped_max(subtracted, sink, number, info)
    if number is not None:
        return SinkTotal(nodes, None, number + math.log(factor), clamped_max)
    return SinkTotal(nodes, sink, 0.0, clamped_max) if factor == 1.0 else None


def _number(value: ir.Value | None, absent: float, info: ShapeInfo) -> float | None:
    """The one number of a tensor; `absent` where there is none, and None for other tensors."""
    return absent if value is None else info.scalar(value)


def _clamped_max(
    value: ir.Value, sink: ir.Value | None, number: float | None, info: ShapeInfo
) -> tuple[ir.Value, ir.Node] | None:
    """Case 4, Max(x, sink): x and the node of the maximum; None for case 3. Without a `sink` its
    value is `number`."""
    for held in matches(HELD, value, info):
        if _is_sink(held.get("floor"), sink, number, info):
            return held["x"], held.nodes[-1]
    return None


def _is_sink(
    floor: ir.Value | None, sink: ir.Value | None, number: float | None, info: ShapeInfo
) -> bool:
    """Case 4: is a floor, 0 where there is none, the sink, or the number that the sink is?"""
    if number is None:
        return floor is not None and floor is sink
    return _number(floor, 0.0, info) == number
