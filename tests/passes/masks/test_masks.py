"""Masks and what rows without any key give: each case in ONNX Runtime, before and after.

The first batch entry is masked everywhere in all of them: that is where fusions go wrong unseen.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from fa_compiler.passes.answer.options import Target
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    SOFTMAX,
    Array,
    assert_same,
    fused,
    parse,
    random_feeds,
    run,
)

MIN = "-3.4028234663852886e38"
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
HALF_PADDING = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]], np.bool_).reshape(2, 1, 1, 6)
MASKS = "bool[B,1,1,T] m, bool[B,1,1,T] n"
GUARD = "zero_ = Constant<value=float {0.0}>() i = IsNaN(p) g = Where(i, zero_, p) y = MatMul(g, v)"


def numbers(**values: str) -> str:
    return "".join(f"{name} = Constant<value=float {{{value}}}>() " for name, value in values.items())


def model(terms: str, more: str = MASKS, guard: bool = False) -> onnx.ModelProto:
    """Attention in which `terms` make x of the product s."""
    return parse(PRODUCT_QK + terms + " " + SOFTMAX.format("x") + (GUARD if guard else PRODUCT_PV), more)


def same(
    proto: onnx.ModelProto,
    target: Target = "ort",
    assume: tuple[str, ...] = (),
    tolerance: float = 1e-5,
    **given: Array,
) -> Block:
    """Compare before and after, if it is fused; float32 rounds sums differently by 1e-5."""
    feeds = random_feeds(proto, **{"m": PADDING, "n": HALF_PADDING, **given})
    feeds = {name: array for name, array in feeds.items() if name in {each.name for each in proto.graph.input}}
    result, report = fused(proto, target, assume)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, tolerance)
    (block,) = report.blocks
    return block


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("fill", ["-inf", MIN, "-1e30"])
@pytest.mark.parametrize(
    "terms",
    [
        "x = Where(m, s, low)",
        "d = Not(m) x = Where(d, low, s)",
        "a = Where(m, zero, low) x = Add(s, a)",
        "a = Where(m, zero, low) x = Add(a, s)",
        "a = Where(m, zero, high) x = Sub(s, a)",
    ],
)
def test_one_mask(terms: str, fill: str, guard: bool) -> None:
    block = same(model(numbers(low=fill, high=fill.removeprefix("-"), zero="0.0") + terms, guard=guard))
    assert (block.status, block.mask) == ("fused", "atten_mask")


FILLS = [("-inf", MIN), (MIN, "-inf"), (MIN, MIN), ("-1e30", MIN), (MIN, "-1e30"), ("-inf", "-inf")]


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize(("first", "second"), FILLS)
def test_a_later_selection_replaces_an_earlier_one(first: str, second: str, target: Target) -> None:
    """In a row that both mask in part and the later one masks in full, all scores are the later filler."""
    terms = numbers(f1=first, f2=second) + "w = Where(n, s, f1) x = Where(m, w, f2)"
    assert same(model(terms), target).status == "fused"


@pytest.mark.parametrize(("first", "second"), [("-inf", "0.0"), ("0.0", "-inf"), ("0.0", "0.0"), ("-inf", "1.0")])
@pytest.mark.parametrize("order", ["x = Add(w, low)", "x = Mul(w, low)", "x = Add(w, b)"])
def test_a_selection_puts_in_no_score(first: str, second: str, order: str) -> None:
    """0 is a score as any other, and no key is excluded by it."""
    terms = numbers(f1=first, f2=second, low="-1e30") + "b = Constant<value=float[6] {0.0,1.0,2.0,0.5,0.2,0.1}>() "
    same(model(terms + f"v1 = Where(n, s, f1) w = Where(m, v1, f2) {order}"))


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize(("first", "second"), FILLS)
def test_a_bias_between_two_selections(first: str, second: str, target: Target) -> None:
    terms = numbers(f1=first, f2=second) + "b = Constant<value=float[6] {0.0,1.0,2.0,0.5,0.2,0.1}>() "
    same(model(terms + "w = Where(n, s, f1) u = Add(w, b) x = Where(m, u, f2)"), target)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("factor", ["8.0", "0.35", "1.0"])
@pytest.mark.parametrize(
    "terms",
    [
        "w = Where(m, s, low) x = Mul(w, c)",
        "a = Where(m, zero, low) w = Add(s, a) x = Mul(w, c)",
        "a = Where(m, zero, low) b = Where(n, zero, low) u = Add(s, a) w = Add(u, b) x = Mul(w, c)",
        "a = Where(m, zero, low) u = Add(s, a) w = Mul(u, c) x = Add(w, a)",
        "a = Where(m, zero, low) u = Mul(s, c) w = Where(n, u, low) t = Mul(w, c) x = Add(t, a)",
    ],
)
def test_factors_round_and_overflow_as_they_did(terms: str, factor: str, guard: bool) -> None:
    """8 * finfo.min is -inf in float32; 0.35 * (finfo.min + finfo.min) too, 0.35 * finfo.min twice is not."""
    same(model(numbers(low=MIN, zero="0.0", c=factor) + terms, guard=guard))


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("factor", ["8.0", "1.5"])
def test_opposite_masks_cancel_before_a_factor_makes_them_infinite(factor: str, guard: bool) -> None:
    """Both exclude every key: the scores are lost, and every row is the mean of the values."""
    terms = "a = Where(m, zero, low) b = Where(n, zero, low) u = Sub(s, a) w = Add(u, b) x = Mul(w, c)"
    nowhere = np.zeros_like(PADDING)
    block = same(model(numbers(low=MIN, zero="0.0", c=factor) + terms, guard=guard), m=nowhere, n=nowhere)
    assert block.code == "mask_value"


@pytest.mark.parametrize("bias", ["1e33", "-1e33"])
@pytest.mark.parametrize("other", ["0.0", "-inf"])
def test_a_bias_is_not_swallowed_before_a_factor_makes_the_mask_infinite(other: str, bias: str) -> None:
    """Behind the factor the mask alone is -inf, and its sum with a positive bias is not."""
    terms = numbers(low=MIN, zero=other, c="1.000002") + "a = Where(m, zero, low) "
    terms += f"b = Constant<value=float[6] {{{bias},{bias},0.0,0.0,{bias},0.0}}>() "
    block = same(model(terms + "u = Add(s, b) w = Add(u, a) x = Mul(w, c)"))
    assert block.mask != "atten_mask+real_shift"


def test_a_number_added_to_all_scores_is_no_mask_of_probabilities() -> None:
    """It changes no softmax, but the zeros that a condition of one value puts behind it do."""
    terms = numbers(half="-0.5", zero="0.0") + "c = Constant<value=bool {0}>() x = Add(s, half) "
    where = SOFTMAX.format("x") + "g = Where(c, p, zero) y = MatMul(g, v)"
    block = same(parse(PRODUCT_QK + terms + where, MASKS))
    assert block.code == "probability_term"


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize("guard", [False, True])
def test_float_biases(guard: bool, target: Target) -> None:
    """A bias that comes from outside: all -inf, all finfo.min, both, and NaN beside -inf."""
    bias = np.zeros((2, 1, 5, 6), np.float32)
    bias[0, 0, 0] = -np.inf
    bias[0, 0, 1] = np.finfo(np.float32).min
    bias[0, 0, 2, :3] = -np.inf
    bias[0, 0, 2, 3:] = np.finfo(np.float32).min
    bias[0, 0, 3, :5] = -np.inf
    bias[0, 0, 4, 2] = np.nan
    bias[1, 0, 0] = -1e9
    bias[1, 0, 1] = np.inf
    block = same(model("x = Add(s, b)", "float[B,1,S,T] b", guard=guard), target, b=bias)
    assert block.status == ("declined" if guard and target == "ascend" else "fused")


@pytest.mark.parametrize(("value", "rounding"), [("-1e9", 0.0), ("-65504", 2.0**-8), ("-1e4", 2.0**-10)])
def test_moderate_numbers_that_are_said_to_dominate(value: str, rounding: float) -> None:
    """A row that is masked everywhere gives its unmasked softmax, or the mean where the sum swallows every score.

    In between the model itself knows its scores only to half an ulp of the sum: `rounding`.
    """
    terms = numbers(low=value, zero="0.0") + "a = Where(m, zero, low) x = Add(s, a)"
    block = same(model(terms), assume=("masks-dominate",), tolerance=1e-5 + 2 * rounding)
    assert block.assumed == (() if block.mask == "real_shift" else ("masks-dominate",))
    assert same(model(terms)).mask == "real_shift"


@pytest.mark.parametrize("value", ["-1e9", "-65504", "-1e4"])
def test_moderate_fillers_that_are_said_to_dominate(value: str) -> None:
    terms = numbers(low=value) + "x = Where(m, s, low)"
    block = same(model(terms), assume=("masks-dominate",))
    assert (block.mask, block.assumed) == ("atten_mask", ("masks-dominate",))


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("B,1,1,T", (2, 1, 1, 6)),
        ("1,1,S,T", (1, 1, 5, 6)),
        ("B,4,S,T", (2, 4, 5, 6)),
        ("1,4,1,T", (1, 4, 1, 6)),
        ("B,1,S,1", (2, 1, 5, 1)),
        ("S,T", (5, 6)),
        ("T", (6,)),
        ("4,1,1", (4, 1, 1)),
        ("", ()),
        # Dimensions that are only known when the model runs: full here, 1 there.
        ("K,L,M,N", (2, 4, 5, 6)),
        ("K,L,M,N", (1, 1, 5, 6)),
        ("K,L,M,N", (2, 1, 1, 6)),
        ("K,L,M,N", (1, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("form", ["select", "bias"])
def test_shapes_of_masks(dims: str, shape: tuple[int, ...], form: str) -> None:
    rng = np.random.default_rng(len(dims))
    keep = np.asarray(rng.random(shape) < 0.6)
    if form == "select":
        proto = model(numbers(low="-inf") + "x = Where(e, s, low)", f"bool[{dims}] e" if dims else "bool e")
        assert same(proto, e=keep).status == "fused"
    else:
        bias = np.where(keep, rng.standard_normal(shape), -np.inf).astype(np.float32)
        proto = model("x = Add(s, e)", f"float[{dims}] e" if dims else "float e")
        assert same(proto, e=bias).status == "fused"


def test_scores_that_overflow_behind_a_mask() -> None:
    """The product is inf at positions that a selection takes out."""
    proto = model(numbers(low="-inf") + "x = Where(m, s, low)")
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((2, 4, 6, 8)).astype(np.float32)
    keys[:, :, 2::3] = 3e38
    queries = np.abs(rng.standard_normal((2, 4, 5, 8))).astype(np.float32) * 8
    assert same(proto, q=queries, k=keys).mask == "atten_mask"


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize("fill", ["-inf", MIN, "-1e30"])
@pytest.mark.parametrize("low", ["-inf", MIN, "-5e29", "-4.0"])
def test_a_bias_that_excludes_what_the_selection_keeps(low: str, fill: str, target: Target) -> None:
    """The row is decided by the filler if the bias goes below it, and by the bias if it stays above."""
    bias = ",".join([low if keep else "0.0" for keep in HALF_PADDING[0].reshape(-1)])
    terms = f"b = Constant<value=float[6] {{{bias}}}>() " + numbers(f=fill) + "w = Add(s, b) x = Where(n, w, f)"
    block = same(model(terms), target)
    assert block.status == "fused" or block.code in ("empty_rows", "mask_value")


FLOORED = [
    "a = Where(m, zero, low) w = Add(s, a) x = Max(w, least)",
    "w = Where(m, s, low) x = Max(least, w)",
    "w = Where(m, s, low) u = Max(least, w) x = Mul(u, c)",
    "w = Where(m, s, low) u = Max(least, w) x = Where(n, u, low)",
    "a = Where(m, zero, least) b = Where(n, zero, least) w = Add(s, a) u = Max(least, w) x = Add(u, b)",
]


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("least", [MIN, "-1e30"])
@pytest.mark.parametrize("terms", FLOORED)
def test_floors(terms: str, least: str, guard: bool, target: Target) -> None:
    """OPT and XGLM raise what the mask made -inf to the smallest number: such rows have a mean, not NaN."""
    block = same(model(numbers(low="-inf", least=least, zero="0.0", c="8.0") + terms, guard=guard), target)
    assert block.status == "fused" or target == "ascend"


def test_a_floor_that_is_a_clip() -> None:
    """ONNX's Clip without an upper limit makes the largest finite number of a score of infinity."""
    terms = "a = Where(m, zero, low) w = Add(s, a) x = Clip(w, least)"
    proto = model(numbers(low="-inf", least=MIN, zero="0.0") + terms)
    block = same(proto)
    assert (block.status, block.code) == ("declined", "score_term")
    assert "infinity" in (block.reason or "") and "--assume finite-scores" in (block.hint or "")
    assert same(proto, assume=("finite-scores",)).assumed == ("finite-scores",)
    assert same(proto, "ascend").assumed == ("finite-scores",)
    assert same(proto, "ascend", assume=("non-finite-scores",)).code == "score_term"


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize("value", [-np.inf, np.nan, 0.0])
@pytest.mark.parametrize("terms", ["x = Max(least, w)", "u = Max(least, w) x = Mul(u, c)"])
def test_floors_before_a_guard(terms: str, value: float, target: Target) -> None:
    """A floor leaves NaN as it is, and a factor behind it can make it -inf again."""
    bias = np.zeros((2, 1, 1, 6), np.float32)
    bias[0] = value
    proto = model(numbers(least=MIN, c="8.0") + "w = Add(s, b) " + terms, "float[B,1,1,T] b", guard=True)
    block = same(proto, target, b=bias)
    assert block.status == "fused" or target == "ascend"


