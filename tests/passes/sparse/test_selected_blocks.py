"""Masks that a TopK over blocks of keys makes: SparseFlashAttention with that sparse_block_size, where nothing but a
causal mask stands beside them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pairs import pairwise
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

ROWS, BLOCKS = 5, 6
START = (
    "low = Constant<value=float {-inf}>() least = Constant<value=float {-3.4028234663852886e38}>() "
    "two = Constant<value=int64[1] {2}>() four = Constant<value=int64[1] {4}>() heads = Constant<value=int64[1] {1}>() "
    "last = Constant<value=int64[1] {-1}>() zero = Constant<value=float {0.0}>() "
)
LISTED = (
    "values, idx = TopK<axis=-1>(i, two) shape = Shape(i) of_list = Shape(idx) "
    "ones = ConstantOfShape<value=float[1] {1.0}>(shape) nones = ConstantOfShape<value=float[1] {0.0}>(of_list) "
    "zeros = ConstantOfShape<value=float[1] {0.0}>(shape) somes = ConstantOfShape<value=float[1] {1.0}>(of_list) "
)
REPEATED = "r4 = Unsqueeze({0}, last) each = Expand(r4, wide) flat = Reshape(each, full) "
HIDDEN = {
    "hidden": "hb = ScatterElements<axis=-1>(ones, idx, nones) " + REPEATED.format("hb") + "hide = Cast<to=9>(flat) ",
    "hidden_first": "hb = ScatterElements<axis=-1>(ones, idx, nones) hbb = Cast<to=9>(hb) "
    + REPEATED.format("hbb")
    + "hide = Identity(flat) ",
    "kept": "kb = ScatterElements<axis=-1>(zeros, idx, somes) " + REPEATED.format("kb") + "keep = Cast<to=9>(flat) "
    "hide = Not(keep) ",
    "kept_first": "kb = ScatterElements<axis=-1>(zeros, idx, somes) kbb = Cast<to=9>(kb) nk = Not(kbb) "
    + REPEATED.format("nk")
    + "hide = Identity(flat) ",
}
MASKS = {
    "alone": "u = Unsqueeze(hide, heads) x = Where(u, low, s) ",
    "least": "u = Unsqueeze(hide, heads) x = Where(u, least, s) ",
    "causal": "u = Unsqueeze(hide, heads) a = Where(above, low, s) x = Where(u, low, a) ",
    "causal_in_one": "u = Unsqueeze(hide, heads) e = Or(u, above) x = Where(e, least, s) ",
}
LEFT = {
    "padding": HIDDEN["hidden"] + "u = Unsqueeze(hide, heads) e = Or(u, m) x = Where(e, low, s) ",
    "every_sixth_key": "hb = ScatterElements<axis=-1>(ones, idx, nones) r4 = Unsqueeze(hb, two) "
    "each = Expand(r4, tall) "
    "flat = Reshape(each, full) hide = Cast<to=9>(flat) u = Unsqueeze(hide, heads) x = Where(u, low, s) ",
}


def check(body: str, size: int, seed: int, count: int = 2) -> str:
    """The operator it became, after comparing the results, rows without a key included."""
    keys = BLOCKS * size
    numbers = (
        f"wide = Constant<value=int64[4] {{2, {ROWS}, {BLOCKS}, {size}}}>() "
        f"tall = Constant<value=int64[4] {{2, {ROWS}, {size}, {BLOCKS}}}>() "
        f"full = Constant<value=int64[3] {{2, {ROWS}, {keys}}}>() shift = Constant<value=int64 {{{keys - ROWS}}}>() "
        "sq = Shape<start=2, end=4>(s) square = ConstantOfShape<value=float[1] {1.0}>(sq) "
        "tri = Trilu<upper=0>(square, shift) seen = Cast<to=9>(tri) above = Not(seen) "
    )
    listed = LISTED.replace("two", {2: "two", 4: "four"}[count])
    proto = parse(
        PRODUCT_QK + START + numbers + listed + body + SOFTMAX.format("x") + PRODUCT_PV,
        f"float[2,{ROWS},{BLOCKS}] i, bool[2,1,1,{keys}] m",
        inputs=f"float[2,4,{ROWS},8] q, float[2,4,{keys},8] k, float[2,4,{keys},8] v",
        outputs=f"float[2,4,{ROWS},8] y",
    )
    ranks = np.random.default_rng(seed).integers(0, 3, (2, ROWS, BLOCKS)).astype(np.float32)  # many ties
    result, report = fused(proto)
    feeds = random_feeds(proto, seed, i=ranks)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    (node,) = [node for node in result.graph.node if node.domain == "ascend"]
    sizes = [attr.i for attr in node.attribute if attr.name == "sparse_block_size"]
    assert sizes == ([size] if node.op_type == "SparseFlashAttention" else [])
    return str(report.blocks[0].op)


@pytest.mark.parametrize(("hidden", "mask", "size", "seed"), pairwise(list(HIDDEN), list(MASKS), [2, 3, 16], range(4)))
def test_listed_blocks_become_a_list(hidden: str, mask: str, size: int, seed: int) -> None:
    assert check(HIDDEN[hidden] + MASKS[mask], size, seed) == "SparseFlashAttention"


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_list_of_blocks_stays_a_mask(name: str) -> None:
    assert check(LEFT[name], 3, 1) == "FlashAttentionScore"


def test_lists_of_most_blocks_stay_masks() -> None:
    assert check(HIDDEN["hidden"] + MASKS["alone"], 3, 1, count=4) == "FlashAttentionScore"
