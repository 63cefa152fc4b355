"""Values as polynomials of other values: sums, products and powers in any order are one
polynomial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import is_op, operands
from fa_compiler.passes.values.shapes import ShapeInfo

MOST_NODES = 16
"""More nodes than these are no part of an activation."""
HIGHEST = 3

Terms = Mapping[tuple[int, ...], float]
"""The factor of each product of powers: that of x^2 y is at (2, 1)."""


@dataclass
class Polynomials:
    """Reads values as polynomials of `variables`. `nodes` are the nodes that were read."""

    variables: tuple[ir.Value, ...]
    info: ShapeInfo
    nodes: list[ir.Node] = field(default_factory=list)
    _known: dict[ir.Value, Terms | None] = field(default_factory=dict)

    def of(self, value: ir.Value) -> Terms | None:
        """A value as a polynomial; None where it is none, or one of too many nodes."""
        if value not in self._known:
            self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: ir.Value) -> Terms | None:
        if value in self.variables:
            return {tuple(int(value is one) for one in self.variables): 1.0}
        if (number := self.info.scalar(value)) is not None:
            return {(0,) * len(self.variables): number}
        node = value.producer()
        if not is_op(node, *_OPERATORS) or len(self.nodes) >= MOST_NODES:
            return None
        self.nodes.append(node)
        first, *rest = (self.of(operand) for operand in operands(node))
        second = rest[0] if rest else first
        return None if first is None or second is None else _OPERATORS[node.op_type](first, second)


def _added(one: Terms, other: Terms, sign: int = 1) -> Terms:
    keys = {*one, *other}
    return _without_zeros({key: one.get(key, 0.0) + sign * other.get(key, 0.0) for key in keys})


def _multiplied(one: Terms, other: Terms) -> Terms | None:
    found: dict[tuple[int, ...], float] = {}
    for (left, factor), (right, second) in product(one.items(), other.items()):
        key = tuple(map(sum, zip(left, right, strict=True)))
        found[key] = found.get(key, 0.0) + factor * second
    return None if any(sum(key) > HIGHEST for key in found) else _without_zeros(found)


def _divided(one: Terms, other: Terms) -> Terms | None:
    number = _number(other)
    return {key: factor / number for key, factor in one.items()} if number else None


def _power(one: Terms, other: Terms) -> Terms | None:
    exponent = _number(other)
    if exponent not in (2.0, 3.0):
        return None
    square = _multiplied(one, one)
    return square if exponent == 2.0 or square is None else _multiplied(square, one)


def _number(terms: Terms) -> float | None:
    """The number that a polynomial is; None for one with variables."""
    ((key, factor), *others) = terms.items() or [((1,), 0.0)]
    return factor if not others and not any(key) else None


def _without_zeros(terms: Terms) -> Terms:
    return {key: factor for key, factor in terms.items() if factor}


_OPERATORS: Mapping[str, Callable[[Terms, Terms], Terms | None]] = {
    "Add": _added,
    "Sub": lambda one, other: _added(one, other, -1),
    "Mul": _multiplied,
    "Div": _divided,
    "Pow": _power,
    "Neg": lambda one, _: {key: -factor for key, factor in one.items()},
}


def are_close(one: Terms, other: Terms, tolerance: float) -> bool:
    """Do two polynomials have the same terms, and factors that are apart by no more than this share
    of them?"""
    return one.keys() == other.keys() and all(
        abs(factor - other[key]) <= tolerance * abs(other[key]) for key, factor in one.items()
    )
