"""Index scores that a TopK ranks, with the attention to the keys it lists: LightningIndexer where the user assumes that
of close ranks either key may be selected, and where both read the same mask."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Report
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

MORE = "float[B,S,3,4] iq, float[B,T,4] ik, float[B,S,3] w, bool[B,1,1,T] m"
START = (
    "zero = Constant<value=float {0.0}>() least = Constant<value=float {-3.4028234663852886e38}>() "
    "low = Constant<value=float {-inf}>() two = Constant<value=int64[1] {2}>() half = Constant<value=float {0.5}>() "
    "heads = Constant<value=int64[1] {1}>() unit = Constant<value=int64[1] {2}>() "
    "third = Constant<value=int64[1] {3}>() first = Constant<value=int64 {0}>() "
    "moderate = Constant<value=float {-1e4}>() minus = Constant<value=float {-0.5}>() "
    "kt4 = Transpose<perm=[0,2,1]>(ik) k4 = Unsqueeze(kt4, heads) "
)
PRODUCT = "dots = MatMul(iq, k4) "
RECTIFIED = "scaled = Mul(dots, half) r = Relu(scaled) "
WEIGHED = "w4 = Unsqueeze(w, unit) sum4 = MatMul(w4, r) i = Squeeze(sum4, unit) "
REDUCED = "w4 = Unsqueeze(w, third) parts = Mul(r, w4) i = ReduceSum<keepdims=0>(parts, unit) "
SCORES = PRODUCT + RECTIFIED + WEIGHED
CAUSAL = (
    "sq = Shape<start=2, end=4>(s) square = ConstantOfShape<value=float[1] {1.0}>(sq) "
    "tri = Trilu<upper=0>(square, shift) seen = Cast<to=9>(tri) above = Not(seen) "
)
BOTH = CAUSAL + "hide = Or(above, m) b = Where(hide, least, zero) b3 = Gather<axis=1>(b, first) ranked = Add(i, b3) "
LIST = (
    "values, idx = TopK<axis=-1>({}, two) shape = Shape(i) of_list = Shape(idx) "
    "ones = ConstantOfShape<value=float[1] {{1.0}}>(shape) nones = ConstantOfShape<value=float[1] {{0.0}}>(of_list) "
    "all = Cast<to=9>(ones) none = Cast<to=9>(nones) "
    "hidden = ScatterElements<axis=-1>(all, idx, none) u = Unsqueeze(hidden, heads) "
)

INDEXED = {
    "no_mask": SCORES + LIST.format("i") + "x = Where(u, low, s) ",
    "summed": PRODUCT + RECTIFIED + REDUCED + LIST.format("i") + "x = Where(u, low, s) ",
    "scaled_behind": PRODUCT
    + "r0 = Relu(dots) r = Mul(r0, minus) "
    + WEIGHED
    + LIST.format("i")
    + "x = Where(u, low, s) ",
    "padded": SCORES
    + "b = Where(m, least, zero) b3 = Gather<axis=1>(b, first) ranked = Add(b3, i) "
    + LIST.format("ranked")
    + "f = Where(u, least, b) x = Add(s, f) ",
    "causal": SCORES
    + CAUSAL
    + "b = Where(above, low, zero) ranked = Add(i, b) "
    + LIST.format("ranked")
    + "a = Where(above, low, s) x = Where(u, low, a) ",
    "causal_and_padded": SCORES + BOTH + LIST.format("ranked") + "f = Where(u, least, b) x = Add(s, f) ",
}

EINSUM = 'dots = Einsum<equation="{}">(iq, ik) '
LISTED = LIST.format("i") + "x = Where(u, low, s) "
INDEXED |= {
    "sums": EINSUM.format("bshd,btd->bsht") + RECTIFIED + REDUCED + LISTED,
    "heads_before_rows": EINSUM.format("bshd,btd->bhst")
    + RECTIFIED
    + "wt = Transpose<perm=[0,2,1]>(w) w4 = Unsqueeze(wt, third) parts = Mul(w4, r) "
    + "i = ReduceSum<keepdims=0>(parts, heads) "
    + LISTED,
    "weighed_by_a_sum": EINSUM.format("bshd,btd->bsht")
    + RECTIFIED
    + 'i = Einsum<equation="bsh,bsht->bst">(w, r) '
    + LISTED,
    "heads_kept": EINSUM.format("bshd,btd->bhst")
    + RECTIFIED
    + "wt = Transpose<perm=[0,2,1]>(w) w4 = Unsqueeze(wt, third) parts = Mul(r, w4) "
    + "i4 = ReduceSum<keepdims=1>(parts, heads) i = Squeeze(i4, heads) "
    + LISTED,
    "selected_mask": SCORES
    + CAUSAL
    + "ranked = Where(above, low, i) "
    + LIST.format("ranked")
    + "a = Where(above, low, s) x = Where(u, low, a) ",
    "kept_mask": SCORES
    + CAUSAL
    + "ranked = Where(seen, i, least) "
    + LIST.format("ranked")
    + "a = Where(seen, s, low) x = Where(u, low, a) ",
}

INDEXED["all_of_few_keys"] = (
    SCORES
    + "all_keys = Shape<start=2, end=3>(i) few = Min(all_keys, two) "
    + LIST.format("i").replace("(i, two)", "(i, few)")
    + "x = Where(u, low, s) "
)

EXPORTED = (
    "listed = Not(u) kept = And(visible, listed) left = Not(kept) f = Cast<to=1>(left) mask = Mul(f, least) "
    "x = Add(s, mask) "
)
INDEXED["exported"] = (
    SCORES
    + CAUSAL
    + "n = Not(m) visible = And(seen, n) v3 = Gather<axis=1>(visible, first) gone = Not(v3) "
    + "ranked = Where(gone, low, i) "
    + LIST.format("ranked")
    + EXPORTED
)

RANKED = {
    "exported_without_padding_on_the_index": SCORES
    + CAUSAL
    + "n = Not(m) visible = And(seen, n) gone = Not(seen) ranked = Where(gone, low, i) "
    + LIST.format("ranked")
    + EXPORTED,
    "another_mask": SCORES + CAUSAL + LIST.format("i") + "a = Where(above, low, s) x = Where(u, low, a) ",
    "mask_on_the_index_alone": SCORES + BOTH + LIST.format("ranked") + "x = Where(u, low, s) ",
    "a_moderate_mask": SCORES
    + "b = Where(m, moderate, zero) b3 = Gather<axis=1>(b, first) ranked = Add(b3, i) "
    + LIST.format("ranked")
    + "a = Where(m, low, s) x = Where(u, low, a) ",
    "the_worst": SCORES + LIST.format("i").replace("axis=-1>(i", "axis=-1, largest=0>(i") + "x = Where(u, low, s) ",
    "a_negative_scale": PRODUCT
    + "scaled = Mul(dots, minus) r = Relu(scaled) "
    + WEIGHED
    + LIST.format("i")
    + "x = Where(u, low, s) ",
    "a_moderate_selection": SCORES
    + CAUSAL
    + "ranked = Where(above, moderate, i) "
    + LIST.format("ranked")
    + "a = Where(above, low, s) x = Where(u, low, a) ",
    "the_other_half": SCORES
    + CAUSAL
    + "ranked = Where(seen, low, i) "
    + LIST.format("ranked")
    + "a = Where(above, low, s) x = Where(u, low, a) ",
    "summed_twice": EINSUM.format("bshd,btd->bsht")
    + RECTIFIED
    + REDUCED.replace("i = ", "i0 = ")
    + "i = Add(i0, i0) "
    + LISTED,
    "no_relu": PRODUCT + "r = Mul(dots, half) " + WEIGHED + LIST.format("i") + "x = Where(u, low, s) ",
}


def model(body: str) -> onnx.ModelProto:
    shift = "shift = Constant<value=int64 {1}>() "  # of 5 rows and 6 keys, the last row sees all
    inputs = "float[B,4,5,8] q, float[B,4,6,8] k, float[B,4,6,8] v"
    more = MORE.replace("S", "5").replace("T", "6")
    full = PRODUCT_QK + START + shift + body + SOFTMAX.format("x") + PRODUCT_PV
    return parse(full, more, inputs=inputs, outputs="float[B,4,5,8] y")


def check(body: str, assume: list[str], seed: int = 0) -> tuple[list[str], Report]:
    proto = model(body)
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 1, 1, 6)) < 0.5
    mask[0] = seed == 0
    # Few heads and many negative products: ranks of exactly 0, which position decides.
    feeds = random_feeds(proto, seed, m=mask)
    result, report = fused(proto, assume=assume)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    return [node.op_type for node in result.graph.node if node.domain == "ascend"], report


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", INDEXED)
def test_ranks_become_an_indexer(name: str, seed: int) -> None:
    found, report = check(INDEXED[name], ["close-ranks"], seed)
    assert found == ["LightningIndexer", "SparseFlashAttention"]
    assert report.blocks[0].assumed == ("close-ranks",)


@pytest.mark.parametrize("name", ["no_mask", "summed", "scaled_behind"])
def test_an_index_score_that_is_nan(name: str) -> None:
    """TopK of ONNX Runtime ranks it first, and so does the indexer that takes its place. The device ranks it last."""
    proto = model(INDEXED[name])
    feeds = random_feeds(proto, m=np.zeros((2, 1, 1, 6), np.bool_))
    feeds["ik"][0, 4], feeds["ik"][1, [0, 5]] = np.nan, np.nan
    result, _ = fused(proto, assume=["close-ranks"])
    (indexer,) = (node for node in result.graph.node if node.op_type == "LightningIndexer")
    assert {each.name: each.s for each in indexer.attribute}["cpu_nan_scores"] == b"first"
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    device, _ = fused(proto, "ascend", assume=["close-ranks"])
    assert not any(each.name.startswith("cpu_") for node in device.graph.node for each in node.attribute)


@pytest.mark.parametrize("name", INDEXED)
def test_without_the_assumption_the_list_is_the_model_s(name: str) -> None:
    found, report = check(INDEXED[name], [])
    assert found == ["SparseFlashAttention"]
    assert report.blocks[0].assumed == ()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", RANKED)
def test_other_ranks_are_left_to_the_model(name: str, seed: int) -> None:
    assert check(RANKED[name], ["close-ranks"], seed)[0] == ["SparseFlashAttention"]


def test_neither_scores_nor_masks_are_left() -> None:
    result, _ = fused(model(INDEXED["causal"]), assume=["close-ranks"])
    left = {node.op_type for node in result.graph.node}
    assert not left & {"MatMul", "Softmax", "ScatterElements", "TopK", "Relu", "Trilu", "GatherElements", "GatherND"}


def test_one_row_that_sees_all_keys() -> None:
    """A causal mask of one token excludes nothing, however it is written on the index scores."""
    causal = (
        "size = Shape<start=3, end=4>(s) t0 = Squeeze(size) one = Constant<value=int64 {1}>() at = Sub(t0, one) "
        "column = Range(first, t0, one) seen = LessOrEqual(column, at) n = Not(m) visible = And(seen, n) "
        "v3 = Gather<axis=1>(visible, first) gone = Not(v3) ranked = Where(gone, low, i) "
    )
    body = PRODUCT_QK + START + SCORES + causal + LIST.format("ranked") + EXPORTED + SOFTMAX.format("x") + PRODUCT_PV
    inputs = "float[B,4,1,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
    proto = parse(body, MORE.replace("S", "1"), inputs=inputs, outputs="float[B,4,1,8] y")
    result, report = fused(proto, assume=["close-ranks"])
    assert report.blocks[0].assumed == ("close-ranks",)
    for seed in range(3):
        feeds = random_feeds(proto, seed)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
