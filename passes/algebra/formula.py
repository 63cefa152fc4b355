"""Masks as formulas over the indices of their dimensions.

A mask element is addressed by one index per dimension, x_0 .. x_(n-1). An `Affine` is an integer
that depends on them linearly, with a symbolic offset. A formula is true or false for each element:

    formula := BooleanLiteral(true | false)
             | AtLeastZero(affine)                               a comparison of positions
             | BooleanTensor(value, axes, when)                  a boolean tensor of the graph
             | ElementComparison(value, one, other, ...)         two elements of an integer tensor,
                                                                 compared
             | IndexLessThanElement(affine, value, index, ...)   a position, compared with an
                                                                 element of an integer tensor
             | All(formulas) | Some(formulas)

`ElementComparison`, `IndexLessThanElement`, `Some` and `All` remember the boolean tensor of the
graph that holds their value, when there is one (`origin`). A formula that cannot be expressed in
another way is read from that tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.budget import spend


@dataclass(frozen=True)
class Affine:
    """`offset + sum(steps[k] * x_k)`."""

    offset: Dim
    steps: tuple[int, ...]

    @staticmethod
    def number(value: Dim | int, rank: int) -> Affine:
        """An integer that is the same at every index."""
        return Affine(value if isinstance(value, Dim) else Dim(value), (0,) * rank)

    @staticmethod
    def index(axis: int, rank: int) -> Affine:
        """x_axis itself."""
        return Affine(Dim(0), tuple(int(k == axis) for k in range(rank)))

    @property
    def is_number(self) -> bool:
        """Whether the integer is the same at every index."""
        return not any(self.steps)

    @property
    def const(self) -> int | None:
        """The value when it is the same at every index and in every run."""
        if not self.is_number:
            return None
        return self.offset.const

    @property
    def is_natural(self) -> bool:
        """Whether the integer is proven never to be negative."""
        return min(self.steps, default=0) >= 0 and self.offset.is_at_least(0)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return replace(self, offset=self.offset + other)
        return Affine(
            self.offset + other.offset,
            tuple(a + b for a, b in zip(self.steps, other.steps, strict=True)),
        )

    def __sub__(self, other: Affine) -> Affine:
        return self + other.times(-1)

    def times(self, factor: int) -> Affine:
        """Every part times a constant."""
        return Affine(self.offset * factor, tuple(step * factor for step in self.steps))

    def least(self, sizes: Sequence[Dim]) -> Dim:
        """A lower bound over all indices 0 <= x_k < sizes[k]."""
        total = self.offset
        for step, size in zip(self.steps, sizes, strict=True):
            if step < 0:
                total = total + (size - 1) * step
        return total


Index = tuple[Affine, ...]
"""The index of an element of a tensor: one place for each dimension."""


@dataclass(frozen=True)
class BooleanLiteral:
    """True everywhere, or false everywhere."""

    value: bool
    origin: ClassVar[None] = None


@dataclass(frozen=True)
class AtLeastZero:
    """affine >= 0."""

    affine: Affine
    origin: ClassVar[None] = None


@dataclass(frozen=True)
class BooleanTensor:
    """The element of `value`, as a truth value, equals `when`. Dimension d of `value` runs along
    x_k for k = axes[d], or has the size 1 where axes[d] is None. It may be longer than the mask in
    the dimension `cut`, where there is one: the mask then has its first elements."""

    value: ir.Value
    axes: tuple[int | None, ...]
    when: bool = True
    cut: int | None = None

    @property
    def origin(self) -> BooleanTensor:
        """The tensor that holds the formula's value: this one. A formula of no tensor has none. It
        does not count when formulas are compared: the same condition may stand in several
        tensors."""
        return self

    def arranged(self, dims: Arrangement) -> Arrangement:
        """The axes of the tensor's dimensions, in a mask whose dimensions have these axes."""
        return tuple(() if axis is None else dims[axis] for axis in self.axes)


@dataclass(frozen=True)
class ElementComparison:
    """The comparison `value[one] relation value[other]` has the truth value `when`."""

    value: ir.Value
    one: tuple[Affine, ...]
    other: tuple[Affine, ...]
    relation: Literal["Equal", "LessOrEqual"] = "Equal"
    when: bool = True
    origin: BooleanTensor | None = field(default=None, compare=False)

    def says(self, relation: Literal["Equal", "LessOrEqual"]) -> bool:
        """Is it said that the elements have this relation?"""
        return self.when and self.relation == relation

    @property
    def differing(self) -> tuple[int, ...]:
        """The dimensions in which the two elements have different indices."""
        return tuple(
            k
            for k, (one, other) in enumerate(zip(self.one, self.other, strict=True))
            if one != other
        )


@dataclass(frozen=True)
class IndexLessThanElement:
    """The comparison `affine < value[index]` has the truth value `when`."""

    affine: Affine
    value: ir.Value
    index: tuple[Affine, ...]
    when: bool = True
    origin: BooleanTensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple[Formula, ...]
    origin: BooleanTensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Some:
    """At least one part holds."""

    parts: tuple[Formula, ...]
    origin: BooleanTensor | None = field(default=None, compare=False)


