"""FlashAttentionScoreGrad: the gradients of attention_out with respect to query, key, value, rope
inputs and sink.

P is recomputed from softmax_max and softmax_sum. Scores are limited to softmax_max, so P never
exceeds 1 / softmax_sum, even if the statistics are rounded. If softmax_max is the largest score of
its row rounded to float32, that score is used instead. With dO = dy, O = attention_in and the
dropout factors F:

    dV = (P F)^T dO;  dP = (dO V^T) F;  dS = P (dP - rowsum(dO O));  dQ = scale dS K;  dK = scale dS^T Q
    with cpu_softcap c: dQ = scale (dS (1 - tanh(x / c)^2)) K with x = scale A, and dK likewise
    dsink = -sum over rows of p_sink * rowsum(P dP),  p_sink = exp(sink - max) / sum

dK and dV are sums over the query heads of a group. There is no gradient of the bias: dpse is zeros.

Rows that the attribute cpu_nan_rows made 0 in the forward pass contribute to no gradient. A row
that attends no key contributes to dV only, with the P that cpu_empty_rows gave it: 0 for "" and
"zero", 1 / S2 for "mean", NaN for "nan". With the attribute cpu_mask_value, a masked key has that
score and a P, with cpu_masked_bias that number plus its bias. It contributes to dV, but not to dQ
and dK.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.attention import Attention
from fa_compiler.reference.call import Bools, Floats, OpCall, Output, operator
from fa_compiler.reference.layouts import Side
from fa_compiler.reference.softmax import weighted_sum
from fa_compiler.reference.statistics import check_order, unpack, unrounded


@operator("FlashAttentionScoreGrad")
def flash_attention_score_grad(call: OpCall) -> dict[str, Output]:
    """dq, dk, dv, dpse (zeros), dq_rope, dk_rope, dsink; the gradient of an absent input is empty,
    [0]."""
    attention = Attention(call, pse_name="pse_shift")
    q_side, kv_side = attention.query_side, attention.key_side
    order = check_order(call, "softmax_in_layout")
    row_max = unpack(call, "softmax_max", q_side, order)
    row_sum = unpack(call, "softmax_sum", q_side, order)
    d_out = _like_output(call, attention, "dy")
    out = _like_output(call, attention, "attention_in")
    d_query = [np.zeros_like(part) for part in attention.query]
    d_key = [np.zeros_like(part) for part in attention.key]
    d_value = [np.zeros_like(part) for part in attention.value]
    d_sink = np.zeros(q_side.heads)
    biased = call.attrs.get("cpu_masked_bias") == "added"
    for batch, head, kv_head in attention.heads():
        query, key, value = (
            attention.query[batch][head],
            attention.key[batch][kv_head],
            attention.value[batch][kv_head],
        )
        d_o = d_out[batch][head]
        allowed = attention.allowed(batch, head)
        counted = np.ones_like(allowed) if biased or np.isfinite(attention.mask_value) else allowed
        masked = attention.masked_scores(batch, head) if biased else attention.mask_value
        top, total = row_max[batch][head][:, None], row_sum[batch][head][:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            # A row that attends no key has the statistics of an empty row, with which P is 0.
            scores = np.where(allowed, attention.scores(batch, head, kv_head), masked)
            p = np.where(counted, np.exp(_below(scores, counted, top)) / total, 0.0)
            p[_silenced(call, row_max[batch][head], row_sum[batch][head])] = 0.0
            kept = attention.dropout.factors(batch, head)
            factors = 1.0 if kept is None else kept
            d_p = np.where(counted, (d_o @ value.T) * factors, 0.0)
            row_dot = np.sum(d_o * out[batch][head], axis=1, keepdims=True)
            slopes = attention.slopes_of_scores(batch, head, kv_head)
            d_s = np.where(allowed, p * (d_p - row_dot) * slopes, 0.0)
        weights, read = _with_empty_rows(call, p, counted)
        d_value[batch][kv_head] += weighted_sum((weights * factors).T, d_o, read.T)
        d_query[batch][head] = attention.scale * weighted_sum(d_s, key, allowed)
        d_key[batch][kv_head] += attention.scale * weighted_sum(d_s.T, query, allowed.T)
        if attention.sink is not None:
            p_sink = np.exp(attention.sink[head] - top) / total
            d_sink[head] -= np.sum(p_sink * np.sum(p * d_p, axis=1, keepdims=True))
    dtype = call.tensor("query").dtype
    d_query_main, d_query_rope = _apart(attention, q_side, d_query)
    d_key_main, d_key_rope = _apart(attention, kv_side, d_key)
    pse = call.optional("pse_shift")
    d_pse = np.zeros(0 if pse is None else pse.shape)
    if attention.sink is None:
        d_sink = np.zeros(0)
    return {
        "dq": Output(d_query_main, dtype),
        "dk": Output(d_key_main, dtype),
        "dv": Output(kv_side.join(d_value, attention.value_width), dtype),
        "dpse": Output(d_pse, dtype),
        "dq_rope": Output(d_query_rope, dtype),
        "dk_rope": Output(d_key_rope, dtype),
        "dsink": Output(d_sink, np.dtype(np.float32)),
    }


def _below(scores: Floats, counted: Bools, top: Floats) -> Floats:
    """scores [S1,S2] minus softmax_max [S1,1], at most 0."""
    own = np.where(counted, scores, -np.inf).max(axis=1, keepdims=True)
    return np.minimum(scores - unrounded(top, own), 0.0)


def _silenced(call: OpCall, row_max: Floats, row_sum: Floats) -> Bools:
    """The rows [S1] that cpu_nan_rows made 0."""
    value = str(call.attrs.get("cpu_nan_rows", ""))
    if value == "":
        return np.zeros(row_sum.shape, dtype=np.bool_)
    return np.isnan(row_sum) if value == "zero" else row_max == -np.inf


def _with_empty_rows(call: OpCall, p: Floats, allowed: Bools) -> tuple[Floats, Bools]:
    """P and the read keys [S1,S2], with those of rows without a key."""
    value = str(call.attrs.get("cpu_empty_rows", ""))
    probability = {"mean": 1.0 / allowed.shape[1], "nan": np.nan}.get(value, 0.0)
    empty = np.logical_not(allowed.any(axis=1))[:, None]
    read = (allowed | empty) if value in ("mean", "nan") else allowed
    return np.where(empty, probability, p), read


def _like_output(call: OpCall, attention: Attention, name: str) -> list[Floats]:
    """dy or attention_in of each batch entry: they have the query's layout and the value's head
    size."""
    return attention.query_side.split(call.tensor(name), attention.query_side.width(call, name))


def _apart(attention: Attention, side: Side, parts: list[Floats]) -> tuple[Floats, Floats]:
    """The gradients of the plain part and of the rope part. The latter is [0] without rope
    inputs."""
    width, rope_width = attention.width, attention.rope_width
    plain = side.join([part[..., :width] for part in parts], width)
    if attention.call.optional("query_rope") is None:
        return plain, np.zeros(0)
    return plain, side.join([part[..., width:] for part in parts], rope_width)
