"""Every sparse mode against its table, key by key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .naive import causal_constant, cumulative, prefix_constant, reads

SIZES = st.integers(1, 6)
TOKENS = st.sampled_from([-3, -1, 0, 1, 2, 5, 2147483647, 2**63 - 1])


def allowed_by_table(mode, i, j, s1, s2, mask, pre, nxt, prefix, is_band_batch):
    d, off = j - i, s2 - s1
    if mode == 0:
        return mask == 0 and -pre <= d <= nxt
    if mode == 1:
        return mask == 0
    if mode == 2:
        return d <= 0
    if mode == 3:
        return d <= off
    if mode == 4:
        return -pre + off <= d <= nxt + off
    if mode == 5:
        return mask == 0
    if mode == 6:
        return d <= off or j < prefix
    if mode == 7:
        return -pre + off <= d <= nxt + off if is_band_batch else d <= off
    return -pre + off <= d <= nxt + off if is_band_batch else d <= 0


def expected(mode, s1, s2, mask=None, pre=2147483647, nxt=2147483647, prefix=0, is_band_batch=False):
    table = np.zeros((s1, s2), dtype=bool)
    for i in range(s1):
        for j in range(s2):
            bit = 0 if mask is None else mask[i, j]
            table[i, j] = allowed_by_table(mode, i, j, s1, s2, bit, pre, nxt, prefix, is_band_batch)
    return table


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_full_mask_modes(data):
    """Modes 0, 1 and 5 with a mask of any legal or extended shape, different for every batch and head."""
    mode = data.draw(st.sampled_from([0, 1, 5]))
    s1, s2, batches, heads = (
        data.draw(SIZES),
        data.draw(SIZES),
        data.draw(st.integers(1, 3)),
        data.draw(SIZES),
    )
    pre, nxt = data.draw(TOKENS), data.draw(TOKENS)
    full = (batches, heads, s1, s2)
    shape = tuple(data.draw(st.sampled_from([1, size])) for size in full)
    if data.draw(st.booleans()):
        shape = shape[2:]
    mask = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 3, shape)
    mask = mask.astype(np.uint8) if data.draw(st.booleans()) else mask.astype(bool)
    got = reads(s1, s2, {"atten_mask": mask}, batches, heads, sparse_mode=mode, pre_tockens=pre, next_tockens=nxt)
    every = np.broadcast_to(mask, full)
    for b in range(batches):
        for n in range(heads):
            np.testing.assert_array_equal(got[b, n], expected(mode, s1, s2, every[b, n], pre, nxt))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([2, 3, 4]), SIZES, SIZES, TOKENS, TOKENS)
def test_structural_modes(mode, s1, s2, pre, nxt):
    got = reads(s1, s2, {"atten_mask": causal_constant()}, sparse_mode=mode, pre_tockens=pre, next_tockens=nxt)
    np.testing.assert_array_equal(got[0, 0], expected(mode, s1, s2, None, pre, nxt))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_compressed_prefix(data):
    s1, s2 = data.draw(SIZES), data.draw(SIZES)
    prefix = [data.draw(st.integers(max(0, s2 - s1), s2)) for _ in range(2)]
    got = reads(s1, s2, {"atten_mask": prefix_constant(), "prefix": np.array(prefix)}, batches=2, sparse_mode=6)
    for b in range(2):
        np.testing.assert_array_equal(got[b, 0], expected(6, s1, s2, prefix=prefix[b]))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_packed_modes(data):
    """TND: geometry by the length of each batch; modes 7 and 8 have the band on the last and first batch."""
    mode = data.draw(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8]))
    q_lens = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    kv_lens = [data.draw(st.integers(1, 5)) if length else 0 for length in q_lens]
    pre, nxt = data.draw(TOKENS), data.draw(TOKENS)
    prefix = [data.draw(st.integers(max(0, k - q), k)) if q else 0 for q, k in zip(q_lens, kv_lens, strict=True)]
    joint = data.draw(st.booleans())
    inputs = {}
    mask = None
    if mode in (0, 1):
        shape = (sum(q_lens), sum(kv_lens)) if joint else (max(q_lens), max(kv_lens))
        joint = joint and shape != (max(q_lens), max(kv_lens))
        mask = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2, shape).astype(np.uint8)
    inputs["atten_mask"] = mask if mask is not None else prefix_constant() if mode == 6 else causal_constant()
    if mode == 6:
        inputs["prefix"] = np.array(prefix)
    inputs |= {
        "query": np.zeros((sum(q_lens), 1, 1)),
        "key": np.zeros((sum(kv_lens), 1, 1)),
        "value": np.eye(sum(kv_lens))[:, None, :],
        "actual_seq_qlen": cumulative(*q_lens),
        "actual_seq_kvlen": cumulative(*kv_lens),
    }
    got = reads(0, 0, inputs, input_layout="TND", sparse_mode=mode, pre_tockens=pre, next_tockens=nxt)[:, 0]
    occupied = [b for b, length in enumerate(q_lens) if length]
    want = np.zeros((sum(q_lens), sum(kv_lens)), dtype=bool)
    row = column = 0
    for b, (s1, s2) in enumerate(zip(q_lens, kv_lens, strict=True)):
        own = None
        if mask is not None:
            own = mask[row : row + s1, column : column + s2] if joint else mask[:s1, :s2]
        band = bool(occupied) and b == occupied[-1 if mode == 7 else 0]
        want[row : row + s1, column : column + s2] = expected(mode, s1, s2, own, pre, nxt, prefix[b], band)
        row, column = row + s1, column + s2
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(1, 1, 2048, 2048), (2048, 2048)])
def test_compressed_mask_may_have_rank_4(shape):
    mask = causal_constant().reshape(shape).astype(bool)
    np.testing.assert_array_equal(reads(2, 2, {"atten_mask": mask}, sparse_mode=2)[0, 0], [[1, 0], [1, 1]])
