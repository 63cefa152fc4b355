"""What a guard behind the softmax means for the mask: it tests the scores, the one bias, the one mask or NaN.

    the one mask    a selection or addend, the only selection among the terms, or the only term of both kinds; the guard
                    keeps a probability exactly where the mask leaves a score: the same condition, or one that
                    positions.py reads as the same formula, of the same shape and along the same axes
    a product       Mul by such a condition as 0 and 1

Refused: a guard that tests something else, or along other axes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import Arrangement, Axes
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.structure import kept
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.matching.probabilities import Guard, ProbabilityPath
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.report import Code
from fa_compiler.passes.score_ops import Add, MaskTerm, Select, Term
from fa_compiler.passes.values.formula import negation
from fa_compiler.passes.values.shapes import ShapeInfo


def guard_of(
    after: ProbabilityPath,
    terms: tuple[Term, ...],
    columns: Axes,
    viewer: Viewer,
    seen: Mapping[ir.Value, Arrangement],
) -> RowGuard:
    """What the guard means for the mask. A bias guard has to test the one bias there is, along the same axes."""
    if after.guard is None:
        return RowGuard.NONE
    if after.guard.tests:
        tested = after.guard.tests[0].inputs[0]
        dims = None if tested is None else seen.get(tested)
        if not dims or viewer.space.resolve(dims[-1]) != viewer.space.resolve(columns):
            reason = "the guard tests the scores along another axis than the keys'"
            raise Decline(Code.PROBABILITY_TERM, reason, after.guard.where)
        return RowGuard.SCORES
    if after.guard.condition is not None:
        return _mask_guard(after.guard, terms, viewer, seen)
    if after.guard.bias is None:
        return RowGuard.NAN
    term = terms[0] if len(terms) == 1 else None
    if isinstance(term, Add) and term.operand.value is after.guard.bias and term.sign > 0 and term.operand.dims:
        own = viewer.space.resolve_all(term.operand.dims)
        guarded = viewer.space.resolve_all(seen[after.guard.where.outputs[0]])[-len(own) :]
        rows = list(zip(own[:-1], guarded[:-1], strict=False))
        same_rows = len(own) == len(guarded) and all(not mine or mine == theirs for mine, theirs in rows)
        if same_rows and own[-1] in ((), viewer.space.resolve(columns)):
            return RowGuard.BIAS
    raise Decline(
        Code.PROBABILITY_TERM, "the guard tests something other than the bias of the scores", after.guard.where
    )


def product_guard(
    factors: tuple[Factor, ...],
    terms: tuple[Term, ...],
    viewer: Viewer,
) -> Factor | None:
    """The factor on the probabilities that is 0 where the one mask masks, and 1 elsewhere."""
    mask = only_mask(terms)
    for each in factors:
        if mask is None or each.view is None or each.value is None or each.divides:
            continue
        numbers = viewer.facts.sets.of(each.value)
        if numbers is not None and numbers <= {0.0, 1.0} and _keeps(each.value, True, each.view.dims, mask, viewer):
            return each
    return None


def _mask_guard(
    guard: Guard,
    terms: tuple[Term, ...],
    viewer: Viewer,
    seen: Mapping[ir.Value, Arrangement],
) -> RowGuard:
    """Zeros where the one mask masks."""
    mask = only_mask(terms)
    if mask is not None and guard.condition is not None:
        dims = viewer.alignment(guard.condition, seen[guard.where.outputs[0]], guard.where)
        if _keeps(guard.condition, guard.keep, dims, mask, viewer):
            return RowGuard.SELECTION
    raise Decline(Code.PROBABILITY_TERM, "the probabilities are masked, but not like the scores", guard.where)


def only_mask(terms: tuple[Term, ...]) -> MaskTerm | None:
    """The one mask of a guard, the only selection or else the only term; None where there is no such term."""
    masks = [term for term in terms if isinstance(term, Add | Select)]
    selects = [term for term in masks if isinstance(term, Select)]
    found = selects or masks
    return found[0] if len(found) == 1 else None


def _keeps(
    condition: ir.Value,
    keep: bool,
    dims: Arrangement,
    mask: MaskTerm,
    viewer: Viewer,
) -> bool:
    """Is a condition, which runs along these axes, `keep` exactly where the mask leaves a score as it is?"""
    if viewer.space.resolve_all(dims) != viewer.space.resolve_all(mask.operand.dims):
        return False
    if isinstance(mask, Select):
        (own, turned), (other, turned_too) = (_bare(each, viewer.info) for each in (mask.operand.value, condition))
        if own is other:
            return (mask.keep ^ turned) == (keep ^ turned_too)
    shape = viewer.info.shape(condition)
    if shape is None or shape != viewer.info.shape(mask.operand.value):
        return False
    positions = viewer.facts.positions(shape)
    truth, left = positions.truth(condition, positions.every), kept(mask, positions)
    return truth is not None and left == (truth if keep else negation(truth))


def _bare(value: ir.Value | None, info: ShapeInfo) -> tuple[ir.Value | None, bool]:
    """A condition without casts of booleans and negations around it, and whether these turn it."""
    turned = False
    while value is not None and is_op(node := value.producer(), "Cast", "Identity", "Not") and node is not None:
        source = node.inputs[0]
        if source is None or info.dtype(source) != ir.DataType.BOOL:
            break
        turned ^= node.op_type == "Not"
        value = source
    return value, turned
