"""Keys and values to which a Concat appends new rows: a past, and as many new ones as there are queries.

    grown := Concat(past, new; axis 2)     [B, N, P, D] and [B, N, S, D], where the query has S rows

Attention takes the two apart, as past_key and key. Its causal mask then ends at the last key, which it cannot say of
keys in one piece. It gives them in one piece as present_key, which whoever reads the Concat reads then. Only where an
input of the operator depends on the Concat (such as a bias on the number of keys) the Concat stays, too.

Refused: other orders of the dimensions; another number of new rows than of queries; operands of another type than the
attention is computed in; heads that are repeated behind the Concat where the operator takes none but equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.ir.nodes import int_attr, is_op
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.values.shapes import ShapeInfo

RANK, ROWS = 4, 2
"""The rank of a key, and its dimension of rows."""


@dataclass(frozen=True)
class Grown:
    """Keys or values, `whole`, that a Concat makes of those before and the new ones."""

    whole: ir.Value
    past: ir.Value
    new: ir.Value


def grown_operands(match: AttentionMatch, info: ShapeInfo) -> tuple[Grown, Grown] | None:
    """Key and value where both have grown; None otherwise."""
    roles = match.roles
    outer = roles.batch, roles.kv_heads, roles.kv_seq
    key = _grown(match, match.key, (*outer, roles.head_dim), info)
    value = _grown(match, match.value, (*outer, roles.value_head_dim), info)
    return None if key is None or value is None or key.whole is value.whole else (key, value)


def _grown(match: AttentionMatch, view: View, wanted: Arrangement, info: ShapeInfo) -> Grown | None:
    space, concat, shape = match.space, view.base.producer(), info.shape(view.base)
    if concat is None or not is_op(concat, "Concat") or shape is None or len(shape) != RANK:
        return None
    if int_attr(concat, "axis", 0) % RANK != ROWS or len(concat.inputs) != 2 or concat.graph is not match.node.graph:
        return None
    past, new = concat.inputs
    if past is None or new is None or space.resolve_all(view.base_dims) != wanted:
        return None
    rows = info.shape(new)
    alike = info.dtype(view.base) == info.dtype(past) == info.dtype(new) == match.dtype
    if not alike or rows is None or len(rows) != RANK or rows[ROWS] != space.size(match.roles.q_seq):
        return None
    return Grown(view.base, past, new)
