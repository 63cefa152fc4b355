"""Forms of convolutions and pooling.

| operator | becomes | where |
| --- | --- | --- |
| Conv, ConvTranspose without kernel_shape | the same with the weight's kernel_shape | the size of the weight is known |
| Conv without strides | the same with strides, in which its plugin counts the axes | kernel_shape is known |
| GlobalMaxPool | ReduceMax | the tensor has not 4 dimensions |
| Col2Im | refused: its plugin takes no pads that ONNX has | always |
| pooling and convolutions with auto_pad | pads | the plugin lacks that auto_pad, and the sizes are known |
| ConvTranspose with output_shape | pads | the sizes are known |
| MaxPool with dilations | MaxPool of a volume of depth 1 | the rank is 3 or 4 |
| MaxPool with unread Indices | MaxPool without Indices and storage_order | always |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fa_compiler.lowering.ascend.onnx_route.plugin_reads import LARGE_STRIDE, LARGE_WINDOW
from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import int_attr


def _same_pads(
    rewrite: Rewrite, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """The pads for auto_pad SAME_UPPER or SAME_LOWER."""
    sizes = rewrite.shape(rewrite.needed(0))[2:]
    lower = rewrite.text("auto_pad", "") == "SAME_LOWER"
    before, after = [], []
    for size, window, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (window - 1) * dilation + 1
        if size.const is None and stride > 1:
            rewrite.fail(
                "its auto_pad depends on unknown sizes; fix the sizes, or export with explicit pads"
            )
        length = size.const or 1
        total = (-(-length // stride) - 1) * stride + reach - length
        if total < -1:
            rewrite.fail(
                "auto_pad of a window that is shorter than its stride, which ONNX Runtime refuses or shifts; "
                "export with explicit pads"
            )
        total = max(total, 0)
        before.append((total + lower) // 2)
        after.append(total - before[-1])
    return [*before, *after]


def _weight_kernel(rewrite: Rewrite) -> list[int] | None:
    sizes = [size.const for size in rewrite.shape(rewrite.needed(1))[2:]]
    return None if None in sizes else [size for size in sizes if size is not None]


def window(rewrite: Rewrite) -> None:
    """Conv and the pooling operators."""
    node = rewrite.node
    if node.op_type == "Conv":
        _complete_convolution(rewrite)
    kernel, auto = rewrite.numbers("kernel_shape"), rewrite.text("auto_pad", "NOTSET")
    strides, dilations = (
        rewrite.numbers("strides", [1] * len(kernel)),
        rewrite.numbers("dilations", [1] * len(kernel)),
    )
    if node.op_type == "MaxPool":
        if not rewrite.is_read(1):
            rewrite.drop("storage_order")
            node.resize_outputs(1)
        if len(kernel) < 3 and any(step != 1 for step in dilations):
            return _as_volume(rewrite, kernel, strides, dilations)
    if auto.startswith("SAME") and kernel and _is_unread(rewrite, auto, kernel, strides):
        rewrite.write(pads=_same_pads(rewrite, kernel, strides, dilations))
        rewrite.drop("auto_pad", "ceil_mode")
    return None


def _complete_convolution(rewrite: Rewrite) -> None:
    """Write kernel_shape and strides, as far as the size of the weight is known."""
    attributes = rewrite.node.attributes
    if "kernel_shape" not in attributes and (known := _weight_kernel(rewrite)):
        rewrite.write(kernel_shape=known)
    if "strides" not in attributes and (kernel := rewrite.numbers("kernel_shape")):
        rewrite.write(strides=[1] * len(kernel))


def _is_unread(rewrite: Rewrite, auto: str, kernel: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether auto_pad becomes pads, because the plugin or the operator lacks this value.

    The operator of a Conv computes the pads of images, which cannot be written where the sizes are
    open.
    """
    op_type, volume = rewrite.node.op_type, len(kernel) == 3
    if op_type == "Conv":
        is_open = max(strides) > 1 and None in [
            size.const for size in rewrite.shape(rewrite.needed(0))[2:]
        ]
        return volume or not is_open
    if volume:
        return auto == "SAME_LOWER" or op_type != "MaxPool"
    return auto == "SAME_LOWER" or math.prod(kernel) > LARGE_WINDOW or max(strides) > LARGE_STRIDE


