"""Forms of operators that move or reduce elements, or compute shapes.

| operator | becomes | where |
| --- | --- | --- |
| Shape with start, end | Shape and Slice | always |
| Transpose without perm | the same with perm | the rank is known |
| ArgMax, ArgMin of the last index | of the reversed axis; the index is counted from its end | always |
| ArgMin | a Cast to int64 follows, because GE's result is int32 | always |
| GatherND with batch_dims | the indices of the batch precede the given ones | the rank of the indices is known |
| Softmax, LogSoftmax, Hardmax before opset 13 | over the last axis of a Flatten, then a Reshape | it has more axes |
| ReduceSumSquare of opset 18 | ReduceSum of the squares | it has axes |
| ReduceLogSum before opset 13 | the axes are written out | the rank is known |
| Size | the product of the Shape | always |
| Pad with axes | pads for all axes | as in `changes` |
| Pad of float16 before opset 11 | Pad of float32 between two Casts | always |
| EyeLike | Equal of two Ranges; a constant before opset 11 | the rank, or the size, is known |
| ConstantOfShape | its value as bytes | always |
| DepthToSpace with blocks of 1 | Identity | always |
| Unique with axis | Unique without axis | its input is a vector |
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.changes import defined_noop, pads_of_all_axes
from fa_compiler.lowering.ascend.onnx_route.rewrite import INT64, Rewrite
from fa_compiler.passes.ir.nodes import attribute_values, int_attr

HALF = ir.DataType.FLOAT16
END = (1 << 63) - 1
"""An index after the end of every axis. ONNX uses it for "to the end"."""


def shape_bounds(rewrite: Rewrite) -> None:
    """Shape of opset 15: its bounds are clamped like those of Slice."""
    start, end = int_attr(rewrite.node, "start", 0), int_attr(rewrite.node, "end", END)
    rewrite.drop("start", "end")
    if (start, end) != (0, END):
        full_shape = rewrite.builder.shape_of(rewrite.needed(0))
        rewrite.replace(rewrite.builder.slice(full_shape, [start], [end], [0]))


def transpose_perm(rewrite: Rewrite) -> None:
    """Without perm the axes are reversed."""
    if "perm" in rewrite.node.attributes:
        return
    rank = len(rewrite.shape(rewrite.needed(0)))
    if rank:
        rewrite.write(perm=range(rank)[::-1])
    else:
        rewrite.replace(rewrite.op("Identity", [rewrite.needed(0)], rewrite.needed(0)))


def last_index(rewrite: Rewrite) -> None:
    """ArgMax and ArgMin."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    wants_last = int_attr(node, "select_last_index", 0)
    rewrite.drop("select_last_index")
    if not wants_last and node.op_type == "ArgMax":
        return
    axis, keep = int_attr(node, "axis", 0), int_attr(node, "keepdims", 1)
    if wants_last:
        bounds = [builder.ints([number]) for number in (-1, -END - 1, axis, -1)]
        data = rewrite.op("Slice", [data, *bounds], data)
    found = builder.op(node.op_type, [data], {"axis": axis, "keepdims": keep})
    if node.op_type == "ArgMin":
        found = builder.op("Cast", [found], {"to": int(INT64)})
    if wants_last:
        every = builder.shape_of(rewrite.needed(0))
        last = builder.gather(every, builder.constant(np.array(axis, np.int64), "axis"), 0)
        last = builder.sub(last, builder.constant(np.array(1, np.int64), "number"))
        found = builder.sub(last, found)
    rewrite.replace(found)


def batch_indices(rewrite: Rewrite) -> None:
    """GatherND of opset 12: the indices of the batch are put before each index."""
    node, builder = rewrite.node, rewrite.builder
    batch = int_attr(node, "batch_dims", 0)
    rewrite.drop("batch_dims")
    if not batch:
        return
    indices = rewrite.needed(1)
    rank = len(rewrite.shape(indices))
    every = builder.shape_of(indices)
    target = builder.concat([builder.slice(every, [0], [rank - 1], [0]), builder.ints([1])], 0)
    parts = []
    for axis in range(batch):
        places = builder.range(builder.dimension(indices, axis))
        column = builder.reshape(places, [-1, *[1] * (rank - 1 - axis)])
        parts.append(builder.expand(column, target))
    joined = builder.concat([*parts, indices], -1)
    rewrite.replace(rewrite.op("GatherND", [rewrite.needed(0), joined], rewrite.needed(0)))


