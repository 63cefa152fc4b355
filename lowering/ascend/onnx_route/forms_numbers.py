"""Forms of elementwise operators and of products.

| operator | becomes | where |
| --- | --- | --- |
| Clip without bounds | Identity | from opset 11 on |
| Clip with bounds as attributes | the same with both bounds; Max and Min for other types than float32 | before 11 |
| IsInf of one sign | IsInf and a comparison with 0 | always |
| Selu with alpha, gamma | gamma * Elu | always |
| Mod with fmod 0 | fmod 1, and the divisor is added where the signs differ | the type is known |
| Dropout | its input, and a mask of ones | it does not train; before opset 12 its mask is not read |
| Gemm with alpha and no third input | a Mul follows it | always |
| Sum, Mean | a chain of Add, then Div | the shapes differ: GE's result has the shape of the first input |
| GridSample | the defaults are written out | always |
| LayerNormalization without a third input | the same with zeros | the type is not float32 |
| BatchNormalization with statistics | refused | before opset 14; newer ones have no such plugin |
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.plugin_reads import NodeForm, plugin_mismatches
from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite
from fa_compiler.passes.ir.nodes import constant, int_attr
from fa_compiler.passes.ops.elementwise import drops_nothing

FLOAT = ir.DataType.FLOAT
UNSIGNED = (ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64)


def clip(rewrite: Rewrite) -> None:
    """Clip."""
    data, builder = rewrite.needed(0), rewrite.builder
    if builder.opset < 11:
        largest = float(np.finfo(np.float32).max)
        low, high = rewrite.number("min", -largest), rewrite.number("max", largest)
        if rewrite.dtype(data) == FLOAT:  # the plugin casts to this type
            for name, number in (("min", low), ("max", high)):
                rewrite.node.attributes[name] = ir.AttrFloat32(name, number)
            return
        result = data
        for op_type, name, number in (("Max", "min", low), ("Min", "max", high)):
            if name in rewrite.node.attributes:
                result = rewrite.op(op_type, [result, rewrite.scalar(number, data)], data)
        rewrite.replace(result if result is not data else rewrite.op("Identity", [data], data))
    elif rewrite.given(1) is None and rewrite.given(2) is None:
        rewrite.replace(rewrite.op("Identity", [data], data))


def one_sign(rewrite: Rewrite) -> None:
    """IsInf."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    signs = [int_attr(node, f"detect_{sign}", 1) for sign in ("negative", "positive")]
    rewrite.drop("detect_negative", "detect_positive")
    if all(signs):
        return None
    infinite = builder.op("IsInf", [data])
    if any(signs):
        side = builder.op("Less" if signs[0] else "Greater", [data, rewrite.scalar(0, data)])
        return rewrite.replace(builder.and_(infinite, side))
    nothing = builder.and_(infinite, builder.not_(infinite))
    return rewrite.replace(nothing)


def selu(rewrite: Rewrite) -> None:
    """Selu with other numbers than the defaults."""
    if not any(plugin_mismatches(NodeForm.of_node(rewrite.node, rewrite.builder.opset))):
        return
    data = rewrite.needed(0)
    bent = rewrite.op("Elu", [data], data, {"alpha": rewrite.number("alpha", 1.6732632)})
    rewrite.replace(
        rewrite.op("Mul", [bent, rewrite.scalar(rewrite.number("gamma", 1.050701), data)], data)
    )


def floored(rewrite: Rewrite) -> None:
    """Mod: the result of GE's Mod has the sign of the dividend."""
    node, builder = rewrite.node, rewrite.builder
    if int_attr(node, "fmod", 0) == 1:
        return
    left, right = rewrite.needed(0), rewrite.needed(1)
    if rewrite.dtype(left) in UNSIGNED:
        node.attributes["fmod"] = ir.AttrInt64("fmod", 1)
        return
    rest = rewrite.op("Mod", [left, right], left, {"fmod": 1})
    zero = rewrite.scalar(0, left)
    signs = [builder.less(value, zero) for value in (rest, right)]
    other = builder.op("Xor", signs)
    some = builder.op("Or", [builder.op(sign, [rest, zero]) for sign in ("Less", "Greater")])
    raised = rewrite.op("Add", [rest, right], left)
    rewrite.replace(rewrite.op("Where", [builder.and_(other, some), raised, rest], left))


