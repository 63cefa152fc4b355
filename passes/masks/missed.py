"""Why a plan reads a mask of all rows and keys where a cheaper form would do: the `missed` of the
report.

A band, packed sequences or one row of padding would cost next to nothing. The plan would have one
of these

    1 if the mask did not have to stay a bias (the caller knows why)
    2 if the user vouched for same-sizes, masks-dominate, no-empty-rows or binary-masks, or for
      several of them; also if a mask of one row, an input of unknown numbers, is a part of a bias
      of all rows and keys
    3 if the boolean mask had a structure (structure.py), or the target took it (mask.py)
    4 if a mask that is a part of the bias had a structure
    5 if everything else that is added to the scores were proven to be lost beside that mask

The first case that applies is reported. In case 2 the plan is made again under these assumptions,
so the hint helps. Nothing here changes a plan, but for one that the user's binary-masks makes: it
is taken if it has a mask more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from fa_compiler.passes.algebra.axes import AxisSpace, flat_axes
from fa_compiler.passes.answer.decline import Decline, if_possible, label, reworded
from fa_compiler.passes.answer.options import (
    ASSUMPTIONS,
    BINARY_MASKS,
    MASKS_DOMINATE,
    NO_EMPTY_ROWS,
    SAME_SIZES,
)
from fa_compiler.passes.answer.report import Missed, MissedCode
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.bias_checks import FILL
from fa_compiler.passes.masks.joined_masks import with_masks_separated
from fa_compiler.passes.masks.magnitudes import ASSUMED_MASK
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.narrow import is_constant_along
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_ops import Add, BiasOp, Select, Term, tensors_of
from fa_compiler.passes.masks.structure import ONE_NAME, Grid, NoStructure, Structure

CONDITIONS = {
    MASKS_DOMINATE: "no score comes near the number of a mask",
    NO_EMPTY_ROWS: "no query row is masked everywhere",
}
MOST_WORDS = 3
"""A line of the report names no more assumptions than this."""


def plan_with_missed(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard, stays_bias: Missed | None = None
) -> MaskPlan:
    """The plan for these terms, with what it misses. Raises Decline.

    `stays_bias` says why every mask stays a bias, where the planner is told to leave it one.
    """

    def with_words(decline: Decline) -> Decline:
        hint = decline.hint or ""
        if hint == FILL and (words := _words_for_a_plan(planner, terms, guard)):
            hint = f"{FILL}; or {vouching(words)}"
        return Decline(decline.code, decline.reason, decline.culprit, hint)

    plan, informed = reworded(lambda: _planned(planner, terms, guard), with_words)
    return replace(plan, missed=tuple(_missed_by_plan(plan, informed, terms, guard, stays_bias)))


def _missed_by_plan(
    plan: MaskPlan,
    planner: MaskPlanner,
    terms: tuple[Term, ...],
    guard: RowGuard,
    stays_bias: Missed | None,
) -> Iterator[Missed]:
    if _is_lean(plan, planner):
        missed = _missed_by_inputs(plan, planner, terms, guard)
    else:
        missed = stays_bias or _missed(plan, planner, terms, guard)
    if missed is not None:
        yield missed


def _planned(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> tuple[MaskPlan, MaskPlanner]:
    """The plan and its planner. Where the user vouches for binary-masks, a planner that knows the
    numbers of such masks is taken if its plan has more masks, or if there is no other plan. Raises
    Decline."""
    if BINARY_MASKS in planner.options.assume and _inverts_inputs(planner, terms):
        informed = replace(planner, values=_with_binary_masks(planner.values, planner.viewer.space))
        branches = (_in_a_branch(candidate) for candidate in (informed, planner))
        other, plan = (if_possible(partial(candidate.plan, terms, guard)) for candidate in branches)
        if other is not None and (plan is None or _has_more_masks(other, plan)):
            return informed.plan(terms, guard).assuming(BINARY_MASKS), informed
    return planner.plan(terms, guard), planner


def _has_more_masks(other: MaskPlan, plan: MaskPlan) -> bool:
    """Does the other plan mask by what is a part of this plan's bias?"""
    other_count, count = (
        len(candidate.masked) + (candidate.mode is not None) for candidate in (other, plan)
    )
    return other_count > count


