"""Attention masks that are inputs of the model, where the user vouches for it that masks hold only
0 and 1.

    mask = (1.0 - attention_mask[:, None, None, :].float()) * -10000.0      # as in BERT
    scores = scores + mask

    inverted mask := 1 - mask        0 and 1
                   | mask - 1        -1 and 0
    mask          := an input of the model, moved and cast or not, that is no index of any table:
                  token ids are one

Without the word binary-masks an inverted mask may hold any number: the mask is an input. `1 - ids`
of token ids, whose embeddings are looked up, is no inverted mask.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.ops.movers import MOVES, element_source

INDEXED: dict[str, tuple[int, ...]] = {
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "OneHot": (0,),
}
"""The operands of operators that are indices."""
TABLES = ("EmbedLayerNormalization",)
"""Operators of com.microsoft that read tables of embeddings. Their indices are their first two
operands."""


def inverted_mask(
    node: ir.Node, only: Callable[[ir.Value], float | None]
) -> frozenset[float] | None:
    """The numbers of an inverted mask; None for other nodes. `only` gives the one number that a
    tensor holds in every run."""
    if not is_op(node, "Sub") or None in node.inputs:
        return None
    first, second = node.inputs
    assert first is not None and second is not None
    if only(first) == 1.0 and _is_given_mask(second):
        return frozenset((0.0, 1.0))
    if only(second) == 1.0 and _is_given_mask(first):
        return frozenset((-1.0, 0.0))
    return None


def _is_given_mask(value: ir.Value) -> bool:
    """Is the tensor a mask in the sense of the grammar?"""
    source = element_source(value, "Cast")
    return source.is_graph_input() and not _is_index(source)


def _is_index(source: ir.Value) -> bool:
    """Does an operator take the elements of a tensor for indices, perhaps after they are moved or
    cast?"""
    pending, seen = [source], {source}
    while pending:
        current = pending.pop()
        for node, place in current.uses():
            if place in INDEXED.get(node.op_type, ()) or (node.op_type in TABLES and place < 2):
                return True
            if place == 0 and is_op(node, *MOVES, "Cast") and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return False
