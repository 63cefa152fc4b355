"""Structural masks: each spelling of a band becomes a sparse_mode, each near miss stays a tensor; all of them give what
the original gives, at several sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime.capi.onnxruntime_pybind11_state as ort_errors
import pytest

from fa_compiler.passes import Block, fuse
from fa_compiler.passes.answer.options import Options, Target
from fa_compiler.passes.answer.report import MissedCode
from fa_compiler.passes.values.constant_patterns import even_steps
from tests.pairs import pairwise
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, feeds_of, fused, parse, refused, run

SELF = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v"
CROSS = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
CACHED = 'float[B,4,S,8] q, float[B,4,"P + S",8] k, float[B,4,"P + S",8] v'
"""Keys and values with P cached ones before the S new ones."""

NUMBERS = (
    "zero = Constant<value=int64 {0}>() one = Constant<value=int64 {1}>() two = Constant<value=int64 {2}>() "
    "three = Constant<value=int64 {3}>() nothing = Constant<value=float {0.0}>() "
    "low = Constant<value=float {-3.4028234663852886e38}>() minus = Constant<value=float {-inf}>() "
    "last = Constant<value=int64[1] {-1}>() first = Constant<value=int64[1] {0}>() "
)
LENGTHS = (
    "rows_ = Shape<start=2, end=3>(q) columns_ = Shape<start=2, end=3>(k) "
    "rows = Squeeze(rows_) columns = Squeeze(columns_) square = Concat<axis=0>(rows_, columns_) "
)
GRID = "i1 = Range(zero, rows, one) j1 = Range(zero, columns, one) i = Unsqueeze(i1, last) j = Unsqueeze(j1, first) "
PAST = "past = Sub(columns, rows) i2 = Add(i1, past) ip = Unsqueeze(i2, last) "
FLOAT = "f = Where(m, nothing, low) x = Add(s, f) "
SELECT = "x = Where(m, s, minus) "
LIKE = "f1 = Where(m, nothing, minus) f = CastLike(f1, s) x = Add(s, f) "
"""A mask that takes the type of the scores, as the function body of ONNX's Attention writes it."""


def model(mask: str, use: str = FLOAT, inputs: str = SELF, more: str = "", opset: int = 17) -> onnx.ModelProto:
    """Attention behind `mask`, which computes m (true: attended) from i and j, applied as `use` says."""
    body = PRODUCT_QK + NUMBERS + LENGTHS + GRID + mask + " " + use + SOFTMAX.format("x") + PRODUCT_PV
    return parse(body, more, inputs=inputs, opset=opset)


def same(proto: onnx.ModelProto, target: Target = "ort", cached: bool = False) -> tuple[Block, dict[str, int]]:
    """The block and the attributes of the mode; outputs agree at several sizes, one longer than a kernel's tile."""
    result, report = fused(proto, target)
    (block,) = report.blocks
    if target == "ort":
        for batch, rows, past in ((2, 5, 6), (1, 1, 3), (2, 7, 0), (1, 70, 3), (1, 3, 64)):
            sizes = {"B": batch, "S": rows, "P": past, "T": past + rows, "P + S": past + rows}
            feeds = feeds_of(proto, sizes)
            for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
                assert_same(got, wanted, 1e-5)
    (node,) = (node for node in result.graph.node if node.op_type == "FlashAttentionScore")
    attrs = {
        attr.name: attr.i for attr in node.attribute if attr.name in ("sparse_mode", "pre_tockens", "next_tockens")
    }
    return block, attrs


TRIANGLE = ", ".join(str(int(j <= i)) for i in range(80) for j in range(80))
BUFFER = f"whole = Constant<value=bool[80,80] {{{TRIANGLE}}}>() axes = Constant<value=int64[2] {{0, 1}}>() "

FLAT = (
    "count = Mul(rows_, columns_) ones = Expand(one, count) flat = CumSum<exclusive=1>(ones, zero) "
    "plane = Reshape(flat, square) "
)
FROM_ONE = FLAT.replace("<exclusive=1>", "").replace("flat", "next")
FROM_ZERO = FROM_ONE.replace("plane = Reshape(next", "flat = Sub(next, one) plane = Reshape(flat")
CAUSAL = {
    "a difference counted through the rows": FROM_ZERO + "c = Mod(plane, columns_) r = Div(plane, columns_) "
    "d = Sub(c, r) n = Greater(d, zero) m = Not(n)",
    "counted through the rows": FLAT + "c = Mod(plane, columns_) r = Div(plane, columns_) d = Sub(c, r) "
    "n = Greater(d, zero) m = Not(n)",
    "Range, LessOrEqual": "m = LessOrEqual(j, i)",
    "Range, Less and one more": "i_ = Add(i, one) m = Less(j, i_)",
    "Range, GreaterOrEqual": "m = GreaterOrEqual(i, j)",
    "Not(Greater)": "g = Greater(j, i) m = Not(g)",
    "difference": "d = Sub(i, j) m = GreaterOrEqual(d, zero)",
    "negated difference": "d = Sub(j, i) n = Neg(d) m = GreaterOrEqual(n, zero)",
    "as floats": "fi = Cast<to=1>(i) fj = Cast<to=1>(j) m = LessOrEqual(fj, fi)",
    "Trilu of ones": "o = ConstantOfShape<value=int64[1] {1}>(square) t = Trilu<upper=0>(o) m = Cast<to=9>(t)",
    "Trilu of booleans": "o = ConstantOfShape<value=bool[1] {1}>(square) m = Trilu<upper=0>(o)",
    "upper Trilu, k=1, negated": (
        "o = ConstantOfShape<value=float[1] {1.0}>(square) t = Trilu<upper=1>(o, one) c = Cast<to=9>(t) m = Not(c)"
    ),
    "CumSum of ones": (
        "o = ConstantOfShape<value=int64[1] {1}>(rows_) c = CumSum(o, zero) cj = Unsqueeze(c, first) "
        "ci = Unsqueeze(c, last) m = LessOrEqual(cj, ci)"
    ),
    "CumSum of ones of float": (
        "o = ConstantOfShape<value=float[1] {1.0}>(rows_) c = CumSum(o, zero) cj = Unsqueeze(c, first) "
        "ci = Unsqueeze(c, last) m = LessOrEqual(cj, ci)"
    ),
    "Slice of a buffer": BUFFER + "start = Concat<axis=0>(first, first) m = Slice(whole, start, square, axes)",
    "buffer rows by Gather": BUFFER + "r = Gather(whole, i1) m = Slice(r, first, columns_, last)",
    "four dimensions, expanded": (
        "t = LessOrEqual(j, i) b_ = Shape<start=0, end=1>(q) n_ = Constant<value=int64[1] {1}>() "
        "full = Concat<axis=0>(b_, n_, rows_, columns_) m = Expand(t, full)"
    ),
    "rows counted from the end": (
        "t = LessOrEqual(j, i) back = Neg(rows_) e_ = Constant<value=int64[1] {9223372036854775807}>() "
        "m = Slice(t, back, e_, first)"
    ),
    "And with true": "y_ = Constant<value=bool {1}>() t = LessOrEqual(j, i) m = And(y_, t)",
    "transposed": "t = LessOrEqual(i, j) t_ = Not(t) e = Equal(i, j) u = Or(t_, e) m = Identity(u)",
    "positions counted from a vector of one": (
        "r_ = Range(zero, one, one) a1 = Range(r_, rows_, one) a = Unsqueeze(a1, last) m = LessOrEqual(j, a)"
    ),
    "packed sequences, one of them": (
        "b_ = Shape<start=0, end=1>(q) bs = Concat<axis=0>(b_, rows_) pos = Expand(i1, bs) "
        "o_ = Constant<value=int64[1] {1}>() head = Slice(pos, first, o_, o_) before = Sub(head, one) "
        "all_ = Concat<axis=-1>(before, pos) e_ = Add(rows_, o_) a_ = Slice(all_, first, rows_, o_) "
        "c_ = Slice(all_, o_, e_, o_) step = Sub(c_, a_) q_ = Equal(step, one) nq = Not(q_) nc = Cast<to=7>(nq) "
        "seg = CumSum(nc, one) sj = Unsqueeze(seg, o_) si = Unsqueeze(seg, last) eq = Equal(sj, si) "
        "c = LessOrEqual(j, i) both = And(eq, c) m = Unsqueeze(both, o_)"
    ),
}
CAUSAL["transposed"] = "t = Less(i, j) m = Not(t)"


