"""Moves: operators whose result holds elements of one input, and computes nothing.

The form of a move says which element of its source stands at an index i of the result:

    form            operators                               element of the source
    --------------  --------------------------------------  --------------------------------------------------------
    Same            Identity                                i
    Converted       Cast                                    i, in another type
    Unpadded        Pad of no width                         i
    Neutral         Dropout that drops nothing, x + 0,      i
                    0 + x, x - 0
    Permuted        Transpose                               i, with its dimensions in another order
    Regrouped       Reshape                                 the one at the same place in row-major order
    Flattened       Flatten                                 the same
    Inserted        Unsqueeze                               the same; dimensions of 1 come
    Removed         Squeeze                                 the same; dimensions of 1 go
    Stretched       Expand                                  i, with 0 where the source has 1
    Tiled           Tile                                    i modulo the sizes of the source
    Repeated        Concat(x, ..., x), in parts.py          i modulo the size of x, along the axis
    Cut             Slice                                   start + step * i, along each axis that is cut
    Picked          Gather                                  the number in the indices, along the axis
    PickedPoints    GatherND                                the numbers in the indices, along the first dimensions
    PickedElements  GatherElements                          the number in the indices, for each element
    Shuffled        DepthToSpace, SpaceToDepth              each one once, at a place that no analysis asks for
    Reversed        ReverseSequence                         i; the first rows of a batch entry from their end

The operators are listed beside the rules for their shapes, by `mover`. What an analysis needs of a
move is one of the methods of `Move`; a form that cannot answer gives None, which is always sound:

    place            positions   the index in the source of the element at an index of the result
    arrangement      layouts     the axes of the result's dimensions, given those of the source
    carrier          narrowing   the dimension of the source along which the result's dimension
                                 runs, if it does
    operands_along   sharding    the dimensions of all inputs along which the result's dimension
                                 runs
    keeps_everything             is the result the source, element by element?
    on_arrays        linear      the move of an array with the numbers of one run
                     attention

Adding 0 keeps every number, NaN and infinities included, but for -0, which becomes 0. A sum of
products that begins at 0 is the same with either, and so is a comparison with 0; nothing that reads
a move divides by its numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.algebra.cases import Number, as_integer
from fa_compiler.passes.algebra.formula import Affine, Index
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Atom, Dim, product
from fa_compiler.passes.ir.nodes import (
    all_known,
    constant,
    elsewhere,
    has_row,
    input_of,
    int_attr,
    operand_at,
    permutation,
    places_of,
)
from fa_compiler.passes.ops.context import (
    Known,
    Shape,
)
from fa_compiler.passes.ops.cuts import slice_bounds

ALIKE = -1
"""The carrier of a dimension along which every element of the result is the same."""
MANY_AXES = 64
"""The most axes of a Squeeze or Unsqueeze that are read."""


ArrayMove = Callable[[np.ndarray], np.ndarray]
"""A move of an array. It raises what NumPy raises where the sizes do not fit."""
Integers = Callable[[int], "np.ndarray | None"]
"""The integers that an input of the node has in one run; None where there is no such input."""
LARGEST_ARRAY = 1 << 27
"""An array with more elements is not made."""
END = (1 << 31) - 1
"""An end of a Slice that is not smaller stands for the end of an axis."""


class Reader(Protocol):
    """What `place` needs: shapes in the runs that matter, and the numbers in the indices of a
    Gather. An element that is made of several ones needs the number that all of them are."""

    @property
    def info(self) -> Known: ...

    @property
    def rank(self) -> int: ...

    @property
    def sizes(self) -> Shape: ...

    def shape(self, value: ir.Value | None) -> Shape | None: ...

    def number(self, value: ir.Value | None, index: Index | None) -> Number | None: ...

    def number_everywhere(self, value: ir.Value | None) -> int | None: ...


@dataclass(frozen=True)
class Move:
    """A node that moves the elements of `source`."""

    node: ir.Node
    source: ir.Value

    @property
    def result(self) -> ir.Value:
        """The moved tensor."""
        return self.node.outputs[0]

    @property
    def is_layout(self) -> bool:
        """Does every element of the source have a place in the result that depends on sizes
        alone?"""
        return False

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        """The index in the source, of shape `own`, of the element at `index` of the result, of this
        shape."""
        return None

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        """The axes of the result's dimensions, given those of the source's; None when unproven."""
        return None

    def carrier(self, dim: int, known: Known) -> int | None:
        """The dimension of the source that a dimension of the result runs along; ALIKE where the
        result is the same all along it; None when neither is known."""
        return None

    def operands_along(self, dim: int, known: Known) -> Mapping[int, int] | None:
        """The inputs that run along a dimension of the result, by their numbers, each with its own
        dimension. A part of the result is made of the same part of these inputs, and of all of the
        others. None when that is unknown."""
        own = self.carrier(dim, known)
        if own is None or own == ALIKE:
            return None
        return {list(self.node.inputs).index(self.source): own}

    def keeps_everything(self, known: Known) -> bool:
        """Is every element in its place, and none left out or repeated?"""
        return False

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        """The move of an array of this shape, in a run with these integers; None where the form has
        none."""
        return None


class Same(Move):
    """The source as it is, or in another type."""

    is_layout = True

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        return index

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        return dims

    def carrier(self, dim: int, known: Known) -> int | None:
        return dim

    def keeps_everything(self, known: Known) -> bool:
        return True

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        return lambda array: array


class Converted(Same):
    """The source in another type."""

    is_layout = False

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        dtype = ir.DataType(int_attr(self.node, "to", 0)).numpy()
        return lambda array: array.astype(dtype)


class Unpadded(Same):
    """The source, beside which nothing is put."""


class Neutral(Same):
    """The source, to which nothing is added, and of which nothing is dropped."""


class Permuted(Move):
    """Dimensions in another order."""

    is_layout = True

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        perm = permutation(self.node, len(own))
        if perm is None:
            return None
        return tuple(index[perm.index(axis)] for axis in range(len(own)))

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        perm = permutation(self.node, len(dims))
        if perm is None:
            return None
        return tuple(dims[axis] for axis in perm)

    def carrier(self, dim: int, known: Known) -> int | None:
        shape = known.shape(self.result)
        if shape is None or (perm := permutation(self.node, len(shape))) is None:
            return None
        return perm[dim]

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        perm = permutation(self.node, len(shape))
        return None if perm is None else lambda array: np.transpose(array, perm)


class Regrouped(Move):
    """All elements in the same row-major order.

    A reshape may add or drop dimensions of 1, and merge dimensions or take them apart.
    """

    is_layout = True

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        """Dimensions are taken apart where the sizes of all but the first of them are numbers:
        heads that are folded into the batch are addressed as 4 b + h."""
        given = [(size, place) for size, place in zip(shape, index, strict=True) if size.const != 1]
        wanted = [size for size in own if size.const != 1]
        places: list[Affine] = []
        while given and wanted:
            group = _group(given, wanted)
            if group is None:
                return None
            merged, sizes = group
            within = if_known(_places_within, _merged(merged, reader), sizes, reader)
            if within is None:
                return None
            places.extend(within)
        if given or wanted:
            return None
        rest = iter(places)
        return tuple(zero(reader) if size.const == 1 else next(rest) for size in own)

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        target = self._target(dims, space, known)
        return None if target is None else self._regrouped(dims, target, space)

    def _regrouped(
        self, dims: Arrangement, target: tuple[Dim, ...], space: AxisSpace
    ) -> Arrangement | None:
        """The axes of the result's dimensions, which have these sizes."""
        if tuple(map(space.size, dims)) == target:
            return dims
        return space.reshape(dims, target) or counted(space, dims, target)

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        sizes, keeps_zero = (
            listed(self.node, "shape", integers(1)),
            bool(int_attr(self.node, "allowzero", 0)),
        )
        if sizes is None:
            return None
        copied = [
            size == 0 and not keeps_zero and axis < len(shape) for axis, size in enumerate(sizes)
        ]
        # -1 for what is left
        target = [shape[axis] if copied[axis] else size for axis, size in enumerate(sizes)]
        return lambda array: array.reshape(target)

    def _target(self, dims: Arrangement, space: AxisSpace, known: Known) -> tuple[Dim, ...] | None:
        """The sizes of the result, written in the sizes of the source's arrangement.

        The source's own sizes differ from those where a mask was added whose sizes have other
        names: the size of the sum is then the broadcast of both. It is the arrangement's size in
        every run in which the mask does not enlarge the scores.
        """
        target, source = known.shape(self.result), known.shape(self.source)
        if target is None or source is None or len(source) != len(dims):
            return target
        own: dict[Atom, Dim] = {}
        for size, dim in zip(source, dims, strict=True):
            walked = space.size(dim)
            for atom in (atom for atom in size.atoms if atom.op == "broadcast"):
                parts = [*atom.args, *[walked] * _is_part(walked, atom)]
                own.update(
                    (atom, part)
                    for part in parts
                    if size.substitute({atom: part}) == walked != size
                )
        return tuple(size.substitute(own) for size in target)


