"""Two rotations by the same tables become one: ApplyRotaryPosEmb rotates the query and the key of
an attention.

Grammar; the code cites the numbers of the cases:

    pair :=
      1     RotaryPositionEmbedding(q, cos, sin), RotaryPositionEmbedding(k, cos, sin)
                                                mode 0 (half)
    q, k :=
      2     [B, S, Nq, D] and [B, S, Nk, D]     of equal B, S and D; D is known
    cos, sin :=
      3     [B, S, 1, D]                        on 950 also [1, S, 1, D]

Neither rotation is computed from the other. The operator works in place, so it is all that reads q
and k, and nothing else reads the tensors whose memory q and k are. What is computed is the same,
operation by operation. The order of the graph tells which rotations are a pair: two that follow
each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN
from fa_compiler.op_registry.products import product
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.around.records import HALF
from fa_compiler.passes.ir.nodes import int_attr, is_op, only_reader, operand_at, operands
from fa_compiler.passes.ir.surgery import depends
from fa_compiler.passes.values.shapes import ShapeInfo

ALONE = "RotaryPositionEmbedding"
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Split")
"""The operators whose results may be the memory of their operand, or a part of it."""
BROADCASTS = ("950",)
"""The products on which cos and sin may have a batch of 1."""


@dataclass(frozen=True)
class Pair:
    """Two rotations that the operator computes at once: of the query, and of the key."""

    query: ir.Node
    key: ir.Node


def pairs(graph: ir.Graph, info: ShapeInfo, options: Options) -> Iterator[Pair]:
    """The pairs in a sorted graph, which share no rotation. The caller may replace a pair as soon
    as it is yielded."""
    rotations = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, ALONE)]
    taken: set[ir.Node] = set()
    for first, second in pairwise(rotations):
        if first in taken or not _are_pair(first, second, info, options):
            continue
        taken.add(second)
        query, key = sorted((first, second), key=lambda node: -_heads(node, info))
        yield Pair(query, key)


def _heads(node: ir.Node, info: ShapeInfo) -> int:
    return info.sizes(operand_at(node, 0))[2].const or 0


def _are_pair(first: ir.Node, second: ir.Node, info: ShapeInfo, options: Options) -> bool:
    """Does one operator compute both rotations?"""
    same = operands(first)[1:] == operands(second)[1:]
    half = all(int_attr(node, "mode", HALF) == HALF for node in (first, second))
    if not same or not half or not _fit(first, second, info, options):  # 1
        return False
    if not all(_is_own(operand_at(node, 0)) for node in (first, second)):
        return False
    return not depends(operand_at(second, 0), first)


def _fit(first: ir.Node, second: ir.Node, info: ShapeInfo, options: Options) -> bool:
    """Cases 2 and 3."""
    x, cos, sin = (info.sizes(operand_at(first, place)) for place in range(3))
    other = info.sizes(operand_at(second, 0))
    if cos != sin or {len(x), len(other), len(cos)} != {4}:
        return False
    batch, tokens, _, width = x
    broadcasts = product(options.ascend_product).name in BROADCASTS and cos[0] == 1
    fits = (cos[0] == batch or broadcasts) and (cos[1], cos[3]) == (tokens, width) and cos[2] == 1
    return (
        fits
        and width.const is not None
        and (other[0], other[1], other[3]) == (batch, tokens, width)
    )


def _is_own(value: ir.Value) -> bool:
    """Is a value read by one node alone, and is its memory its own?"""
    while only_reader(value) is not None:
        node = value.producer()
        if not is_op(node, *VIEWS):
            return True
        value = operand_at(node, 0)
    return False
