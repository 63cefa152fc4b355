"""Operators that read or write at indices, and operators that give indices."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles


def _never_negative(call: OnnxCall, index: int) -> bool:
    array = call.array(index)
    if array is not None:
        return bool((array >= 0).all())
    content = call.content(index)
    return content is not None and all(item.is_at_least(0) for item in content)


@handles("Gather")
def _gather(call: OnnxCall) -> Tensor:
    axis = call.axis(0)
    negative = not _never_negative(call, 1)
    return call.emitter.op(
        "GatherV2",
        call.x(0),
        call.x(1),
        call.emitter.ints(axis),
        negative_index_support=negative,
        out=call.out(),
    )


def _wrapped(call: OnnxCall, index: int, size: int | Tensor) -> Tensor:
    """Indices counted from the front, for an operator whose prototype does not promise to take
    negative ones. The size is that of an axis, or those of several."""
    indices = call.x(index)
    if _never_negative(call, index):
        return indices
    sizes = (
        call.emitter.ints(size, indices.dtype)
        if isinstance(size, int)
        else call.cast(size, indices.dtype)
    )
    below = call.binary("Less", indices, call.like(0, indices), "DT_BOOL")
    return call.emitter.op(
        "SelectV2", below, call.binary("Add", indices, sizes), indices, out=indices
    )


@handles("GatherElements")
def _gather_elements(call: OnnxCall) -> Tensor:
    axis = call.axis(0)
    indices = _wrapped(call, 1, call.size(call.x(), axis))
    return call.emitter.op("GatherElements", call.x(), indices, dim=axis, out=call.out())


@handles("Scatter", "ScatterElements")
def _scatter_elements(call: OnnxCall) -> Tensor:
    """GE's ScatterElements adds and multiplies. A maximum or minimum is converted to an operator
    that scatters at indices of all axes."""
    axis = call.axis(0)
    reduction = call.text("reduction", "none")
    indices = _wrapped(call, 1, call.size(call.x(), axis))
    if reduction in ("max", "min"):
        sizes = [call.size(indices, place) for place in range(indices.rank)]
        parts = [
            call.unsqueeze(indices, [indices.rank])
            if place == axis
            else call.unsqueeze(call.cast(_grid(call, sizes, place), indices.dtype), [indices.rank])
            for place in range(indices.rank)
        ]
        places = _joined(call, parts)
        return call.emitter.op(
            f"TensorScatter{reduction.title()}", call.x(0), places, call.x(2), out=call.out()
        )
    if reduction not in ("none", "add", "mul"):
        raise CannotMapError(f"ScatterElements of GE has no reduction {reduction}")
    narrow = call.x().dtype == "DT_BOOL"  # GE's operators scatter no booleans
    data, updates = (call.cast(x, "DT_INT8") if narrow else x for x in (call.x(0), call.x(2)))
    out = Type(data.dtype, call.out().shape)
    made = call.emitter.op(
        "ScatterElements", data, indices, updates, axis=axis, reduction=reduction, out=out
    )
    return call.cast(made, call.x().dtype)


@handles("GatherND")
def _gather_nd(call: OnnxCall) -> Tensor:
    """The positions along batch dimensions are put before the indices."""
    batch = call.integer("batch_dims", 0)
    indices = call.x(1) if batch == 0 else _batched(call, batch)
    return call.emitter.op(
        "GatherNd", call.x(0), indices, negative_index_support=True, out=call.out()
    )


def _batched(call: OnnxCall, batch: int) -> Tensor:
    indices = call.x(1)
    sizes = [call.size(indices, axis) for axis in range(indices.rank - 1)]
    parts = [call.cast(_grid(call, [*sizes, 1], axis), indices.dtype) for axis in range(batch)]
    return _joined(call, [*parts, indices])


def _grid(call: OnnxCall, sizes: Sequence[int | Tensor], axis: int) -> Tensor:
    """The position along one axis for every element of a tensor of these sizes, in int64."""
    positions = call.unsqueeze(
        call.positions(sizes[axis]), [place for place in range(len(sizes)) if place != axis]
    )
    shape = tuple(size if isinstance(size, int) else -1 for size in sizes)
    return call.emitter.op(
        "BroadcastTo", positions, call.vector(sizes), out=Type("DT_INT64", shape)
    )


def _joined(call: OnnxCall, parts: Sequence[Tensor]) -> Tensor:
    """The concatenation of tensors along the last axis."""
    shapes = [part.shape for part in parts if part.shape is not None]
    width = -1 if any(shape[-1] < 0 for shape in shapes) else sum(shape[-1] for shape in shapes)
    axis = parts[0].rank - 1
    out = Type(parts[0].dtype, (*shapes[-1][:-1], width))
    return (
        parts[0]
        if len(parts) == 1
        else call.emitter.op("ConcatD", parts, concat_dim=axis, N=len(parts), out=out)
    )


@handles("ScatterND")
def _scatter_nd(call: OnnxCall) -> Tensor:
    x, indices, updates = call.x(0), call.x(1), call.x(2)
    operators = {
        "none": "TensorScatterUpdate",
        "add": "TensorScatterAdd",
        "max": "TensorScatterMax",
        "min": "TensorScatterMin",
    }
    reduction = call.text("reduction", "none")
    if reduction not in operators:
        raise CannotMapError(f"GE has no ScatterND with reduction {reduction}")
    if not _never_negative(call, 1):
        depth = indices.size(-1)
        if depth < 0:
            raise CannotMapError(
                "the number of indexed axes is not known", "declare the shape of its indices"
            )
        indices = _wrapped(call, 1, call.vector([call.size(x, axis) for axis in range(depth)]))
    return call.emitter.op(operators[reduction], x, indices, updates, out=call.out())


@handles("TopK")
def _top_k(call: OnnxCall) -> Sequence[Tensor]:
    """GE takes the count as an int32 scalar. Its result is sorted, also if ONNX allows any
    order."""
    x = call.x()
    counts = call.integers(1)
    if counts is None and call.has(1):
        k = call.cast(call.squeeze(call.x(1), list(range(call.x(1).rank))), "DT_INT32")
    else:
        k = call.emitter.ints(counts[0] if counts else call.integer("k", 1), "DT_INT32")
    outs = [call.out(0), Type("DT_INT32", call.out(1).shape)]
    largest = bool(call.integer("largest", 1))
    values, indices = call.emitter.ops(
        "TopK", x, k, sorted=True, largest=largest, dim=call.axis(-1), outs=outs
    )
    return values, call.cast(indices, "DT_INT64")


@handles("ArgMax", "ArgMin")
def _arg_extremum(call: OnnxCall) -> Tensor:
    """The first of equal elements, in GE as in ONNX. GE drops the axis; it is added again for
    keepdims."""
    if call.integer("select_last_index", 0):
        raise CannotMapError("GE finds the first of equal elements, not the last")
    x, axis = call.x(), call.axis(0)
    op_type = "ArgMaxV2" if call.node.op_type == "ArgMax" else "ArgMin"
    shape = None if x.shape is None else x.shape[:axis] + x.shape[axis + 1 :]
    found = call.emitter.op(
        op_type, x, call.emitter.ints(axis), dtype="DT_INT64", out=Type("DT_INT64", shape)
    )
    return call.unsqueeze(found, [axis]) if call.integer("keepdims", 1) else found


@handles("NonZero")
def _non_zero(call: OnnxCall) -> Tensor:
    """ONNX's result is [rank, count], which is the transposed form of GE."""
    return call.emitter.op("NonZero", call.x(), transpose=True, dtype="DT_INT64", out=call.out())