class Flattened(Regrouped):
    """All dimensions in front of an axis merged, and all behind it."""

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        axis = int_attr(self.node, "axis", 1)
        rows = math.prod(shape[: axis + len(shape) if axis < 0 else axis])
        return lambda array: array.reshape(rows, -1)


class WithUnits(Regrouped):
    """The same elements with dimensions of 1 that come or go by their axes."""

    def _axes(self, rank: int) -> list[int] | None:
        """The axes of these dimensions."""
        return places_of(self.node, rank, limit=MANY_AXES)

    def _others(self, known: Known) -> list[int] | None:
        """The axes of the other dimensions in the tensor that has more of them; None where they are
        unknown."""
        own, shape = known.shape(self.source), known.shape(self.result)
        if own is None or shape is None:
            return None
        rank = max(len(own), len(shape))
        axes = self._axes(rank)
        return elsewhere(range(rank), axes) if axes else None


class Inserted(WithUnits):
    """The same elements with dimensions of 1 that come."""

    def _regrouped(
        self, dims: Arrangement, target: tuple[Dim, ...], space: AxisSpace
    ) -> Arrangement | None:
        axes = self._axes(len(target))
        if axes is None:
            return super()._regrouped(dims, target, space)
        rest = iter(dims)
        return tuple(() if axis in axes else next(rest) for axis in range(len(target)))

    def carrier(self, dim: int, known: Known) -> int | None:
        others = self._others(known)
        if others is None:
            return None
        return others.index(dim) if dim in others else ALIKE

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        inserted = listed(self.node, "axes", integers(1)) or ()
        return lambda array: np.expand_dims(array, inserted)


