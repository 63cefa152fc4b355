"""Addends that hold both a bias and a mask, as a term for each of the two.

These sums are read, also behind operators that move them, such as an Expand for several heads:

    scores + (position_bias + torch.where(allowed, 0, v))
    scores + torch.where(allowed, position_bias, v)

       addend                       terms
    1  bias + mask of {0, v}        the bias, the mask
    2  mask + mask                  the two masks
    3  Where(c, bias, v)            the bias, a selection with v

Where the mask is v, the sum of bias and mask rounds to v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import input_of, is_op, without_none
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.masks.mask_terms import aligned
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.score_ops import Add, AlignedTensor, Select, Term
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS
from fa_compiler.passes.ops.moves import keeps_everything


def with_masks_separated(terms: tuple[Term, ...], values: TermValues) -> tuple[Term, ...]:
    """The terms, in which each addend that holds both a bias and a mask becomes two terms. Raises
    Decline where the shape of an addend is not proven to fit the scores."""
    return tuple(part for term in terms for part in _bias_and_mask(term, values) or (term,))


def _bias_and_mask(term: Term, values: TermValues) -> tuple[Term, ...]:
    """The two terms that an addend holds; empty for other terms."""
    if not isinstance(term, Add) or term.sign < 0:
        return ()
    joined = _before_moves(term, values.viewer)
    node = joined.value.producer()
    if not is_op(node, "Add", "Where") or None in node.inputs:
        return ()
    operands = [
        replace(joined, value=operand, dims=values.viewer.alignment(operand, joined.dims, node))
        for operand in without_none(node.inputs)
    ]
    if is_op(node, "Where"):
        return _bias_and_selection(term.node, operands, values.viewer)
    adds = [Add(term.node, operand) for operand in operands]
    # 1 and 2
    return tuple(adds) if any(values.mask_value((add,), 0) is not None for add in adds) else ()


def _bias_and_selection(
    node: ir.Node, operands: Sequence[AlignedTensor], viewer: Viewer
) -> tuple[Term, ...]:
    """Case 3: the bias and the selection that a Where of these operands is; empty where no operand
    is the number of a mask."""
    condition, one, other = operands
    for bias, number, keep in ((one, other, True), (other, one, False)):
        fill = viewer.info.scalar(number.value)
        if (
            fill is not None
            and fill <= DOMINATING
            and viewer.info.dtype(bias.value) == ir.DataType.FLOAT
        ):
            return Add(node, bias), Select(node, condition, keep, fill)
    return ()


def _before_moves(term: Add[AlignedTensor], viewer: Viewer) -> AlignedTensor:
    """The tensor that operators only move to make an addend."""
    tensor = term.operand
    while (source := _before_move(tensor, term.node, viewer)) is not None:
        tensor = source
    return tensor


def _before_move(tensor: AlignedTensor, node: ir.Node, viewer: Viewer) -> AlignedTensor | None:
    """The tensor that one operator or several only move; None where there is no such operator."""
    mover = tensor.value.producer()
    source = None if mover is None else input_of(mover, 0)
    if source is None:
        return None
    if keeps_everything(mover, viewer.info):  # as optimum cuts a mask to the keys
        return replace(tensor, value=source)
    if not is_op(mover, *LAYOUT_OPS, *REPEATS):
        return None
    view = aligned(tensor, viewer, node)
    if view.base is tensor.value:
        return None
    return replace(tensor, value=view.base, dims=view.base_dims)