@pytest.mark.parametrize("assume", [(), ("masks-dominate",)])
@pytest.mark.parametrize("fill", ["-inf", MIN, "-1e300", "-1e9", "-1e4"])
@pytest.mark.parametrize("form", ["a = Where(m, zero, low) x = Add(d, a)", "x = Where(m, d, low)", "x = Mul(d, low)"])
def test_scores_in_float64(form: str, fill: str, assume: tuple[str, ...]) -> None:
    """float64 rounds such sums elsewhere, so a mask there is declined; the softmax alone may be in float64."""
    terms = numbers(low=fill, zero="0.0").replace("float", "double") + form
    body = PRODUCT_QK + "d = Cast<to=11>(s) " + terms + " e = Softmax<axis=-1>(x) p = Cast<to=1>(e) " + PRODUCT_PV
    assert same(parse(body, MASKS), assume=assume).status == "declined"
    plain = PRODUCT_QK + "d = Cast<to=11>(s) e = Softmax<axis=-1>(d) p = Cast<to=1>(e) " + PRODUCT_PV
    assert same(parse(plain)).status == "fused"


@pytest.mark.parametrize("opset", [8, 11, 13, 21, 23])
def test_opsets(opset: int) -> None:
    """Nodes are made in the form of the model's own opset."""
    body = (
        PRODUCT_QK
        + "a = Transpose<perm=[0,1,3,2]>(e) x = Add(s, a) "
        + SOFTMAX.format("x").replace("-1", "3")
        + PRODUCT_PV
    )
    proto = parse(body, "float[B,1,T,1] e", opset=opset, ir_version=4 if opset < 10 else 8)
    assert same(proto).mask == "real_shift"


