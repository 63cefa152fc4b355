"""Convolutions, pooling and resizing over two spatial axes, in the format NCHW."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles
from fa_compiler.passes.ir.nodes import attribute_values

_FIX = "fix the sizes with --input-shape"


@handles("Conv")
def _conv(call: OnnxCall) -> Tensor:
    """One spatial axis becomes two, the first of size 1; three axes make a Conv3DV2. An Add adds a
    bfloat16 bias."""
    axes = call.x(0).rank - 2
    if axes not in (1, 2, 3):
        raise CannotMapError(f"GE has no convolution over {axes} axes")
    bias = call.optional(2)
    if bias is None or bias.dtype != "DT_BF16" or axes == 3:
        made = _convolution(call, axes, bias)
    else:
        made = _convolution(call, axes, None)
        made = call.binary("Add", made, call.unsqueeze(bias, list(range(1, made.rank - 1))))
    return call.squeeze(made, [2]) if axes == 1 else made


def _convolution(call: OnnxCall, axes: int, bias: Tensor | None) -> Tensor:
    """The convolution over two or three spatial axes."""
    x, weight, out = call.x(0), call.x(1), call.out()
    kernel = call.integer_list("kernel_shape") or list((weight.shape or ())[2:])
    strides = call.integer_list("strides") or [1] * axes
    dilations = call.integer_list("dilations") or [1] * axes
    begins, ends = _pads(call, kernel, strides, dilations)
    if axes == 1:
        x, weight = call.unsqueeze(x, [2]), call.unsqueeze(weight, [2])
        strides, dilations, begins, ends = [1, *strides], [1, *dilations], [0, *begins], [0, *ends]
        out = Type(out.dtype, None if out.shape is None else (*out.shape[:2], 1, out.shape[2]))
    op_type, layout = ("Conv3DV2", "NCDHW") if axes == 3 else ("Conv2D", "NCHW")
    return call.emitter.op(
        op_type,
        x,
        weight,
        bias,
        strides=[1, 1, *strides],
        pads=_pairs(begins, ends),
        dilations=[1, 1, *dilations],
        groups=call.integer("group", 1),
        data_format=layout,
        out=out,
        layouts={"x": layout, "filter": layout, "y": layout},
    )


def _pairs(begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    """GE's pads, a pair for each axis. ONNX writes all beginnings before all ends."""
    return [pad for pair in zip(begins, ends, strict=True) for pad in pair]


