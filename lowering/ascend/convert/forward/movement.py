"""Operators that move, slice, concatenate, pad or repeat elements, and the operators of shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles
from fa_compiler.lowering.ascend.dtypes import attr_number

_FIX = "fix the sizes with --input-shape"
_END = np.iinfo(np.int64).max


@handles("Reshape")
def _reshape(call: OnnxCall) -> Tensor:
    """A 0 in ONNX's target copies a size, unless allowzero is set. GE does not define the meaning
    of a 0.

    So GE's target holds no 0 that copies. A size that is the same in every run is a number, and any
    other copied size is read from the input.
    """
    x, out = call.x(), call.out()
    if out.shape is not None and -1 not in out.shape:
        return call.emitter.op("Reshape", x, call.emitter.ints(out.shape), out=out)
    copies = not call.integer("allowzero", 0)
    content = call.content(1)
    if content is None:
        return call.emitter.op("Reshape", x, _with_copies(call) if copies else call.x(1), out=out)
    copied = [copies and size.const == 0 for size in content]
    if not any(copied) and any(size.const is None for size in content):
        return call.emitter.op("Reshape", x, call.x(1), out=out)
    parts: list[int | Tensor] = []
    for place, size in enumerate(content):
        if copied[place]:
            parts.append(call.size(x, place))
        elif size.const is not None:
            parts.append(size.const)
        else:
            parts.append(call.cast(call.element(call.x(1), place), "DT_INT64"))
    return call.emitter.op("Reshape", x, call.vector(parts), out=out)


def _target_length(target: Tensor) -> int:
    """The number of sizes in a target shape."""
    if not target.shape or target.shape[0] < 0:
        raise CannotMapError("the length of the target shape is not known", _FIX)
    return target.shape[0]


def _with_copies(call: OnnxCall) -> Tensor:
    """The target with the input's sizes in place of zeros."""
    x, target = call.x(), call.x(1)
    length = _target_length(target)
    own = [call.size(x, axis) for axis in range(min(length, x.rank))] + [0] * max(
        0, length - x.rank
    )
    zero = call.binary("Equal", target, call.emitter.ints(0), "DT_BOOL")
    return call.emitter.op("SelectV2", zero, call.vector(own), target, out=target)


@handles("Flatten")
def _flatten(call: OnnxCall) -> Tensor:
    x, out = call.x(), call.out()
    axis = call.integer("axis", 1)
    if out.shape is not None and -1 not in out.shape:
        return call.reshape(x, out.shape)
    axis = axis + x.rank if axis < 0 else axis
    if x.shape is None:
        return _halved(call, x, axis)
    front, back = x.shape[:axis], x.shape[axis:]
    if -1 not in front and 0 not in front:
        return call.reshape(x, [int(np.prod(front)), -1])
    if -1 not in back and 0 not in back:
        return call.reshape(x, [-1, int(np.prod(back))])
    return _halved(call, x, axis)


def _halved(call: OnnxCall, x: Tensor, axis: int) -> Tensor:
    """`x` as a matrix whose rows are the axes before `axis`. Both sizes are read at run time.

    Neither size is -1, because -1 is ambiguous if the other size is 0.
    """
    return call.reshape(x, [_count(call, x, 0, axis), _count(call, x, axis, _END)])


def _count(call: OnnxCall, x: Tensor, begin: int, end: int) -> Tensor:
    """The product of the sizes from axis `begin` to `end`, as a vector of one element."""
    sizes = call.cut(call.shape(x), [begin], [end])
    return call.reduced(
        "ReduceProd", sizes, call.emitter.ints([0]), Type("DT_INT64", (1,)), keep=True
    )


@handles("Transpose")
def _transpose(call: OnnxCall) -> Tensor:
    perm = call.integer_list("perm")
    perm = list(reversed(range(call.x().rank))) if perm is None else perm
    return call.emitter.op("Transpose", call.x(), call.emitter.ints(perm), out=call.out())


def _axes(call: OnnxCall, rank: int | None) -> list[int] | None:
    """The axes of Squeeze and Unsqueeze, which are an attribute before opset 13. None if they are
    computed."""
    axes = call.listed("axes", 1)
    if axes is None or rank is None:
        return axes
    return [call.front(axis, rank) for axis in axes]


