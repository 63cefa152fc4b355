"""What a value computed from the probabilities is: a polynomial in the few quantities a softmax's
gradient is made of.

    P    the probabilities, as the product with the values reads them
    G    their gradient, dO V^T
    D    the row sums of P * G
    L    the row sums of the exponentials (decomposed softmax): exp(s - max) is P * L
    F    what dropout multiplies by: 0, or 1 / keep; then D are the row sums of P * F * G
    T    the tanh of a soft cap, whose derivative is 1 - T^2; 1 is a quantity, too, of no power of
         any other

The algebra (polynomials.py) holds in every row that attends a key, for P is 0 wherever a mask
excludes. What a value is in a row that is masked everywhere depends on the spelling, which
`MaskedRows` keeps track of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.backward.polynomials import Monomial, Polynomial

LARGEST_FACTOR = 2.0**60
"""A value more than this many times as large or as small as an operator's result is not replaced by
it: one of the two may be infinite or 0 where the other is not."""

P: Monomial = (1, 0, 0, 0, 0, 0)
G: Monomial = (0, 1, 0, 0, 0, 0)
D: Monomial = (0, 0, 1, 0, 0, 0)
L: Monomial = (0, 0, 0, 1, 0, 0)
E: Monomial = (1, 0, 0, 1, 0, 0)
"""The exponentials: P * L."""
F: Monomial = (0, 0, 0, 0, 1, 0)
T: Monomial = (0, 0, 0, 0, 0, 1)
ONE: Monomial = (0, 0, 0, 0, 0, 0)
PD: Monomial = (1, 0, 1, 0, 0, 0)
SLOPE = Polynomial({ONE: 1.0, (0, 0, 0, 0, 0, 2): -1.0})
"""The derivative of a soft cap, 1 - T^2."""


class MaskedRows(Enum):
    """What a value is in rows that are masked everywhere.

    SAME    the polynomial of what the forward part computed in that row
    ZERO    zeros, because a selection put them there
    SCALED  such zeros times what the forward part computed in that row: NaN where that is NaN, else
            zeros
    MIXED   SCALED at some keys, ZERO at the others
    OTHER   finite where SAME is, but neither
    RAW     made from probabilities that a guard replaced afterwards, so possibly NaN where the
            forward part has 0
    """

    SAME = "same"
    ZERO = "zero"
    SCALED = "scaled"
    MIXED = "mixed"
    OTHER = "other"
    RAW = "raw"

    def times(self, other: MaskedRows) -> MaskedRows:
        """Of a product; the factors beside zeros are finite."""
        pair = {self, other}
        for state in (MaskedRows.RAW, MaskedRows.SCALED, MaskedRows.MIXED, MaskedRows.ZERO):
            if state in pair:
                return state
        return MaskedRows.SAME if pair == {MaskedRows.SAME} else MaskedRows.OTHER

    def plus(self, other: MaskedRows) -> MaskedRows:
        """Of a sum."""
        if MaskedRows.RAW in (self, other):
            return MaskedRows.RAW
        if self is not other and {self, other} <= ZEROS:
            return MaskedRows.SCALED if MaskedRows.SCALED in (self, other) else MaskedRows.MIXED
        return self if self is other else MaskedRows.OTHER


ZEROS = {MaskedRows.ZERO, MaskedRows.SCALED, MaskedRows.MIXED}
"""What is zeros in a row that is masked everywhere, unless the forward part has NaN there."""


@dataclass(frozen=True)
class Quantity:
    """A polynomial in P, G, D, L, F and T, and what it is in rows that are masked everywhere.

    `raw` says whether probabilities before their guard have a part in it, in whatever rows;
    `zeroed` which of the forward part's selections have put zeros into it, and it is the polynomial
    at all other keys. `multiplied` are those of them whose zeros are products of 0 with what may be
    NaN. `spoilt` says whether it was computed from something with such zeros in another way: where
    P is not 0 at masked keys it is not the polynomial then.
    """

    polynomial: Polynomial
    rows: MaskedRows = MaskedRows.SAME
    raw: bool = False
    zeroed: frozenset[int] = frozenset()
    spoilt: bool = False
    multiplied: frozenset[int] = frozenset()

    @staticmethod
    def of(
        monomial: Monomial,
        factor: float = 1.0,
        rows: MaskedRows = MaskedRows.SAME,
        raw: bool = False,
    ) -> Quantity:
        """A number times one monomial."""
        return Quantity(Polynomial({monomial: factor}), rows, raw)

    def times(self, other: Quantity) -> Quantity | None:
        """The product; None when a power grows beyond what a gradient holds."""
        product = self.polynomial.times(other.polynomial)
        if product is None or any(dropped > 1 for *_, dropped, _ in product.terms):
            return None
        rows = self.rows.times(other.rows)
        if rows in ZEROS and not all(
            factor.rows in (MaskedRows.ZERO, rows) or factor.is_finite for factor in (self, other)
        ):
            rows = MaskedRows.SCALED
        # Zeros stay zeros beside a factor that is finite everywhere. Where all masked keys have
        # zeros, `rows` tells what other factors make of them.
        kept = [
            one
            for one, factor in ((self, other), (other, self))
            if one.is_masked or factor.is_finite
        ]
        zeroed = frozenset[int]().union(*(factor.zeroed for factor in kept))
        multiplied = frozenset[int]().union(*(factor.multiplied for factor in kept))
        if rows is MaskedRows.SCALED:
            multiplied = zeroed
        return _quantity_of(product, rows, self, other, zeroed=zeroed, multiplied=multiplied)

    @property
    def is_finite(self) -> bool:
        """Is it finite in a row that is masked everywhere, even where P is NaN there? G, F and T
        are."""
        return all(p == d == length == 0 for p, _, d, length, _, _ in self.polynomial.terms)

    @property
    def is_masked(self) -> bool:
        """Are there zeros wherever the forward part masks, or NaN in a row that is masked
        everywhere?"""
        return self.rows in ZEROS

    def plus(self, other: Quantity, sign: float = 1.0) -> Quantity | None:
        """The sum or difference; terms that cancel up to rounding are gone."""
        zeroed, multiplied = self.zeroed, self.multiplied | other.multiplied
        if zeroed != other.zeroed:
            zeroed = multiplied = frozenset()
        total, rows = self.polynomial.plus(other.polynomial, sign), self.rows.plus(other.rows)
        return _quantity_of(total, rows, self, other, zeroed=zeroed, multiplied=multiplied)

    def scaled(self, factor: float) -> Quantity | None:
        """Every term times a number."""
        polynomial = self.polynomial.scaled(factor)
        return None if polynomial is None else replace(self, polynomial=polynomial)

    def to_power(self, power: int) -> Quantity | None:
        """An integer power of row sums of exponentials, the only quantity that is divided by."""
        return _quantity_of(
            self.polynomial.to_power(power, divisors=(L.index(1),)), self.rows, self
        )

    def row_sum(self, dropout: bool) -> Quantity | None:
        """The sum over the keys: of P * G, with F if there is dropout, it is D, and L may be taken
        out of it."""
        result: dict[Monomial, float] = {}
        for (p, g, d, length, f, t), factor in self.polynomial.terms.items():
            if (p, g, f, t) != (1, 1, int(dropout), 0):
                return None
            result[(0, 0, d + 1, length, 0, 0)] = factor
        rows = MaskedRows.OTHER if self.rows is MaskedRows.MIXED else self.rows
        return _quantity_of(Polynomial.of(result), rows, self)

    def selected(self, selection: int, selections: int, multiplied: bool = False) -> Quantity:
        """With zeros where one of the forward part's selections masks: a row all of them mask
        together is zeros.

        If they are `multiplied` by 0 there, what is NaN stays NaN.
        """
        zeroed, products = self.zeroed | {selection}, self.multiplied
        if not multiplied:
            products -= {selection}
        elif (
            selection not in self.zeroed and not self.is_finite and self.rows is not MaskedRows.ZERO
        ):
            products |= {selection}
        rows = MaskedRows.OTHER if len(zeroed) < selections else MaskedRows.ZERO
        if rows is MaskedRows.ZERO and products:
            rows = MaskedRows.SCALED if products == zeroed else MaskedRows.MIXED
        if rows is not MaskedRows.ZERO and self.rows is MaskedRows.RAW:
            rows = MaskedRows.RAW
        return replace(self, rows=rows, zeroed=zeroed, multiplied=products)

    def guarded(self) -> Quantity:
        """With zeros where the guard puts them, in rows in which P is 0 for the same reason."""
        scaled_by_p = all(monomial[0] > 0 for monomial in self.polynomial.terms)
        same = scaled_by_p and self.rows in (MaskedRows.SAME, MaskedRows.RAW)
        return replace(self, rows=MaskedRows.SAME if same else MaskedRows.OTHER)

    def probabilities(self, dropout: bool) -> float | None:
        """c of c * P, or c * P * F if there is dropout, None for anything else."""
        return self.polynomial.coefficient((1, 0, 0, 0, int(dropout), 0))

    def score_gradient(self, dropout: bool) -> float | None:
        """c of c * (P*G - P*D), with F beside G if there is dropout, None for anything else."""
        return self.polynomial.difference((1, 1, 0, 0, int(dropout), 0), PD)

    def product_gradient(self, dropout: bool, capped: bool) -> float | None:
        """As score_gradient; if the scores are `capped`, c of c * (P*G - P*D) * (1 - T^2)."""
        if not capped:
            return self.score_gradient(dropout)
        inner = Polynomial({(1, 1, 0, 0, int(dropout), 0): 1.0, PD: -1.0}).times(SLOPE)
        return if_known(self.polynomial.multiple_of, inner)


def _quantity_of(
    polynomial: Polynomial | None,
    rows: MaskedRows,
    *sources: Quantity,
    zeroed: frozenset[int] = frozenset(),
    multiplied: frozenset[int] = frozenset(),
) -> Quantity | None:
    """The polynomial that was computed from these; of their zeros it has those of the selections
    `zeroed`."""
    raw = any(source.raw for source in sources)
    spoilt = any(source.spoilt or source.zeroed - zeroed for source in sources)
    return (
        None if polynomial is None else Quantity(polynomial, rows, raw, zeroed, spoilt, multiplied)
    )
