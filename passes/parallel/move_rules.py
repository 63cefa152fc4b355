"""The local forms of operators that move elements, and the whole forms of those that take tokens
out of the sequence.

Reshape, Flatten                            the sequence keeps its place in row-major order: the
                                            sizes before it and behind it tell how it is merged with
                                            others (algebra/axes.py)
Expand, Concat, Split, Slice, Pad           along other dimensions
Gather, Slice along the sequence            SelectTokens: the tokens that every rank then has
ReduceSum, ReduceMean along the sequence,   AllReduce: sums that the ranks add. Those of 16 bits are
                                            float32 until all
and products that sum over it               ranks are added, since a part may overflow where the
                                            whole does not. A mean is the sum divided by the number,
                                            for integers as well
ReduceMax, ReduceMin along the sequence     TokenExtremes, whose result the operator then reduces
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import collectives
from fa_compiler.passes.algebra.axes import Axis, AxisSpace
from fa_compiler.passes.algebra.symbolic import Dim, product
from fa_compiler.passes.emit.operators import AttrValue
from fa_compiler.passes.ir.nodes import constant, input_of, int_attr, is_op, without_none
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.ops.cuts import NO_PADS, pads_along, slice_bounds
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.ops.moves import counted, keeps_everything
from fa_compiler.passes.ops.parts import concat_of, split_of
from fa_compiler.passes.ops.reduce import EXTREMES, TOTALS
from fa_compiler.passes.parallel.local_rules import MIXES, needed, reduced_axes, size_at
from fa_compiler.passes.parallel.places import ONE, Place, Refusal
from fa_compiler.passes.parallel.sharder import INT64, Sharder, collapsing_rule, local_rule

WIDER = {ir.DataType.FLOAT16: ir.DataType.FLOAT, ir.DataType.BFLOAT16: ir.DataType.FLOAT}
"""The type in which ranks add numbers of another type."""


@local_rule("Reshape", "Flatten")
def reshape(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The same elements in the same order."""
    source = needed(node, 0)
    before, after = sharder.shape(source, node), sharder.shape(node.outputs[0], node)
    own = moved_place(place, after, before, sharder.length)
    if own is None:
        raise Refusal("it is not proven which part of its input is the sequence", node)
    local = sharder.local(source, own, node)
    if node.op_type != "Reshape":
        return sharder.clone(node, [local, *sharder.wholes(node, 1)]).outputs[0]
    target = _part_of_reshape(sharder, node, place, own, len(after))
    return sharder.clone(node, [local, target]).outputs[0]


def moved_place(
    place: Place, shape: tuple[Dim, ...], other: tuple[Dim, ...], length: Dim
) -> Place | None:
    """The place of the sequence in a tensor of another shape that has the same elements in the same
    order; None where it is not proven."""
    space, axis = AxisSpace(), Axis(length)
    dims = [space.new(size) for size in shape]
    own = [*space.new(place.before), axis, *space.new(place.after)]
    dims[place.dim] = tuple(own)
    reshaped = space.reshape(tuple(dims), other) or counted(space, tuple(dims), other)
    if reshaped is None or space.resolve((axis,)) != (axis,):
        return None
    for dim, axes in enumerate(reshaped):
        parts = space.resolve(axes)
        if axis in parts:
            index = parts.index(axis)
            sizes = [part.size for part in parts]
            return Place(dim, product(sizes[:index]), product(sizes[index + 1 :]))
    return None


def _part_of_reshape(
    sharder: Sharder, node: ir.Node, place: Place, own: Place, rank: int
) -> ir.Value:
    """The target of a Reshape for the rank's part.

    0 copies a size. It stays where it copies the sequence's dimension to itself, or another
    dimension.
    """
    target = needed(node, 1)
    known = constant(target)
    zeros = [] if known is None else np.flatnonzero(known.reshape(-1) == 0).tolist()
    if own.dim in zeros and own.dim != place.dim:
        raise Refusal(
            f"it copies the size of dimension {own.dim}, where the sequence was, to another one",
            node,
        )
    if known is not None and known.reshape(-1)[place.dim] in (0, -1):
        if known.reshape(-1)[place.dim] == 0 and own != place:
            raise Refusal(
                f"it copies the size of dimension {place.dim}, where the sequence was not", node
            )
        return sharder.whole(target, node)
    if known is not None and -1 not in known:
        changed = known.reshape(-1).copy()
        changed[place.dim] = -1
        return sharder.constant(changed)
    return sharder.part_of_target(target, place.dim, rank, node)