@pytest.mark.parametrize("use", [FLOAT, SELECT, "f = Where(m, nothing, minus) x = Add(s, f) ", LIKE])
@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_causal(mask: str, use: str) -> None:
    block, attrs = same(model(mask, use))
    assert (block.status, block.mask, attrs["sparse_mode"]) == ("fused", "causal", 2)


JOINED = (
    "past_ = Unsqueeze(past, first) before = Concat<axis=0>(rows_, past_) own = Concat<axis=0>(rows_, rows_) "
    "seen = ConstantOfShape<value=float[1] {0.0}>(before) o = ConstantOfShape<value=float[1] {1.0}>(own) "
    "t = Trilu<upper=1>(o, one) joined = Concat<axis=1>(seen, t) c = Cast<to=9>(joined) m = Not(c)"
)
"""A triangle behind columns for the cached keys, as transformers writes it."""
JOINED_TRUTHS = (
    "past_ = Unsqueeze(past, first) before = Concat<axis=0>(rows_, past_) own = Concat<axis=0>(rows_, rows_) "
    "seen = ConstantOfShape<value=bool[1] {1}>(before) o = ConstantOfShape<value=bool[1] {1}>(own) "
    "t = Trilu<upper=0>(o) m = Concat<axis=1>(seen, t)"
)
"""The same as truth values."""


@pytest.mark.parametrize(
    "mask",
    [
        JOINED,
        JOINED_TRUTHS,
        JOINED_TRUTHS.replace("t = Trilu<upper=0>(o)", "iu = Unsqueeze(i1, first) t = LessOrEqual(iu, i)"),
        "m = LessOrEqual(j, ip)",
        "end = Unsqueeze(i1, last) e_ = Add(end, past) m = GreaterOrEqual(e_, j)",
        "o = ConstantOfShape<value=bool[1] {1}>(square) m = Trilu<upper=0>(o, past)",
        BUFFER + "past_ = Unsqueeze(past, first) start = Concat<axis=0>(past_, first) "
        "ends = Concat<axis=0>(columns_, columns_) m = Slice(whole, start, ends, axes)",
    ],
)
def test_causal_behind_cached_keys(mask: str) -> None:
    block, attrs = same(model(PAST + mask, inputs=CACHED), cached=True)
    assert (block.mask, attrs["sparse_mode"]) == ("causal", 3)


@pytest.mark.parametrize(
    ("joined", "old", "new"),
    [
        (JOINED, "float[1] {0.0}>(before)", "float[1] {1.0}>(before)"),
        (JOINED, "Concat<axis=1>(seen, t)", "Concat<axis=1>(t, seen)"),
        (JOINED, "Trilu<upper=1>(o, one)", "Trilu<upper=0>(o, one)"),
        (JOINED_TRUTHS, "bool[1] {1}>(before)", "bool[1] {0}>(before)"),
        (JOINED_TRUTHS, "Concat<axis=1>(seen, t)", "Concat<axis=1>(t, seen)"),
        (JOINED_TRUTHS, "Trilu<upper=0>(o)", "Trilu<upper=1>(o)"),
    ],
)
def test_a_triangle_joined_to_other_columns_is_no_band(joined: str, old: str, new: str) -> None:
    assert joined.count(old) == 1
    proto = model(PAST + joined.replace(old, new), inputs=CACHED)
    result, report = fused(proto)
    assert report.blocks[0].mask == "atten_mask"
    for rows, past in ((5, 3), (1, 2), (4, 0)):
        feeds = feeds_of(proto, {"B": 2, "S": rows, "P + S": past + rows})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


BANDS = {
    "window": ("d = Sub(i, j) a = LessOrEqual(j, i) w = Less(d, three) m = And(a, w)", 2, 0),
    "both sides": ("d = Sub(i, j) a = Abs(d) m = LessOrEqual(a, two)", 2, 2),
    "before only": ("d = Sub(i, j) m = LessOrEqual(d, two)", 2, 2**31 - 1),
    "ahead": ("d = Sub(j, i) m = LessOrEqual(d, one)", 2**31 - 1, 1),
    "Or of what is outside": (
        "f1 = Add(i, one) o1 = GreaterOrEqual(j, f1) f2 = Sub(i, two) o2 = Less(j, f2) o = Or(o1, o2) m = Not(o)",
        2,
        0,
    ),
    "two Trilu": (
        "o = ConstantOfShape<value=bool[1] {1}>(square) l = Trilu<upper=0>(o) t_ = Neg(two) m = Trilu<upper=1>(l, t_)",
        2,
        0,
    ),
}


@pytest.mark.parametrize(("mask", "pre", "after"), BANDS.values(), ids=BANDS)
def test_band(mask: str, pre: int, after: int) -> None:
    block, attrs = same(model(mask))
    assert block.mask == "band"
    assert attrs == {"sparse_mode": 4, "pre_tockens": pre, "next_tockens": after}


BESIDE = {
    "left of the diagonal": ("d = Sub(i, j) a = Greater(d, zero) w = LessOrEqual(d, three) m = And(a, w)", 3, -1),
    "all before the diagonal": ("m = Less(j, i)", 2**31 - 1, -1),
    "all behind the diagonal": ("m = Greater(j, i)", -1, 2**31 - 1),
    "right of the diagonal": ("d = Sub(j, i) a = GreaterOrEqual(d, one) w = LessOrEqual(d, two) m = And(a, w)", -1, 2),
    "empty": ("e = Add(j, two) w = LessOrEqual(e, i) a = GreaterOrEqual(j, i) m = And(a, w)", 0, -2),
}
USES = {"float": FLOAT, "select": SELECT}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("mask", "pre", "after"), BESIDE.values(), ids=BESIDE)
def test_a_band_beside_the_diagonal(mask: str, pre: int, after: int, use: str) -> None:
    """It leaves the first or the last rows without a key, and in short runs all of them."""
    block, attrs = same(model(mask, USES[use]))
    assert (block.mask, block.missed) == ("band", ())
    assert attrs == {"sparse_mode": 4, "pre_tockens": pre, "next_tockens": after}


