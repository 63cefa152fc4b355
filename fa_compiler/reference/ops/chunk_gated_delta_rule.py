"""ChunkGatedDeltaRule: the steps of `delta_rule.py` one by one, which chunks only compute in
another order."""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.delta_rule import DeltaRule


@operator("ChunkGatedDeltaRule")
def chunk_gated_delta_rule(call: OpCall) -> dict[str, Output]:
    """out [T,Nv,Dv] in the type of query, final_state [B,Nv,Dv,Dk] in the type of initial_state."""
    given, query, value = call.tensor("initial_state"), call.tensor("query"), call.tensor("value")
    rule = DeltaRule.of(call)
    out, states, first = np.zeros(value.shape), given.astype(np.float64), 0
    for sequence, length in enumerate(call.tensor("actual_seq_lengths")):
        for t in range(first, first + int(length)):
            states[sequence], out[t] = rule.step(states[sequence], t)
        first += int(length)
    return {"out": Output(out, query.dtype), "final_state": Output(states, given.dtype)}
