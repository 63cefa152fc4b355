"""What is known of a tensor of a GE graph, and of the inputs of one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa_compiler.lowering.ascend.graph import UNKNOWN, Op
from fa_compiler.op_registry.ge_prototypes import ge_prototype

Shape = tuple[int, ...] | None
Values = np.ndarray[Any, np.dtype[np.object_]]


@dataclass(frozen=True)
class Fact:
    """The known facts of a tensor.

    `dtype` is its GE type, "" if it is unknown. `shape` has UNKNOWN for unknown sizes, and is None
    for an unknown rank. `value` are the elements of a small integer tensor as Python ints, None for
    an unknown element.
    """

    dtype: str
    shape: Shape = None
    value: Values | None = field(default=None, compare=False)

    def with_shape(self, shape: Shape, value: Values | None = None) -> Fact:
        """The same type with another shape."""
        return Fact(self.dtype, shape, value)

    @property
    def rank(self) -> int | None:
        """The number of dimensions, None if it is unknown."""
        return None if self.shape is None else len(self.shape)


NOTHING = Fact("")


class InferenceError(Exception):
    """The operator cannot take its inputs; the text gives the reason."""


@dataclass(frozen=True)
class OpFacts:
    """One operator, and the facts of its present inputs by name."""

    op: Op
    inputs: Mapping[str, Fact]

    def x(self, name: str = "x") -> Fact:
        """The facts of an input. Nothing is known of an absent one."""
        return self.inputs.get(name, NOTHING)

    @property
    def first(self) -> Fact:
        """The facts of the first present input."""
        return next(iter(self.inputs.values()), NOTHING)

    def dynamic(self, name: str) -> list[Fact]:
        """The tensors of a dynamic input."""
        return [fact for key, fact in self.inputs.items() if key.removeprefix(name).isdigit()]

    def attr(self, name: str) -> Any:
        """The value of an attribute, or the prototype's default. Raises InferenceError if there is
        neither."""
        spec = ge_prototype(self.op.type)
        entry = spec.attr(name) if spec is not None and name in spec.attr_names else None
        found = self.op.attrs.get(name)
        if found is not None:
            if entry is not None and found.kind != entry.type:
                raise InferenceError(f"its attribute {name} is a {found.kind}, not a {entry.type}")
            return found.value
        if entry is None or entry.value_if_absent is None:
            raise InferenceError(f"its attribute {name} is missing")
        return entry.value_if_absent

    def ints(self, name: str) -> list[int] | None:
        """All elements of an integer input, None if one is unknown."""
        value = self.x(name).value
        return (
            None
            if value is None or any(item is None for item in value.flat)
            else [int(item) for item in value.flat]
        )

    def integer(self, name: str) -> int | None:
        """The only element of an integer input, None if it is unknown. Raises InferenceError for
        another count."""
        numbers = self.ints(name)
        if numbers is not None and len(numbers) != 1:
            raise InferenceError(f"its input {name} has {len(numbers)} elements, not one")
        return None if numbers is None else numbers[0]

    def axes(self, name: str) -> list[int] | None:
        """The axes that an input or an attribute names, as they stand there; None if they are
        unknown."""
        if name in self.inputs:
            return self.ints(name)
        spec = ge_prototype(self.op.type)
        if spec is None or name not in spec.attr_names:
            return None
        found = self.attr(name)
        return [found] if isinstance(found, int) else list(found)

    def axis(self, number: int, rank: int, what: str = "axis") -> int:
        """An axis as a number from 0 on. Raises InferenceError for an axis outside the rank."""
        if not -rank <= number < rank:
            raise InferenceError(f"{what} {number} is outside a tensor of rank {rank}")
        return number % rank if rank else 0


def sizes_agree(left: int, right: int) -> bool:
    """Whether two sizes may be equal."""
    return left == right or UNKNOWN in (left, right)


def shapes_agree(left: Shape, right: Shape) -> bool:
    """Whether two shapes may be equal."""
    return (
        left is None
        or right is None
        or (len(left) == len(right) and all(map(sizes_agree, left, right)))
    )


def common_size(left: int, right: int) -> int:
    """The size of an axis that two tensors have in common. Raises InferenceError if their sizes
    differ."""
    if not sizes_agree(left, right):
        raise InferenceError(f"the sizes {left} and {right} of one axis differ")
    return max(left, right)


def broadcast(*shapes: Shape) -> Shape:
    """The shape to which shapes broadcast. Raises InferenceError if they do not broadcast."""
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known), default=0)
    result: list[int] = []
    for axis in range(rank):
        sizes = {
            shape[axis - rank + len(shape)] for shape in known if axis - rank + len(shape) >= 0
        } - {1}
        fixed = sizes - {UNKNOWN}
        if len(fixed) > 1:
            raise InferenceError(
                f"the shapes {', '.join(str(list(shape)) for shape in known)} do not broadcast"
            )
        if fixed:
            result.append(fixed.pop())
        else:
            result.append(UNKNOWN if sizes else 1)
    return tuple(result)


def product(sizes: Sequence[int]) -> int:
    """The number of elements, UNKNOWN if a size is unknown."""
    if 0 in sizes:
        return 0
    return UNKNOWN if UNKNOWN in sizes else int(np.prod(sizes, dtype=object))
