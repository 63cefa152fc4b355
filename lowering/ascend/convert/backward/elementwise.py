"""Elementwise operators that ONNX does not have, or that have other attributes in ONNX."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles

INTEGERS = (
    "DT_INT8",
    "DT_INT16",
    "DT_INT32",
    "DT_INT64",
    "DT_UINT8",
    "DT_UINT16",
    "DT_UINT32",
    "DT_UINT64",
)


@handles("TruncateDiv")
def _truncate_div(call: GeCall) -> str:
    if call.dtype("x1") in INTEGERS:
        return call.node("Div", call.x("x1"), call.x("x2"))
    quotient = call.node("Div", call.x("x1"), call.x("x2"))
    return call.node(
        "Mul", call.node("Sign", quotient), call.node("Floor", call.node("Abs", quotient))
    )


@handles("FloorMod")
def _floor_mod(call: GeCall) -> str:
    """x - floor(x / y) y, which has the sign of y."""
    x, y = call.x("x1"), call.x("x2")
    if call.dtype("x1") in INTEGERS:
        return call.node("Mod", x, y, fmod=0)
    return call.node("Sub", x, call.node("Mul", call.node("Floor", call.node("Div", x, y)), y))


@handles("Mod")
def _mod(call: GeCall) -> str:
    """The remainder of a truncating division, as in C."""
    return call.node("Mod", call.x("x1"), call.x("x2"), fmod=1)


@handles("NotEqual")
def _not_equal(call: GeCall) -> str:
    return call.node("Not", call.node("Equal", call.x("x1"), call.x("x2")))


@handles("Square")
def _square(call: GeCall) -> str:
    return call.node("Mul", call.x("x"), call.x("x"))


@handles("Rsqrt")
def _rsqrt(call: GeCall) -> str:
    return call.node("Reciprocal", call.node("Sqrt", call.x("x")))


@handles("AddN")
def _add_n(call: GeCall) -> str:
    return call.node("Sum", *call.counted("x"))


@handles("Swish")
def _swish(call: GeCall) -> str:
    """x sigmoid(scale x)."""
    scale = call.array(call.attr("scale"), call.dtype("x"))
    return call.node("Mul", call.x("x"), call.node("Sigmoid", call.node("Mul", call.x("x"), scale)))


@handles("Elu")
def _elu(call: GeCall) -> str:
    return call.node("Elu", call.x("x"), alpha=call.attr("alpha"))


@handles("LeakyRelu")
def _leaky_relu(call: GeCall) -> str:
    return call.node("LeakyRelu", call.x("x"), alpha=call.attr("negative_slope"))


@handles("HardSigmoid")
def _hard_sigmoid(call: GeCall) -> str:
    return call.node(
        "HardSigmoid", call.x("input_x"), alpha=call.attr("alpha"), beta=call.attr("beta")
    )
