"""RingAttentionUpdate: merges two attention results over different keys.

    m = max(m1, m2);  l = l1 e^(m1-m) + l2 e^(m2-m);  O = O1 (l1 e^(m1-m) / l) + O2 (l2 e^(m2-m)
                                                      / l)

In SBH the results are [S,B,N*D] and the statistics [B,N,S,8]. In TND the results are [T,N,D] and
the statistics are declared as [T,N,8]; in memory they are one block [N,S_b,8] for each sequence or,
if input_softmax_layout is "TND", [T,N,8]. actual_seq_qlen begins with 0. Rows that belong to no
sequence are 0.
"""

from __future__ import annotations

import itertools

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.layouts import Side
from fa_compiler.reference.statistics import pack, unpack


@operator("RingAttentionUpdate")
def ring_attention_update(call: OpCall) -> dict[str, Output]:
    """attn_out in the shape and type of prev_attn_out; softmax_max and softmax_sum in float32, in
    the inputs' order."""
    result = call.tensor("prev_attn_out")
    side = _side(call)
    width = side.width(call, "prev_attn_out")
    true_order = side.layout == "TND" and call.attrs["input_softmax_layout"] == "TND"
    parts: list[list[Floats]] = []
    for part in ("prev", "cur"):
        parts.append(side.split(call.tensor(f"{part}_attn_out"), width))
        for kind in ("max", "sum"):
            name = f"{part}_softmax_{kind}"
            parts.append(
                _in_true_order(call, name, side) if true_order else unpack(call, name, side, "")
            )
    outs, maxima, sums = [], [], []
    for out1, max1, sum1, out2, max2, sum2 in zip(*parts, strict=True):
        top = np.maximum(max1, max2)
        share1, share2 = sum1 * np.exp(max1 - top), sum2 * np.exp(max2 - top)
        total = share1 + share2
        outs.append(out1 * (share1 / total)[..., None] + out2 * (share2 / total)[..., None])
        maxima.append(top)
        sums.append(total)
    order = "same_as_input" if true_order else ""
    statistic = np.dtype(np.float32)
    return {
        "attn_out": Output(side.join(outs, width), result.dtype),
        "softmax_max": Output(pack(maxima, side, order), statistic),
        "softmax_sum": Output(pack(sums, side, order), statistic),
    }


def _side(call: OpCall) -> Side:
    layout, shape = str(call.attrs["input_layout"]), call.tensor("prev_attn_out").shape
    if layout == "SBH":
        heads = call.tensor("prev_softmax_max").shape[1]
        return Side(layout, heads, (shape[0],) * shape[1], shape[0])
    ends = [int(end) for end in call.tensor("actual_seq_qlen").reshape(-1)]
    return Side(layout, shape[1], tuple(b - a for a, b in itertools.pairwise(ends)), shape[0])


def _in_true_order(call: OpCall, name: str, side: Side) -> list[Floats]:
    data = call.tensor(name)[..., 0].astype(np.float64)
    return [
        data[start : start + count].T
        for start, count in zip(side.starts, side.lengths, strict=True)
    ]