@handles("Squeeze")
def _squeeze(call: OnnxCall) -> Tensor:
    x = call.x()
    if call.has(1) and call.integers(1) is None:
        return call.emitter.op("SqueezeV3", x, call.x(1), out=call.out())
    axes = _axes(call, None if x.shape is None else len(x.shape))
    if axes == []:
        raise CannotMapError(
            "an empty list of axes means no axes for some tools, all axes for others",
            "leave it out",
        )
    return call.emitter.op("Squeeze", x, axis=axes or [], out=call.out())


@handles("Unsqueeze")
def _unsqueeze(call: OnnxCall) -> Tensor:
    x = call.x()
    if call.has(1) and call.integers(1) is None:
        return call.emitter.op("UnsqueezeV3", x, call.cast(call.x(1), "DT_INT64"), out=call.out())
    axes = _axes(call, None) or []
    if any(axis < 0 for axis in axes):
        axes = [call.front(axis, x.rank + len(axes)) for axis in axes]
    return call.emitter.op("Unsqueeze", x, axes=sorted(axes), out=call.out()) if axes else x


@handles("Shape")
def _shape(call: OnnxCall) -> Tensor:
    x = call.x()
    full_shape = call.emitter.op(
        "Shape",
        x,
        dtype=attr_number("DT_INT64"),
        out=Type("DT_INT64", (-1 if x.shape is None else len(x.shape),)),
    )
    start, end = call.integer("start", 0), call.node.attributes.get("end")
    if start == 0 and end is None:
        return full_shape
    stop = _END if end is None else end.as_int()
    start, stop, _ = slice(start, stop).indices(x.rank)
    return call.cut(full_shape, [start], [max(start, stop)])


@handles("Size")
def _size(call: OnnxCall) -> Tensor:
    x = call.x()
    if x.dtype == "DT_BF16":
        axes = call.emitter.ints([0])
        return call.reduced("ReduceProd", call.shape(x), axes, Type("DT_INT64", ()))
    return call.emitter.op("Size", x, dtype=attr_number("DT_INT64"), out=call.out())


@handles("Concat")
def _concat(call: OnnxCall) -> Tensor:
    inputs = call.present()
    if len(inputs) == 1:
        return inputs[0]
    axis = call.integer("axis", 1)  # the default; only opsets below 4 have one
    axis = axis if inputs[0].shape is None else call.front(axis, inputs[0].rank)
    return call.emitter.op("ConcatD", inputs, concat_dim=axis, N=len(inputs), out=call.out())


@handles("Split")
def _split(call: OnnxCall) -> Sequence[Tensor]:
    """The sizes are an attribute before opset 13. Without sizes the parts are equal; from opset 18
    on, the last part may be smaller."""
    x = call.x()
    axis = call.axis(0)
    count = len(call.node.outputs)
    outs = [call.out(index) for index in range(count)]
    sizes = call.listed("split", 1)
    if sizes is None:
        if call.has(1):
            return call.emitter.ops(
                "SplitV", x, call.x(1), call.emitter.ints(axis), num_split=count, outs=outs
            )
        size = x.shape[axis] if x.shape is not None else -1
        sizes = _equal_parts(call, size, count)
    if count == 1:
        return [x]
    if (sizes is None or len(set(sizes)) == 1) and x.dtype != "DT_DOUBLE":
        return call.emitter.ops("SplitD", x, split_dim=axis, num_split=count, outs=outs)
    if sizes is None:
        raise CannotMapError("the sizes of the parts are not known", _FIX)
    return call.emitter.ops(
        "SplitV", x, call.emitter.ints(sizes), call.emitter.ints(axis), num_split=count, outs=outs
    )


