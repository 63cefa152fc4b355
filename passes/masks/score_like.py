"""Addends that are as large as scores: products of activations, such as those of queries and
relative positions.

    relative = query @ position_embeddings.T                      # as in Transformer-XL
    relative = torch.nn.functional.pad(relative, (1, 0)).reshape(batch, heads, keys + 1, rows)
    scores = query @ key.T + relative[:, :, 1:].reshape(batch, heads, rows, keys)

    score-like := product                          no operand is known to hold numbers beyond 1e15
                | layout(score-like) | Slice | Gather | Pad with 0
                | score-like * c | score-like / c      the factor, c or 1 / c, is at most 1e15
                | Add, Sub or Concat                   of score-like tensors and zeros

The number of a mask, at most -1e30, is taken to outweigh every score (mask.py), and so every
score-like addend.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant, inner_values, inputs_of, is_op, without_none
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.ops.cuts import filler_of
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import MOVES, element_source
from fa_compiler.passes.values.bounds import Bounds

MAX_SCORE_OPERAND = 1e15
MAX_STEPS = 64


def is_score_like(value: ir.Value, viewer: Viewer) -> bool:
    """Does a value follow the grammar above?"""
    pending, steps = [value], 0
    while pending:
        current, steps = pending.pop(), steps + 1
        node = current.producer()
        if node is None or steps > MAX_STEPS:
            return False
        product = contraction(node, viewer.info)
        if product is not None:
            if not all(_is_moderate(operand, viewer) for operand in product.operands):
                return False
            continue
        made_of = _made_of(node, viewer)
        if made_of is None:
            return False
        pending.extend(made_of)
    return True


def _is_moderate(operand: ir.Value, viewer: Viewer) -> bool:
    """May the operand of a product be one of scores? A constant, or one that may hold large
    numbers, needs a bound."""
    bounds = viewer.facts.bounds
    interval = bounds.unless_nan(operand)
    if interval is None:
        return constant(operand) is None and not holds_large(operand, bounds)
    return max(map(abs, interval)) <= MAX_SCORE_OPERAND


def _made_of(node: ir.Node, viewer: Viewer) -> list[ir.Value] | None:
    """The operands that have to be like scores for the result of a node to be; None for other
    nodes."""
    scaled = viewer.factor(node)
    if scaled is not None and abs(scaled[1]) <= MAX_SCORE_OPERAND:
        return [scaled[0]]
    if is_op(node, *MOVES) or (is_op(node, "Pad") and filler_of(node, viewer.info) == 0.0):
        return without_none(node.inputs[:1])
    if not is_op(node, "Concat", "Add", "Sub"):
        return None
    zero = frozenset((0.0,))
    return [value for value in inputs_of(node) if viewer.facts.sets.of(value) != zero] or None


def holds_large(value: ir.Value, bounds: Bounds) -> bool:
    """Is a number beyond 1e15, such as the number of a mask, combined into the value? The results
    of a loop may hold such numbers."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = element_source(pending.pop(), "Cast")
        if current in seen:
            continue
        seen.add(current)
        interval, inner, node = (
            bounds.unless_nan(current),
            inner_values(current),
            current.producer(),
        )
        if interval is not None:
            if max(map(abs, interval)) > MAX_SCORE_OPERAND:
                return True
        elif inner is not None:
            if not inner:
                return True
            pending.extend(inner)
        elif is_op(node, *FOUR_OPERATIONS, "Where"):
            pending.extend(inputs_of(node))
    return False
