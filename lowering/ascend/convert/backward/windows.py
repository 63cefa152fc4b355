"""Convolutions, pooling and resizing."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


def _spatial(r: Reading, layout: str, *names: str) -> None:
    """All tensors must be declared in the format that the operator runs in."""
    r.only("data_format", layout)
    wrong = [name for name in names if r.desc(name).layout != layout] + ["y"] * (r.out().layout != layout)
    if wrong:
        raise UnreadableError(f"{r.op.type} '{r.op.name}': its {wrong[0]} is not declared in the format {layout}")


def _last(r: Reading, name: str) -> list[int]:
    """Numbers for the spatial axes; those for batch and channels must be 1."""
    numbers = list(r.attr(name))
    if numbers[:2] != [1, 1]:
        raise UnreadableError(f"{r.op.type} '{r.op.name}': {name} = {numbers} is not for this format")
    return numbers[2:]


def _pads(r: Reading) -> list[int]:
    """Top, bottom, left, right as ONNX's beginnings and ends."""
    pads = list(r.attr("pads"))
    return [*pads[0::2], *pads[1::2]]


@means("Conv2D", "Conv3DV2")
def _conv(r: Reading) -> str:
    _spatial(r, "NCHW" if r.op.type == "Conv2D" else "NCDHW", "x", "filter")
    return r.n(
        "Conv",
        r.x("x"),
        r.x("filter"),
        r.maybe("bias"),
        strides=_last(r, "strides"),
        dilations=_last(r, "dilations"),
        pads=_pads(r),
        group=r.attr("groups"),
    )


@means("MaxPoolV3", "AvgPoolV2")
def _pool(r: Reading) -> str:
    _spatial(r, "NCHW", "x")
    r.only("padding_mode", "CALCULATED")
    windows = {"kernel_shape": _last(r, "ksize"), "strides": _last(r, "strides"), "pads": _pads(r)}
    if r.op.type == "MaxPoolV3":
        return r.n("MaxPool", r.x("x"), **windows)
    return r.n("AveragePool", r.x("x"), count_include_pad=int(not r.attr("exclusive")), **windows)


_RESIZE: Sequence[str] = (
    "coordinate_transformation_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "extrapolation_value",
    "mode",
    "nearest_mode",
)


@means("Resize")
def _resize(r: Reading) -> str:
    sizes = r.cast(r.x("sizes"), "DT_INT64") if r.has("sizes") else ""
    attrs = {name: r.attr(name) for name in _RESIZE}
    return r.n("Resize", r.x("x"), r.maybe("roi"), r.maybe("scales"), sizes, **attrs)
