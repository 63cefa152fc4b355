"""Symbolic sizes against brute force: every proof about an expression holds for small integers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from fa_compiler.passes.algebra.symbolic import Dim
from tools.fuzz.difference import Array
from tools.fuzz.kind import Finding, Kind, Outcome

LETTERS = "BST"
SIZES = 7
GRID = dict(zip(LETTERS, np.meshgrid(*[np.arange(SIZES)] * len(LETTERS), indexing="ij"), strict=True))
OPERATORS = ("+", "-", "-", "*", "*", "*", "min", "min", "max", "//", "%")


@dataclass(frozen=True)
class Term:
    """An expression as a Dim, as text, and its values for all sizes of the grid; `exists` where no divisor is 0."""

    dim: Dim
    text: str
    values: Array
    exists: Array


class Symbolic(Kind):
    """A random expression of sums, products, minima, maxima and quotients of sizes, and what is proven of it."""

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        terms = [_term(Dim.symbol(letter), letter, GRID[letter]) for letter in LETTERS]
        terms += [_term(Dim(number), str(number), GRID["B"] * 0 + number) for number in (rng.randint(-5, 5), 0)]
        for _ in range(rng.randint(2, 6)):
            terms.append(_combined(rng.choice(OPERATORS), *rng.choices(terms + terms[5:] * 2, k=2)))
        one = terms[-1]
        word = "open"
        for bound in (0, 1, rng.randint(-4, 4)):
            if one.dim.is_at_least(bound):
                word = "held"
                if (found := _refuted(one, one.values < bound, f"is_at_least({bound})")) is not None:
                    return found
        for title, wrong in (
            ("never_one", one.values == 1 if one.dim.never_one else None),
            ("lower", None if one.dim.lower is None else one.values < one.dim.lower),
            ("upper", None if one.dim.upper is None else one.values > one.dim.upper),
        ):
            if wrong is not None and (found := _refuted(one, wrong, title)) is not None:
                return found
        place = tuple(rng.randrange(SIZES) for _ in LETTERS)
        value = one.dim.evaluate({letter: int(GRID[letter][place]) for letter in LETTERS})
        if value is not None and one.exists[place] and value != one.values[place]:
            return Outcome(
                "refuted", Finding("evaluate", f"{one.text} = {one.dim!r}: {value}, not {one.values[place]}")
            )
        return Outcome(word)


def _term(dim: Dim, text: str, values: Array) -> Term:
    return Term(dim, text, values, np.ones(values.shape, np.bool_))


def _combined(operator: str, a: Term, b: Term) -> Term:
    exists = a.exists & b.exists
    with np.errstate(all="ignore"):
        match operator:
            case "+":
                dim, values = a.dim + b.dim, a.values + b.values
            case "-":
                dim, values = a.dim - b.dim, a.values - b.values
            case "*":
                dim, values = a.dim * b.dim, a.values * b.values
            case "min":
                dim, values = Dim.min(a.dim, b.dim), np.minimum(a.values, b.values)
            case "max":
                dim, values = Dim.max(a.dim, b.dim), np.maximum(a.values, b.values)
            case _ if b.dim.const == 0:
                return a
            case "//":
                dim, values = Dim.floordiv(a.dim, b.dim), a.values // b.values
                exists = exists & (b.values != 0)
            case _:
                dim, values = Dim.mod(a.dim, b.dim), a.values % b.values
                exists = exists & (b.values != 0)
    return Term(dim, f"({a.text} {operator} {b.text})", values, exists)


def _refuted(one: Term, wrong: Array, what: str) -> Outcome | None:
    wrong = wrong & one.exists
    if not wrong.any():
        return None
    place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    sizes = {letter: int(GRID[letter][place]) for letter in LETTERS}
    detail = f"{one.text} = {one.dim!r} is {one.values[place]} at {sizes}, against {what}"
    return Outcome("refuted", Finding(f"a wrong proof: {what.partition('(')[0]}", detail))
