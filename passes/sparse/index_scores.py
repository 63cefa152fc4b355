"""Reads the scores that a TopK ranks as those of a lightning indexer.

    index_scores = (torch.relu(q_index @ k_index.mT) * weights[..., None]).sum(dim=1)           # over the heads
    top = (index_scores + mask).topk(K, dim=-1).indices

    ranked   := I | Add(I, mask)            mask holds 0 and numbers that outweigh every score (at
                                            most -1e30, or -inf)
              | Where(c, f, I) | Where(c, I, f)                 f such a number
    I        := sum over the heads of w * R                     a product (MatMul, Einsum), or
                                                                ReduceSum(Mul(R, w))
    R        := Relu(P * c) * d             c, d constants, c positive: relu(c x) = c relu(x); both
                                            move to the weights
    P        := q k^T over the head size                        a product of [B,S,H,D] and [B,T,D]
                                                                in any layout

All of it is in float32, with any layout operators between. w is one number for each batch entry,
row and head. Refused: any other operator between these, and several key heads.

In exact arithmetic the lists are the same. LightningIndexer ranks the same sums and breaks ties by
position, as ONNX's TopK does. Keys that the mask excludes come last in both, and the attention's
own mask drops them. With rounding, two keys whose scores are closer than their rounding errors may
change places. Where that decides which of them is the last one listed, a row attends another key.
So a LightningIndexer is emitted only where the user assumes "close-ranks".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.answer.decline import if_possible
from fa_compiler.passes.ir.nodes import (
    int_attr,
    is_op,
    operand_at,
    operand_orders,
    operands,
    places_of,
    producer,
    sole,
)
from fa_compiler.passes.layout.contraction import Contraction, contraction
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.facts import Facts


@dataclass(frozen=True)
class Mask:
    """Keys rank after all others where `value` as a truth value equals `when`."""

    value: ir.Value
    when: bool


@dataclass(frozen=True)
class IndexScores:
    """Query, key and weights as views over the `axes` of batch, rows, heads, keys and head size.

    The weights have to be multiplied by `factor`. `mask` is the mask of the scores, if there is
    one. `relu_output` is the result of the Relu, arranged as `relu_dims`; it is `relu_scale` times
    relu(q k^T).
    """

    space: AxisSpace
    views: tuple[View, View, View]
    axes: tuple[Axes, Axes, Axes, Axes, Axes]
    factor: float
    mask: Mask | None
    relu_output: ir.Value
    relu_dims: Arrangement
    relu_scale: float

    @property
    def wanted(self) -> tuple[Arrangement, Arrangement, Arrangement]:
        """The arrangements that LightningIndexer takes: query [B,S,H,D], key [B,T,1,D], weights
        [B,S,H]."""
        batch, rows, heads, keys, depth = (self.space.resolve(axes) for axes in self.axes)
        return (batch, rows, heads, depth), (batch, keys, (), depth), (batch, rows, heads)


def index_scores(ranked: ir.Value, whole: Shape, facts: Facts) -> IndexScores | None:
    """The index scores that a TopK ranks, of the shape `whole`, [B,S1,S2]; None where it ranks
    something else."""
    info = facts.info
    if info.dtype(ranked) != ir.DataType.FLOAT or info.shape(ranked) != whole:
        return None
    for scores, mask in unmasked(ranked, facts):
        if info.shape(scores) != whole:
            continue
        space = AxisSpace()
        if (read := _ScoreReader(Viewer(facts, space), mask).read(scores)) is not None:
            return space.settle(read)
    return None


def plain_scores(scores: ir.Value, viewer: Viewer) -> IndexScores | None:
    """Index scores [B,S1,S2] without a mask, over new axes of the viewer's space; None for any
    other value."""
    if viewer.info.dtype(scores) != ir.DataType.FLOAT or len(viewer.info.sizes(scores)) != 3:
        return None
    return _ScoreReader(viewer, None).read(scores)


def unmasked(ranked: ir.Value, facts: Facts) -> Iterator[tuple[ir.Value, Mask | None]]:
    """The ways to read a ranked value as scores and a mask on them, first that without a mask."""
    yield ranked, None
    node = producer(ranked)
    for scores, mask in operand_orders(node, "Add"):
        if _outweighs(mask, facts):
            yield scores, Mask(mask, True)
    if is_op(node, "Where"):
        condition, chosen, other = operands(node)
        for scores, fill, when in ((other, chosen, True), (chosen, other, False)):
            number = facts.info.scalar(fill)
            if number is not None and number <= DOMINATING:
                yield scores, Mask(condition, when)


def _outweighs(mask: ir.Value, facts: Facts) -> bool:
    """Does a mask hold nothing but 0 and numbers in which every score is lost?"""
    numbers = facts.sets.of(mask)
    return numbers is not None and all(number == 0 or number <= DOMINATING for number in numbers)


@dataclass(frozen=True)
class _Rectified:
    """A product, arranged as `dims`, and the Relu it goes through.

    `relu`, arranged as `relu_dims`, is `relu_scale` times the rectified product of the operands'
    bases. `factor` is `relu_scale` times the factors after the Relu.
    """

    product: Contraction
    dims: Arrangement
    relu: ir.Value
    relu_dims: Arrangement
    relu_scale: float
    factor: float


@dataclass(frozen=True)
class _ScoreReader:
    viewer: Viewer
    mask: Mask | None

    def read(self, scores: ir.Value) -> IndexScores | None:
        """The index scores, read from the sum over the heads on; None where they are something
        else."""
        batch, rows, keys = dims = self.viewer.base_dims(scores)
        view = self.viewer.view_along(scores, dims)
        if view is None or (node := producer(view.base)) is None:
            return None
        for heads, product, inner, weights, outer in self._sums(node, view.base_dims):
            rectified = self._rectified(product, inner)
            own = self.viewer.view_along(weights, outer)
            if rectified is None or own is None:
                continue
            read = self._products(rectified, (batch, rows, heads, keys), own)
            if read is not None:
                return read
        return None

    def _sums(
        self, node: ir.Node, dims: Arrangement
    ) -> Iterator[tuple[Axes, ir.Value, Arrangement, ir.Value, Arrangement]]:
        """The ways to read a node as a sum over heads: the heads, and its two operands with their
        arrangements."""
        product = contraction(node, self.viewer.info)
        if product is not None:
            heads, arranged = self._operands(product, dims)
            for (one, own), (other, theirs) in (arranged, arranged[::-1]):
                yield heads, one, own, other, theirs
            return
        multiply = producer(operand_at(node, 0))
        if not is_op(node, "ReduceSum") or not is_op(multiply, "Mul"):
            return
        shape = self.viewer.info.sizes(multiply.outputs[0])
        axis = sole(places_of(node, len(shape)) or ())
        if axis is None:
            return
        heads = self.viewer.space.new(shape[axis])
        end = axis
        if int_attr(node, "keepdims", 1):
            end += 1
        whole = (*dims[:axis], heads, *dims[end:])
        for first, second in operand_orders(multiply, "Mul"):
            if self.viewer.info.shape(first) != shape:
                continue
            aligned = if_possible(partial(self.viewer.alignment, second, whole, multiply))
            if aligned is not None:
                yield heads, first, whole, second, aligned

    def _operands(
        self, product: Contraction, dims: Arrangement
    ) -> tuple[Axes, tuple[tuple[ir.Value, Arrangement], tuple[ir.Value, Arrangement]]]:
        """The axes that a product sums over, and its operands with their arrangements; `dims` is
        that of its result."""
        info = self.viewer.info
        sizes = {
            label: size
            for operand, labels in zip(product.operands, product.labels, strict=True)
            for label, size in zip(labels, info.sizes(operand), strict=True)
        }
        (summed,) = product.summed
        over = self.viewer.space.new(sizes[summed])
        along = dict(zip(product.out, dims, strict=True)) | {summed: over}

        def arranged(side: int) -> tuple[ir.Value, Arrangement]:
            shape = info.sizes(product.operands[side])
            own: Arrangement = ()
            for label, size in zip(product.labels[side], shape, strict=True):
                own += (along[label],) if size.const != 1 else ((),)
            return product.operands[side], own

        return over, (arranged(0), arranged(1))

    def _rectified(self, value: ir.Value, dims: Arrangement) -> _Rectified | None:
        """The product that goes through a Relu to a value, factors between included; None where
        there is none."""
        outer = self.viewer.view_along(value, dims, factors=True)
        if outer is None or not is_op(relu := producer(outer.base), "Relu"):
            return None
        inner = self.viewer.view_along(operand_at(relu, 0), outer.base_dims, factors=True)
        if (
            inner is None
            or (product := contraction(producer(inner.base), self.viewer.info)) is None
        ):
            return None
        scale = inner.scale * product.factor
        factor = scale * outer.scale
        if scale <= 0 or not math.isfinite(factor):
            return None
        return _Rectified(product, inner.base_dims, relu.outputs[0], outer.base_dims, scale, factor)

    def _products(
        self, rectified: _Rectified, axes: tuple[Axes, Axes, Axes, Axes], weights: View
    ) -> IndexScores | None:
        """The index scores whose query and key are the operands of a product, in either order; None
        where these have other axes than LightningIndexer's."""
        space = self.viewer.space
        batch, rows, heads, keys = axes
        depth, arranged = self._operands(rectified.product, rectified.dims)
        views = [self.viewer.view_along(value, own) for value, own in arranged]
        if (
            None in views
            or not heads
            or not depth
            or None in (space.size(heads).const, space.size(depth).const)
        ):
            return None
        for query, key in (views, views[::-1]):
            assert query is not None and key is not None
            scores = IndexScores(
                space,
                (query, key, weights),
                (batch, rows, heads, keys, depth),
                rectified.factor,
                self.mask,
                rectified.relu,
                rectified.relu_dims,
                rectified.relu_scale,
            )
            if all(
                self._has_axes(view, wanted)
                for view, wanted in zip(scores.views, scores.wanted, strict=True)
            ):
                return scores
        return None

    def _has_axes(self, view: View, wanted: Arrangement) -> bool:
        """Does the view have exactly these axes?"""
        return set(self.viewer.space.resolve(chain(*view.base_dims))) == set(chain(*wanted))
