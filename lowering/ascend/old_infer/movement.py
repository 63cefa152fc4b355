"""Operators that move, slice, concatenate or repeat. Integers are tracked, because they become shapes of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.graph import UNKNOWN
from fa_compiler.lowering.ascend.old_infer.rules import (
    Fact,
    InferenceError,
    OpFacts,
    Shape,
    Values,
    broadcast,
    common_size,
    product,
    rule,
    shapes_agree,
    sizes_agree,
    vector,
)


@rule("Reshape")
def _reshape(call: OpFacts) -> Sequence[Fact]:
    """-1 stands for the remaining elements. An unknown size may be -1, too."""
    x = call.x()
    if call.attr("axis") != 0 or call.attr("num_axes") != -1:
        return [x.with_shape(None)]
    shape = _target(call, "shape")
    if shape is None:
        return [x.with_shape(None)]
    wanted = call.ints("shape")
    total = UNKNOWN if x.shape is None else product(x.shape)
    if wanted is not None:
        if wanted.count(-1) > 1:
            raise InferenceError(f"the shape {wanted} has -1 twice")
        rest = product([size for size in wanted if size != -1])
        if -1 in wanted and total >= 0 and rest > 0:
            if total % rest:
                raise InferenceError(f"{total} elements do not fill the shape {wanted}")
            shape = tuple(total // rest if size == -1 else size for size in wanted)
        elif -1 not in wanted and 0 not in wanted and not sizes_agree(total, rest):
            raise InferenceError(f"{total} elements do not fill the shape {wanted}")
    value = None
    if x.value is not None and x.value.size == product(shape):
        value = x.value.reshape(shape)
    return [x.with_shape(shape, value)]


def _target(call: OpFacts, name: str) -> Shape:
    """The shape in an input, as far as it is known."""
    given = call.x(name)
    if given.value is not None and given.value.ndim == 1:
        return tuple(UNKNOWN if item is None else int(item) for item in given.value)
    if given.shape is not None and len(given.shape) == 1 and given.shape[0] >= 0:
        return (UNKNOWN,) * given.shape[0]
    return None


@rule("Transpose")
def _transpose(call: OpFacts) -> Sequence[Fact]:
    x, perm = call.x(), call.ints("perm")
    if x.shape is None:
        return [x.with_shape(None if perm is None else (UNKNOWN,) * len(perm))]
    if perm is None:
        return [x.with_shape((UNKNOWN,) * len(x.shape))]
    rank = len(x.shape)
    order = [axis + rank if axis < 0 else axis for axis in perm]
    if sorted(order) != list(range(rank)):
        raise InferenceError(f"perm {perm} is not a permutation of {rank} axes")
    return [x.with_shape(tuple(x.shape[axis] for axis in order))]


@rule("Squeeze", "SqueezeV3")
def _squeeze(call: OpFacts) -> Sequence[Fact]:
    x = call.x()
    axes = list(call.attr("axis")) if call.op.type == "Squeeze" else call.ints("axes") if "axes" in call.inputs else []
    if x.shape is None or axes is None or (not axes and UNKNOWN in x.shape):
        return [x.with_shape(None)]
    if axes:
        gone = {call.axis(axis, len(x.shape)) for axis in axes}
    else:
        gone = {axis for axis, size in enumerate(x.shape) if size == 1}
    for axis in gone:
        if x.shape[axis] not in (1, UNKNOWN):
            raise InferenceError(f"axis {axis} of size {x.shape[axis]} cannot be dropped")
    return [_reshaped(x, tuple(size for axis, size in enumerate(x.shape) if axis not in gone))]


@rule("Unsqueeze", "UnsqueezeV3")
def _unsqueeze(call: OpFacts) -> Sequence[Fact]:
    x = call.x()
    axes = list(call.attr("axes")) if call.op.type == "Unsqueeze" else call.ints("axes")
    if x.shape is None or axes is None:
        return [x.with_shape(None)]
    rank = len(x.shape) + len(axes)
    new = {call.axis(axis, rank) for axis in axes}
    sizes = iter(x.shape)
    return [_reshaped(x, tuple(1 if axis in new else next(sizes, UNKNOWN) for axis in range(rank)))]


def _reshaped(x: Fact, shape: tuple[int, ...]) -> Fact:
    value = x.value.reshape(shape) if x.value is not None and x.value.size == product(shape) else None
    return x.with_shape(shape, value)


@rule("Shape")
def _shape(call: OpFacts) -> Sequence[Fact]:
    dtype, shape = attr_name(call.attr("dtype")) or "", call.x().shape
    if shape is None:
        return [Fact(dtype, (UNKNOWN,))]
    return [Fact(dtype, (len(shape),), vector([None if size == UNKNOWN else size for size in shape]))]


@rule("Size")
def _size(call: OpFacts) -> Sequence[Fact]:
    shape = call.x().shape
    count = UNKNOWN if shape is None else product(shape)
    value = np.array(None if count == UNKNOWN else count, dtype=object)
    return [Fact(attr_name(call.attr("dtype")) or "", (), value)]


@rule("ConcatD")
def _concat(call: OpFacts) -> Sequence[Fact]:
    facts = call.dynamic("x")
    if len(facts) != call.attr("N"):
        raise InferenceError(f"N is {call.attr('N')}, and there are {len(facts)} inputs")
    if len({fact.dtype for fact in facts} - {""}) > 1:
        raise InferenceError(f"its inputs have different types: {', '.join(fact.dtype for fact in facts)}")
    shapes = [fact.shape for fact in facts if fact.shape is not None]
    if len(shapes) < len(facts) or not shapes:
        return [facts[0].with_shape(None)]
    axis = call.axis(call.attr("concat_dim"), len(shapes[0]), "concat_dim")
    result = list(shapes[0])
    for shape in shapes[1:]:
        if len(shape) != len(result):
            raise InferenceError(f"its inputs have ranks {len(result)} and {len(shape)}")
        for place, size in enumerate(shape):
            if place == axis:
                result[place] = UNKNOWN if UNKNOWN in (size, result[place]) else size + result[place]
            else:
                result[place] = common_size(result[place], size)
    values = [fact.value for fact in facts if fact.value is not None]
    value: Values | None = np.concatenate(values, axis) if len(values) == len(facts) else None
    return [facts[0].with_shape(tuple(result), value)]


_MOST_PARTS = 1 << 16


@rule("SplitD", "SplitV")
def _split(call: OpFacts) -> Sequence[Fact]:
    x, count = call.x(), call.attr("num_split")
    if not 1 <= count <= _MOST_PARTS:
        raise InferenceError(f"num_split is {count}")
    place = call.attr("split_dim") if call.op.type == "SplitD" else call.integer("split_dim")
    if x.shape is None or place is None:
        return [x.with_shape(None)] * count
    axis = call.axis(place, len(x.shape), "split_dim")
    total = x.shape[axis]
    sizes: list[int] = [UNKNOWN] * count
    if call.op.type == "SplitD":
        if total >= 0 and total % count:
            raise InferenceError(f"an axis of {total} has no {count} equal parts")
        sizes = [UNKNOWN if total < 0 else total // count] * count
    elif (given := call.ints("size_splits")) is not None:
        if len(given) != count or (total >= 0 and -1 not in given and sum(given) != total):
            raise InferenceError(f"the parts {given} are not {count} parts of {total}")
        rest = UNKNOWN if total < 0 else total - sum(size for size in given if size != -1)
        sizes = [rest if size == -1 else size for size in given]
    return [x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


@rule("StridedSliceV2")
def _slice(call: OpFacts) -> Sequence[Fact]:
    x = call.x()
    masks = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    if x.shape is None or any(call.attr(mask) for mask in masks):
        return [x.with_shape(None)]
    begins, ends = call.ints("begin"), call.ints("end")
    axes = call.ints("axes") if "axes" in call.inputs else None if begins is None else list(range(len(begins)))
    steps = call.ints("strides") if "strides" in call.inputs else [1] * len(axes or ())
    if axes is None:
        return [x.with_shape((UNKNOWN,) * len(x.shape))]
    axes = [call.axis(axis, len(x.shape)) for axis in axes]
    cuts = [slice(None)] * len(x.shape)
    result = list(x.shape)
    lists = [numbers for numbers in (begins, ends, steps) if numbers is not None]
    if any(len(numbers) != len(axes) for numbers in lists):
        raise InferenceError(f"it has {len(axes)} axes, and {', '.join(str(len(numbers)) for numbers in lists)} bounds")
    known = begins is not None and ends is not None and steps is not None
    for place, axis in enumerate(axes):
        size = x.shape[axis]
        if not known or size < 0:
            result[axis] = UNKNOWN
            if known and size < 0:
                result[axis] = _open_slice(begins[place], ends[place], steps[place])  # type: ignore[index]
            continue
        begin, end, step = begins[place], ends[place], steps[place]  # type: ignore[index]
        if step == 0:
            raise InferenceError("a stride is 0")
        cuts[axis] = slice(begin, None if step < 0 and end < -size else end, step)
        result[axis] = len(range(*cuts[axis].indices(size)))
    value = x.value[tuple(cuts)] if known and x.value is not None and UNKNOWN not in result else None
    return [x.with_shape(tuple(result), value)]


def _open_slice(begin: int, end: int, step: int) -> int:
    """The size of a slice of an axis of unknown size. It is known for the empty slice from 0 to 0 only."""
    return 0 if begin == end and step > 0 else UNKNOWN


@rule("BroadcastTo")
def _broadcast_to(call: OpFacts) -> Sequence[Fact]:
    x, shape = call.x(), _target(call, "shape")
    if shape is None or x.shape is None:
        return [x.with_shape(shape)]
    if len(shape) < len(x.shape):
        raise InferenceError(f"the shape {list(x.shape)} cannot become {list(shape)}")
    result = broadcast(x.shape, shape)
    if not shapes_agree(result, shape):
        raise InferenceError(f"the shape {list(x.shape)} cannot become {list(shape)}")
    return [x.with_shape(shape)]


@rule("Tile")
def _tile(call: OpFacts) -> Sequence[Fact]:
    x, counts = call.x(), call.ints("multiples")
    if x.shape is None:
        return [x.with_shape(None)]
    if counts is None:
        return [x.with_shape((UNKNOWN,) * len(x.shape))]
    if len(counts) != len(x.shape):
        raise InferenceError(f"{len(counts)} multiples do not match {len(x.shape)} axes")
    return [x.with_shape(tuple(UNKNOWN if size < 0 else size * n for size, n in zip(x.shape, counts, strict=True)))]


@rule("PadV3")
def _pad(call: OpFacts) -> Sequence[Fact]:
    x, pads = call.x(), call.ints("paddings")
    if x.shape is None or pads is None:
        return [x.with_shape(None if x.shape is None else (UNKNOWN,) * len(x.shape))]
    rank = len(x.shape)
    if len(pads) != 2 * rank:
        raise InferenceError(f"{len(pads)} paddings do not match {rank} axes")
    together = call.attr("paddings_contiguous")
    pairs = list(zip(pads[::2], pads[1::2], strict=True) if together else zip(pads[:rank], pads[rank:], strict=True))
    return [
        x.with_shape(
            tuple(UNKNOWN if size < 0 else size + sum(pair) for size, pair in zip(x.shape, pairs, strict=True))
        )
    ]


@rule("Fill")
def _fill(call: OpFacts) -> Sequence[Fact]:
    shape, number = _target(call, "dims"), call.x("value")
    value = None
    if number.value is not None and number.value.size == 1 and shape is not None and 0 <= product(shape) <= 64:
        value = np.full(shape, number.value.flat[0], dtype=object)
    return [Fact(number.dtype, shape, value)]


@rule("Range")
def _range(call: OpFacts) -> Sequence[Fact]:
    start, limit, delta = (call.integer(name) for name in ("start", "limit", "delta"))
    dtype = call.x("start").dtype
    if start is None or limit is None or delta is None or call.attr("is_closed"):
        return [Fact(dtype, (UNKNOWN,))]
    if delta == 0:
        raise InferenceError("its delta is 0")
    count = max(0, -(-(limit - start) // delta))
    return [Fact(dtype, (count,), vector([start + delta * n for n in range(count)]) if count <= 64 else None)]
