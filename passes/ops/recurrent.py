"""Recurrent layers, whose states attention reads in sequence models."""

from __future__ import annotations

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import Context, Fact, rule


@rule("LSTM", "GRU", "RNN")
def _recurrent(ctx: Context) -> list[Fact]:
    """The outputs: all hidden states, the last hidden states and the last cell states. With `layout` 1 the batch comes
    first."""
    shape, dtype, states = ctx.shape(0), ctx.dtype(0), ctx.shape(2)
    if shape is None or len(shape) != 3:
        return [Fact(None, dtype)] * len(ctx.node.outputs)
    batch_first = ctx.int_attr("layout", 0) == 1
    batch, length = (shape[0], shape[1]) if batch_first else (shape[1], shape[0])
    directions = Dim(2 if ctx.attr("direction") == "bidirectional" else 1)
    hidden = Dim.fresh() if states is None or len(states) != 3 else states[2]
    if batch_first:
        every, last = (batch, length, directions, hidden), (batch, directions, hidden)
    else:
        every, last = (length, directions, batch, hidden), (directions, batch, hidden)
    return [Fact(every, dtype), Fact(last, dtype), Fact(last, dtype)][: len(ctx.node.outputs)]
