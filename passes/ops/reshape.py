"""Operators that give the same elements another shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim, consts, product, simplify_given
from fa_compiler.passes.ir.nodes import elsewhere
from fa_compiler.passes.ops.context import (
    LIMIT,
    Content,
    Context,
    Fact,
    Shape,
    ShapeRule,
    axes_in,
    content_fact,
    fact_of,
    fresh,
    or_fresh,
    rule,
    shape_rule,
)
from fa_compiler.passes.ops.moves import (
    Flattened,
    Inserted,
    Permuted,
    Regrouped,
    Removed,
    Shuffled,
    mover,
)

ONE = Dim(1)


def with_shape(content: Content | None, shape: Shape | None, dtype: ir.DataType | None) -> Fact:
    """The fact of `content` in a new shape. The order of the elements stays."""
    if content is not None and shape is not None:
        sizes = consts(shape)
        known = [size for size in sizes if size is not None and 0 <= size <= LIMIT]
        if len(known) == len(sizes) and math.prod(known) == content.size:
            return content_fact(content.reshape(known), dtype)
    return Fact(shape, dtype)


def regrouping(*names: str) -> Callable[[ShapeRule], ShapeRule]:
    """Register a rule for the shape of a result that has the elements of the first input in their
    order, made of the shape of that input. Where this is not known, nothing is known of the
    result's."""

    def register(function: ShapeRule) -> ShapeRule:
        def result(ctx: Context) -> Fact:
            return with_shape(
                ctx.content(0), if_known(partial(function, ctx), ctx.shape(0)), ctx.dtype(0)
            )

        rule(*names)(result)
        return function

    return register


@rule("Reshape")
def _reshape(ctx: Context) -> Fact:
    if ctx.opset < 5:
        target = [Dim(item) for item in ctx.ints_attr("shape") or []]
        return with_shape(ctx.content(0), reshaped(ctx.shape(0), target, False), ctx.dtype(0))
    sizes = ctx.vector(1)
    if sizes is None:
        return Fact(None, ctx.dtype(0))
    allow_zero = ctx.opset >= 14 and ctx.int_attr("allowzero", 0) == 1
    return with_shape(ctx.content(0), reshaped(ctx.shape(0), sizes, allow_zero), ctx.dtype(0))


def reshaped(shape: Shape | None, target: list[Dim], allow_zero: bool) -> Shape:
    """The shape of the result of a Reshape.

    A 0 copies the input's dim unless `allow_zero`. A -1 is solved by division. A symbolic entry is
    the dim if it cannot be negative. If it can, it may be the -1 of some run. The dim is then the
    quotient if the entry is proven to be the quotient in all other runs, and else unknown.

    Two kinds of runs with a symbolic entry of 0 are left out. Without `allow_zero` the entry copies
    the input's dim. The element counts then differ and the original fails, unless the tensor is
    empty or the target was computed from a size that has nothing to do with the input. With
    `allow_zero` the tensor is empty, and a -1 beside the 0 need not be the quotient. ONNX forbids
    the two together, but ONNX Runtime divides the products without their zeros: [0, 0, 4, 8]
    becomes [0, 1, 32] by [0, -1, 32]. Without `allow_zero` it refuses a -1 beside a product of 0.
    """
    result: list[Dim] = []
    open_axis: int | None = None
    own_sizes = (*(shape or ()), *[None] * len(target))
    for index, (dim, own) in enumerate(zip(target, own_sizes, strict=False)):
        if dim == -1:
            open_axis = index
        elif dim == 0 and not allow_zero:
            dim = or_fresh(own)
        elif not dim.is_at_least(0) and dim != own:
            dim = _entry_or_quotient(shape, target, index)
        result.append(dim)
    if open_axis is not None:
        result[open_axis] = Dim.fresh()
        if shape is not None:
            result[open_axis] = _solve(shape, result, open_axis)
    return tuple(result)


def _entry_or_quotient(shape: Shape | None, target: list[Dim], index: int) -> Dim:
    """The dim for an entry that is -1 in some runs and a size in the others: the quotient, if a
    size is equal to it."""
    others = [dim for place, dim in enumerate(target) if place != index]
    if shape is None or not all(dim.is_at_least(0) and dim != 0 for dim in others):
        return Dim.fresh()
    quotient, entry = product(shape).exact_div(product(others)), target[index]
    if (
        quotient is None
        or not quotient.is_at_least(0)
        or simplify_given(quotient, (entry,)) != entry
    ):
        return Dim.fresh()
    return quotient


def _solve(shape: Shape, result: list[Dim], open_axis: int) -> Dim:
    others = product(dim for index, dim in enumerate(result) if index != open_axis)
    if others == 0:
        return Dim.fresh()
    return Dim.floordiv(product(shape), others)


@rule("Flatten")
def _flatten(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    if shape is None:
        return Fact(fresh(2), ctx.dtype(0))
    axis = ctx.int_attr("axis", 1)
    if axis < 0:
        axis += len(shape)
    return with_shape(ctx.content(0), (product(shape[:axis]), product(shape[axis:])), ctx.dtype(0))


@regrouping("Squeeze")
def _squeeze(ctx: Context, shape: Shape) -> Shape | None:
    present, axes = ctx.axes("axes", 1, 13)
    if present and axes is None:
        return None
    if axes:
        gone = axes_in(axes, len(shape))
        return None if gone is None else tuple(elsewhere(shape, gone))
    # Every axis of size 1 is removed. ONNX Runtime reads an empty list so, too. These axes are
    # known only if each dim is 1 or proven not to be.
    kept = tuple(dim for dim in shape if dim != 1)
    return kept if all(dim.never_one for dim in kept) else None


@regrouping("Unsqueeze")
def _unsqueeze(ctx: Context, shape: Shape) -> Shape | None:
    _, axes = ctx.axes("axes", 1, 13)
    rank = len(shape) + len(axes or ())
    places = None if axes is None else axes_in(axes, rank)
    if places is None:
        return None
    rest = iter(shape)
    return tuple(ONE if index in places else next(rest) for index in range(rank))


@rule("Transpose")
def _transpose(ctx: Context) -> Fact:
    shape, perm = ctx.shape(0), ctx.ints_attr("perm")
    if shape is None:
        return Fact(fresh(if_known(len, perm)), ctx.dtype(0))
    places = list(range(len(shape)))
    if perm is None:
        perm = places[::-1]
    if sorted(perm) != places:
        return Fact(None, ctx.dtype(0))
    content = ctx.content(0)
    moved = None if content is None else content.transpose(perm)
    return fact_of(moved, tuple(shape[axis] for axis in perm), ctx.dtype(0))


@shape_rule("DepthToSpace", rank=4)
def _depth_to_space(ctx: Context, shape: Shape) -> Shape:
    (batch, depth, height, width), block = shape, ctx.int_attr("blocksize", 1)
    return batch, Dim.floordiv(depth, block * block), height * block, width * block


@shape_rule("SpaceToDepth", rank=4)
def _space_to_depth(ctx: Context, shape: Shape) -> Shape:
    (batch, depth, height, width), block = shape, ctx.int_attr("blocksize", 1)
    return batch, depth * (block * block), Dim.floordiv(height, block), Dim.floordiv(width, block)


mover("Reshape", form=Regrouped)
mover("Flatten", form=Flattened)
mover("Squeeze", form=Removed)
mover("Unsqueeze", form=Inserted)
mover("Transpose", form=Permuted)
mover("DepthToSpace", "SpaceToDepth", form=Shuffled)