def test_a_bias_that_is_one_along_a_batch_that_is_folded() -> None:
    """Two batch dimensions become one: a bias that is 1 along one of them is spread over it first."""
    axes = "".join(f"{name} = Constant<value=int64[1] {{{n}}}>() " for name, n in (("from", 0), ("to", 1), ("axis", 1)))
    proto = parse(
        axes + "b = Slice(bias, from, to, axis) kt = Transpose<perm=[0,1,2,4,3]>(k) s = MatMul(q, kt) x = Add(s, b) "
        "p = Softmax<axis=-1>(x) y = MatMul(p, v)",
        inputs="float[B,C,4,S,8] q, float[B,C,4,S,8] k, float[B,C,4,S,8] v, float[B,C,4,1,S] bias",
        outputs="float[B,C,4,S,8] y",
    )
    rng = np.random.default_rng(3)
    feeds = {name: rng.standard_normal((2, 3, 4, 5, 8)).astype(np.float32) for name in "qkv"}
    feeds["bias"] = rng.standard_normal((2, 3, 4, 1, 5)).astype(np.float32)
    result, report = fused(proto)
    assert report.blocks[0].mask == "real_shift"
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


SELECTED = {
    "selection": "x = Where(m, s, low)",
    "scaled later": "a = Where(m, s, low) c = Constant<value=float {0.5}>() x = Mul(a, c)",
    "two selections": "a = Where(m, s, low) x = Where(n, a, low)",
    "behind a bias": "a = Add(s, s) x = Where(m, a, low)",
    "negated": "not_m = Not(m) x = Where(not_m, low, s)",
}


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("fill", ["-1e9", "-1e4", "-3.0", "2.5"])
@pytest.mark.parametrize("terms", SELECTED.values(), ids=SELECTED)
def test_a_masked_score_keeps_its_number(terms: str, fill: str, guard: bool) -> None:
    """masked_fill with a number that scores may undercut: masked keys take part with that number, here for large
    scores too, where they outweigh the others."""
    proto = model(numbers(low=fill) + terms, guard=guard)
    for size in (1.0, 100.0, 1e5):
        rng = np.random.default_rng(3)
        queries = (rng.standard_normal((2, 4, 5, 8)) * size).astype(np.float32)
        block = same(proto, tolerance=1e-5 if size < 1e3 else 2e-2, q=queries)
        if "Add(s, s)" not in terms:
            assert (block.status, block.mask) == ("fused", "atten_mask")
            assert "EXT-MASK-VALUE" in block.extensions