class Removed(WithUnits):
    """The same elements without dimensions of 1 that go."""

    def _regrouped(
        self, dims: Arrangement, target: tuple[Dim, ...], space: AxisSpace
    ) -> Arrangement | None:
        axes = self._axes(len(dims))
        if not axes:  # an empty list removes every 1
            return super()._regrouped(dims, target, space)
        # A squeezed dimension is 1 in every run that succeeds. All the same the view ends where it
        # has axes.
        if any(space.resolve(dims[axis]) for axis in axes):
            return None
        return tuple(elsewhere(dims, axes))

    def carrier(self, dim: int, known: Known) -> int | None:
        others = self._others(known)
        return None if others is None else others[dim]

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        removed = listed(self.node, "axes", integers(1)) or None  # an empty list removes every 1
        return lambda array: np.squeeze(array, removed)


def counted(space: AxisSpace, dims: Arrangement, target: Sequence[Dim]) -> Arrangement | None:
    """`reshape` with one size computed from the others, since a Reshape keeps the number of
    elements.

    Models of tf2onnx need this. Where query and key have different names for the batch size, the
    Reshape after their product has the larger of the two as its batch size.
    """
    total = product(space.size(dim) for dim in dims)
    for place in range(len(target)):
        before, after = target[:place], target[place + 1 :]
        own = total.exact_div(product((*before, *after)))
        if own is not None and own != target[place]:
            return space.reshape(dims, (*before, own, *after))
    return None


def _is_part(size: Dim, whole: Atom) -> bool:
    """Is a size the broadcast of some, but not all, of the sizes that `whole` is the broadcast
    of?"""
    atom = size.single_atom
    return atom is not None and atom.op == "broadcast" and set(atom.args) < set(whole.args)