def test_a_window_beside_a_longer_cache() -> None:
    older = "d = Sub(ip, j) a = GreaterOrEqual(d, two) w = LessOrEqual(d, three) m = And(a, w)"
    block, attrs = same(model(PAST + older, inputs=CACHED))
    assert (block.mask, attrs) == ("band", {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": -2})


@pytest.mark.parametrize(
    ("target", "past", "reason"),
    [
        ("ascend", 3, None),
        ("ascend", 1, "misses the scores"),
        ("onnx", 3, "beside the diagonal"),
        ("contrib", 3, "beside the diagonal"),
    ],
)
def test_a_target_needs_a_key_in_the_first_row(target: Target, past: int, reason: str | None) -> None:
    """Ascend fails in a run whose band misses the scores; the operators of ONNX have no such band."""
    older = PAST + "d = Sub(ip, j) a = GreaterOrEqual(d, two) w = LessOrEqual(d, three) m = And(a, w)"
    proto = model(older, inputs=CACHED.replace("S", "5").replace('"P + 5"', str(5 + past)).replace("B", "2"))
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 5
    (block,) = fused(proto, target, assume=("no-empty-rows",))[1].blocks
    assert block.mask == ("band" if reason is None else "atten_mask")
    assert reason is None or any(reason in each.reason for each in block.missed)


def test_a_rank_gets_the_band_as_a_mask() -> None:
    graph = ir.from_proto(model("m = Less(j, i)"))
    (block,) = fuse(graph, Options(divided=True)).blocks
    assert block.mask == "atten_mask"
    assert "divided along the sequence" in block.missed[0].reason


def test_window_behind_cached_keys() -> None:
    block, attrs = same(
        model(PAST + "d = Sub(ip, j) a = LessOrEqual(j, ip) w = Less(d, three) m = And(a, w)", inputs=CACHED)
    )
    assert (block.mask, attrs) == ("band", {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0})


def test_no_mask_is_left_of_one_that_keeps_everything() -> None:
    block, attrs = same(model("e = Add(i, columns) m = Less(j, e)"))
    assert (block.mask, attrs["sparse_mode"]) == ("none", 0)


@pytest.mark.parametrize("guard", ["", "low"])
@pytest.mark.parametrize(
    "mask",
    [
        "c = LessOrEqual(j, i) m = And(c, pad)",
        "c = Greater(j, i) n = Not(pad) o = Or(c, n) m = Not(o)",
        "t = Mod(j, two) e = Equal(t, zero) c = LessOrEqual(j, i) m = And(e, c)",
    ],
)
def test_padding_beside_a_band(mask: str, guard: str) -> None:
    use = SELECT if not guard else FLOAT
    block, attrs = same(model(mask, use, more="bool[B,1,1,S] pad"))
    assert (block.mask, attrs["sparse_mode"]) == ("causal+atten_mask", 2)
    assert "EXT-BAND-MASK" in block.extensions


BITWISE = "c = GreaterOrEqual(i, j) band = Cast<to=7>(c) own = Cast<to=7>(pad) "
BY_BITS = {
    "And": "n = BitwiseAnd(band, own) m = Cast<to=9>(n)",
    "And with 1, multiplied": "o = BitwiseAnd(own, one) n = Mul(band, o) m = Cast<to=9>(n)",
    "Or of what is masked": "d = Sub(one, band) o = Sub(one, own) n = BitwiseOr(d, o) m = Equal(n, zero)",
    "of numbers of several bits": "o = Mul(own, three) b = Add(band, two) n = BitwiseAnd(b, o) m = Equal(n, three)",
}


@pytest.mark.parametrize("mask", BY_BITS.values(), ids=BY_BITS)
def test_a_band_and_padding_by_the_bits_of_integers(mask: str) -> None:
    block, attrs = same(model(BITWISE + mask, SELECT, more="bool[B,1,1,S] pad", opset=18))
    assert (block.mask, attrs["sparse_mode"]) == ("causal+atten_mask", 2)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ("o = BitwiseAnd(own, two) n = Mul(band, o) m = Cast<to=9>(n)", "atten_mask"),
        ("n = BitwiseOr(band, own) m = Cast<to=9>(n)", "atten_mask"),
        ("o = BitwiseAnd(own, i) n = Mul(band, o) m = Cast<to=9>(n)", "atten_mask"),
    ],
    ids=["no common bit", "either", "bits of positions"],
)
def test_bits_that_make_no_band(mask: str, kept: str) -> None:
    block, _ = same(model(BITWISE + mask, SELECT, more="bool[B,1,1,S] pad", opset=18))
    assert block.mask == kept


AXES = (
    "axis0 = Constant<value=int64[1] {0}>() axis1 = Constant<value=int64[1] {1}>() "
    "to4 = Constant<value=int64[2] {0, 1}>() mid = Constant<value=int64[2] {1, 2}>() "
    "axis3 = Constant<value=int64[1] {3}>() "
    "b_ = Shape<start=0, end=1>(q) full = Concat<axis=0>(b_, axis1, rows_, columns_) "
)
ASSIGNED = (
    AXES + "low1 = ConstantOfShape<value=float[1] {-3.4028234663852886e38}>(square) low2 = Trilu<upper=1>(low1, one) "
    "g = Greater(j, i) gf = Cast<to=1>(g) low3 = Mul(low2, gf) low4 = Unsqueeze(low3, to4) data = Expand(low4, full) "
    "pad4 = Unsqueeze(pad, mid) padf = Cast<to=1>(pad4) sum = Add(data, padf) e = Equal(sum, nothing) "
    "update = Where(e, low, data) bs = Squeeze(b_) b1 = Range(zero, bs, one) h1 = Range(zero, one, one) "
    "shape_b = Constant<value=int64[4] {-1, 1, 1, 1}>() shape_h = Constant<value=int64[3] {-1, 1, 1}>() "
    "nb = Reshape(b1, shape_b) nh = Reshape(h1, shape_h) nb_ = Expand(nb, full) nh_ = Expand(nh, full) "
    "ni_ = Expand(i, full) nj_ = Expand(j, full) pb = Unsqueeze(nb_, last) ph = Unsqueeze(nh_, last) "
    "pi = Unsqueeze(ni_, last) pj = Unsqueeze(nj_, last) places = Concat<axis=-1>(pb, ph, pi, pj) "
    "assigned = ScatterND(data, places, update) f = Slice(assigned, first, columns_, axis3) "
)
"""Padding that transformers 4.57 writes into a slice of a causal mask, as TorchScript exports the assignment."""
EXPANDED_FLOATS = (
    AXES + "pad4 = Unsqueeze(pad, mid) wide = Expand(pad4, full) padf = Cast<to=1>(wide) "
    "unit = Constant<value=float {1.0}>() inverted = Sub(unit, padf) c = Cast<to=9>(inverted) "
    "whole = Where(c, low, inverted) f = Slice(whole, first, columns_, axis3) "
)
"""Padding that transformers 4.57 expands to the rows of an encoder, and cuts to the keys."""


BEHIND_CACHED = PAST + ASSIGNED.replace("Greater(j, i)", "Greater(j, ip)")
"""The same in a decoder with cached keys: Trilu cuts a triangle, and the comparison cuts a smaller one out of it."""
BOTH_MASKS = EXPANDED_FLOATS.replace("low,", "minus,") + "c2 = LessOrEqual(j, i) f2 = Where(c2, nothing, minus) "


FOLDED = (
    "four = Constant<value=int64[1] {4}>() axis1 = Constant<value=int64[1] {1}>() b_ = Shape<start=0, end=1>(q) "
    "zeros = ConstantOfShape<value=float[1] {0.0}>(square) tri0 = ConstantOfShape<value=float[1] {-inf}>(square) "
    "tri = Trilu<upper=1>(tri0, one) tri3 = Unsqueeze(tri, first) none = ConstantOfShape<value=float[1] {0.0}>(rows_) "
    "padf = Where(pad, minus, none) to4 = Concat<axis=0>(b_, axis1, axis1, columns_) pad4 = Reshape(padf, to4) "
    "ones4 = Concat<axis=0>(axis1, four, axis1, axis1) wide = Expand(pad4, ones4) bh = Mul(b_, four) "
    "to3 = Concat<axis=0>(bh, axis1, columns_) pad3 = Reshape(wide, to3) both = Add(tri3, pad3) "
)
"""The causal mask and the padding of torch.nn.MultiheadAttention: it folds the heads into the batch."""
APART = FOLDED + "apart = Concat<axis=0>(b_, four, rows_, columns_) f = Reshape(both, apart) x = Add(s, f) "
TOGETHER = (
    FOLDED + "together = Concat<axis=0>(bh, rows_, columns_) s3 = Reshape(s, together) x3 = Add(s3, both) "
    "p3 = Softmax<axis=-1>(x3) tov = Concat<axis=0>(bh, columns_, last) v3 = Reshape(v, tov) y3 = MatMul(p3, v3) "
    "back = Shape(q) y = Reshape(y3, back) "
)


@pytest.mark.parametrize(
    ("body", "old", "new", "label"),
    [
        (APART, "", "", "causal+atten_mask"),
        (TOGETHER, "", "", "causal+atten_mask"),
        # The batch is folded into the heads, so that padding of one sequence stands at heads of others.
        (
            APART,
            "ones4 = Concat<axis=0>(axis1, four, axis1, axis1)",
            "ones4 = Concat<axis=0>(four, axis1, axis1, axis1)",
            "",
        ),
        (
            TOGETHER,
            "ones4 = Concat<axis=0>(axis1, four, axis1, axis1)",
            "ones4 = Concat<axis=0>(four, axis1, axis1, axis1)",
            "",
        ),
    ],
)
def test_masks_of_heads_that_are_folded_into_the_batch(body: str, old: str, new: str, label: str) -> None:
    if not label:
        body = (
            body.replace(old, new)
            .replace("to4 = Concat<axis=0>(b_,", "to4 = Concat<axis=0>(axis1, b_,")
            .replace("axis1, axis1, columns_) pad4", "axis1, columns_) pad4")
        )
    text = PRODUCT_QK + NUMBERS + LENGTHS + GRID + body + ("" if "y =" in body else SOFTMAX.format("x") + PRODUCT_PV)
    proto = parse(text, "bool[B,S] pad", inputs=SELF, opset=17)
    result, report = fused(proto)
    (block,) = report.blocks
    assert block.mask == (label or "atten_mask") and bool(block.missed) == (not label)
    for batch, rows in ((2, 5), (1, 1), (3, 7), (4, 4)):
        feeds = feeds_of(proto, {"B": batch, "S": rows})
        feeds["pad"][0] = True
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def _shape_of_mask(result: onnx.ModelProto, feeds: dict[str, np.ndarray], place: int = 6) -> tuple[int, ...]:
    """The shape of the fused node's atten_mask in a run, or of its real_shift at place 3."""
    (node,) = (node for node in result.graph.node if node.op_type == "FlashAttentionScore")
    seen = onnx.ModelProto.FromString(result.SerializeToString())
    dtype = onnx.TensorProto.BOOL if place == 6 else onnx.TensorProto.FLOAT
    seen.graph.output.append(onnx.helper.make_tensor_value_info(node.input[place], dtype, None))
    return run(seen, feeds)[-1].shape


