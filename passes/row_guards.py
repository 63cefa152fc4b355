"""What a guard behind the softmax means for the mask: it tests the scores, the one bias, the one selection or NaN.

Refused: a guard that tests something else, or along other axes.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.axes import Arrangement, Axes
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.probabilities import Guard, ProbabilityPath
from fa_compiler.passes.report import Code
from fa_compiler.passes.shapes import ShapeInfo
from fa_compiler.passes.terms import AddTerm, RowGuard, SelectTerm, Term
from fa_compiler.passes.views import Viewer


def guard_of(
    after: ProbabilityPath,
    terms: tuple[Term, ...],
    columns: Axes,
    viewer: Viewer,
    seen: dict[ir.Value, Arrangement],
) -> RowGuard:
    """What the guard means for the mask. A bias guard has to test the one bias there is, along the same axes."""
    if after.guard is None:
        return RowGuard.NONE
    if after.guard.tests:
        return RowGuard.SCORES
    if after.guard.condition is not None:
        return _selection_guard(after.guard, terms, viewer, seen)
    if after.guard.bias is None:
        return RowGuard.NAN
    term = terms[0] if len(terms) == 1 else None
    if isinstance(term, AddTerm) and term.value is after.guard.bias and term.sign > 0 and term.dims:
        own = viewer.space.resolve_all(term.dims)
        guarded = viewer.space.resolve_all(seen[after.guard.where.outputs[0]])[-len(own) :]
        rows = list(zip(own[:-1], guarded[:-1], strict=False))
        same_rows = len(own) == len(guarded) and all(not mine or mine == theirs for mine, theirs in rows)
        if same_rows and own[-1] in ((), viewer.space.resolve(columns)):
            return RowGuard.BIAS
    raise Decline(
        Code.PROBABILITY_TERM, "the guard tests something other than the bias of the scores", after.guard.where
    )


def _selection_guard(
    guard: Guard, terms: tuple[Term, ...], viewer: Viewer, seen: dict[ir.Value, Arrangement]
) -> RowGuard:
    """Zeros where the one selection on the scores deselects, along the same axes."""
    selects = [term for term in terms if isinstance(term, SelectTerm)]
    same = len(selects) == 1 and _uncast(selects[0].condition, viewer.info) is _uncast(guard.condition, viewer.info)
    if same and selects[0].keep == guard.keep:
        own = viewer.space.resolve_all(selects[0].dims)
        guarded = viewer.space.resolve_all(seen[guard.where.outputs[0]])[-len(own) :]
        if len(own) == len(guarded) and all(not a or a == b for a, b in zip(own, guarded, strict=True)):
            return RowGuard.SELECTION
    raise Decline(Code.PROBABILITY_TERM, "the probabilities are masked, but not like the scores", guard.where)


def _uncast(value: ir.Value | None, info: ShapeInfo) -> ir.Value | None:
    """A boolean without the casts from boolean to boolean that exporters put around it."""
    while value is not None and is_op(node := value.producer(), "Cast", "Identity") and node is not None:
        source = node.inputs[0]
        if source is None or info.dtype(source) != ir.DataType.BOOL:
            break
        value = source
    return value