Formula = (
    BooleanLiteral
    | AtLeastZero
    | BooleanTensor
    | ElementComparison
    | IndexLessThanElement
    | All
    | Some
)

TRUE, FALSE = BooleanLiteral(True), BooleanLiteral(False)

MAX_PARTS = 32
"""The most comparisons and tensors in a formula. Those of real models have up to 4."""


class TooLargeError(Exception):
    """Raised for a formula of more than `MAX_PARTS`, which `Positions` reads as an unknown one."""


def count_parts(formula: Formula) -> int:
    """How many comparisons and tensors a formula is made of. One that occurs twice counts twice."""
    return sum(map(count_parts, formula.parts)) if isinstance(formula, All | Some) else 1


def conjuncts(formula: Formula) -> tuple[Formula, ...]:
    """The formulas that hold together where this one holds."""
    return formula.parts if isinstance(formula, All) else (formula,)


def at_least_zero(affine: Affine) -> Formula:
    """affine >= 0. It becomes TRUE or FALSE where the integer is the same at every index and its
    sign is proven."""
    if affine.is_number and affine.offset.is_at_least(0):
        return TRUE
    if affine.is_number and (-affine.offset).is_at_least(1):
        return FALSE
    return AtLeastZero(affine)


def negation(formula: Formula) -> Formula:
    """The formula that is true where this one is false."""
    match formula:
        case BooleanLiteral(value):
            return BooleanLiteral(not value)
        case AtLeastZero(affine):
            return AtLeastZero(affine.times(-1) + -1)
        case BooleanTensor():
            return replace(formula, when=not formula.when)
        case ElementComparison() | IndexLessThanElement():
            return replace(formula, when=not formula.when, origin=_negated(formula.origin))
        case All(parts, origin):
            return Some(tuple(map(negation, parts)), _negated(origin))
        case Some(parts, origin):
            return All(tuple(map(negation, parts)), _negated(origin))


def conjunction(parts: Iterable[Formula], origin: BooleanTensor | None = None) -> Formula:
    """The formula that every part holds, without comparisons that other parts imply and without
    alternatives that other parts exclude.

    Raises:
        TooLargeError: the formula has more than `MAX_PARTS`, so that what is made of it again and
            again would grow beyond all bounds.
    """
    flat = list(itertools.chain.from_iterable(map(conjuncts, parts)))
    if sum(map(count_parts, flat)) > MAX_PARTS:
        raise TooLargeError
    singles: list[Formula] = [part for part in flat if not isinstance(part, Some)]
    remaining = [_remaining(part, singles) for part in flat]
    if remaining != flat:
        return conjunction(remaining, origin)
    spend(steps=len(flat))
    kept = _without_implied(flat)
    if kept is None:
        return FALSE
    if len(kept) == 1:
        return kept[0]
    return All(tuple(kept), origin) if kept else TRUE


def _without_implied(parts: Iterable[Formula]) -> list[Formula] | None:
    """The parts that no other part implies; None where two of them exclude each other."""
    kept: list[Formula] = []
    for part in parts:
        if part == FALSE or negation(part) in kept:
            return None
        if part == TRUE or any(_implies(other, part) for other in kept):
            continue
        kept = [*(other for other in kept if not _implies(part, other)), part]
    return kept


def _remaining(alternatives: Formula, facts: list[Formula]) -> Formula:
    """The alternatives that are possible where the facts hold; a formula without alternatives as it
    is."""
    if not isinstance(alternatives, Some):
        return alternatives
    if any(part in facts for part in alternatives.parts):
        return TRUE
    possible = tuple(part for part in alternatives.parts if negation(part) not in facts)
    if len(possible) == 1:
        return possible[0]
    if len(possible) == len(alternatives.parts):
        return alternatives
    return Some(possible) if possible else FALSE


def _implies(one: Formula, other: Formula) -> bool:
    """Is it proven that the second formula holds wherever the first does? It can be proven for
    comparisons whose difference is never negative."""
    if one == other:
        return True
    if not isinstance(one, AtLeastZero) or not isinstance(other, AtLeastZero):
        return False
    return (other.affine - one.affine).is_natural


def disjunction(parts: Iterable[Formula], origin: BooleanTensor | None = None) -> Formula:
    """The formula that at least one part holds. Raises TooLargeError as `conjunction`."""
    return negation(conjunction(map(negation, parts), _negated(origin)))


def choice(
    condition: Formula, chosen: Formula, other: Formula, origin: BooleanTensor | None = None
) -> Formula:
    """`chosen` where the condition holds, else `other`. Raises TooLargeError as `conjunction`."""
    if chosen == other:
        return chosen
    return disjunction(
        (conjunction((condition, chosen)), conjunction((negation(condition), other))),
        origin,
    )


def _negated(origin: BooleanTensor | None) -> BooleanTensor | None:
    if origin is None:
        return None
    return replace(origin, when=not origin.when)
