"""A floor at the lowest number of float16 behind a mask (OPT in float16): it goes where it does not show."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Report
from tests.passes.running import PRODUCT_PV, Array, assert_same, fused, parse, random_feeds, run

NUMBERS = (
    "low32 = Constant<value=float {-65504}>() low = Cast<to=10>(low32) z = Constant<value=float {0}>() "
    "zero = Cast<to=10>(z) n0 = Constant<value=int64 {0}>() n1 = Constant<value=int64 {1}>() "
    "l1 = Constant<value=int64[1] {1}>() kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) "
)
CAUSAL = (
    "all = Shape(q) i2 = Constant<value=int64 {2}>() n = Gather<axis=0>(all, i2) places = Range(n0, n, n1) "
    "rows = Unsqueeze(places, l1) seen = LessOrEqual(places, rows) "
)
ONE = CAUSAL + "mask = Where(seen, zero, low) x = Add(s, mask) "
PADDING = "mask = Where(m, zero, low) x = Add(s, mask) "
BOTH = CAUSAL + "kept = And(seen, m) mask = Where(kept, zero, low) x = Add(s, mask) "
TWO = CAUSAL + "mask = Where(seen, zero, low) mask2 = Where(m, zero, low) x0 = Add(s, mask) x = Add(x0, mask2) "
NONE = "x = Identity(s) "
FLOOR = "wide = Cast<to=1>(x) lifted = Max(wide, low32) h = Cast<to=10>(lifted) "
FLOORS = {
    "cast": FLOOR,
    "the floor first": FLOOR.replace("Max(wide, low32)", "Max(low32, wide)"),
    "Clip": FLOOR.replace("Max", "Clip"),
    "not cast back": FLOOR.replace("h = Cast<to=10>(lifted) ", "h = Identity(lifted) "),
    "in float16": "h = Max(x, low) ",
}
DOMINATE, FILLED = "masks-dominate", "no-empty-rows"


def attention(mask: str, floor: str) -> onnx.ModelProto:
    rest = "p0 = Softmax<axis=-1>(h) p = Cast<to=10>(p0) " + PRODUCT_PV
    inputs = "float16[B,4,S,8] q, float16[B,4,S,8] k, float16[B,4,S,8] v, bool[B,1,1,S] m"
    return parse(NUMBERS + mask + floor + rest, inputs=inputs, outputs="float16[B,4,S,8] y")


def same(proto: onnx.ModelProto, *assume: str) -> Report:
    """Compare before and after, with a key for each row."""
    result, report = fused(proto, assume=assume)
    padding: Array = np.array([[True] * 5, [True, True, True, False, False]]).reshape(2, 1, 1, 5)
    feeds = random_feeds(proto, m=padding)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 5e-3)
    return report


@pytest.mark.parametrize("floor", FLOORS.values(), ids=FLOORS)
def test_a_causal_mask_leaves_each_row_a_key(floor: str) -> None:
    (block,) = same(attention(ONE, floor), DOMINATE).blocks
    assert (block.status, block.mask, block.assumed) == ("fused", "causal", (DOMINATE,)), block.reason


@pytest.mark.parametrize("floor", FLOORS.values(), ids=FLOORS)
def test_without_a_mask_nothing_is_assumed(floor: str) -> None:
    (block,) = same(attention(NONE, floor)).blocks
    assert (block.status, block.mask, block.assumed) == ("fused", "none", ()), block.reason


@pytest.mark.parametrize("mask", [ONE, PADDING, BOTH, TWO], ids=["causal", "padding", "both in one", "two"])
def test_the_hint_leads_to_a_fusion(mask: str) -> None:
    proto = attention(mask, FLOOR)
    (block,) = same(proto).blocks
    assert (block.status, block.code) == ("declined", "mask_value") and "-65504" in (block.reason or "")
    words = re.findall(r"--assume (\S+)", block.hint or "")
    assert words == ([DOMINATE] if mask == ONE else [DOMINATE, FILLED])
    assert all(same(proto, word).count("fused") == 0 for word in words if mask != ONE)
    (block,) = same(proto, *words).blocks
    assert block.status == "fused" and set(words) <= set(block.assumed)


@pytest.mark.parametrize(
    ("floor", "code"),
    [
        (FLOOR.replace("low32)", "z)"), "cast"),
        (FLOOR.replace("lifted = ", "double = Add(wide, z0) lifted = ").replace("Max(wide", "Max(double"), "cast"),
        ("h = Max(x, zero) ", "score_term"),
    ],
    ids=["another floor", "numbers that float16 may not have", "another floor in float16"],
)
def test_other_floors(floor: str, code: str) -> None:
    some = "z0 = Constant<value=float {0.1}>() "
    for mask in (ONE, NONE):
        (block,) = same(attention(mask, some + floor), DOMINATE, FILLED).blocks
        assert (block.status, block.code) == ("declined", code)
