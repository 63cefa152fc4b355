"""Operators that read or write at indices, and operators that give indices."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


@handles("GatherV2")
def _gather(call: GeCall) -> str:
    """Indices along one axis. The attribute for negative indices does not matter for the others."""
    call.only("negative_index_support", True, False)
    return call.node(
        "Gather", call.x("x"), call.x("indices"), axis=int(call.constant("axis").reshape(()))
    )


@handles("GatherNd")
def _gather_nd(call: GeCall) -> str:
    call.only("negative_index_support", True, False)
    return call.node(
        "GatherND", call.x("x"), call.cast(call.x("indices"), "DT_INT64"), batch_dims=0
    )


@handles("GatherElements")
def _gather_elements(call: GeCall) -> str:
    return call.node("GatherElements", call.x("x"), call.x("index"), axis=call.attr("dim"))


@handles("ScatterElements")
def _scatter_elements(call: GeCall) -> str:
    call.only("reduction", "none", "add", "mul")
    axis, reduction = call.attr("axis"), call.attr("reduction")
    return call.node(
        "ScatterElements",
        call.x("data"),
        call.x("indices"),
        call.x("updates"),
        axis=axis,
        reduction=reduction,
    )


@handles("TensorScatterAdd", "TensorScatterMax", "TensorScatterMin")
def _scatter_nd(call: GeCall) -> str:
    """The tensor has another name in each of them."""
    reduction = call.op.type.removeprefix("TensorScatter").lower()
    indices = call.cast(call.x("indices"), "DT_INT64")
    return call.node(
        "ScatterND",
        call.x(call.spec.input_names[0]),
        indices,
        call.x("updates"),
        reduction=reduction,
    )


@handles("UnsortedSegmentSum")
def _segment_sum(call: GeCall) -> str:
    """Row i of the result is the sum of the rows whose id is i. The ids have the first axes of
    x."""
    x, count = call.x("x"), call.vector(call.cast(call.x("num_segments"), "DT_INT64"))
    inner = call.rank("segment_ids")
    rest = call.node(
        "Slice", call.node("Shape", x), call.ints([inner]), call.ints([call.rank("x")])
    )
    zeros = call.node(
        "Expand", call.array(0, call.dtype("x")), call.node("Concat", count, rest, axis=0)
    )
    ids = call.node("Unsqueeze", call.cast(call.x("segment_ids"), "DT_INT64"), call.ints([inner]))
    return call.node("ScatterND", zeros, ids, x, reduction="add")


@handles("TopK")
def _top_k(call: GeCall) -> Sequence[str]:
    """The indices are int32."""
    if call.rank("k") > 1:
        raise UnreadableError(f"TopK '{call.op.name}' takes one number")
    k = call.vector(call.cast(call.x("k"), "DT_INT64"))
    flags = {
        "axis": call.attr("dim"),
        "largest": int(call.attr("largest")),
        "sorted": int(call.attr("sorted")),
    }
    values, indices = call.nodes("TopK", call.x("x"), k, count=2, **flags)
    return values, call.cast(indices, "DT_INT32")


@handles("ArgMaxV2", "ArgMin")
def _arg_extremum(call: GeCall) -> str:
    """The axis is dropped."""
    call.only("dtype", "DT_INT64", "DT_INT32")
    op_type = "ArgMax" if call.op.type == "ArgMaxV2" else "ArgMin"
    found = call.node(
        op_type, call.x("x"), axis=int(call.constant("dimension").reshape(())), keepdims=0
    )
    return call.cast(found, call.attr("dtype"))


@handles("NonZero")
def _non_zero(call: GeCall) -> str:
    """One row for each found element or, transposed, one row for each axis."""
    found = call.node("NonZero", call.x("x"))
    found = found if call.attr("transpose") else call.node("Transpose", found, perm=[1, 0])
    return call.cast(found, call.attr("dtype"))


@handles("OneHot")
def _one_hot(call: GeCall) -> str:
    """An index outside 0 to depth - 1 gives a row of the off value. ONNX would count a negative one
    from the end."""
    indices = call.cast(call.x("x"), "DT_INT64")
    depth = call.node("Reshape", call.cast(call.x("depth"), "DT_INT64"), call.ints([]))
    outside = call.node("Less", indices, call.ints(0))
    indices = call.node("Where", outside, depth, indices)
    values = call.node(
        "Concat", call.vector(call.x("off_value")), call.vector(call.x("on_value")), axis=0
    )
    return call.node("OneHot", indices, depth, values, axis=call.attr("axis"))


@handles("ReverseSequence")
def _reversed(call: GeCall) -> str:
    rows, batch = int(call.attr("seq_dim")), int(call.attr("batch_dim"))
    if {rows, batch} != {0, 1}:
        raise UnreadableError("ONNX reverses rows of the first two dimensions only")
    lengths = call.cast(call.x("seq_lengths"), "DT_INT64")
    return call.node("ReverseSequence", call.x("x"), lengths, time_axis=rows, batch_axis=batch)


@handles("Cumsum")
def _cumsum(call: GeCall) -> str:
    flags = {"exclusive": int(call.attr("exclusive")), "reverse": int(call.attr("reverse"))}
    return call.node("CumSum", call.x("x"), call.x("axis"), **flags)
