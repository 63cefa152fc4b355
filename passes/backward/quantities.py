"""What a value computed from the probabilities is: a polynomial in the few quantities a softmax's gradient is made of.

    P    the probabilities, as the product with the values reads them
    G    their gradient, dO V^T
    D    the row sums of P * G
    L    the row sums of the exponentials (decomposed softmax): exp(s - max) is P * L
    F    what dropout multiplies by: 0, or 1 / keep; then D are the row sums of P * F * G

Every exporter writes the gradient of the scores in its own way: P*G - P*D, P*(G - D), G/L - D/L times the
exponentials. As polynomials they are all equal, whatever the order of sums, products and factors. That is algebra over
the real numbers; only rounding differs.

The algebra holds in every row that attends a key, for P is 0 wherever a mask excludes. What a value is in a row that is
masked everywhere depends on the spelling, which `Rows` keeps track of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

Monomial = tuple[int, int, int, int, int]
"""The powers of P, G, D, L and F."""
_Powers = TypeVar("_Powers", bound=tuple[int, ...])

MAX_POWER = 4
"""Higher powers do not occur in a gradient."""
TOLERANCE = 2.0**-20
"""Two factors this close are one number, rounded twice."""
FACTORS = 2.0**60
"""What is so many times an operator's result, or a part of it as small, may be infinite or 0 where that is not."""


class MaskedRows(Enum):
    """What a value is in rows that are masked everywhere.

    SAME    the polynomial of what the forward part computed in that row
    ZERO    zeros, because a selection put them there
    OTHER   finite where SAME is, but neither
    RAW     made from probabilities that a guard replaced afterwards, so possibly NaN where the forward part has 0
    """

    SAME = "same"
    ZERO = "zero"
    OTHER = "other"
    RAW = "raw"

    def times(self, other: MaskedRows) -> MaskedRows:
        """Of a product."""
        pair = {self, other}
        if MaskedRows.RAW in pair:
            return MaskedRows.RAW
        if MaskedRows.ZERO in pair:
            return MaskedRows.ZERO
        return MaskedRows.SAME if pair == {MaskedRows.SAME} else MaskedRows.OTHER

    def plus(self, other: MaskedRows) -> MaskedRows:
        """Of a sum."""
        if MaskedRows.RAW in (self, other):
            return MaskedRows.RAW
        return self if self is other else MaskedRows.OTHER


@dataclass(frozen=True)
class Quantity:
    """A sum of monomials with their coefficients, and what it is in fully masked rows.

    `raw` says whether probabilities before their guard have a part in it, in whatever rows; `zeroed` which of the
    forward part's selections have put zeros into it, and `spoilt` whether it was computed from something with such
    zeros: where P is not 0 at masked keys it is not the polynomial then.
    """

    terms: Mapping[Monomial, float]
    rows: MaskedRows = MaskedRows.SAME
    raw: bool = False
    zeroed: frozenset[int] = frozenset()
    spoilt: bool = False

    def times(self, other: Quantity) -> Quantity | None:
        """The product; None when a power grows beyond what a gradient holds."""
        result: dict[Monomial, float] = {}
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                p, g, d, length, f = (x + y for x, y in zip(left, right, strict=True))
                monomial = (p, g, d, length, f)
                if max(map(abs, monomial)) > MAX_POWER or f > 1:
                    return None
                result[monomial] = result.get(monomial, 0.0) + a * b
        return _checked(result, self.rows.times(other.rows), self, other)

    def plus(self, other: Quantity, sign: float = 1.0) -> Quantity | None:
        """The sum or difference; terms that cancel up to rounding are gone."""
        return _checked(sum_of(self.terms, other.terms, sign), self.rows.plus(other.rows), self, other)

    def scaled(self, factor: float) -> Quantity | None:
        """Every term times a number."""
        found = _checked({monomial: each * factor for monomial, each in self.terms.items()}, self.rows, self)
        return None if found is None else replace(self, terms=found.terms)

    def to_power(self, power: int) -> Quantity | None:
        """An integer power of row sums of exponentials, the only quantity that is divided by."""
        if len(self.terms) != 1:
            return None
        ((monomial, factor),) = self.terms.items()
        if monomial != (0, 0, 0, monomial[3], 0) or abs(power) * max(abs(monomial[3]), 1) > MAX_POWER:
            return None
        return _checked({(0, 0, 0, monomial[3] * power, 0): factor**power}, self.rows, self)

    def row_sum(self, dropout: bool) -> Quantity | None:
        """The sum over the keys: of P * G, with F if there is dropout, it is D, and L may be taken out of it."""
        result: dict[Monomial, float] = {}
        for (p, g, d, length, f), factor in self.terms.items():
            if (p, g, f) != (1, 1, int(dropout)):
                return None
            result[(0, 0, d + 1, length, 0)] = factor
        return _checked(result, self.rows, self)

    def selected(self, selection: int, selections: int) -> Quantity:
        """With zeros where one of the forward part's selections masks: a row all of them mask together is zeros."""
        zeroed = self.zeroed | {selection}
        partly = MaskedRows.RAW if self.rows is MaskedRows.RAW else MaskedRows.OTHER
        return replace(self, rows=MaskedRows.ZERO if len(zeroed) == selections else partly, zeroed=zeroed)

    def guarded(self) -> Quantity:
        """With zeros where the guard puts them, in rows in which P is 0 for the same reason."""
        scaled_by_p = all(monomial[0] > 0 for monomial in self.terms)
        same = scaled_by_p and self.rows in (MaskedRows.SAME, MaskedRows.RAW)
        return replace(self, rows=MaskedRows.SAME if same else MaskedRows.OTHER)

    def probabilities(self, dropout: bool) -> float | None:
        """c of c * P, or c * P * F if there is dropout, None for anything else."""
        return self.terms.get((1, 0, 0, 0, int(dropout))) if len(self.terms) == 1 else None

    def score_gradient(self, dropout: bool) -> float | None:
        """c of c * (P*G - P*D), with F beside G if there is dropout, None for anything else."""
        product: Monomial = (1, 1, 0, 0, int(dropout))
        if set(self.terms) != {product, PD}:
            return None
        factor = self.terms[product]
        return factor if math.isclose(factor, -self.terms[PD], rel_tol=TOLERANCE) else None


P: Monomial = (1, 0, 0, 0, 0)
G: Monomial = (0, 1, 0, 0, 0)
D: Monomial = (0, 0, 1, 0, 0)
L: Monomial = (0, 0, 0, 1, 0)
E: Monomial = (1, 0, 0, 1, 0)
F: Monomial = (0, 0, 0, 0, 1)
PD: Monomial = (1, 0, 1, 0, 0)


def sum_of(one: Mapping[_Powers, float], other: Mapping[_Powers, float], sign: float) -> dict[_Powers, float]:
    """The sum or difference of two polynomials; terms that cancel up to rounding are gone."""
    result = dict(one)
    for monomial, factor in other.items():
        mine = result.get(monomial, 0.0)
        total = mine + sign * factor
        if abs(total) <= TOLERANCE * abs(mine):
            result.pop(monomial)
        else:
            result[monomial] = total
    return result


def _checked(terms: dict[Monomial, float], rows: MaskedRows, *sources: Quantity) -> Quantity | None:
    if not terms or not all(math.isfinite(factor) and factor != 0.0 for factor in terms.values()):
        return None
    raw = any(source.raw for source in sources)
    return Quantity(terms, rows, raw, spoilt=any(source.spoilt or source.zeroed for source in sources))