@pytest.mark.parametrize(
    ("mask", "use", "label"),
    [
        (ASSIGNED, "x = Add(s, f) ", "causal+atten_mask"),
        (BEHIND_CACHED, "x = Add(s, f) ", "causal+atten_mask"),
        (EXPANDED_FLOATS, "x = Add(s, f) ", "atten_mask"),
        (BOTH_MASKS, "x1 = Add(s, f) x = Add(x1, f2) ", "causal+atten_mask"),
    ],
    ids=["assigned", "behind cached keys", "expanded", "expanded beside another mask"],
)
def test_padding_in_the_masks_of_optimum_has_one_row(mask: str, use: str, label: str) -> None:
    inputs, keys = (CACHED, "P + S") if mask == BEHIND_CACHED else (SELF, "S")
    proto = model(mask, use, inputs, f'int64[B,"{keys}"] pad')
    result, report = fused(proto)
    assert [(block.mask, block.missed) for block in report.blocks] == [(label, ())]
    for batch, rows, past in ((2, 5, 3), (1, 1, 0), (3, 70, 2), (2, 0, 1), (0, 3, 2), (1, 4, 66)):
        columns = past + rows if mask == BEHIND_CACHED else rows
        feeds = feeds_of(proto, {"B": batch, "S": rows, "P + S": columns})
        # Values other than 0 and 1 are padding in neither spelling, or make the second one a bias.
        low, high = (-1, 3) if mask in (ASSIGNED, BEHIND_CACHED) else (0, 2)
        feeds["pad"] = np.random.default_rng(rows).integers(low, high, (batch, columns))
        feeds["pad"][:1] = 0
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
        assert _shape_of_mask(result, feeds) == (batch, 1, 1, columns)


@pytest.mark.parametrize("use", [SELECT, FLOAT])
def test_two_triangles_that_do_not_contain_one_another_are_no_band(use: str) -> None:
    """Trilu cuts at the row, and the comparison at another place before the cached keys: what is left is a stripe."""
    mask = "o = ConstantOfShape<value=float[1] {1.0}>(square) t = Trilu<upper=1>(o, one) g = Less(j, ip) "
    mask += "gf = Cast<to=1>(g) tg = Mul(t, gf) n = Cast<to=9>(tg) m = Not(n)"
    proto = model(PAST + mask, use, CACHED)
    result, report = fused(proto)
    assert report.blocks[0].mask == "atten_mask"
    for rows, past in ((5, 3), (1, 0), (4, 0)):
        feeds = feeds_of(proto, {"B": 2, "S": rows, "P + S": past + rows})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ni_ = Expand(i, full)", "end = Sub(rows, one) back = Sub(end, i) ni_ = Expand(back, full)"),
        ("ScatterND(", 'ScatterND<reduction="add">('),
        (
            "padf = Cast<to=1>(pad4)",
            "padh = Cast<to=1>(pad4) half = Constant<value=float {0.5}>() padf = Mul(padh, half)",
        ),
        ("Equal(sum, nothing)", "Equal(sum, padf)"),
    ],
    ids=["rows backwards", "added", "not an integer", "not 0"],
)
def test_other_assignments_stay_tensors(old: str, new: str) -> None:
    assert ASSIGNED.count(old) == 1
    proto = model(ASSIGNED.replace(old, new), "x = Add(s, f) ", more="int64[B,S] pad")
    result, report = fused(proto)
    assert "causal" not in report.blocks[0].mask
    for batch, rows in ((2, 5), (1, 1)):
        feeds = feeds_of(proto, {"B": batch, "S": rows})
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize(("kind", "wraps"), [(4, 1 << 16), (12, 1 << 32)], ids=["uint16", "uint32"])
def test_a_cast_that_wraps_makes_another_number_of_the_padding(kind: int, wraps: int) -> None:
    """65536 is padding as an int64, and none as the 0 that a uint16 makes of it."""
    cast = "padf = Cast<to=1>(pad4)"
    assert ASSIGNED.count(cast) == 1
    wrapped = f"padu = Cast<to={kind}>(pad4) padf = Cast<to=1>(padu)"
    proto = model(ASSIGNED.replace(cast, wrapped), "x = Add(s, f) ", more="int64[B,S] pad")
    result, _ = fused(proto)
    feeds = feeds_of(proto, {"B": 1, "S": 3}) | {"pad": np.array([[1, 1, wraps]], np.int64)}
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_rows_of_zeros_with_another_sign_are_not_the_same_row() -> None:
    """Dividing by the constant tells 0.0 from -0.0, although they are equal."""
    zeros = np.zeros((1, 1, 6, 6), np.float32)
    zeros[:, :, 3:] = -0.0
    inputs = "float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v, float[1,1,1,6] w"
    more = "float[1,1,6,6] c, float w0"
    proto = model("r = Div(w, c) m = Greater(r, w0) ", "x = Where(m, s, low) ", inputs, more)
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 6
    del proto.graph.input[-2:]
    for name, array in (("c", zeros), ("w0", np.array(0, np.float32))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    result, _ = fused(proto)
    feeds = feeds_of(proto, {"B": 1, "S": 6}) | {"w": np.array([[[[1, -1, 1, -1, 1, -1]]]], np.float32)}
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("fill", "between", "label"),
    [
        ("minus", "Identity(t)", "causal+atten_mask"),
        ("low", "Identity(t)", "causal+real_shift"),
        ("minus", "Max(t, low)", "real_shift"),
    ],
)
def test_added_masks_are_merged_where_both_hold_minus_infinity(fill: str, between: str, label: str) -> None:
    """Beside a finite number, also one that a Max makes of -inf, a row that is masked everywhere has other weights."""
    mask = f"m = LessOrEqual(j, i) f = Where(m, nothing, minus) g = Where(pad, nothing, {fill}) t = Add(s, f) "
    proto = model(mask, f"u = {between} x = Add(u, g) ", more="bool[B,1,1,S] pad")
    block, _ = same(proto)
    assert block.mask == label


@pytest.mark.parametrize(
    ("use", "label"),
    [
        ("t = Add(s, f) x = Where(pad, t, minus) ", "causal+atten_mask"),
        ("t = Where(pad, s, minus) x = Add(t, f) ", "causal+atten_mask"),
        ("b = Add(s, bias) t = Add(b, f) x = Where(pad, t, minus) ", "causal+atten_mask+real_shift"),
        ("t = Add(s, f) u = Max(t, low) x = Where(pad, u, minus) ", "atten_mask+real_shift"),
    ],
)
def test_an_added_and_a_selected_mask_are_merged_where_both_hold_minus_infinity(use: str, label: str) -> None:
    mask = "m = LessOrEqual(j, i) f = Where(m, nothing, minus)"
    more = "bool[B,1,1,S] pad" + (", float[1,4,S,S] bias" if "bias" in use else "")
    block, _ = same(model(mask, use, more=more))
    assert block.mask == label


