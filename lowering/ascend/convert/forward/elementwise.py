"""Elementwise operators whose GE counterpart depends on types, attributes or the number of
inputs."""

from __future__ import annotations

from functools import reduce

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import MICROSOFT, OnnxCall, handles
from fa_compiler.lowering.ascend.dtypes import attr_number
from fa_compiler.op_registry.dtypes import from_onnx

_FLOATS = ("DT_FLOAT", "DT_FLOAT16", "DT_BF16", "DT_DOUBLE")


@handles("Cast")
def _cast(call: OnnxCall) -> Tensor:
    dtype = from_onnx(call.integer("to", 0))
    if dtype is None:
        raise CannotMapError(f"GE has no type with ONNX's number {call.integer('to', 0)}")
    return _cast_to(call, dtype)


@handles("CastLike")
def _cast_like(call: OnnxCall) -> Tensor:
    return _cast_to(call, call.x(1).dtype)


def _cast_to(call: OnnxCall, dtype: str) -> Tensor:
    """GE's Cast has no attribute for numbers that float8 cannot hold, so only ONNX's default is
    accepted."""
    if not call.integer("saturate", 1) and "FLOAT8" in dtype:
        raise CannotMapError(
            "it turns numbers that float8 cannot hold into infinity or NaN",
            "cast with saturate = 1",
        )
    return call.emitter.op(
        "Cast", call.x(), dst_type=attr_number(dtype), out=call.x().with_dtype(dtype)
    )


@handles("Identity")
def _identity(call: OnnxCall) -> Tensor:
    return call.x()


@handles("Dropout")
def _dropout(call: OnnxCall) -> Tensor:
    """Only a Dropout that does nothing is accepted, and only if its mask is not read.

    An input switches training on; before opset 7, a missing is_test does. In training, a ratio of 0
    drops nothing.
    """
    ratio = call.array(1)
    keeps_all = ratio is not None and not ratio.any()
    training = (
        call.array(2)
        if call.has(2)
        else np.array(call.opset < 7 and not call.integer("is_test", 0))
    )
    if not keeps_all and (training is None or training.any()):
        raise CannotMapError(
            "it drops values while the model runs", "export for inference (model.eval())"
        )
    if call.wanted(1):
        raise CannotMapError("its mask is read", "export for inference (model.eval())")
    return call.x()


@handles("Div")
def _div(call: OnnxCall) -> Tensor:
    """The quotient of integers is rounded towards zero, as in ONNX Runtime."""
    return call.emitter.op(
        "RealDiv" if call.x().dtype in _FLOATS else "TruncateDiv", *call.inputs, out=call.out()
    )


@handles("Mod")
def _mod(call: OnnxCall) -> Tensor:
    """The result has the sign of the divisor with fmod 0, and that of the dividend with fmod 1, as
    GE's Mod.

    GE's FloorMod, for fmod 0, does not take small integer types.
    """
    if call.integer("fmod", 0):
        return call.emitter.op("Mod", *call.inputs, out=call.out())
    if call.x().dtype in ("DT_INT8", "DT_INT16", "DT_UINT8", "DT_UINT16"):
        wide = [call.cast(x, "DT_INT32") for x in call.present()]
        return call.cast(call.binary("FloorMod", wide[0], wide[1]), call.x().dtype)
    return call.emitter.op("FloorMod", *call.inputs, out=call.out())


@handles("Pow")
def _pow(call: OnnxCall) -> Tensor:
    """The exponent may have another type; the result has the type of the base."""
    base, exponent = call.x(0), call.x(1)
    number = call.array(1)
    if (
        number is not None
        and number.size == 1
        and float(number.reshape(())) == 2
        and number.ndim <= base.rank
    ):
        return (
            call.unary("Square", base)
            if base.dtype in (*_FLOATS, "DT_INT32", "DT_INT64")
            else _power(call)
        )
    if base.dtype not in _FLOATS and exponent.dtype in _FLOATS:
        raise CannotMapError("an integer to the power of a fraction", "cast the base to float32")
    return _power(call)


def _power(call: OnnxCall) -> Tensor:
    return call.emitter.op("Pow", call.x(0), call.cast(call.x(1), call.x(0).dtype), out=call.out())


@handles("Xor")
def _xor(call: OnnxCall) -> Tensor:
    """(a or b) and not (a and b)."""
    a, b = call.x(0), call.x(1)
    both = call.unary("LogicalNot", call.binary("LogicalAnd", a, b))
    return call.binary("LogicalAnd", call.binary("LogicalOr", a, b), both)


@handles("Min", "Max")
def _extremum(call: OnnxCall) -> Tensor:
    op_type = "Minimum" if call.node.op_type == "Min" else "Maximum"
    return reduce(lambda a, b: call.binary(op_type, a, b), call.present())


