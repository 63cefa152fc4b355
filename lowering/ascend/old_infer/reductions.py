"""Operators that reduce, normalise or sort along axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.graph import UNKNOWN
from fa_compiler.lowering.ascend.old_infer.rules import (
    Fact,
    InferenceError,
    OpFacts,
    Shape,
    product,
    rule,
    shapes_agree,
)

_NO_SWITCH = ("ReduceAny", "ReduceAll")


@rule(
    *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSumExp", "ReduceLogSum"),
    *("ReduceAny", "ReduceAll", "EuclideanNorm"),
)
def _reduce(call: OpFacts) -> Sequence[Fact]:
    """Empty axes stand for all axes, or for none with noop_with_empty_axes."""
    x, axes, keep = call.x(), call.ints("axes"), call.attr("keep_dims")
    if x.shape is None or axes is None:
        return [x.with_shape((UNKNOWN,) * len(x.shape) if keep and x.shape is not None else None)]
    if not axes:
        if call.op.type not in _NO_SWITCH and call.attr("noop_with_empty_axes"):
            return [x]
        axes = list(range(len(x.shape)))
    gone = {call.axis(axis, len(x.shape)) for axis in axes}
    if keep:
        shape = tuple(1 if axis in gone else size for axis, size in enumerate(x.shape))
    else:
        shape = tuple(size for axis, size in enumerate(x.shape) if axis not in gone)
    value = None
    if call.op.type == "ReduceProd" and x.value is not None and len(gone) == len(x.shape):
        total = product([UNKNOWN if item is None else int(item) for item in x.value.flat])
        value = np.full(shape, None if total == UNKNOWN else total, dtype=object)
    return [x.with_shape(shape, value)]


@rule("SoftmaxV2", "LogSoftmaxV2")
def _softmax(call: OpFacts) -> Sequence[Fact]:
    x = next(iter(call.inputs.values()))
    if x.shape is not None:
        for axis in call.attr("axes"):
            call.axis(axis, len(x.shape))
    return [x.with_shape(x.shape)]


@rule("LayerNorm", "LayerNormV3")
def _layer_norm(call: OpFacts) -> Sequence[Fact]:
    """Both weights have the shape of the normalised axes. The type of the statistics is not inferred."""
    x = call.x()
    if x.shape is None:
        return [x, Fact(""), Fact("")]
    axis = call.axis(call.attr("begin_norm_axis"), len(x.shape), "begin_norm_axis")
    for name in ("gamma", "beta"):
        if not shapes_agree(call.x(name).shape, x.shape[axis:]):
            shape = list(call.x(name).shape or ())
            raise InferenceError(f"{name} has the shape {shape}, the normalised axes are {list(x.shape[axis:])}")
    statistics = (*x.shape[:axis], *(1,) * (len(x.shape) - axis))
    return [x, Fact("", statistics), Fact("", statistics)]


@rule("LayerNormGradV3")
def _layer_norm_gradient(call: OpFacts) -> Sequence[Fact]:
    gamma = call.x("gamma").shape
    return [call.x().with_shape(call.x().shape), Fact("DT_FLOAT", gamma), Fact("DT_FLOAT", gamma)]


@rule("RmsNorm")
def _rms_norm(call: OpFacts) -> Sequence[Fact]:
    x, gamma = call.x(), call.x("gamma")
    if x.shape is None or gamma.shape is None:
        return [x, Fact("DT_FLOAT")]
    axis = len(x.shape) - len(gamma.shape)
    if axis < 0 or not shapes_agree(x.shape[axis:], gamma.shape):
        raise InferenceError(f"gamma has the shape {list(gamma.shape)}, x {list(x.shape)}")
    return [x, Fact("DT_FLOAT", (*x.shape[:axis], *(1,) * len(gamma.shape)))]


@rule("ArgMaxV2", "ArgMin", "ArgMax")
def _arg_extremum(call: OpFacts) -> Sequence[Fact]:
    x, place, dtype = call.x(), call.integer("dimension"), str(call.attr("dtype"))
    if x.shape is None or place is None:
        return [Fact(dtype)]
    axis = call.axis(place, len(x.shape), "dimension")
    return [Fact(dtype, x.shape[:axis] + x.shape[axis + 1 :])]


@rule("TopK")
def _top_k(call: OpFacts) -> Sequence[Fact]:
    x, k = call.x(), call.integer("k")
    if x.shape is None:
        return [x.with_shape(None), Fact("DT_INT32")]
    axis = call.axis(call.attr("dim"), len(x.shape), "dim")
    count = UNKNOWN if k is None else k
    if count > x.shape[axis] >= 0:
        raise InferenceError(f"an axis of {x.shape[axis]} has no {count} largest elements")
    shape: Shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    return [x.with_shape(shape), Fact("DT_INT32", shape)]