class Stretched(Move):
    """Dimensions of 1 that are repeated."""

    is_layout = True

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        return fitted(own, shape, index, reader.rank)

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        target, source = known.shape(self.result), known.shape(self.source)
        if target is None or source is None:
            return None
        padded: tuple[Axes, ...] = ((),) * (len(target) - len(dims)) + dims
        sizes = [None] * (len(target) - len(source)) + list(source)
        result: list[Axes] = []
        for dim, size, wanted in zip(padded, sizes, target, strict=True):
            if size is not None and size == wanted:
                result.append(dim)
            elif size is None or size.const == 1:
                result.append(space.new(wanted))
            elif (times := self._times(wanted, size)) is not None:
                result.append(space.new(times) + dim)
            else:
                return None
        return tuple(result)

    def _times(self, wanted: Dim, size: Dim) -> Dim | None:
        """How often a dimension of this size, which is not 1, is repeated; None where it is not."""
        return None

    def carrier(self, dim: int, known: Known) -> int | None:
        own, shape = known.shape(self.source), known.shape(self.result)
        if own is None or shape is None:
            return None
        place = dim - (len(shape) - len(own))
        if place < 0 or own[place].const == 1:
            return ALIKE
        if own[place] != shape[dim]:
            return None
        return place

    def keeps_everything(self, known: Known) -> bool:
        return known.shape(self.result) == known.shape(self.source) is not None

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        numbers = integers(1)
        return None if numbers is None else self._stretched(shape, numbers.tolist())

    def _stretched(self, shape: Sequence[int], numbers: Sequence[int]) -> ArrayMove | None:
        """The move of an array of this shape, by the numbers of the second input."""
        target = np.broadcast_shapes(tuple(shape), tuple(numbers))
        return (
            None
            if math.prod(target) > LARGEST_ARRAY
            else lambda array: np.broadcast_to(array, target)
        )


class Tiled(Stretched):
    """Dimensions that are repeated as a whole."""

    def _times(self, wanted: Dim, size: Dim) -> Dim | None:
        return wanted.exact_div(size)

    def _stretched(self, shape: Sequence[int], numbers: Sequence[int]) -> ArrayMove | None:
        sizes = [size * times for size, times in zip(shape, numbers, strict=True)]
        return None if math.prod(sizes) > LARGEST_ARRAY else lambda array: np.tile(array, numbers)


class Cut(Move):
    """A part of each of some dimensions, in even steps."""

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        cut = slice_bounds(self.node, reader.info, len(own))
        if cut is None:
            return None
        places = list(index)
        for axis, start, step in cut:
            start = from_front(start, own[axis])
            if step < 1 or not start.is_at_least(0):
                return None
            places[axis] = index[axis].times(step) + Affine.number(start, reader.rank)
        return tuple(places)

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        if not self.keeps_everything(known):
            return None
        return dims

    def carrier(self, dim: int, known: Known) -> int | None:
        return dim

    def keeps_everything(self, known: Known) -> bool:
        """A Slice does if its result is proven to be as large as its source, and its steps are
        positive."""
        steps = input_of(self.node, 4)
        content = () if steps is None else known.content(steps)
        forwards = isinstance(content, tuple) and all(step.is_at_least(1) for step in content)
        return forwards and known.shape(self.result) == known.shape(self.source) is not None

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        """None for a reversed Slice with an end beyond all elements: ONNX and ONNX Runtime read it
        in two ways."""
        starts, ends = (
            listed(self.node, name, integers(place)) for name, place in (("starts", 1), ("ends", 2))
        )
        if starts is None or ends is None:
            return None
        axes = listed(self.node, "axes", integers(3)) or tuple(range(len(starts)))
        steps = listed(self.node, "steps", integers(4)) or (1,) * len(starts)
        cuts = [slice(None)] * len(shape)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            if step < 0 and end >= END:
                return None
            cuts[axis] = _python_slice(start, end, step, shape[axis])
        return operator.itemgetter(tuple(cuts))


def from_front(start: Dim, size: Dim) -> Dim:
    """The place along a dimension at which a Slice begins. Where it counts from the end, that may
    be in front of the dimension: it begins at the first element then."""
    if (-size - start).is_at_least(0):
        return Dim(0)
    return size + start if (start.const or 0) < 0 else start


