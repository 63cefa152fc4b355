"""Operators that move, cut, join, repeat and fill."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


@means("Reshape")
def _reshape(r: Reading) -> str:
    """A 0 is a size, not a copy; shapes with -1 and 0 at once have no meaning."""
    return r.n("Reshape", r.x("x"), r.cast(r.x("shape"), "DT_INT64"), allowzero=1)


@means("Transpose")
def _transpose(r: Reading) -> str:
    return r.n("Transpose", r.x("x"), perm=[int(axis) for axis in r.constant("perm")])


@means("Squeeze")
def _squeeze(r: Reading) -> str:
    """No axes are all axes of size 1."""
    axes = list(r.attr("axis"))
    return r.n("Squeeze", r.x("x"), r.ints(axes)) if axes else r.n("Squeeze", r.x("x"))


@means("SqueezeV3")
def _squeeze_v3(r: Reading) -> str:
    return r.n("Squeeze", r.x("x"), r.maybe("axes"))


@means("Unsqueeze")
def _unsqueeze(r: Reading) -> str:
    return r.n("Unsqueeze", r.x("x"), r.ints(list(r.attr("axes"))))


@means("UnsqueezeV3")
def _unsqueeze_v3(r: Reading) -> str:
    return r.n("Unsqueeze", r.x("x"), r.x("axes"))


@means("Shape")
def _shape(r: Reading) -> str:
    return r.cast(r.n("Shape", r.x("x")), r.type_attr("dtype"))


@means("Size")
def _size(r: Reading) -> str:
    return r.cast(r.n("Size", r.x("x")), r.type_attr("dtype"))


@means("ConcatD")
def _concat(r: Reading) -> str:
    inputs = r.dynamic("x")
    if r.attr("N") != len(inputs):
        raise UnreadableError(f"ConcatD '{r.op.name}' has {len(inputs)} inputs and N = {r.attr('N')}")
    return r.n("Concat", *inputs, axis=r.attr("concat_dim"))


@means("SplitD")
def _split_d(r: Reading) -> Sequence[str]:
    """Equal parts; an axis that does not divide is an error."""
    count, axis = r.attr("num_split"), r.attr("split_dim")
    _check_outputs(r, count)
    shape = r.desc("x").shape
    if shape is not None and shape[axis] > 0 and shape[axis] % count:
        raise UnreadableError(f"SplitD '{r.op.name}' cuts {shape[axis]} into {count} parts")
    return r.nodes("Split", r.x("x"), count=count, axis=axis, num_outputs=count)


@means("SplitV")
def _split_v(r: Reading) -> Sequence[str]:
    count = r.attr("num_split")
    _check_outputs(r, count)
    sizes = r.cast(r.x("size_splits"), "DT_INT64")
    axis = int(r.constant("split_dim").reshape(()))
    return r.nodes("Split", r.x("x"), sizes, count=count, axis=axis)


def _check_outputs(r: Reading, count: int) -> None:
    if count != len(r.op.output_descs):
        raise UnreadableError(f"{r.op.type} '{r.op.name}' has {len(r.op.output_descs)} outputs, num_split is {count}")


@means("StridedSliceV2")
def _strided_slice(r: Reading) -> str:
    """Bounds along `axes`, or along the first axes without it. Masks, which must be 0, keep their default."""
    return r.n("Slice", r.x("x"), r.x("begin"), r.x("end"), r.maybe("axes"), r.maybe("strides"))


@means("BroadcastTo")
def _broadcast_to(r: Reading) -> str:
    """The result has the given shape exactly: where ONNX's Expand would give another one, the Reshape fails."""
    shape = r.cast(r.x("shape"), "DT_INT64")
    return r.n("Reshape", r.n("Expand", r.x("x"), shape), shape, allowzero=1)


@means("PadV3")
def _pad(r: Reading) -> str:
    """Paddings are pairs for each axis, or, not contiguous, all beginnings and then all ends, as in ONNX."""
    pads, rank = r.cast(r.x("paddings"), "DT_INT64"), r.rank("x")
    if r.attr("paddings_contiguous"):
        pairs = r.n("Reshape", pads, r.ints([rank, 2]))
        pads = r.n("Reshape", r.n("Transpose", pairs, perm=[1, 0]), r.ints([2 * rank]))
    r.only("mode", "constant", "reflect", "edge")
    return r.n("Pad", r.x("x"), pads, r.maybe("constant_values"), mode=r.attr("mode"))


@means("Fill")
def _fill(r: Reading) -> str:
    if r.rank("value") != 0:
        raise UnreadableError(f"Fill '{r.op.name}' wants a scalar")
    return r.n("Expand", r.x("value"), r.cast(r.x("dims"), "DT_INT64"))


@means("Triu", "Tril")
def _triangle(r: Reading) -> str:
    """The part on and above, or below, a diagonal that is counted to the right."""
    return r.n("Trilu", r.x("x"), r.ints(r.attr("diagonal")), upper=int(r.op.type == "Triu"))
