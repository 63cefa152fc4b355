"""The step of the gated delta rule, with states [Dv,Dk] as CANN's operators have them.

    S' = S e^g diag(e^gk)
    S  = S' + beta (v - S' k) k^T
    o  = scale S q

The heads of query and key serve consecutive heads of value. Source: the golden functions and
documents of ChunkGatedDeltaRule and RecurrentGatedDeltaRule in CANN's ops-transformer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_compiler.reference.call import Array, Floats, OpCall


@dataclass(frozen=True)
class DeltaRule:
    """The packed tokens of a call in float64: query, key [T,Nv,Dk], value [T,Nv,Dv], beta [T,Nv],
    decay [T,Nv,Dk]."""

    query: Floats
    key: Floats
    value: Floats
    beta: Floats
    decay: Floats

    @staticmethod
    def of(call: OpCall) -> DeltaRule:
        """The tokens of a call, with the scale in query, and the heads of query and key
        repeated."""
        query, value = call.tensor("query"), call.tensor("value")
        group = value.shape[1] // query.shape[1]
        exponent = np.zeros((*value.shape[:2], query.shape[2]))
        if (g := call.optional("g")) is not None:
            exponent += g.astype(np.float64)[..., None]
        if (gk := call.optional("gk") if "gk" in call.inputs else None) is not None:
            exponent += gk.astype(np.float64)

        def repeated(tensor: Array) -> Floats:
            return np.repeat(tensor.astype(np.float64), group, axis=1)

        return DeltaRule(
            call.attrs["scale_value"] * repeated(query),
            repeated(call.tensor("key")),
            value.astype(np.float64),
            call.tensor("beta").astype(np.float64),
            _exponential(exponent),
        )

    def step(self, state: Floats, t: int) -> tuple[Floats, Floats]:
        """The states [Nv,Dv,Dk] after token t, and its output [Nv,Dv]."""
        key = self.key[t]
        with np.errstate(invalid="ignore", over="ignore"):
            state = state * self.decay[t][:, None]
            change = self.beta[t][:, None] * (self.value[t] - np.einsum("hvk,hk->hv", state, key))
            state = state + change[..., None] * key[:, None]
            return state, np.einsum("hvk,hk->hv", state, self.query[t])


def _exponential(exponent: Floats) -> Floats:
    with np.errstate(over="ignore"):
        result: Floats = np.exp(exponent)
    return result