class Picked(Move):
    """Parts along one axis, by a tensor of indices."""

    @property
    def is_layout(self) -> bool:
        """It is where the indices are constant and repeat a whole dimension."""
        return self.repeats is not None

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        indices = self.node.inputs[1]
        places = reader.shape(indices)
        if places is None or not own:
            return None
        axis = int_attr(self.node, "axis", 0) % len(own)
        part = as_integer(reader.number(indices, index[axis : axis + len(places)]))
        if part is None:
            return None
        if part.const is not None and part.const < 0:
            part = part + Affine.number(own[axis], reader.rank)
        if not part.is_natural:
            return None
        return (*index[:axis], part, *index[axis + len(places) :])

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        """Known of indices 0 0 1 1 ... and 0 1 ... 0 1 ...: the repeated heads of grouped
        attention."""
        if self.repeats is None:
            return None
        axis, (size, times, in_turns) = int_attr(self.node, "axis", 0), self.repeats
        if space.size(dims[axis % len(dims)]) != size:
            return None
        return repeated(dims, axis, times, in_turns, space)

    def operands_along(self, dim: int, known: Known) -> Mapping[int, int] | None:
        """The indices, or a dimension of the source that is not looked up."""
        own, indices = known.shape(self.source), known.shape(input_of(self.node, 1))
        if not own or indices is None:
            return None
        axis = int_attr(self.node, "axis", 0) % len(own)
        if axis <= dim < axis + len(indices):
            return {1: dim - axis}
        return {0: dim if dim < axis else dim + 1 - len(indices)}

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        places, axis = integers(1), int_attr(self.node, "axis", 0)
        return None if places is None else lambda array: np.take(array, places, axis)

    @property
    def repeats(self) -> tuple[int, int, bool] | None:
        """The size of the dimension that constant indices repeat, how often, and whether as a
        whole; else None."""
        indices = constant(input_of(self.node, 1), limit=1 << 12)
        if indices is None or indices.ndim != 1 or indices.size == 0 or indices.min() != 0:
            return None
        size = int(indices.max()) + 1
        times, rest = divmod(indices.size, size)
        if rest or times < 2:
            return None
        if np.array_equal(indices, np.repeat(np.arange(size), times)):
            return size, times, False
        if np.array_equal(indices, np.tile(np.arange(size), times)):
            return size, times, True
        return None


class PickedPoints(Move):
    """Parts along the first dimensions, by a tensor of points."""

    def place(self, index: Index, own: Shape, shape: Shape, reader: Reader) -> Index | None:
        indices = self.node.inputs[1]
        shape_of_indices = reader.shape(indices)
        if not shape_of_indices or int_attr(self.node, "batch_dims", 0):
            return None
        *points, depth = shape_of_indices
        if depth.const is None or depth.const > len(own):
            return None
        numbers = (Affine.number(k, reader.rank) for k in range(depth.const))
        first = all_known(
            as_integer(reader.number(indices, (*index[: len(points)], k))) for k in numbers
        )
        if first is None or not all(place.is_natural for place in first):
            return None
        return (*first, *index[len(points) :])

    def operands_along(self, dim: int, known: Known) -> Mapping[int, int] | None:
        """Indices [batch, rows, n] look up the n dimensions of the source behind the batch."""
        indices, batch = known.shape(input_of(self.node, 1)), int_attr(self.node, "batch_dims", 0)
        if not indices or indices[-1].const is None:
            return None
        rows = len(indices) - 1
        if dim < batch:
            return {0: dim, 1: dim}
        return {1: dim} if dim < rows else {0: batch + indices[-1].const + dim - rows}

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        points = integers(1)
        if points is None or int_attr(self.node, "batch_dims", 0):
            return None
        return operator.itemgetter(tuple(np.moveaxis(points, -1, 0)))


