"""What a guard behind the softmax makes of rows that are masked everywhere."""

from __future__ import annotations

import math
from enum import Enum


class RowGuard(Enum):
    """What turns rows into zeros: nothing, the NaN guard, the guard that tests the scores or the bias, that with the
    mask itself, or a product with the mask's 0 and 1, which leaves NaN what is NaN.

    A boolean mask needs the last three no more: its empty rows are the rows they zero. A bias cannot keep the last two.
    """

    NONE = "none"
    NAN = "nan"
    SCORES = "scores"
    BIAS = "bias"
    SELECTION = "selection"
    PRODUCT = "product"

    def beside(self, value: float) -> RowGuard:
        """What the guard means for a mask of this number: rows of -inf stay NaN in a product."""
        if self is not RowGuard.PRODUCT:
            return self
        return RowGuard.NONE if value == -math.inf else RowGuard.SELECTION

    @property
    def nan_rows(self) -> str:
        """The attribute cpu_nan_rows that keeps the guard's meaning beside a bias."""
        return _NAN_ROWS.get(self, "")


_NAN_ROWS = {RowGuard.NAN: "zero", RowGuard.SCORES: "infinite", RowGuard.BIAS: "infinite"}
