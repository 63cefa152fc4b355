"""Reductions."""

from __future__ import annotations

from typing import Any

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles


def _flags(call: GeCall) -> dict[str, Any]:
    return {"keepdims": int(call.attr("keep_dims")), "noop_with_empty_axes": int(call.attr("noop_with_empty_axes"))}


@handles("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceLogSumExp")
def _reduce(call: GeCall) -> str:
    return call.node(call.op.type, call.x("x"), call.cast(call.x("axes"), "DT_INT64"), **_flags(call))


@handles("ReduceAny", "ReduceAll")
def _reduce_logical(call: GeCall) -> str:
    """ReduceAny and ReduceAll of booleans. Over no elements ReduceAny is false, and ReduceAll is true."""
    wanted = call.x("x") if call.op.type == "ReduceAny" else call.node("Not", call.x("x"))
    axes = call.cast(call.x("axes"), "DT_INT64")
    count = call.node("ReduceSum", call.cast(wanted, "DT_INT64"), axes, keepdims=int(call.attr("keep_dims")))
    some = call.node("Greater", count, call.ints(0))
    return some if call.op.type == "ReduceAny" else call.node("Not", some)
