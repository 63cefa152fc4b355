"""Operators that read or write at indices, and operators that give indices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.graph import UNKNOWN
from fa_compiler.lowering.ascend.old_infer.rules import NOTHING, Fact, InferenceError, OpFacts, rule, shapes_agree


@rule("GatherV2")
def _gather(call: OpFacts) -> Sequence[Fact]:
    x, indices, place = call.x(), call.x("indices"), call.integer("axis")
    batch = call.attr("batch_dims")
    if x.shape is None or indices.shape is None or place is None or batch:
        return [x.with_shape(None)]
    axis = call.axis(place, len(x.shape))
    value = None
    if x.value is not None and axis == 0 and indices.value is not None:
        rows = len(x.value)
        places = [None if item is None else int(item) for item in indices.value.reshape(-1).tolist()]
        if any(place is not None and not -rows <= place < rows for place in places):
            raise InferenceError(f"an index of {places} is outside an axis of {rows}")
        picked = [None if place is None else x.value[place] for place in places]
        if x.value.ndim == 1:
            value = np.empty(len(picked), dtype=object)
            value[:] = picked
            value = value.reshape(indices.shape) if UNKNOWN not in indices.shape else None
    return [x.with_shape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), value)]


@rule("GatherElements")
def _gather_elements(call: OpFacts) -> Sequence[Fact]:
    x, index = call.x(), call.x("index")
    if x.shape is not None and index.shape is not None and len(x.shape) != len(index.shape):
        raise InferenceError(f"x has rank {len(x.shape)}, index {len(index.shape)}")
    return [x.with_shape(index.shape)]


@rule("GatherNd")
def _gather_nd(call: OpFacts) -> Sequence[Fact]:
    x, indices = call.x(), call.x("indices")
    if x.shape is None or not indices.shape or indices.shape[-1] < 0:
        return [x.with_shape(None)]
    depth = indices.shape[-1]
    if depth > len(x.shape):
        raise InferenceError(f"{depth} indices do not match {len(x.shape)} axes")
    return [x.with_shape((*indices.shape[:-1], *x.shape[depth:]))]


@rule(
    *("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub"),
    "ScatterElements",
)
def _scatter(call: OpFacts) -> Sequence[Fact]:
    first = call.inputs.get("x") or call.inputs.get("data") or NOTHING
    updates = call.x("updates")
    if updates.dtype and first.dtype and updates.dtype != first.dtype:
        raise InferenceError(f"its updates are {updates.dtype}, the tensor {first.dtype}")
    return [first.with_shape(first.shape)]


@rule("OneHot")
def _one_hot(call: OpFacts) -> Sequence[Fact]:
    x, depth, dtype = call.x(), call.integer("depth"), call.x("on_value").dtype
    if x.shape is None:
        return [Fact(dtype)]
    rank = len(x.shape) + 1
    axis = call.axis(call.attr("axis"), rank)
    return [Fact(dtype, (*x.shape[:axis], UNKNOWN if depth is None else depth, *x.shape[axis:]))]


@rule("NonZero")
def _non_zero(call: OpFacts) -> Sequence[Fact]:
    rank = call.x().rank
    rank = UNKNOWN if rank is None else rank
    return [Fact(str(call.attr("dtype")), (rank, UNKNOWN) if call.attr("transpose") else (UNKNOWN, rank))]


@rule("UnsortedSegmentSum")
def _segment_sum(call: OpFacts) -> Sequence[Fact]:
    x, ids, count = call.x(), call.x("segment_ids"), call.integer("num_segments")
    if x.shape is None or ids.shape is None:
        return [x.with_shape(None)]
    if not shapes_agree(x.shape[: len(ids.shape)], ids.shape):
        raise InferenceError(f"segment_ids have the shape {list(ids.shape)}, x {list(x.shape)}")
    return [x.with_shape((UNKNOWN if count is None else count, *x.shape[len(ids.shape) :]))]
