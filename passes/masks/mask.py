"""Plans for the terms of the scores: addends and selections become the operator's atten_mask and real_shift.

The terms are in the order of computation. A plan keeps the exact result, also that of fully masked rows:

       terms                                      plan
    -  -----------------------------------------  -------------------------------------------------------------
    1  none                                       no mask
    2  one addend, proven to hold {0, v}          atten_mask where the addend is not 0
    3  such an addend among others, which are     atten_mask and real_shift: score + bias + v is rounded to v;
         proven to be lost in v; several with       the masks are merged, because -inf + -inf is -inf, or because
         v = -inf, or where no row is empty         only a row that is masked everywhere shows which key has which sum;
                                                    beside a moderate v the biases only have to be far above it
    4  selections with one fill v, in any number  atten_mask where any of them deselects
    5  addends, then selections with one v,       atten_mask and real_shift
         addends proven far above v, or v = -inf    an addend of {0, -inf} counts as a selection
    6  addends or none, then selections with one  atten_mask, and v as the score of masked keys (cpu_mask_value);
         finite v, where 4 and 5 do not hold        not on Ascend
    7  as 6, with a guard that zeroes what the    as 6, and masked keys have no value (cpu_masked_values)
         one selection masks
    8  selections with one fill v, or one addend  atten_mask, real_shift of the other addends, and masked keys have
         proven to hold {0, v}, then any            the score v + real_shift (cpu_mask_value, cpu_masked_bias); not
         addends; of several such masks, the        on Ascend
         one that is a band
    9  any terms with a selection among them      atten_mask where any selection deselects, real_shift as the terms
                                                    carried out in order on 0, and masked keys have real_shift alone
                                                    as their score (cpu_masked_bias); not on Ascend
    10 anything else with dominating fills        real_shift: the terms carried out in order on a bias of 0

In cases 2 to 5 v dominates: it is -inf, or at most -1e30 in float32 or bfloat16, or at most -1e3 if the user vouches
for it (masks-dominate). Then exp(v - max) is 0 beside any score of common size, and v + score rounds to v. In float16
only -inf dominates by itself. An addend that is not proven to be a mask stays a bias, exactly as it was. Terms that no
case covers are declined: a fill among them does not dominate.

In case 10 the terms may be carried out on 0 instead of on the scores, because a dominating fill is equal to the sum of
itself and a score. Where several addends make one bias, rounding.py proves that both orders of the additions round
alike, or declines. A first addend of {0, v} that is the same for all rows, by the structure of its mask, is made from
one row: v where the padding excludes the key, and 0 elsewhere. These are the numbers that the model adds, so nothing
has to dominate.

In cases 8 and 9 the CPU kernel does not read the score of a masked key. With cpu_masked_bias the score is v + bias
(case 8) or the bias alone (case 9). For a selection that is exactly what the original computes. For an addend {0, v} it
is exact if v is at most -1e30, because score + v rounds to v. Where v is moderate, each factor after the bias has to be
a power of 2, because it would round the sum once more. Where the model adds v and the bias to each other before the
scores, the bias has to be proven not to cancel v.

The result of a fully masked row (`empty_rows`) depends on v, as it is rounded after every later factor, and on the
spelling:

    v = -inf                       nan, or zero after a guard
    v finite and dominating        mean: every score of the row is v, so the softmax is uniform
    v moderate, selected           mean, for the same reason
    v moderate, added              unmasked: adding one number to a whole row does not change its softmax, as long as
                                   the number is small enough (1e5) not to round the scores away

Beside a sink a fully masked row gives 0 if the sink is proven to be above v / 10. Otherwise the mask stays a bias,
unless it is proven to leave every row a key.

In case 5 with a finite v, the addends have to be proven above v / 10. Otherwise the kept scores of a row might be as
low as v: the masked keys would then have weight in the original and none in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import (
    FINITE_SCORES,
    MASKS_DOMINATE,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
    NON_FINITE_SCORES,
    SAME_SIZES,
    UNBROKEN,
    Options,
)
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS, constant, is_op, opset
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.band import SparseMode
from fa_compiler.passes.masks.bias_checks import check_adds_up, check_outweighs
from fa_compiler.passes.masks.expressible import why_not_expressible
from fa_compiler.passes.masks.magnitudes import (
    DOMINATING,
    FLOAT32_MAX,
    HARMLESS_SHIFT,
    HUGE,
    LARGE_HALF,
    LOST_IN,
    LOST_SHARE,
    LOST_SHIFT,
    MAX_FINE,
    ROUNDS_SCORES_AWAY,
    SMALL_SHARE,
)
from fa_compiler.passes.masks.mask_terms import aligned, bias_ops, excluded, padded
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.packing import ContiguousLabels, Packing
from fa_compiler.passes.masks.rounding import assumptions_for_reordering, reordering_decline
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_like import is_score_like
from fa_compiler.passes.masks.score_ops import (
    Add,
    AlignedTensor,
    BiasOp,
    ExcludedPositions,
    Floor,
    MaskTerm,
    Scale,
    Select,
    Term,
)
from fa_compiler.passes.masks.structure import Grid, NoStructure, Structure, structure
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS
from fa_compiler.passes.ops.moves import keeps_everything

DOMINATE_HINT = f"--assume {MASKS_DOMINATE} if no score comes near the number"
COARSE = (
    "16-bit scores are rounded to the large numbers that are added to them, and that decides a row whose every key has "
    "such a number"
)
"""Why an operator that computes in 16 bits cannot be given a mask of such numbers."""
LARGEST_ADDED = 1e11
"""The size up to which an added number may be written as a selection in the bias. IncreFlashAttention takes a selection
of -1e12 for its own mask, which replaces scores."""
SLICE_SINCE = 10
"""The opset since which a Slice takes numbers that are computed."""
SCORE_GUARDS = (RowGuard.NONE, RowGuard.NAN, RowGuard.SCORES)
"""Guards that test the computed scores or probabilities, or nothing: they do not depend on how the mask is planned."""


@dataclass(frozen=True)
class MaskPlan:
    """The plan for all terms of one attention.

    `masked` are the excluded positions, and `bias` the operations that make the bias. `empty_rows` and `nan_rows` are
    the attributes cpu_empty_rows and cpu_nan_rows. `masked_score` is the score of masked keys, where they have one. If
    `adds_bias_to_masked`, the bias is added to that score. If `drops_masked_values`, masked keys count in the softmax
    but add nothing to the output. `mode` is the sparse_mode of a structural mask (band.py); `masked` then excludes
    further keys, the same ones for every row. rewrite/rewriter.py writes the mode's attributes, rewrite/mask_builder.py
    its mask. `packed` holds the labels of packed sequences: a token attends only to its own sequence, within the band.
    `fallback` is the same plan with a mask in place of the labels, for attentions that cannot be packed after all.
    `missed` is for the report: why a mask of rows and keys is neither a band nor packed sequences (missed.py).
    """

    masked: tuple[ExcludedPositions, ...] = ()
    bias: tuple[BiasOp, ...] = ()
    mode: SparseMode | None = None
    empty_rows: str = ""
    nan_rows: str = ""
    masked_score: float | None = None
    adds_bias_to_masked: bool = False
    drops_masked_values: bool = False
    assumed: tuple[str, ...] = ()
    packed: View | None = None
    fallback: MaskPlan | None = None
    missed: tuple[Missed, ...] = ()
    coarse: ir.Node | None = None
    """The node that adds numbers to 16-bit scores in which they are rounded away. Such a plan is for operators that
    compute in float32, as ONNX Runtime computes the model on the CPU."""

    @property
    def mask_label(self) -> str:
        """The name of the mask in the report."""
        words = ["packed"] if self.packed is not None else []
        words.extend([self.mode.mask_label] if self.mode is not None else [])
        words.extend(word for word, part in (("atten_mask", self.masked), ("real_shift", self.bias)) if part)
        return "+".join(words) or "none"

    def assuming(self, *words: str) -> MaskPlan:
        """The same plan under further assumptions of the user."""
        fallback = None if self.fallback is None else self.fallback.assuming(*words)
        return replace(self, assumed=tuple(sorted({*self.assumed, *words})), fallback=fallback)


@dataclass(frozen=True)
class _BooleanMask:
    """A boolean mask: further excluded positions beside a band, or all of them, and why it is no band."""

    masked: tuple[ExcludedPositions, ...]
    mode: SparseMode | None = None
    assumed: tuple[str, ...] = ()
    missed: tuple[Missed, ...] = ()


@dataclass(frozen=True)
class MaskPlanner:
    """Turns terms into plans. With `as_bias` every mask stays a bias, exactly as it was added or selected."""

    values: TermValues
    grid: Grid
    as_bias: bool = False
    packing: bool = True
    """May sequences be packed? Beside dropout they may not: the dropout mask is indexed by rows and keys."""
    gradient: bool = False
    """Is the plan for a gradient, too?"""
    unbounded: bool = False
    """Do scores of unknown size meet the terms? They may outweigh the finite number of a mask that is added to them, or
    be NaN in a row that is masked everywhere. Every mask then stays a bias."""
    _structures: dict[tuple[Term, ...], Structure | NoStructure] = field(default_factory=dict, init=False)

    @property
    def viewer(self) -> Viewer:
        """The viewer of this attention."""
        return self.values.viewer

    @property
    def options(self) -> Options:
        """What the user asked for."""
        return self.viewer.facts.options

    def plan(self, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        """The plan for the terms of one attention, with this guard after the softmax. Raises Decline."""
        if not self.as_bias and self.outweighs_masks(terms):
            return replace(self, as_bias=True).plan(terms, guard)
        terms, vouched = self._without_half_floors(terms)
        plan = self._guarded_plan(terms, guard)
        if self.options.is_standard:
            plan = self._standard(plan, terms)
        elif self.options.target != "ort" and guard is not RowGuard.NONE:
            plan = self._unguarded(plan, terms)
        return plan.assuming(*vouched)

    def outweighs_masks(self, terms: tuple[Term, ...]) -> bool:
        """Do scores of unknown size meet a finite number of a mask that is added to them?"""
        numbers = (self.values.mask_value(terms, index) for index in range(len(terms)))
        return self.unbounded and any(number is not None and math.isfinite(number) for number in numbers)

    def _without_half_floors(self, terms: tuple[Term, ...]) -> tuple[tuple[Term, ...], tuple[str, ...]]:
        """The terms without floors at the lowest number of float16, and what the user vouches for, so that they show
        nowhere. Raises Decline where the user does not."""
        floors = [term for term in terms if isinstance(term, Floor) and term.floor > DOMINATING]
        if not floors:
            return terms, ()
        rest = tuple(term for term in terms if term not in floors)
        masks = [term for term in rest if not isinstance(term, Scale)]
        needed = [MASKS_DOMINATE, *([] if len(masks) == 1 and self.never_empty(rest) else [NO_EMPTY_ROWS])]
        if not set(needed) <= set(self.options.assume):
            reason = "a floor of -65504 shows in rows that are masked everywhere, and beside scores near it"
            hint = f"{DOMINATE_HINT}, and {NO_EMPTY_ROWS_HINT}" if NO_EMPTY_ROWS in needed else DOMINATE_HINT
            raise Decline(Code.MASK_VALUE, reason, floors[0].node, hint)
        return rest, tuple(needed)

    def _standard(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan for an operator of ONNX or ONNX Runtime. Raises Decline."""
        plan = self._guarded_behind(plan)
        if self.options.target == "onnx":
            plan = self._zero_rows_allowed(plan, terms)
        rounding = next((step for step in plan.bias if self._rounds_rows(step)), None)
        if rounding is None:
            return plan
        alone = len(plan.bias) == 1 and self._adds_only(rounding, math.isfinite)
        if self.options.target == "contrib" and alone and NO_EMPTY_ROWS not in self.options.assume:
            return replace(plan, coarse=rounding.node)
        return self._without_empty_rows(plan, rounding.node, COARSE)

    def _without_empty_rows(self, plan: MaskPlan, node: ir.Node, reason: str) -> MaskPlan:
        """The plan if the user vouches for it that no row is masked everywhere. Raises Decline."""
        if NO_EMPTY_ROWS in self.options.assume:
            return plan.assuming(NO_EMPTY_ROWS)
        hint = NO_EMPTY_ROWS_HINT
        raise Decline(Code.EMPTY_ROWS, reason, node, hint)

    def _rounds_rows(self, step: BiasOp) -> bool:
        """May a step of a bias add finite numbers to 16-bit scores in which they are rounded away? The kernels of ONNX
        and ONNX Runtime add in 16 bits or in 32."""
        dtype = self.viewer.info.dtype(step.node.outputs[0])
        return dtype in SIXTEEN_BITS and not self._adds_only(step, lambda x: x == -math.inf or abs(x) <= LARGE_HALF)

    def _adds_only(self, step: BiasOp, accepted: Callable[[float], bool]) -> bool:
        """Does a step of a bias add or put in accepted numbers only, or numbers that are as large as scores? Other
        steps do neither. Of an interval its ends are asked for, and the largest finite number beside an infinite end.
        """
        if isinstance(step, Select):
            return accepted(step.fill)
        if not isinstance(step, Add):
            return True
        value, facts = step.operand.view.base, self.viewer.facts
        if numbers := facts.sets.of(value):
            return all(map(accepted, numbers))
        if (interval := facts.bounds.unless_nan(value)) is None:
            return is_score_like(value, self.viewer)
        return all(accepted(end) and accepted(max(min(end, FLOAT32_MAX), -FLOAT32_MAX)) for end in interval)

    def _zero_rows_allowed(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan for ONNX's Attention, which gives 0 for a row whose every key is excluded. Its kernels take -inf and
        the lowest number of a float mask for excluded. Raises Decline where the bias may hold such numbers, unless they
        are -inf and a guard makes such a row 0, or the user says that no row is masked everywhere."""
        guarded = bool(plan.nan_rows) and not any(isinstance(step, Floor) for step in plan.bias)
        risky = next((step for step in plan.bias if self._may_exclude(step, guarded)), None)
        if risky is None:
            return plan
        return self._without_empty_rows(
            plan,
            risky.node,
            "what is added to the scores may exclude every key of a row, which would be 0 then and not what it was",
        )

    def _may_exclude(self, step: BiasOp, guarded: bool) -> bool:
        """May a step of a bias make a number that comes near the lowest of its type? With a guard it may be -inf."""
        dtype = self.viewer.info.dtype(step.node.outputs[0])
        if dtype is None:
            return isinstance(step, Add | Select)
        limit = max(float(dtype.min), LOST_IN) * SMALL_SHARE
        return not self._adds_only(step, lambda x: limit < -abs(x) or (guarded and x == -math.inf))

    def _guarded_behind(self, plan: MaskPlan) -> MaskPlan:
        """The plan whose guard stands after the operator. A guard against NaN makes its result 0 where it is NaN.
        Raises Decline where the user says that scores may be NaN, for then values may be, too."""
        if plan.nan_rows != RowGuard.NAN.nan_rows:
            return plan
        if NON_FINITE_SCORES in self.options.assume:
            raise Decline(
                Code.ILLEGAL,
                "a guard gives 0 for a row whose softmax is NaN, and values that are NaN may make the row NaN, too",
                None,
                f"leave out --assume {NON_FINITE_SCORES} if query, key and value are finite",
            )
        return plan.assuming(FINITE_SCORES)

    def _unguarded(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan without its guard, which Ascend does not have. Raises Decline where a bias may make all scores of a
        row -inf, unless the user rules out such rows, and where the user says that scores may be NaN."""
        if NON_FINITE_SCORES in self.options.assume:
            raise Decline(
                Code.ILLEGAL,
                "a guard gives 0 for a row whose softmax is NaN, which the product does not",
                None,
                f"leave out --assume {NON_FINITE_SCORES} if query, key and value are finite",
            )
        masks = [index for index, term in enumerate(terms) if not self.values.cannot_exclude(terms, index)]
        infinite = [index for index in masks if len(masks) > 1 or self.values.may_be_infinite(terms, index)]
        risky = terms[infinite[-1]] if plan.bias and infinite else None
        assumed = {*plan.assumed, FINITE_SCORES}
        if risky is not None:
            if NO_EMPTY_ROWS not in self.options.assume:
                raise Decline(
                    Code.EMPTY_ROWS,
                    "a guard gives 0 for a row whose scores are all -inf, which the product does not",
                    risky.node,
                    NO_EMPTY_ROWS_HINT,
                )
            assumed.add(NO_EMPTY_ROWS)
        return replace(plan, nan_rows="", assumed=tuple(sorted(assumed)))

    def _guarded_plan(self, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        """The plan that keeps the guard, by the first case that applies. Raises Decline."""
        # One number of up to HARMLESS_SHIFT on all scores is left out. It is kept if another addend may round the
        # scores so coarsely that the shift shows.
        live, with_small_shifts = (self._live(terms, most) for most in (HARMLESS_SHIFT, LOST_SHIFT))
        if with_small_shifts != live and reordering_decline(with_small_shifts, self.values, ()) is not None:
            live = with_small_shifts
        adds = [index for index, term in enumerate(live) if isinstance(term, Add)]
        selects = [index for index, term in enumerate(live) if isinstance(term, Select)]
        if not adds and not selects:  # 1
            _check_unmasked(terms, guard)
            return MaskPlan(nan_rows=guard.nan_rows)
        taken_apart = live
        if all(self.values.outweighs(live, index) for index in selects):  # 2 to 5
            # These two guards zero what one selection masks, so no addend may become a second selection.
            one_selection = guard in (RowGuard.SELECTION, RowGuard.PRODUCT)
            selected = live if one_selection else self._infinite_masks_selected(live)
            if selected != live and (plan := self._with_boolean_mask(selected, guard, was_added=True)) is not None:
                return plan
            if (plan := self._with_boolean_mask(live, guard)) is not None:
                return plan
            taken_apart = live if one_selection else self.apart(live)
            plan = self._with_boolean_mask(taken_apart, guard, was_added=True) if taken_apart != live else None
            if plan is not None:
                return plan
        # 6 to 9
        plan = self._with_masked_score(live, adds, selects, guard) or self._with_masked_bias(live, adds, selects, guard)
        added = [index for index, term in enumerate(taken_apart) if isinstance(term, Add)]
        keep_fills = taken_apart != live and not selects and all(self.values.keeps_fill(taken_apart, x) for x in added)
        if plan is None and keep_fills:
            plan = self._with_masked_bias(taken_apart, added, [], guard)
        if plan is not None:
            return plan
        for index in selects:  # 10
            check_outweighs(live, index, self.values)
        for index in selects:
            check_adds_up(live, index, self.values)
        _check_unmasked(live, guard)
        assumed = self._rounding_assumptions(live)
        return MaskPlan(bias=self._bias_by_keys(live), nan_rows=guard.nan_rows, assumed=assumed)

    def _live(self, terms: tuple[Term, ...], most: float) -> tuple[Term, ...]:
        """The terms that change a softmax. One number up to `most` that is added to all scores does not."""
        return tuple(term for index, term in enumerate(terms) if not self.values.changes_no_softmax(terms, index, most))

    def _bias(self, terms: tuple[Term, ...]) -> tuple[BiasOp, ...]:
        return bias_ops(terms, self.viewer, stepwise=self.options.target == "ort")

    def _bias_by_keys(self, terms: tuple[Term, ...]) -> tuple[BiasOp, ...]:
        """The bias of these terms. A first addend that holds one number at the keys that padding excludes, in all rows,
        and 0 elsewhere, is made by putting this number at these keys: the same numbers, of one row."""
        steps, first = self._bias(terms), terms[0]
        number = self.viewer.facts.sets.only_besides_zero(first.operand.value) if isinstance(first, Add) else None
        if not isinstance(first, Add) or number is None or abs(number) > LARGEST_ADDED or self.gradient:
            return steps
        found = self.structure((first,))
        if not isinstance(found, Structure) or found.mode is not None or found.packing is not None or not found.padding:
            return steps
        if any(each.given.cut is not None for each in found.padding):
            return steps
        excluded_keys = [padded(each, self.viewer, first.node) for each in found.padding]
        return (*(each.filled(first.node, number * first.sign) for each in excluded_keys), *steps[1:])

    def _rounding_assumptions(self, terms: tuple[Term, ...]) -> tuple[str, ...]:
        """The assumptions under which a bias of these terms rounds like the terms one by one. Raises Decline."""
        return assumptions_for_reordering(terms, self.values, self.options.assume)

    def _with_boolean_mask(
        self, live: tuple[Term, ...], guard: RowGuard, *, was_added: bool = False
    ) -> MaskPlan | None:
        """Cases 2 to 5: the plan with a boolean mask, and a bias beside it where there is one. None when the terms make
        no such mask. `was_added` is that of `_selections`."""
        adds = [index for index, term in enumerate(live) if isinstance(term, Add)]
        selects = [index for index, term in enumerate(live) if isinstance(term, Select)]
        if selects:
            return self._selections(live, adds, selects, guard, was_added)
        plan = self._addend_alone(live, adds, guard) or self._mask_among_biases(live, adds, guard)
        if plan is None and MASKS_DOMINATE in self.options.assume:
            plan = self._without(MASKS_DOMINATE)._mask_among_biases(live, adds, guard)
        return plan

    def _without(self, word: str) -> MaskPlanner:
        """The planner, if the user did not vouch for this word."""
        facts = self.viewer.facts
        options = replace(facts.options, assume=facts.options.assume - {word})
        viewer = Viewer(replace(facts, options=options), self.viewer.space)
        return replace(self, values=replace(self.values, viewer=viewer))

    def _addend_alone(self, live: tuple[Term, ...], adds: list[int], guard: RowGuard) -> MaskPlan | None:
        """Case 2: the plan for one addend of {0, v}; None for other terms."""
        value = self.values.mask_value(live, adds[0]) if len(adds) == 1 else None
        if value is None or not self._may_be_boolean(live, value, guard):
            return None
        return self._masked(live, (), value, guard)

    def _selections(
        self, live: tuple[Term, ...], adds: list[int], selects: list[int], guard: RowGuard, was_added: bool
    ) -> MaskPlan | None:
        """Cases 4 and 5: the plan for selections of one number that outweighs the scores, after all biases; None for
        other terms.

        With `was_added` the number was added to the scores and the biases. The biases then have to be lost in it, both
        before and after later factors. A bias of +inf is not lost in -inf. A bias that the number stood in place of
        was not added to it: it only has to stay above it.
        """
        if max(adds, default=-1) >= selects[0] or not all(self.values.outweighs(live, index) for index in selects):
            return None
        fills = {value for index in selects for value in self.values.numbers_before_softmax(live, index) or ()}
        least = max(*fills, *(term.fill for term in live if isinstance(term, Select))) if was_added else min(fills)
        share = LOST_SHARE if was_added else SMALL_SHARE
        replaced = [index for index in adds if was_added and _is_replaced(live, index)]
        joined = [index for index in adds if index not in replaced]
        harmless = len(fills) == 1 and all(self.values.is_small_beside(live, index, least, share) for index in joined)
        harmless = harmless and all(self.values.stays_above(live, index, least) for index in replaced)
        endless = was_added and any(self.values.may_be_plus_infinity(live, index) for index in joined)
        if not harmless or endless or not self._may_be_boolean(live, min(fills), guard):
            return None
        others = _not_selected(live)
        assumed = self._rounding_assumptions(others)
        return self._masked(live, self._bias(others), min(fills), guard).assuming(*assumed)

    def _with_masked_score(
        self, live: tuple[Term, ...], adds: list[int], selects: list[int], guard: RowGuard
    ) -> MaskPlan | None:
        """Cases 6 and 7: the plan for selections of one number, whatever it is, after all biases; None for other
        terms. The number replaces the masked scores, so it is exactly the score of masked keys. Only the CPU kernel can
        give them one."""
        values = [self.values.numbers_before_softmax(live, index) for index in selects]
        fills = {value for each in values for value in each or (math.nan,)}
        selects_come_last = bool(selects) and max(adds, default=-1) < selects[0]
        if self.as_bias or self.options.target != "ort" or not selects_come_last or len(fills) != 1:
            return None
        fill = fills.pop()
        guard = guard.beside(fill)
        if not math.isfinite(fill) or guard is RowGuard.BIAS:
            return None
        assumed = self._rounding_assumptions(_not_selected(live))
        mask = self._boolean_mask(live)
        value = fill if mask.masked or mask.mode is not None else None
        plan = MaskPlan(
            mask.masked,
            self._bias(_not_selected(live)),
            mask.mode,
            nan_rows=_nan_rows(guard),
            masked_score=value,
            drops_masked_values=guard is RowGuard.SELECTION and value is not None,
            missed=mask.missed,
        )
        return plan.assuming(*assumed, *mask.assumed)

    def _with_masked_bias(
        self, live: tuple[Term, ...], adds: list[int], selects: list[int], guard: RowGuard
    ) -> MaskPlan | None:
        """Cases 8 and 9: the plan in which biases are added to the scores of masked keys; None for other terms.

        The gradient operator computes no gradient of a masked score, as after a selection. An addend has none of its
        own that could be 0, so it is no mask then.
        """
        if self.as_bias or self.options.target != "ort" or guard not in SCORE_GUARDS or (self.gradient and not selects):
            return None
        masks = selects or [index for index in adds if self._is_mask(live, index)]
        bands = [] if selects or len(masks) == 1 else [index for index in masks if self._is_band(live[index])]
        masks = bands[:1] or masks
        unknown = any(
            not value < math.inf
            for index in masks
            for value in self.values.numbers_before_softmax(live, index) or (math.nan,)
        )
        if unknown or self.values.sink_lower_bound == -math.inf or len(live) == 1 or _scales_moderate_fills(live):
            return None
        number = self._single_number(live, adds, selects, masks)
        others = tuple(term for index, term in enumerate(live) if index not in masks)
        if number is None and not selects:
            return None
        if number is not None and not others:
            return None
        assumed = self._rounding_assumptions(others)
        alone = number is not None and (len(others) == 1 or self._adds_alike(live))
        if bands and not alone:
            return None
        mask = self._boolean_mask(live if selects else tuple(live[index] for index in masks))
        bias = self._bias(others if alone else live)
        if not mask.masked and mask.mode is None:
            return MaskPlan(bias=bias, nan_rows=guard.nan_rows, assumed=(*assumed, *mask.assumed))
        return MaskPlan(
            mask.masked,
            bias,
            mask.mode,
            nan_rows=guard.nan_rows,
            masked_score=number if alone else 0.0,
            adds_bias_to_masked=True,
            assumed=(*assumed, *mask.assumed),
            missed=mask.missed,
        )

    def _single_number(
        self, live: tuple[Term, ...], adds: list[int], selects: list[int], masks: list[int]
    ) -> float | None:
        """The one number that all masked keys have, when only biases are added to it; else None."""
        values = {
            value for index in masks for value in self.values.numbers_before_softmax(live[: index + 1], index) or ()
        }
        values -= set() if selects else {0.0}  # an addend holds 0 where it masks nothing
        addends_come_last = max(selects) < min(adds, default=len(live)) if selects else len(masks) == 1
        single = addends_come_last and len(values) == 1 and len(adds) + len(selects) == len(live)
        return values.pop() if single else None

    def _is_band(self, term: Term) -> bool:
        """Is the mask of this term a band, whatever the other terms are?"""
        found = self.structure((term,))
        return isinstance(found, Structure) and found.mode is not None

    def _adds_alike(self, live: tuple[Term, ...]) -> bool:
        """Is it the same whether the terms are added to the number of masked keys one by one, or their sum is added?"""
        coarse = any(isinstance(term, Select) and abs(term.fill) < HUGE for term in live)
        return not coarse and reordering_decline(live, self.values, ()) is None

    def _infinite_masks_selected(self, terms: tuple[Term, ...]) -> tuple[Term, ...]:
        """The terms, in which each addend of {0, -inf} selects -inf, where all selections do so and no bias comes after
        the first such addend. Without selections the terms stay as they are."""
        fills = {term.fill for term in terms if isinstance(term, Select)}
        masks = [index for index, term in enumerate(terms) if isinstance(term, Add) and self._is_infinite(terms, index)]
        if fills != {-math.inf} or not masks:
            return terms
        result = tuple(
            Select(term.node, term.operand, False, -math.inf) if index in masks and isinstance(term, Add) else term
            for index, term in enumerate(terms)
        )
        return terms if any(isinstance(term, Add) for term in result[masks[0] :]) else result

    def _is_infinite(self, terms: tuple[Term, ...], index: int) -> bool:
        """Does this addend hold 0 and -inf only, and is -inf what it makes of a score before the softmax?"""
        numbers = self.values.numbers_before_softmax(terms[: index + 1], index)
        return self.values.mask_value(terms, index) == -math.inf and numbers is not None and numbers <= {0.0, -math.inf}

    def apart(self, terms: tuple[Term, ...]) -> tuple[Term, ...]:
        """The terms, in which each addend that is both a bias and a mask becomes two terms, also behind operators that
        only move it, such as those that repeat it for several heads. Where the mask is v, the sum of the two rounds to
        v.

            addend                       terms
            bias + mask of {0, v}        the bias, the mask
            mask + mask                  the two masks
            Where(c, bias, v)            the bias, a selection with v
        """
        result: list[Term] = []
        for term in terms:
            parts = self._parts(term) if isinstance(term, Add) and term.sign > 0 else None
            result.extend(parts or (term,))
        return tuple(result)

    def _parts(self, term: Add[AlignedTensor]) -> tuple[Term, ...] | None:
        node, dims = self._joined(term)
        if node is None or not is_op(node, "Add", "Where") or None in node.inputs:
            return None
        operands = [operand for operand in node.inputs if operand is not None]
        placed = [
            AlignedTensor(each, self.viewer.alignment(each, dims, node), term.operand.never_enlarges)
            for each in operands
        ]
        adds = [Add(term.node, each) for each in placed]
        if node.op_type == "Add":
            masks = [add for add in adds if self.values.mask_value((add,), 0) is not None]
            return tuple(adds) if masks else None
        for bias, number, keep in ((1, 2, True), (2, 1, False)):
            fill = self.viewer.info.scalar(operands[number])
            if fill is not None and fill <= DOMINATING and self._is_float32(operands[bias]):
                return adds[bias], Select(term.node, placed[0], keep, fill)
        return None

    def _joined(self, term: Add[AlignedTensor]) -> tuple[ir.Node | None, Arrangement]:
        """The node upstream of operators that only move an addend, and the score axes of its result."""
        value, dims = term.operand.value, term.operand.dims
        while (node := value.producer()) is not None and node.inputs and (source := node.inputs[0]) is not None:
            if keeps_everything(node, self.viewer.info):  # as optimum cuts a mask to the keys
                value = source
            elif is_op(node, *LAYOUT_OPS, *REPEATS):
                placed = AlignedTensor(value, dims, term.operand.never_enlarges)
                view = aligned(placed, self.viewer, term.node)
                if view.base is value:
                    break
                value, dims = view.base, view.base_dims
            else:
                break
        return node, dims

    def _is_float32(self, operand: ir.Value) -> bool:
        return self.viewer.info.dtype(operand) == ir.DataType.FLOAT

    def _mask_among_biases(self, live: tuple[Term, ...], adds: list[int], guard: RowGuard) -> MaskPlan | None:
        """Case 3: the plan for one addend of {0, v}, or several of {0, -inf}, beside biases that are proven to be far
        above v; several of any v where no row is empty. None for other terms."""
        values = {index: self.values.mask_value(live, index) for index in adds}
        found = {index: value for index, value in values.items() if value is not None}
        infinite = all(
            (self.values.numbers_before_softmax(live[: index + 1], index) or {math.nan}) <= {0.0, -math.inf}
            for index in found
        )
        value = max(found.values(), default=0.0)
        filled = NO_EMPTY_ROWS in self.options.assume or self.never_empty(live)
        if not found or not (len(found) == 1 or filled or (infinite and value == -math.inf)):
            return None
        fill = max(value, -FLOAT32_MAX)
        # A row that is masked everywhere shows whether biases are lost in a finite number. A moderate one loses none.
        share = SMALL_SHARE if infinite or filled or value > DOMINATING else LOST_SHARE
        harmless = all(self.values.is_small_beside(live, other, fill, share) for other in adds if other not in found)
        added = all(isinstance(live[index], Add) for index in found)
        if not harmless or not self._may_be_boolean(live, value, guard) or not added:
            return None
        others = tuple(term for index, term in enumerate(live) if index not in found)
        assumed = self._rounding_assumptions(others)
        return self._masked(live, self._bias(others), value, guard).assuming(*assumed)

    def _masked(self, live: tuple[Term, ...], bias: tuple[BiasOp, ...], value: float, guard: RowGuard) -> MaskPlan:
        """The plan with the boolean mask of these terms and a bias. `value` is what the mask makes of a score."""
        guard = guard.beside(value)
        assumed: list[str] = []
        mask = self._boolean_mask(live)
        masked, mode = mask.masked, mask.mode
        assumed.extend(mask.assumed)
        assumed.extend((MASKS_DOMINATE,) if value > DOMINATING else ())
        found = self.structure(live)
        if isinstance(found, Structure) and found.packing is not None:
            # Every token attends to itself, so no row is empty.
            plan = MaskPlan(masked, bias, nan_rows=_nan_rows(guard), assumed=tuple(assumed))
            return self._packed(plan, found, found.packing, live[-1].node)
        if mode is not None and self.options.target == "ascend":
            # On Ascend the compressed mask takes the place of the mask, so further excluded keys get a bias.
            bias = (*bias, *(each.filled(live[-1].node, -FLOAT32_MAX) for each in masked))
            masked = ()
        never_empty = self.never_empty(live)
        if guard is RowGuard.SELECTION:
            empty = "zero"
        elif self.values.sink_lower_bound is not None:
            empty = ""
        elif value == -math.inf:
            empty = "nan" if guard is RowGuard.NONE else "zero"
        elif value <= DOMINATING or _selected(live):
            empty = "mean"
        else:
            empty = "unmasked"
        if never_empty:
            empty = ""
        elif NO_EMPTY_ROWS in self.options.assume:
            empty = ""
            assumed.append(NO_EMPTY_ROWS)
        plan = MaskPlan(masked, bias, mode, empty, _nan_rows(guard), assumed=tuple(assumed), missed=mask.missed)
        if mode is not None and (self.options.is_standard or (mode.prefix and self.options.target == "ascend")):
            # The device's host needs the prefix before the run, so it cannot be as long as an open batch. An operator
            # of ONNX or ONNX Runtime may lack the band for another reason than the mask.
            dense = tuple(excluded(each, self.viewer) for each in self._masks(live))
            return replace(plan, fallback=replace(plan, masked=dense, mode=None))
        return plan

    def _packed(self, fallback: MaskPlan, found: Structure, packing: Packing, node: ir.Node) -> MaskPlan:
        """The plan with packed sequences, if the operator allows them and equal labels are neighbours, by proof or
        because the user vouches for it. Otherwise the dense plan."""
        reason = ""
        if self.options.is_standard:
            reason = "the target's operators take no packed sequences"
        elif self.options.target != "ort":
            reason = "the product needs the ends of packed sequences before the run"
        elif fallback.bias:
            reason = "packed sequences cannot stand beside a bias"
        elif not self.packing:
            reason = "packed sequences cannot stand beside dropout"
        elif self.options.divided:
            reason = "a model that is divided along the sequence has no ends of packed sequences"
        if reason:
            return replace(fallback, missed=(Missed(MissedCode.NOT_PACKED, reason, packing.labels.name),))
        vouched = UNBROKEN in self.options.assume
        if not packing.in_runs and not vouched:
            return replace(fallback, missed=(packing.missed,))
        assumed = fallback.assumed if packing.in_runs else (*fallback.assumed, UNBROKEN)
        view = aligned(AlignedTensor(packing.labels, packing.dims, packing.never_enlarges), self.viewer, node)
        return replace(fallback, masked=(), mode=found.mode, assumed=assumed, packed=view, fallback=fallback)

    def _boolean_mask(self, terms: tuple[Term, ...]) -> _BooleanMask:
        """The boolean mask that these terms make: as a band and padding where it has that structure, else as it is.

        On Ascend padding beside a band becomes a bias, which cannot express the result of a row without a key. The
        structure is then used only if the user rules out such rows. Some products take only masks that hold every
        excluded key.
        """
        found, node = self.structure(terms), terms[-1].node
        if isinstance(found, NoStructure):
            missed = found.missed(node)
        elif (reason := self._why_dense(found)) is not None:
            missed = Missed(MissedCode.DENSE_MASK, reason, label(node))
        else:
            masked = tuple(padded(each, self.viewer, node) for each in found.padding)
            return _BooleanMask(masked, found.mode, found.assumed)
        masked = tuple(excluded(each, self.viewer) for each in self._masks(terms))
        return _BooleanMask(masked, assumed=() if isinstance(found, NoStructure) else found.assumed, missed=(missed,))

    def _why_dense(self, found: Structure) -> str | None:
        """Why the target needs this structure as a mask that holds every excluded key; None if it does not."""
        if found.packing is not None:
            return "packed sequences are not told apart where masked keys keep a score"
        if self.options.needs_dense_mask:
            return f"{self.options.soc_version} takes only masks that hold every excluded key"
        joined = found.mode is not None and found.padding and self.options.target != "ort"
        if joined and NO_EMPTY_ROWS not in self.options.assume:
            return "a band with padding as a bias does not keep what a row without a key gives"
        mode = found.mode
        return None if mode is None else why_not_expressible(mode, *self.grid.sizes, self.options, may_grow=True)

    def structure(self, terms: tuple[Term, ...]) -> Structure | NoStructure:
        """The structure of the boolean mask that these terms make, or why it has none."""
        if terms not in self._structures:
            masks, contiguity = self._masks(terms), ContiguousLabels(self.viewer.facts)
            vouched = SAME_SIZES in self.options.assume
            biases = [term for term in terms if isinstance(term, Add) and term not in masks]
            cuts = self.options.target == "ort" and all(opset(term.node) >= SLICE_SINCE for term in masks)
            self._structures[terms] = structure(masks, self.grid, self.viewer, contiguity, vouched, biases, cuts)
        return self._structures[terms]

    def _masks(self, terms: tuple[Term, ...]) -> list[MaskTerm]:
        """The terms that make the boolean mask: the selections where there are some, else the addends that are
        masks."""
        selects = [term for term in terms if isinstance(term, Select)]
        if selects:
            return [*selects]
        adds = [(index, term) for index, term in enumerate(terms) if isinstance(term, Add)]
        return [term for index, term in adds if len(adds) == 1 or self.values.mask_value(terms, index) is not None]

    def never_empty(self, terms: tuple[Term, ...]) -> bool:
        """Is the mask proven to leave every row a key, by its structure or as a single constant?"""
        masks = self._masks(terms)
        found = self.structure(terms)
        if isinstance(found, Structure) and found.never_empty:
            return True
        if len(masks) != 1:
            return False
        term = masks[0]
        dims = term.operand.dims
        if not dims:
            return False
        if self.viewer.space.resolve(dims[-1]) != self.viewer.space.resolve(self.grid.kv_seq):
            return False
        array, large = constant(term.operand.value), self.viewer.info.large.of(term.operand.value)
        if large is not None:
            return not (large.zeros_only if isinstance(term, Select) and term.keep else large.no_zeros)
        if array is None:
            return False
        excluded = (array != 0) != (False if isinstance(term, Add) else term.keep)
        return not bool(excluded.all(axis=-1).any())

    def _is_mask(self, terms: tuple[Term, ...], index: int) -> bool:
        """Is this addend a mask that outweighs the scores without any assumption of the user?"""
        value = self.values.mask_value(terms, index)
        return value is not None and value <= DOMINATING

    def _may_be_boolean(self, live: tuple[Term, ...], value: float, guard: RowGuard) -> bool:
        """Can the target keep the result of a fully masked row if the mask is boolean?"""
        guard = guard.beside(value)
        if self.as_bias:
            return False
        if NO_EMPTY_ROWS in self.options.assume or self.never_empty(live) or guard is RowGuard.SELECTION:
            return True
        if self.values.sink_lower_bound is not None:
            # A fully masked row then attends to the sink alone, unless the sink is as low as the mask.
            return self.values.sink_lower_bound > value / 10
        if self.options.target == "ascend":
            # On Ascend a fully masked row gives 0.
            return value == -math.inf and guard is not RowGuard.NONE
        if self.options.is_standard:
            return self._is_standard_row(live, value, guard)
        return value <= DOMINATING or _selected(live) or value >= ROUNDS_SCORES_AWAY

    def _is_standard_row(self, live: tuple[Term, ...], value: float, guard: RowGuard) -> bool:
        """Can an operator of ONNX or ONNX Runtime keep what a fully masked row gives?

        ONNX's Attention gives 0 for it. The operators of ONNX Runtime give NaN where -inf masks, which a node after
        them can make 0. Both give the mean where a number is added in which every score is lost, which needs the range
        of float32.
        """
        if value == -math.inf:
            return guard is not RowGuard.NONE or self.options.target == "contrib"
        node = live[-1].node
        if self.viewer.info.dtype(node.outputs[0]) == ir.DataType.FLOAT16:
            raise Decline(
                Code.EMPTY_ROWS,
                "a row that is masked everywhere gives a mean here, which no float16 mask of the operator can express",
                node,
                NO_EMPTY_ROWS_HINT,
            )
        return value <= DOMINATING or _selected(live)


def _check_unmasked(terms: tuple[Term, ...], guard: RowGuard) -> None:
    """Raise Decline for a guard that masks the probabilities like the scores, since the scores have no mask here."""
    if guard in (RowGuard.SELECTION, RowGuard.PRODUCT):
        reason = "the probabilities are masked like the scores, but the mask on the scores is no boolean one"
        raise Decline(Code.PROBABILITY_TERM, reason, terms[-1].node)


def _nan_rows(guard: RowGuard) -> str:
    """The attribute cpu_nan_rows beside a boolean mask. Only guards that look at the scores still need it there."""
    return guard.nan_rows if guard in (RowGuard.NAN, RowGuard.SCORES) else ""


def _not_selected(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The terms that are not selections."""
    return tuple(term for term in terms if not isinstance(term, Select))


def _is_replaced(terms: tuple[Term, ...], index: int) -> bool:
    """Do an addend and the selection after it come from one addend, Where(c, bias, v)?"""
    later = terms[index + 1] if index + 1 < len(terms) else None
    return isinstance(later, Select) and later.node is terms[index].node


def _selected(terms: tuple[Term, ...]) -> bool:
    """Is the number of the mask put in place of the scores, and not added to them?"""
    return any(isinstance(term, Select) for term in terms)


def _scales_moderate_fills(terms: tuple[Term, ...]) -> bool:
    """Does a factor round the sum of an addend and a selection's fill in which the addend is neither lost nor fine?"""
    moderate = [
        place for place, term in enumerate(terms) if isinstance(term, Select) and MAX_FINE < abs(term.fill) < HUGE
    ]
    added = [place for place, term in enumerate(terms) if isinstance(term, Add) and moderate and place > moderate[0]]
    return any(isinstance(term, Scale) and term.rounds for term in terms[min(added, default=len(terms)) :])
