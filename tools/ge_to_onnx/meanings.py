"""Operators whose types and shapes are not inferred from their meaning: the registry's operators for and around
attention, and a few with a rule in `infer/own.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fa_compiler.lowering.ascend.convert.backward import HANDLERS as INFERRED
from fa_compiler.lowering.ascend.convert.backward.elementwise import INTEGERS
from fa_compiler.lowering.ascend.convert.backward.fused import registered
from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.op_registry import attention_names
from tools.ge_to_onnx.call import DeclaredCall

Handler = Callable[[DeclaredCall], "str | Sequence[str]"]
HANDLERS: dict[str, Handler] = {**INFERRED, **dict.fromkeys(attention_names(), registered)}
"""The meaning of every operator that has one."""


def _handles(*op_types: str) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(op_types, handler))
        return handler

    return enter


@_handles("Cast")
def _cast(call: DeclaredCall) -> str:
    dtype = call.type_attr("dst_type")
    if dtype != call.out().dtype:
        raise UnreadableError(f"Cast '{call.op.name}' to {dtype} declares {call.out().dtype}")
    return call.cast(call.x("x"), dtype)


@_handles("RealDiv")
def _real_div(call: DeclaredCall) -> str:
    """Only of floats: the quotient of integers would be a fraction."""
    if call.dtype("x1") in INTEGERS:
        raise UnreadableError(f"RealDiv '{call.op.name}' of integers: ONNX divides them towards zero")
    return call.node("Div", call.x("x1"), call.x("x2"))


@_handles("GeluV2")
def _gelu(call: DeclaredCall) -> str:
    call.only("approximate", "none", "tanh")
    return call.node("Gelu", call.x("x"), approximate=call.attr("approximate"))


@_handles("SplitV")
def _split_v(call: DeclaredCall) -> Sequence[str]:
    count = call.attr("num_split")
    sizes = call.cast(call.x("size_splits"), "DT_INT64")
    axis = int(call.constant("split_dim").reshape(()))
    return call.nodes("Split", call.x("x"), sizes, count=count, axis=axis)


@_handles("SoftmaxV2", "LogSoftmaxV2")
def _softmax(call: DeclaredCall) -> str:
    axes = call.attr("axes")
    if len(axes) != 1:
        raise UnreadableError(f"{call.op.type} '{call.op.name}' runs over {len(axes)} axes at once")
    if call.op.type == "SoftmaxV2":
        return call.node("Softmax", call.x("x"), axis=axes[0])
    return call.node("LogSoftmax", call.x("logits"), axis=axes[0])


@_handles("LayerNorm")
def _layer_norm(call: DeclaredCall) -> Sequence[str]:
    """gamma (x - mean) / sqrt(variance + epsilon) + beta.

    The mean and the variance are over the axes from begin_norm_axis on. gamma and beta have the axes from
    begin_params_axis on. The third output is the variance.
    """
    x, rank = call.x("x"), call.rank("x")
    axes = call.ints(list(range(rank - _normalised_axes(call), rank)))
    mean = call.node("ReduceMean", x, axes)
    centred = call.node("Sub", x, mean)
    variance = call.node("ReduceMean", call.node("Mul", centred, centred), axes)
    rate = _rate(call, variance, call.dtype("x"))
    y = call.node("Add", call.node("Mul", call.node("Mul", centred, rate), call.x("gamma")), call.x("beta"))
    return y, call.cast(mean, call.out(1).dtype), call.cast(variance, call.out(2).dtype)


def _rate(call: DeclaredCall, square: str, dtype: str) -> str:
    """1 / sqrt(square + epsilon)."""
    floor = call.node("Add", square, call.array(call.attr("epsilon"), dtype))
    return call.node("Reciprocal", call.node("Sqrt", floor))


@_handles("LayerNormV3")
def _layer_norm_v3(call: DeclaredCall) -> Sequence[str]:
    """The same in float32. The third output is the reciprocal of the root."""
    count, wide = _normalised_axes(call), call.cast(call.x("x"), "DT_FLOAT")
    y, mean, rate = _centred(call, wide, call.rank("x"), count, call.dtype("x"))
    return y, call.cast(mean, call.out(1).dtype), call.cast(rate, call.out(2).dtype)


def _normalised_axes(call: DeclaredCall) -> int:
    """The number of axes that begin_norm_axis names. gamma and beta have those that begin_params_axis names."""
    begin, params, rank = int(call.attr("begin_norm_axis")), call.attr("begin_params_axis"), call.rank("x")
    if call.rank("gamma") != rank - params % rank or call.rank("beta") != rank - params % rank:
        raise UnreadableError(f"{call.op.type} '{call.op.name}': gamma and beta do not have the axes from {params} on")
    return rank - begin % rank


@_handles("LayerNormV4")
def _layer_norm_v4(call: DeclaredCall) -> Sequence[str]:
    """The same over as many of the last axes as normalized_shape has numbers."""
    shape = call.shape("normalized_shape")
    count = -1 if shape is None else next(iter(shape), 1)
    if count < 0:
        raise UnreadableError(f"operator '{call.op.name}': the number of normalised axes is not known")
    return _centred(call, call.cast(call.x("x"), "DT_FLOAT"), call.rank("x"), count, call.dtype("x"))


@_handles("AddLayerNorm")
def _add_layer_norm(call: DeclaredCall) -> Sequence[str]:
    """The same for the sum of x1, x2 and bias, which is a result, too."""
    one, other = (call.dtype(name) for name in ("x1", "x2"))
    dtype = one if one == other else "DT_FLOAT"
    call.attr("additional_output")  # it only tells whether the sum is written
    total = call.node("Add", *(call.cast(call.x(name), "DT_FLOAT") for name in ("x1", "x2")))
    if call.has("bias"):
        total = call.node("Add", total, call.cast(call.x("bias"), "DT_FLOAT"))
    return *_centred(call, total, call.rank("x1"), call.rank("gamma"), dtype), call.cast(total, dtype)


def _centred(call: DeclaredCall, x: str, rank: int, count: int, dtype: str) -> tuple[str, str, str]:
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


@_handles("RmsNorm", "GemmaRmsNorm")
def _rms_norm(call: DeclaredCall) -> Sequence[str]:
    """gamma x / sqrt(mean(x^2) + epsilon). The mean is over gamma's axes, which are the last ones. GemmaRmsNorm has
    gamma plus one in place of gamma. The one is added in float32."""
    more = 1.0 if call.op.type == "GemmaRmsNorm" else 0.0
    return _normalised(call, call.x("x"), call.rank("x"), call.dtype("x"), more)


@_handles("AddRmsNorm")
def _add_rms_norm(call: DeclaredCall) -> Sequence[str]:
    """The same for the sum of x1 and x2, which has their type and is a result, too."""
    total = call.node("Add", call.x("x1"), call.x("x2"))
    return *_normalised(call, total, call.rank("x1"), call.dtype("x1")), total


def _normalised(call: DeclaredCall, x: str, rank: int, dtype: str, more: float = 0.0) -> tuple[str, str]:
    """What RmsNorm gives of a tensor of this rank and type, with a number added to its weight."""
    axes = call.ints(list(range(rank - call.rank("gamma"), rank)))
    wide = call.cast(x, "DT_FLOAT")
    mean = call.node("ReduceMean", call.node("Mul", wide, wide), axes)
    rate = _rate(call, mean, "DT_FLOAT")
    gamma = call.cast(call.x("gamma"), "DT_FLOAT")
    gamma = call.node("Add", gamma, call.array(more, "DT_FLOAT")) if more else gamma
    return call.cast(call.node("Mul", call.node("Mul", wide, rate), gamma), dtype), rate


@_handles("RotaryPositionEmbedding")
def _rotary(call: DeclaredCall) -> str:
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


def _pairs(call: DeclaredCall, x: str) -> tuple[str, str]:
    """The elements of even and of odd places along the last axis."""
    end, last, two = call.ints([np.iinfo(np.int64).max]), call.ints([-1]), call.ints([2])
    even, odd = (call.node("Slice", x, call.ints([first]), end, last, two) for first in (0, 1))
    return even, odd


@_handles("ApplyRotaryPosEmb")
def _rotary_pair(call: DeclaredCall) -> Sequence[str]:
    """x cos + r(x) sin of query and key. r(x) is (-x2, x1) of the halves of x along its last axis."""
    call.only("rotary_mode", "half")
    return [_rotated(call, call.x(name), "cos", "sin") for name in ("query", "key")]


@_handles("RotaryMul")
def _rotary_mul(call: DeclaredCall) -> str:
    """The same of one tensor."""
    return _rotated(call, call.x("x"), "r1", "r2")


@_handles("InterleaveRope")
def _interleave_rope(call: DeclaredCall) -> str:
    """The same in float32, of the elements of even and of odd places of x as its halves."""
    even, odd = (call.cast(part, "DT_FLOAT") for part in _pairs(call, call.x("x")))
    cos, sin = (call.cast(call.x(name), "DT_FLOAT") for name in ("cos", "sin"))
    kept = call.node("Mul", call.node("Concat", even, odd, axis=-1), cos)
    turned = call.node("Mul", call.node("Concat", call.node("Neg", odd), even, axis=-1), sin)
    return call.cast(call.node("Add", kept, turned), call.dtype("x"))


def _rotated(call: DeclaredCall, x: str, cos: str, sin: str) -> str:
    """x cos + r(x) sin, where cos and sin are inputs of these names."""
    first, second = call.nodes("Split", x, count=2, axis=-1, num_outputs=2)
    turned = call.node("Concat", call.node("Neg", second), first, axis=-1)
    return call.node("Add", call.node("Mul", x, call.x(cos)), call.node("Mul", turned, call.x(sin)))


@_handles("SwiGlu")
def _swi_glu(call: DeclaredCall) -> str:
    """a / (1 + exp(-a)) b, where a and b are the halves of x along the axis dim. It is computed in float32."""
    dtype = call.dtype("x")
    wide = call.cast(call.x("x"), "DT_FLOAT")
    gate, up = call.nodes("Split", wide, count=2, axis=call.attr("dim"), num_outputs=2)
    return call.cast(call.node("Mul", call.node("Mul", gate, call.node("Sigmoid", gate)), up), dtype)


@_handles("GeGluV2")
def _ge_glu(call: DeclaredCall) -> Sequence[str]:
    """a Gelu(b), or Gelu(a) b if activate_left, where a and b are the halves of x along the axis dim. Gelu has the type
    of x."""
    first, second = call.nodes("Split", call.x("x"), count=2, axis=call.attr("dim"), num_outputs=2)
    gate, up = (first, second) if call.attr("activate_left") else (second, first)
    gelu = call.node("Gelu", gate, approximate="tanh" if call.attr("approximate") else "none")
    return call.node("Mul", gelu, up), gelu


@_handles("ClippedSwiglu")
def _clipped_swiglu(call: DeclaredCall) -> str:
    """g / (1 + exp(-alpha g)) (u + bias), where g is at most the limit, and u between it and its negative. They are the
    elements of even and of odd places along the last axis, or the halves along dim. It is computed in float32."""
    if call.has("group_index"):
        raise UnreadableError(f"operator '{call.op.name}': groups of rows have no meaning in ONNX here")
    dtype, dim, wide = call.dtype("x"), call.attr("dim"), call.cast(call.x("x"), "DT_FLOAT")
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


@_handles("LayerNormGradV3")
def _layer_norm_grad(call: DeclaredCall) -> Sequence[str]:
    """With n = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) - n mean(g n)), with means over gamma's axes.

    dgamma and dbeta are the sums of dy n and of dy over the other axes.
    """
    dy, rank, inner = call.x("dy"), call.rank("x"), call.rank("gamma")
    axes, others = call.ints(list(range(rank - inner, rank))), call.ints(list(range(rank - inner)))
    normal = call.node("Mul", call.node("Sub", call.x("x"), call.x("mean")), call.x("rstd"))
    g = call.node("Mul", dy, call.x("gamma"))
    shift = call.node("Mul", normal, call.node("ReduceMean", call.node("Mul", g, normal), axes))
    dx = call.node(
        "Mul", call.x("rstd"), call.node("Sub", call.node("Sub", g, call.node("ReduceMean", g, axes)), shift)
    )
    dgamma = call.node("ReduceSum", call.node("Mul", dy, normal), others, keepdims=0)
    return dx, dgamma, call.node("ReduceSum", dy, others, keepdims=0)
