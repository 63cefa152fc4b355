"""Plans for the terms of the scores: addends and selections become the operator's atten_mask and
real_shift.

    scores = query @ key.T + position_bias                  # an addend: real_shift
    scores = scores + torch.where(padding, -inf, 0)         # an addend of {0, v}: atten_mask
    scores = torch.where(causal, scores, -1e30)             # a selection with the fill v: atten_mask
    out = torch.softmax(scores, -1) @ value

The terms are in the order of computation. A plan keeps the exact result, also that of fully masked
rows:

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

In cases 2 to 5 v dominates: it is -inf, or at most -1e30 in float32 or bfloat16, or at most -1e3 if
the user vouches for it (masks-dominate). Then exp(v - max) is 0 beside any score of common size,
and v + score rounds to v. In float16 only -inf dominates by itself. An addend that is not proven to
be a mask stays a bias, exactly as it was. Terms that no case covers are declined: a fill among them
does not dominate.

In case 10 the terms may be carried out on 0 instead of on the scores, because a dominating fill is
equal to the sum of itself and a score. Where several addends make one bias, rounding.py proves that
both orders of the additions round alike, or declines. A first addend of {0, v} that is the same for
all rows, by the structure of its mask, is made from one row: v where the padding excludes the key,
and 0 elsewhere. These are the numbers that the model adds, so nothing has to dominate.

In cases 8 and 9 the CPU kernel does not read the score of a masked key. With cpu_masked_bias the
score is v + bias (case 8) or the bias alone (case 9). For a selection that is exactly what the
original computes. For an addend {0, v} it is exact if v is at most -1e30, because score + v rounds
to v. Where v is moderate, each factor after the bias has to be a power of 2, because it would round
the sum once more. Where the model adds v and the bias to each other before the scores, the bias has
to be proven not to cancel v.

The result of a fully masked row (`empty_rows`) depends on v, as it is rounded after every later
factor, and on the spelling:

    v = -inf                       nan, or zero after a guard
    v finite and dominating        mean: every score of the row is v, so the softmax is uniform
    v moderate, selected           mean, for the same reason
    v moderate, added              unmasked: adding one number to a whole row does not change its
                                   softmax, as long as the number is small enough (1e5) not to round
                                   the scores away

Beside a sink a fully masked row gives 0 if the sink is proven to be above v / 10. Otherwise the
mask stays a bias, unless it is proven to leave every row a key.

In case 5 with a finite v, the addends have to be proven above v / 10. Otherwise the kept scores of
a row might be as low as v: the masked keys would then have weight in the original and none in the
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import (
    FINITE_SCORES,
    FINITE_SCORES_HINT,
    MASKS_DOMINATE,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
    NON_FINITE_SCORES,
    SAME_SIZES,
    UNBROKEN,
    Options,
)
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    constant,
    instances,
    nodes_of_type,
    opset,
    without_none,
)
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.band import SparseMode
from fa_compiler.passes.masks.bias_checks import check_adds_up, check_outweighs
from fa_compiler.passes.masks.expressible import why_not_expressible
from fa_compiler.passes.masks.joined_masks import with_masks_separated
from fa_compiler.passes.masks.live_terms import LiveTerms, ScoredMasks
from fa_compiler.passes.masks.magnitudes import (
    DOMINATING,
    FLOAT32_MAX,
    HARMLESS_SHIFT,
    LARGE_HALF,
    LOST_IN,
    LOST_SHARE,
    LOST_SHIFT,
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

DOMINATE_HINT = f"--assume {MASKS_DOMINATE} if no score comes near the number"
COARSE = (
    "16-bit scores are rounded to the large numbers that are added to them, and that decides a row whose every key has "
    "such a number"
)
"""Why an operator that computes in 16 bits cannot be given a mask of such numbers."""
LARGEST_ADDED = 1e11
"""The size up to which an added number may be written as a selection in the bias.
IncreFlashAttention takes a selection of -1e12 for its own mask, which replaces scores."""
SLICE_SINCE = 10
"""The opset since which a Slice takes numbers that are computed."""


@dataclass(frozen=True)
class MaskPlan:
    """The plan for all terms of one attention.

    `masked` are the excluded positions, and `bias` the operations that make the bias. `empty_rows`
    and `nan_rows` are the attributes cpu_empty_rows and cpu_nan_rows. `masked_score` is the score
    of masked keys, where they have one. If `adds_bias_to_masked`, the bias is added to that score.
    If `drops_masked_values`, masked keys count in the softmax but add nothing to the output. `mode`
    is the sparse_mode of a structural mask (band.py); `masked` then excludes further keys, the same
    ones for every row. rewrite/rewriter.py writes the mode's attributes, rewrite/mask_builder.py
    its mask. `packed` holds the labels of packed sequences: a token attends only to its own
    sequence, within the band. `fallback` is the same plan with a mask in place of the labels, for
    attentions that cannot be packed after all. `missed` is for the report: why a mask of rows and
    keys is neither a band nor packed sequences (missed.py).
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
    """The node that adds numbers to 16-bit scores in which they are rounded away. Such a plan is
    for operators that compute in float32, as ONNX Runtime computes the model on the CPU."""

    @property
    def mask_label(self) -> str:
        """The name of the mask in the report."""
        band = "" if self.mode is None else self.mode.mask_label
        parts = (
            ("packed", self.packed),
            (band, band),
            ("atten_mask", self.masked),
            ("real_shift", self.bias),
        )
        return "+".join(word for word, part in parts if part) or "none"

    @property
    def without_guard(self) -> MaskPlan:
        """The same plan without its guard."""
        return replace(
            self, nan_rows="", fallback=if_known(lambda plan: plan.without_guard, self.fallback)
        )

    def assuming(self, *words: str) -> MaskPlan:
        """The same plan under further assumptions of the user."""
        fallback = if_known(lambda plan: plan.assuming(*words), self.fallback)
        return replace(self, assumed=tuple(sorted({*self.assumed, *words})), fallback=fallback)


