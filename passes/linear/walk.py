"""A walk over all lengths: the numbers of a region that depend on nothing but a length, at each
length in turn.

A length may go through any arithmetic before a comparison, an index or a factor meets it: quotients
of quotients, remainders of multiples, floats that are rounded or become infinite, integers that
wrap, a table that is read at one place. No formula tells where such a number changes. So the small
numbers are computed at every length:

    1     the lengths from 1 to `WALKED`, and those around each power of 2 up to 2^`DOUBLED`
    2     a number is followed where its shape is the same at all lengths, and it has at most
          `SMALL` elements. What it is made of may have up to `LARGEST`, such as a Range over the
          tokens that is summed
    3     a length is like another one where all numbers differ from those at the length before by
          the same, and the numbers that have few values have the same one. The first length of each
          kind is one at which the region `turns`
    4     a small number that varies and cannot be followed makes the region unclear: what a Loop or
          an If gives, and what is made of too many elements. So do too many kinds, as of a square
    5     what can be computed at all lengths at once (columns.py) is computed at each one up to
          `FAR`

Whether the region is right where it turns is for the points at these lengths to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import STANDARD, constant, is_op, subgraphs, without_none
from fa_compiler.passes.linear.columns import (
    Column,
    Ragged,
    Rows,
    at_once,
    exact_results,
    of_lengths,
    of_sizes,
)
from fa_compiler.passes.linear.field import hashed
from fa_compiler.passes.linear.meetings import SMALL
from fa_compiler.passes.linear.operators import EXACT, RULES
from fa_compiler.passes.linear.tensors import FailedError, exact
from fa_compiler.passes.values.shapes import ShapeInfo

WALKED = 1100
FAR = 1 << 16
DOUBLED = 20
LARGEST = 4096
MOST_TURNS = 48
FEW_VALUES = 4
FEW_LENGTHS = 64
"""What has many values mostly shows it at so many lengths."""
ROUNDING = 2.0**-20
"""A multiple of a length is rounded otherwise at each length, by so much of it."""
SEED = 0x3A1F
"""Of the numbers that stand for rows of numbers."""


@cache
def lengths_walked(until: int = WALKED) -> np.ndarray:
    """The lengths that are walked over, where each one up to `until` is."""
    around = {(1 << power) + step for power in range(1, DOUBLED + 1) for step in (-2, -1, 0, 1)}
    # 1
    return np.array(sorted({*range(1, until + 1), *(length for length in around if length > 0)}))


@dataclass(frozen=True)
class Walk:
    """The numbers of these nodes, where the sizes of `names` are the length, and others what they
    are in `sizes`."""

    nodes: Sequence[ir.Node]
    info: ShapeInfo
    names: Collection[str]
    sizes: Mapping[str, int]
    unknown: Collection[ir.Value] = ()
    """Constants that may hold any numbers."""

    @cached_property
    def turns(self) -> set[int] | None:
        """The lengths at which the region may begin to compute something else; None where there are
        too many."""
        failing = np.setdiff1d(lengths_walked(), self._near.lengths)
        found = {*map(int, np.intersect1d(self._near.lengths + 1, failing))}  # the first ones
        # 5: far ones
        for numbers in (self._near, _Numbers(self, lengths_walked(FAR), is_far=True)):
            turns = numbers.turns()
            if turns is None:
                return None
            found |= turns
        return found

    @property
    def followed(self) -> Set[ir.Value]:
        """The values that are known at all lengths at which nothing fails."""
        return self._near.followed

    @cached_property
    def _near(self) -> _Numbers:
        """The numbers at the lengths at which nothing fails."""
        found = _Numbers(self, lengths_walked())
        while found.failing:
            found = _Numbers(self, np.delete(found.lengths, sorted(found.failing)))
        return found


@dataclass
class _Numbers:
    """What is computed at these lengths. Far ones are too many to be looked at one by one."""

    walk: Walk
    lengths: np.ndarray
    is_far: bool = False
    failing: set[int] = field(default_factory=set)
    """The places of lengths at which a node fails."""
    followed: set[ir.Value] = field(default_factory=set)
    known: dict[ir.Value, Column | Ragged | None] = field(default_factory=dict)
    kinds: list[np.ndarray] = field(default_factory=list)
    """What tells the lengths in `after` apart, each by a number."""

    def __post_init__(self) -> None:
        """Compute what the nodes make. What no later one reads is forgotten."""
        operators = {*RULES, *EXACT}
        nodes = [
            node
            for node in self.walk.nodes
            if node.op_type in operators and node.domain in STANDARD and not subgraphs(node)
        ]
        last = {value: place for place, node in enumerate(nodes) for value in node.inputs}
        for place, node in enumerate(nodes if self.lengths.size else ()):
            for output, column in zip(node.outputs, self._results(node) or (), strict=False):
                self._enter(output, column)
            for value in without_none(node.inputs):
                if last[value] == place:
                    self.known[value] = None

    @cached_property
    def after(self) -> np.ndarray:
        """The places of the lengths that follow the one before."""
        return np.flatnonzero(np.diff(self.lengths, prepend=-1) == 1)

    @cached_property
    def sizes(self) -> dict[str, np.ndarray]:
        """The sizes of all names at these lengths."""
        others = {name: np.array(size) for name, size in self.walk.sizes.items()}
        return {**others, **dict.fromkeys(self.walk.names, self.lengths)}

    def turns(self) -> set[int] | None:
        """The first length of each kind; None where there are too many."""
        if not self.kinds or not self.after.size:
            return set()
        # 3: the first length of each kind
        _, first = np.unique(hashed(self.kinds, SEED), return_index=True)
        if len(first) > MOST_TURNS:  # 4: too many kinds
            return None
        return {*map(int, self.lengths[self.after[first]])}

    def _enter(self, value: ir.Value, column: Column | Ragged) -> None:
        """Enter what a node gave, where it is not too large."""
        if column.count > (SMALL if self.is_far else LARGEST):
            return
        column = column.as_one()
        self.known[value] = column
        if isinstance(column, Ragged) or column.count > SMALL:
            return
        self.followed.add(value)  # 2: small, and of one shape
        if isinstance(column, Rows):
            numbers = column.array.reshape(len(column.array), -1)
            self.kinds.extend(self._kinds(numbers, is_op(value.producer(), "Exp")))

    def _kinds(self, numbers: np.ndarray, is_exponential: bool) -> Iterator[np.ndarray]:
        """What tells the lengths in `after` apart, each by a number: how a value differs from that
        before, and where it has few values, which one it is."""
        if is_exponential:  # of decays: a 0 or an infinity tells, and otherwise the exponent
            numbers = (numbers == 0).astype(np.int8) + 2 * np.isinf(numbers)
        elif numbers.dtype.kind == "b":
            numbers = numbers.astype(np.int8)
        with np.errstate(all="ignore"):
            steps = numbers[self.after] - numbers[self.after - 1]
            if steps.dtype.kind == "f":
                usual = np.median(steps, axis=0)
                is_usual = np.abs(steps - usual) <= ROUNDING * np.abs(numbers[self.after])
                steps = np.where(is_usual, usual, steps)
        yield _numbered(steps)
        own = _numbered(numbers)
        if all(len(np.unique(each)) <= FEW_VALUES for each in (own[:FEW_LENGTHS], own)):
            yield own[self.after]

    def _results(self, node: ir.Node) -> Sequence[Column | Ragged] | None:
        """The results of a node; None where they are not known, or fail at a length."""
        if (
            is_op(node, "Shape", "Size")
            and (columns := of_sizes(node, self.walk.info, self.sizes)) is not None
        ):
            return columns
        operands = [if_known(self._known, value) for value in node.inputs]
        if len(without_none(operands)) < len(without_none(node.inputs)):
            return None
        try:
            columns = at_once(node, operands, self.walk.info)
        except FailedError:
            columns = None
        return self._one_by_one(node, operands) if columns is None and not self.is_far else columns

    def _one_by_one(
        self, node: ir.Node, operands: Sequence[Column | Ragged | None]
    ) -> Sequence[Column | Ragged] | None:
        """The results of a node at each length in turn; None where one is not known, too large or
        fails."""
        rows, failing = list[list[np.ndarray]](), set[int]()
        # the longest one first, which is too much for most nodes
        for place in range(-1, len(self.lengths)):
            tensors = [None if column is None else exact(column.at(place)) for column in operands]
            try:
                results = exact_results(node, tensors, self.walk.info)
            except FailedError:
                failing.add(place % len(self.lengths))
                continue
            if results is None or max(result.size for result in results) > LARGEST:
                return None
            rows.append(results)
        self.failing |= failing
        return None if failing else [of_lengths(arrays) for arrays in zip(*rows[1:], strict=True)]

    def _known(self, value: ir.Value) -> Column | Ragged | None:
        """What is known of a value."""
        if value not in self.known:
            array = None if value in self.walk.unknown else constant(value)
            self.known[value] = if_known(Column, array)
        return self.known[value]


def _numbered(numbers: np.ndarray) -> np.ndarray:
    """A number for each row, the same for equal ones, bit by bit."""
    wide = (
        numbers.astype(np.float64).view(np.int64)
        if numbers.dtype.kind == "f"
        else numbers.astype(np.int64)
    )
    return hashed([*wide.T], SEED)