def _inverts_inputs(planner: MaskPlanner, terms: tuple[Term, ...]) -> bool:
    """Is an addend, or a part of one, made of a mask that is an input of the model and may hold any
    number?"""
    facts = planner.viewer.facts
    informed = replace(
        planner, values=_with_binary_masks(planner.values, planner.viewer.space.branch())
    )
    values = [
        term.operand.value
        for term in with_masks_separated(terms, informed.values)
        if isinstance(term, Add)
    ]
    return any(facts.sets.of(value) != facts.binary_sets.of(value) for value in values)


def _missed(
    plan: MaskPlan, planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> Missed:
    structured = planner.structure(terms)
    for words in _words_to_try(planner, terms, guard):  # 2
        if _lean_under(words, planner, terms, guard) is not None:
            return _vouched(words, structured, terms)
    if structured.lacks_one_name:
        # Other sizes alone would not help: there is a reason behind them.
        missed = _assuming((SAME_SIZES,), planner).structure(terms).missed(terms[-1].node)
        if missed is not None:
            return missed
    if plan.missed:  # 3
        return plan.missed[0]
    node = next(
        step.node for step, view in _masks_in_bias(plan, planner) if _is_dense(view, planner)
    )
    structured = planner.structure(
        tuple(term for term in terms if isinstance(term, Add | Select) and term.node is node)
    )
    reason = "what else is added to the scores is not proven to be lost beside the mask"
    return structured.missed(node) or Missed(MissedCode.DENSE_MASK, reason, label(node))  # 4 and 5


def _missed_by_inputs(
    plan: MaskPlan, planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> Missed | None:
    """Case 2 for a mask of one row whose numbers are unknown, beside a bias of all rows and keys;
    None elsewhere."""
    grid, space = planner.grid, planner.viewer.space
    views = [operand.view for operand in tensors_of(plan.bias)]
    if not any(is_dense(view, grid, space) for view in views):
        return None
    for words in _words_to_try(planner, terms, guard):
        lean = _lean_under(words, planner, terms, guard) if BINARY_MASKS in words else None
        if lean is not None and _has_more_masks(lean, plan):
            return _vouched(words, planner.structure(terms), terms)
    return None


def _words_to_try(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> list[tuple[str, ...]]:
    """The assumptions that the user does not vouch for and that may help, alone and together; the
    fewest come first.

    None is tried alone where all of them together do not help: a plan is made for each."""
    given = planner.options.assume
    words = [SAME_SIZES, MASKS_DOMINATE, NO_EMPTY_ROWS]
    if BINARY_MASKS not in given and _inverts_inputs(planner, terms):
        words.append(BINARY_MASKS)
    if _lean_under(tuple(words), planner, terms, guard) is None:
        return []
    combinations = (itertools.combinations(words, count) for count in range(1, MOST_WORDS + 1))
    return [
        words
        for words in itertools.chain.from_iterable(combinations)
        if not given.issuperset(words)
    ]


def _under(
    words: tuple[str, ...], planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> tuple[MaskPlan, MaskPlanner] | None:
    """The plan and its planner, if the user vouched for these words, too; None where there is no
    plan."""
    return if_possible(lambda: _planned(_assuming(words, planner), terms, guard))


def _lean_under(
    words: tuple[str, ...], planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> MaskPlan | None:
    """The plan, if the user vouched for these words, too, and it then reads no mask of all rows and
    keys."""
    under = _under(words, planner, terms, guard)
    return under[0] if under is not None and _is_lean(*under) else None


def _vouched(
    words: tuple[str, ...], structured: Structure | NoStructure, terms: tuple[Term, ...]
) -> Missed:
    """The line that names these assumptions. `found` is the structure of the mask without them."""
    reasons = [f"it is not proven that {ASSUMPTIONS[word]}" for word in words]
    hint = f"{' '.join(f'--assume {word}' for word in words)} if that holds in every run"
    if words[0] == SAME_SIZES and structured.lacks_one_name:
        reasons[0], hint = structured.reason, f"{hint}; or {ONE_NAME}"
    return Missed(MissedCode.DENSE_MASK, ", and ".join(reasons), label(terms[-1].node), hint)


def is_dense(view: View, grid: Grid, space: AxisSpace) -> bool:
    """Does a mask run along both rows and keys? A single row is read as it is."""
    if space.size(grid.q_seq) == 1:
        return False
    own = {*flat_axes(space.resolve_all(view.base_dims))}
    return all(own.intersection(space.resolve(axes)) for axes in (grid.q_seq, grid.kv_seq))


def _is_dense(view: View, planner: MaskPlanner) -> bool:
    """Is the mask dense, and not proven to be the same for all rows? Of such a mask one row is made
    and read."""
    viewer, rows = planner.viewer, planner.viewer.space.resolve(planner.grid.q_seq)
    along = [
        axis for axis, dim in enumerate(viewer.space.resolve_all(view.base_dims)) if dim == rows
    ]
    alike = along and all(is_constant_along(view.base, axis, viewer.info) for axis in along)
    return is_dense(view, planner.grid, viewer.space) and (
        not alike or viewer.space.may_broadcast(rows)
    )


def _masks_in_bias(plan: MaskPlan, planner: MaskPlanner) -> Iterator[tuple[BiasOp, View]]:
    """The masks among the bias: selections, and addends of 0 and numbers as low as a mask's."""
    for step in plan.bias:
        if isinstance(step, Select):
            yield step, step.operand.view
        elif isinstance(step, Add):
            numbers = {
                step.sign * number
                for number in planner.viewer.facts.sets.of(step.operand.view.base) or ()
            }
            if 0.0 in numbers and min(numbers) <= ASSUMED_MASK:
                yield step, step.operand.view


def _is_lean(plan: MaskPlan, planner: MaskPlanner) -> bool:
    """Does the plan read no mask of all rows and keys? One with a structure is a band, or one row
    of it is read."""
    if plan.mode is not None or plan.packed is not None:
        return True
    masks = [part.view for part in plan.masked] if plan.missed else []
    masks += [view for _, view in _masks_in_bias(plan, planner)]
    return not any(_is_dense(view, planner) for view in masks)


def vouching(words: tuple[str, ...]) -> str:
    """What to write on the command line for these words, and when."""
    return f"--assume {','.join(words)} if {' and '.join(CONDITIONS[word] for word in words)}"


def words_for_a_mask(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> tuple[str, ...]:
    """The fewest assumptions under which the plan is a mask alone, in which no row without a key
    matters; () where none help."""
    return _words(planner, terms, guard, lambda plan: not plan.bias and not plan.empty_rows)


def _words_for_a_plan(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard
) -> tuple[str, ...]:
    """The fewest assumptions under which there is a plan; () where none help."""
    return _words(planner, terms, guard, lambda plan: True)


def _words(
    planner: MaskPlanner,
    terms: tuple[Term, ...],
    guard: RowGuard,
    wanted: Callable[[MaskPlan], bool],
) -> tuple[str, ...]:
    for words in ((MASKS_DOMINATE,), (NO_EMPTY_ROWS,), (MASKS_DOMINATE, NO_EMPTY_ROWS)):
        under = _under(words, planner, terms, guard)
        if under is not None and wanted(under[0]):
            return tuple(word for word in words if word not in planner.options.assume)
    return ()


def _with_binary_masks(values: TermValues, space: AxisSpace) -> TermValues:
    """The answers about terms in runs whose masks hold only 0 and 1."""
    facts = values.viewer.facts
    return replace(values, viewer=Viewer(replace(facts, sets=facts.binary_sets), space))


def _in_a_branch(planner: MaskPlanner) -> MaskPlanner:
    """The planner that learns of axes in a space of its own."""
    viewer = Viewer(planner.viewer.facts, planner.viewer.space.branch())
    return replace(planner, values=replace(planner.values, viewer=viewer))


def _assuming(words: tuple[str, ...], planner: MaskPlanner) -> MaskPlanner:
    """The planner, if the user vouched for these words, too. It learns of axes in a space of its
    own."""
    facts = planner.viewer.facts
    options = replace(facts.options, assume=facts.options.assume.union(words))
    viewer = Viewer(replace(facts, options=options), planner.viewer.space)
    return _in_a_branch(replace(planner, values=replace(planner.values, viewer=viewer)))
