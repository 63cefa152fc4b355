"""Reductions."""

from __future__ import annotations

from typing import Any

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means


def _flags(r: Reading) -> dict[str, Any]:
    return {"keepdims": int(r.attr("keep_dims")), "noop_with_empty_axes": int(r.attr("noop_with_empty_axes"))}


@means("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceLogSumExp")
def _reduce(r: Reading) -> str:
    return r.n(r.op.type, r.x("x"), r.cast(r.x("axes"), "DT_INT64"), **_flags(r))


@means("ReduceAny", "ReduceAll")
def _reduce_logical(r: Reading) -> str:
    """Of truth values, as numbers 0 and 1: the largest, or the smallest."""
    op_type = "ReduceMax" if r.op.type == "ReduceAny" else "ReduceMin"
    numbers = r.cast(r.x("x"), "DT_INT32")
    found = r.n(op_type, numbers, r.cast(r.x("axes"), "DT_INT64"), keepdims=int(r.attr("keep_dims")))
    return r.cast(found, "DT_BOOL")
