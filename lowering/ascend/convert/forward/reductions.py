"""Reductions. The axes are an attribute in old opsets and an input in new ones; in GE they are an
input."""

from __future__ import annotations

from typing import Any

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles


def reduce_over(call: OnnxCall, op_type: str, x: Tensor) -> Tensor:
    """`x` reduced over the axes of the node. No axes stand for all axes, or for none with
    noop_with_empty_axes."""
    keep = bool(call.integer("keepdims", 1))
    out = Type(x.dtype, call.out().shape)
    attributes: dict[str, Any] = {"keep_dims": keep}
    if op_type not in ("ReduceAny", "ReduceAll"):
        attributes["noop_with_empty_axes"] = False
    axes = call.integer_list("axes")
    if axes is None and call.has(1):
        axes = call.integers(1)
        if axes is None:
            # With no axes in a run, the attribute decides: no reduction, or a reduction over all
            # axes.
            attributes["noop_with_empty_axes"] = call.integer("noop_with_empty_axes", 0) == 1
            return call.emitter.op(op_type, x, call.x(1), out=out, **attributes)
    if not axes:
        if call.integer("noop_with_empty_axes", 0) == 1:
            return x
        axes = list(range(x.rank))
    if not axes:
        return x  # a scalar
    if x.shape is not None:
        axes = sorted(call.front(axis, x.rank) for axis in axes)
    return call.emitter.op(op_type, x, call.emitter.ints(axes), out=out, **attributes)


@handles("ReduceSum", "ReduceMean", "ReduceProd", "ReduceLogSumExp")
def _reduce(call: OnnxCall) -> Tensor:
    return reduce_over(call, call.node.op_type, call.x())


@handles("ReduceMax", "ReduceMin")
def _reduce_extremum(call: OnnxCall) -> Tensor:
    """The maximum of booleans is ReduceAny, the minimum is ReduceAll."""
    if call.x().dtype == "DT_BOOL":
        return reduce_over(
            call, "ReduceAny" if call.node.op_type == "ReduceMax" else "ReduceAll", call.x()
        )
    return reduce_over(call, call.node.op_type, call.x())


@handles("ReduceSumSquare")
def _reduce_sum_square(call: OnnxCall) -> Tensor:
    return reduce_over(call, "ReduceSum", call.unary("Square", call.x()))


@handles("ReduceL1")
def _reduce_l1(call: OnnxCall) -> Tensor:
    return reduce_over(call, "ReduceSum", call.unary("Abs", call.x()))


@handles("ReduceL2")
def _reduce_l2(call: OnnxCall) -> Tensor:
    return call.unary("Sqrt", reduce_over(call, "ReduceSum", call.unary("Square", call.x())))


@handles("ReduceLogSum")
def _reduce_log_sum(call: OnnxCall) -> Tensor:
    return call.unary("Log", reduce_over(call, "ReduceSum", call.x()))


@handles("GlobalAveragePool", "GlobalMaxPool")
def _over_space(call: OnnxCall) -> Tensor:
    op_type = "ReduceMean" if call.node.op_type == "GlobalAveragePool" else "ReduceMax"
    axes = call.emitter.ints(range(2, call.x().rank))
    return call.reduced(op_type, call.x(), axes, call.out(), keep=True)
