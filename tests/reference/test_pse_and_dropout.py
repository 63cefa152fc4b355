"""Position bias in every shape, dropout bits, and all features composed, against loops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .naive import EXACT, attention, causal_constant, cumulative, forward, out, random, to_layout


def keep_from_bits(mask, heads, s1, s2, keep_prob):
    """The dropout factor of (b,n,i,j) from the flat bit index, for batches of equal size."""

    def keep(b, n, i, j):
        index = ((b * heads + n) * s1 + i) * s2 + j
        return (int(mask[index // 8]) >> (index % 8) & 1) / keep_prob

    return keep


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_everything_composed(data):
    """Random layout, GQA, mask, bias, dropout and sink together."""
    b, n2, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    s1 = data.draw(st.integers(1, 4))
    pse_type = data.draw(st.sampled_from([0, 1, 2, 3]))
    s2 = s1 if pse_type >= 2 else data.draw(st.integers(1, 4))
    n1, seed = n2 * group, data.draw(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    layout = data.draw(st.sampled_from(["BSH", "SBH", "BSND", "BNSD", "TND"]))
    q, k, v = random(seed, b, n1, s1, 2), random(seed + 1, b, n2, s2, 2), random(seed + 2, b, n2, s2, 3)
    inputs = {"query": to_layout(q, layout), "key": to_layout(k, layout), "value": to_layout(v, layout)}
    attrs = {"input_layout": layout, "head_num": n1, "scale_value": 0.6, "pse_type": pse_type}
    rules = {"scale": 0.6}
    if layout == "TND":
        inputs |= {"actual_seq_qlen": cumulative(*[s1] * b), "actual_seq_kvlen": cumulative(*[s2] * b)}
    if data.draw(st.booleans()):
        attrs["sparse_mode"] = data.draw(st.sampled_from([0, 2, 3]))
        mask = rng.integers(0, 2, (s1, s2)).astype(np.uint8)
        inputs["atten_mask"] = mask if attrs["sparse_mode"] == 0 else causal_constant()
        rules["allowed"] = {
            0: lambda b, n, i, j: mask[i, j] == 0,
            2: lambda b, n, i, j: j <= i,
            3: lambda b, n, i, j: j <= i + s2 - s1,
        }[attrs["sparse_mode"]]
    if pse_type >= 2:
        slopes = rng.random((b, n1) if data.draw(st.booleans()) else (n1,))
        start_q, start_kv = (int(x) for x in rng.integers(0, 9, 2))
        inputs |= {
            "real_shift": slopes,
            "q_start_idx": np.array([start_q]),
            "kv_start_idx": np.array([start_kv, 77]),
        }
        power = 1.0 if pse_type == 2 else 0.5
        every = np.broadcast_to(slopes, (b, n1))
        rules["bias"] = lambda b, n, i, j: -every[b, n] * abs(j + start_kv - i - start_q) ** power
    elif layout != "TND" and (pse_type == 0 or data.draw(st.booleans())):
        pse = rng.standard_normal([data.draw(st.sampled_from([1, size])) for size in (b, n1, s1, s2)])
        inputs["real_shift"] = pse
        full = np.broadcast_to(pse, (b, n1, s1, s2))
        rules |= {"bias": lambda b, n, i, j: full[b, n, i, j], "before_scale": pse_type == 1}
    else:
        attrs["pse_type"] = 1
    if data.draw(st.booleans()):
        bits = b * n1 * s1 * s2
        drop = rng.integers(0, 256, (bits + 7) // 8 + data.draw(st.integers(0, 3))).astype(np.uint8)
        inputs["drop_mask"] = drop
        attrs["keep_prob"] = 0.8
        rules["keep"] = keep_from_bits(drop, n1, s1, s2, 0.8)
    if data.draw(st.booleans()):
        inputs["sink"] = rules["sink"] = rng.standard_normal(n1)
    want, want_max, want_sum = attention(q, k, v, **rules)
    got = forward(inputs, **attrs, softmax_out_layout="same_as_input")
    np.testing.assert_allclose(got["attention_out"], to_layout(want, layout), **EXACT)
    for name, statistic in (("softmax_max", want_max), ("softmax_sum", want_sum)):
        statistic = to_layout(statistic[..., None], "TND" if layout == "TND" else "BNSD")[..., 0]
        np.testing.assert_allclose(got[name][..., 0], statistic, **EXACT)


def test_packed_dropout_bits():
    """Bits of batch b start after N * sum of the earlier S1*S2, without padding: here at bit 2*(2*3) = 12."""
    q, k = np.zeros((3, 2, 1)), np.zeros((4, 2, 1))
    v = np.repeat(np.eye(4)[:, None, :], 2, axis=1)
    bits = np.zeros(24, np.uint8)
    # Batch 0: 2 queries, 3 keys. Batch 1: 1 query, 1 key.
    kept = [(0, 0, 0, 0), (0, 0, 1, 2), (0, 1, 0, 1), (1, 1, 0, 0)]
    for b, n, i, j in kept:
        s1, s2 = ((2, 3), (1, 1))[b]
        bits[(0, 12)[b] + (n * s1 + i) * s2 + j] = 1
    got = out({"query": q, "key": k, "value": v, "actual_seq_qlen": np.array([2, 3]),
               "actual_seq_kvlen": np.array([3, 4]), "drop_mask": np.packbits(bits, bitorder="little")},
              input_layout="TND", keep_prob=0.5)  # fmt: skip
    want = np.zeros((3, 2, 4))
    for b, n, i, j in kept:
        want[2 * b + i, n, 3 * b + j] = (1 / 3, 1.0)[b] / 0.5
    np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize("full", [True, False])
def test_packed_bias_is_flat(full):
    """[N,S1_b,S2_b] (or [N,S2_b]) blocks back to back, on axis 0 of a tensor of rank 2."""
    q_lens, kv_lens, heads = (2, 3), (4, 2), 2
    q, k, v = random(0, 5, heads, 2), random(1, 6, heads, 2), random(2, 6, heads, 2)
    blocks = [random(10 + b, heads, q_lens[b] if full else 1, kv_lens[b]) for b in range(2)]
    flat = np.concatenate([block.reshape(-1) for block in blocks])[:, None]
    got = out({"query": q, "key": k, "value": v, "real_shift": flat, "actual_seq_qlen": cumulative(*q_lens),
               "actual_seq_kvlen": cumulative(*kv_lens)}, input_layout="TND", pse_type=0)  # fmt: skip
    row = column = 0
    for b in range(2):
        s1, s2 = q_lens[b], kv_lens[b]
        one = [
            x.transpose(1, 0, 2)[None] for x in (q[row : row + s1], k[column : column + s2], v[column : column + s2])
        ]
        want, _, _ = attention(*one, bias=lambda _, n, i, j, b=b: blocks[b][n, i if full else 0, j])
        np.testing.assert_allclose(got[row : row + s1], want[0].transpose(1, 0, 2), **EXACT)
        row, column = row + s1, column + s2


def alibi(heads, size):
    """[N,S,S]: -slope*(i-j), which is what the compressed form can hold."""
    distance = np.arange(size)[:, None] - np.arange(size)[None, :]
    return -np.array([0.5**n for n in range(heads)])[:, None, None] * distance / size


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_compressed_alibi_is_the_full_bias(mode):
    """The last 1024 rows of an ALiBi bias of 1100 rows give the result of all rows."""
    size, heads = 1100, 2
    q, k, v = random(0, 1, heads, size, 2), random(1, 1, heads, size, 2), random(2, 1, heads, size, 2)
    bias = alibi(heads, size)[None]
    mask = np.triu(np.ones((size, size), np.uint8), 1) if mode == 0 else causal_constant()
    inputs = {"query": q, "key": k, "value": v, "atten_mask": mask}
    attrs = {"sparse_mode": mode, "pse_type": 0, "pre_tockens": size, "next_tockens": 0}
    want = out({**inputs, "real_shift": bias}, **attrs)
    got = out({**inputs, "real_shift": bias[:, :, -1024:]}, **attrs)
    # The same numbers up to the rounding of (i-j)/size along a diagonal: none.
    np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize("lengths", [(3, 5), (1030, 7)])
def test_compressed_alibi_in_packed_batches(lengths):
    """Rows of the stored bias belong to the longest batch, also when that is shorter than 1024."""
    heads, longest = 2, max(lengths)
    total = sum(lengths)
    q, k, v = random(0, total, heads, 2), random(1, total, heads, 2), random(2, total, heads, 2)
    rows = np.arange(longest - 1024, longest)
    stored = -np.array([1.0, 0.25])[:, None, None] * (rows[:, None] - np.arange(longest)[None, :]) / longest
    got = out({"query": q, "key": k, "value": v, "real_shift": stored[None], "atten_mask": causal_constant(),
               "actual_seq_qlen": cumulative(*lengths), "actual_seq_kvlen": cumulative(*lengths)},
              input_layout="TND", pse_type=0, sparse_mode=3)  # fmt: skip
    row = 0
    for size in lengths:
        one = [x[row : row + size].transpose(1, 0, 2)[None] for x in (q, k, v)]
        distance = np.arange(size)[:, None] - np.arange(size)[None, :]
        bias = -np.array([1.0, 0.25])[:, None, None] * distance / longest
        want = out({"query": one[0], "key": one[1], "value": one[2], "real_shift": bias[None],
                    "atten_mask": causal_constant()}, pse_type=0, sparse_mode=3)  # fmt: skip
        np.testing.assert_allclose(got[row : row + size], want[0].transpose(1, 0, 2), **EXACT)
        row += size


def test_full_bias_of_1024_rows_is_not_compressed():
    """S1 == 1024 exactly: an ordinary bias, legal without a causal mask."""
    bias = np.zeros((1, 1, 1024, 2))
    bias[0, 0, 5, 1] = math.log(3.0)
    inputs = {
        "query": np.zeros((1, 1, 1024, 1)),
        "key": np.zeros((1, 1, 2, 1)),
        "value": np.array([4.0, 8.0]).reshape(1, 1, 2, 1),
        "real_shift": bias,
    }
    got = out(inputs, pse_type=0)[0, 0, :, 0]
    np.testing.assert_allclose(got[[4, 5, 6]], [6.0, 7.0, 6.0], **EXACT)


@pytest.mark.parametrize(
    ("mode", "first", "expected"), [(8, 6, [0, 0, 0, 0, 3, 5, 3, 5]), (3, 2, [3.0, 4.0, 3.0, 4.0])]
)
def test_start_indices_and_mode_8(mode, first, expected):
    """Mode 8 uses the start indices for batch 0 only; the other modes for every batch.

    The last row of a batch sees both keys. In batch 1 their distances are 3 and 4 with a start of 4, and 1 and 0
    without it. Mode 8 wants batch 0 to have as many queries more than keys as the start says.
    """
    inputs = {
        "query": np.zeros((first + 2, 1, 1)),
        "key": np.zeros((4, 1, 1)),
        "value": np.array([3.0, 6.0, 3.0, 6.0]).reshape(4, 1, 1),
        "real_shift": np.array([math.log(2.0)]),
        "kv_start_idx": np.array([4]),
        "actual_seq_qlen": np.array([first, first + 2]),
        "actual_seq_kvlen": np.array([2, 4]),
        "atten_mask": causal_constant(),
    }
    got = out(inputs, input_layout="TND", pse_type=2, sparse_mode=mode, next_tockens=0)
    np.testing.assert_allclose(got.reshape(-1), expected, **EXACT)
