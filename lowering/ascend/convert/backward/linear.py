"""Products of matrices, softmax and normalisations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


def _operand(call: GeCall, name: str, adjoint: bool) -> str:
    if not adjoint:
        return call.x(name)
    rank = call.rank(name)
    return call.node("Transpose", call.x(name), perm=[*range(rank - 2), rank - 1, rank - 2])


@handles("MatMulV2")
def _matmul(call: GeCall) -> str:
    """The product of two matrices, plus a bias with one element for each column."""
    if (call.rank("x1"), call.rank("x2")) != (2, 2):
        raise UnreadableError(f"MatMulV2 '{call.op.name}' multiplies two matrices")
    product = call.node(
        "MatMul", _operand(call, "x1", call.attr("transpose_x1")), _operand(call, "x2", call.attr("transpose_x2"))
    )
    if not call.has("bias"):
        return product
    if call.rank("bias") != 1:
        raise UnreadableError(f"the bias of MatMulV2 '{call.op.name}' is a vector")
    return call.node("Add", product, call.x("bias"))


@handles("BatchMatMulV2")
def _batch_matmul(call: GeCall) -> str:
    product = call.node("MatMul", _operand(call, "x1", call.attr("adj_x1")), _operand(call, "x2", call.attr("adj_x2")))
    return call.node("Add", product, call.x("bias")) if call.has("bias") else product


@handles("SoftmaxV2", "LogSoftmaxV2")
def _softmax(call: GeCall) -> str:
    axes = call.attr("axes")
    if len(axes) != 1:
        raise UnreadableError(f"{call.op.type} '{call.op.name}' runs over {len(axes)} axes at once")
    if call.op.type == "SoftmaxV2":
        return call.node("Softmax", call.x("x"), axis=axes[0])
    return call.node("LogSoftmax", call.x("logits"), axis=axes[0])


@handles("LayerNorm")
def _layer_norm(call: GeCall) -> Sequence[str]:
    """gamma (x - mean) / sqrt(variance + epsilon) + beta.

    The mean and the variance are over the axes from begin_norm_axis on. gamma and beta have the axes from
    begin_params_axis on. The third output is the variance.
    """
    x, rank = call.x("x"), call.rank("x")
    axes = call.ints(list(range(rank - _normalised_axes(call), rank)))
    mean = call.node("ReduceMean", x, axes)
    centred = call.node("Sub", x, mean)
    variance = call.node("ReduceMean", call.node("Mul", centred, centred), axes)
    rate = _rate(call, variance, call.desc("x").dtype)
    y = call.node("Add", call.node("Mul", call.node("Mul", centred, rate), call.x("gamma")), call.x("beta"))
    return y, call.cast(mean, call.out(1).dtype), call.cast(variance, call.out(2).dtype)


def _rate(call: GeCall, square: str, dtype: str) -> str:
    """1 / sqrt(square + epsilon)."""
    floor = call.node("Add", square, call.array(call.attr("epsilon"), dtype))
    return call.node("Reciprocal", call.node("Sqrt", floor))


@handles("LayerNormV3")
def _layer_norm_v3(call: GeCall) -> Sequence[str]:
    """The same in float32. The third output is the reciprocal of the root."""
    count, wide = _normalised_axes(call), call.cast(call.x("x"), "DT_FLOAT")
    y, mean, rate = _centred(call, wide, call.rank("x"), count, call.desc("x").dtype)
    return y, call.cast(mean, call.out(1).dtype), call.cast(rate, call.out(2).dtype)


def _normalised_axes(call: GeCall) -> int:
    """The number of axes that begin_norm_axis names. gamma and beta have those that begin_params_axis names."""
    begin, params, rank = int(call.attr("begin_norm_axis")), call.attr("begin_params_axis"), call.rank("x")
    if call.rank("gamma") != rank - params % rank or call.rank("beta") != rank - params % rank:
        raise UnreadableError(f"{call.op.type} '{call.op.name}': gamma and beta do not have the axes from {params} on")
    return rank - begin % rank


@handles("LayerNormV4")
def _layer_norm_v4(call: GeCall) -> Sequence[str]:
    """The same over as many of the last axes as normalized_shape has numbers."""
    shape = call.desc("normalized_shape").shape
    count = -1 if shape is None else next(iter(shape), 1)
    if count < 0:
        raise UnreadableError(f"operator '{call.op.name}': the number of normalised axes is not known")
    return _centred(call, call.cast(call.x("x"), "DT_FLOAT"), call.rank("x"), count, call.desc("x").dtype)


@handles("AddLayerNorm")
def _add_layer_norm(call: GeCall) -> Sequence[str]:
    """The same for the sum of x1, x2 and bias, which is a result, too."""
    one, other = (call.desc(name).dtype for name in ("x1", "x2"))
    dtype = one if one == other else "DT_FLOAT"
    call.attr("additional_output")  # it only tells whether the sum is written
    total = call.node("Add", *(call.cast(call.x(name), "DT_FLOAT") for name in ("x1", "x2")))
    if call.has("bias"):
        total = call.node("Add", total, call.cast(call.x("bias"), "DT_FLOAT"))
    return *_centred(call, total, call.rank("x1"), call.rank("gamma"), dtype), call.cast(total, dtype)


def _centred(call: GeCall, x: str, rank: int, count: int, dtype: str) -> tuple[str, str, str]:
    """What LayerNorm gives of a tensor of float32, over its last `count` axes."""
    axes = call.ints(list(range(rank - count, rank)))
    mean = call.node("ReduceMean", x, axes)
    centred = call.node("Sub", x, mean)
    variance = call.node("ReduceMean", call.node("Mul", centred, centred), axes)
    rate = _rate(call, variance, "DT_FLOAT")
    y = call.node("Mul", centred, rate)
    for op_type, name in (("Mul", "gamma"), ("Add", "beta")):
        if call.has(name):
            y = call.node(op_type, y, call.cast(call.x(name), "DT_FLOAT"))
    return call.cast(y, dtype), mean, rate


@handles("RmsNorm", "GemmaRmsNorm")
def _rms_norm(call: GeCall) -> Sequence[str]:
    """gamma x / sqrt(mean(x^2) + epsilon). The mean is over gamma's axes, which are the last ones. GemmaRmsNorm has
    gamma plus one in place of gamma. The one is added in float32."""
    more = 1.0 if call.op.type == "GemmaRmsNorm" else 0.0
    return _normalised(call, call.x("x"), call.rank("x"), call.desc("x").dtype, more)


@handles("AddRmsNorm")
def _add_rms_norm(call: GeCall) -> Sequence[str]:
    """The same for the sum of x1 and x2, which has their type and is a result, too."""
    total = call.node("Add", call.x("x1"), call.x("x2"))
    return *_normalised(call, total, call.rank("x1"), call.desc("x1").dtype), total


def _normalised(call: GeCall, x: str, rank: int, dtype: str, more: float = 0.0) -> tuple[str, str]:
    """What RmsNorm gives of a tensor of this rank and type, with a number added to its weight."""
    axes = call.ints(list(range(rank - call.rank("gamma"), rank)))
    wide = call.cast(x, "DT_FLOAT")
    mean = call.node("ReduceMean", call.node("Mul", wide, wide), axes)
    rate = _rate(call, mean, "DT_FLOAT")
    gamma = call.cast(call.x("gamma"), "DT_FLOAT")
    gamma = call.node("Add", gamma, call.array(more, "DT_FLOAT")) if more else gamma
    return call.cast(call.node("Mul", call.node("Mul", wide, rate), gamma), dtype), rate


@handles("RotaryPositionEmbedding")
def _rotary(call: GeCall) -> str:
    """x cos + r(x) sin. In mode 0, r(x) is (-x2, x1) of the halves of x along its last axis. In mode 1 the pairs are
    neighbours. In mode 3, x is first sorted into its elements of even and of odd places."""
    call.only("mode", 0, 1, 3)
    if call.has("rotate"):
        raise UnreadableError(f"operator '{call.op.name}': a matrix that rotates has no meaning in ONNX here")
    x, mode = call.x("x"), call.attr("mode")
    if not mode:
        return _rotated(call, x, "cos", "sin")
    even, odd = _pairs(call, x)
    if mode == 3:
        return _rotated(call, call.node("Concat", even, odd, axis=-1), "cos", "sin")
    columns = [call.node("Unsqueeze", part, call.ints([-1])) for part in (call.node("Neg", odd), even)]
    rotated = call.node("Reshape", call.node("Concat", *columns, axis=-1), call.node("Shape", x))
    return call.node("Add", call.node("Mul", x, call.x("cos")), call.node("Mul", rotated, call.x("sin")))


def _pairs(call: GeCall, x: str) -> tuple[str, str]:
    """The elements of even and of odd places along the last axis."""
    end, last, two = call.ints([np.iinfo(np.int64).max]), call.ints([-1]), call.ints([2])
    even, odd = (call.node("Slice", x, call.ints([first]), end, last, two) for first in (0, 1))
    return even, odd


@handles("ApplyRotaryPosEmb")
def _rotary_pair(call: GeCall) -> Sequence[str]:
    """x cos + r(x) sin of query and key. r(x) is (-x2, x1) of the halves of x along its last axis."""
    call.only("rotary_mode", "half")
    return [_rotated(call, call.x(name), "cos", "sin") for name in ("query", "key")]


@handles("RotaryMul")
def _rotary_mul(call: GeCall) -> str:
    """The same of one tensor."""
    return _rotated(call, call.x("x"), "r1", "r2")


@handles("InterleaveRope")
def _interleave_rope(call: GeCall) -> str:
    """The same in float32, of the elements of even and of odd places of x as its halves."""
    even, odd = (call.cast(part, "DT_FLOAT") for part in _pairs(call, call.x("x")))
    cos, sin = (call.cast(call.x(name), "DT_FLOAT") for name in ("cos", "sin"))
    kept = call.node("Mul", call.node("Concat", even, odd, axis=-1), cos)
    turned = call.node("Mul", call.node("Concat", call.node("Neg", odd), even, axis=-1), sin)
    return call.cast(call.node("Add", kept, turned), call.desc("x").dtype)


def _rotated(call: GeCall, x: str, cos: str, sin: str) -> str:
    """x cos + r(x) sin, where cos and sin are inputs of these names."""
    first, second = call.nodes("Split", x, count=2, axis=-1, num_outputs=2)
    turned = call.node("Concat", call.node("Neg", second), first, axis=-1)
    return call.node("Add", call.node("Mul", x, call.x(cos)), call.node("Mul", turned, call.x(sin)))


@handles("SwiGlu")
def _swi_glu(call: GeCall) -> str:
    """a / (1 + exp(-a)) b, where a and b are the halves of x along the axis dim. It is computed in float32."""
    dtype = call.desc("x").dtype
    wide = call.cast(call.x("x"), "DT_FLOAT")
    gate, up = call.nodes("Split", wide, count=2, axis=call.attr("dim"), num_outputs=2)
    return call.cast(call.node("Mul", call.node("Mul", gate, call.node("Sigmoid", gate)), up), dtype)


@handles("GeGluV2")
def _ge_glu(call: GeCall) -> Sequence[str]:
    """a Gelu(b), or Gelu(a) b if activate_left, where a and b are the halves of x along the axis dim. Gelu has the type
    of x."""
    first, second = call.nodes("Split", call.x("x"), count=2, axis=call.attr("dim"), num_outputs=2)
    gate, up = (first, second) if call.attr("activate_left") else (second, first)
    gelu = call.node("Gelu", gate, approximate="tanh" if call.attr("approximate") else "none")
    return call.node("Mul", gelu, up), gelu


@handles("ClippedSwiglu")
def _clipped_swiglu(call: GeCall) -> str:
    """g / (1 + exp(-alpha g)) (u + bias), where g is at most the limit, and u between it and its negative. They are the
    elements of even and of odd places along the last axis, or the halves along dim. It is computed in float32."""
    if call.has("group_index"):
        raise UnreadableError(f"operator '{call.op.name}': groups of rows have no meaning in ONNX here")
    dtype, dim, wide = call.desc("x").dtype, call.attr("dim"), call.cast(call.x("x"), "DT_FLOAT")
    if not call.attr("interleaved"):
        gate, up = call.nodes("Split", wide, count=2, axis=dim, num_outputs=2)
    elif dim in (-1, call.rank("x") - 1):
        gate, up = _pairs(call, wide)
    else:
        raise UnreadableError(f"operator '{call.op.name}': pairs of several axes have no meaning in ONNX here")
    limit, lowest, alpha, bias = (
        call.array(number, "DT_FLOAT")
        for number in (call.attr("limit"), -call.attr("limit"), call.attr("alpha"), call.attr("bias"))
    )
    gate = call.node("Min", gate, limit)
    up = call.node("Max", call.node("Min", up, limit), lowest)
    swish = call.node("Mul", gate, call.node("Sigmoid", call.node("Mul", gate, alpha)))
    return call.cast(call.node("Mul", swish, call.node("Add", up, bias)), dtype)
