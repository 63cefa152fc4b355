"""Reductions."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles


@handles("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceLogSumExp")
def _reduce(call: GeCall) -> str:
    keeps, noop = (int(call.attr(name)) for name in ("keep_dims", "noop_with_empty_axes"))
    axes = call.cast(call.x("axes"), "DT_INT64")
    return call.node(call.op.type, call.x("x"), axes, keepdims=keeps, noop_with_empty_axes=noop)


@handles("ReduceAny", "ReduceAll")
def _reduce_logical(call: GeCall) -> str:
    """ReduceAny and ReduceAll of booleans. Over no elements ReduceAny is false, and ReduceAll is
    true."""
    wanted = call.x("x") if call.op.type == "ReduceAny" else call.node("Not", call.x("x"))
    axes = call.cast(call.x("axes"), "DT_INT64")
    count = call.node(
        "ReduceSum", call.cast(wanted, "DT_INT64"), axes, keepdims=int(call.attr("keep_dims"))
    )
    some = call.node("Greater", count, call.ints(0))
    return some if call.op.type == "ReduceAny" else call.node("Not", some)
