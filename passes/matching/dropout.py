"""Dropout on the probabilities: a mask of the scores' shape that is known beside them, as the
operator's drop_mask.

    p = p * keep_mask.to(p.dtype) * (1 / (1 - rate))

    1   dropped := Mul(probabilities, m)        m = c * layout(Cast(keep)), keep boolean, c one
                                                number that is known before the run

m has any number of factors and operators that move elements, in any order, so a loop reads them; a
pattern could not.

The operator multiplies a kept probability by 1 / keep_prob, so keep_prob is 1 / c; c includes the
other numbers on the probabilities. It takes one bit for each score, in the order batch, head, row,
key, the first in the lowest bit of its byte.

An active Dropout operator is refused: it draws its mask where it stands. Drawn beside the
probabilities, by another Dropout, the mask would be as large as the scores and no longer the same
in every run: a runtime may fold a Dropout of constants, and merge two of the same input. Nor would
it pay: ONNX Runtime takes more than ten times as long to draw a mask as for all the rest of an
attention (12 heads, 512 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import NEWER_OPSET, Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder, LayoutEmitter
from fa_compiler.passes.ir.nodes import is_op, producer
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.ops.movers import LAYOUT_OPS

MAX_STEPS = 16
INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class Dropout:
    """Probabilities are kept where `mask`, a boolean over `dims`, is true, and then divided by
    `keep`."""

    node: ir.Node
    mask: ir.Value
    dims: Arrangement
    keep: float


def _boolean_source(
    value: ir.Value | None, viewer: Viewer
) -> tuple[ir.Value, tuple[ir.Node, ...], float] | None:
    """Case 1: for a tensor of 0 and a number, cast from a boolean: the boolean, the nodes that cast
    and move elements, and the number. None for other tensors."""
    chain: list[ir.Node] = []
    scale = 1.0
    for _ in range(MAX_STEPS):
        node = producer(value)
        if node is None:
            return None
        factor = viewer.factor(node)
        if factor is not None:
            value, scale = factor[0], scale * factor[1]
            continue
        if not is_op(node, *LAYOUT_OPS, "Expand", "Cast"):
            return None
        chain.insert(0, node)
        value = node.inputs[0]
        if value is not None and viewer.info.dtype(value) == ir.DataType.BOOL:
            return (value, tuple(chain), scale) if node.op_type == "Cast" else None
    return None


def drop_mask(node: ir.Node, viewer: Viewer) -> ir.Value | None:
    """The operand of a Mul that is a drop mask."""
    if not is_op(node, "Mul"):
        return None
    return next(
        (operand for operand in node.inputs if _boolean_source(operand, viewer) is not None), None
    )


def dropped(drop: ir.Node, dims: Arrangement, viewer: Viewer) -> tuple[Dropout, float]:
    """What a Mul by a drop mask drops of probabilities of this arrangement, and the factor that
    comes with it. Raises Decline."""
    other = drop_mask(drop, viewer)
    followed = _boolean_source(other, viewer)
    if other is None or followed is None or (view := viewer.base_view(followed[0])) is None:
        raise Decline(Code.RANK, "the rank of a drop mask is unknown", drop)
    mask, chain, scale = followed
    own, wanted = _arrangement_behind(chain, view.dims, viewer), viewer.alignment(other, dims, drop)
    if own is None or any(
        a and not viewer.space.unify(a, b) for a, b in zip(own, wanted, strict=True)
    ):
        raise Decline(
            Code.SHAPE, "the shape of a drop mask was not proven to fit the probabilities", drop
        )
    return Dropout(drop, mask, view.base_dims, 1.0), scale


def _arrangement_behind(
    chain: Iterable[ir.Node], dims: Arrangement, viewer: Viewer
) -> Arrangement | None:
    """The arrangement behind operators that move elements; None where it was not proven."""
    for node in chain:
        if (moved := viewer.rearranged(node, dims)) is None:
            return None
        dims = moved
    return dims


def kept_by(dropout: Dropout, scale: float, factors: tuple[Factor, ...]) -> Dropout:
    """The dropout with all numbers on the probabilities taken into it. Raises Decline."""
    for factor in factors:
        if factor.view is not None:
            raise Decline(
                Code.PROBABILITY_TERM, "a factor beside dropout that is no number", factor.node
            )
        scale = scale / factor.number if factor.divides else scale * factor.number
    if not scale > 1.0 or not math.isfinite(scale):
        reason = f"dropout that multiplies what it keeps by {scale:g} and not by more than 1"
        raise Decline(Code.PROBABILITY_TERM, reason, dropout.node)
    return replace(dropout, keep=1.0 / scale)


def drop_bits(
    dropout: Dropout, groups: tuple[Axes, ...], builder: Builder, emitter: LayoutEmitter
) -> ir.Value:
    """The mask as bits; `groups` are the axes of batch, heads, rows and keys."""
    if builder.opset < 11:
        raise Decline(
            Code.ILLEGAL,
            "a drop mask needs opset 11 or newer to be packed",
            dropout.node,
            NEWER_OPSET,
        )
    f32 = ir.DataType.FLOAT
    plan = plan_moves(dropout.dims, groups)
    if plan is None:
        raise Decline(
            Code.SHAPE, "the drop mask could not be arranged like the scores", dropout.node
        )
    whole = emitter.apply(dropout.mask, dropout.dims, plan)
    flat = builder.reshape(builder.cast(whole, f32), [-1])
    count = builder.shape_of(flat)
    # Whole bytes: -n mod 8 zeros more.
    eight = builder.ints([8])
    missing = builder.mod(builder.neg(count), eight)
    pads = builder.concat([builder.ints([0]), missing], 0)
    padded = builder.op("Pad", [flat, pads])
    octets = builder.reshape(padded, [-1, 8])
    powers = builder.constant(2.0 ** np.arange(8, dtype=np.float32), "bits")
    return builder.cast(builder.matmul(octets, powers), ir.DataType.UINT8)
