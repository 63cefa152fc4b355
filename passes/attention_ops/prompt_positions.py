"""Positions that a GroupQueryAttention with rotary positions is given, and does not read.

Without a past ONNX Runtime takes a prompt, and reads only the first number of position_ids: row i
of every batch entry is turned by position_ids[0, 0] + i (rotary.py). The rewrites of transformers 5
(`ort_fusions="cpu"`) make a table of the cosines and sines of all tokens, and as position_ids they
number the tokens of the whole batch. Every batch entry is then turned by the positions of the first
one. Fusing does not change that, so it is a remark and no reason to decline.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.report import first_of
from fa_compiler.passes.attention_ops.rotary import COS, DOMAIN, POSITIONS, SIN
from fa_compiler.passes.ir.nodes import (
    certain,
    input_of,
    int_attr,
    is_weight,
    operands,
    reached,
    reads_shape,
    without_none,
)
from fa_compiler.passes.values.facts import Facts

PAST_KEY = 3


def unread_positions(graph: ir.Graph, facts: Facts) -> list[ir.Node]:
    """The nodes that read only the first of their positions, where the others are not proven to
    follow it."""
    return [
        node for node in graph if _reads_first_position(node) and not _follow_first(node, facts)
    ]


def note_on_positions(nodes: list[ir.Node]) -> str:
    """What the report says of them."""
    first = nodes[0]
    others = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
    positions = certain(input_of(first, POSITIONS))
    decisive = first_of(
        [repr(value.name) for value in _inputs_of_positions(first)] or [repr(positions.name)]
    )
    return (
        f"{label(first)}{others}: GroupQueryAttention without a past reads only the first number of its position_ids "
        f"({positions.name!r}), and turns all batch entries by the same angles. Where {decisive} differs between batch "
        "entries, as with left padding, queries and keys are turned by other positions than in the exported model, "
        "also the keys in present_key, which a later step reads. Fusing does not change that. Run only prompts of one "
        "length together, without padding, or export again without ort_fusions"
    )


def _reads_first_position(node: ir.Node) -> bool:
    if (
        node.op_type != "GroupQueryAttention"
        or node.domain != DOMAIN
        or int_attr(node, "do_rotary", 0) != 1
    ):
        return False
    return input_of(node, PAST_KEY) is None and input_of(node, POSITIONS) is not None


def _follow_first(node: ir.Node, facts: Facts) -> bool:
    """Are the positions at (b, i) proven to be the first one + i?"""
    given = input_of(node, POSITIONS)
    shape = facts.info.shape(given)
    if shape is None or len(shape) != 2:
        return False
    reader = facts.positions(shape)
    number = limited_attempt(node, lambda: reader.number(given, reader.identity_index))
    if not isinstance(number, Affine):
        return False
    by_entry, by_row = number.steps
    return by_row == 1 and (by_entry == 0 or shape[0].const == 1)


def _inputs_of_positions(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of the model whose numbers the angles are computed from."""
    starts = without_none(input_of(node, index) for index in (COS, SIN, POSITIONS))

    def further(value: ir.Value) -> tuple[ir.Value, ...]:
        made_by = value.producer()
        return () if made_by is None or reads_shape(made_by) else operands(made_by)

    return (
        value
        for value in reached(starts, further)
        if value.is_graph_input() and not is_weight(value)
    )
