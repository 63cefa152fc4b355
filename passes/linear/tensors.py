"""Tensors at a random point: what is known of the elements of a value when the inputs of a graph
are random numbers.

A tensor whose elements are the same in every run is `exact`. Every other one holds its elements
modulo `PRIME`, and, where it is known as a sum of other values, its elements as exponents, modulo
`ORDER`. As an exponent an element may be minus infinity, which is how masks spell e^x = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import all_known, without_none
from fa_compiler.passes.linear.field import (
    ORDER,
    hashed,
    inverse,
    of_numbers,
    power,
    reduced,
    times,
)

EXPONENT_SEED = 0x5EED
"""Of the numbers that values have as exponents where they are no sums of others."""


class FailedError(Exception):
    """The graph fails with these sizes, or it computes what cannot be followed."""


class TooLongError(FailedError):
    """The graph takes too long, and no less with more tokens."""


class UnknownError(FailedError):
    """An operator is not followed with these operands."""


@dataclass(frozen=True)
class Exponents:
    """Elements as exponents modulo ORDER. `blocked` marks those that are minus infinity; None where
    there are none."""

    numbers: np.ndarray
    blocked: np.ndarray | None = None


@dataclass(eq=False)
class Tensor:
    """One value at one random point. `field` is None where an element is no finite number."""

    shape: tuple[int, ...]
    exact: np.ndarray | None = None
    field: np.ndarray | None = None
    sums: Exponents | None = None
    """The exponents, where the value is a sum of others."""
    raised: np.ndarray | None = None
    """The powers, once they are asked for."""
    scale: float = 1.0
    """The known factors of the elements, where these are no known numbers: 0.01 for 0.01 x."""

    @property
    def is_known_integer(self) -> bool:
        """Are the elements integers or truth values that are the same in every run?"""
        return self.exact is not None and self.exact.dtype.kind in "biu"

    @property
    def is_varied(self) -> bool:
        """Are the elements numbers that differ from run to run?"""
        return self.exact is None and self.numbers() is not None

    @property
    def integers(self) -> np.ndarray | None:
        """The elements, if they are integers that are the same in every run; truth values are
        none."""
        return self.exact if self.exact is not None and self.exact.dtype.kind in "iu" else None

    def numbers(self) -> np.ndarray | None:
        """The elements modulo PRIME."""
        if self.field is None and self.exact is not None:
            self.field = of_numbers(self.exact)
        return self.field

    def exponents(self) -> Exponents | None:
        """The elements as exponents. An element that is no sum of others is an unknown of its
        own."""
        if self.sums is None:
            self.sums = self._own_exponents()
        return self.sums

    def powers(self) -> np.ndarray | None:
        """e to the elements, modulo PRIME; None where one is minus infinity, or is not known as an
        exponent."""
        sums = self.exponents()
        if self.raised is None and sums is not None and sums.blocked is None:
            self.raised = power(sums.numbers)
        return self.raised

    def scales(self) -> tuple[float, float]:
        """The least and the largest factor by which a product with the tensor is scaled."""
        if self.exact is None:
            return self.scale, self.scale
        sizes = np.abs(self.exact.astype(np.float64))
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        return (float(sizes.min()), float(sizes.max())) if sizes.size else (1.0, 1.0)

    def _own_exponents(self) -> Exponents | None:
        if self.exact is None:
            return (
                None
                if self.field is None
                else Exponents(hashed([self.field], EXPONENT_SEED, ORDER))
            )
        if self.exact.dtype.kind != "f":
            return None
        wide = self.exact.astype(np.float64)
        blocked = np.isneginf(wide)
        finite = np.where(blocked, 0.0, wide)
        numbers = of_numbers(finite)
        if numbers is None:
            return None
        own = np.where(finite == 0.0, 0, hashed([numbers], EXPONENT_SEED, ORDER))
        return Exponents(own, blocked if blocked.any() else None)


def exact(array: np.ndarray) -> Tensor:
    """A tensor whose elements are the same in every run."""
    return Tensor(array.shape, exact=array)


def of_field(array: np.ndarray, scale: float = 1.0) -> Tensor:
    """A tensor of numbers modulo PRIME."""
    return Tensor(array.shape, field=array, scale=scale)


def fields_of(tensors: Iterable[Tensor]) -> list[np.ndarray] | None:
    """The elements of tensors modulo PRIME; None where those of one are not known."""
    return all_known(tensor.numbers() for tensor in tensors)


def least_scale(tensors: Sequence[Tensor]) -> float:
    """The least scale of tensors that are not known."""
    return min((tensor.scale for tensor in tensors if tensor.exact is None), default=1.0)


def moved(sources: Sequence[Tensor], move: Callable[..., np.ndarray], with_sums: bool) -> Tensor:
    """What an operator makes that only moves elements of its sources: `move` does it with
    arrays."""
    exacts = all_known(source.exact for source in sources)
    if exacts is not None:
        return exact(np.asarray(move(*exacts)))
    field = if_known(lambda fields: np.asarray(move(*fields)), fields_of(sources))
    sums = _moved_sums([source.exponents() for source in sources], move) if with_sums else None
    scale = least_scale(sources)
    if field is not None:
        return Tensor(field.shape, field=field, sums=sums, scale=scale)
    if sums is not None:
        return Tensor(sums.numbers.shape, sums=sums, scale=scale)
    shape = np.asarray(move(*(np.zeros(source.shape, dtype=np.int8) for source in sources))).shape
    return Tensor(shape)


def _moved_sums(
    sources: Sequence[Exponents | None], move: Callable[..., np.ndarray]
) -> Exponents | None:
    known = all_known(sources)
    if known is None:
        return None
    numbers = np.asarray(move(*(source.numbers for source in known)))
    if all(source.blocked is None for source in known):
        return Exponents(numbers)
    marks = [
        np.zeros(source.numbers.shape, bool) if source.blocked is None else source.blocked
        for source in known
    ]
    return Exponents(numbers, np.asarray(move(*marks)))


def added(left: Tensor, right: Tensor, sign: int, with_sums: bool) -> Tensor:
    """left + right, or left - right where `sign` is -1."""
    shape = broadcast(left, right)
    result = Tensor(shape, scale=least_scale([left, right]))
    fields = fields_of((left, right))
    if fields is not None:
        one, other = fields
        result.field = reduced(one + sign * other)
    if with_sums:
        result.sums = _added_sums(left.exponents(), right.exponents(), sign)
    return result


def _added_sums(left: Exponents | None, right: Exponents | None, sign: int) -> Exponents | None:
    if left is None or right is None or (sign < 0 and right.blocked is not None):
        return None
    numbers = reduced(left.numbers + sign * right.numbers, ORDER)
    marks = without_none((left.blocked, right.blocked))
    if not marks:
        return Exponents(numbers)
    blocked = np.broadcast_to(marks[0], numbers.shape)
    return Exponents(numbers, blocked if len(marks) == 1 else blocked | marks[1])


def multiplied(left: Tensor, right: Tensor, with_sums: bool) -> Tensor:
    """The product, element by element. As an exponent, a product with an integer is a sum."""
    shape = broadcast(left, right)
    fields = fields_of((left, right))
    if fields is None:
        return Tensor(shape)
    result = of_field(times(*fields), left.scales()[1] * right.scales()[1])
    for factor, rest in ((left, right), (right, left)):
        if with_sums and factor.exact is not None and _is_whole(factor.exact):
            result.sums = _scaled(rest.exponents(), factor.exact)
    return result


def _is_whole(array: np.ndarray) -> bool:
    return bool(
        np.isfinite(array).all()
        and (array == np.round(array)).all()
        and (np.abs(array) < 1 << 30).all()
    )


def _scaled(sums: Exponents | None, factors: np.ndarray) -> Exponents | None:
    if sums is None or sums.blocked is not None:
        return None
    return Exponents(times_order(sums.numbers, factors.astype(np.int64)))


def times_order(numbers: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The product modulo ORDER with integers of less than 2^30."""
    return reduced(numbers * reduced(factors, ORDER), ORDER)