def _equal_parts(call: OnnxCall, size: int, count: int) -> list[int] | None:
    """The sizes of `count` equal parts, of which the last may be smaller; None if all are equal, or
    if the size of the axis is unknown (-1)."""
    if size < 0:
        if call.opset >= 18:
            raise CannotMapError("the parts of an axis of unknown size may differ", _FIX)
        return None
    part = -(-size // count)
    before = part * (count - 1)
    if before > size:
        raise CannotMapError(
            f"an axis of size {size} has no {count} equal parts", "give the sizes of the parts"
        )
    return [part] * (count - 1) + [size - before] if size % count else None


@handles("Slice")
def _slice(call: OnnxCall) -> Tensor:
    """The bounds and axes are attributes before opset 10.

    In GE as in ONNX, negative bounds count from the end, and bounds are clamped to the axis. For an
    axis of known size the resulting bounds are written.
    """
    x = call.x()
    begins, ends = call.listed("starts", 1), call.listed("ends", 2)
    count = _length(call, begins)
    axes, steps = _named_axes(call, count), _steps(call, count)
    if x.shape is not None:
        axes = [call.front(axis, x.rank) for axis in axes]
    if begins is None or ends is None:
        dtype = call.x(1).dtype if call.has(1) else "DT_INT64"
    else:
        dtype = "DT_INT64"
        if steps is not None and x.shape is not None:
            _write_bounds(begins, ends, steps, [x.shape[axis] for axis in axes])
    return call.emitter.op(
        "StridedSliceV2",
        x,
        _bound(call, 1, begins, dtype),
        _bound(call, 2, None if ends is None else _within(ends, dtype), dtype),
        call.emitter.ints(axes, dtype),
        _bound(call, 4, steps, dtype),
        out=call.out(),
    )


def _bound(call: OnnxCall, index: int, numbers: list[int] | None, dtype: str) -> Tensor:
    """The numbers as a constant, or, if they are not known, the input."""
    return call.cast(call.x(index), dtype) if numbers is None else call.emitter.ints(numbers, dtype)


def _steps(call: OnnxCall, count: int) -> list[int] | None:
    """The steps of a Slice, 1 if it has none, or None if they are computed."""
    if not call.has(4):
        return [1] * count
    steps = call.integers(4)
    if steps is not None and 0 in steps:
        raise CannotMapError("a step is 0", "give it another step")
    return steps


def _write_bounds(
    begins: list[int], ends: list[int], steps: Sequence[int], sizes: Sequence[int]
) -> None:
    """Replace the bounds of the axes whose size is known by those that they amount to."""
    for place, (step, size) in enumerate(zip(steps, sizes, strict=False)):
        if size >= 0:
            begins[place], ends[place] = _bounds(begins[place], ends[place], step, size)


def _named_axes(call: OnnxCall, count: int) -> list[int]:
    """The axes that a Slice or Pad names, or the first ones if it names none."""
    axes = call.listed("axes", 3)
    if axes is None and call.has(3):
        raise CannotMapError("its axes are computed", "make them constants")
    return list(range(count)) if axes is None else axes


def _length(call: OnnxCall, begins: list[int] | None) -> int:
    if begins is not None:
        return len(begins)
    shape = call.x(1).shape
    if shape is None or shape[0] < 0:
        raise CannotMapError("the number of its bounds is not known", "make its axes a constant")
    return shape[0]


def _within(numbers: list[int], dtype: str) -> list[int]:
    """Bounds clamped to the range of their type."""
    limits = np.iinfo(np.int32 if dtype == "DT_INT32" else np.int64)
    return [min(max(number, int(limits.min)), int(limits.max)) for number in numbers]


def _bounds(begin: int, end: int, step: int, size: int) -> tuple[int, int]:
    """The bounds of a slice of an axis of known size. With a negative step, an end before the first
    element stays negative."""
    first, last, _ = slice(begin, end, step).indices(size)
    return first, last if last >= 0 else -size - 1


@handles("Expand")
def _expand(call: OnnxCall) -> Tensor:
    """BroadcastTo takes the shape of the result. ONNX broadcasts both sides, and the target may
    have fewer axes.

    An unknown shape is computed: the larger of both sizes, or 0 if one of them is 0.
    """
    x, out = call.x(), call.out()
    if out.shape is not None and -1 not in out.shape:
        return call.emitter.op("BroadcastTo", x, call.emitter.ints(out.shape), out=out)
    content, dims = call.content(1), call.dims(0)
    if content is not None and dims is not None and len(content) >= len(dims):
        aligned = zip(content[len(content) - len(dims) :], dims, strict=True)
        if all(size.never_one or size == own or own.const == 1 for size, own in aligned):
            return call.emitter.op("BroadcastTo", x, call.x(1), out=out)
    length = _target_length(call.x(1))
    rank = max(x.rank, length)
    own = call.vector([*[1] * (rank - x.rank), *[call.size(x, axis) for axis in range(x.rank)]])
    wanted = call.cast(call.x(1), "DT_INT64")
    if rank > length:
        ones = call.emitter.ints([1] * (rank - length))
        wanted = call.emitter.op(
            "ConcatD", [ones, wanted], concat_dim=0, N=2, out=Type("DT_INT64", (rank,))
        )
    unit = call.binary("Equal", own, call.emitter.ints(1), "DT_BOOL")
    target = call.emitter.op("SelectV2", unit, wanted, own, out=Type("DT_INT64", (rank,)))
    return call.emitter.op("BroadcastTo", x, target, out=out)


@handles("Pad")
def _pad(call: OnnxCall) -> Tensor:
    """The pads are all beginnings and then all ends, for the axes of input 3. Negative pads cut
    elements off, which PadV3 cannot do."""
    x = call.x()
    mode = call.text("mode", "constant")
    if mode not in ("constant", "reflect", "edge"):
        raise CannotMapError(f"PadV3 of GE has no counterpart of mode {mode}")
    number = call.x(2) if call.has(2) else call.like(call.number("value", 0.0), x)
    number = call.squeeze(number, list(range(number.rank)))
    pads = call.integer_list("pads") or call.integer_list("paddings")
    pads = call.integers(1) if pads is None else pads
    if pads is None:
        return _cut_and_pad(call, _spread(call), mode, number)
    begins, ends = _pads_of_all_axes(call, pads)
    x = _without_negative(call, x, begins, ends)
    begins, ends = [max(pad, 0) for pad in begins], [max(pad, 0) for pad in ends]
    if not any(begins) and not any(ends):
        return x
    return _padded(call, x, call.emitter.ints([*begins, *ends]), mode, number)


def _pads_of_all_axes(call: OnnxCall, pads: Sequence[int]) -> tuple[list[int], list[int]]:
    """The pads at the beginning and at the end of every axis; 0 for the axes that input 3 does not
    name."""
    rank = call.x().rank
    axes = _named_axes(call, rank)
    begins, ends = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        front = call.front(axis, rank)
        begins[front], ends[front] = pads[place], pads[place + len(axes)]
    return begins, ends


def _without_negative(
    call: OnnxCall, x: Tensor, begins: Sequence[int], ends: Sequence[int]
) -> Tensor:
    """The tensor without the elements that negative pads cut off."""
    if min(*begins, *ends, 0) >= 0:
        return x
    pads = list(enumerate(zip(begins, ends, strict=True)))
    cut = [
        (axis, -min(begin, 0), min(end, 0) or _END)
        for axis, (begin, end) in pads
        if begin < 0 or end < 0
    ]
    axes, firsts, lasts = zip(*cut, strict=True)
    return call.cut(x, list(firsts), list(lasts), list(axes))


def _padded(call: OnnxCall, x: Tensor, pads: Tensor, mode: str, number: Tensor) -> Tensor:
    given = number if mode == "constant" else None
    return call.emitter.op(
        "PadV3", x, pads, given, mode=mode, paddings_contiguous=False, out=call.out()
    )


def _spread(call: OnnxCall) -> Tensor:
    """Computed pads of some axes as pads of all axes."""
    pads, rank = call.x(1), call.x().rank
    if not call.has(3):
        return call.cast(pads, "DT_INT64")
    axes = _named_axes(call, rank)
    parts: list[int | Tensor] = [0] * (2 * rank)
    for place, axis in enumerate(axes):
        for side in (0, 1):
            element = call.element(pads, place + side * len(axes))
            parts[call.front(axis, rank) + side * rank] = call.cast(element, "DT_INT64")
    return call.vector(parts)


def _cut_and_pad(call: OnnxCall, pads: Tensor, mode: str, number: Tensor) -> Tensor:
    """With computed pads: slice for the negative pads, pad for the others."""
    x, rank = call.x(), call.x().rank
    content = call.content(1)
    if content is not None and all(pad.is_at_least(0) for pad in content):
        return _padded(call, x, pads, mode, number)
    zero = call.emitter.ints(0)
    cut = call.unary("Neg", call.binary("Minimum", pads, zero))
    begins = call.cut(cut, [0], [rank])
    ends = call.binary("Sub", call.shape(x), call.cut(cut, [rank], [2 * rank]))
    axes, ones = call.emitter.ints(range(rank)), call.emitter.ints([1] * rank)
    x = call.emitter.op(
        "StridedSliceV2", x, begins, ends, axes, ones, out=x.with_shape((-1,) * rank)
    )
    return _padded(call, x, call.binary("Maximum", pads, zero), mode, number)
