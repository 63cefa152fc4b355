"""Terms that are added to a part of the scores: the assignment to this part becomes a sum over all
scores.

    scores[:, :, 1:, 1:] += relative_positions

Grammar; the code cites the numbers of the cases. Each value is read by the place of its elements:

    whole := scores
      1     | ScatterND(whole, places, updates)        places proven to be all places of a box, in
                                                       order; the element is that of updates in the
                                                       box, and that of whole outside of it
      2     | layout(whole)                            what positions.py reads through, Slices among
                                                       it
    updates := whole
      3     | Add(whole, t) | Add(t, whole)            in one box of the scores, and with one t
    emitted, where every element is proven to be that of the scores at its own place, or the sum of
    it and one of t
      4     Add(scores, Pad(t))                        0 outside of the box
    emitted, where the places are all of the scores
      5     updates                                    of any form

Torch's exporters write scores[:, :, 1:, 1:] += t like this: relative positions that a class token
does not have (MViTv2). Without a class token they write scores[:, :, :, :] += t (5). A score
outside of the box is added to 0, which leaves it as it is: NaN and infinities stay, and a softmax
does not tell -0 from 0. In the box the same two numbers are added. So the result is the same in
every run.

Refused: t that is repeated along a dimension in which the box is not the whole; t of another type
than float32, whose Pad not every release of ONNX Runtime has; opsets without ScatterND.

The change is a trial: it is kept if the ordinary matcher then takes the attention
(substitutions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import onnx_ir as ir

from fa_compiler.passes.algebra.formula import Affine, Index
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    all_known,
    first,
    is_op,
    nodes_of_type,
    only_reader,
    operand_at,
    operands,
    outputs_of,
    sole,
)
from fa_compiler.passes.ir.surgery import depends
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.ops.numbers import overwrites
from fa_compiler.passes.prepare.substitutions import Substitution, Substitutions, is_match_at
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_DEPTH = 60
"""How many assignments and layout operators are followed to the scores."""
MAX_PIECES = 200
"""The proof is given up after so many steps."""
Box = tuple[tuple[int, int | None], ...]
"""A range of indices for each dimension; None where it has no end before that of the dimension."""
Margins = tuple[tuple[int, int], ...]
"""For each dimension, how many elements there are before a box and after it."""


@dataclass(frozen=True)
class PartSum:
    """Scores to which a tensor is added in a box: `whole` is the result. `before` and `after` say
    how many scores there are before and after the box, along each dimension of the addend."""

    whole: ir.Value
    scores: ir.Value
    addend: ir.Value
    before: tuple[int, ...]
    after: tuple[int, ...]

    def emitted(self, builder: Builder) -> ir.Value:
        """Case 4."""
        padded = builder.op("Pad", [self.addend, builder.ints([*self.before, *self.after])])
        return builder.add(self.scores, padded)


@dataclass(frozen=True)
class Overwritten:
    """An assignment to all places: `whole` is the result."""

    whole: ir.Value
    updates: ir.Value

    def emitted(self, builder: Builder) -> ir.Value:
        """Case 5."""
        return self.updates


def add_to_whole(
    graph: ir.Graph,
    softmaxes: Sequence[SoftmaxAnchor],
    matcher: Matcher,
    new_builder: Callable[[], Builder],
) -> Substitutions:
    """Add to all scores what is added to a part of them, where the attention then matches. The
    graph stays as it is where there are none."""
    result, info = Substitutions(), matcher.facts.info
    for node in reversed(list(nodes_of_type(graph, "ScatterND"))):  # the last assignment first
        if (
            node.graph is not graph
            or (part := _overwritten(node, info) or _part_sum(node, info)) is None
        ):
            continue
        anchor = next((anchor for anchor in softmaxes if depends(anchor.scores, node)), None)
        if anchor is None:
            continue
        with Trial(new_builder()) as trial:
            trial.replace((part.whole, part.emitted(trial.builder)))
            if is_match_at(anchor.node, matcher) and (change := trial.keep()) is not None:
                result.add(Substitution(change), anchor.node)
    return result


def _overwritten(node: ir.Node, info: ShapeInfo) -> Overwritten | None:
    """Case 5."""
    whole, places, updates = operands(node)
    shape, listed, starts = info.sizes(whole), info.sizes(places), _starts(node, info)
    if starts is None or any(starts) or listed[:-1] != shape[: len(starts)]:
        return None
    return Overwritten(node.outputs[0], updates)


def _starts(node: ir.Node, info: ShapeInfo) -> list[int] | None:
    """Where the box of a ScatterND begins, along each dimension that its places have; None where
    they are no box."""
    whole, places, _ = operands(node)
    shape, listed = info.shape(whole), info.shape(places)
    if shape is None or not listed or not overwrites(node):
        return None
    depth = listed[-1].const
    if depth != len(listed) - 1 or depth > len(shape):
        return None
    line = Positions(info, listed[:-1])
    numbers = (
        line.number(places, (*line.identity_index, Affine.number(axis, depth)))
        for axis in range(depth)
    )
    return all_known(map(_distance, numbers, line.identity_index))


def _part_sum(node: ir.Node, info: ShapeInfo) -> PartSum | None:
    """The sum that this assignment, or a Transpose of it, makes of the scores."""
    scores = _before_assignments(node.outputs[0])
    if scores is None:
        return None
    transposed = nodes_of_type([only_reader(node.outputs[0])], "Transpose")
    wholes = [*outputs_of(transposed), node.outputs[0]]
    return first([_sum_of_scores(whole, scores, info) for whole in wholes])


def _sum_of_scores(whole: ir.Value, scores: ir.Value, info: ShapeInfo) -> PartSum | None:
    """The sum, if it is proven that a value is a sum of scores of its shape."""
    shape = info.shape(whole)
    if shape is None or info.shape(scores) != shape or info.dtype(whole) != ir.DataType.FLOAT:
        return None
    walk = _Elements(Positions(info, shape), scores)
    pieces = walk.read(whole, walk.own, walk.everything) or []
    piece = sole(piece for piece in pieces if piece.addend is not ABSENT)
    if piece is None or any(piece.place != walk.own for piece in pieces):
        return None
    margins = _margins(piece.box, shape)
    if margins is None or not _is_in_place(piece, margins, walk.own, shape, info):
        return None
    own = margins[len(shape) - len(piece.at) :]
    return PartSum(
        whole, scores, piece.addend, tuple(low for low, _ in own), tuple(high for _, high in own)
    )


def _margins(box: Box, shape: Shape) -> Margins | None:
    """The margins of a box in a tensor of this shape; None where they are not known."""
    margins: list[tuple[int, int]] = []
    for size, (low, high) in zip(shape, box, strict=True):
        after = 0 if high is None else (size - high).const
        if after is None or after < 0:
            return None
        margins.append((low, after))
    return tuple(margins)


def _is_in_place(
    piece: _Piece, margins: Margins, own: Index, shape: Shape, info: ShapeInfo
) -> bool:
    """Case 4: is each element of the addend added at its own place in the box? Where the box is the
    whole, an addend of size 1 is repeated."""
    sizes = info.shape(piece.addend)
    if sizes is None or len(sizes) > len(shape) or info.dtype(piece.addend) != ir.DataType.FLOAT:
        return False  # a sum may be computed in float64 and cast back
    missing = len(shape) - len(sizes)
    if any(map(any, margins[:missing])):
        return False
    for axis, (size, place) in enumerate(zip(sizes, piece.at, strict=True), missing):
        before, after = margins[axis]
        if size.const == 1 and not before and not after:
            continue
        if place != own[axis] + -before or size + before + after != shape[axis]:
            return False
    return True


def _before_assignments(value: ir.Value) -> ir.Value | None:
    """What assignments and the operators between them start from."""
    for _ in range(MAX_DEPTH):
        node = value.producer()
        if not is_op(node, "ScatterND", *LAYOUT_OPS):
            return value
        value = operand_at(node, 0)
    return None


class _Piece(NamedTuple):
    """The elements in `box`: those of the scores at `place`, to which those of the addend, at `at`,
    are added. Nothing is added where it is ABSENT."""

    box: Box
    place: Index
    addend: ir.Value = ABSENT
    at: Index = ()


@dataclass
class _Elements:
    """Reads where elements come from. `count` is how often it was asked."""

    reader: Positions
    scores: ir.Value
    count: int = 0

    @property
    def own(self) -> Index:
        """The place of each element."""
        return self.reader.identity_index

    @property
    def everything(self) -> Box:
        """The box of all elements."""
        return tuple((0, size.const) for size in self.reader.sizes)

    def read(self, value: ir.Value, index: Index, box: Box) -> list[_Piece] | None:
        """The elements of a value at `index`, for the indices in a box; None where one of them is
        unknown."""
        self.count += 1
        node = value.producer()
        if value is self.scores:
            return [_Piece(box, index)]
        if node is None or self.count > MAX_PIECES:
            return None
        if is_op(node, "ScatterND"):  # 1
            return self._written(node, index, box)
        if is_op(node, "Add"):  # 3
            return self._sum(node, index, box)
        moved = self.reader.moved(node, index)  # 2
        return None if moved is None else self.read(*moved, box)

    def _sum(self, node: ir.Node, index: Index, box: Box) -> list[_Piece] | None:
        operands = self.reader.operands(node, index)
        for (part, place), (addend, at) in (operands, operands[::-1]):
            pieces = if_known(partial(self.read, box=box), part, place)
            if pieces is not None and addend is not None and at is not None:
                plain = all(piece.addend is ABSENT for piece in pieces)
                return (
                    [_Piece(piece.box, piece.place, addend, at) for piece in pieces]
                    if plain
                    else None
                )
        return None

    def _written(self, node: ir.Node, index: Index, box: Box) -> list[_Piece] | None:
        """Case 1."""
        whole, _, updates = operands(node)
        starts = _starts(node, self.reader.info)
        if starts is None or (inner := self._box_of(node, starts, index, box)) is None:
            return None
        if any(high is not None and high <= low for low, high in inner):
            return self.read(whole, index, box)
        shifted = tuple(place + -start for place, start in zip(index, starts, strict=False))
        written = self.read(updates, (*shifted, *index[len(starts) :]), inner)
        parts = all_known(
            [written, *(self.read(whole, index, rest) for rest in _outside(box, inner))]
        )
        return None if parts is None else [*chain.from_iterable(parts)]

    def _box_of(self, node: ir.Node, starts: Sequence[int], index: Index, box: Box) -> Box | None:
        """The part of a box that an assignment writes, whose places begin at these starts; None
        where it is unknown."""
        shape, listed = (self.reader.info.sizes(value) for value in operands(node)[:2])
        if len(starts) > len(index):
            return None
        inner = list(box)
        for place, start, size, whole in zip(index, starts, listed, shape, strict=False):
            if start == 0 and size == whole:
                continue
            axis = next((axis for axis, step in enumerate(place.steps) if step), 0)
            offset = (place - Affine.index(axis, self.reader.rank)).const
            if offset is None or size.const is None:
                return None
            low, high = inner[axis]
            end = start - offset + size.const
            inner[axis] = max(low, start - offset), end if high is None else min(high, end)
        return tuple(inner)


def _outside(box: Box, inner: Box) -> Iterator[Box]:
    """Boxes that make up what is in a box and outside of an inner one."""
    for axis, ((low, high), (start, end)) in enumerate(zip(box, inner, strict=True)):
        if start > low:
            yield (*inner[:axis], (low, start), *box[axis + 1 :])
        if end != high and end is not None:
            yield (*inner[:axis], (end, high), *box[axis + 1 :])


def _distance(number: object, place: Affine) -> int | None:
    """How far a number is behind a place, the same distance everywhere and not negative; else
    None."""
    if not isinstance(number, Affine):
        return None
    distance = (number - place).const
    return distance if distance is not None and distance >= 0 else None
