"""Operators that make a tensor from sizes or positions."""

from __future__ import annotations

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles
from fa_compiler.op_registry.dtypes import from_onnx


@handles("ConstantOfShape")
def _filled(call: OnnxCall) -> Tensor:
    """A tensor filled with the value of the attribute, or with float32 zeros without it."""
    attr = call.node.attributes.get("value")
    array = np.zeros((1,), np.float32) if attr is None else attr.as_tensor().numpy()
    value = call.emitter.const(array.reshape(()), call.out().dtype)
    return call.emitter.op("Fill", call.x(), value, out=call.out())


@handles("Trilu")
def _trilu(call: OnnxCall) -> Tensor:
    """In GE the diagonal is an attribute. A computed diagonal becomes a comparison of positions."""
    x, upper = call.x(), bool(call.integer("upper", 1))
    diagonal = call.integers(1) if call.has(1) else [0]
    if diagonal is not None:
        return call.emitter.op("Triu" if upper else "Tril", x, diagonal=diagonal[0], out=call.out())
    offset = call.squeeze(call.x(1), list(range(call.x(1).rank)))
    distance = _distance(call, call.size(x, x.rank - 2), call.size(x, x.rank - 1))
    kept = call.binary("GreaterEqual" if upper else "LessEqual", distance, offset, "DT_BOOL")
    return call.emitter.op("SelectV2", kept, x, call.like(0, x), out=call.out())


def _distance(call: OnnxCall, rows: int | Tensor, columns: int | Tensor) -> Tensor:
    """The column minus the row of each element, [rows, columns] in int64."""
    down, across = map(call.positions, (rows, columns))
    return call.binary("Sub", call.unsqueeze(across, [0]), call.unsqueeze(down, [1]))


@handles("EyeLike")
def _eye_like(call: OnnxCall) -> Tensor:
    """1 where the column minus the row is k, else 0."""
    x, out = call.x(), call.out()
    number = call.integer("dtype", 0)
    dtype = from_onnx(number) if number else x.dtype
    if dtype is None:
        raise CannotMapError(f"GE has no type with ONNX's number {number}")
    distance = _distance(call, call.size(x, 0), call.size(x, 1))
    equal = call.binary("Equal", distance, call.emitter.ints(call.integer("k", 0)), "DT_BOOL")
    return call.cast(Tensor("DT_BOOL", out.shape, equal.output), dtype)


@handles("OneHot")
def _one_hot(call: OnnxCall) -> Tensor:
    """ONNX counts negative indices from the end; in GE their rows have the off value.

    In ONNX the depth has one element and the values have two. In GE they are scalars.
    """
    indices = (
        call.x(0)
        if call.x(0).dtype in ("DT_INT32", "DT_INT64")
        else call.cast(call.x(0), "DT_INT64")
    )
    depths = call.integers(1)
    axis = call.integer("axis", -1)
    axis = axis if axis == -1 else call.front(axis, indices.rank + 1)
    depth_input = call.x(1)
    depth = call.cast(call.squeeze(depth_input, list(range(depth_input.rank))), "DT_INT32")
    if depths is not None:
        depth = call.emitter.ints(depths[0], "DT_INT32")
    below = call.binary("Less", indices, call.like(0, indices), "DT_BOOL")
    wrapped = call.binary("Add", indices, call.cast(depth, indices.dtype))
    indices = call.emitter.op("SelectV2", below, wrapped, indices, out=indices)
    off, on = (call.squeeze(call.element(call.x(2), place), [0]) for place in (0, 1))
    return call.emitter.op("OneHot", indices, depth, on, off, axis=axis, out=call.out())


@handles("ReverseSequence")
def _reversed(call: OnnxCall) -> Tensor:
    rows, batch = call.integer("time_axis", 0), call.integer("batch_axis", 1)
    return call.emitter.op(
        "ReverseSequence", call.x(), call.x(1), seq_dim=rows, batch_dim=batch, out=call.out()
    )


@handles("CumSum")
def _cumulated(call: OnnxCall) -> Tensor:
    axes = call.integers(1)
    axis = call.emitter.ints(call.front(axes[0], call.x().rank)) if axes else call.x(1)
    exclusive, reverse = bool(call.integer("exclusive", 0)), bool(call.integer("reverse", 0))
    return call.emitter.op(
        "Cumsum", call.x(), axis, exclusive=exclusive, reverse=reverse, out=call.out()
    )
