"""Convolutions, pooling and resizing."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


def _last(call: GeCall, name: str) -> list[int]:
    """The numbers of an attribute for the spatial axes. Those for batch and channels must be 1."""
    numbers = list(call.attr(name))
    if numbers[:2] != [1, 1]:
        raise UnreadableError(
            f"{call.op.type} '{call.op.name}': {name} = {numbers} is not for this format"
        )
    return numbers[2:]


def _pads(call: GeCall) -> list[int]:
    """The pads [top, bottom, left, right] in ONNX's order: all beginnings, then all ends."""
    pads = list(call.attr("pads"))
    return [*pads[0::2], *pads[1::2]]


@handles("Conv2D", "Conv3DV2")
def _conv(call: GeCall) -> str:
    call.only("data_format", "NCHW" if call.op.type == "Conv2D" else "NCDHW")
    return call.node(
        "Conv",
        call.x("x"),
        call.x("filter"),
        call.maybe("bias"),
        strides=_last(call, "strides"),
        dilations=_last(call, "dilations"),
        pads=_pads(call),
        group=call.attr("groups"),
    )


@handles("MaxPoolV3", "AvgPoolV2")
def _pool(call: GeCall) -> str:
    call.only("data_format", "NCHW")
    call.only("padding_mode", "CALCULATED")
    windows = {
        "kernel_shape": _last(call, "ksize"),
        "strides": _last(call, "strides"),
        "pads": _pads(call),
    }
    if call.op.type == "MaxPoolV3":
        return call.node("MaxPool", call.x("x"), **windows)
    return call.node(
        "AveragePool", call.x("x"), count_include_pad=int(not call.attr("exclusive")), **windows
    )


@handles("Resize")
def _resize(call: GeCall) -> str:
    sizes = call.cast(call.x("sizes"), "DT_INT64") if call.has("sizes") else ""
    attrs = {name: call.attr(name) for name in call.spec.attr_names}
    return call.node("Resize", call.x("x"), call.maybe("roi"), call.maybe("scales"), sizes, **attrs)