ZEROED = {
    "selection": "p0 = Softmax<axis=-1>(x) p = Where(m, p0, zero) ",
    "product": "p0 = Softmax<axis=-1>(x) f = Cast<to=1>(m) p = Mul(p0, f) ",
    "as tf2onnx writes it": "p0 = Softmax<axis=-1>(x) f = Cast<to=1>(m) g = Mul(p0, f) o = Not(m) r = Cast<to=1>(o) "
    "t = Mul(zero, r) p = Add(g, t) ",
}


@pytest.mark.parametrize("fill", ["-1e9", "-3.0", "2.5"])
@pytest.mark.parametrize("guard", ZEROED.values(), ids=ZEROED)
@pytest.mark.parametrize("terms", ["x = Where(m, s, low) ", "a = Add(s, b) x = Where(m, a, low) "])
def test_a_masked_score_without_a_value(terms: str, guard: str, fill: str) -> None:
    """Keras' Softmax with a mask: masked keys take part in the sum with that number, and not in the result; a row
    without a key is 0."""
    proto = parse(PRODUCT_QK + numbers(low=fill, zero="0.0") + terms + guard + PRODUCT_PV, MASKS + ", float[B,1,S,T] b")
    for size in (1.0, 100.0, 1e9):
        rng = np.random.default_rng(3)
        queries = (rng.standard_normal((2, 4, 5, 8)) * size).astype(np.float32)
        block = same(proto, tolerance=1e-5 if size < 1e3 else 2e-2, q=queries)
        mask = "atten_mask+real_shift" if "Add(s, b)" in terms else "atten_mask"
        assert (block.status, block.mask) == ("fused", mask)
        assert "EXT-MASKED-VALUES" in block.extensions


