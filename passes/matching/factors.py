"""Factors that are no single number: moved from the scores to the query, and from the probabilities to the result.

    scores := Mul(scores, t) | Div(scores, t)                  t does not run along the keys: one number for each
                                                               head, row or batch entry (Swin V2's logit scale)
    probabilities := Mul(probabilities, t) | Div(probabilities, t)     t likewise, or one number

Both products are linear, and t is the same for all terms of their sums: (t q) k = t (q k), (t p) v = t (p v). Only
rounding changes, as long as no product overflows or vanishes that did not before: t is proven to be of moderate size.
16-bit operands are then computed in float32. A factor after a term on the scores would have to scale the term, too,
and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.build import Builder, LayoutEmitter
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import Arrangement, AxisSpace
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.nodes import constant, is_op
from fa_compiler.passes.report import Code

LARGEST = 1e15
SMALLEST = 1e-15


@dataclass(frozen=True)
class Factor:
    """A tensor, `value` and its view, or one number where there is none, that multiplies or divides."""

    node: ir.Node
    view: View | None
    number: float = 1.0
    divides: bool = False
    value: ir.Value | None = None


def operand(node: ir.Node, value: ir.Value) -> tuple[ir.Value, bool] | None:
    """The other operand of a Mul or Div that a value goes into, and whether it divides."""
    left, right = (node.inputs[0], node.inputs[1]) if is_op(node, "Mul", "Div") else (None, None)
    if right is not None and left is value:
        return right, node.op_type == "Div"
    return (left, False) if left is not None and right is value and node.op_type == "Mul" else None


def moderate(node: ir.Node, value: ir.Value, divides: bool, dims: Arrangement, viewer: Viewer, code: Code) -> Factor:
    """The factor `value` on something of the arrangement `dims`; declines with `code` what is not of moderate size."""
    number = viewer.info.scalar(value)
    interval = viewer.facts.bounds.of(value) if number is None else (number, number)
    if interval is None or not max(map(abs, interval)) <= LARGEST:
        raise Decline(code, f"the factor {value.name!r} is not proven to be of moderate size", node)
    array = constant(value)
    apart = interval[0] >= SMALLEST or interval[1] <= -SMALLEST
    if array is not None:
        apart = bool((np.abs(array) >= SMALLEST).all())
    if divides and not apart:
        raise Decline(code, f"the divisor {value.name!r} is not proven to be other than 0", node)
    if number is not None:
        return Factor(node, None, number, divides)
    return Factor(node, viewer.broadcast_view(value, dims, node), divides=divides, value=value)


def check_axes(factors: tuple[Factor, ...], allowed: Arrangement, space: AxisSpace, code: Code) -> None:
    """Decline factors that differ along other dimensions than these."""
    known = {axis for dim in space.resolve_all(allowed) for axis in dim}
    for each in factors:
        own = () if each.view is None else space.resolve_all(each.view.base_dims)
        if any(axis not in known for dim in own for axis in dim):
            raise Decline(code, f"{each.node.op_type} by a tensor that differs between keys", each.node)


def multiplied(
    value: ir.Value, dims: Arrangement, factors: tuple[Factor, ...], builder: Builder, emitter: LayoutEmitter
) -> ir.Value:
    """A value of this arrangement times the factors."""
    dtype = builder.info.dtype(value)
    assert dtype is not None
    for each in factors:
        if each.view is None:
            other = builder.constant(np.array(each.number, dtype=dtype.numpy()), "number")
        else:
            owned = {axis for dim in each.view.base_dims for axis in dim}
            target = tuple(dim if any(axis in owned for axis in dim) else () for dim in dims)
            plan = plan_moves(each.view.base_dims, target)
            assert plan is not None
            other = emitter.apply(builder.cast(each.view.base, dtype), each.view.base_dims, plan)
        value = builder.op("Div" if each.divides else "Mul", [value, other], dtype)
    return value


def scaled(value: ir.Value, factor: float, builder: Builder) -> ir.Value:
    """A value times a number."""
    dtype = builder.info.dtype(value)
    if factor == 1.0 or dtype is None:
        return value
    return builder.op("Mul", [value, builder.constant(np.array(factor, dtype.numpy()), "ratio")], dtype)