@dataclass(frozen=True)
class _BooleanMask:
    """A boolean mask: further excluded positions beside a band, or all of them, and why it is no
    band."""

    masked: tuple[ExcludedPositions, ...]
    mode: SparseMode | None = None
    assumed: tuple[str, ...] = ()
    missed: tuple[Missed, ...] = ()

    @property
    def excludes(self) -> bool:
        """Does the mask exclude any keys?"""
        return bool(self.masked) or self.mode is not None


@dataclass(frozen=True)
class MaskPlanner:
    """Turns terms into plans. With `as_bias` every mask stays a bias, exactly as it was added or
    selected."""

    values: TermValues
    grid: Grid
    as_bias: bool = False
    packing: bool = True
    """May sequences be packed? Beside dropout they may not: the dropout mask is indexed by rows and
    keys."""
    gradient: bool = False
    """Is the plan for a gradient, too?"""
    unbounded: bool = False
    """Do scores of unknown size meet the terms? They may outweigh the finite number of a mask that
    is added to them, or be NaN in a row that is masked everywhere. Every mask then stays a bias."""
    narrow: bool = False
    """Is the result of 16 bits?"""
    _structures: dict[tuple[Term, ...], Structure | NoStructure] = field(
        default_factory=dict, init=False
    )

    @property
    def viewer(self) -> Viewer:
        """The viewer of this attention."""
        return self.values.viewer

    @property
    def options(self) -> Options:
        """What the user asked for."""
        return self.viewer.facts.options

    def plan(self, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        """The plan for the terms of one attention, with this guard after the softmax. Raises
        Decline."""
        if not self.as_bias and self.outweighs_masks(terms):
            return replace(self, as_bias=True).plan(terms, guard)
        terms, vouched = self._without_half_floors(terms)
        plan = self._for_target(self._guarded_plan(terms, guard), terms, guard)
        return plan.assuming(*vouched, *self._vouched_beside_clip(terms))

    def _vouched_beside_clip(self, terms: tuple[Term, ...]) -> tuple[str, ...]:
        """What the user vouches for beside a floor that is a Clip. Such a Clip has no upper limit,
        and ONNX then takes the largest finite number for it: a score of infinity becomes finite,
        and the operator gives NaN for its row. Raises Decline where the user does not."""
        clip = next(nodes_of_type((floor.node for floor in instances(terms, Floor)), "Clip"), None)
        if clip is None:
            return ()
        if not self.options.takes_scores_as_finite:
            reason = (
                "the floor is a Clip, which makes a finite number of a score of infinity; the operator "
                "gives NaN there"
            )
            raise Decline(
                Code.SCORE_TERM, reason, clip, f"{FINITE_SCORES_HINT}, or write the floor as Max"
            )
        return (FINITE_SCORES,)

    def _for_target(self, plan: MaskPlan, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        """The plan, if the target's operators keep what it gives for rows without a key. Raises
        Decline."""
        if self.options.is_standard:
            return self._standard(plan, terms)
        if self.options.target == "ascend" and guard is not RowGuard.NONE:
            return self._unguarded(plan, terms)
        return plan

    def outweighs_masks(self, terms: tuple[Term, ...]) -> bool:
        """Do scores of unknown size meet a finite number of a mask that is added to them?"""
        numbers = (self.values.mask_value(terms, index) for index in range(len(terms)))
        return self.unbounded and any(map(math.isfinite, without_none(numbers)))

    def _without_half_floors(
        self, terms: tuple[Term, ...]
    ) -> tuple[tuple[Term, ...], tuple[str, ...]]:
        """The terms without floors at the lowest number of float16, and what the user vouches for,
        so that they show nowhere. Raises Decline where the user does not."""
        floors = [floor for floor in instances(terms, Floor) if floor.floor > DOMINATING]
        if not floors:
            return terms, ()
        rest = tuple(term for term in terms if term not in floors)
        masks = [term for term in rest if not isinstance(term, Scale)]
        needed: tuple[str, ...] = (MASKS_DOMINATE, NO_EMPTY_ROWS)
        hint = f"{DOMINATE_HINT}, and {NO_EMPTY_ROWS_HINT}"
        if len(masks) == 1 and self.never_empty(rest):
            needed, hint = (MASKS_DOMINATE,), DOMINATE_HINT
        if not self.options.assume.issuperset(needed):
            reason = "a floor of -65504 shows in rows that are masked everywhere, and beside scores near it"
            raise Decline(Code.MASK_VALUE, reason, floors[0].node, hint)
        return rest, needed

    def _standard(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan for an operator of ONNX or ONNX Runtime. Raises Decline."""
        plan = self._guarded_behind(plan)
        if self.options.target == "onnx":
            plan = self._zero_rows_allowed(plan, terms)
        rounding = next(filter(self._rounds_rows, plan.bias), None)
        if rounding is None:
            return plan
        alone = len(plan.bias) == 1 and self._adds_only(rounding, math.isfinite)
        if self.options.target == "contrib" and alone and NO_EMPTY_ROWS not in self.options.assume:
            return replace(plan, coarse=rounding.node)
        return self._without_empty_rows(plan, rounding.node, COARSE)

    def _without_empty_rows(self, plan: MaskPlan, node: ir.Node, reason: str) -> MaskPlan:
        """The plan if the user vouches for it that no row is masked everywhere. Raises Decline."""
        if NO_EMPTY_ROWS not in self.options.assume:
            hint = NO_EMPTY_ROWS_HINT
            raise Decline(Code.EMPTY_ROWS, reason, node, hint)
        return plan.assuming(NO_EMPTY_ROWS)

    def _check_finite(self, reason: str) -> None:
        """Raise Decline where the user says that scores may be NaN."""
        if NON_FINITE_SCORES in self.options.assume:
            hint = f"leave out --assume {NON_FINITE_SCORES} if query, key and value are finite"
            raise Decline(Code.ILLEGAL, reason, None, hint)

    def _rounds_rows(self, step: BiasOp) -> bool:
        """May a step of a bias add finite numbers to 16-bit scores in which they are rounded away?
        The kernels of ONNX and ONNX Runtime add in 16 bits or in 32. They do so where query, key
        and value have 16 bits, too, whose scores the model casts to 32."""
        is_short = self.narrow or self.viewer.info.dtype(step.node.outputs[0]) in SIXTEEN_BITS
        return is_short and not self._adds_only(
            step, lambda x: x == -math.inf or abs(x) <= LARGE_HALF
        )

    def _adds_only(self, step: BiasOp, accepted: Callable[[float], bool]) -> bool:
        """Does a step of a bias add or put in accepted numbers only, or numbers that are as large
        as scores? Other steps do neither. Of an interval its ends are asked for, and the largest
        finite number beside an infinite end.
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
        return all(
            accepted(end) and accepted(max(min(end, FLOAT32_MAX), -FLOAT32_MAX)) for end in interval
        )

    def _zero_rows_allowed(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan for ONNX's Attention, which gives 0 for a row whose every key is excluded. Its
        kernels take -inf and the lowest number of a float mask for excluded. Raises Decline where
        the bias may hold such numbers, unless they are -inf and a guard makes such a row 0, or the
        user says that no row is masked everywhere."""
        guarded = bool(plan.nan_rows) and not instances(plan.bias, Floor)
        risky = next((step for step in plan.bias if self._may_exclude(step, guarded)), None)
        if risky is None:
            return plan
        return self._without_empty_rows(
            plan,
            risky.node,
            "what is added to the scores may exclude every key of a row: the operator gives 0 then, and the model "
            "another number",
        )

    def _may_exclude(self, step: BiasOp, guarded: bool) -> bool:
        """May a step of a bias make a number that comes near the lowest of its type? With a guard
        it may be -inf."""
        dtype = self.viewer.info.dtype(step.node.outputs[0])
        if dtype is None:
            return isinstance(step, Add | Select)
        limit = max(float(dtype.min), LOST_IN) * SMALL_SHARE
        return not self._adds_only(step, lambda x: limit < -abs(x) or (guarded and x == -math.inf))

    def _guarded_behind(self, plan: MaskPlan) -> MaskPlan:
        """The plan whose guard stands after the operator. A guard against NaN makes its result 0
        where it is NaN. Raises Decline where the user says that scores may be NaN, for then values
        may be, too."""
        if plan.nan_rows != RowGuard.NAN.nan_rows:
            return plan
        self._check_finite(
            "a guard gives 0 for a row whose softmax is NaN, and values that are NaN may make the row NaN, too"
        )
        return plan.assuming(FINITE_SCORES)

    def _unguarded(self, plan: MaskPlan, terms: tuple[Term, ...]) -> MaskPlan:
        """The plan without its guard, which Ascend does not have. Raises Decline where a bias may
        make all scores of a row -inf, unless the user rules out such rows, and where the user says
        that scores may be NaN."""
        self._check_finite(
            "a guard gives 0 for a row whose softmax is NaN, which the product does not"
        )
        masks = [
            index
            for index, term in enumerate(terms)
            if not self.values.cannot_exclude(terms, index)
        ]
        infinite = [
            index for index in masks if len(masks) > 1 or self.values.may_be_infinite(terms, index)
        ]
        if plan.bias and infinite:
            reason = (
                "a guard gives 0 for a row whose scores are all -inf, which the product does not"
            )
            plan = self._without_empty_rows(plan, terms[infinite[-1]].node, reason)
        return plan.without_guard.assuming(FINITE_SCORES)

    def _guarded_plan(self, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        """The plan that keeps the guard, by the first case that applies. Raises Decline."""
        live = self._live(terms)
        if not live.adds and not live.selects:  # 1
            _check_unmasked(terms, guard)
            return MaskPlan(nan_rows=guard.nan_rows)
        return next(filter(None, self._with_mask(live, guard)), None) or self._all_in_bias(
            live, guard
        )

    def _live(self, terms: tuple[Term, ...]) -> LiveTerms:
        """The terms that change a softmax.

        One number of up to HARMLESS_SHIFT on all scores does not. It is kept if another addend may
        round the scores so coarsely that the shift shows.
        """
        live, with_small_shifts = (
            self._beyond_shift(terms, most) for most in (HARMLESS_SHIFT, LOST_SHIFT)
        )
        shows = (
            with_small_shifts != live
            and reordering_decline(with_small_shifts, self.values, ()) is not None
        )
        return LiveTerms(with_small_shifts if shows else live, self.values)

    def _beyond_shift(self, terms: tuple[Term, ...], most: float) -> tuple[Term, ...]:
        """The terms but for one number up to `most` that is added to all scores."""
        return tuple(
            term
            for index, term in enumerate(terms)
            if not self.values.changes_no_softmax(terms, index, most)
        )

    def _with_mask(self, live: LiveTerms, guard: RowGuard) -> Iterator[MaskPlan | None]:
        """The plans with a boolean mask, in the order of the cases; None for a case that does not
        apply."""
        separated = live
        if live.selections_outweigh:  # 2 to 5
            # A guard that repeats the mask zeroes what one selection masks, so no addend may become
            # a second one.
            if not guard.repeats_mask and (selected := live.with_infinite_masks_selected()) != live:
                yield self._with_boolean_mask(selected, guard, was_added=True)
            yield self._with_boolean_mask(live, guard)
            if not guard.repeats_mask:
                separated = LiveTerms(with_masks_separated(live.terms, self.values), self.values)
            if separated != live:
                yield self._with_boolean_mask(separated, guard, was_added=True)
        yield self._with_masked_score(live, guard)  # 6 and 7
        yield self._with_masked_bias(live, guard)  # 8 and 9
        if separated != live and not separated.selects and separated.keeps_fills:
            yield self._with_masked_bias(separated, guard)

    def _all_in_bias(self, live: LiveTerms, guard: RowGuard) -> MaskPlan:
        """Case 10: the plan with a bias alone. Raises Decline."""
        for index in live.selects:
            check_outweighs(live.terms, index, self.values)
        for index in live.selects:
            check_adds_up(live.terms, index, self.values)
        _check_unmasked(live.terms, guard)
        assumed = self._rounding_assumptions(live.terms)
        return MaskPlan(
            bias=self._bias_by_keys(live.terms), nan_rows=guard.nan_rows, assumed=assumed
        )

    def _bias(self, terms: tuple[Term, ...]) -> tuple[BiasOp, ...]:
        return bias_ops(terms, self.viewer, stepwise=self.options.target == "ort")

    def _bias_by_keys(self, terms: tuple[Term, ...]) -> tuple[BiasOp, ...]:
        """The bias of these terms. A first addend that holds one number at the keys that padding
        excludes, in all rows, and 0 elsewhere, is made by putting this number at these keys: the
        same numbers, of one row."""
        steps, first = self._bias(terms), terms[0]
        if self.gradient or not isinstance(first, Add):
            return steps
        number = self.viewer.facts.sets.only_besides_zero(first.operand.value)
        if number is None or abs(number) > LARGEST_ADDED:
            return steps
        padding = self.structure((first,)).padding_alone
        if not padding or any(part.given.cut is not None for part in padding):
            return steps
        excluded_keys = [padded(part, self.viewer, first.node) for part in padding]
        return (
            *(keys.filled(first.node, number * first.sign) for keys in excluded_keys),
            *steps[1:],
        )

    def _rounding_assumptions(self, terms: tuple[Term, ...]) -> tuple[str, ...]:
        """The assumptions under which a bias of these terms rounds like the terms one by one.
        Raises Decline."""
        return assumptions_for_reordering(terms, self.values, self.options.assume)

    def _with_boolean_mask(
        self, live: LiveTerms, guard: RowGuard, *, was_added: bool = False
    ) -> MaskPlan | None:
        """Cases 2 to 5: the plan with a boolean mask, and a bias beside it where there is one. None
        when the terms make no such mask. `was_added` is that of `_by_selections`."""
        if live.selects:
            return self._by_selections(live, guard, was_added)
        plan = self._by_addend_alone(live, guard) or self._by_addends(live, guard)
        if plan is None and MASKS_DOMINATE in self.options.assume:
            planner = self._without(MASKS_DOMINATE)
            plan = planner._by_addends(LiveTerms(live.terms, planner.values), guard)
        return plan

    def _without(self, word: str) -> MaskPlanner:
        """The planner, if the user did not vouch for this word."""
        facts = self.viewer.facts
        options = replace(facts.options, assume=facts.options.assume - {word})
        viewer = Viewer(replace(facts, options=options), self.viewer.space)
        return replace(self, values=replace(self.values, viewer=viewer))

    def _by_addend_alone(self, live: LiveTerms, guard: RowGuard) -> MaskPlan | None:
        """Case 2: the plan for one addend of {0, v}; None for other terms."""
        if len(live.adds) != 1 or not live.added_masks:
            return None
        (value,) = live.added_masks.values()
        if not self._may_be_boolean(live, value, guard):
            return None
        return self._boolean_plan(live, (), value, guard)

    def _by_addends(self, live: LiveTerms, guard: RowGuard) -> MaskPlan | None:
        """Case 3: the plan for one addend of {0, v}, or several of {0, -inf}, beside biases that
        are proven to be far above v; several of any v where no row is empty. None for other
        terms."""
        masks = live.added_masks
        if not masks:
            return None
        value, infinite = max(masks.values()), live.added_masks_are_infinite
        filled = self._fills_rows(live.terms)
        if not (len(masks) == 1 or filled or (infinite and value == -math.inf)):
            return None
        # A row that is masked everywhere shows whether biases are lost in a finite number. A
        # moderate one loses none.
        share = SMALL_SHARE if infinite or filled or value > DOMINATING else LOST_SHARE
        small = live.biases_are_small(max(value, -FLOAT32_MAX), share)
        if not small or not self._may_be_boolean(live, value, guard):
            return None
        return self._beside_bias(live, live.without(masks), value, guard)

    def _by_selections(self, live: LiveTerms, guard: RowGuard, was_added: bool) -> MaskPlan | None:
        """Cases 4 and 5: the plan for selections of one number that outweighs the scores, after all
        biases; None for other terms.

        With `was_added` the number was added to the scores and the biases, which then have to be
        lost in it.
        """
        fill = live.fill
        if not live.selections_come_last or not live.selections_outweigh or math.isnan(fill):
            return None
        harmless = live.biases_are_lost_in_fill if was_added else live.biases_stay_above_fill
        if not harmless or not self._may_be_boolean(live, fill, guard):
            return None
        return self._beside_bias(live, live.not_selected, fill, guard)

    def _beside_bias(
        self, live: LiveTerms, biases: tuple[Term, ...], value: float, guard: RowGuard
    ) -> MaskPlan:
        """The plan with a boolean mask of {0, value} and a bias of these terms. Raises Decline."""
        assumed = self._rounding_assumptions(biases)
        return self._boolean_plan(live, self._bias(biases), value, guard).assuming(*assumed)

    @property
    def _can_score_masked_keys(self) -> bool:
        """Can the operator give masked keys a score? Only the CPU kernel can."""
        return not self.as_bias and self.options.target == "ort"

    def _with_masked_score(self, live: LiveTerms, guard: RowGuard) -> MaskPlan | None:
        """Cases 6 and 7: the plan for selections of one number, whatever it is, after all biases;
        None for other terms. The number replaces the masked scores, so it is exactly the score of
        masked keys."""
        if not self._can_score_masked_keys or not live.selections_come_last:
            return None
        fill = live.fill
        guard = guard.beside(fill)
        if not math.isfinite(fill) or guard is RowGuard.BIAS:
            return None
        assumed = self._rounding_assumptions(live.not_selected)
        mask = self._boolean_mask(live.terms)
        plan = MaskPlan(
            mask.masked,
            self._bias(live.not_selected),
            mask.mode,
            nan_rows=guard.nan_rows_beside_mask,
            masked_score=fill if mask.excludes else None,
            drops_masked_values=guard is RowGuard.SELECTION and mask.excludes,
            missed=mask.missed,
        )
        return plan.assuming(*assumed, *mask.assumed)

    def _with_masked_bias(self, live: LiveTerms, guard: RowGuard) -> MaskPlan | None:
        """Cases 8 and 9: the plan in which biases are added to the scores of masked keys; None for
        other terms.

        The gradient operator gives masked scores the gradient 0, as a selection does. The gradient
        of a score is not 0 where an addend masks it, so beside a gradient only selections are
        masks.
        """
        if (
            not self._can_score_masked_keys
            or not guard.is_free_of_mask
            or (self.gradient and not live.selects)
        ):
            return None
        scored = self._scored_masks(live)
        if not scored.is_known or not scored.is_scored:
            return None
        assumed = self._rounding_assumptions(scored.others)
        # The score is the number plus the bias of the other terms (8), or the bias of all terms
        # alone (9).
        number = scored.number if len(scored.others) == 1 or live.adds_alike else None
        if number is None and scored.is_one_of_several:
            return None
        terms, score = (live.terms, 0.0) if number is None else (scored.others, number)
        mask = self._boolean_mask(scored.mask_terms)
        plan = MaskPlan(
            bias=self._bias(terms), nan_rows=guard.nan_rows, assumed=(*assumed, *mask.assumed)
        )
        if not mask.excludes:
            return plan
        return replace(
            plan,
            masked=mask.masked,
            mode=mask.mode,
            masked_score=score,
            adds_bias_to_masked=True,
            missed=mask.missed,
        )

    def _scored_masks(self, live: LiveTerms) -> ScoredMasks:
        """The terms that mask: the selections, where there are some, else the addends of {0, v}; of
        several such addends, the one that is a band."""
        if live.selects:
            return ScoredMasks(live, live.selects)
        masks = tuple(index for index, value in live.added_masks.items() if value <= DOMINATING)
        if len(masks) == 1:
            return ScoredMasks(live, masks)
        bands = [index for index in masks if self.structure((live.terms[index],)).mode is not None]
        return ScoredMasks(live, tuple(bands[:1]) or masks, is_one_of_several=bool(bands))

    def _boolean_plan(
        self, live: LiveTerms, bias: tuple[BiasOp, ...], value: float, guard: RowGuard
    ) -> MaskPlan:
        """The plan with the boolean mask of these terms and a bias. `value` is what the mask makes
        of a score."""
        guard = guard.beside(value)
        mask, structured = self._boolean_mask(live.terms), self.structure(live.terms)
        assumed = (*mask.assumed, *self._dominance_assumed(value))
        nan_rows = guard.nan_rows_beside_mask
        if structured.packing is not None:
            # Every token attends to itself, so no row is empty.
            dense = MaskPlan(mask.masked, bias, nan_rows=nan_rows, assumed=assumed)
            return self._packed(dense, structured.mode, structured.packing, live.node)
        plan = MaskPlan(
            mask.masked, bias, mask.mode, nan_rows=nan_rows, assumed=assumed, missed=mask.missed
        )
        if mask.mode is not None and self.options.target == "ascend":
            # On Ascend the compressed mask takes the place of the mask, so further excluded keys
            # get a bias.
            fills = (keys.filled(live.node, -FLOAT32_MAX) for keys in mask.masked)
            plan = replace(plan, masked=(), bias=(*bias, *fills))
        if not self.never_empty(live.terms):
            plan = self._with_empty_rows(plan, live, value, guard)
        if self._may_lack_mode(plan):
            return replace(
                plan, fallback=replace(plan, masked=self._dense_mask(live.terms), mode=None)
            )
        return plan

    def _dominance_assumed(self, value: float) -> tuple[str, ...]:
        """The assumption under which a number outweighs the scores; empty for numbers that outweigh
        them by their size."""
        return (MASKS_DOMINATE,) if value > DOMINATING else ()

    def _may_lack_mode(self, plan: MaskPlan) -> bool:
        """May the operator lack the plan's band for another reason than the mask?

        An operator of ONNX or ONNX Runtime may. The device's host needs a prefix before the run, so
        the prefix cannot be as long as an open batch.
        """
        if plan.mode is None:
            return False
        return self.options.is_standard or (
            self.options.target == "ascend" and plan.mode.prefix > 0
        )

    def _with_empty_rows(
        self, plan: MaskPlan, live: LiveTerms, value: float, guard: RowGuard
    ) -> MaskPlan:
        """The plan with what a fully masked row gives, unless the user vouches for it that there is
        none."""
        if NO_EMPTY_ROWS in self.options.assume:
            return plan.assuming(NO_EMPTY_ROWS)
        return replace(plan, empty_rows=self._empty_rows(live, value, guard))

    def _empty_rows(self, live: LiveTerms, value: float, guard: RowGuard) -> str:
        """The attribute cpu_empty_rows; empty where the row attends to a sink."""
        if guard is RowGuard.SELECTION:
            return "zero"
        if self.values.sink_lower_bound is not None:
            return ""
        if value == -math.inf:
            return "nan" if guard is RowGuard.NONE else "zero"
        return "mean" if value <= DOMINATING or live.selects else "unmasked"

    def _packed(
        self, dense: MaskPlan, band: SparseMode | None, packing: Packing, node: ir.Node
    ) -> MaskPlan:
        """The plan with packed sequences, if the operator allows them and equal labels are
        neighbours, by proof or because the user vouches for it. Otherwise the dense plan."""
        if reason := self._why_not_packed(bool(dense.bias)):
            return replace(
                dense, missed=(Missed(MissedCode.NOT_PACKED, reason, packing.labels.name),)
            )
        if not packing.in_runs and UNBROKEN not in self.options.assume:
            return replace(dense, missed=(packing.missed,))
        assumed = dense.assumed if packing.in_runs else (*dense.assumed, UNBROKEN)
        view = aligned(
            AlignedTensor(packing.labels, packing.dims, packing.never_enlarges), self.viewer, node
        )
        return replace(dense, masked=(), mode=band, assumed=assumed, packed=view, fallback=dense)

    def _why_not_packed(self, has_bias: bool) -> str:
        """Why the operator takes no packed sequences here; empty where it does."""
        reasons = (
            (self.options.is_standard, "the target's operators take no packed sequences"),
            (
                self.options.target != "ort",
                "the product needs the ends of packed sequences before the run",
            ),
            (has_bias, "packed sequences cannot stand beside a bias"),
            (not self.packing, "packed sequences cannot stand beside dropout"),
            (
                self.options.divided,
                "a model that is divided along the sequence has no ends of packed sequences",
            ),
        )
        return next((reason for applies, reason in reasons if applies), "")

    def _boolean_mask(self, terms: tuple[Term, ...]) -> _BooleanMask:
        """The boolean mask that these terms make: as a band and padding where it has that
        structure, else as it is.

        On Ascend padding beside a band becomes a bias, which cannot express the result of a row
        without a key. The structure is then used only if the user rules out such rows. Some
        products take only masks that hold every excluded key.
        """
        structured, node = self.structure(terms), terms[-1].node
        missed = self._dense_mask_missed(structured, node)
        if missed is not None:
            return _BooleanMask(
                self._dense_mask(terms), assumed=structured.assumed, missed=(missed,)
            )
        masked = tuple(padded(part, self.viewer, node) for part in structured.padding)
        return _BooleanMask(masked, structured.mode, structured.assumed)

    def _dense_mask(self, terms: tuple[Term, ...]) -> tuple[ExcludedPositions, ...]:
        """The mask of these terms as it is, with every excluded key."""
        return tuple(excluded(term, self.viewer) for term in self._masks(terms))

    def _dense_mask_missed(
        self, structured: Structure | NoStructure, node: ir.Node
    ) -> Missed | None:
        """What the report says of a mask that holds every excluded key; None where the target takes
        the structure."""
        reason = self._why_dense(structured)
        return structured.missed(node) or if_known(
            lambda why: Missed(MissedCode.DENSE_MASK, why, label(node)), reason
        )

    def _why_dense(self, structured: Structure | NoStructure) -> str | None:
        """Why the target needs this structure as a mask that holds every excluded key; None if it
        does not."""
        if structured.packing is not None:
            return "packed sequences are not told apart where masked keys keep a score"
        if self.options.needs_dense_mask:
            return f"{self.options.soc_version} has no sparse_mode for it: its masks are tensors of all rows and keys"
        if structured.mode is None:
            return None
        if (
            structured.padding
            and self.options.target != "ort"
            and NO_EMPTY_ROWS not in self.options.assume
        ):
            return "a band with padding as a bias does not keep what a row without a key gives"
        return why_not_expressible(structured.mode, *self.grid.sizes, self.options, may_grow=True)

    def structure(self, terms: tuple[Term, ...]) -> Structure | NoStructure:
        """The structure of the boolean mask that these terms make, or why it has none."""
        if terms not in self._structures:
            masks, contiguity = self._masks(terms), ContiguousLabels(self.viewer.facts)
            vouched = SAME_SIZES in self.options.assume
            biases = [term for term in instances(terms, Add) if term not in masks]
            cuts = self.options.target == "ort" and all(
                opset(term.node) >= SLICE_SINCE for term in masks
            )
            self._structures[terms] = structure(
                masks, self.grid, self.viewer, contiguity, vouched, biases, cuts
            )
        return self._structures[terms]

    def _masks(self, terms: tuple[Term, ...]) -> list[MaskTerm]:
        """The terms that make the boolean mask: the selections where there are some, else the
        addends that are masks."""
        selects = instances(terms, Select)
        if selects:
            return [*selects]
        adds = [(index, term) for index, term in enumerate(terms) if isinstance(term, Add)]
        return [
            term
            for index, term in adds
            if len(adds) == 1 or self.values.mask_value(terms, index) is not None
        ]

    def never_empty(self, terms: tuple[Term, ...]) -> bool:
        """Is the mask proven to leave every row a key, by its structure or as a single constant?"""
        masks = self._masks(terms)
        return self.structure(terms).never_empty or (
            len(masks) == 1 and self._constant_keeps_keys(masks[0])
        )

    def _fills_rows(self, terms: tuple[Term, ...]) -> bool:
        """Does every row have a key, by proof or because the user says so?"""
        return NO_EMPTY_ROWS in self.options.assume or self.never_empty(terms)

    def _constant_keeps_keys(self, mask: MaskTerm) -> bool:
        """Is a mask a constant as wide as the keys that leaves every row a key?"""
        value, dims, resolve = mask.operand.value, mask.operand.dims, self.viewer.space.resolve
        if not dims or resolve(dims[-1]) != resolve(self.grid.kv_seq):
            return False
        keeps_true = isinstance(mask, Select) and mask.keep
        array, large = constant(value), self.viewer.info.large.of(value)
        if large is not None:
            return not (large.zeros_only if keeps_true else large.no_zeros)
        return array is not None and bool(((array != 0) == keeps_true).any(axis=-1).all())

    def _may_be_boolean(self, live: LiveTerms, value: float, guard: RowGuard) -> bool:
        """Can the target keep the result of a fully masked row if the mask is boolean?"""
        guard = guard.beside(value)
        if self.as_bias:
            return False
        if self._fills_rows(live.terms) or guard is RowGuard.SELECTION:
            return True
        if self.values.sink_lower_bound is not None:
            # A fully masked row then attends to the sink alone, unless the sink is as low as the
            # mask.
            return self.values.sink_lower_bound > value / 10
        if self.options.target == "ascend":
            # On Ascend a fully masked row gives 0.
            return value == -math.inf and guard is not RowGuard.NONE
        if self.options.is_standard:
            return self._is_standard_row(live, value, guard)
        return value <= DOMINATING or bool(live.selects) or value >= ROUNDS_SCORES_AWAY

    def _is_standard_row(self, live: LiveTerms, value: float, guard: RowGuard) -> bool:
        """Can an operator of ONNX or ONNX Runtime keep what a fully masked row gives?

        ONNX's Attention gives 0 for it. The operators of ONNX Runtime give NaN where -inf masks,
        which a node after them can make 0. Both give the mean where a number is added in which
        every score is lost, which needs the range of float32.
        """
        if value == -math.inf:
            return guard is not RowGuard.NONE or self.options.target == "contrib"
        node = live.node
        if self.viewer.info.dtype(node.outputs[0]) == ir.DataType.FLOAT16:
            raise Decline(
                Code.EMPTY_ROWS,
                "a row that is masked everywhere gives a mean here, which no float16 mask of the operator can express",
                node,
                NO_EMPTY_ROWS_HINT,
            )
        return value <= DOMINATING or bool(live.selects)


def _check_unmasked(terms: tuple[Term, ...], guard: RowGuard) -> None:
    """Raise Decline for a guard that masks the probabilities like the scores, since the scores have
    no mask here."""
    if guard.repeats_mask:
        reason = "the probabilities are masked like the scores, but the mask on the scores is no boolean one"
        raise Decline(Code.PROBABILITY_TERM, reason, terms[-1].node)
