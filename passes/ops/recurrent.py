"""Recurrent layers, whose states attention reads in sequence models."""

from __future__ import annotations

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import (
    Context,
    Fact,
    rule,
    shape_of_rank,
)


@rule("LSTM", "GRU", "RNN")
def _recurrent(ctx: Context) -> list[Fact]:
    """The outputs: all hidden states, the last hidden states and the last cell states. With
    `layout` 1 the batch comes first."""
    shape, dtype, states = ctx.shape(0, rank=3), ctx.dtype(0), ctx.shape(2)
    if shape is None:
        return [Fact(None, dtype)] * len(ctx.node.outputs)
    directions = Dim(1 + (ctx.attr("direction") == "bidirectional"))
    hidden = shape_of_rank(3, states)[2]
    if ctx.int_attr("layout", 0) == 1:
        batch, length, _ = shape
        every, last = (batch, length, directions, hidden), (batch, directions, hidden)
    else:
        length, batch, _ = shape
        every, last = (length, directions, batch, hidden), (directions, batch, hidden)
    return [Fact(every, dtype), Fact(last, dtype), Fact(last, dtype)][: len(ctx.node.outputs)]