@handles("Sum")
def _sum(call: OnnxCall) -> Tensor:
    """AddN if all shapes are equal, because it does not broadcast; otherwise a chain of Add."""
    return _added(call, call.present())


@handles("Mean")
def _mean(call: OnnxCall) -> Tensor:
    inputs = call.present()
    return call.binary("RealDiv", _added(call, inputs), call.like(len(inputs), inputs[0]))


def _added(call: OnnxCall, inputs: list[Tensor]) -> Tensor:
    if len(inputs) == 1:
        return inputs[0]
    shapes = {call.dims(index) for index in range(len(inputs))}
    if len(inputs) > 2 and len(shapes) == 1 and None not in shapes:
        return call.emitter.op("AddN", inputs, N=len(inputs), out=call.out())
    return reduce(lambda a, b: call.binary("Add", a, b), inputs)


@handles("Clip")
def _clip(call: OnnxCall) -> Tensor:
    """The bounds are attributes before opset 11, and scalars since. The upper one wins if the lower
    one is greater."""
    x = call.x()
    low = call.like(call.number("min", 0.0), x) if "min" in call.node.attributes else None
    high = call.like(call.number("max", 0.0), x) if "max" in call.node.attributes else None
    low = call.x(1) if call.has(1) else low
    high = call.x(2) if call.has(2) else high
    if low is not None:
        x = call.emitter.op("Maximum", x, low, out=x)
    if high is not None:
        x = call.emitter.op("Minimum", x, high, out=x)
    return x


@handles("IsInf")
def _is_inf(call: OnnxCall) -> Tensor:
    x = call.x()
    infinite = call.emitter.op("IsInf", x, out=call.out())
    positive, negative = (
        bool(call.integer("detect_positive", 1)),
        bool(call.integer("detect_negative", 1)),
    )
    if positive and negative:
        return infinite
    if not positive and not negative:
        return call.emitter.op(
            "LogicalAnd", infinite, call.emitter.const(False, "DT_BOOL"), out=call.out()
        )
    sign = call.emitter.op("Greater" if positive else "Less", x, call.like(0, x), out=call.out())
    return call.emitter.op("LogicalAnd", infinite, sign, out=call.out())


@handles("Gelu")
@handles("Gelu", domain=MICROSOFT)
def _gelu(call: OnnxCall) -> Tensor:
    return call.emitter.op(
        "GeluV2", call.x(), approximate=call.text("approximate", "none"), out=call.out()
    )


@handles("BiasGelu", "FastGelu", domain=MICROSOFT)
def _bias_gelu(call: OnnxCall) -> Tensor:
    """FastGelu may have no bias."""
    x = call.binary("Add", call.x(0), call.x(1)) if call.has(1) else call.x()
    return call.unary(
        "GeluV2", x, approximate="tanh" if call.node.op_type == "FastGelu" else "none"
    )


@handles("Swish")
@handles("QuickGelu", domain=MICROSOFT)
def _swish(call: OnnxCall) -> Tensor:
    """x * sigmoid(alpha * x)."""
    alpha = call.number("alpha", 1.0 if call.node.op_type == "Swish" else 1.702)
    return call.unary("Swish", call.x(), scale=alpha)


@handles("Elu")
def _elu(call: OnnxCall) -> Tensor:
    return call.unary("Elu", call.x(), alpha=call.number("alpha", 1.0))


@handles("Selu")
def _selu(call: OnnxCall) -> Tensor:
    """gamma x, or gamma alpha (exp(x) - 1) below 0. GE's Selu has fixed numbers."""
    x = call.x()
    alpha, gamma = (
        call.number("alpha", 1.67326319217681884765625),
        call.number("gamma", 1.05070102214813232421875),
    )
    return call.binary("Mul", call.unary("Elu", x, alpha=alpha), call.like(gamma, x))


@handles("LeakyRelu")
def _leaky_relu(call: OnnxCall) -> Tensor:
    return call.unary("LeakyRelu", call.x(), negative_slope=call.number("alpha", 0.01))


@handles("HardSigmoid")
def _hard_sigmoid(call: OnnxCall) -> Tensor:
    alpha, beta = call.number("alpha", 0.2), call.number("beta", 0.5)
    return call.unary("HardSigmoid", call.x(), alpha=alpha, beta=beta)


@handles("PRelu")
def _prelu(call: OnnxCall) -> Tensor:
    """GE's PRelu takes the slopes as a vector of channels.

    Since opset 7 ONNX broadcasts slopes of any shape. Before, a vector of more than one slope is
    for the channels.
    """
    x, slope = call.x(0), call.x(1)
    if call.opset < 7 and slope.rank == 1 and slope.shape != (1,):
        slope = call.unsqueeze(slope, range(1, x.rank - 1))
    below = call.binary("Less", x, call.like(0, x), "DT_BOOL")
    return call.emitter.op("SelectV2", below, call.binary("Mul", x, slope), x, out=call.out())