def _pads(
    call: OnnxCall, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The padding at the beginning and at the end of every spatial axis."""
    mode = call.text("auto_pad", "NOTSET")
    pads = call.integer_list("pads") or [0] * (2 * len(kernel))
    if mode in ("NOTSET", ""):
        return pads[: len(kernel)], pads[len(kernel) :]
    if mode == "VALID":
        return [0] * len(kernel), [0] * len(kernel)
    begins, ends = [], []
    for place, size in enumerate((call.x().shape or ())[2:]):
        reach = (kernel[place] - 1) * dilations[place] + 1
        if size < 0 and strides[place] != 1:
            raise CannotMapError(f"its padding ({mode}) depends on a size that is not known", _FIX)
        steps = -(-size // strides[place])
        total = (
            reach - 1
            if strides[place] == 1
            else max((steps - 1) * strides[place] + reach - size, 0)
        )
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    return begins, ends


@handles("MaxPool", "AveragePool")
def _pool(call: OnnxCall) -> Sequence[Tensor]:
    """One spatial axis becomes two. Dilations and indices have no counterpart.

    If the last window is incomplete, ONNX and GE round the output size up differently.
    """
    x = call.x()
    axes = x.rank - 2
    kernel = call.integer_list("kernel_shape") or []
    strides = call.integer_list("strides") or [1] * axes
    dilations = call.integer_list("dilations") or [1] * axes
    if axes not in (1, 2) or set(dilations) != {1}:
        raise CannotMapError("GE pools over one or two spatial axes, without dilations")
    if call.wanted(1):
        raise CannotMapError("the indices of its maxima are read", "leave out what reads them")
    begins, ends = _pads(call, kernel, strides, dilations)
    out = call.out()
    if call.integer("ceil_mode", 0) and not _exact(x, kernel, strides, begins, ends):
        raise CannotMapError("it rounds its size up", "pad its input so that the windows fit")
    if axes == 1:
        x, kernel, strides = call.unsqueeze(x, [2]), [1, *kernel], [1, *strides]
        begins, ends = [0, *begins], [0, *ends]
        out = Type(out.dtype, None if out.shape is None else (*out.shape[:2], 1, out.shape[2]))
    average = call.node.op_type == "AveragePool"
    extra = {"exclusive": not call.integer("count_include_pad", 0)} if average else {}
    made = call.emitter.op(
        "AvgPoolV2" if average else "MaxPoolV3",
        x,
        ksize=[1, 1, *kernel],
        strides=[1, 1, *strides],
        padding_mode="CALCULATED",
        pads=_pairs(begins, ends),
        data_format="NCHW",
        global_pooling=False,
        ceil_mode=False,
        out=out,
        layouts={"x": "NCHW", "y": "NCHW"},
        **extra,
    )
    return [call.squeeze(made, [2]) if axes == 1 else made]


def _exact(
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
) -> bool:
    """Whether the windows fill every axis exactly, so no output size is rounded."""
    spans = zip((x.shape or ())[2:], kernel, strides, begins, ends, strict=True)
    return all(size >= 0 and (size + b + e - k) % step == 0 for size, k, step, b, e in spans)


@handles("Resize", "Upsample")
def _resize(call: OnnxCall) -> Tensor:
    """GE's Resize is that of ONNX's opset 11, with the same attributes and defaults. The attributes
    that opset 18 added must have their defaults."""
    if call.opset < 11:
        return _scaled(call)
    added = {"antialias": 0, "axes": None, "keep_aspect_ratio_policy": "stretch"}
    for name, default in added.items():
        attr = call.node.attributes.get(name)
        if attr is not None and attr.value not in (default, (default,)):
            raise CannotMapError(f"GE's Resize has no {name}", "export with opset 17 or older")
    x, roi, scales, sizes = (
        call.x(),
        _unless_empty(call, 1),
        _unless_empty(call, 2),
        call.optional(3),
    )
    if sizes is not None:
        scales = None
    given = {
        name: value for name, value in attribute_values(call.node).items() if name not in added
    }
    layouts = {"x": "NCHW", "y": "NCHW"} if x.rank == 4 else {}
    return call.emitter.op(
        "Resize", x, roi, scales, sizes, **given, out=call.out(), layouts=layouts
    )


def _unless_empty(call: OnnxCall, index: int) -> Tensor | None:
    """An input, or None if it is absent or an empty vector, which means the same."""
    tensor = call.optional(index)
    return None if tensor is None or tensor.shape == (0,) else tensor


def _scaled(call: OnnxCall) -> Tensor:
    """Before opset 11 a Resize has scales only. A coordinate is multiplied by its scale, and
    rounded down for the nearest element. For an axis that shrinks, ONNX did not define the
    rounding."""
    mode, listed = call.text("mode", "nearest"), call.node.attributes.get("scales")
    scales = (
        call.x(1) if listed is None else call.emitter.const(list(listed.as_floats()), "DT_FLOAT")
    )
    known = call.array(1) if scales.value is None else scales.value
    if mode == "nearest" and (known is None or (known < 1).any()):
        raise CannotMapError(
            "ONNX does not define it for an axis that shrinks", "export with opset 11 or newer"
        )
    return call.emitter.op(
        "Resize",
        call.x(),
        None,
        scales,
        coordinate_transformation_mode="asymmetric",
        mode=mode,
        nearest_mode="floor",
        out=call.out(),
        layouts={"x": "NCHW", "y": "NCHW"} if call.x().rank == 4 else {},
    )
