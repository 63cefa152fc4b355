"""Attention to the keys a TopK lists, by masks in several spellings: it becomes SparseFlashAttention where the mask is
proven to admit listed keys only, and stays FlashAttentionScore where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

MORE = "float[B,S,T] i, bool[B,1,1,T] m, bool[B,4,S,T] h, int64[B,S,2] given"
NUMBERS = (
    "zero = Constant<value=float {0.0}>() least = Constant<value=float {-3.4028234663852886e38}>() "
    "low = Constant<value=float {-inf}>() two = Constant<value=int64[1] {2}>() four = Constant<value=int64[1] {4}>() "
    "heads = Constant<value=int64[1] {1}>() "
)
LISTED = (
    "values, idx = TopK<axis=-1>(i, two) shape = Shape(i) of_list = Shape(idx) "
    "ones = ConstantOfShape<value=float[1] {1.0}>(shape) nones = ConstantOfShape<value=float[1] {0.0}>(of_list) "
    "zeros = ConstantOfShape<value=float[1] {0.0}>(shape) some = ConstantOfShape<value=float[1] {1.0}>(of_list) "
    "lows = ConstantOfShape<value=float[1] {-inf}>(shape) "
    "all = Cast<to=9>(ones) none = Cast<to=9>(nones) nowhere = Cast<to=9>(zeros) there = Cast<to=9>(some) "
)
HIDDEN = "hidden = ScatterElements<axis=-1>(all, idx, none) u = Unsqueeze(hidden, heads) "
CAUSAL = (
    "sq = Shape<start=2, end=4>(s) square = ConstantOfShape<value=float[1] {1.0}>(sq) tri = Trilu<upper=0>(square) "
    "seen = Cast<to=9>(tri) above = Not(seen) "
)

SELECTED = {
    "filled": HIDDEN + "x = Where(u, least, s) ",
    "padded_and_filled": HIDDEN + "a = Where(m, low, s) x = Where(u, low, a) ",
    "one_mask": HIDDEN + "b = Where(m, least, zero) f = Where(u, least, b) x = Add(s, f) ",
    "added_numbers": "f = ScatterElements<axis=-1>(lows, idx, nones) g = Unsqueeze(f, heads) b = Where(m, low, zero) "
    "sum = Add(g, b) x = Add(s, sum) ",
    "narrow_indices": "n = Cast<to=6>(idx) w = Cast<to=7>(n) hidden = ScatterElements<axis=2>(all, w, none) "
    "u = Unsqueeze(hidden, heads) x = Where(u, low, s) ",
    "admitted": "admitted = ScatterElements<axis=-1>(nowhere, idx, there) u = Unsqueeze(admitted, heads) n = Not(m) "
    "both = And(u, n) x = Where(both, s, low) ",
    "causal": HIDDEN + CAUSAL + "a = Where(above, low, s) x = Where(u, low, a) ",
    "causal_and_padded": HIDDEN + CAUSAL + "o = Or(above, m) e = Or(o, u) x = Where(e, least, s) ",
}

LEFT = {
    "all_but_listed": "hidden = ScatterElements<axis=-1>(nowhere, idx, there) u = Unsqueeze(hidden, heads) "
    "x = Where(u, low, s) ",
    "another_axis": "early = Clip(idx, start, four_i) hidden = ScatterElements<axis=1>(all, early, none) "
    "u = Unsqueeze(hidden, heads) x = Where(u, low, s) ",
    "any_indices": "hidden = ScatterElements<axis=-1>(all, given, none) u = Unsqueeze(hidden, heads) "
    "x = Where(u, low, s) ",
    "each_head_its_own": HIDDEN + "e = Or(u, h) x = Where(e, low, s) ",
    "a_moderate_number": HIDDEN + "b = Where(u, four_f, zero) x = Add(s, b) ",
    "a_bias_beside": HIDDEN + "b = Unsqueeze(i, heads) c = Add(s, b) x = Where(u, low, c) ",
    "two_lists": HIDDEN + "v2, idx2 = TopK<axis=-1, largest=0>(i, two) h2 = ScatterElements<axis=-1>(all, idx2, none) "
    "u2 = Unsqueeze(h2, heads) e = And(u, u2) x = Where(e, low, s) ",
    "most_keys": "v4, idx4 = TopK<axis=-1>(i, four) of4 = Shape(idx4) n4 = ConstantOfShape<value=float[1] {0.0}>(of4) "
    "b4 = Cast<to=9>(n4) hidden = ScatterElements<axis=-1>(all, idx4, b4) u = Unsqueeze(hidden, heads) "
    "x = Where(u, low, s) ",
}


def check(body: str, keys: str = "T", seed: int = 0) -> str:
    """The operator it became, after comparing the results, rows without a key included."""
    more = MORE.replace("T]", f"{keys}]")
    inputs = f"float[B,4,S,8] q, float[B,4,{keys},8] k, float[B,4,{keys},8] v"
    numbers = NUMBERS + "four_f = Constant<value=float {-4.0}>() start = Constant<value=int64 {0}>() "
    numbers += "four_i = Constant<value=int64 {4}>() "
    proto = parse(PRODUCT_QK + numbers + LISTED + body + SOFTMAX.format("x") + PRODUCT_PV, more, inputs=inputs)
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 1, 1, 6)) < 0.4
    mask[0] = True
    ranks = rng.integers(0, 3, (2, 5, 6)).astype(np.float32)  # many ties
    feeds = random_feeds(proto, seed, m=mask, i=ranks, given=rng.integers(0, 6, (2, 5, 2)))
    result, report = fused(proto)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    (block,) = report.blocks
    assert [node.op_type for node in result.graph.node if node.domain == "ascend"] == [block.op]
    return str(block.op)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SELECTED)
def test_listed_keys_become_a_list(name: str, seed: int) -> None:
    assert check(SELECTED[name], seed=seed) == "SparseFlashAttention"


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_list_stays_a_mask(name: str) -> None:
    assert check(LEFT[name], keys="6") != "SparseFlashAttention"


def test_ascend_keeps_the_mask() -> None:
    proto = parse(PRODUCT_QK + NUMBERS + LISTED + SELECTED["filled"] + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    assert [block.op for block in fused(proto, "ascend", ["no-empty-rows"])[1].blocks] != ["SparseFlashAttention"]


def test_the_mask_is_gone() -> None:
    """Neither the scores nor a mask of rows times keys is left where the list is all there is."""
    proto = parse(PRODUCT_QK + NUMBERS + LISTED + SELECTED["filled"] + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    left = {node.op_type for node in fused(proto)[0].graph.node}
    assert not left & {"MatMul", "Softmax", "ScatterElements", "Where", "FlashAttentionScore"}
    assert left >= {"TopK", "SparseFlashAttention"}


def test_a_guard_against_nan_stays() -> None:
    """Where a row has no key, and where a score is NaN or +inf."""
    guarded = "bad = IsNaN(p) pg = Where(bad, zero, p) " + PRODUCT_PV.replace("(p,", "(pg,")
    proto = parse(PRODUCT_QK + NUMBERS + LISTED + SELECTED["padded_and_filled"] + SOFTMAX.format("x") + guarded, MORE)
    feeds = random_feeds(proto, 0, m=np.array([[[[True] * 6]], [[[False] * 6]]]))
    feeds["q"][1, 0, 1, 0], feeds["q"][1, 1, 2, 0] = np.nan, np.inf
    result, report = fused(proto)
    assert report.blocks[0].op == "SparseFlashAttention"
    found = run(result, feeds)[0]
    assert_same(found, run(proto, feeds)[0], 1e-5)
    assert not np.isnan(found).any()


def test_masks_that_a_row_of_its_own_ignores() -> None:
    """An added number that a row masked everywhere ignores stays a mask."""
    body = HIDDEN + "b = Where(u, moderate, zero) x = Add(s, b) "
    numbers = NUMBERS + "moderate = Constant<value=float {-10000.0}>() "
    proto = parse(PRODUCT_QK + numbers + LISTED + body + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    feeds = random_feeds(proto, 0)
    result, report = fused(proto, assume=["masks-dominate"])
    assert report.blocks[0].op == "FlashAttentionScore"
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize("name", ["filled", "narrow_indices"])
def test_lists_no_longer_than_there_are_keys(name: str) -> None:
    """topk(min(k, keys)): the length of the lists is open, but not without end. Of no keys at all the sum is 0, and
    neither NaN nor a mean."""
    least = "all_keys = Shape<start=2, end=3>(i) few = Min(two, all_keys) "
    listed = least + LISTED.replace("(i, two)", "(i, few)")
    proto = parse(PRODUCT_QK + NUMBERS + listed + SELECTED[name] + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    result, report = fused(proto)
    assert report.blocks[0].op == "SparseFlashAttention"
    for keys in (0, 1, 2, 6):
        feeds = random_feeds(proto, keys)
        feeds |= {name: feeds[name][:, :, :keys] for name in "kvi"} | {"m": feeds["m"][..., :keys]}
        feeds["h"] = feeds["h"][..., :keys]
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize("name", SELECTED)
def test_runs_without_rows_or_batches(name: str) -> None:
    """Nothing is left to be found by a Reshape where another size is 0."""
    proto = parse(PRODUCT_QK + NUMBERS + LISTED + SELECTED[name] + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    result, report = fused(proto)
    assert report.blocks[0].op == "SparseFlashAttention"
    whole = random_feeds(proto)
    for rows, axis in ((("q", "i", "h", "given"), -2), (tuple(whole), 0)):
        feeds = {name: np.take(each, [], axis) if name in rows else each for name, each in whole.items()}
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 0)
