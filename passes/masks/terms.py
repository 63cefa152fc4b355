"""What happens to the scores between their product and the softmax, in order, as records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import onnx_ir as ir

from fa_compiler.passes.layout.axes import Arrangement
from fa_compiler.passes.layout.views import View


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


@dataclass(frozen=True)
class AddTerm:
    """`sign * value` added; `dims` are the score axes each dimension of `value` runs along, () where it is 1.

    `fits`: the sum is proven to have the size of the scores in every run. A term that may enlarge them, by another
    batch say, has to reach the operator with all of its dimensions, for that refuses such a run.
    """

    node: ir.Node
    value: ir.Value
    sign: float
    dims: Arrangement
    fits: bool = True


@dataclass(frozen=True)
class SelectTerm:
    """Scores kept where `condition == keep`, else `fill`; `dims` and `fits` as of an AddTerm."""

    node: ir.Node
    condition: ir.Value
    keep: bool
    fill: float
    dims: Arrangement
    fits: bool = True


@dataclass(frozen=True)
class ScaleTerm:
    """Everything so far, earlier terms included, times `factor`."""

    node: ir.Node
    factor: float


@dataclass(frozen=True)
class FloorTerm:
    """Everything so far, but at least `floor`, a number that dominates."""

    node: ir.Node
    floor: float


Term = AddTerm | SelectTerm | ScaleTerm | FloorTerm


@dataclass(frozen=True)
class Masked:
    """Positions excluded: where `view`, as a truth value, equals `when`. A float is true when it is not 0."""

    view: View
    when: bool = True


@dataclass(frozen=True)
class Add:
    """`sign * view` added to the bias. If `unrounded`, computed 16-bit numbers go on as they were computed, and if
    `moved`, also behind the one operator that moves them."""

    view: View
    sign: float
    unrounded: bool = False
    moved: bool = False


@dataclass(frozen=True)
class Put:
    """`fill` in the bias where the boolean `view` equals `when`."""

    view: View
    when: bool
    fill: float


@dataclass(frozen=True)
class Multiply:
    """The bias so far times `factor`."""

    factor: float


@dataclass(frozen=True)
class Raise:
    """The bias so far, but at least `floor`."""

    floor: float


Shift = Add | Put | Multiply | Raise
"""One step in the computation of a bias that starts as 0."""
