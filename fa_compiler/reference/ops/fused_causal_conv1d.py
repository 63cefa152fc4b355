"""FusedCausalConv1d: the convolution with the tokens before, x added to it, and the tokens left in
conv_states.

With prefix caching, a sequence reads the line of the block initial_state_idx, writes that of the
block block_idx_last_scheduled_token, and the lines of the blocks from
block_idx_first_scheduled_token on get the tokens before the end of each block that it fills.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.causal_conv1d import convolved, line_of, sequences


@operator("FusedCausalConv1d")
def fused_causal_conv1d(call: OpCall) -> dict[str, Output]:
    """conv_states [lines,length,dim] after the call, and y of the shape of x."""
    x, given = call.tensor("x"), call.tensor("conv_states")
    weight = call.tensor("weight").astype(np.float64)
    rows = x.astype(np.float64).reshape(-1, x.shape[-1])
    before, states = given.astype(np.float64), given.astype(np.float64)
    y, length, width = np.zeros_like(rows), given.shape[1], len(weight)
    computed, accepted = call.optional("num_computed_tokens"), call.optional("num_accepted_tokens")
    for sequence, where in enumerate(sequences(x, call.optional("query_start_loc"))):
        lines = _lines(call, sequence)
        if lines is None:
            continue
        read, write = lines
        offset = length - (width - 1) if accepted is None else int(accepted[sequence]) - 1
        history = before[read, : offset + width - 1]
        if computed is not None and computed[sequence] == 0:
            history, offset = np.zeros_like(history[: width - 1]), 0
        whole = np.concatenate([history, rows[where]])
        kept = whole[-length:]
        states[write, length - len(kept) :] = kept
        padded = whole[offset:]
        _keep_blocks(call, sequence, padded, states)
        y[where] = convolved(padded, weight)
        if call.attrs["conv_mode"] == 1 and computed is not None:
            y[where][: max(width - 1 - int(computed[sequence]), 0)] = 0.0
        if call.attrs["residual_connection"]:
            y[where] += rows[where]
    return {"conv_states": Output(states, given.dtype), "y": Output(y.reshape(x.shape), x.dtype)}


def _lines(call: OpCall, sequence: int) -> tuple[int, int] | None:
    """The lines of conv_states that a sequence reads and writes, None if it is skipped."""
    skipped, last = call.attrs["pad_slot_id"], call.optional("block_idx_last_scheduled_token")
    if last is None:
        line = line_of(call, sequence, skipped)
        return None if line is None else (line, line)
    lines = call.tensor("cache_indices")[sequence]
    write = int(lines[last[sequence]])
    return (
        None
        if write == skipped
        else (int(lines[call.tensor("initial_state_idx")[sequence]]), write)
    )


def _keep_blocks(call: OpCall, sequence: int, padded: Floats, states: Floats) -> None:
    """Leave the tokens before the end of each filled block in its line."""
    last = call.optional("block_idx_last_scheduled_token")
    if last is None:
        return
    first = int(call.tensor("block_idx_first_scheduled_token")[sequence])
    size, width = call.attrs["block_size"], len(call.tensor("weight"))
    tokens, count = len(padded) - (width - 1), int(last[sequence]) - first
    done = int(call.tensor("num_computed_tokens")[sequence]) % size
    beyond = (tokens - (size - done)) % size
    end = tokens - (beyond or size)
    for block in range(count):
        line = int(call.tensor("cache_indices")[sequence][first + block])
        start = end - (count - block - 1) * size
        if start < 0:
            raise call.error(
                "block_idx_first_scheduled_token", "leaves more blocks than the sequence fills"
            )
        if line != call.attrs["pad_slot_id"]:
            states[line, states.shape[1] - (width - 1) :] = padded[start : start + width - 1]
