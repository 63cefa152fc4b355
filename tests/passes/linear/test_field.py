"""Arithmetic modulo the prime against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler.passes.linear.field import ORDER, PRIME, ROOT, inverse, matmul, of_number, of_numbers, power

RNG = np.random.default_rng(0)


def test_a_matrix_product_is_exact() -> None:
    left, right = RNG.integers(0, PRIME, (3, 5, 70)), RNG.integers(0, PRIME, (3, 70, 4))
    wanted = np.matmul(left.astype(object), right.astype(object)) % PRIME
    assert (matmul(left, right) == wanted).all()


@pytest.mark.parametrize(
    "one, other", [((70,), (70, 4)), ((5, 70), (70,)), ((70,), (70,)), ((8,), (8,)), ((2, 1, 5, 70), (3, 70, 9))]
)
def test_a_matrix_product_has_the_shape_of_that_of_numpy(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    left, right = RNG.integers(0, PRIME, one), RNG.integers(0, PRIME, other)
    wanted = np.matmul(left.astype(object), right.astype(object)) % PRIME
    got = matmul(left, right)
    assert got.shape == np.shape(wanted)
    assert (got == wanted).all()


@pytest.mark.parametrize("length", [8, 9, 128, 129, (1 << 15) + 3])
@pytest.mark.parametrize("number", [PRIME - 1, PRIME // 2, PRIME // 2 + 1])
@pytest.mark.parametrize("other", [PRIME - 1, PRIME // 2, PRIME // 2 + 1, 1 << 15, (1 << 30) - (1 << 15)])
def test_a_sum_of_the_largest_numbers_is_exact(length: int, number: int, other: int) -> None:
    left, right = np.full((1, length), number), np.full((length, 1), other)
    assert matmul(left, right).item() == length * number * other % PRIME


def test_powers_of_the_root_multiply_where_exponents_add() -> None:
    one, other = RNG.integers(0, ORDER, 50), RNG.integers(0, ORDER, 50)
    assert (power(one) * power(other) % PRIME == power((one + other) % ORDER)).all()
    assert power(np.array([12345])).item() == pow(ROOT, 12345, PRIME)


def test_the_root_generates_all_numbers() -> None:
    assert pow(ROOT, ORDER // 2, PRIME) != 1
    assert pow(ROOT, 2, PRIME) != 1


def test_inverses() -> None:
    numbers = RNG.integers(1, PRIME, 50)
    assert (inverse(numbers) * numbers % PRIME == 1).all()


@pytest.mark.parametrize("number", [0.75, -2.0, 0.1, 1e-30, 3.0, 2.0**31, 2.0**100])
def test_a_float_is_an_integer_times_a_power_of_two(number: float) -> None:
    top, bottom = number.as_integer_ratio()
    assert of_number(number) == top * pow(bottom, -1, PRIME) % PRIME


def test_infinity_is_no_number() -> None:
    assert of_numbers(np.array([1.0, -np.inf])) is None