NEAR_MISSES = {
    "counted through the rows from one": (
        FROM_ONE + "c = Mod(plane, columns_) r = Div(plane, columns_) d = Sub(c, r) n = Greater(d, zero) m = Not(n)",
        SELF,
        "",
    ),
    "offset is an input": ("i2 = Add(i, off) m = LessOrEqual(j, i2)", SELF, "int64[1] off"),
    "every second key of every row": (
        "t = Mod(j, two) u = Mod(i, two) e = Equal(t, u) c = LessOrEqual(j, i) m = And(e, c)",
        SELF,
        "",
    ),
    "chunks": ("ci = Div(i, three) cj = Div(j, three) e = Equal(ci, cj) c = LessOrEqual(j, i) m = And(e, c)", SELF, ""),
    "twice the row": ("i2 = Mul(i, two) m = LessOrEqual(j, i2)", SELF, ""),
    "prefix or causal": ("pr = Less(j, three) c = LessOrEqual(j, i) m = Or(pr, c)", SELF, ""),
    "padded rows": ("c = LessOrEqual(j, i) m = And(c, pad)", SELF, "bool[B,1,S,1] pad"),
    "mask of another length": (
        "n1 = Shape<start=0, end=1>(other) n = Squeeze(n1) r = Range(zero, n, one) ri = Unsqueeze(r, last) "
        "rj = Unsqueeze(r, first) m = LessOrEqual(rj, ri)",
        SELF,
        "float[U] other",
    ),
    "window of unknown width": (
        "d = Sub(i, j) c = LessOrEqual(j, i) w = Less(d, width) m = And(c, w)",
        SELF,
        "int64[1] width",
    ),
    "counted through rows of another length": (
        FLAT + "c = Mod(plane, rows_) r = Div(plane, rows_) m = LessOrEqual(c, r)",
        CROSS,
        "",
    ),
    "counted in twos": (
        FLAT + "flat2 = Mul(plane, two) c = Mod(flat2, columns_) r = Div(flat2, columns_) m = LessOrEqual(c, r)",
        SELF,
        "",
    ),
    "counted from one": (
        FLAT.replace("exclusive=1", "exclusive=0") + "c = Mod(plane, columns_) r = Div(plane, columns_) "
        "m = LessOrEqual(c, r)",
        SELF,
        "",
    ),
    "counted in a float": (
        FLAT + "fl = Cast<to=1>(plane) fc = Cast<to=1>(columns_) r = Div(fl, fc) c = Mod(plane, columns_) "
        "cf = Cast<to=1>(c) m = LessOrEqual(cf, r)",
        SELF,
        "",
    ),
    "causal among keys only": ("jj = Sub(columns, one) m = Less(j, jj)", SELF, ""),
}


