"""Values of a graph as polynomials in the few quantities that a gradient is made of.

    ds = p * dp - p * d
    ds = p * (dp - d)
    ds = e * (dp / total - d / total)

Every exporter writes a gradient in its own way. As polynomials these spellings are equal, whatever
the order of sums, products and factors. That is algebra over the real numbers; only rounding
differs.

Two grammars say which quantities there are, and what operators besides arithmetic make of them:
region.py for the gradient of attention, and index_region.py for the gradient of an indexer's loss.
Both use this grammar of arithmetic. The code cites the numbers of the cases; c is a number:

    tensor :=
      1     what a grammar has put in, or reads by itself
      2   | layout(tensor) | Cast(tensor) | c * tensor | tensor / c | -tensor
          what tracing.py looks through
      3   | tensor * tensor
      4   | tensor + tensor | Sum(tensor, ...) | tensor - tensor
      5   | tensor / tensor                            the divisor one that has an inverse: see
          `to_power`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.backward.tracing import Tracer
from fa_compiler.passes.ir.nodes import elsewhere, is_op

Monomial = tuple[int, ...]
"""The power of each quantity."""
MAX_POWER = 4
"""Higher powers do not occur in a gradient."""
TOLERANCE = 2.0**-20
"""Two factors this close are one number, rounded twice."""
MAX_DEPTH = 40
"""Operands that come from further up are no part of a gradient."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of monomials, each with its coefficient: a finite number that is not 0."""

    terms: Mapping[Monomial, float]

    @staticmethod
    def of(terms: Mapping[Monomial, float]) -> Polynomial | None:
        """The polynomial of these terms; None where there is none, or a coefficient is 0 or no
        finite number."""
        if not terms or not all(
            math.isfinite(factor) and factor != 0.0 for factor in terms.values()
        ):
            return None
        return Polynomial(terms)

    def times(self, other: Polynomial) -> Polynomial | None:
        """The product; None when a power grows beyond what a gradient holds. Terms that cancel up
        to rounding are gone."""
        result: dict[Monomial, float] = {}
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                monomial = product(left, right)
                if max(map(abs, monomial)) > MAX_POWER:
                    return None
                _add(result, monomial, a * b)
        return Polynomial.of(result)

    def plus(self, other: Polynomial, sign: float = 1.0) -> Polynomial | None:
        """The sum or difference; terms that cancel up to rounding are gone."""
        result = dict(self.terms)
        for monomial, factor in other.terms.items():
            _add(result, monomial, sign * factor)
        return Polynomial.of(result)

    def scaled(self, factor: float) -> Polynomial | None:
        """Every term times a number."""
        return Polynomial.of(
            {monomial: coefficient * factor for monomial, coefficient in self.terms.items()}
        )

    def to_power(self, power: int, divisors: Collection[int] = ()) -> Polynomial | None:
        """An integer power of a number times powers of the `divisors`, the places of the quantities
        that are divided by; None for anything else."""
        if len(self.terms) != 1:
            return None
        ((monomial, factor),) = self.terms.items()
        others = any(elsewhere(monomial, divisors))
        if others or abs(power) * max(1, *map(abs, monomial)) > MAX_POWER:
            return None
        return Polynomial.of({tuple(exponent * power for exponent in monomial): factor**power})

    def coefficient(self, wanted: Monomial) -> float | None:
        """c of c times this monomial; None for anything else."""
        return self.terms.get(wanted) if len(self.terms) == 1 else None

    def multiple_of(self, other: Polynomial) -> float | None:
        """c of c * other; None for anything else."""
        if self.terms.keys() != other.terms.keys():
            return None
        first, *rest = (self.terms[monomial] / factor for monomial, factor in other.terms.items())
        return (
            first if all(math.isclose(first, ratio, rel_tol=TOLERANCE) for ratio in rest) else None
        )

    def difference(self, first: Monomial, second: Monomial) -> float | None:
        """c of c * (first - second); None for anything else."""
        if set(self.terms) != {first, second}:
            return None
        factor = self.terms[first]
        return factor if math.isclose(factor, -self.terms[second], rel_tol=TOLERANCE) else None


def _add(terms: dict[Monomial, float], monomial: Monomial, factor: float) -> None:
    """Add a term to others. Terms that cancel up to rounding are gone."""
    mine = terms.pop(monomial, 0.0)
    total = mine + factor
    if mine == 0.0 or not abs(total) <= TOLERANCE * abs(mine):
        terms[monomial] = total


def product(one: Monomial, other: Monomial) -> Monomial:
    """The product of two monomials."""
    return tuple(a + b for a, b in zip(one, other, strict=True))