def test_a_masked_score_of_16_bits_keeps_its_number() -> None:
    low = "least = Constant<value=float {-65504.0}>() low = Cast<to=10>(least) "
    body = PRODUCT_QK + low + "x = Where(m, s, low) " + SOFTMAX.format("x")
    sizes = "float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v"
    proto = parse(body + PRODUCT_PV, MASKS, inputs=sizes, outputs="float16[B,4,S,8] y")
    assert "EXT-MASK-VALUE" in same(proto, tolerance=2e-3).extensions


@pytest.mark.parametrize("rows", [5, 70])
def test_a_masked_score_behind_a_band(rows: int) -> None:
    """Causal and padded with -1e9: a row that is padded everywhere gives the mean of all values, later ones too."""
    body = (
        PRODUCT_QK + numbers(low="-1e9") + "z = Constant<value=int64 {0}>() o = Constant<value=int64 {1}>() "
        "n_ = Shape<start=2, end=3>(q) l = Squeeze(n_) r = Range(z, l, o) last = Constant<value=int64[1] {-1}>() "
        "i = Unsqueeze(r, last) c = LessOrEqual(r, i) k_ = And(c, m) x = Where(k_, s, low) " + SOFTMAX.format("x")
    )
    inputs = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v"
    proto = parse(body + PRODUCT_PV, "bool[B,1,1,S] m", inputs=inputs)
    result, report = fused(proto)
    assert report.blocks[0].mask == "causal+atten_mask"
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {name: rng.standard_normal((2, 4, rows, 8)).astype(np.float32) for name in "qkv"}
    feeds["m"] = rng.random((2, 1, 1, rows)) < 0.7
    feeds["m"][0, ..., : rows // 2] = False
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


OPPOSITES = [
    "a = Where(m, zero, low) b = Where(n, high, zero) w = Add(s, a) x = Add(w, b)",
    "b = Where(n, high, zero) w = Add(s, b) a = Where(m, zero, low) x = Add(w, a)",
    "w = Where(m, s, low) b = Where(n, high, zero) x = Add(w, b)",
]


@pytest.mark.parametrize("size", ["3.4028234663852886e38", "1e30"])
@pytest.mark.parametrize("terms", OPPOSITES)
def test_a_mask_number_and_its_opposite_lose_the_score_between_them(terms: str, size: str) -> None:
    proto = model(numbers(low=f"-{size}", high=size, zero="0.0") + terms)
    block = same(proto)
    assert block.status == "fused"
    assert "EXT-MASKED-BIAS" in block.extensions
    _, report = fused(proto, "ascend")  # its operator has no score for masked keys
    assert report.blocks[0].code == "mask_value"


def test_a_guard_zeroes_its_own_selection_only() -> None:
    """A row whose selected keys an added mask takes out is uniform, and the guard zeroes a part of it: the keys it
    zeroes have a share of the row all the same."""
    terms = numbers(low=MIN, zero="0.0") + "a = Where(n, zero, low) t = Add(s, a) x = Where(m, t, low) "
    guard = "g = Where(m, p, zero) y = MatMul(g, v)"
    proto = parse(PRODUCT_QK + terms + SOFTMAX.format("x") + guard, MASKS)
    selected = np.arange(6) < 4
    attended = np.stack([np.arange(6) >= 4, np.arange(6) % 2 == 0]).reshape(2, 1, 1, 6)
    block = same(proto, m=np.broadcast_to(selected, (2, 1, 1, 6)), n=attended)
    assert (block.status, block.mask) == ("fused", "atten_mask+real_shift")
    assert "EXT-MASKED-VALUES" in block.extensions


@pytest.mark.parametrize("guard", ["p = Where(drop, zero, p0) ", "o = Not(drop) f = Cast<to=1>(o) p = Mul(p0, f) "])
@pytest.mark.parametrize(("mask", "status"), [("e", "fused"), ("n", "declined")])
def test_a_guard_of_the_opposite_condition(guard: str, mask: str, status: str) -> None:
    """Whatever the condition is made of, its opposite keeps what it drops; another one does not."""
    terms = f"e = Xor(m, n) drop = Not(e) x = Where({mask}, s, low) p0 = Softmax<axis=-1>(x) "
    proto = parse(PRODUCT_QK + numbers(low="-inf", zero="0.0") + terms + guard + PRODUCT_PV, MASKS)
    assert same(proto).status == status
