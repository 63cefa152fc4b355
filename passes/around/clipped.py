"""SwiGLU between limits, as gpt-oss has it: the gate and what it multiplies are clipped before.

    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    y = gate * torch.sigmoid(alpha * gate) * (up + 1)

Grammar; the code cites the numbers of the cases, and gates.py says where gate and up come from:

    clipped gate :=
      1     Clip(gate, none, limit) | Min(gate, limit)          this Clip makes the lowest number of
                                           minus infinity, and the operator does not: declined
                                           unless all numbers are finite, as is assumed
    clipped up :=
      2     Clip(up, -limit, limit) | Max(Min(up, limit), -limit) | Min(Max(up, -limit), limit)
                                           the same limit
    swish :=
      3     Mul(clipped gate, Sigmoid(Mul(clipped gate, alpha)))
      4   | Mul(clipped gate, Sigmoid(clipped gate))       alpha is 1
    result :=
      5     Mul(swish, Add(clipped up, bias))              one number
      6   | Mul(swish, clipped up)                         bias is 0
    the operator gets :=
      7     x                              gate and up are its elements of even and of odd places
                                           along the last axis
      8   | x                              they are its halves along the last axis
      9   | Concat(gate, up)               they are two tensors, or halves in the other order

Nothing else reads the gate, what it multiplies or the numbers in between. The limit is positive.

The operator computes in float32 and rounds once. In 16 bits the model rounds in between, and the
report says so. A sigmoid that 16 bits round to 0 makes NaN of a gate of minus infinity, and the
operator's may be another number there. That all numbers are finite is assumed for Ascend; without
this assumption 16 bits are declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import NON_FINITE_SCORES, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.gates import is_read_by, source
from fa_compiler.passes.around.halves import pairs_of
from fa_compiler.passes.around.records import Activation, expect_finite, is_float
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    is_op,
    only_reader,
    operand_at,
    operand_beside,
    operand_orders,
)
from fa_compiler.passes.values.patterns import is_closed
from fa_compiler.passes.values.shapes import ShapeInfo

LOWEST = float(np.finfo(np.float32).min)
"""A bound of this or below it binds no finite number of float32."""


def is_anchor(node: ir.Node) -> bool:
    """May this be the gate of a gated activation?"""
    return is_op(node, "Sigmoid")


def activations(node: ir.Node, info: ShapeInfo, options: Options) -> list[Activation]:
    """The clipped gated activation around a Sigmoid; none where there is none. Raises Decline."""
    parts = _parts(node, info)
    if parts is None:
        return []
    gate, up, nodes = parts.gate.value, parts.up.value, parts.nodes
    found = _cut(gate, up, nodes, info)
    if found is None or not info.shape(gate) or info.shape(gate) != info.shape(up):
        return []
    given, cut, cutting = found
    dtype = is_float(gate, info, node)
    if info.dtype(up) != dtype:
        raise Decline(Code.DTYPE, "the two operands have different types", nodes[-1])
    if not is_closed(nodes):
        raise Decline(
            Code.READ_INSIDE, "a number inside of the gated activation is read elsewhere", node
        )
    expect_finite(dtype, options, node)
    if parts.gate.low > -inf and NON_FINITE_SCORES in options.assume:  # 1
        reason = "the gate is clipped to finite numbers, and the operator does not clip a gate of minus infinity"
        hint = f"leave out --assume {NON_FINITE_SCORES} if all numbers are finite"
        raise Decline(Code.ILLEGAL, reason, parts.gate.nodes[-1], hint)
    attrs = {"alpha": parts.alpha, "limit": parts.gate.high, "bias": parts.bias, **cut}
    result = nodes[-1].outputs[0]
    return [
        Activation(
            node, "ClippedSwiglu", attrs, given, result, (*cutting, *nodes), dtype in SIXTEEN_BITS
        )
    ]


@dataclass(frozen=True)
class _Clipped:
    """A value between two bounds, and the nodes that clip it."""

    value: ir.Value
    low: float
    high: float
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class _Parts:
    """The clipped gate and what it multiplies, the numbers beside them, and the nodes behind
    both."""

    gate: _Clipped
    up: _Clipped
    alpha: float
    bias: float
    nodes: tuple[ir.Node, ...]


def _parts(node: ir.Node, info: ShapeInfo) -> _Parts | None:
    """The activation around a Sigmoid; None where it is another one."""
    alpha, clipped, scaled = _beside(operand_at(node, 0), "Mul", 1.0, info)  # 3 and 4
    gate, swish = _clipped(clipped, info), only_reader(node.outputs[0])
    if (
        gate is None
        or swish is None
        or (clipped, node.outputs[0]) not in operand_orders(swish, "Mul")
    ):
        return None
    last, value = only_reader(swish.outputs[0]), swish.outputs[0]
    factor = operand_beside(last, value, "Mul")
    if last is None or factor is None or gate.low > LOWEST or not 0 < gate.high < inf:  # 1
        return None
    bias, summed, added = _beside(factor, "Add", 0.0, info)  # 5 and 6
    up = _clipped(summed, info)
    if up is None or (up.low, up.high) != (-gate.high, gate.high):  # 2
        return None
    return _Parts(
        gate, up, alpha, bias, (*gate.nodes, *scaled, node, swish, *up.nodes, *added, last)
    )


def _cut(
    gate: ir.Value, up: ir.Value, nodes: tuple[ir.Node, ...], info: ShapeInfo
) -> tuple[tuple[ir.Value, ...], dict[str, int], tuple[ir.Node, ...]] | None:
    """What the operator gets, the attributes that say so, and the nodes that cut it; None for other
    places."""
    pairs = pairs_of(gate, up, info)
    if pairs is not None:  # 7
        alone = pairs.axis == -1 and is_read_by(gate, nodes) and is_read_by(up, nodes)
        return ((pairs.whole,), {"dim": -1, "interleaved": True}, pairs.nodes) if alone else None
    found = source(gate, up, nodes, info)
    if found is None:
        return None
    if found.whole is None or not found.gate_first:  # 9
        return (gate, up), {"dim": -1, "interleaved": False}, ()
    # 8
    return (
        ((found.whole,), {"dim": -1, "interleaved": False}, found.nodes)
        if found.dim == -1
        else None
    )


def _clipped(value: ir.Value, info: ShapeInfo) -> _Clipped | None:
    """What a value is clipped from, by one node or by two; None where nothing clips it."""
    found = _clip(value, info)
    inner = None if found is None else _clip(found.value, info)
    if found is None or inner is None or inner.low > found.high or found.low > inner.high:
        return found
    low, high = max(found.low, inner.low), min(found.high, inner.high)
    return _Clipped(inner.value, low, high, (*inner.nodes, *found.nodes))


def _clip(value: ir.Value, info: ShapeInfo) -> _Clipped | None:
    """What the node that makes a value clips; None for other nodes."""
    node = value.producer()
    if is_op(node, "Clip"):
        low, high = (_bound(node, place, free, info) for place, free in ((1, LOWEST), (2, -LOWEST)))
        return (
            None
            if low is None or high is None
            else _Clipped(operand_at(node, 0), low, high, (node,))
        )
    for number, one, limiting in _numbers_beside(value, info, "Min", "Max"):
        low, high = (-inf, number) if is_op(limiting, "Min") else (number, inf)
        return _Clipped(one, low, high, (limiting,))
    return None


def _bound(node: ir.Node, place: int, free: float, info: ShapeInfo) -> float | None:
    """A bound of a Clip, which is `free` where it is absent; None where it is not known."""
    bound = operand_at(node, place)
    return info.scalar(bound) if bound.name else free


def _beside(
    value: ir.Value, op_type: str, absent: float, info: ShapeInfo
) -> tuple[float, ir.Value, tuple[ir.Node, ...]]:
    """The number that an operator combines with a value, with the value before; `absent` where
    there is none."""
    for number, one, node in _numbers_beside(value, info, op_type):
        return number, one, (node,)
    return absent, value, ()


def _numbers_beside(
    value: ir.Value, info: ShapeInfo, *op_types: str
) -> Iterator[tuple[float, ir.Value, ir.Node]]:
    """How a value may be read as a number combined with a tensor of its shape: the number, the
    tensor and the node."""
    node = value.producer()
    for one, other in operand_orders(node, *op_types):
        number = info.scalar(other)
        if node is not None and number is not None and info.shape(one) == info.shape(value):
            yield number, one, node
