"""Keys and values to which a Concat appends new rows: a past, and as many new ones as there are
queries.

    key = torch.cat([past_key, key], dim=2)
    value = torch.cat([past_value, value], dim=2)

    grown := Concat(past, new; axis 2)     [B, N, P, D] and [B, N, S, D], where the query has S rows

Attention takes the two apart, as past_key and key. Its causal mask then ends at the last key, which
it cannot say of keys in one piece. It gives them in one piece as present_key, which whoever reads
the Concat reads then. Only where an input of the operator depends on the Concat (such as a bias on
the number of keys) the Concat stays, too.

Refused: other orders of the dimensions; another number of new rows than of queries; operands of
another type than the attention is computed in; heads that are repeated behind the Concat where the
operator takes none but equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.values.shapes import ShapeInfo

RANK, ROWS = 4, 2
"""The rank of a key, and its dimension of rows."""


@dataclass(frozen=True)
class Grown:
    """Keys or values, `whole`, that a Concat makes of those before and the new ones."""

    whole: ir.Value
    past: ir.Value
    new: ir.Value


def grown_operands(match: AttentionMatch, info: ShapeInfo) -> tuple[Grown, ...]:
    """Key and value where both have grown; empty otherwise."""
    roles = match.roles
    outer = roles.batch, roles.kv_heads, roles.kv_seq
    key = _grown(match, match.key, (*outer, roles.head_dim), info)
    value = _grown(match, match.value, (*outer, roles.value_head_dim), info)
    if key is None or value is None or key.whole is value.whole:
        return ()
    return key, value


def _grown(match: AttentionMatch, view: View, wanted: Arrangement, info: ShapeInfo) -> Grown | None:
    """The past and the new rows of a view's base; None where no Concat has made it of these."""
    joined, space = concat_of(view.base.producer(), info), match.space
    if joined is None or len(joined.parts) != 2 or joined.node.graph is not match.node.graph:
        return None
    past, new = joined.parts
    shape, rows = info.sizes(view.base), info.sizes(new)
    if len(shape) != RANK or len(rows) != RANK or joined.axis != ROWS:
        return None
    if space.resolve_all(view.base_dims) != wanted or rows[ROWS] != space.size(match.roles.q_seq):
        return None
    if {info.dtype(view.base), info.dtype(past), info.dtype(new)} != {match.dtype}:
        return None
    return Grown(view.base, past, new)
