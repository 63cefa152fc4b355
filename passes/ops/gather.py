"""Gather and its family, TopK, NonZero: operators that pick elements by index."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import all_known, sole
from fa_compiler.passes.ops.context import (
    LIMIT,
    Content,
    Context,
    Fact,
    axis_in,
    content_fact,
    dim_array,
    fresh,
    integers_of,
    or_fresh,
    rank_of,
    rule,
    with_dims,
)
from fa_compiler.passes.ops.moves import Picked, PickedElements, PickedPoints, Reversed, mover


@rule("Gather")
def _gather(ctx: Context) -> Fact:
    data, indices = ctx.shape(0), ctx.shape(1)
    dtype = ctx.dtype(0)
    if data is None or indices is None:
        return Fact(None, dtype)
    axis = axis_in(ctx.int_attr("axis", 0), len(data))
    if axis is None:
        return Fact(None, dtype)
    content = _picked(ctx.content(0), ctx.content(1), axis)
    if content is not None:
        return content_fact(content, dtype)
    return Fact(with_dims(data, axis, *indices), dtype)


def _picked(data: Content | None, indices: Content | None, axis: int) -> Content | None:
    if data is None or indices is None or indices.dtype != object or data.size == 0:
        return None
    length = data.shape[axis]
    if length == 1:
        # One element: every index that does not fail picks it.
        places = np.zeros(indices.shape, dtype=np.int64)
    else:
        known = all_known(axis_in(dim.const, length) for dim in indices.reshape(-1))
        if known is None:
            return None
        places = np.array(known, dtype=np.int64).reshape(indices.shape)
    result = np.asarray(np.take(data, places, axis), dtype=data.dtype)
    if result.size <= LIMIT:
        return result
    return None


@rule("GatherElements")
def _gather_elements(ctx: Context) -> Fact:
    return Fact(ctx.shape(1), ctx.dtype(0))


@rule("GatherND")
def _gather_nd(ctx: Context) -> Fact:
    data, indices = ctx.shape(0), ctx.shape(1)
    dtype = ctx.dtype(0)
    if data is None or not indices:
        return Fact(None, dtype)
    depth = indices[-1].const
    batch = ctx.int_attr("batch_dims", 0)
    if depth is None:
        return Fact(None, dtype)
    return Fact((*indices[:-1], *data[batch + depth :]), dtype)


@rule("ReverseSequence")
def _reverse_sequence(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype(0))


@rule("NonZero")
def _non_zero(ctx: Context) -> Fact:
    flags = if_known(_known_flags, ctx.content(0))
    if flags is not None:
        return content_fact(
            dim_array(np.stack(np.nonzero(flags)).astype(object)), ir.DataType.INT64
        )
    rank = rank_of(ctx.shape(0))
    if rank is None:
        return Fact(fresh(2), ir.DataType.INT64)
    # A scalar counts as one axis.
    return Fact((Dim(max(rank, 1)), Dim.fresh()), ir.DataType.INT64)


def _known_flags(content: Content) -> Content | None:
    """Which elements are not 0, of at least one axis; None where one of them is unknown."""
    numbers = integers_of(content) if content.dtype == object else content
    return None if numbers is None else np.atleast_1d(numbers != 0)


@rule("TopK")
def _top_k(ctx: Context) -> list[Fact]:
    shape = ctx.shape(0)
    axis = ctx.axis_attr(rank_of(shape), -1)
    result = fresh(rank_of(shape))
    if shape is not None and axis is not None:
        result = with_dims(shape, axis, _count_of_top(ctx))
    return [Fact(result, ctx.dtype(0)), Fact(result, ir.DataType.INT64)]


def _count_of_top(ctx: Context) -> Dim:
    """How many elements a TopK of any opset keeps."""
    if ctx.opset < 10:
        return Dim(ctx.int_attr("k", 0))
    return (ctx.dims(1) or fresh(1))[0]


@rule("Compress")
def _compress(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    where = ctx.attr("axis")
    if where is None:
        return Fact(fresh(1), ctx.dtype(0))
    axis = axis_in(int(where), rank_of(shape))
    if shape is None or axis is None:
        return Fact(None, ctx.dtype(0))
    return Fact(with_dims(shape, axis, Dim.fresh()), ctx.dtype(0))


@rule("OneHot")
def _one_hot(ctx: Context) -> Fact:
    indices, depth = ctx.shape(0), ctx.dims(1)
    if indices is None:
        return Fact(None, ctx.dtype(2))
    axis = axis_in(ctx.int_attr("axis", -1), len(indices) + 1)
    if axis is None:
        return Fact(None, ctx.dtype(2))
    content = _one_hot_content(ctx, axis)
    if content is not None:
        return content_fact(content, ctx.dtype(2))
    return Fact((*indices[:axis], or_fresh(sole(depth)), *indices[axis:]), ctx.dtype(2))


def _one_hot_content(ctx: Context, axis: int) -> Content | None:
    """The elements of a small OneHot of known indices; None for another one."""
    indices, depth, values = ctx.ints(0), sole(ctx.ints(1)), ctx.dims(2)
    shape = ctx.content(0)
    if indices is None or depth is None or values is None or shape is None or len(values) != 2:
        return None
    if not 0 <= len(indices) * depth <= LIMIT:
        return None
    rows = np.full((len(indices), depth), values[0], dtype=object)
    for row, index in zip(rows, indices, strict=True):
        if -depth <= index < depth:
            row[index] = values[1]
    return np.moveaxis(rows.reshape(*shape.shape, depth), -1, axis)


mover("Gather", form=Picked)
mover("GatherND", form=PickedPoints)
mover("GatherElements", form=PickedElements)
mover("ReverseSequence", form=Reversed)