def eye(rewrite: Rewrite) -> None:
    """EyeLike of opset 9."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    attr, offset = node.attributes.get("dtype"), int_attr(node, "k", 0)
    dtype = rewrite.dtype(data) if attr is None else ir.DataType(attr.as_int())
    rows_known, columns_known = (size.const for size in rewrite.shape(data))
    if builder.opset >= 11:
        rows, columns = (builder.range(builder.dimension(data, axis)) for axis in (0, 1))
        shifted = builder.add(rows, builder.ints([offset]))
        equal = builder.equal(builder.unsqueeze(shifted, [1]), columns)
        return rewrite.replace(builder.op("Cast", [equal], {"to": int(dtype)}))
    if rows_known is None or columns_known is None or rows_known * columns_known > 1 << 20:
        rewrite.fail("EyeLike of an unknown or large size; export with opset 11 or newer")
    ones = np.eye(rows_known, columns_known, offset).astype(dtype.numpy())
    return rewrite.replace(builder.alias(builder.constant(ones, "eye")))


def fill_bytes(rewrite: Rewrite) -> None:
    """ConstantOfShape: the plugin reads the typed field of a value for four types only, but bytes
    for every type."""
    attr = rewrite.node.attributes.get("value")
    if attr is not None:
        rewrite.node.attributes["value"] = ir.AttrTensor(
            "value", ir.tensor(attr.as_tensor().numpy().copy())
        )


def block_of_one(rewrite: Rewrite) -> None:
    """DepthToSpace."""
    if int_attr(rewrite.node, "blocksize", 0) == 1:
        rewrite.replace(rewrite.op("Identity", [rewrite.needed(0)], rewrite.needed(0)))


def flat(rewrite: Rewrite) -> None:
    """Unique along the axis of a vector is Unique of all elements."""
    if "axis" in rewrite.node.attributes and len(rewrite.shape(rewrite.needed(0))) == 1:
        rewrite.drop("axis")


def all_axes(rewrite: Rewrite) -> None:
    """ReduceLogSum without axes."""
    defined_noop(rewrite)
    if "axes" not in rewrite.node.attributes and rewrite.builder.opset < 13:
        rewrite.write(axes=range(len(rewrite.shape(rewrite.needed(0)))))


def size(rewrite: Rewrite) -> None:
    """Size: the type of its result in GE is not known."""
    data, builder = rewrite.needed(0), rewrite.builder
    shape = builder.info.shape(data)
    sizes = [None] if shape is None else [dim.const for dim in shape]
    if None not in sizes:
        count = np.array(np.prod([size or 0 for size in sizes], dtype=np.int64))
        return rewrite.replace(builder.constant(count, "number"))
    every = builder.shape_of(data)
    return rewrite.replace(builder.op("ReduceProd", [every], {"keepdims": 0}))


def pad(rewrite: Rewrite) -> None:
    """Pad. Before opset 11 its plugin makes the padding of float32; the casts keep the numbers of
    float16."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    if builder.opset >= 11:
        return pads_of_all_axes(rewrite)
    if rewrite.dtype(data) != HALF:
        return None
    wide = builder.cast(data, ir.DataType.FLOAT)
    padded = rewrite.op("Pad", [wide], wide, attribute_values(node))
    return rewrite.replace(builder.cast(padded, HALF))


def squares(rewrite: Rewrite) -> None:
    """ReduceSumSquare with axes as input, which its plugin does not connect."""
    node, data, axes = rewrite.node, rewrite.needed(0), rewrite.given(1)
    if axes is None:
        return
    if int_attr(node, "noop_with_empty_axes", 0):
        rewrite.fail("noop_with_empty_axes is not supported")
    attrs = {"keepdims": int_attr(node, "keepdims", 1)}
    rewrite.replace(
        rewrite.op("ReduceSum", [rewrite.op("Mul", [data, data], data), axes], data, attrs)
    )


def one_axis(rewrite: Rewrite) -> None:
    """Softmax, LogSoftmax and Hardmax: before opset 13 they run over all axes from their axis
    on."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    if builder.opset >= 13:
        return
    axis = int_attr(node, "axis", 1)
    node.attributes["axis"] = ir.AttrInt64("axis", axis)
    if axis == -1 or axis == (rank := len(rewrite.shape(data))) - 1:
        return
    flat = rewrite.op("Flatten", [data], data, {"axis": axis % max(rank, 1)})
    result = rewrite.op(node.op_type, [flat], data, {"axis": -1 if builder.opset >= 11 else 1})
    rewrite.replace(rewrite.op("Reshape", [result, builder.shape_of(data)], data))