def divided(left: Tensor, right: Tensor) -> Tensor:
    """The quotient, element by element."""
    shape = broadcast(left, right)
    fields = fields_of((left, right))
    if fields is None:
        return Tensor(shape)
    one, other = fields
    return of_field(times(one, inverse(other)), left.scales()[1] / right.scales()[0])


def summed(source: Tensor, total: Callable[[np.ndarray], np.ndarray], with_sums: bool) -> Tensor:
    """What an operator makes that adds elements: `total` does it with integers of less than
    2^31."""
    if source.exact is not None:
        return exact(np.asarray(total(source.exact)).astype(source.exact.dtype))
    field, sums = source.numbers(), source.exponents() if with_sums else None
    shape = np.asarray(total(np.zeros(source.shape, dtype=np.int8))).shape
    result = Tensor(shape, scale=source.scale)
    if field is not None:
        result.field = reduced(np.asarray(total(field)))
    if sums is not None:
        numbers = reduced(np.asarray(total(sums.numbers)), ORDER)
        blocked = (
            None if sums.blocked is None else np.asarray(total(sums.blocked.astype(np.int64))) > 0
        )
        result.sums = Exponents(numbers, blocked)
    return result


def broadcast(*tensors: Tensor) -> tuple[int, ...]:
    """The shape of tensors that are broadcast. Raises FailedError where they do not fit."""
    try:
        return np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except ValueError as error:
        raise FailedError(str(error)) from None
