"""RecurrentGatedDeltaRule: the steps of `delta_rule.py`, with the state of each token in a block of
its own.

Sequences are computed in order, which only matters if they name one block.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.delta_rule import DeltaRule


@operator("RecurrentGatedDeltaRule")
def recurrent_gated_delta_rule(call: OpCall) -> dict[str, Output]:
    """out [T,Nv,Dv] in the type of query, and state [blocks,Nv,Dv,Dk] after all tokens."""
    given, query, value = call.tensor("state"), call.tensor("query"), call.tensor("value")
    indices, accepted = call.tensor("ssm_state_indices"), call.optional("num_accepted_tokens")
    rule = DeltaRule.of(call)
    out, blocks, first = np.zeros(value.shape), given.astype(np.float64), 0
    for sequence, length in enumerate(call.tensor("actual_seq_lengths")):
        start = first if accepted is None else first + int(accepted[sequence]) - 1
        state = blocks[indices[start]]
        for t in range(first, first + int(length)):
            state, out[t] = rule.step(state, t)
            blocks[indices[t]] = state
        first += int(length)
    return {"out": Output(out, query.dtype), "state": Output(blocks, given.dtype)}
