"""FlashLinearAttention: each token changes the state S of a head, and reads it. S is [Dk,Dv].

    S' = diag(e^g) S
    S  = S' + k v^T                            rules linear and gated
    S  = S' + k (beta (v - S'^T k))^T          rules delta and gated_delta
    S  = S' + k v^T + p (r^T S')               rule general
    S  = S' + k v^T + p (r^T S)                rule dplr
    o  = scale S^T q

g is decay, p low_rank_write and r low_rank_read. A scale of 0 is Dk^-0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fa_compiler.reference.call import Array, Floats, OpCall, Output, operator


@operator("FlashLinearAttention")
def flash_linear_attention(call: OpCall) -> dict[str, Output]:
    """output [B,T,H*Dv] in the type of query, present_state [N,Hv,Dk,Dv] in the type of
    past_state."""
    query, value, past = call.tensor("query"), call.tensor("value"), call.optional("past_state")
    q_heads, heads = call.attrs["q_num_heads"], call.attrs["kv_num_heads"]
    batch, tokens = query.shape[:2]
    size, width = query.shape[2] // q_heads, value.shape[2] // heads
    out_heads = max(q_heads, heads)
    limits = call.optional("cu_seqlens")
    # The sequences: their entry of the batch, their first token and the one behind the last.
    sequences = [(entry, 0, tokens) for entry in range(batch)]
    if limits is not None:
        sequences = [(0, int(first), int(end)) for first, end in pairwise(limits)]
    output = np.zeros((batch, tokens, out_heads, width))
    present = np.zeros((len(sequences), heads, size, width))
    rows = _Rows.of(call, size)
    for entry, (b, first, end) in enumerate(sequences):
        state = np.zeros(present.shape[1:]) if past is None else past[entry].astype(np.float64)
        for t in range(first, end):
            with np.errstate(invalid="ignore", over="ignore"):
                state = rows.step(state, b, t)
            read = np.repeat(state, out_heads // heads, axis=0)
            output[b, t] = np.einsum(
                "hd,hdv->hv", np.repeat(rows.query[b, t], out_heads // q_heads, axis=0), read
            )
        present[entry] = state
    output *= call.attrs["scale"] or size**-0.5
    return {
        "output": Output(output.reshape(batch, tokens, out_heads * width), query.dtype),
        "present_state": Output(present, query.dtype if past is None else past.dtype),
    }


@dataclass(frozen=True)
class _Rows:
    """The inputs in float64 as [B,T,heads,width], with one head for each state, and query with its
    own heads."""

    query: Floats
    key: Floats
    value: Floats
    decay: Floats | None
    beta: Floats | None
    write: Floats | None
    read: Floats | None
    reads_before_decay: bool

    @staticmethod
    def of(call: OpCall, size: int) -> _Rows:
        heads = call.attrs["kv_num_heads"]
        key = call.tensor("key")
        key_heads = key.shape[2] // size if size else heads
        beta = call.optional("beta")

        def split(name: str) -> Floats | None:
            given = call.optional(name)
            return None if given is None else _split(given, heads)

        return _Rows(
            _split(call.tensor("query"), call.attrs["q_num_heads"]),
            np.repeat(_split(key, key_heads), heads // key_heads, axis=2),
            _split(call.tensor("value"), heads),
            split("decay"),
            None if beta is None else beta.astype(np.float64)[..., None],
            split("low_rank_write"),
            split("low_rank_read"),
            call.attrs["update_rule"] == "dplr",
        )

    def step(self, state: Floats, b: int, t: int) -> Floats:
        """The states [heads,Dk,Dv] after token t of entry b."""
        key, value, before = self.key[b, t], self.value[b, t], state
        if self.decay is not None:
            state = state * np.exp(self.decay[b, t])[..., None]
        added = value
        if self.beta is not None:
            added = self.beta[b, t] * (value - np.einsum("hdv,hd->hv", state, key))
        after: Floats = state + key[..., None] * added[:, None]
        if self.write is not None and self.read is not None:
            source = before if self.reads_before_decay else state
            after += (
                self.write[b, t][..., None]
                * np.einsum("hdv,hd->hv", source, self.read[b, t])[:, None]
            )
        return after


def _split(tensor: Array, heads: int) -> Floats:
    """[B,T,heads*width] in float64 as [B,T,heads,width]."""
    return tensor.astype(np.float64).reshape(*tensor.shape[:2], heads, tensor.shape[2] // heads)