@local_rule("Expand")
def expand(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The sequence is a dimension of the input, or one that the Expand makes."""
    rank, size = size_at(sharder, node, output, place)
    source, target = needed(node, 0), needed(node, 1)
    targets = sharder.shape(target, node)[0].const
    if targets is None:
        raise Refusal("the rank of its target is unknown", node)
    form = sharder.aligned(source, place, rank, size, node)
    dim = place.dim - (rank - targets)
    if dim < 0:
        return sharder.clone(node, [form, sharder.whole(target, node)]).outputs[output]
    return sharder.clone(node, [form, sharder.part_of_target(target, dim, targets, node)]).outputs[
        output
    ]


@local_rule("Concat")
def concat(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Joined along another dimension, or one tensor alone; or new tokens behind those of a cache
    (caches.py)."""
    joined = concat_of(node, sharder.info)
    if joined is None:
        raise _of_unknown_rank(node)
    if len(joined.parts) > 1 and joined.axis == place.dim:
        return sharder.joined(joined, place)
    return sharder.clone(node, [sharder.local(part, place, node) for part in joined.parts]).outputs[
        output
    ]


@local_rule("Split")
def split(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Cut along another dimension."""
    split = split_of(node, sharder.info)
    if split is None:
        raise _of_unknown_rank(node)
    if split.axis == place.dim:
        raise Refusal(f"{MIXES}: it cuts the sequence", node)
    return sharder.clone(
        node, [sharder.local(split.whole, place, node), *sharder.wholes(node, 1)]
    ).outputs[output]


def _of_unknown_rank(node: ir.Node) -> Refusal:
    return Refusal(f"the rank of {node.outputs[0].name!r} is unknown", node)


@local_rule("Slice")
def cut(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Cut along other dimensions, or not at all."""
    source = needed(node, 0)
    shape, result = sharder.shape(source, node), sharder.shape(node.outputs[0], node)
    if keeps_everything(node, sharder.info):
        return sharder.local(source, place, node)
    bounds = slice_bounds(node, sharder.info, len(shape))
    if bounds is None:
        raise Refusal("where it cuts is unknown", node)
    if all(axis != place.dim for axis, _, _ in bounds):
        return sharder.clone(
            node, [sharder.local(source, place, node), *sharder.wholes(node, 1)]
        ).outputs[output]
    if shape[place.dim] == result[place.dim] and all(
        step > 0 for axis, _, step in bounds if axis == place.dim
    ):
        raise Refusal("it cuts several dimensions in one step", node)
    raise Refusal(f"{MIXES}: it cuts the sequence", node)


@local_rule("Pad")
def pad(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """Padded along other dimensions."""
    source = needed(node, 0)
    pads = pads_along(node, sharder.info, len(sharder.shape(source, node)))
    if pads is None or pads.get(place.dim, NO_PADS) != NO_PADS:
        raise Refusal(f"{MIXES}: it pads the sequence, or is not proven to leave it as it is", node)
    return sharder.clone(
        node, [sharder.local(source, place, node), *sharder.wholes(node, 1)]
    ).outputs[output]


@collapsing_rule("Gather")
def picked(sharder: Sharder, node: ir.Node, output: int) -> ir.Value:
    """Tokens picked by indices that all ranks know."""
    data, indices = needed(node, 0), needed(node, 1)
    shape = sharder.shape(data, node)
    axis = int_attr(node, "axis", 0) % len(shape)
    return _select(sharder, node, data, axis, sharder.whole(indices, node))


@collapsing_rule("Slice")
def cut_out(sharder: Sharder, node: ir.Node, output: int) -> ir.Value:
    """Tokens cut out of the sequence: the same cut of the positions tells which."""
    data = needed(node, 0)
    shape = sharder.shape(data, node)
    bounds = slice_bounds(node, sharder.info, len(shape))
    if bounds is None or len(bounds) != 1 or input_of(node, 1) is None:
        raise Refusal("it does not cut one known dimension", node)
    begin, end, step = (input_of(node, index) for index in (1, 2, 4))
    _, length, _ = sharder.part
    every = sharder.range(length)
    first, last, *steps = (
        sharder.cast(sharder.whole(bound, node), INT64)
        for bound in without_none((begin, end, step))
    )
    indices = sharder.slice(every, first, last, [0], *steps)
    return _select(sharder, node, data, bounds[0][0], indices)


def _select(
    sharder: Sharder, node: ir.Node, data: ir.Value, axis: int, indices: ir.Value
) -> ir.Value:
    if sharder.shape(data, node)[axis] != sharder.length:
        raise Refusal(f"{MIXES}: a rank would need this result of all tokens", node)
    local = sharder.local(data, Place(axis), node)
    return sharder.collective(collectives.SELECT_TOKENS, [local, indices], {"axis": axis})


@collapsing_rule(*PRODUCTS)
def contracted(sharder: Sharder, node: ir.Node, output: int) -> ir.Value:
    """A product that sums over the sequence, such as the gradient of a weight: each rank sums over
    its own tokens."""
    shapes = [sharder.shape(needed(node, place), node) for place in (0, 1)]
    product = contraction(node, sharder.info)
    dims = [] if product is None else [labels.index(product.summed[0]) for labels in product.labels]
    sizes = [shape[dim] for shape, dim in zip(shapes, dims, strict=False)]
    repeats = is_op(node, "Einsum") and len({*sizes}) > 1  # it repeats an operand of size 1
    places = _places(sharder, sizes[0]) if sizes and not repeats else []
    if product is None or not places:  # the operator that reads it is to blame
        raise Refusal(
            f"{MIXES}: each rank would need {node.outputs[output].name!r} of all tokens", None
        )
    operands = list(zip(product.operands, dims, strict=True))
    cuts = [[(operand, place.at(dim)) for operand, dim in operands] for place in places]
    _, forms = _first_cut(sharder, node, cuts)
    dtype = _known_dtype(sharder, node.outputs[output], node)
    wide = WIDER.get(dtype, dtype)
    own = sharder.clone(node, [sharder.cast(form, wide) for form in forms]).outputs[output]
    sharder.state_type(own, wide)
    return sharder.cast(sharder.collective(collectives.ALL_REDUCE, [own]), dtype)


def _places(sharder: Sharder, size: Dim) -> list[Place]:
    """Where the sequence may be in a dimension of this size: alone, or behind or before another
    one, such as the batch.

    For a sum over the dimension any of them would do, if all operands have it at the same place:
    each element belongs to one rank. Only where it really is can a rank compute its part.
    """
    if size == sharder.length:
        return [Place(0)]
    other = size.exact_div(sharder.length)
    if other is None:
        return []
    return [Place(0, before=other), Place(0, after=other)]


def _first_cut(
    sharder: Sharder, node: ir.Node, choices: Sequence[Sequence[tuple[ir.Value, Place]]]
) -> tuple[int, list[ir.Value]]:
    """The number of the first of several choices that a rank can compute, and its local forms."""
    refused: Refusal | None = None
    for number, choice in enumerate(choices):
        try:
            return number, [sharder.local(value, place, node) for value, place in choice]
        except Refusal as refusal:
            refused = refused or refusal
    raise refused or Refusal(f"{MIXES}: a rank would need this result of all tokens", node)


def _known_dtype(sharder: Sharder, value: ir.Value, node: ir.Node) -> ir.DataType:
    dtype = sharder.info.dtype(value)
    if dtype is None:
        raise Refusal(f"the type of {value.name!r} is unknown", node)
    return dtype


def _reduced_part(sharder: Sharder, node: ir.Node) -> tuple[ir.Value, Place, list[int]]:
    """The rank's part of what a reduction over the sequence reduces, the place of the sequence in
    it, and the axes."""
    source = needed(node, 0)
    shape = sharder.shape(source, node)
    axes = reduced_axes(sharder, node, len(shape))
    places = [place.at(axis) for axis in axes for place in _places(sharder, shape[axis])]
    number, (local,) = _first_cut(sharder, node, [[(source, place)] for place in places])
    return local, places[number], axes


@collapsing_rule(*EXTREMES)
def extreme(sharder: Sharder, node: ir.Node, output: int) -> ir.Value:
    """The largest or smallest token: the operator reduces what is left of the tokens of all
    ranks."""
    local, place, _ = _reduced_part(sharder, node)
    attrs: dict[str, AttrValue] = {
        "axis": place.dim,
        "inner": int(place.before != ONE),
        "reduction": node.op_type[-3:].lower(),
    }
    left = sharder.collective(collectives.TOKEN_EXTREMES, [local], attrs)
    return sharder.clone(node, [left, *sharder.wholes(node, 1)]).outputs[output]


@collapsing_rule(*TOTALS)
def summed(sharder: Sharder, node: ir.Node, output: int) -> ir.Value:
    """A sum over the sequence: each rank adds its own tokens. A mean is divided by the number of
    all elements."""
    local, _, axes = _reduced_part(sharder, node)
    dtype = _known_dtype(sharder, node.outputs[0], node)
    wide = WIDER.get(dtype, dtype)
    own = sharder.reduce(
        "ReduceSum", sharder.cast(local, wide), axes, keepdims=int_attr(node, "keepdims", 1)
    )
    total = sharder.collective(collectives.ALL_REDUCE, [own])
    if node.op_type == "ReduceMean":
        total = sharder.div(total, _number_of_elements(sharder, local, axes, wide))
    return sharder.cast(total, dtype)


def _number_of_elements(
    sharder: Sharder, local: ir.Value, axes: list[int], dtype: ir.DataType
) -> ir.Value:
    """The number of elements along some axes of a whole tensor, of which the rank has a part, as a
    scalar; 1 where there are none, whose mean is 0."""
    _, length, count = sharder.part
    sizes = sharder.gather(sharder.shape_of(local), axes, 0)
    own = sharder.op("ReduceProd", [sizes], {"keepdims": 0})
    every = sharder.mul(sharder.div(own, count), length)
    return sharder.cast(sharder.scalar(sharder.larger(every, sharder.number(1))), dtype)
