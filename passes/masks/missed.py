"""Why a plan reads a mask of all rows and keys where a cheaper form would do: the `missed` of the report.

A band, packed sequences or one row of padding would cost next to nothing. The plan would have one of these

    1 if the mask did not have to stay a bias (the caller knows why)
    2 if the user vouched for same-sizes, masks-dominate or no-empty-rows, or for several of them
    3 if the boolean mask had a structure (structure.py), or the target took it (mask.py)
    4 if a mask that is a part of the bias had a structure
    5 if everything else that is added to the scores were proven to be lost beside that mask

The first case that applies is reported. Nothing here changes a plan. In case 2 the plan is made again under these
assumptions, so the hint helps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from fa_compiler.passes.decline import Decline, label
from fa_compiler.passes.layout.axes import AxisSpace
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.bias_checks import FILL
from fa_compiler.passes.masks.magnitudes import ASSUMED_MASK
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.narrow import is_constant_along
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.structure import ONE_NAME, Grid, NoStructure
from fa_compiler.passes.options import ASSUMPTIONS, MASKS_DOMINATE, NO_EMPTY_ROWS, SAME_SIZES
from fa_compiler.passes.report import Missed, MissedCode
from fa_compiler.passes.score_ops import Add, BiasOp, Select, Term

CONDITIONS = {
    MASKS_DOMINATE: "no score comes near the number of a mask",
    NO_EMPTY_ROWS: "no query row is masked everywhere",
}
WORDS = [
    words for count in (1, 2, 3) for words in itertools.combinations((SAME_SIZES, MASKS_DOMINATE, NO_EMPTY_ROWS), count)
]


def plan_with_missed(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard, stays_bias: Missed | None = None
) -> MaskPlan:
    """The plan for these terms, with what it misses. Raises Decline.

    `stays_bias` says why every mask stays a bias, where the planner is told to leave it one.
    """
    try:
        plan = planner.plan(terms, guard)
    except Decline as decline:
        words = _words_for_a_plan(planner, terms, guard) if decline.hint == FILL else ()
        hint = f"{FILL}; or {vouching(words)}" if words else decline.hint
        raise Decline(decline.code, decline.reason, decline.culprit, hint or "") from decline
    missed = () if _is_lean(plan, planner) else (stays_bias or _missed(plan, planner, terms, guard),)
    return replace(plan, missed=missed)


def _missed(plan: MaskPlan, planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard) -> Missed:
    given, found = planner.options.assume, planner.structure(terms)
    for words in WORDS:  # 2
        if not given.issuperset(words) and _is_lean_with(terms, guard, _assuming(words, planner)):
            reasons = [f"it is not proven that {ASSUMPTIONS[word]}" for word in words]
            hint = f"{' '.join(f'--assume {word}' for word in words)} if that holds in every run"
            if words[0] == SAME_SIZES and isinstance(found, NoStructure) and found.hint == ONE_NAME:
                reasons[0], hint = found.reason, f"{hint}; or {ONE_NAME}"
            return Missed(MissedCode.DENSE_MASK, ", and ".join(reasons), label(terms[-1].node), hint)
    if isinstance(found, NoStructure) and found.hint == ONE_NAME:
        # Other sizes alone would not help: there is a reason behind them.
        found = _assuming((SAME_SIZES,), planner).structure(terms)
        if isinstance(found, NoStructure):
            return found.missed(terms[-1].node)
    if plan.missed:  # 3
        return plan.missed[0]
    node = next(step.node for step, view in _masks_in_bias(plan, planner) if _is_dense(view, planner))
    found = planner.structure(tuple(term for term in terms if isinstance(term, Add | Select) and term.node is node))
    if isinstance(found, NoStructure):  # 4
        return found.missed(node)
    reason = "what else is added to the scores is not proven to be lost beside the mask"
    return Missed(MissedCode.DENSE_MASK, reason, label(node))  # 5


def is_dense(view: View, grid: Grid, space: AxisSpace) -> bool:
    """Does a mask run along both rows and keys? A single row is read as it is."""
    if space.size(grid.q_seq) == 1:
        return False
    own = {axis for dim in view.base_dims for axis in space.resolve(dim)}
    return all(own.intersection(space.resolve(axes)) for axes in (grid.q_seq, grid.kv_seq))


def _is_dense(view: View, planner: MaskPlanner) -> bool:
    """Is the mask dense, and not proven to be the same for all rows? Of such a mask one row is made and read."""
    viewer, rows = planner.viewer, planner.viewer.space.resolve(planner.grid.q_seq)
    along = [axis for axis, dim in enumerate(viewer.space.resolve_all(view.base_dims)) if dim == rows]
    alike = along and all(is_constant_along(view.base, axis, viewer.info) for axis in along)
    return is_dense(view, planner.grid, viewer.space) and (not alike or viewer.space.may_broadcast(rows))


def _masks_in_bias(plan: MaskPlan, planner: MaskPlanner) -> Iterator[tuple[BiasOp, View]]:
    """The masks among the bias: selections, and addends of 0 and numbers as low as a mask's."""
    for step in plan.bias:
        if isinstance(step, Select):
            yield step, step.operand.view
        elif isinstance(step, Add):
            numbers = planner.viewer.facts.sets.of(step.operand.view.base) or frozenset()
            if 0.0 in numbers and min(numbers) <= ASSUMED_MASK:
                yield step, step.operand.view


def _is_lean(plan: MaskPlan, planner: MaskPlanner) -> bool:
    """Does the plan read no mask of all rows and keys? One with a structure is a band, or one row of it is read."""
    if plan.mode is not None or plan.packed is not None:
        return True
    masks = [part.view for part in plan.masked] if plan.missed else []
    masks += [view for _, view in _masks_in_bias(plan, planner)]
    return not any(_is_dense(view, planner) for view in masks)


def vouching(words: tuple[str, ...]) -> str:
    """What to write on the command line for these words, and when."""
    return f"--assume {','.join(words)} if {' and '.join(CONDITIONS[word] for word in words)}"


def words_for_a_mask(planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard) -> tuple[str, ...]:
    """The fewest assumptions under which the plan is a mask alone, in which no row without a key matters; () where none
    help."""
    return _words(planner, terms, guard, lambda plan: not plan.bias and not plan.empty_rows)


def _words_for_a_plan(planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard) -> tuple[str, ...]:
    """The fewest assumptions under which there is a plan; () where none help."""
    return _words(planner, terms, guard, lambda plan: True)


def _words(
    planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard, wanted: Callable[[MaskPlan], bool]
) -> tuple[str, ...]:
    for words in ((MASKS_DOMINATE,), (NO_EMPTY_ROWS,), (MASKS_DOMINATE, NO_EMPTY_ROWS)):
        try:
            plan = _assuming(words, planner).plan(terms, guard)
        except Decline:
            continue
        if wanted(plan):
            return tuple(word for word in words if word not in planner.options.assume)
    return ()


def _is_lean_with(terms: tuple[Term, ...], guard: RowGuard, planner: MaskPlanner) -> bool:
    """Is the plan of this planner lean?"""
    try:
        return _is_lean(planner.plan(terms, guard), planner)
    except Decline:
        return False


def _assuming(words: tuple[str, ...], planner: MaskPlanner) -> MaskPlanner:
    """The planner, if the user vouched for these words, too. It learns of axes in a space of its own."""
    facts = planner.viewer.facts
    options = replace(facts.options, assume=facts.options.assume.union(words))
    viewer = Viewer(replace(facts, options=options), planner.viewer.space.branch())
    return replace(planner, values=replace(planner.values, viewer=viewer))
