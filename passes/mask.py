"""What was added to the scores or selected from them, as the operator's atten_mask and real_shift.

The terms arrive in order of computation. The plan keeps the exact result, fully masked rows included:

    terms                                    plan
    ---------------------------------------  ------------------------------------------------------------------
    none                                     no mask
    one addend, proven to hold {0, v}        atten_mask where it is not 0
    selections with one fill v, in any       atten_mask where any of them deselects
      number, no addend
    addends, then selections with one v,     atten_mask and real_shift
      addends proven far above v
    anything else with dominating fills      real_shift: the sum of the addends and of Where(selected, 0, v)
    a selection with a fill that may not     declined, unless the user vouches for it (masks-dominate)
      outweigh the scores

v dominates when it is -inf, or at most -1e30 in float32 or bfloat16: then exp(v - max) is 0 beside any score below
7e22 and v + score rounds to v. In float16 only -inf does. An addend that is not proven to be a mask is a bias and stays
one, exactly as it was.

What a fully masked row gave (`empty_rows`) follows from v and the spelling:

    v = -inf                       nan, or zero behind a NaN guard
    v finite and dominating        mean: every score of the row is v, so the softmax is uniform
    v moderate, selected           mean, for the same reason
    v moderate, added              unmasked: adding one number to a whole row does not change its softmax

Addends before a selection are kept apart from it only when proven above -1e29: else a row whose unselected scores are
-inf would be decided by the fill in the original and by the -inf here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

import onnx_ir as ir

from fa_compiler.passes.axes import Arrangement
from fa_compiler.passes.bounds import Bounds
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.options import MASKS_DOMINATE, NO_EMPTY_ROWS, Options
from fa_compiler.passes.report import Code
from fa_compiler.passes.value_sets import ValueSets
from fa_compiler.passes.views import View, Viewer

DOMINATING = -1e30
MODERATE = -1e3
"""With `--assume masks-dominate`, a constant of at most this is a mask."""
HARMLESS = -1e29
FINITE_SCORES = "finite-scores"
"""Reported for Ascend: a NaN guard was left out, which only matters when query, key or value hold NaN or infinity."""


class RowGuard(Enum):
    """What turns rows without a defined softmax into zeros: nothing, the NaN guard, or the guard that tests the bias.

    The value is the attribute cpu_nan_rows for a bias. A boolean mask needs the bias guard no more: its empty rows are
    the rows the guard tests for.
    """

    NONE = ""
    NAN = "zero"
    BIAS = "infinite"

    @property
    def nan_rows(self) -> str:
        """The attribute cpu_nan_rows that keeps the guard's meaning beside a bias."""
        return self.value


@dataclass(frozen=True)
class AddTerm:
    """`factor * value` added; `dims` are the score axes each dimension of `value` runs along, () where it is 1."""

    node: ir.Node
    value: ir.Value
    factor: float
    dims: Arrangement


@dataclass(frozen=True)
class SelectTerm:
    """Scores kept where `condition == keep`, else `fill`."""

    node: ir.Node
    condition: ir.Value
    keep: bool
    fill: float
    dims: Arrangement


Term = AddTerm | SelectTerm


@dataclass(frozen=True)
class Masked:
    """Positions excluded: where `view`, as a truth value, equals `when`. A float is true when it is not 0."""

    view: View
    when: bool = True


@dataclass(frozen=True)
class Shift:
    """`factor * view` added, or, with `fill`, `fill` where the boolean view equals `when` and 0 elsewhere."""

    view: View
    factor: float = 1.0
    fill: float | None = None
    when: bool = True


@dataclass(frozen=True)
class MaskPlan:
    """What becomes of all terms together; `empty_rows`, `nan_rows` as the attributes cpu_empty_rows, cpu_nan_rows."""

    masked: tuple[Masked, ...] = ()
    shifts: tuple[Shift, ...] = ()
    empty_rows: str = ""
    nan_rows: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The report's short word."""
        words = [word for word, part in (("atten_mask", self.masked), ("real_shift", self.shifts)) if part]
        return "+".join(words) or "none"


