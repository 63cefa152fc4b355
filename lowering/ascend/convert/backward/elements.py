"""Element by element, where ONNX has no such operator or other attributes."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means
from fa_compiler.lowering.ascend.convert.errors import UnreadableError

_INTEGERS = ("DT_INT8", "DT_INT16", "DT_INT32", "DT_INT64", "DT_UINT8", "DT_UINT16", "DT_UINT32", "DT_UINT64")


@means("Cast")
def _cast(r: Reading) -> str:
    dtype = r.type_attr("dst_type")
    if dtype != r.out().dtype:
        raise UnreadableError(f"Cast '{r.op.name}' to {dtype} declares {r.out().dtype}")
    return r.cast(r.x("x"), dtype)


@means("RealDiv")
def _real_div(r: Reading) -> str:
    """Of integers it would be a fraction."""
    if r.desc("x1").dtype in _INTEGERS:
        raise UnreadableError(f"RealDiv '{r.op.name}' of integers: ONNX divides them towards zero")
    return r.n("Div", r.x("x1"), r.x("x2"))


@means("TruncateDiv")
def _truncate_div(r: Reading) -> str:
    if r.desc("x1").dtype in _INTEGERS:
        return r.n("Div", r.x("x1"), r.x("x2"))
    quotient = r.n("Div", r.x("x1"), r.x("x2"))
    return r.n("Mul", r.n("Sign", quotient), r.n("Floor", r.n("Abs", quotient)))


@means("FloorMod")
def _floor_mod(r: Reading) -> str:
    """x - floor(x / y) y, which has the sign of y."""
    x, y = r.x("x1"), r.x("x2")
    if r.desc("x1").dtype in _INTEGERS:
        return r.n("Mod", x, y, fmod=0)
    return r.n("Sub", x, r.n("Mul", r.n("Floor", r.n("Div", x, y)), y))


@means("Mod")
def _mod(r: Reading) -> str:
    """The remainder of a truncating division, as in C."""
    return r.n("Mod", r.x("x1"), r.x("x2"), fmod=1)


@means("NotEqual")
def _not_equal(r: Reading) -> str:
    return r.n("Not", r.n("Equal", r.x("x1"), r.x("x2")))


@means("Square")
def _square(r: Reading) -> str:
    return r.n("Mul", r.x("x"), r.x("x"))


@means("Rsqrt")
def _rsqrt(r: Reading) -> str:
    return r.n("Reciprocal", r.n("Sqrt", r.x("x")))


@means("AddN")
def _add_n(r: Reading) -> str:
    inputs = r.dynamic("x")
    if r.attr("N") != len(inputs):
        raise UnreadableError(f"AddN '{r.op.name}' has {len(inputs)} inputs and N = {r.attr('N')}")
    return r.n("Sum", *inputs)


@means("GeluV2")
def _gelu(r: Reading) -> str:
    r.only("approximate", "none", "tanh")
    return r.n("Gelu", r.x("x"), approximate=r.attr("approximate"))


@means("Swish")
def _swish(r: Reading) -> str:
    """x sigmoid(scale x)."""
    scale = r.array(r.attr("scale"), r.desc("x").dtype)
    return r.n("Mul", r.x("x"), r.n("Sigmoid", r.n("Mul", r.x("x"), scale)))


@means("Elu")
def _elu(r: Reading) -> str:
    return r.n("Elu", r.x("x"), alpha=r.attr("alpha"))


@means("LeakyRelu")
def _leaky_relu(r: Reading) -> str:
    return r.n("LeakyRelu", r.x("x"), alpha=r.attr("negative_slope"))


@means("HardSigmoid")
def _hard_sigmoid(r: Reading) -> str:
    return r.n("HardSigmoid", r.x("input_x"), alpha=r.attr("alpha"), beta=r.attr("beta"))