class Algebra(Protocol):
    """A polynomial, and what a grammar keeps beside it."""

    def times(self, other: Self) -> Self | None: ...
    def plus(self, other: Self, sign: float = 1.0) -> Self | None: ...
    def scaled(self, factor: float) -> Self | None: ...
    def to_power(self, power: int) -> Self | None: ...


Q = TypeVar("Q", bound=Algebra)


@dataclass(frozen=True)
class Tensor(Generic[Q]):
    """A polynomial and the axes of the tensor that holds it."""

    quantity: Q
    dims: Arrangement

    @staticmethod
    def of(quantity: Q | None, dims: Arrangement | None) -> Tensor[Q] | None:
        """The tensor, where both are known."""
        return None if quantity is None or dims is None else Tensor(quantity, dims)


@dataclass
class PolynomialReader(Generic[Q]):
    """Reads values as tensors of one grammar.

    `grammar` is called with a node and returns what it makes; for arithmetic it calls `made_by`.
    `tensors` keeps the answers, None for a value outside the grammar; `put` enters what is known
    from the start.
    """

    tracer: Tracer
    grammar: Callable[[ir.Node], Tensor[Q] | None]
    tensors: dict[ir.Value, Tensor[Q] | None] = field(default_factory=dict)
    _depth: int = 0

    def put(self, value: ir.Value, quantity: Q, dims: Arrangement) -> None:
        """Case 1: say what a value is."""
        self.tensors[value] = Tensor(quantity, dims)

    def tensor(self, value: ir.Value | None) -> Tensor[Q] | None:
        """What a value is; None when it is nothing that the grammar knows."""
        if value is None:
            return None
        if value not in self.tensors:
            node = value.producer()
            if self._depth >= MAX_DEPTH or node is None or value is not node.outputs[0]:
                return None
            self.tensors[value] = None
            spend(node)
            self._depth += 1
            try:
                self.tensors[value] = self.grammar(node)
            finally:
                self._depth -= 1
        if (tensor := self.tensors[value]) is None:
            return None
        return Tensor(tensor.quantity, self.tracer.viewer.space.resolve_all(tensor.dims))

    def all(self, values: Sequence[ir.Value | None]) -> list[Tensor[Q]] | None:
        """All values as tensors; None as soon as one is none."""
        result: list[Tensor[Q]] = []
        for value in values:
            tensor = self.tensor(value)
            if tensor is None:
                return None
            result.append(tensor)
        return result or None

    def made_by(self, node: ir.Node) -> Tensor[Q] | None:
        """Cases 2 to 5: what arithmetic makes; None for any other operator."""
        step = self.tracer.look_through(node)
        if step is not None:
            return self._rearranged(node, *step)
        if is_op(node, "Mul"):
            return self._combined(node, lambda a, b: a.times(b))
        if is_op(node, "Add", "Sum"):
            return self._combined(node, lambda a, b: a.plus(b))
        if is_op(node, "Sub"):
            return self._combined(node, lambda a, b: a.plus(b, -1.0))
        return self._divided(node) if is_op(node, "Div") else None

    def _rearranged(self, node: ir.Node, source: ir.Value, factor: float) -> Tensor[Q] | None:
        """Case 2: a value whose elements were only moved."""
        tensor, viewer = self.tensor(source), self.tracer.viewer
        if tensor is None:
            return None
        if viewer.factor(node) is not None:
            return Tensor.of(tensor.quantity.scaled(factor), tensor.dims)
        return Tensor.of(tensor.quantity, viewer.rearranged(node, tensor.dims))

    def _combined(self, node: ir.Node, combine: Callable[[Q, Q], Q | None]) -> Tensor[Q] | None:
        """Cases 3 and 4: the sum, difference or product of two values."""
        tensors = self.all(node.inputs)
        if tensors is None:
            return None
        result = tensors[0]
        for other in tensors[1:]:
            dims = self.tracer.aligned(result.dims, other.dims)
            combined = Tensor.of(combine(result.quantity, other.quantity), dims)
            if combined is None:
                return None
            result = combined
        return result

    def _divided(self, node: ir.Node) -> Tensor[Q] | None:
        """Case 5: a quotient."""
        below = self.tensor(node.inputs[1])
        if below is None or (inverse := below.quantity.to_power(-1)) is None:
            return None
        above = self.tensor(node.inputs[0])
        if above is None:
            return None
        return Tensor.of(above.quantity.times(inverse), self.tracer.aligned(above.dims, below.dims))