@dataclass(frozen=True)
class MaskPlanner:
    """Turns terms into plans."""

    viewer: Viewer
    sets: ValueSets
    bounds: Bounds
    options: Options

    def plan(self, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        """The plan for the terms of one attention; `guard` is what follows the softmax."""
        plan = self._exact(terms, guard)
        return plan if self.options.target == "ort" or guard is RowGuard.NONE else self._unguarded(plan, terms)

    def _unguarded(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan without its NaN guard, which Ascend does not have, where no bias can make a row all -inf."""
        risky = next((term for term in terms if plan.shifts and self._may_be_infinite(term)), None)
        assumed = {*plan.assumed, FINITE_SCORES}
        if risky is not None:
            if NO_EMPTY_ROWS not in self.options.assume:
                raise Decline(
                    Code.EMPTY_ROWS,
                    "the NaN guard gives 0 for a row whose scores are all -inf, which the product does not",
                    risky.node,
                    f"--assume {NO_EMPTY_ROWS} if no query row is masked everywhere",
                )
            assumed.add(NO_EMPTY_ROWS)
        return replace(plan, nan_rows="", assumed=tuple(sorted(assumed)))

    def _may_be_infinite(self, term: Term) -> bool:
        if isinstance(term, SelectTerm):
            return term.fill == -math.inf
        values, interval = self.sets.of(term.value), self.bounds.of(term.value)
        if values is not None:
            return not all(map(math.isfinite, values))
        return interval is None or not all(map(math.isfinite, interval))

    def _exact(self, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        nan_rows = guard.nan_rows
        live = tuple(term for term in terms if not self._is_zero(term))
        if not live:
            return MaskPlan(nan_rows=nan_rows)
        adds = [term for term in live if isinstance(term, AddTerm)]
        selects = [term for term in live if isinstance(term, SelectTerm)]
        if len(live) == 1 and adds:
            value = self._mask_value(adds[0])
            if value is not None and not self._must_stay_additive(value, guard):
                return self._masked((self._masked_by_addend(adds[0]),), (), value, True, guard)
            return MaskPlan(shifts=(self._shift(adds[0]),), nan_rows=nan_rows)
        if not selects:
            return MaskPlan(shifts=tuple(self._shift(term) for term in adds), nan_rows=nan_rows)
        for term in selects:
            self._check_dominates(term)
        fills = {term.fill for term in selects}
        order = [isinstance(term, SelectTerm) for term in live]
        separable = len(fills) == 1 and order == sorted(order) and all(map(self._harmless, adds))
        if separable and not self._must_stay_additive(selects[0].fill, guard):
            masked = tuple(
                Masked(self._aligned(term.condition, term.dims, term.node), not term.keep) for term in selects
            )
            return self._masked(masked, tuple(map(self._shift, adds)), selects[0].fill, False, guard)
        return self._additive(live, nan_rows)

    def _additive(self, live: tuple[Term, ...], nan_rows: str) -> MaskPlan:
        """All terms as one sum."""
        assumed: set[str] = set()
        last_select = max(index for index, term in enumerate(live) if isinstance(term, SelectTerm))
        for index, term in enumerate(live):
            if isinstance(term, SelectTerm):
                if term.fill > DOMINATING:
                    raise self._too_small(term)
            elif index < last_select and not self._harmless(term):
                if NO_EMPTY_ROWS not in self.options.assume:
                    raise Decline(
                        Code.EMPTY_ROWS,
                        "a bias that could be -inf is added before a selection: fully masked rows would differ",
                        term.node,
                        f"--assume {NO_EMPTY_ROWS} if no query row is masked everywhere",
                    )
                assumed.add(NO_EMPTY_ROWS)
        shifts = tuple(self._shift(term) for term in live)
        return MaskPlan(shifts=shifts, nan_rows=nan_rows, assumed=tuple(sorted(assumed)))

    def _masked(
        self, masked: tuple[Masked, ...], shifts: tuple[Shift, ...], value: float, added: bool, guard: RowGuard
    ) -> MaskPlan:
        assumed: list[str] = []
        if value == -math.inf:
            empty = "nan" if guard is RowGuard.NONE else "zero"
        elif value <= DOMINATING or not added:
            empty = "mean"
        else:
            empty = "unmasked"
        if value != -math.inf and not self._dominates_by_type(value):
            assumed.append(MASKS_DOMINATE)
        if NO_EMPTY_ROWS in self.options.assume:
            empty = ""
            assumed.append(NO_EMPTY_ROWS)
        return MaskPlan(masked, shifts, empty, guard.nan_rows if guard is RowGuard.NAN else "", tuple(assumed))

    def _must_stay_additive(self, value: float, guard: RowGuard) -> bool:
        """On Ascend a fully masked row gives 0, so only what gave 0 may become a boolean mask."""
        if self.options.target == "ort" or NO_EMPTY_ROWS in self.options.assume:
            return False
        return not (value == -math.inf and guard is not RowGuard.NONE)

    def _is_zero(self, term: Term) -> bool:
        return isinstance(term, AddTerm) and self.sets.of(term.value) == frozenset((0.0,))

    def _mask_value(self, term: AddTerm) -> float | None:
        """The v of an addend that holds only 0 and one number v that outweighs the scores."""
        values = self.sets.of(term.value)
        if values is None:
            return None
        scaled = {x * term.factor for x in values if x != 0.0}
        if len(scaled) != 1:
            return None
        value = scaled.pop()
        return value if self._dominates(value, self.viewer.info.dtype(term.value)) else None

    def _dominates(self, value: float, dtype: ir.DataType | None) -> bool:
        if value == -math.inf:
            return True
        if MASKS_DOMINATE in self.options.assume and value <= MODERATE:
            return True
        return dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16) and self._dominates_by_type(value)

    @staticmethod
    def _dominates_by_type(value: float) -> bool:
        return value <= DOMINATING

    def _check_dominates(self, term: SelectTerm) -> None:
        if not self._dominates(term.fill, self.viewer.info.dtype(term.node.outputs[0])):
            raise self._too_small(term)

    @staticmethod
    def _too_small(term: SelectTerm) -> Decline:
        return Decline(
            Code.MASK_VALUE,
            f"masked scores become {term.fill:g}, which other scores could undercut",
            term.node,
            f"--assume {MASKS_DOMINATE} if no score of the model comes near it",
        )

    def _harmless(self, term: AddTerm) -> bool:
        interval = self.bounds.of(term.value)
        return interval is not None and min(interval[0] * term.factor, interval[1] * term.factor) > HARMLESS

    def _masked_by_addend(self, term: AddTerm) -> Masked:
        """The boolean behind a float mask where there is one, else the float mask itself."""
        view = self._aligned(term.value, term.dims, term.node)
        node = view.base.producer()
        if is_op(node, "Where"):
            assert node is not None
            condition, *branches = node.inputs
            scalars = [self.viewer.info.scalar(branch) for branch in branches if branch is not None]
            if condition is not None and None not in scalars and scalars.count(0.0) == 1:
                inner = self._aligned(condition, _trailing(view.base_dims, condition, self.viewer), node)
                return Masked(_composed(view, inner), when=scalars[0] != 0.0)
        return Masked(view)

    def _shift(self, term: Term) -> Shift:
        if isinstance(term, AddTerm):
            return Shift(self._aligned(term.value, term.dims, term.node), term.factor)
        return Shift(self._aligned(term.condition, term.dims, term.node), fill=term.fill, when=not term.keep)

    def _aligned(self, value: ir.Value, dims: Arrangement, node: ir.Node) -> View:
        """The furthest view of a term whose dimensions run along the given score axes."""
        view = self.viewer.view(value, factors=False)
        if view is None:
            raise Decline(Code.SHAPE, f"the rank of {value.name!r} is unknown", node)
        for own, wanted in zip(view.dims, dims, strict=True):
            if own and not self.viewer.space.unify(own, wanted):
                raise Decline(Code.SHAPE, f"the shape of {value.name!r} was not proven to fit the scores", node)
        return view


def _trailing(dims: Arrangement, value: ir.Value, viewer: Viewer) -> Arrangement:
    """The dimensions a broadcast operand of lower rank is aligned with; () where the operand is 1."""
    shape = viewer.info.shape(value)
    if shape is None or len(shape) > len(dims):
        raise Decline(Code.SHAPE, f"the shape of {value.name!r} is unknown", value.producer())
    aligned = dims[len(dims) - len(shape) :]
    return tuple(() if size.const == 1 else dim for dim, size in zip(aligned, shape, strict=True))


def _composed(outer: View, inner: View) -> View:
    """A view of the inner base with the outer view's dimensions."""
    return View(inner.base, inner.base_dims, outer.dims)
