"""Traces an element, by its index, to the input that an operator moved it from.

Accepted are Identity and Cast, reshapes, Transpose, Expand and Tile along dimensions of 1, Slice, a Pad of no width,
and Gather and GatherND whose indices are themselves known by index. A reshape may add or drop dimensions of 1, and
merge dimensions or take them apart where the sizes of all but the first of them are numbers: heads that are folded into
the batch are addressed as 4 b + h. Other operators give None.
"""

from __future__ import annotations

from typing import Protocol

import onnx_ir as ir

from fa_compiler.passes.algebra.cases import Number, as_integer
from fa_compiler.passes.algebra.formula import Affine, Index
from fa_compiler.passes.algebra.symbolic import Dim, product
from fa_compiler.passes.ir.movers import RESHAPES
from fa_compiler.passes.ir.nodes import int_attr, is_op, permutation
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.shapes import ShapeInfo
from fa_compiler.passes.values.slices import keeps_everything, slice_bounds


class Reader(Protocol):
    """What `moved` needs: shapes, and the numbers in the indices of a Gather."""

    @property
    def info(self) -> ShapeInfo: ...

    @property
    def rank(self) -> int: ...

    @property
    def sizes(self) -> Shape: ...

    def shape(self, value: ir.Value) -> Shape | None: ...

    def number(self, value: ir.Value | None, index: Index | None) -> Number | None: ...


def fitted(own: Shape, shape: Shape, index: Index, rank: int) -> Index | None:
    """The index of an element in an operand of shape `own`, given its index in the result of shape `shape` to which the
    operand is broadcast; None where the operand is not proven to fit."""
    if len(own) > len(shape) or len(shape) != len(index):
        return None
    places: list[Affine] = []
    for size, wanted, place in zip(own, shape[len(shape) - len(own) :], index[len(shape) - len(own) :], strict=True):
        if size.const != 1 and size != wanted:
            return None
        places.append(Affine.number(0, rank) if size.const == 1 else place)
    return tuple(places)


def moved(node: ir.Node, index: Index, reader: Reader) -> tuple[ir.Value, Index] | None:
    """The input and the index in it of the element that a moving operator puts at `index`; None when unknown."""
    source = node.inputs[0] if node.inputs else None
    own = None if source is None else reader.shape(source)
    shape = reader.shape(node.outputs[0])
    if source is None or own is None or shape is None or len(shape) != len(index):
        return None
    places: Index | None = None
    if is_op(node, "Identity", "Cast") or (is_op(node, "Pad") and keeps_everything(node, reader.info)):
        places = index
    elif is_op(node, *RESHAPES):
        places = _reshaped(own, shape, index, reader)
    elif is_op(node, "Transpose"):
        perm = permutation(node, len(own))
        places = None if perm is None else tuple(index[perm.index(axis)] for axis in range(len(own)))
    elif is_op(node, "Expand", "Tile"):
        places = fitted(own, shape, index, reader.rank)
    elif is_op(node, "Slice"):
        places = _sliced(node, own, index, reader)
    elif is_op(node, "Gather"):
        places = _gathered(node, own, index, reader)
    elif is_op(node, "GatherND") and not int_attr(node, "batch_dims", 0):
        places = _gathered_points(node, own, index, reader)
    return None if places is None else (source, places)


def _reshaped(own: Shape, shape: Shape, index: Index, reader: Reader) -> Index | None:
    """`moved` for a reshape."""
    given = [(size, place) for size, place in zip(shape, index, strict=True) if size.const != 1]
    wanted = [size for size in own if size.const != 1]
    places: list[Affine] = []
    while given and wanted:
        some, parts = [given.pop(0)], [wanted.pop(0)]
        while (made := product(size for size, _ in some)) != (whole := product(parts)):
            if given and whole.exact_div(made) is not None:
                some.append(given.pop(0))
            elif wanted and made.exact_div(whole) is not None:
                parts.append(wanted.pop(0))
            else:
                return None
        found = _taken_apart(_merged(some, reader), parts, reader)
        if found is None:
            return None
        places.extend(found)
    rest = iter(places)
    return None if given or wanted else tuple(_zero(reader) if size.const == 1 else next(rest) for size in own)


def _zero(reader: Reader) -> Affine:
    return Affine.number(0, reader.rank)


def _merged(dims: list[tuple[Dim, Affine]], reader: Reader) -> Affine | None:
    """The place in dimensions that are merged, given the place in each of them; None where it is not linear."""
    total, stride = _zero(reader), Dim(1)
    for size, place in reversed(dims):
        if place != _zero(reader):
            if stride.const is None:
                return None
            total = total + place.times(stride.const)
        stride = stride * size
    return total


def _taken_apart(place: Affine | None, sizes: list[Dim], reader: Reader) -> list[Affine] | None:
    """The places in dimensions of these sizes, given the place in all of them merged; None where they are not linear.

    A part of the place is the multiple of a size, and the rest is proven to be less than it.
    """
    places: list[Affine] = []
    for size in reversed(sizes[1:]):
        count = size.const
        if place is None or not count:
            return None
        quotient, rest = divmod(place.offset.const, count) if place.offset.const is not None else (None, 0)
        times = place.offset.exact_div(count) if quotient is None else Dim(quotient)
        if times is None:
            return None
        inner = Affine(Dim(rest), tuple(step % count for step in place.steps))
        if not (Affine.number(count - 1, reader.rank) - inner).least(reader.sizes).is_at_least(0):
            return None
        places.append(inner)
        place = Affine(times, tuple(step // count for step in place.steps))
    return None if place is None else [place, *reversed(places)]


def _sliced(node: ir.Node, own: Shape, index: Index, reader: Reader) -> Index | None:
    cut = slice_bounds(node, reader.info, len(own))
    if cut is None:
        return None
    places = list(index)
    for axis, start, step in cut:
        if (-own[axis] - start).is_at_least(0):
            start = Dim(0)  # counted from the end, it is the first element or before it
        elif start.const is not None and start.const < 0:
            start = own[axis] + start
        if step < 1 or not start.is_at_least(0):
            return None
        places[axis] = index[axis].times(step) + Affine.number(start, reader.rank)
    return tuple(places)


def _gathered(node: ir.Node, own: Shape, index: Index, reader: Reader) -> Index | None:
    indices = node.inputs[1]
    shape = None if indices is None else reader.shape(indices)
    if shape is None or not own:
        return None
    axis = int_attr(node, "axis", 0) % len(own)
    found = as_integer(reader.number(indices, index[axis : axis + len(shape)]))
    if found is None:
        return None
    if found.const is not None and found.const < 0:
        found = found + Affine.number(own[axis], reader.rank)
    if not found.is_natural:
        return None
    return (*index[:axis], found, *index[axis + len(shape) :])


def _gathered_points(node: ir.Node, own: Shape, index: Index, reader: Reader) -> Index | None:
    indices = node.inputs[1]
    shape = None if indices is None else reader.shape(indices)
    depth = None if shape is None else shape[-1].const
    if shape is None or depth is None or depth > len(own):
        return None
    point = index[: len(shape) - 1]
    places = [as_integer(reader.number(indices, (*point, Affine.number(k, reader.rank)))) for k in range(depth)]
    natural = [place for place in places if place is not None and place.is_natural]
    return (*natural, *index[len(shape) - 1 :]) if len(natural) == depth else None
