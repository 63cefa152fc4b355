"""Dims against brute force: expressions at random, every proof and every simplification at all small sizes.

An expression is a tree that is computed twice: with `Dim`, and with plain integers. Where a division by 0 or a
broadcast of sizes that do not fit would end the run, nothing is claimed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fa_compiler.passes.algebra.symbolic import Dim, cap_of, simplify_given
from tests.examples import examples

Tree = int | str | tuple[str, "Tree", "Tree"]

NAMES = ("s", "t", "k")
SIZES = range(6)
BINDINGS = [dict(zip(NAMES, sizes, strict=True)) for sizes in itertools.product(SIZES, repeat=len(NAMES))]


class EndedRun(Exception):
    """The original fails at these sizes."""


def nonzero(y: int) -> int:
    if y == 0:
        raise EndedRun
    return y


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(nonzero(y)) * (1 if (x < 0) == (y < 0) else -1)


def broadcast(x: int, y: int) -> int:
    """Of a size 0 beside a size 1 `Dim.broadcast` says nothing, so such a run does not count either."""
    if min(x, y) < 0 or (x != y and (1 not in (x, y) or 0 in (x, y))):
        raise EndedRun
    return max(x, y)


OPERATIONS: dict[str, tuple[Callable[[Dim, Dim], Dim], Callable[[int, int], int]]] = {
    "+": (lambda a, b: a + b, lambda x, y: x + y),
    "-": (lambda a, b: a - b, lambda x, y: x - y),
    "*": (lambda a, b: a * b, lambda x, y: x * y),
    "min": (Dim.min, min),
    "max": (Dim.max, max),
    "floor": (Dim.floordiv, lambda x, y: x // nonzero(y)),
    "ceil": (Dim.ceildiv, lambda x, y: -(-x // nonzero(y))),
    "trunc": (Dim.truncdiv, truncated),
    "mod": (Dim.mod, lambda x, y: x % nonzero(y)),
    "fmod": (Dim.fmod, lambda x, y: x - y * truncated(x, y)),
    "broadcast": (Dim.broadcast, broadcast),
}


def dim(tree: Tree) -> Dim:
    if isinstance(tree, tuple):
        return OPERATIONS[tree[0]][0](dim(tree[1]), dim(tree[2]))
    return Dim.symbol(tree) if isinstance(tree, str) else Dim(tree)


def number(tree: Tree, sizes: dict[str, int]) -> int:
    if isinstance(tree, tuple):
        return OPERATIONS[tree[0]][1](number(tree[1], sizes), number(tree[2], sizes))
    return sizes[tree] if isinstance(tree, str) else tree


def values(tree: Tree) -> Iterator[tuple[dict[str, int], int]]:
    for sizes in BINDINGS:
        try:
            yield sizes, number(tree, sizes)
        except EndedRun:
            continue


def any_tree(rng: random.Random, depth: int) -> Tree:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(NAMES) if rng.random() < 0.7 else rng.randint(-3, 5)
    return rng.choice(list(OPERATIONS)), any_tree(rng, depth - 1), any_tree(rng, depth - 1)


def sum_of_products(rng: random.Random) -> Tree:
    """Sums of products of sizes, minima and quotients, in which an atom stands in several monomials."""

    def linear() -> Tree:
        parts: list[Tree] = [("*", rng.randint(-2, 2), name) for name in rng.sample(NAMES, 2)]
        return "+", ("+", parts[0], parts[1]), rng.randint(-4, 4)

    pool: list[Tree] = [*NAMES, ("min", linear(), 0), ("min", linear(), 0)]
    pool += [("min", rng.choice(NAMES), rng.randint(1, 2)), ("floor", rng.choice(NAMES), rng.randint(2, 3))]
    pool.append(("min", ("+", rng.choice(pool), rng.choice(pool)), 0))
    total: Tree = rng.randint(-3, 3)
    for _ in range(rng.randint(1, 4)):
        monomial: Tree = rng.choice((-2, -1, 1, 1, 2))
        for _ in range(rng.randint(1, 3)):
            monomial = "*", monomial, rng.choice(pool)
        total = "+", total, monomial
    match rng.randrange(9):
        case 0 | 1:
            return "min", total, 0
        case 2:
            return "max", total, rng.choice(pool)
        case 3:
            return "broadcast", ("max", total, 0), ("max", rng.choice(pool), rng.randint(0, 1))
        case 5:
            by, remainder = rng.randint(2, 4), rng.choice(("mod", "fmod"))
            padded: Tree = ("+", total, ("mod", ("-", by, (remainder, total, by * rng.randint(1, 2))), by))
            parts: Tree = ("+", ("floor", padded, by), rng.choice((0, 0, 1)))
            return rng.choice(("floor", "trunc", "mod", "fmod")), padded, parts
        case 4:
            return rng.choice(("floor", "trunc", "mod", "fmod")), total, ("*", rng.choice(pool), rng.choice(pool))
    return total


def drawn(seed: int) -> list[Tree]:
    rng = random.Random(seed)
    return [sum_of_products(rng) if rng.random() < 0.6 else any_tree(rng, 3) for _ in range(examples(150))]


@pytest.mark.parametrize("seed", range(3))
def test_every_claim_of_an_expression_holds_at_all_small_sizes(seed: int) -> None:
    proofs = 0
    for tree in drawn(seed):
        made = dim(tree)
        bounds = [bound for bound in range(-6, 7) if made.is_at_least(bound)]
        low, high = [*bounds, made.lower], made.upper
        proofs += bool(bounds) or made.never_one or high is not None
        for sizes, real in values(tree):
            assert made.evaluate(sizes) == real, (tree, sizes)
            assert all(bound is None or real >= bound for bound in low), (tree, sizes, low)
            assert high is None or real <= high, (tree, sizes, high)
            assert real != 1 or not made.never_one, (tree, sizes)
        if runs := [*values(tree)]:
            assert_at_once(made, runs)
    assert proofs > 10


def assert_at_once(made: Dim, runs: list[tuple[dict[str, int], int]]) -> None:
    """All runs in one go give what each gives."""
    sizes = {name: np.array([each[name] for each, _ in runs]) for name in NAMES}
    found = made.evaluate_all(sizes)
    assert found is not None
    np.testing.assert_array_equal(np.broadcast_to(found, len(runs)), [real for _, real in runs])


def test_every_claim_of_two_expressions_holds_at_all_small_sizes() -> None:
    trees = drawn(10)[: examples(80)]
    exact = 0
    for one, other in itertools.pairwise(trees):
        for left, right in ((one, other), (("*", one, other), other), (("min", one, capacity(one)), one)):
            a, b = dim(left), dim(right)
            quotient, cap, kept = a.exact_div(b), cap_of(a, b), simplify_given(a, (b,))
            exact += quotient is not None
            for sizes in BINDINGS:
                try:
                    x, y = number(left, sizes), number(right, sizes)
                except EndedRun:
                    continue
                assert a != b or x == y
                assert quotient is None or y == 0 or quotient.evaluate(sizes) == x // y
                assert cap is None or x == min(y, cap)
                assert y < 0 or kept.evaluate(sizes) == x, (left, right, sizes)
    assert exact > 10


def capacity(tree: Tree) -> int:
    return 2 + len(str(tree)) % 3


def test_a_minimum_that_stands_in_other_monomials_proves_no_sign() -> None:
    s, t = Dim.symbol("s"), Dim.symbol("t")
    u = Dim.min(t - 4, 0)
    assert not (u * s - u).is_at_least(0)
    assert not (u * u - u - 5).is_at_least(-5)
    # -u and -u*s, each by itself or both, are never negative.
    assert (-u).is_at_least(0) and (-u - u * s).is_at_least(0)
    assert Dim.min(u * s - u, 0) != 0 and Dim.max(u - u * s, 0) != 0


def test_division_by_zero_says_nothing_and_large_numbers_stay_exact() -> None:
    assert not Dim.floordiv(0, 0).is_known and Dim.floordiv(Dim.symbol("s"), 0).const is None
    assert Dim.truncdiv(0, 0).const is None and Dim.mod(0, 0).const is None
    assert Dim.fmod(-(2**63) + 1, 10**9 + 7) == -((2**63 - 1) % (10**9 + 7))
