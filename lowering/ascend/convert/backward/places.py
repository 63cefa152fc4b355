"""Operators that read, write and find places."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means
from fa_compiler.lowering.ascend.convert.errors import UnreadableError


@means("GatherV2")
def _gather(r: Reading) -> str:
    """Indices along one axis; whether negative ones are expected changes nothing for the others."""
    r.only("negative_index_support", True, False)
    return r.n("Gather", r.x("x"), r.x("indices"), axis=int(r.constant("axis").reshape(())))


@means("GatherNd")
def _gather_nd(r: Reading) -> str:
    r.only("negative_index_support", True, False)
    return r.n("GatherND", r.x("x"), r.cast(r.x("indices"), "DT_INT64"), batch_dims=0)


@means("GatherElements")
def _gather_elements(r: Reading) -> str:
    return r.n("GatherElements", r.x("x"), r.x("index"), axis=r.attr("dim"))


@means("ScatterElements")
def _scatter_elements(r: Reading) -> str:
    r.only("reduction", "none", "add")
    axis, reduction = r.attr("axis"), r.attr("reduction")
    return r.n("ScatterElements", r.x("data"), r.x("indices"), r.x("updates"), axis=axis, reduction=reduction)


@means("TensorScatterAdd")
def _scatter_add(r: Reading) -> str:
    indices = r.cast(r.x("indices"), "DT_INT64")
    return r.n("ScatterND", r.x("x"), indices, r.x("updates"), reduction="add")


@means("TensorScatterMax", "TensorScatterMin")
def _scatter_extremum(r: Reading) -> str:
    reduction = r.op.type.removeprefix("TensorScatter").lower()
    indices = r.cast(r.x("indices"), "DT_INT64")
    return r.n("ScatterND", r.x("input"), indices, r.x("updates"), reduction=reduction)


@means("UnsortedSegmentSum")
def _segment_sum(r: Reading) -> str:
    """Row i of the result is the sum of the rows whose id is i."""
    x, count = r.x("x"), r.vector(r.cast(r.x("num_segments"), "DT_INT64"))
    rest = r.n("Slice", r.n("Shape", x), r.ints([1]), r.ints([r.rank("x")]))
    zeros = r.n("Expand", r.array(0, r.desc("x").dtype), r.n("Concat", count, rest, axis=0))
    ids = r.n("Unsqueeze", r.cast(r.x("segment_ids"), "DT_INT64"), r.ints([1]))
    return r.n("ScatterND", zeros, ids, x, reduction="add")


@means("TopK")
def _top_k(r: Reading) -> Sequence[str]:
    """The indices are int32."""
    if r.rank("k") != 0:
        raise UnreadableError(f"TopK '{r.op.name}' wants a scalar")
    k = r.vector(r.cast(r.x("k"), "DT_INT64"))
    flags = {"axis": r.attr("dim"), "largest": int(r.attr("largest")), "sorted": int(r.attr("sorted"))}
    values, indices = r.nodes("TopK", r.x("x"), k, count=2, **flags)
    return values, r.cast(indices, "DT_INT32")


@means("ArgMaxV2", "ArgMin")
def _arg_extremum(r: Reading) -> str:
    """The axis is dropped."""
    r.only("dtype", "DT_INT64", "DT_INT32")
    op_type = "ArgMax" if r.op.type == "ArgMaxV2" else "ArgMin"
    found = r.n(op_type, r.x("x"), axis=int(r.constant("dimension").reshape(())), keepdims=0)
    return r.cast(found, r.attr("dtype"))


@means("NonZero")
def _non_zero(r: Reading) -> str:
    """A row for each element found, or transposed a row for each axis."""
    found = r.n("NonZero", r.x("x"))
    found = found if r.attr("transpose") else r.n("Transpose", found, perm=[1, 0])
    return r.cast(found, r.attr("dtype"))


@means("OneHot")
def _one_hot(r: Reading) -> str:
    """An index outside of 0 to depth - 1 leaves its row off; ONNX would count negative ones from the end."""
    indices, depth = r.cast(r.x("x"), "DT_INT64"), r.cast(r.x("depth"), "DT_INT64")
    outside = r.n("Less", indices, r.ints(0))
    indices = r.n("Where", outside, depth, indices)
    values = r.n("Concat", r.vector(r.x("off_value")), r.vector(r.x("on_value")), axis=0)
    return r.n("OneHot", indices, depth, values, axis=r.attr("axis"))


@means("Cumsum")
def _cumsum(r: Reading) -> str:
    flags = {"exclusive": int(r.attr("exclusive")), "reverse": int(r.attr("reverse"))}
    return r.n("CumSum", r.x("x"), r.x("axis"), **flags)