class PickedElements(Move):
    """Single elements, by a tensor of indices."""

    def operands_along(self, dim: int, known: Known) -> Mapping[int, int] | None:
        """The result has the shape of the indices. Along other dimensions than the axis the source
        has as many rows, or more, which no index reads."""
        own, indices = known.shape(self.source), known.shape(input_of(self.node, 1))
        if not own or indices is None:
            return None
        if dim == int_attr(self.node, "axis", 0) % len(own):
            return {1: dim}
        return {0: dim, 1: dim} if own[dim] == indices[dim] else None

    def on_arrays(self, shape: Sequence[int], integers: Integers) -> ArrayMove | None:
        indices, axis = integers(1), int_attr(self.node, "axis", 0)
        if indices is None:
            return None
        places = np.where(indices < 0, indices + shape[axis], indices)
        # Along every other axis the indices may have fewer rows: the first ones are read.
        read: list[slice] = [slice(0, size) for size in places.shape]
        read[axis] = slice(None)
        return lambda array: np.take_along_axis(array[tuple(read)], places, axis)


class Shuffled(Move):
    """All elements in another order."""


class Reversed(Move):
    """The first rows of each batch entry, as many as its length says, in reversed order."""

    def carrier(self, dim: int, known: Known) -> int | None:
        rows_and_batch = int_attr(self.node, "time_axis", 0), int_attr(self.node, "batch_axis", 1)
        if dim in rows_and_batch:
            return None
        return dim


def repeated(
    dims: Arrangement, axis: int, times: int, in_turns: bool, space: AxisSpace
) -> Arrangement:
    """The arrangement with one dimension repeated: as a whole if `in_turns`, else element by
    element."""
    place = axis % len(dims)
    own, again = dims[place], space.new(Dim(times))
    repeated = again + own if in_turns else own + again
    return (*dims[:place], repeated, *dims[place + 1 :])


def listed(node: ir.Node, name: str, numbers: np.ndarray | None) -> tuple[int, ...] | None:
    """Integers that are an attribute in some opsets and an input in others; None where neither is
    given."""
    attr = node.attributes.get(name)
    if attr is not None:
        return tuple(attr.as_ints())
    return None if numbers is None else tuple(numbers.reshape(-1).tolist())


def _python_slice(start: int, end: int, step: int, size: int) -> slice:
    """A slice of ONNX as one of Python."""
    start, end = (place + size if place < 0 else place for place in (start, end))
    if step > 0:
        return slice(max(0, min(start, size)), max(0, min(end, size)), step)
    last = max(-1, min(end, size - 1))
    return slice(max(0, min(start, size - 1)), None if last < 0 else last, step)


def fitted(own: Shape | None, shape: Shape | None, index: Index, rank: int) -> Index | None:
    """The index of an element in an operand of shape `own`, given its index in the result of shape
    `shape` to which the operand is broadcast; None where the operand is not proven to fit."""
    if own is None or shape is None or len(own) > len(shape) or len(shape) != len(index):
        return None
    places: list[Affine] = []
    for size, wanted, place in zip(
        own, shape[len(shape) - len(own) :], index[len(shape) - len(own) :], strict=True
    ):
        if size.const != 1 and size != wanted:
            return None
        places.append(Affine.number(0, rank) if size.const == 1 else place)
    return tuple(places)


def zero(reader: Reader) -> Affine:
    """The first place along a dimension."""
    return Affine.number(0, reader.rank)


def _group(
    given: list[tuple[Dim, Affine]], wanted: list[Dim]
) -> tuple[list[tuple[Dim, Affine]], list[Dim]] | None:
    """Take the fewest first dimensions of both lists that have equally many elements; None where
    that is unproven."""
    some, parts = [given.pop(0)], [wanted.pop(0)]
    while (made := product(size for size, _ in some)) != (whole := product(parts)):
        if given and whole.exact_div(made) is not None:
            some.append(given.pop(0))
        elif wanted and made.exact_div(whole) is not None:
            parts.append(wanted.pop(0))
        else:
            return None
    return some, parts


def _merged(dims: list[tuple[Dim, Affine]], reader: Reader) -> Affine | None:
    """The place in dimensions that are merged, given the place in each of them; None where it is
    not linear."""
    total, stride = zero(reader), Dim(1)
    for size, place in reversed(dims):
        if place != zero(reader):
            if stride.const is None:
                return None
            total = total + place.times(stride.const)
        stride = stride * size
    return total


