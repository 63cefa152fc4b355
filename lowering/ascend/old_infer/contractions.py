"""Matrix products, convolutions, pooling and resizing."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.graph import UNKNOWN
from fa_compiler.lowering.ascend.old_infer.rules import (
    Fact,
    InferenceError,
    OpFacts,
    broadcast,
    common_size,
    rule,
    sizes_agree,
)


@rule("MatMulV2", "BatchMatMulV2", "MatMul", "BatchMatMul")
def _matmul(call: OpFacts) -> Sequence[Fact]:
    left, right = call.x("x1"), call.x("x2")
    batched = call.op.type.startswith("Batch")
    flips = [call.attr(name) for name in (("adj_x1", "adj_x2") if batched else ("transpose_x1", "transpose_x2"))]
    if left.dtype and right.dtype and left.dtype != right.dtype:
        raise InferenceError(f"x1 is {left.dtype} and x2 {right.dtype}")
    if left.shape is None or right.shape is None:
        return [left.with_shape(None)]
    if min(len(left.shape), len(right.shape)) < 2 or (not batched and (len(left.shape), len(right.shape)) != (2, 2)):
        raise InferenceError(f"{call.op.type} takes no tensors of ranks {len(left.shape)} and {len(right.shape)}")
    rows, inner = left.shape[-2:] if not flips[0] else left.shape[:-3:-1]
    other, columns = right.shape[-2:] if not flips[1] else right.shape[:-3:-1]
    if not sizes_agree(inner, other):
        raise InferenceError(f"x1 {list(left.shape)} and x2 {list(right.shape)} share no axis: {inner} and {other}")
    bias = call.x("bias").shape
    if bias is not None and not sizes_agree(bias[-1] if bias else 1, columns):
        raise InferenceError(f"its bias has the shape {list(bias)}, its result {columns} columns")
    batch = broadcast(left.shape[:-2], right.shape[:-2]) or ()
    return [left.with_shape((*batch, rows, columns))]


def window(size: int, kernel: int, stride: int, before: int, after: int, dilation: int = 1) -> int:
    """The number of windows along an axis. Raises InferenceError if no window fits."""
    if UNKNOWN in (size, kernel):
        return UNKNOWN
    count = (size + before + after - (kernel - 1) * dilation - 1) // stride + 1
    if count < 1:
        raise InferenceError(f"a window of {kernel} does not fit an axis of {size}")
    return count


@rule("Conv2D", "Conv3DV2")
def _conv(call: OpFacts) -> Sequence[Fact]:
    """The axes are NCHW or NCDHW. The pads are a pair (beginning, end) for each axis."""
    x, weight = call.x(), call.x("filter")
    strides, pads, dilations = (list(call.attr(name)) for name in ("strides", "pads", "dilations"))
    groups = call.attr("groups")
    if x.shape is None or weight.shape is None or call.attr("data_format") not in ("NCHW", "NCDHW"):
        return [x.with_shape(None)]
    spatial = len(x.shape) - 2
    ranks = {len(x.shape), len(weight.shape), len(strides), len(dilations)}
    if len(ranks) > 1 or spatial < 1 or len(pads) != 2 * spatial:
        raise InferenceError(
            f"x has rank {len(x.shape)}, filter {len(weight.shape)}, strides {len(strides)}, pads {len(pads)}"
        )
    if min(strides, default=1) < 1:
        raise InferenceError(f"the strides are {strides}")
    common_size(x.shape[1], UNKNOWN if weight.shape[1] < 0 else weight.shape[1] * groups)
    sizes = [
        window(x.shape[2 + n], weight.shape[2 + n], strides[2 + n], pads[2 * n], pads[2 * n + 1], dilations[2 + n])
        for n in range(spatial)
    ]
    return [x.with_shape((x.shape[0], weight.shape[0], *sizes))]


@rule("AvgPoolV2", "MaxPoolV3")
def _pool(call: OpFacts) -> Sequence[Fact]:
    x = call.x()
    ksize, strides, pads = (list(call.attr(name)) for name in ("ksize", "strides", "pads"))
    plain = call.attr("padding_mode") == "CALCULATED" and call.attr("data_format") == "NCHW"
    if x.shape is None or not plain or call.attr("global_pooling") or call.attr("ceil_mode"):
        return [x.with_shape(None)]
    if len(x.shape) != 4 or len(ksize) != 4 or len(strides) != 4 or len(pads) != 4 or min(strides) < 1:
        raise InferenceError(f"x has rank {len(x.shape)}, ksize {ksize}, strides {strides}, pads {pads}")
    sizes = [window(x.shape[2 + n], ksize[2 + n], strides[2 + n], pads[2 * n], pads[2 * n + 1]) for n in range(2)]
    return [x.with_shape((*x.shape[:2], *sizes))]


@rule("Resize")
def _resize(call: OpFacts) -> Sequence[Fact]:
    x, sizes = call.x(), call.ints("sizes")
    if x.shape is None:
        return [x.with_shape(None)]
    if sizes is not None and len(sizes) == len(x.shape):
        return [x.with_shape(tuple(sizes))]
    if sizes is not None:
        raise InferenceError(f"{len(sizes)} sizes do not match {len(x.shape)} axes")
    return [x.with_shape((UNKNOWN,) * len(x.shape))]