def dropout(rewrite: Rewrite) -> None:
    """Dropout: the input, if it does not train or its ratio is 0. Otherwise it is random and
    refused."""
    data, builder = rewrite.needed(0), rewrite.builder
    if builder.opset >= 12 and not drops_nothing(rewrite.node):
        if constant(rewrite.given(2)) is None:
            rewrite.fail("its training_mode is not constant; export for inference (model.eval())")
        rewrite.fail(
            "it drops values in training, which ATC's plugin does not read; export for inference"
        )
    if rewrite.is_read(1):
        if builder.opset < 12:
            rewrite.fail(
                "its mask is read, which ATC's plugin does not make; export with opset 12 or newer"
            )
        kept = builder.not_(_false_like(rewrite, data))
        return rewrite.replace(rewrite.op("Identity", [data], data), kept)
    return rewrite.replace(rewrite.op("Identity", [data], data))


def _false_like(rewrite: Rewrite, data: ir.Value) -> ir.Value:
    builder = rewrite.builder
    shape = builder.shape_of(data)
    return builder.expand(builder.constant(np.array(False), "number"), shape)


def sums(rewrite: Rewrite) -> None:
    """Sum and Mean: GE's operators take equal shapes only."""
    values = [rewrite.needed(index) for index in range(len(rewrite.node.inputs))]
    shapes = [rewrite.builder.info.shape(value) for value in values]
    if shapes[0] is not None and all(shape == shapes[0] for shape in shapes):
        return
    total = values[0]
    for value in values[1:]:
        total = rewrite.op("Add", [total, value], values[0])
    if rewrite.node.op_type == "Mean":
        total = rewrite.op("Div", [total, rewrite.scalar(len(values), values[0])], values[0])
    rewrite.replace(total if len(values) > 1 else rewrite.op("Identity", [total], total))


def scaled_product(rewrite: Rewrite) -> None:
    """Gemm without a third input."""
    alpha = rewrite.number("alpha", 1.0)
    if rewrite.given(2) is not None or alpha == 1.0:
        return
    left, right = rewrite.needed(0), rewrite.needed(1)
    flips = {name: int_attr(rewrite.node, name, 0) for name in ("transA", "transB")}
    product = rewrite.op("Gemm", [left, right], left, flips)
    rewrite.replace(rewrite.op("Mul", [product, rewrite.scalar(alpha, left)], left))


def zero_bias(rewrite: Rewrite) -> None:
    """LayerNormalization: without a bias its plugin adds one of float32."""
    node, data, scale, builder = rewrite.node, rewrite.needed(0), rewrite.needed(1), rewrite.builder
    if rewrite.given(2) is not None or rewrite.dtype(data) == FLOAT:
        return
    sizes = [size.const for size in rewrite.shape(scale)]
    if None not in sizes:
        zeros = builder.constant(
            np.zeros([size or 0 for size in sizes], rewrite.dtype(scale).numpy()), "bias"
        )
    else:
        zeros = rewrite.op("Expand", [rewrite.scalar(0, scale), builder.shape_of(scale)], scale)
    node.resize_inputs(3)
    node.replace_input_with(2, zeros)


def no_statistics(rewrite: Rewrite) -> None:
    """BatchNormalization: nobody knows which statistics the outputs of its plugin are."""
    read = [
        output.name
        for place, output in enumerate(rewrite.node.outputs)
        if place and rewrite.is_read(place)
    ]
    if read and rewrite.builder.opset < 14:
        rewrite.fail(
            f"its output '{read[0]}' is read, a statistic; export for inference (model.eval())"
        )


def grid_defaults(rewrite: Rewrite) -> None:
    """GridSample."""
    for name, default in (("mode", "bilinear"), ("padding_mode", "zeros")):
        rewrite.node.attributes.setdefault(name, ir.AttrString(name, default))
