"""Operators that the parser does not know, in operators that it knows, by their definitions in the
ONNX specification.

The intermediate types are those of the definitions. RMSNormalization and GroupNormalization compute
the statistics in `stash_type` (float32) and round to the type of the scale. The others compute in
the type of their input.

| operator | becomes |
| --- | --- |
| Gelu | x * (erf(x / sqrt 2) + 1) * 0.5 |
| Gelu of tanh | x * (tanh(sqrt(2 / pi) * (x + 0.044715 x^3)) + 1) * 0.5 |
| Swish | x * sigmoid(alpha * x) |
| Mish | x * tanh(softplus(x)) |
| RMSNormalization | x / sqrt(mean(x^2) + epsilon) * scale |
| GroupNormalization | the same with x - mean for x, over the channels of a group, + bias |
| RotaryEmbedding | x1 cos - x2 sin, x2 cos + x1 sin; x1, x2: the halves, or the even and odd elements, of each head |
| ReduceL1, ReduceL2 (opset 18) | ReduceSum of Abs; Sqrt of ReduceSum of squares |
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite, RewriteRule
from fa_compiler.passes.emit.rotary import rotate_heads
from fa_compiler.passes.ir.nodes import int_attr


def gelu(rewrite: Rewrite) -> None:
    """Gelu of opset 20, in the order of operators that exporters write and ATC recognises."""
    x = rewrite.needed(0)
    if rewrite.text("approximate", "none") == "tanh":
        cube = rewrite.op(
            "Mul",
            [rewrite.op("Mul", [rewrite.op("Mul", [x, x], x), x], x), rewrite.scalar(0.044715, x)],
            x,
        )
        sum_ = rewrite.op("Add", [x, cube], x)
        inner = rewrite.op(
            "Tanh", [rewrite.op("Mul", [sum_, rewrite.scalar(math.sqrt(2 / math.pi), x)], x)], x
        )
    else:
        inner = rewrite.op("Erf", [rewrite.op("Div", [x, rewrite.scalar(math.sqrt(2), x)], x)], x)
    raised = rewrite.op("Add", [inner, rewrite.scalar(1, x)], x)
    rewrite.replace(
        rewrite.op("Mul", [rewrite.op("Mul", [x, raised], x), rewrite.scalar(0.5, x)], x)
    )


def swish(rewrite: Rewrite) -> None:
    """Swish of opset 24."""
    x, alpha = rewrite.needed(0), rewrite.number("alpha", 1.0)
    scaled = x if alpha == 1.0 else rewrite.op("Mul", [x, rewrite.scalar(alpha, x)], x)
    rewrite.replace(rewrite.op("Mul", [x, rewrite.op("Sigmoid", [scaled], x)], x))


def mish(rewrite: Rewrite) -> None:
    """Mish of opset 18."""
    x = rewrite.needed(0)
    rewrite.replace(
        rewrite.op("Mul", [x, rewrite.op("Tanh", [rewrite.op("Softplus", [x], x)], x)], x)
    )


def rms_normalization(rewrite: Rewrite) -> None:
    """RMSNormalization of opset 23."""
    data, scale = rewrite.needed(0), rewrite.needed(1)
    rank = len(rewrite.shape(data))
    x = _stashed(rewrite, data)
    normal = _normalised(rewrite, x, list(range(rewrite.axis("axis", -1, rank), rank)))
    rewrite.replace(
        rewrite.op("Mul", [rewrite.builder.cast(normal, rewrite.dtype(scale)), scale], scale)
    )


def group_normalization(rewrite: Rewrite) -> None:
    """GroupNormalization. Scale and bias are for groups in opset 18, and for channels from 21
    on."""
    data, scale, bias = (rewrite.needed(index) for index in range(3))
    builder, rank = rewrite.builder, len(rewrite.shape(data))
    groups = int_attr(rewrite.node, "num_groups", 0)
    if groups < 1 or rank < 3:
        rewrite.fail(f"num_groups is {groups}, for a tensor of rank {rank}")
    grouped = rewrite.op("Reshape", [data, builder.ints([0, groups, -1])], data)
    x = _stashed(rewrite, grouped) if rewrite.source >= 21 else grouped
    mean = rewrite.op("ReduceMean", *_axes(rewrite, [x], [2], x))
    normal = builder.cast(
        _normalised(rewrite, rewrite.op("Sub", [x, mean], x), [2]), rewrite.dtype(data)
    )
    shape = builder.shape_of(data)
    if rewrite.source >= 21:
        normal = rewrite.op("Reshape", [normal, shape], data)
        scale, bias = (builder.unsqueeze(value, range(1, rank - 1)) for value in (scale, bias))
    else:
        scale, bias = (builder.unsqueeze(value, [1]) for value in (scale, bias))
    result = rewrite.op("Add", [rewrite.op("Mul", [normal, scale], data), bias], data)
    rewrite.replace(
        result if rewrite.source >= 21 else rewrite.op("Reshape", [result, shape], data)
    )


def rotary_embedding(rewrite: Rewrite) -> None:
    """RotaryEmbedding of opset 23: (B,N,S,D), or (B,S,N*D) with `num_heads`."""
    data, builder = rewrite.needed(0), rewrite.builder
    shape, heads = rewrite.shape(data), int_attr(rewrite.node, "num_heads", 0)
    flat = len(shape) == 3
    width = shape[-1].const
    if width is None or len(shape) not in (3, 4) or (flat and (heads < 1 or width % heads)):
        rewrite.fail("the head size is not known")
    size = width // heads if flat else width
    rotated = int_attr(rewrite.node, "rotary_embedding_dim", 0) or size
    x = rewrite.op("Reshape", [data, builder.ints([0, 0, heads, size])], data) if flat else data
    cos, sin = (_cache(rewrite, rewrite.needed(index), 2 if flat else 1) for index in (1, 2))
    interleaved = int_attr(rewrite.node, "interleaved", 0) == 1
    result = rotate_heads(builder, x, cos, sin, size, rotated, interleaved)
    rewrite.replace(
        rewrite.op("Reshape", [result, builder.ints([0, 0, width])], data) if flat else result
    )


def norm_by_sums(rewrite: Rewrite) -> None:
    """ReduceL1 and ReduceL2 of opset 18."""
    data, rest = rewrite.needed(0), rewrite.node.inputs[1:]
    attrs = {name: int_attr(rewrite.node, name, default) for name, default in _REDUCTION.items()}
    if attrs["noop_with_empty_axes"]:
        rewrite.fail("noop_with_empty_axes is not supported")
    if rewrite.node.op_type == "ReduceL1":
        rewrite.replace(
            rewrite.op("ReduceSum", [rewrite.op("Abs", [data], data), *rest], data, attrs)
        )
    else:
        squares = rewrite.op("Mul", [data, data], data)
        rewrite.replace(
            rewrite.op("Sqrt", [rewrite.op("ReduceSum", [squares, *rest], data, attrs)], data)
        )


_REDUCTION = {"keepdims": 1, "noop_with_empty_axes": 0}

EXPANSIONS: Mapping[str, RewriteRule] = {
    "Gelu": gelu,
    "GroupNormalization": group_normalization,
    "Mish": mish,
    "RMSNormalization": rms_normalization,
    "ReduceL1": norm_by_sums,
    "ReduceL2": norm_by_sums,
    "RotaryEmbedding": rotary_embedding,
    "Swish": swish,
}
"""The rule for each operator that the parser does not take at the target opset."""


def _stashed(rewrite: Rewrite, value: ir.Value) -> ir.Value:
    return rewrite.builder.cast(value, ir.DataType(int_attr(rewrite.node, "stash_type", 1)))


def _axes(
    rewrite: Rewrite, inputs: list[ir.Value], axes: list[int], like: ir.Value
) -> tuple[list[ir.Value], ir.Value, dict[str, list[int]]]:
    """The arguments of a reduction in the form of the target opset."""
    if rewrite.builder.opset >= 18:
        return [*inputs, rewrite.builder.ints(axes)], like, {}
    return inputs, like, {"axes": axes}


def _normalised(rewrite: Rewrite, x: ir.Value, axes: list[int]) -> ir.Value:
    """x / sqrt(mean(x^2) + epsilon)."""
    square = rewrite.op("Mul", [x, x], x)
    mean = rewrite.op("ReduceMean", *_axes(rewrite, [square], axes, x))
    root = rewrite.op(
        "Sqrt",
        [rewrite.op("Add", [mean, rewrite.scalar(rewrite.number("epsilon", 1e-5), x)], x)],
        x,
    )
    return rewrite.op("Div", [x, root], x)


def _cache(rewrite: Rewrite, table: ir.Value, axis: int) -> ir.Value:
    """The cosines or sines of every token, with an axis for the heads. They are rows of a table, or
    given directly."""
    positions = rewrite.given(3)
    if positions is not None:
        table = rewrite.op("Gather", [table, positions], table, {"axis": 0})
    return rewrite.builder.unsqueeze(table, [axis])
