"""CausalConv1d: a prompt, or a step of decoding, and the tokens that it leaves in conv_states.

A prompt writes its last tokens to the end of a line. A step writes the tokens behind the accepted
ones to its beginning. A skipped sequence gives 0 here; the operator does not write its rows.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.causal_conv1d import convolved, line_of, sequences


@operator("CausalConv1d")
def causal_conv1d(call: OpCall) -> dict[str, Output]:
    """conv_states [lines,length,dim] after the call, and y of the shape of x."""
    x, given = call.tensor("x"), call.tensor("conv_states")
    weight, bias = call.tensor("weight").astype(np.float64), call.optional("bias")
    rows = x.astype(np.float64).reshape(-1, x.shape[-1])
    before, states = given.astype(np.float64), given.astype(np.float64)
    y, accepted = np.zeros_like(rows), call.optional("num_accepted_tokens")
    modes = call.optional("initial_state_mode")
    is_step = accepted is not None or (x.ndim == 3 and x.shape[1] == 1)
    for sequence, where in enumerate(sequences(x, call.optional("query_start_loc"))):
        line = line_of(call, sequence, call.attrs["null_block_id"])
        if line is None or where.start == where.stop:
            continue
        offset = 0 if accepted is None else max(int(accepted[sequence]) - 1, 0)
        history = before[line, offset : offset + len(weight) - 1]
        if not is_step and (modes is None or not modes[sequence]):
            history = np.zeros_like(history)
        padded = np.concatenate([history, rows[where]])
        y[where] = _activated(
            convolved(padded, weight) + (0.0 if bias is None else bias.astype(np.float64)), call
        )
        if is_step:
            kept = padded[1 : 1 + states.shape[1]]
            states[line, : len(kept)] = kept
        else:
            kept = padded[-states.shape[1] :]
            states[line, states.shape[1] - len(kept) :] = kept
    return {"conv_states": Output(states, given.dtype), "y": Output(y.reshape(x.shape), x.dtype)}


def _activated(sums: Floats, call: OpCall) -> Floats:
    if call.attrs["activation_mode"] == "none":
        return sums
    with np.errstate(over="ignore", invalid="ignore"):
        result: Floats = sums / (1.0 + np.exp(-sums))
    return result
