"""Guards after the softmax: what they make of fully masked rows."""

from __future__ import annotations

import math
from enum import Enum


class RowGuard(Enum):
    """How fully masked rows are turned into zeros.

        NONE         they are not
        NAN          probabilities that are NaN are zeroed
        SCORES       rows are zeroed whose scores are all -inf
        BIAS         rows are zeroed whose bias is all -inf
        SELECTION    the mask itself selects the probabilities or zeros
        PRODUCT      the probabilities are multiplied by the mask as 0 and 1: what is NaN stays NaN

    A boolean mask makes the last three superfluous, because its empty rows are the rows that they
    zero. A bias cannot keep SELECTION and PRODUCT.
    """

    NONE = "none"
    NAN = "nan"
    SCORES = "scores"
    BIAS = "bias"
    SELECTION = "selection"
    PRODUCT = "product"

    def beside(self, value: float) -> RowGuard:
        """The guard that has the same effect beside a mask of this number. A product does nothing
        beside -inf: its rows stay NaN."""
        if self is not RowGuard.PRODUCT:
            return self
        return RowGuard.NONE if value == -math.inf else RowGuard.SELECTION

    @property
    def repeats_mask(self) -> bool:
        """Does the guard mask the probabilities like the scores? There is one selection of the
        scores then."""
        return self in (RowGuard.SELECTION, RowGuard.PRODUCT)

    @property
    def is_free_of_mask(self) -> bool:
        """Does the guard test the computed scores or probabilities, or nothing, however the mask is
        planned?"""
        return self in (RowGuard.NONE, RowGuard.NAN, RowGuard.SCORES)

    @property
    def nan_rows(self) -> str:
        """The value of cpu_nan_rows that has the guard's effect beside a bias."""
        return _NAN_ROWS.get(self, "")

    @property
    def nan_rows_beside_mask(self) -> str:
        """The value of cpu_nan_rows beside a boolean mask. Only guards that look at the scores
        still need it there."""
        return self.nan_rows if self in (RowGuard.NAN, RowGuard.SCORES) else ""


_NAN_ROWS = {RowGuard.NAN: "zero", RowGuard.SCORES: "infinite", RowGuard.BIAS: "infinite"}
