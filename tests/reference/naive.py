"""Attention by loops over scalars, and small helpers: what the tests compare the reference with.

Nothing here shares code with fa_compiler.reference; all tensors are [B,N,S,D] and every rule is a Python
function.
"""

import math
from collections.abc import Callable

import numpy as np

from fa_compiler import reference

FLT_MAX = 3.4028234663852886e38

# float64 arithmetic in another order: a few dozen additions of numbers around 1.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

Rule = Callable[[int, int, int, int], bool]
Number = Callable[[int, int, int, int], float]


def attention(
    q,
    k,
    v,
    scale: float = 1.0,
    allowed: Rule = lambda b, n, i, j: True,
    bias: Number = lambda b, n, i, j: 0.0,
    before_scale: bool = False,
    sink=None,
    keep: Number = lambda b, n, i, j: 1.0,
):
    """out [B,N1,S1,Dv], max [B,N1,S1], sum [B,N1,S1]; `keep` is the dropout factor."""
    batches, heads, rows, width = q.shape
    group = heads // k.shape[1]
    columns, value_width = v.shape[2:]
    out = np.zeros((batches, heads, rows, value_width))
    row_max, row_sum = np.zeros((batches, heads, rows)), np.zeros((batches, heads, rows))
    for b in range(batches):
        for n in range(heads):
            for i in range(rows):
                scores = {}
                for j in range(columns):
                    if allowed(b, n, i, j):
                        dot = sum(float(q[b, n, i, d]) * float(k[b, n // group, j, d]) for d in range(width))
                        pse = bias(b, n, i, j)
                        scores[j] = scale * (dot + pse) if before_scale else scale * dot + pse
                if not scores:
                    row_max[b, n, i] = -FLT_MAX if sink is None else sink[n]
                    row_sum[b, n, i] = FLT_MAX if sink is None else 1.0
                    continue
                top = max([*scores.values(), *([] if sink is None else [float(sink[n])])])
                total = sum(math.exp(s - top) for s in scores.values())
                total += 0.0 if sink is None else math.exp(float(sink[n]) - top)
                row_max[b, n, i], row_sum[b, n, i] = top, total
                for j, s in scores.items():
                    weight = math.exp(s - top) / total * keep(b, n, i, j)
                    for d in range(value_width):
                        out[b, n, i, d] += weight * float(v[b, n // group, j, d])
    return out, row_max, row_sum


def to_layout(bnsd, layout: str):
    """A [B,N,S,D] array in another layout; TND packs the batches back to back, all of full length."""
    b, n, s, d = bnsd.shape
    bsnd = np.moveaxis(bnsd, 1, 2)
    return {
        "BNSD": lambda: bnsd,
        "BSND": lambda: bsnd,
        "BSH": lambda: bsnd.reshape(b, s, n * d),
        "SBH": lambda: np.moveaxis(bsnd, 0, 1).reshape(s, b, n * d),
        "TND": lambda: bsnd.reshape(b * s, n, d),
    }[layout]()


def cumulative(*lengths: int):
    """actual_seq_qlen / actual_seq_kvlen of these batch lengths."""
    return np.cumsum(np.array(lengths, dtype=np.int64))


def random(seed: int, *shape: int):
    """Float64 normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape)


def forward(inputs, outputs=None, dtype="float64", **attrs):
    """FlashAttentionScore by the reference, BNSD unless told."""
    attrs = {"input_layout": "BNSD", **attrs}
    if "head_num" not in attrs:
        attrs["head_num"] = inputs["query"].shape[1]
    return reference.run("FlashAttentionScore", inputs, attrs, outputs, dtype)


def out(inputs, **attrs):
    """attention_out in float64."""
    return forward(inputs, ["attention_out"], **attrs)["attention_out"]


def reads(rows: int, columns: int, inputs=None, batches: int = 1, heads: int = 1, **attrs):
    """The allowed set [B,N,S1,S2] as seen from outside: zero scores and one-hot values show the weights."""
    inputs = {
        "query": np.zeros((batches, heads, rows, 1)),
        "key": np.zeros((batches, heads, columns, 1)),
        "value": np.tile(np.eye(columns), (batches, heads, 1, 1)),
        **(inputs or {}),
    }
    return out(inputs, **attrs) > 0


def causal_constant():
    """The 2048x2048 mask of sparse_mode 2, 3, 4, 7 and 8."""
    return np.triu(np.ones((2048, 2048), dtype=np.uint8), 1)


def prefix_constant():
    """The 3072x2048 mask of sparse_mode 6."""
    lower = np.concatenate([np.zeros((1024, 1024), np.uint8), np.ones((1024, 1024), np.uint8)], axis=1)
    return np.concatenate([causal_constant(), lower])
