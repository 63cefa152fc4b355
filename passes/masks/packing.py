"""Packed sequences: sequences that lie end to end, with a mask that lets a token attend only to its
own sequence.

    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    labels = starts.cumsum(-1)
    same = labels[:, None, :, None] == labels[:, None, None, :]
    scores = torch.where(same & (j <= i), scores, -inf)

    same := Equal of two elements of one tensor of labels, at the row and at the column of a score
                                               (positions.py)
          | a constant mask of blocks on its diagonal, whose labels are the blocks' numbers
                                               (position_contents.py)

The operator expresses this as input_layout TND, with the ends of the sequences. That requires equal
labels to be neighbours: the labels have to come in *runs*. Labels that are an input of the model
may not, so the proof looks at how labels are computed:

    runs := CumSum(x) along the axis           every x is 0 or 1
          | ReduceSum(Cast(m))                 not over the axis; m compares positions along the
                                               axis with something that is the same all along it.
                                               Example: how many of the cumulative lengths a
                                               position has reached
          | Cast(m)                            m as above
          | a constant whose equal numbers are neighbours
          | runs + x | runs - x | x - runs     x the same all along the axis
          | runs moved                         by Identity, Unsqueeze, Squeeze, Reshape, Transpose,
                                               Expand, Slice, or Gather at affine positions
          | Cast(runs)                         to a wider type, or of a CumSum or ReduceSum as above

Such a CumSum or ReduceSum never falls, or never rises, from one position to the next. This holds
for any lengths that are given to the model, also for lengths that are unsorted, 0, too long or too
short in sum. Labels made of such sums come in runs in every run of the model, so the ends of the
sequences can be read off the labels. Adding one number at all positions keeps unequal labels
unequal, even where the sums wrap around.

    counted := CumSum(Cast(Not(Equal(x[t] - x[t - 1], 1))))

These are labels made of position_ids. The position x goes up by one from token to token of a
sequence, so a comparison of the positions of two tokens of a sequence compares their order.
Positions that wrap around their type are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.cases import as_integer
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.answer.options import UNBROKEN
from fa_compiler.passes.answer.report import Missed, MissedCode
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    constant,
    elsewhere,
    has_row,
    int_attr,
    is_op,
    number_of,
    operand_at,
    places_of,
    source_through,
)
from fa_compiler.passes.ops.elementwise import ORDERINGS
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.patterns import Bind, Number, Op, match
from fa_compiler.passes.values.positions import LABELS, Positions
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_DEPTH = 32

STEP = Op("Sub", Bind("later"), Bind("earlier"))
COUNTED = Op("CumSum", Op("Cast", Op("Not", Op("Equal", STEP, Number(1.0)))), open_end=True)


@dataclass(frozen=True)
class Packing:
    """Packed sequences: `labels` are equal for the tokens of one sequence.

    `dims` are the score axes of the labels' dimensions. One of them is the row axis, which stands
    for the columns, too. `in_runs` says whether equal labels are proven to be neighbours, and
    `never_enlarges` is that of the mask's term.
    """

    labels: ir.Value
    dims: Arrangement
    in_runs: bool
    never_enlarges: bool = True

    @property
    def missed(self) -> Missed:
        """What the report says about labels that are not proven to come in runs."""
        reason = "the labels of packed sequences are not proven unbroken: one may come back after another"
        return Missed(
            MissedCode.NOT_PACKED, reason, self.labels.name, f"--assume {UNBROKEN} if none does"
        )


@dataclass(frozen=True)
class ContiguousLabels:
    """Proves that equal labels are neighbours."""

    facts: Facts

    @property
    def info(self) -> ShapeInfo:
        return self.facts.info

    def holds(self, value: ir.Value, axis: int, depth: int = 0) -> bool:
        """Are equal numbers proven to be neighbours along the axis, in every run of the model?"""
        shape = self.info.shape(value)
        if shape is None or depth > MAX_DEPTH or self.info.dtype(value) not in LABELS:
            return False
        array = constant(value)
        if array is not None:
            return _in_runs(array, axis)
        node = value.producer()
        if node is None or value is not node.outputs[0]:
            return False
        rule = _RUNS[node.op_type] if has_row(node, _RUNS) else ContiguousLabels._is_moved_runs
        return rule(self, node, axis, depth)

    def position_source(self, labels: ir.Value, axis: int) -> ir.Value | None:
        """The positions x of `counted` labels, as in the grammar above; None for other labels."""
        counted = match(COUNTED, labels, self.info)
        if counted is None or self.info.shape(labels) is None:
            return None
        difference, count = counted.nodes[0], counted.nodes[-1]
        counts_from_here = int_attr(count, "exclusive", 0) or int_attr(count, "reverse", 0)
        if counts_from_here or not self._is_running_count(count, axis):
            return None
        return self._stepped(difference, axis)

    def _stepped(self, difference: ir.Node, axis: int) -> ir.Value | None:
        """The x of a difference x[t] - x[t - 1]; None for other differences. The difference of the
        first position, which has no predecessor, does not matter."""
        shape = self.info.shape(difference.outputs[0])
        if shape is None:
            return None
        positions = Positions(self.info, shape)
        later, earlier = (
            dict(positions.origins(*operand))
            for operand in positions.operands(difference, positions.identity_index)
        )
        for value in later:
            joined, index = concat_of(value.producer(), self.info), positions.identity_index
            if value not in earlier or joined is None or len(joined.parts) != 2:
                continue
            head, numbers = joined.parts
            first = positions.shape(head)
            further = tuple(place + int(k == axis) for k, place in enumerate(index))
            is_shifted = joined.axis == axis and earlier[value] == index
            if is_shifted and first is not None and first[axis].const == 1:
                if later[value] != further:
                    return None
                return numbers
        return None

    def _is_running_count(self, node: ir.Node, axis: int, depth: int = 0) -> bool:
        """Does a CumSum count along the axis, so that it never falls, or never rises?"""
        source, along = operand_at(node, 0), number_of(operand_at(node, 1))
        rank = len(self.info.sizes(source))
        if along is None or not rank or int(along) % rank != axis:
            return False
        return (self.facts.sets.of(source) or {-1.0}) <= {0.0, 1.0}

    def _is_count_of_orderings(self, node: ir.Node, axis: int, depth: int = 0) -> bool:
        """Does a ReduceSum, not over the axis, count comparisons that change once along it?"""
        source = operand_at(node, 0)
        rank = len(self.info.sizes(source))
        summed = set(places_of(node, rank) or ())
        if not summed:
            return False
        keeps = len(self.info.sizes(node.outputs[0])) == rank
        own = axis if keeps else elsewhere(range(rank), summed)[axis]
        return own not in summed and self._is_monotone(_uncast(source), own)

    def _is_cast_of_runs(self, node: ir.Node, axis: int, depth: int) -> bool:
        """Does a Cast make runs of a comparison, or of runs, which it does not make equal?"""
        source = operand_at(node, 0)
        dtype = self.info.dtype(source)
        if dtype == ir.DataType.BOOL:
            return self._is_monotone(source, axis)
        widens = dtype in LABELS and self.info.dtype(node.outputs[0]) in (dtype, ir.DataType.INT64)
        counts = is_op(source.producer(), "CumSum", "ReduceSum")
        return (widens or counts) and self.holds(source, axis, depth + 1)

    def _positions_in(self, value: ir.Value) -> Positions:
        """The positions in a tensor whose rank is known."""
        return Positions(self.info, self.info.sizes(value))

    def _is_shifted_runs(self, node: ir.Node, axis: int, depth: int) -> bool:
        """Is a sum or difference one of runs and something that is the same all along the axis?"""
        positions = self._positions_in(node.outputs[0])
        operands = positions.operands(node, positions.identity_index)
        for (one, places), (_, beside) in (operands, operands[::-1]):
            if (
                one is None
                or places is None
                or beside is None
                or any(place.steps[axis] for place in beside)
            ):
                continue
            along = _running(places, axis)
            if len(along) == 1 and self.holds(one, along[0], depth + 1):
                return True
        return False

    def _is_moved_runs(self, node: ir.Node, axis: int, depth: int) -> bool:
        """Are the results runs that a moving operator takes from their axis?"""
        positions = self._positions_in(node.outputs[0])
        moved = positions.moved(node, positions.identity_index)
        if moved is None:
            return False
        source, places = moved
        along = _running(places, axis)
        alone = len(along) == 1 and sum(map(bool, places[along[0]].steps)) == 1
        return alone and self.holds(source, along[0], depth + 1)

    def _is_monotone(self, value: ir.Value, axis: int) -> bool:
        """Is the value a comparison that changes at most once along the axis, and everywhere in the
        same direction?"""
        compared = source_through(value, "Not")
        node, shape = compared.producer(), self.info.shape(compared)
        if shape is None or not is_op(node, *ORDERINGS):
            return False
        positions = Positions(self.info, shape)
        operands = positions.operands(node, positions.identity_index)
        for (one, index), (_, beside) in (operands, operands[::-1]):
            position = as_integer(positions.number(one, index))
            if position is not None and position.steps[axis] and beside is not None:
                return not any(place.steps[axis] for place in beside)
        return False


_RUNS: Mapping[str, Callable[[ContiguousLabels, ir.Node, int, int], bool]] = {
    "CumSum": ContiguousLabels._is_running_count,
    "ReduceSum": ContiguousLabels._is_count_of_orderings,
    "Cast": ContiguousLabels._is_cast_of_runs,
    **dict.fromkeys(("Add", "Sub"), ContiguousLabels._is_shifted_runs),
}
"""Whether an operator gives runs; the others may move them."""


def _running(places: Sequence[Affine], axis: int) -> list[int]:
    """The dimensions of an operand that run along an axis of the result."""
    return [dimension for dimension, place in enumerate(places) if place.steps[axis]]


def _uncast(value: ir.Value) -> ir.Value:
    """The source of a Cast, such as truth values that are summed; ABSENT where the value is no
    Cast."""
    node = value.producer()
    return operand_at(node, 0) if is_op(node, "Cast") else ABSENT


def _in_runs(array: np.ndarray, axis: int) -> bool:
    """Are equal numbers neighbours along the axis?"""
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    return all(
        len(np.unique(row)) == 1 + np.count_nonzero(np.diff(row)) for row in rows if row.size
    )