@pytest.mark.parametrize(("mask", "inputs", "more"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_stay_tensors(mask: str, inputs: str, more: str) -> None:
    proto = model(mask, inputs=inputs, more=more)
    result, report = fused(proto)
    (block,) = report.blocks
    assert (block.status, block.mask) == ("fused", "atten_mask"), block
    for rows, keys in ((6, 9), (1, 1), (5, 5)):
        sizes = {"B": 2, "S": rows, "T": keys, "U": rows}
        feeds = feeds_of(proto, sizes)
        for name, number in (("off", 2), ("width", 3)):
            if name in feeds:
                feeds[name] = np.array([number], np.int64)
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


def test_a_range_that_starts_at_a_vector_is_not_read() -> None:
    """It runs where the vector has one element."""
    mask = "a1 = Range(i1, rows, one) g = Gather(a1, i1) a = Unsqueeze(g, last) m = LessOrEqual(j, a)"
    _, report = fused(model(mask))
    assert [(block.status, block.mask) for block in report.blocks] == [("fused", "atten_mask")]


@pytest.mark.parametrize(
    ("cut", "status"), [("Slice(number, first, last)", "fused"), ("Gather<axis=0>(number, first)", "declined")]
)
def test_a_part_of_a_scalar_is_not_read(cut: str, status: str) -> None:
    """ONNX's shape inference does not know that it is one, so that the model is refused only when it runs."""
    mask = f"axis = Sub(first, first) number = Squeeze(rows_, axis) part = {cut} m = LessOrEqual(j, part)"
    (block,) = fused(model(mask))[1].blocks
    assert block.status == status


@pytest.mark.parametrize("use", [FLOAT, SELECT])
def test_rows_beyond_the_keys_are_empty(use: str) -> None:
    """Causal from the bottom right corner: with more rows than keys the first ones see none."""
    proto = model("past = Sub(rows, columns) i2 = Sub(i, past) m = LessOrEqual(j, i2)", use, CROSS)
    result, report = fused(proto)
    (block,) = report.blocks
    assert (block.mask, block.extensions) == ("causal", ("EXT-BAND-MASK", "EXT-EMPTY-ROWS"))
    for rows, keys in ((6, 9), (9, 6), (5, 5), (4, 1)):
        feeds = feeds_of(proto, {"B": 2, "S": rows, "T": keys})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_one_query_row_sees_all_keys() -> None:
    proto = model(
        PAST + "m = LessOrEqual(j, ip)", inputs=CACHED.replace("B,4,S,8", "B,4,1,8").replace("P + S", "P + 1")
    )
    result, report = fused(parse_again(proto))
    assert report.blocks[0].mask == "none"
    feeds = feeds_of(proto, {"B": 2, "P + 1": 5, "P": 4})
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def parse_again(proto: onnx.ModelProto) -> onnx.ModelProto:
    proto.graph.output[0].type.tensor_type.shape.dim[2].Clear()
    return proto


@pytest.mark.parametrize(
    "mask", ["m = LessOrEqual(j, i)", "d = Sub(i, j) a = LessOrEqual(j, i) w = Less(d, three) m = And(a, w)"]
)
def test_ascend_takes_the_triangle(mask: str) -> None:
    """A finite mask that is proven to leave every row a key is a mode there, too."""
    block, attrs = same(model(mask), target="ascend")
    assert attrs["sparse_mode"] in (2, 4)
    assert not block.extensions


@pytest.mark.parametrize(("target", "shape"), [("ort", [1, 1, 1, 1]), ("ascend", [2048, 2048])])
def test_layers_share_the_mask_of_the_mode(target: Target, shape: list[int]) -> None:
    """The CPU kernel computes the band, so its file holds no triangle of 4 MiB."""
    body = (
        PRODUCT_QK
        + NUMBERS
        + LENGTHS
        + GRID
        + "m = LessOrEqual(j, i) "
        + FLOAT
        + SOFTMAX.format("x")
        + "y1 = MatMul(p, v) s2 = MatMul(y1, kt) x2 = Add(s2, f) p2 = Softmax<axis=-1>(x2) y = MatMul(p2, v)"
    )
    result, report = fused(parse(body, inputs=SELF), target)
    assert [block.mask for block in report.blocks] == ["causal", "causal"]
    sizes = [list(each.dims) for each in result.graph.initializer]
    assert sizes.count(shape) == 1
    assert target == "ascend" or [2048, 2048] not in sizes


@pytest.mark.parametrize(("kept", "structured"), [("bool[B,1,1,T] kept", True), ("bool[B,1,R,T] kept", False)])
def test_padding_of_one_column_for_a_known_number_of_keys(kept: str, structured: bool) -> None:
    """The exporter baked the number of keys in, but not that of the padding, which may be 1 then, and is repeated."""
    causal = (
        "square = Constant<value=int64[2] {6,6}>() all = ConstantOfShape<value=int64[1] {1}>(square) "
        "below = Trilu<upper=0>(all) c = Cast<to=9>(below) t = Where(c, s, low) "
    )
    inputs = f"float[2,4,6,8] q, float[2,4,6,8] k, float[2,4,6,8] v, {kept}"
    body = PRODUCT_QK + NUMBERS + causal + "x = Where(kept, t, minus) " + SOFTMAX.format("x") + PRODUCT_PV
    proto = parse(body, inputs=inputs, opset=17)
    result, report = fused(proto)
    assert not report.blocks[0].missed if structured else report.blocks[0].missed
    for batch, keys in ((2, 6), (1, 6), (2, 1), (1, 1)):
        feeds = feeds_of(proto, {"B": batch, "T": keys, "R": 6})
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


def test_a_number_that_a_mask_adds_nowhere() -> None:
    """The triangle begins behind the last key; a floor follows."""
    body = "sizes = Constant<value=int64[2] {5,2}>() two = Constant<value=int64 {2}>() "
    body += "all = ConstantOfShape<value=float[1] {-1e4}>(sizes) f = Trilu<upper=1>(all, two) a = Add(s, f) "
    body += "least = Constant<value=float {-3.4e38}>() x = Max(a, least) "
    inputs = "float[2,4,5,8] q, float[2,4,2,8] k, float[2,4,2,8] v"
    proto = parse(PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV, inputs=inputs)
    result, report = fused(proto)
    assert report.count("fused") == 1
    feeds = feeds_of(proto, {})
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize("number", ["-1e4", "-65504"])
def test_a_number_that_padding_adds_is_made_from_one_row(number: str) -> None:
    """The number may not outweigh the scores, so the mask stays a bias; but no bias of all rows is made or read."""
    use = f"much = Constant<value=float {{{number}}}>() f = Where(m, nothing, much) x = Add(s, f) "
    block, _ = same(model("always = GreaterOrEqual(i, zero) m = And(always, kept)", use, more="bool[B,1,1,S] kept"))
    assert (block.mask, block.missed) == ("real_shift", ())


@pytest.mark.parametrize(
    "sizes",
    [
        "sizes = Constant<value=int64[4] {2,4,5,6}>() ",
        "heads = Constant<value=int64[2] {2,4}>() rest = Constant<value=int64[2] {5,6}>() "
        "sizes = Concat<axis=0>(heads, rest) ",
    ],
)
def test_a_mask_that_known_sizes_expand_is_read_by_row(sizes: str) -> None:
    """Exporters bake sizes in: an Expand to numbers may widen other dimensions than that of the rows, too."""
    body = f"{sizes} m = Expand(kept, sizes) {SELECT}"
    inputs = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v, bool[B,1,1,T] kept"
    proto = parse(PRODUCT_QK + NUMBERS + body + SOFTMAX.format("x") + PRODUCT_PV, inputs=inputs, opset=17)
    result, report = fused(proto)
    assert (report.blocks[0].mask, report.blocks[0].missed) == ("atten_mask", ())
    for shape in ((2, 6), (1, 6), (2, 1)):
        feeds = feeds_of(proto, {"B": shape[0], "T": shape[1]})
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


EXPANDED = (
    "b_ = Shape<start=0, end=1>(q) n_ = Constant<value=int64[1] {1}>() full = Concat<axis=0>(b_, n_, rows_, rows_) "
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        "m_ = Expand(pad, full)",
        "pi = Cast<to=7>(pad) e = Expand(pi, full) f_ = Cast<to=1>(e) w = Constant<value=float {1.0}>() "
        "d = Sub(w, f_) inv = Cast<to=9>(d) m_ = Not(inv)",
    ],
)
def test_padding_that_is_expanded_over_the_rows(mask: str, causal: bool) -> None:
    """Older exporters expand a padding mask before they invert it: of the S x S elements one row is computed."""
    tail = "c = LessOrEqual(j, i) m = And(c, m_)" if causal else "m = Identity(m_)"
    proto = model(EXPANDED + mask + " " + tail, more="bool[B,1,1,S] pad")
    block, attrs = same(proto)
    assert (block.mask, attrs["sparse_mode"]) == (("causal+atten_mask", 2) if causal else ("atten_mask", 0))
    result, _ = fused(proto)
    assert "Expand" not in {node.op_type for node in result.graph.node}


@pytest.mark.parametrize("more", ["", "d_ = Cast<to=7>(e_) nd = Cast<to=9>(d_) n_e = Not(nd) "])
def test_padding_of_another_size_that_is_expanded_over_heads_and_rows(more: str) -> None:
    """Of the rows one is computed, for each head. A single column is one for all keys."""
    full = EXPANDED.replace("n_ = Constant<value=int64[1] {1}>()", "n_ = Constant<value=int64[1] {4}>()")
    proto = model(
        full + "e_ = Expand(pad, full) " + more + f"m = Identity({'n_e' if more else 'e_'})", more="bool[C,1,1,U] pad"
    )
    result, report = fused(proto)
    (block,) = report.blocks
    assert (block.status, block.mask, block.missed) == ("fused", "atten_mask", ())
    for batch, rows, masks, columns in ((2, 5, 2, 5), (2, 5, 1, 1), (1, 1, 1, 1), (3, 70, 3, 70)):
        feeds = feeds_of(proto, {"B": batch, "S": rows, "C": masks, "U": columns})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


CHUNKED = (
    "three_ = Constant<value=int64[1] {3}>() axis1 = Constant<value=int64[1] {1}>() "
    "axis2 = Constant<value=int64[1] {2}>() unit = Constant<value=float {1.0}>() "
    "b_ = Shape<start=0, end=1>(q) all_ = Add(rows_, three_) full = Concat<axis=0>(b_, all_, axis1) "
    "ones = Expand(unit, full) numbers = Cast<to=1>(pad) wide = Mul(ones, numbers) "
    "some = Slice(wide, three_, all_, axis1) part = Slice(some, three_, all_, axis2) four = Unsqueeze(part, axis1) "
    "inverted = Sub(unit, four) f = Mul(inverted, low) x = Add(s, f) "
)
"""The mask of a chunk of CANINE: a number for each key, repeated for the rows by a product with ones, and cut twice."""


def test_a_mask_that_is_repeated_by_ones_and_cut_has_one_row() -> None:
    proto = model("", CHUNKED, more='int64[B,1,"S + 3"] pad')
    result, report = fused(proto)
    assert [(block.mask, block.missed) for block in report.blocks] == [("real_shift", ())]
    for batch, rows in ((2, 5), (1, 1), (3, 70), (2, 0), (0, 3)):
        feeds = feeds_of(proto, {"B": batch, "S": rows, "S + 3": rows + 3})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
        assert _shape_of_mask(result, feeds, place=3) == (batch, 1, 1, rows)


OWN_ROWS = (
    "four_ = Constant<value=int64[1] {4}>() eight_ = Constant<value=int64[1] {8}>() m1 = Min(rows_, four_) "
    "m2 = Sub(m1, four_) m3 = Min(rows_, eight_) chunks = Add(m2, m3) "
    "own = ROWS count = Squeeze(own) r1 = Range(zero, count, one) r = Unsqueeze(r1, last) "
    "always = GreaterOrEqual(r, zero) both = And(always, kept) axis1 = Constant<value=int64[1] {1}>() "
    "b_ = Shape<start=0, end=1>(q) t_ = Shape<start=3, end=4>(kept) full = Concat<axis=0>(b_, axis1, own, t_) "
    "m = Expand(both, full) "
)
"""Padding of T keys with rows that are counted apart. `chunks` is the number of rows if there are 4 to 8, and negative
if there is one: CANINE counts the rows of two chunks so."""


@pytest.mark.parametrize(
    ("rows", "alike"), [("Identity(chunks)", True), ("Add(rows_, rows_)", False), ("Shape(other)", False)]
)
def test_padding_whose_sizes_are_not_proven(rows: str, alike: bool) -> None:
    """The operator compares the columns with its keys, but it gets no rows. So they must not make one row several."""
    proto = model(OWN_ROWS.replace("ROWS", rows), more="bool[B,1,1,T] kept, float[U] other")
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "rows of the result"
    result, report = fused(proto)
    (block,) = report.blocks
    assert (block.mask, bool(block.missed)) == ("atten_mask", not alike)
    for size, columns in ((4, 4), (7, 7), (8, 1)) if alike else ():
        feeds = feeds_of(proto, {"B": 2, "S": size, "T": columns, "U": 1})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
        assert _shape_of_mask(result, feeds) == (2, 1, 1, columns)
    if not alike:
        enlarging = feeds_of(proto, {"B": 2, "S": 1, "T": 1, "U": 2})
        assert run(proto, enlarging)[0].shape[2] == 2
        with refused("atten_mask"):
            run(result, enlarging)


BESIDE_BIAS = {
    "bias, then mask": "t = Add(s, bias) f = Where(m, nothing, low) x = Add(t, f) ",
    "mask, then bias": "f = Where(m, nothing, low) t = Add(s, f) x = Add(t, bias) ",
    "bias and mask added up first": "f = Where(m, nothing, low) t = Add(bias, f) x = Add(s, t) ",
    "bias or a low number": "t = Where(m, bias, low) x = Add(s, t) ",
    "mask of -inf": "f = Where(m, nothing, minus) t = Add(s, bias) x = Add(t, f) ",
}


@pytest.mark.parametrize("use", BESIDE_BIAS.values(), ids=BESIDE_BIAS)
@pytest.mark.parametrize("padded", [False, True])
def test_mask_beside_a_bias(use: str, padded: bool) -> None:
    """A bias that is proven small stays a bias of its own size, and the mask beside it becomes a mode."""
    bias = (
        "table = Constant<value=float[9,4] {" + ", ".join(str((k * 7 % 11) / 4 - 1) for k in range(36)) + "}>() "
        "d_ = Sub(j, i) top = Constant<value=int64 {4}>() bottom = Constant<value=int64 {-4}>() "
        "c1 = Max(d_, bottom) c2 = Min(c1, top) at = Add(c2, top) rows4 = Gather(table, at) "
        "bias3 = Transpose<perm=[2,0,1]>(rows4) bias = Unsqueeze(bias3, first) "
    )
    mask = "c = LessOrEqual(j, i) m = And(c, pad) " if padded else "m = LessOrEqual(j, i) "
    block, attrs = same(model(mask + bias, use, more="bool[B,1,1,S] pad" if padded else ""))
    assert block.mask == ("causal+atten_mask+real_shift" if padded else "causal+real_shift")
    assert attrs["sparse_mode"] == 2


@pytest.mark.parametrize(
    ("bias", "label"),
    [
        ("e = Exp(b) ", "causal+real_shift"),
        ("e = Identity(b) ", "real_shift"),
        ("n = Exp(b) e = Neg(n) ", "real_shift"),
    ],
    ids=["above", "unknown", "as low"],
)
def test_a_bias_or_a_low_number_that_is_repeated_for_several_heads(bias: str, label: str) -> None:
    """As in Doge. The low number stands in place of the bias, which only has to stay above it, however large it is."""
    repeats = (
        "h = Constant<value=int64[5] {1,1,2,1,1}>() t5 = Constant<value=int64[1] {2}>() u = Unsqueeze(t, t5) "
        "w = Expand(u, h) four = Constant<value=int64[1] {4}>() b_ = Shape<start=0, end=1>(q) "
        "full = Concat<axis=0>(b_, four, rows_, columns_) r = Reshape(w, full) x = Add(s, r) "
    )
    body = "m = LessOrEqual(j, i) " + bias + "t = Where(m, e, low) "
    proto = model(body, repeats, more="float[B,2,1,S] b")
    block, _ = same(proto)
    assert (block.mask, block.missed[-1].code) == (label, MissedCode.EXPANDED_MASK)
    feeds = feeds_of(proto, {"B": 2, "S": 6})
    feeds["b"][0, 1, 0, 3:] = [200.0, np.inf, np.nan]  # the rows before these keys do not see them
    assert_same(run(fused(proto)[0], feeds)[0], run(proto, feeds)[0], 1e-5)


MORE_TOKENS = (
    "t_ = Shape<start=3, end=4>(pad) count = Squeeze(t_) j2 = Range(zero, count, one) jt = Unsqueeze(j2, first) "
    "c = LessOrEqual(jt, i) kept = And(c, pad) z = Where(kept, nothing, low) axis3 = Constant<value=int64[1] {3}>() "
    "cut = Slice(z, first, columns_, axis3) e_ = Equal(cut, nothing) n = Not(e_) e = Exp(b) t = Where(n, low, e) "
    "h = Constant<value=int64[5] {1,1,2,1,1}>() t5 = Constant<value=int64[1] {2}>() u = Unsqueeze(t, t5) "
    "w = Expand(u, h) four = Constant<value=int64[1] {4}>() b_ = Shape<start=0, end=1>(q) least = Min(t_, columns_) "
)
"""The mask of Doge for T tokens, of which the keys are the first ones: it stands in place of a bias."""


@pytest.mark.parametrize(("stated", "label"), [("least", "causal+atten_mask"), ("columns_", "atten_mask")])
def test_a_mask_for_more_tokens_than_there_are(stated: str, label: str) -> None:
    """A mask of one column becomes one of all keys by the bias, and is no band then. A Reshape to the size of the cut
    mask fails in such a run, and one to the number of keys does not."""
    use = f"full = Concat<axis=0>(b_, four, rows_, {stated}) r = Reshape(w, full) x = Add(s, r) "
    proto = model(MORE_TOKENS, use, more="float[B,2,1,S] b, bool[B,1,1,T] pad")
    result, report = fused(proto)
    assert [block.mask for block in report.blocks] == [f"{label}+real_shift"]
    for batch, rows, tokens in ((2, 5, 5), (2, 5, 9), (1, 1, 3), (3, 70, 71), (0, 3, 4)):
        feeds = feeds_of(proto, {"B": batch, "S": rows, "T": tokens})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    one_column = feeds_of(proto, {"B": 2, "S": 5, "T": 1})
    if stated == "columns_":
        assert_same(run(result, one_column)[0], run(proto, one_column)[0], 1e-5)
    else:
        with pytest.raises(ort_errors.Fail, match="reshaped"):
            run(proto, one_column)


STATED = (
    "b_ = Shape<start=0, end=1>(pad) axis1 = Constant<value=int64[1] {1}>() full = Concat<axis=0>(b_, axis1, square) "
    "always = GreaterOrEqual(i, zero) m = And(always, pad) z = Where(m, nothing, low) wide = Expand(z, full) "
    "u = Shape(other) least = Min(u, SIZE) lacking = Sub(SIZE, least) stated = STATED to = Concat<axis=0>(TO) "
    "f = Reshape(wide, to) x = Add(s, f) "
)
"""Padding whose Reshape states a number of rows or batch entries. A 0 in `to` copies the size."""


@pytest.mark.parametrize(
    ("place", "size", "stated", "other"),
    [(2, "rows_", "Add(rows_, lacking)", 0), (2, "rows_", "Max(rows_, u)", 2), (0, "axis1", "Add(axis1, lacking)", 0)],
)
def test_a_reshape_of_no_elements_proves_no_rows(place: int, size: str, stated: str, other: int) -> None:
    """Without keys a Reshape of the mask may state any number of rows or batch entries. The result has so many."""
    to = ", ".join("stated" if each == place else "first" for each in range(4))
    use = STATED.replace("SIZE", size).replace("STATED", stated).replace("TO", to)
    proto = model("", use, CROSS, f"bool[{'B' if place else 1},1,1,T] pad, float[U] other")
    proto.graph.output[0].type.tensor_type.shape.dim[place].dim_param = "size of the result"
    result, report = fused(proto)
    assert [block.mask for block in report.blocks] == ["atten_mask"]
    for batch, rows, keys in ((2, 5, 3), (1, 1, 4), (2, 3, 0)):
        feeds = feeds_of(proto, {"B": batch, "S": rows, "T": keys, "U": rows})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    enlarging = feeds_of(proto, {"B": 1, "S": 1, "T": 0, "U": other})
    assert run(proto, enlarging)[0].shape[place] == 2
    with refused("atten_mask"):
        run(result, enlarging)


@pytest.mark.parametrize("end", ["columns_", "rows_"])
def test_padding_for_more_tokens_is_cut_to_the_keys_only_where_the_model_does_so(end: str) -> None:
    """Cut to a single row's number, it is one column for all keys."""
    mask = "always = GreaterOrEqual(i, zero) m = And(always, pad) axis3 = Constant<value=int64[1] {3}>() "
    use = f"f = Where(m, nothing, minus) t = Slice(f, first, {end}, axis3) x = Add(s, t) "
    proto = model(mask, use, CROSS, "bool[B,1,1,U] pad")
    result, report = fused(proto)
    assert [block.mask for block in report.blocks] == ["atten_mask"]
    for rows, keys, tokens in ((5, 5, 5), (5, 5, 8), (1, 5, 8), (1, 5, 5), (5, 5, 1)):
        feeds = feeds_of(proto, {"B": 2, "S": rows, "T": keys, "U": tokens})
        if end == "columns_" or rows in (1, keys):
            assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


SUM_SIZES = "n_ = Shape(t) m0 = ConstantOfShape<value=bool[1] {1}>(n_) m = Trilu<upper=0>(m0) x = Where(m, t, minus) "


@pytest.mark.parametrize("bias", ["1,4,M,N", "1,4,6,6", "1,4,M,6", "1,4,1,N", "N"])
def test_a_triangle_as_large_as_the_sum_of_scores_and_a_bias(bias: str) -> None:
    """The operator refuses a bias of other rows and keys than the scores, so in its runs the triangle has theirs."""
    proto = model("t = Add(s, bias) ", SUM_SIZES, inputs=CROSS, more=f"float[{bias}] bias")
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "rows of the result"
    result, report = fused(proto)
    assert [(block.mask, block.missed) for block in report.blocks] == [("causal+real_shift", ())]
    feeds = feeds_of(proto, {"B": 2, "S": 6, "T": 6, "M": 6, "N": 6})
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    if bias in ("1,4,M,N", "1,4,6,6", "1,4,M,6"):
        enlarging = {**feeds, "q": feeds["q"][:, :, :1]}
        assert run(proto, enlarging)[0].shape[2] == 6
        with refused("real_shift"):
            run(result, enlarging)


def test_a_bias_that_is_the_same_for_all_rows_does_not_tell_how_many_there_are() -> None:
    """The operator gets one row of it. Where the scores have one row, the sum has as many as the bias."""
    body = (
        "m_ = Shape<start=0, end=1>(ids) o = Constant<value=int64[2] {1,1}>() full = Concat<axis=0>(o, m_, columns_) "
    )
    proto = model(
        body + "bias = Expand(row, full) t = Add(s, bias) ", SUM_SIZES, more="int64[M] ids, float[1,1,1,S] row"
    )
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_param = "rows of the result"
    result, report = fused(proto)
    assert [block.mask for block in report.blocks] == ["atten_mask+real_shift"]
    feeds = feeds_of(proto, {"B": 2, "S": 6, "M": 6})
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


TWO_MASKS = {
    "one after the other": "t = Add(s, f) x = Add(t, g) ",
    "the padding first": "t = Add(s, g) x = Add(t, f) ",
    "added up first": "t = Add(f, g) x = Add(s, t) ",
    "added up first, turned": "t = Add(g, f) x = Add(s, t) ",
    "added up first, cut to the keys": (
        "axis3 = Constant<value=int64[1] {3}>() t0 = Add(f, g) t = Slice(t0, first, columns_, axis3) x = Add(s, t) "
    ),
}


NAN_GUARD = "n = IsNaN(p) p0 = Where(n, nothing, p) y = MatMul(p0, v) "
FILLS = [("low", "low"), ("minus", "low"), ("low", "minus"), ("least", "low")]


@pytest.mark.parametrize(("use", "fills", "guard"), pairwise([*TWO_MASKS.values()], FILLS, [PRODUCT_PV, NAN_GUARD]))
def test_two_added_masks_of_finite_numbers(use: str, fills: tuple[str, str], guard: str) -> None:
    """A key that both masks exclude is -inf where the numbers overflow, so that a row without a key is the mean of the
    values that one mask alone excludes: the band is the mask, and what it excludes keeps its number and the padding's.
    """
    text = NUMBERS + LENGTHS + GRID + "least = Constant<value=float {-1e30}>() d = Sub(i, j) w = Less(d, three) "
    text += f"a = LessOrEqual(j, i) m = And(a, w) f = Where(m, nothing, {fills[0]}) "
    text += f"g = Where(pad, nothing, {fills[1]}) "
    proto = parse(PRODUCT_QK + text + use + SOFTMAX.format("x") + guard, "bool[B,1,1,S] pad", inputs=SELF)
    result, report = fused(proto)
    assert [(block.mask, block.missed) for block in report.blocks] == [("band+real_shift", ())]
    feeds = feeds_of(proto, {"B": 3, "S": 6})
    feeds["pad"][0], feeds["pad"][1], feeds["pad"][2, ..., :3], feeds["pad"][2, ..., 3:] = False, True, False, True
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    vouched, report = fused(proto, assume=["no-empty-rows"])
    assert report.blocks[0].mask == "band+atten_mask" and report.blocks[0].assumed == ("no-empty-rows",)
    # The rows that are not empty.
    for batch, first in ((1, 0), (2, 3)):
        got, wanted = (run(each, feeds)[0][batch, :, first:] for each in (vouched, proto))
        assert_same(got, wanted, 1e-5)


def test_a_mask_that_another_may_cancel_stays_a_part_of_the_sum() -> None:
    """low + (1 - 2) * low is 0: the scores of such keys are not lost in the sum of both."""
    text = NUMBERS + LENGTHS + GRID + "m = LessOrEqual(j, i) f = Where(m, nothing, low) whole = Cast<to=1>(pad) "
    text += "o = Constant<value=float {1.0}>() r = Sub(o, whole) g = Mul(r, low) t = Add(f, g) x = Add(s, t) "
    proto = parse(PRODUCT_QK + text + SOFTMAX.format("x") + NAN_GUARD, "int64[B,1,1,S] pad", inputs=SELF)
    result, report = fused(proto)
    assert [block.mask for block in report.blocks] == ["real_shift"]
    for number in (0, 1, 2):
        feeds = feeds_of(proto, {"B": 2, "S": 6})
        feeds["pad"][:] = number
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize("use", [TWO_MASKS["one after the other"], TWO_MASKS["added up first"]])
def test_two_added_bands_that_leave_each_row_a_key(use: str, target: Target) -> None:
    """No row is masked everywhere, so it does not matter that both numbers together are -inf."""
    mask = "d = Sub(i, j) m = LessOrEqual(j, i) w = Less(d, three) f = Where(m, nothing, low) "
    mask += "g = Where(w, nothing, low) "
    block, attrs = same(model(mask, use), target)
    assert (block.mask, block.missed, attrs["sparse_mode"]) == ("band", (), 4)


def test_a_slice_of_fewer_axes_than_starts_is_no_band() -> None:
    """ONNX Runtime refuses it when the model runs."""
    proto = model(BUFFER + "start = Concat<axis=0>(first, first) m = Slice(whole, start, square, axes)")
    (axes,) = (node.attribute[0].t for node in proto.graph.node if node.output[0] == "axes")
    axes.CopyFrom(onnx.numpy_helper.from_array(np.array([0])))
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    (block,) = fuse(ir.from_proto(proto)).blocks
    assert "causal" not in (block.mask or "")


def test_mask_beside_a_bias_of_unknown_size_keeps_a_score_with_the_bias() -> None:
    block, _ = same(model("m = LessOrEqual(j, i) ", BESIDE_BIAS["bias, then mask"], more="float[1,4,S,S] bias"))
    assert block.mask == "causal+real_shift"
    assert "EXT-MASKED-BIAS" in block.extensions


@pytest.mark.parametrize("use", [FLOAT, SELECT])
def test_a_constant_triangle_that_one_row_of_scores_would_broadcast_to(use: str) -> None:
    """The triangle has ten rows in every run, the scores ten or one: with one the sum has ten. That is no band."""
    numbers = ", ".join(str(int(j <= i)) for i in range(10) for j in range(10))
    body = PRODUCT_QK + NUMBERS + f"m = Constant<value=bool[10,10] {{{numbers}}}>() " + use + SOFTMAX.format("x")
    inputs = "float[B,4,S,8] q, float[B,4,10,8] k, float[B,4,10,8] v"
    proto = parse(body + PRODUCT_PV, inputs=inputs, outputs="float[B,4,R,8] y")
    result, report = fused(proto)
    assert report.blocks[0].mask == "atten_mask"
    feeds = feeds_of(proto, {"B": 2, "S": 10})
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    with pytest.raises(Exception, match="atten_mask"):
        run(result, feeds_of(proto, {"B": 2, "S": 1}))


def test_steps_of_integers_whose_differences_exceed_64_bits_are_not_read() -> None:
    assert even_steps(np.array([2**63 - 1, -(2**63)])) is None
    assert even_steps(np.array([2**63, 2**63 + 2], dtype=np.uint64)) is None
    assert even_steps(np.array([[0, 2, 4], [3, 5, 7]])) == [3, 2]


def test_a_prefix_that_becomes_a_tensor_keeps_what_is_assumed_beside_it() -> None:
    """Ascend has no guard against NaN, also where the batch is open, so that the prefix cannot be an input."""
    guard = " zero_ = Constant<value=float {0.0}>() t = IsNaN(p) g = Where(t, zero_, p) y = MatMul(g, v)"
    mask = "pr = Less(j, three) c = LessOrEqual(j, i) m = Or(pr, c) "
    body = PRODUCT_QK + NUMBERS + LENGTHS + GRID + mask + FLOAT + SOFTMAX.format("x") + guard
    proto = parse(body, inputs="float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v", opset=17)
    (block,) = fused(proto, "ascend")[1].blocks
    assert (block.status, block.mask, block.assumed) == ("fused", "atten_mask", ("finite-scores",))
