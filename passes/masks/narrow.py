"""Narrowing: a tensor that is the same all along a dimension is computed with the size 1 in that
dimension.

Older exporters expand a padding mask over the query rows before they cast, invert and combine it,
so that every step works on S x S elements. A simplifier leaves such a mask of constant lengths as a
constant of S x S elements.

    mask = attention_mask[:, None, None, :].expand(batch, 1, rows, keys)
    mask = (1.0 - mask.float()) * -10000.0
    scores = scores + mask                            # a mask of one row serves as well

Grammar of what is proven constant along dimension d, from a value upwards:

    constant := Expand(x)                       x has size 1 in d, or no dimension there
              | a stored constant               all its elements along d are equal; a large one
                                                (large_constants.py) has few numbers, and d is the
                                                last but one of its dimensions that are not 1
              | op(operands)                    element by element, every operand constant along d
                                                or of size 1 there
              | Slice(constant)                 along d alone, or along other dimensions
              | Unsqueeze(constant)

A narrowed Expand(x) is x, if x has the result's sizes elsewhere, and else an Expand of x to these
sizes with 1 in d. A narrowed constant is its first row. A Slice along d alone becomes its narrowed
input. Any other narrowed tensor comes from the same operators on narrowed operands, so its elements
are the same by construction.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import certain, constant, is_op
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.cuts import slice_bounds
from fa_compiler.passes.ops.elementwise import POINTWISE
from fa_compiler.passes.ops.moves import ALIKE, Cut, Move, Stretched, move_of
from fa_compiler.passes.values.constant_patterns import bits
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_VALUES = 200
"""The proof is given up after this many values."""


def is_constant_along(value: ir.Value, axis: int, info: ShapeInfo) -> bool:
    """Is the value proven to be the same all along its dimension `axis`, whose size is not 1?"""
    asked = {(value, axis)}
    open_ = [(value, axis)]
    while open_:
        behind = _made_from(*open_.pop(), info)
        if behind is None or len(asked) > MAX_VALUES:
            return False
        open_.extend(operand for operand in behind if operand not in asked)
        asked.update(behind)
    return True


def _made_from(value: ir.Value, axis: int, info: ShapeInfo) -> list[tuple[ir.Value, int]] | None:
    """The operands that have to be constant for the value to be constant, each with its dimension.
    None when nothing is proven of the operator."""
    if _first_of(value, axis, info) is not None:
        return []
    node, shape = value.producer(), info.shape(value)
    if node is None or shape is None:
        return None
    if is_op(node, *POINTWISE):
        return _operands_along(node, axis, shape, info)
    if not is_op(node, "Expand", "Slice", "Unsqueeze") or (move := move_of(node, info)) is None:
        return None
    place = move.carrier(axis, info)
    is_stretched = isinstance(move, Stretched)
    if place is None or is_stretched != (place == ALIKE) or not _can_be_narrowed(move, axis, info):
        return None
    return [] if is_stretched else [(move.source, place)]


def _operands_along(
    node: ir.Node, axis: int, shape: Shape, info: ShapeInfo
) -> list[tuple[ir.Value, int]] | None:
    """The operands of an element-wise operator that run along a dimension of its result, each with
    its own dimension; None where a shape is unknown."""
    operands: list[tuple[ir.Value, int]] = []
    for operand in node.inputs:
        own = info.shape(operand)
        if operand is None or own is None:
            return None
        place = axis - (len(shape) - len(own))
        if place >= 0 and own[place].const != 1:
            operands.append((operand, place))
    return operands


def _can_be_narrowed(move: Move, axis: int, info: ShapeInfo) -> bool:
    """Can the move be made of a narrowed source? An Expand needs a target of known length, unless
    the source has the other sizes; a Slice may not cut the dimension and others at once."""
    shape = info.sizes(move.result)
    if isinstance(move, Stretched):
        own, target = info.shape(move.source), move.node.inputs[1]
        written = info.shape(target)
        return (own is not None and _has_sizes(own, shape, axis)) or written == (Dim(len(shape)),)
    if isinstance(move, Cut):
        cut = slice_bounds(move.node, info, len(shape))
        places = {other for other, _, _ in cut or ()}
        return cut is not None and (axis not in places or places == {axis})
    return True


def _has_sizes(own: Shape, shape: Shape, axis: int) -> bool:
    """Is a tensor as large as another one, except along one dimension?"""
    return len(own) == len(shape) and all(
        k == axis or a == b for k, (a, b) in enumerate(zip(own, shape, strict=True))
    )


def _first_of(value: ir.Value, axis: int, info: ShapeInfo) -> np.ndarray | None:
    """The first elements along the axis of a stored constant that is the same all along it; None
    for other values."""
    array, large = constant(value), info.large.of(value)
    if array is not None and array.size:
        first = array.take([0], axis)
        if not (bits(array) == bits(first)).all():
            return None
        return first
    repeated = None if array is not None or large is None else large.repeated
    return repeated if repeated is not None and repeated.shape[axis] == 1 else None


def narrowed(value: ir.Value, axis: int, builder: Builder) -> ir.Value:
    """The value with a dimension of 1 in place of `axis`, along which it is proven constant."""
    return _narrowed(value, axis, builder, {})


def _narrowed(
    value: ir.Value, axis: int, builder: Builder, done: dict[tuple[ir.Value, int], ir.Value]
) -> ir.Value:
    key = (value, axis)
    if key not in done:
        node, first = value.producer(), _first_of(value, axis, builder.info)
        if first is not None:
            done[key] = builder.constant(first, "row")
            return done[key]
        node, wide = certain(node), certain(_made_from(value, axis, builder.info))
        if is_op(node, "Expand"):
            done[key] = _expanded_elsewhere(node, axis, builder)
        elif is_op(node, "Slice") and _cuts(node, axis, builder.info):
            ((source, _),) = wide
            done[key] = _narrowed(source, axis, builder, done)
        else:
            places = dict(wide)
            operands = [
                operand
                if operand is None or operand not in places
                else _narrowed(operand, places[operand], builder, done)
                for operand in node.inputs
            ]
            done[key] = builder.again(node, operands)
    return done[key]


def _cuts(node: ir.Node, axis: int, info: ShapeInfo) -> bool:
    """Does a Slice cut a dimension?"""
    shape = info.shape(node.outputs[0])
    return any(place == axis for place, _, _ in slice_bounds(node, info, len(shape or ())) or ())


def _expanded_elsewhere(expand: ir.Node, axis: int, builder: Builder) -> ir.Value:
    """What an Expand expands, whose size along `axis` is 1, expanded along all other dimensions
    only."""
    source, target = map(certain, expand.inputs)
    own, shape = certain(builder.info.shape(source)), certain(builder.info.shape(expand.outputs[0]))
    if _has_sizes(own, shape, axis):
        return source
    one = np.arange(len(shape)) == axis
    others = builder.mul(target, builder.ints(list(~one)))
    sizes = builder.add(others, builder.ints(list(one)))
    result = builder.expand(source, sizes)
    builder.info.set(
        result, (*shape[:axis], Dim(1), *shape[axis + 1 :]), builder.info.dtype(source)
    )
    return result
