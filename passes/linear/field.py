"""Exact arithmetic on arrays of numbers modulo a prime, int64, each at least 0 and less than the
prime.

Two polynomials that differ have equal values at a random point with a probability of at most their
degree divided by the prime (Schwartz and Zippel). So a few random points decide whether two graphs
compute the same polynomial of their inputs, whatever the order of their sums.

An exponential is a homomorphism: e^(a + b) = e^a e^b. Where `PRIME` - 1 is twice a prime and `ROOT`
generates all numbers but 0, the powers of `ROOT` with exponents modulo `PRIME` - 1 have this law,
too. A number that stands in an exponent therefore has a value of its own, modulo `ORDER`, beside
the one modulo `PRIME`.
"""

from __future__ import annotations

import functools

import numpy as np

from fa_compiler.passes.ir.nodes import certain

PRIME = 2147483579
"""The largest prime below 2^31 for which (PRIME - 1) / 2 is a prime, too. A product of two numbers
fits 63 bits."""
ORDER = PRIME - 1
ROOT = 2
"""It generates all numbers but 0."""
_LOW = 1 << 16
_SMALL = 1 << 20
_FEW = 256
"""So many numbers are inverted faster one by one."""
_EIGHT = 8
"""So many products of numbers from -2^30 to 2^30 fit 64 bits."""
_WIDE = 1 << 7
"""So many products of 31 by 15 bits and a sign have a sum that float64 holds exactly."""


def reduced(array: np.ndarray, modulus: int = PRIME) -> np.ndarray:
    """An int64 array modulo a number; twice as fast as the operator %. One array is allocated: the
    products of long sequences are large, and new memory costs more than the numbers."""
    result = np.asarray(array // modulus)
    result *= modulus
    np.subtract(array, result, out=result)
    return result


def times(left: np.ndarray, right: np.ndarray | np.int64) -> np.ndarray:
    """The product of two arrays, element by element."""
    return reduced(left * right)


def matmul(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product of two arrays as NumPy's matmul. Eight products of numbers from -2^30 to
    2^30 have a sum of less than 2^63. For a longer sum the smaller array is divided into parts of
    16 bits, from -2^15 to 2^15, and float64 sums 2^7 of their products with 31 bits without an
    error."""
    if right.ndim == 1:
        return np.asarray(matmul(left, right[:, None])[..., 0])
    if left.ndim == 1:
        return np.asarray(matmul(left[None], right)[..., 0, :])
    if left.shape[-1] <= _EIGHT:
        return reduced(np.matmul(_centred(left), _centred(right)))
    if left.size < right.size:
        return matmul(right.swapaxes(-1, -2), left.swapaxes(-1, -2)).swapaxes(-1, -2)
    other = _centred(right)
    low = ((other + _LOW // 2) & (_LOW - 1)) - _LOW // 2
    high = (other - low) >> 16
    sums = (
        _part(
            left[..., start : start + _WIDE],
            *(part[..., start : start + _WIDE, :] for part in (low, high)),
        )
        for start in range(0, left.shape[-1], _WIDE)
    )
    return functools.reduce(lambda total, part: reduced(total + part), sums)


def _centred(array: np.ndarray) -> np.ndarray:
    """Numbers modulo PRIME as numbers from -2^30 to 2^30."""
    return np.where(array > PRIME // 2, array - PRIME, array)


def _part(left: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The matrix product of numbers of 31 bits, and of numbers of which the lower 16 bits and the
    others are given."""
    factor = left.astype(np.float64)
    lower, upper = (
        _product(factor, part.astype(np.float64)).astype(np.int64) for part in (low, high)
    )
    total = reduced(upper)
    total *= _LOW
    total += lower
    return reduced(total)


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product of floats. NumPy's BLAS divides each matrix of a batch among its threads,
    and where other programs run, these wait for each other: a batch of small matrices then takes a
    hundred times as long."""
    if min(left.ndim, right.ndim) < 2 or left.shape[-2] * left.shape[-1] * right.shape[-1] > _SMALL:
        return np.asarray(np.matmul(left, right))
    return np.asarray(
        np.einsum("...ij,...jk->...ik", np.ascontiguousarray(left), np.ascontiguousarray(right))
    )


def _powers(base: int, count: int) -> np.ndarray:
    """The first powers of a number."""
    table = np.ones(1, dtype=np.int64)
    while len(table) < count:
        table = np.concatenate([table, times(table, np.int64(pow(base, len(table), PRIME)))])
    return table[:count]


_LOW_POWERS = _powers(ROOT, _LOW)
_HIGH_POWERS = _powers(pow(ROOT, _LOW, PRIME), _LOW)


def power(exponents: np.ndarray) -> np.ndarray:
    """ROOT to the exponents, which are numbers modulo ORDER."""
    return times(_LOW_POWERS[exponents & (_LOW - 1)], _HIGH_POWERS[exponents >> 16])


def inverse(array: np.ndarray) -> np.ndarray:
    """1 divided by each element; 0 for 0, which a random element hardly is."""
    if array.size <= _FEW:
        numbers = [pow(number, -1, PRIME) if number else 0 for number in array.reshape(-1).tolist()]
        return np.array(numbers, dtype=np.int64).reshape(array.shape)
    result, square, exponent = np.ones_like(array), array, PRIME - 2
    while exponent:
        if exponent & 1:
            result = times(result, square)
        square, exponent = times(square, square), exponent >> 1
    return result


def of_numbers(array: np.ndarray) -> np.ndarray | None:
    """Finite floating-point numbers, integers or booleans as numbers modulo PRIME, without an
    error: each is an integer times a power of two. None where one is infinite or NaN."""
    if array.dtype.kind in "iub":
        return reduced(array.astype(np.int64))
    wide = array.astype(np.float64)
    if not np.isfinite(wide).all():
        return None
    mantissa, exponent = np.frexp(wide)
    whole = reduced((mantissa * 2.0**53).astype(np.int64))
    return times(whole, power(reduced(exponent.astype(np.int64) - 53, ORDER)))


def of_number(number: float) -> int:
    """One finite number modulo PRIME."""
    result = certain(of_numbers(np.array(number)))
    return int(result)


def hashed(arrays: list[np.ndarray], seed: int, modulus: int = PRIME) -> np.ndarray:
    """A number for each element that looks random and depends on the elements of these arrays at
    its place, and on the seed: the value of an unknown function there. The arrays are broadcast."""
    mixed = np.full(
        np.broadcast_shapes(*(array.shape for array in arrays)), seed & (2**63 - 1), dtype=np.uint64
    )
    for array in arrays:
        mixed = _mixed(mixed ^ _mixed(array.astype(np.uint64)))
    numbers: np.ndarray = (mixed >> np.uint64(1)).astype(np.int64)
    return reduced(numbers, modulus)


def _mixed(array: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 on each element."""
    array = array + np.uint64(0x9E3779B97F4A7C15)
    array = (array ^ (array >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    array = (array ^ (array >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = array ^ (array >> np.uint64(31))
    return mixed