def _places_within(place: Affine, sizes: list[Dim], reader: Reader) -> list[Affine] | None:
    """The places in dimensions of these sizes, given the place in all of them merged; None where
    they are not linear.

    A part of the place is the multiple of a size, and the rest is proven to be less than it.
    """
    places: list[Affine] = []
    for size in reversed(sizes[1:]):
        count = size.const
        if not count:
            return None
        times, rest = _divided(place.offset, count)
        if times is None:
            return None
        inner = Affine(Dim(rest), tuple(step % count for step in place.steps))
        if not (Affine.number(count - 1, reader.rank) - inner).least(reader.sizes).is_at_least(0):
            return None
        places.append(inner)
        place = Affine(times, tuple(step // count for step in place.steps))
    return [place, *reversed(places)]


def _divided(offset: Dim, count: int) -> tuple[Dim | None, int]:
    """How often a number goes into an offset, and the rest; None where the quotient is unknown."""
    if offset.const is None:
        return offset.exact_div(count), 0
    quotient, rest = divmod(offset.const, count)
    return Dim(quotient), rest


# -- the table ------------------------------------------------------------------------------------

Form = type[Move]
Condition = Callable[[ir.Node, Known], ir.Value | None]
_FORMS: dict[str, tuple[Form, Condition]] = {}


Element = Callable[[Reader, ir.Node, Index], Number | None]
ELEMENTS: dict[str, Element] = {}


def element(*op_types: str) -> Callable[[Element], Element]:
    """Enter how the element at an index of the result is made, by operators that choose it from
    several operands, or compute it from the index."""

    def enter(function: Element) -> Element:
        ELEMENTS.update(dict.fromkeys(op_types, function))
        return function

    return enter


def only_element(value: ir.Value | None, reader: Reader) -> Number | None:
    """The one element of a tensor whose sizes are all 1; None when it is unknown."""
    shape = reader.info.shape(value)
    if shape is None or any(size.const != 1 for size in shape):
        return None
    return reader.number(value, (zero(reader),) * len(shape))


def first_input(node: ir.Node, known: Known) -> ir.Value | None:
    """The source of most moves."""
    return input_of(node, 0)


def mover(*op_types: str, form: Form, source: Condition = first_input) -> None:
    """Enter the form of operators. `source` gives what a node moves, None where the node is no
    move."""
    _FORMS.update(dict.fromkeys(op_types, (form, source)))


def move_of(node: ir.Node | None, known: Known) -> Move | None:
    """The move that a node is; None for operators that compute something."""
    if not has_row(node, _FORMS):
        return None
    form, condition = _FORMS[node.op_type]
    source = condition(node, known)
    if source is None:
        return None
    return form(node, source)


def plain_move(node: ir.Node) -> Move:
    """The move that a node of one of the `operators_of` the forms without a condition is."""
    return _FORMS[node.op_type][0](node, operand_at(node, 0))


def moved_array(move: Move, array: np.ndarray) -> np.ndarray | None:
    """What a move makes of an array; None where its other inputs, such as a shape, are no
    constants, or do not fit."""
    inputs = enumerate(move.node.inputs)
    others = {
        place: constant(value)
        for place, value in inputs
        if value is not None and value is not move.source
    }
    if any(other is None for other in others.values()):
        return None
    try:
        moved = move.on_arrays(array.shape, others.get)
        return None if moved is None else moved(array)
    except (ValueError, IndexError):
        return None


def keeps_everything(node: ir.Node | None, known: Known) -> bool:
    """Does a Slice, Pad, Expand or Tile keep every element in its place?"""
    move = move_of(node, known)
    return isinstance(move, Cut | Unpadded | Stretched) and move.keeps_everything(known)


def operators_of(*forms: Form) -> tuple[str, ...]:
    """The operators of some forms, those that are moves under a condition included."""
    return tuple(name for name, (form, _) in _FORMS.items() if form in forms)


def operators_that(holds: Callable[[Form], bool]) -> tuple[str, ...]:
    """The operators that are moves under no condition, and for whose form something holds."""
    return tuple(
        name
        for name, (form, condition) in _FORMS.items()
        if condition is first_input and holds(form)
    )
