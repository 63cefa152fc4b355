"""Factors that are no single number: moved from the scores to the query, and from the probabilities
to the result.

    scores = (q @ k.transpose(-2, -1)) * logit_scale.exp()          [heads, 1, 1]
    output = (p * gate) @ v

Grammar; the code cites the numbers of the cases. t does not run along the keys: it is one number
for each head, row or batch entry, or one in all.

    scores :=
      1     Mul(scores, t) | Div(scores, t)                t proven to be of moderate size, or as a
                                                           divisor not to be near 0 (Swin V2's logit
                                                           scale)
      2   | Mul(scores, t) | Div(scores, t)                t any value of the run, such as an input;
                                                           ONNX Runtime only
    probabilities :=
      3     Mul(probabilities, t) | Div(probabilities, t)          t as in 1, or one number; in
                                                           front of a guard proven not to be NaN

Both products are linear, and t is the same for all terms of their sums: (t q) k = t (q k), (t p) v
= t (p v). Only rounding changes, as long as no product overflows or vanishes that did not before.
In cases 1 and 3 the size of t shows that. If t may be NaN, it is the size of its numbers, because
NaN gives NaN in both orders; but a guard behind the factor makes 0 of that, and the fused guard
stands in front of it. A large divisor in case 1 makes scores vanish in both orders. In case 2 the
query is multiplied by t / 2^60, which overflows for no finite t and no query of common size. The
operator's scale is multiplied by 2^60; the kernels apply it to the finished products. So a finite
t, 0 and negative ones included, changes rounding only. Where t is NaN, all scores of its rows are
NaN in both orders. Where t is infinite, or a divisor 0, all scores of its rows are infinite or NaN
in both orders, but not the same ones of them. Each such row is NaN all the same if nothing but -inf
can take the place of a score and nothing else has a share in the softmax.

16-bit operands are then computed in float32.

Refused: a factor on the probabilities that may be NaN, in front of a guard; a factor after a term
on the scores, which would have to scale the term, too; in case 2 another factor after it that may
make a product smaller, because t times the scores may have overflowed before, or that is after the
subtraction of the maximum, because t times both factors may overflow; and in case 2 everything that
tells infinite scores from NaN: soft caps, sinks, floors, selections that put another number than
-inf into the scores, guards that test the scores, and guards that test a bias, which in the
operator test the scores with it. A bias that becomes a boolean mask needs no such guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, AxisSpace
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder, LayoutEmitter
from fa_compiler.passes.ir.nodes import certain, constant, inputs_of, is_op
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import View, Viewer

LARGEST = 1e15
SMALLEST = 1e-15
RESERVE = 2.0**60
"""How much smaller the query becomes by a factor of unknown size, and the scale larger."""


@dataclass(frozen=True)
class Factor:
    """A tensor, `value` and its view, or one number where there is none, that multiplies or
    divides.

    If `unbounded`, nothing is known of its numbers: the result is to be RESERVE times smaller.
    """

    node: ir.Node
    view: View | None
    number: float = 1.0
    divides: bool = False
    value: ir.Value | None = None
    unbounded: bool = False


GUARD_FIRST = "guard the probabilities before they are multiplied"


def operand(node: ir.Node | None, value: ir.Value) -> tuple[ir.Value, bool] | None:
    """The other operand of a Mul or Div that a value goes into, and whether it divides."""
    if not is_op(node, "Mul", "Div"):
        return None
    left, right = node.inputs[:2]
    if right is not None and left is value:
        return right, node.op_type == "Div"
    if left is not None and right is value and node.op_type == "Mul":
        return left, False
    return None


def factorings(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value, bool]]:
    """How a Mul or Div may be read as a tensor with a factor on it: the tensor, the factor, and
    whether it divides."""
    for value in inputs_of(node):
        if (other := operand(node, value)) is not None:
            yield value, *other


def immoderate(
    value: ir.Value, divides: bool, viewer: Viewer, largest_divisor: float = LARGEST
) -> str | None:
    """Why a factor is not taken as one of moderate size; None if it is."""
    number = viewer.info.scalar(value)
    interval = (number, number) if number is not None else viewer.facts.bounds.unless_nan(value)
    largest = largest_divisor if divides else LARGEST
    if interval is None or not max(map(abs, interval)) <= largest:
        return f"the factor {value.name!r} is not proven to be of moderate size"
    if divides and not _is_off_zero(value, interval):
        return f"the divisor {value.name!r} is not proven to be other than 0"
    return None


def _is_off_zero(value: ir.Value, interval: tuple[float, float]) -> bool:
    """Are all numbers of a tensor, which are in this interval, proven not to be near 0?"""
    array = constant(value)
    if array is not None:
        return bool((np.abs(array) >= SMALLEST).all())
    return interval[0] >= SMALLEST or interval[1] <= -SMALLEST


def on_scores(
    node: ir.Node, value: ir.Value, divides: bool, dims: Arrangement, viewer: Viewer
) -> Factor:
    """The factor `value` on scores of the arrangement `dims`. Raises Decline."""
    reason = immoderate(value, divides, viewer, largest_divisor=math.inf)
    if reason is None:  # 1
        return _factor_of(node, value, divides, dims, viewer)
    if viewer.facts.options.target != "ort" or viewer.info.scalar(value) is not None:
        raise Decline(Code.SCALE, reason, node)
    return replace(_factor_of(node, value, divides, dims, viewer), unbounded=True)  # 2


def on_probabilities(
    node: ir.Node, value: ir.Value, divides: bool, dims: Arrangement, viewer: Viewer, guarded: bool
) -> Factor:
    """Case 3: the factor `value` on probabilities of the arrangement `dims`; is there a guard
    behind it? Raises Decline."""
    if (reason := immoderate(value, divides, viewer)) is not None:
        raise Decline(Code.PROBABILITY_TERM, reason, node)
    if guarded and viewer.info.scalar(value) is None and viewer.facts.bounds.always(value) is None:
        reason = f"the factor {value.name!r} may be NaN, and the guard behind it makes 0 of that"
        raise Decline(Code.PROBABILITY_TERM, reason, node, GUARD_FIRST)
    return _factor_of(node, value, divides, dims, viewer)


def _factor_of(
    node: ir.Node, value: ir.Value, divides: bool, dims: Arrangement, viewer: Viewer
) -> Factor:
    if (number := viewer.info.scalar(value)) is not None:
        return Factor(node, None, number, divides)
    return Factor(node, viewer.broadcast_view(value, dims, node), divides=divides, value=value)


def check_axes(
    factors: tuple[Factor, ...], allowed: Arrangement, space: AxisSpace, code: Code
) -> None:
    """Decline factors that differ along other dimensions than these."""
    known = set(chain.from_iterable(space.resolve_all(allowed)))
    for factor in factors:
        if factor.view is None:
            continue
        if not known.issuperset(chain.from_iterable(space.resolve_all(factor.view.base_dims))):
            hint = (
                "multiply the key by it, before its product with the query"
                if code == Code.SCALE
                else None
            )
            reason = f"{factor.node.op_type} by a tensor that differs between keys"
            raise Decline(code, reason, factor.node, hint)


def multiplied(
    value: ir.Value,
    dims: Arrangement,
    factors: tuple[Factor, ...],
    builder: Builder,
    emitter: LayoutEmitter,
) -> ir.Value:
    """A value of this arrangement times the factors."""
    dtype = certain(builder.info.dtype(value))
    for factor in factors:
        other = _factor_tensor(factor, dims, dtype, builder, emitter)
        value = builder.div(value, other) if factor.divides else builder.mul(value, other)
    return value


def _factor_tensor(
    factor: Factor, dims: Arrangement, dtype: ir.DataType, builder: Builder, emitter: LayoutEmitter
) -> ir.Value:
    """A factor as a tensor beside a value of this arrangement."""
    if factor.view is None:
        return builder.constant(np.array(factor.number, dtype=dtype.numpy()), "number")
    own = factor.view.base_dims
    owned = set(chain.from_iterable(own))
    plan = certain(plan_moves(own, tuple(dim if not owned.isdisjoint(dim) else () for dim in dims)))
    other = emitter.apply(builder.cast(factor.view.base, dtype), own, plan)
    if not factor.unbounded:
        return other
    return scaled(other, RESERVE if factor.divides else 1 / RESERVE, builder)


def scaled(value: ir.Value, factor: float, builder: Builder) -> ir.Value:
    """A value times a number."""
    dtype = builder.info.dtype(value)
    if factor == 1.0 or dtype is None:
        return value
    return builder.mul(value, builder.constant(np.array(factor, dtype.numpy()), "ratio"))
