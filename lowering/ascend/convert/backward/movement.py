"""Operators that move, slice, concatenate, repeat or fill."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


@handles("Reshape")
def _reshape(call: GeCall) -> str:
    """A 0 in the shape is a size and copies no size. A shape with both -1 and 0 has no meaning."""
    return call.node("Reshape", call.x("x"), call.cast(call.x("shape"), "DT_INT64"), allowzero=1)


@handles("Transpose")
def _transpose(call: GeCall) -> str:
    perm = [int(axis) for axis in call.constant("perm")]
    return call.node(
        "Transpose", call.x("x"), perm=[axis + len(perm) if axis < 0 else axis for axis in perm]
    )


@handles("Squeeze")
def _squeeze(call: GeCall) -> str:
    """An empty list of axes stands for all axes of size 1."""
    axes = list(call.attr("axis"))
    return (
        call.node("Squeeze", call.x("x"), call.ints(axes))
        if axes
        else call.node("Squeeze", call.x("x"))
    )


@handles("SqueezeV3")
def _squeeze_v3(call: GeCall) -> str:
    """An empty list of axes stands for all axes of size 1, as an absent one does."""
    empty = call.has("axes") and call.shape("axes") == (0,)
    return call.node("Squeeze", call.x("x"), "" if empty else call.maybe("axes"))


@handles("Unsqueeze")
def _unsqueeze(call: GeCall) -> str:
    return call.node("Unsqueeze", call.x("x"), call.ints(list(call.attr("axes"))))


@handles("UnsqueezeV3")
def _unsqueeze_v3(call: GeCall) -> str:
    return call.node("Unsqueeze", call.x("x"), call.x("axes"))


@handles("Shape", "Size")
def _shape(call: GeCall) -> str:
    return call.cast(call.node(call.op.type, call.x("x")), call.type_attr("dtype"))


@handles("ConcatD")
def _concat(call: GeCall) -> str:
    return call.node("Concat", *call.counted("x"), axis=call.attr("concat_dim"))


@handles("SplitD")
def _split_d(call: GeCall) -> Sequence[str]:
    """Equal parts. An axis that cannot be divided into equal parts is an error."""
    count, axis = call.attr("num_split"), call.attr("split_dim")
    shape = call.shape("x")
    if shape is not None and shape[axis] > 0 and shape[axis] % count:
        raise UnreadableError(f"SplitD '{call.op.name}' cuts {shape[axis]} into {count} parts")
    return call.nodes("Split", call.x("x"), count=count, axis=axis, num_outputs=count)


@handles("StridedSliceV2")
def _strided_slice(call: GeCall) -> str:
    """Bounds along `axes`, or along the first axes without this input. The masks must be 0, their
    default."""
    return call.node(
        "Slice",
        call.x("x"),
        call.x("begin"),
        call.x("end"),
        call.maybe("axes"),
        call.maybe("strides"),
    )


@handles("BroadcastTo")
def _broadcast_to(call: GeCall) -> str:
    """The result has exactly the given shape. If ONNX's Expand gives another shape, the Reshape
    fails."""
    shape = call.cast(call.x("shape"), "DT_INT64")
    return call.node("Reshape", call.node("Expand", call.x("x"), shape), shape, allowzero=1)


@handles("PadV3")
def _pad(call: GeCall) -> str:
    """Contiguous paddings are a pair for each axis. Others are all beginnings and then all ends, as
    in ONNX."""
    pads, rank = call.cast(call.x("paddings"), "DT_INT64"), call.rank("x")
    if call.attr("paddings_contiguous"):
        pairs = call.node("Reshape", pads, call.ints([rank, 2]))
        pads = call.node(
            "Reshape", call.node("Transpose", pairs, perm=[1, 0]), call.ints([2 * rank])
        )
    call.only("mode", "constant", "reflect", "edge")
    return call.node(
        "Pad", call.x("x"), pads, call.maybe("constant_values"), mode=call.attr("mode")
    )


@handles("Fill")
def _fill(call: GeCall) -> str:
    if call.rank("value") != 0:
        raise UnreadableError(f"Fill '{call.op.name}' takes a scalar")
    return call.node("Expand", call.x("value"), call.cast(call.x("dims"), "DT_INT64"))


@handles("Triu", "Tril")
def _triangle(call: GeCall) -> str:
    """The part on and above, or on and below, a diagonal; a positive number means a diagonal to the
    right."""
    return call.node(
        "Trilu", call.x("x"), call.ints(call.attr("diagonal")), upper=int(call.op.type == "Triu")
    )
