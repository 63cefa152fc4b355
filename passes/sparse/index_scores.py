"""The scores that a TopK ranks as those of a lightning indexer.

    ranked   := I | Add(I, mask)            the mask 0 or one number that outweighs every score (at most -1e30, or -inf)
    I        := Squeeze(MatMul(w [B,S,1,H], R [B,S,H,T]), axis of 1)
              | ReduceSum(Mul(R, w of [B,S,H,1]), axis of the heads)
    R        := Relu(P * c) * d | c, d constants, c positive: relu(c x) = c relu(x); both move to the weights
    P        := MatMul(q [B,S,H,D], k [B,1,D,T])

in float32. Refused: anything between these, other ranks, heads of keys.

Exact arithmetic gives the same lists: LightningIndexer ranks the same sums, breaks ties by position as ONNX's TopK
does, and what a mask excludes comes behind everything else in both, where the attention's own mask drops it. Rounded,
two keys whose scores are closer than their rounding errors may change places, and where that decides which of them is
the last one listed, a row attends another key: so it is done only where the user assumes "close-ranks".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.nodes import constant, int_attr, is_op, producer, reduced_axes
from fa_compiler.passes.shape_rules.context import Shape
from fa_compiler.passes.shapes import ShapeInfo
from fa_compiler.passes.symbolic import Dim
from fa_compiler.passes.value_sets import ValueSets

OUTWEIGHS = -1e30
"""At most this number, a masked score ranks behind every other in float32; as for the scores of attention."""


@dataclass(frozen=True)
class IndexScores:
    """`query` [B,S,H,D], `key` [B,1,D,T]; `weights` with a dimension of 1 at `unit`, to be multiplied by `factor`;
    `mask` is what is added, if anything."""

    query: ir.Value
    key: ir.Value
    weights: ir.Value
    unit: int
    factor: float
    mask: ir.Value | None


def index_scores(ranked: ir.Value, whole: Shape, info: ShapeInfo, sets: ValueSets) -> IndexScores | None:
    """The index scores that a TopK ranks, of the shape `whole`; None where they are none."""
    if info.dtype(ranked) != ir.DataType.FLOAT:
        return None
    node = producer(ranked)
    candidates: list[tuple[ir.Value, ir.Value | None]] = [(ranked, None)]
    if is_op(node, "Add"):
        assert node is not None
        first, second = node.inputs
        if first is None or second is None:
            return None
        candidates = [(first, second), (second, first)]
    for scores, mask in candidates:
        if mask is not None and not _outweighs(mask, sets):
            continue
        found = _weighted_sum(scores, whole, info)
        if found is not None:
            weights, unit, rectified = found
            return _products(rectified, weights, unit, mask, whole, info)
    return None


def _outweighs(mask: ir.Value, sets: ValueSets) -> bool:
    numbers = sets.of(mask)
    return numbers is not None and all(number == 0 or number <= OUTWEIGHS for number in numbers)


def _weighted_sum(scores: ir.Value, whole: Shape, info: ShapeInfo) -> tuple[ir.Value, int, ir.Value] | None:
    """Weights with the place of their dimension of 1, and what they weigh."""
    if info.shape(scores) != whole:
        return None
    node = producer(scores)
    if is_op(node, "Squeeze"):
        assert node is not None
        product = producer(node.inputs[0])
        if not is_op(product, "MatMul") or reduced_axes(node) not in ([2], [-2]):
            return None
        assert product is not None
        weights, rectified = product.inputs
        if weights is None or rectified is None or not _has_unit(weights, 2, whole, info):
            return None
        return weights, 2, rectified
    if is_op(node, "ReduceSum"):
        assert node is not None
        product = producer(node.inputs[0])
        if not is_op(product, "Mul") or reduced_axes(node) not in ([2], [-2]) or int_attr(node, "keepdims", 1):
            return None
        assert product is not None
        for weights, rectified in (product.inputs, product.inputs[::-1]):
            if weights is not None and rectified is not None and _has_unit(weights, 3, whole, info):
                return weights, 3, rectified
    return None


def _has_unit(weights: ir.Value, unit: int, whole: Shape, info: ShapeInfo) -> bool:
    """Is it [B,S,H] with a dimension of 1?"""
    shape = info.shape(weights)
    return shape is not None and len(shape) == 4 and shape[unit] == Dim(1) and tuple(shape[:2]) == tuple(whole[:2])


def _products(
    rectified: ir.Value, weights: ir.Value, unit: int, mask: ir.Value | None, whole: Shape, info: ShapeInfo
) -> IndexScores | None:
    outer, inside = _scaled(rectified)
    relu = producer(inside)
    if not is_op(relu, "Relu") or relu is None or relu.inputs[0] is None:
        return None
    inner, product = _scaled(relu.inputs[0])
    made = producer(product)
    if not is_op(made, "MatMul") or made is None or not inner > 0 or not math.isfinite(inner * outer):
        return None
    query, key = made.inputs
    if query is None or key is None:
        return None
    q, k, w = info.shape(query), info.shape(key), info.shape(weights)
    if q is None or k is None or w is None or len(q) != 4 or len(k) != 4:
        return None
    heads = w[5 - unit]
    fits = tuple(q[:3]) == (*whole[:2], heads) and tuple(k) == (whole[0], Dim(1), q[3], whole[2])
    if not fits or heads.const is None or q[3].const is None:
        return None
    return IndexScores(query, key, weights, unit, inner * outer, mask)


def _scaled(value: ir.Value) -> tuple[float, ir.Value]:
    """A product with one number, taken apart."""
    node = producer(value)
    if is_op(node, "Mul"):
        assert node is not None
        for one, other in (node.inputs, node.inputs[::-1]):
            array = constant(other, limit=1)
            if array is not None and array.size == 1 and one is not None and array.ndim == 0:
                return float(array), one
    return 1.0, value
