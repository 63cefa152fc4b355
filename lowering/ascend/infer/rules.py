"""What a rule is given and what it gives: facts about tensors, and the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa_compiler.lowering.ascend.graph import UNKNOWN, Op
from fa_compiler.op_registry.ge_prototypes import ge_prototype

Shape = tuple[int, ...] | None
Values = np.ndarray[Any, np.dtype[np.object_]]


@dataclass(frozen=True)
class Fact:
    """What is known of a tensor: its GE type ("" if nothing), its shape (None: not even the rank; UNKNOWN sizes), and,
    of small integer tensors, the elements as Python ints, None where one is not known."""

    dtype: str
    shape: Shape = None
    value: Values | None = field(default=None, compare=False)

    def but(self, shape: Shape, value: Values | None = None) -> Fact:
        """The same type with another shape."""
        return Fact(self.dtype, shape, value)

    @property
    def rank(self) -> int | None:
        """The number of dimensions, if it is known."""
        return None if self.shape is None else len(self.shape)


NOTHING = Fact("")


class Misfit(Exception):
    """Inputs that the operator cannot take together; the sentence says why."""


@dataclass(frozen=True)
class OpFacts:
    """One operator and the facts of its inputs by name; absent ones are missing."""

    op: Op
    inputs: Mapping[str, Fact]

    def x(self, name: str = "x") -> Fact:
        """The input of that name; nothing is known of one that is absent."""
        return self.inputs.get(name, NOTHING)

    def many(self, name: str) -> list[Fact]:
        """The tensors of a dynamic input."""
        return [fact for key, fact in self.inputs.items() if key.removeprefix(name).isdigit()]

    def attr(self, name: str) -> Any:
        """The value of an attribute, or the prototype's default. Raises Misfit if there is neither."""
        spec = ge_prototype(self.op.type)
        entry = spec.attr(name) if spec is not None and name in spec.attr_names else None
        found = self.op.attrs.get(name)
        if found is not None:
            if entry is not None and found.kind != entry.type:
                raise Misfit(f"its attribute {name} is a {found.kind}, not a {entry.type}")
            return found.value
        if entry is None or entry.value_if_absent is None:
            raise Misfit(f"its attribute {name} is missing")
        return entry.value_if_absent

    def ints(self, name: str) -> list[int] | None:
        """All elements of an integer input, None if one is not known."""
        value = self.x(name).value
        return None if value is None or any(item is None for item in value.flat) else [int(item) for item in value.flat]

    def one(self, name: str) -> int | None:
        """The only element of an integer input, None if it is not known. Raises Misfit if there is not exactly one."""
        numbers = self.ints(name)
        if numbers is not None and len(numbers) != 1:
            raise Misfit(f"its input {name} has {len(numbers)} elements, not one")
        return None if numbers is None else numbers[0]

    def axis(self, number: int, rank: int, what: str = "axis") -> int:
        """An axis counted from the front. Raises Misfit if there is none."""
        if not -rank <= number < rank:
            raise Misfit(f"{what} {number} is none of a tensor of rank {rank}")
        return number % rank if rank else 0


Rule = Callable[[OpFacts], Sequence[Fact]]
RULES: dict[str, Rule] = {}
"""The rule of each operator: facts of its outputs in order."""


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Enter a function into the table."""

    def enter(function: Rule) -> Rule:
        for op_type in op_types:
            RULES[op_type] = function
        return function

    return enter


def agree(left: int, right: int) -> bool:
    """May two sizes be equal?"""
    return left == right or UNKNOWN in (left, right)


def fits(left: Shape, right: Shape) -> bool:
    """May two shapes be equal?"""
    return left is None or right is None or (len(left) == len(right) and all(map(agree, left, right)))


def merged(left: int, right: int) -> int:
    """The size of an axis that two tensors share. Raises Misfit if they cannot."""
    if not agree(left, right):
        raise Misfit(f"the sizes {left} and {right} of one axis differ")
    return max(left, right)


def broadcast(*shapes: Shape) -> Shape:
    """The shape that tensors have together. Raises Misfit if they do not broadcast."""
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    result: list[int] = []
    for axis in range(rank):
        sizes = {shape[axis - rank + len(shape)] for shape in known if axis - rank + len(shape) >= 0} - {1}
        fixed = sizes - {UNKNOWN}
        if len(fixed) > 1:
            raise Misfit(f"the shapes {', '.join(str(list(shape)) for shape in known)} do not broadcast")
        result.append(fixed.pop() if fixed else UNKNOWN if sizes else 1)
    return tuple(result)


def product(sizes: Sequence[int]) -> int:
    """How many elements, UNKNOWN if a size is."""
    return 0 if 0 in sizes else UNKNOWN if UNKNOWN in sizes else int(np.prod(sizes, dtype=object))


def vector(items: Sequence[int | None]) -> Values:
    """Elements as a value."""
    made = np.empty(len(items), dtype=object)
    made[:] = list(items)
    return made