def _as_volume(
    rewrite: Rewrite, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> None:
    """A MaxPool with dilations: the plugin reads dilations for volumes only."""
    data, builder = rewrite.needed(0), rewrite.builder
    if rewrite.is_read(1):
        return  # there is no other form
    count = 3 - len(kernel)
    ones, axes = [1] * count, list(range(2, 2 + count))
    attrs: dict[str, Sequence[int] | int] = {
        "kernel_shape": [*ones, *kernel],
        "strides": [*ones, *strides],
    }
    attrs |= {"dilations": [*ones, *dilations], "ceil_mode": int_attr(rewrite.node, "ceil_mode", 0)}
    pads = rewrite.numbers("pads", [0] * 2 * len(kernel))
    if rewrite.text("auto_pad", "NOTSET").startswith("SAME"):
        rewrite.fail("auto_pad together with dilations; export with explicit pads")
    half, none = len(pads) // 2, [0] * count
    attrs["pads"] = [*none, *pads[:half], *none, *pads[half:]]
    pooled = rewrite.op("MaxPool", [builder.unsqueeze(data, axes)], data, attrs)
    rewrite.replace(builder.squeeze(pooled, axes))


def global_maximum(rewrite: Rewrite) -> None:
    """GlobalMaxPool."""
    data, builder = rewrite.needed(0), rewrite.builder
    axes = list(range(2, len(rewrite.shape(data))))
    if len(axes) == 2:
        return
    if builder.opset >= 18:
        rewrite.replace(rewrite.op("ReduceMax", [data, builder.ints(axes)], data))
    else:
        rewrite.replace(rewrite.op("ReduceMax", [data], data, {"axes": axes}))


def no_columns(rewrite: Rewrite) -> None:
    """Col2Im."""
    rewrite.fail("ATC's plugin takes pads of 2 numbers, and images have 4; export without Col2Im")


def transposed_window(rewrite: Rewrite) -> None:
    """ConvTranspose."""
    node = rewrite.node
    kernel = rewrite.numbers("kernel_shape") or _weight_kernel(rewrite)
    if kernel is None:
        rewrite.fail(
            "its kernel_shape is not written, and the size of its weight is not known; write kernel_shape"
        )
    rewrite.write(kernel_shape=kernel)
    ones, auto = [1] * len(kernel), rewrite.text("auto_pad", "NOTSET")
    strides, dilations = rewrite.numbers("strides", ones), rewrite.numbers("dilations", ones)
    more = rewrite.numbers("output_padding", [0] * len(kernel))
    wanted = rewrite.numbers("output_shape")[-len(kernel) :]
    if not wanted and not auto.startswith("SAME"):
        if auto == "VALID":
            rewrite.drop("auto_pad", "pads")
        return
    before, after = [], []
    sizes = rewrite.shape(rewrite.needed(0))[2:]
    for axis, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        # The length of the result without pads is `size * stride + excess`.
        excess = Dim((kernel[axis] - 1) * dilations[axis] + 1 + more[axis] - stride)
        total = (excess if not wanted else size * stride + excess - wanted[axis]).const
        if total is None:
            rewrite.fail(
                "its pads depend on unknown sizes; fix the sizes, or export with explicit pads"
            )
        if total < 0 and not wanted:
            rewrite.fail(
                f"auto_pad {auto} of a window that is shorter than its stride, which ONNX and ONNX Runtime compute "
                "otherwise; export with explicit pads"
            )
        if total < 0:  # the output is longer than the reach of the window: zeros follow
            more[axis] -= total
            total = 0
            if more[axis] >= max(stride, dilations[axis]):
                rewrite.fail(
                    f"its output is {more[axis]} longer than the reach of its window; export with pads"
                )
        upper = auto == "SAME_UPPER"
        before.append(total // 2 if upper else total - total // 2)
        after.append(total - before[-1])
    rewrite.write(pads=[*before, *after])
    rewrite.drop("auto_pad", "output_shape")
    node.attributes.pop("output_padding", None)
    if any(more):
        rewrite.write(output_padding=more)
