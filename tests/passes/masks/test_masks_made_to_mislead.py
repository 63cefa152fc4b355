"""Masks made to be mistaken for a band, or for a mask that hides what it does not: numbers that their type does not
hold, biases as large as masks, steps that only nearly cancel. Whatever is fused gives what the original gives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.masks.test_structure import CROSS, FLOAT, GRID, LENGTHS, NUMBERS, SELECT, SELF, model
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

SIZES = ((2, 5, 6, 9, 5), (1, 1, 3, 4, 1), (2, 7, 0, 7, 7), (1, 150, 1, 20, 150), (1, 3, 0, 600, 1))
"""B, S, P, T and U; of the last ones, some are longer than a kernel's tile and a block of its keys."""

CORNER = "past = Sub(columns, rows) d = Sub(j, i) m = LessOrEqual(d, past) "
"""Causal from the bottom right corner."""


def agree(proto: onnx.ModelProto, sizes: tuple[tuple[int, ...], ...] = SIZES, **given: Array) -> Block:
    """The block of the model; outputs agree at all sizes."""
    result, report = fused(proto)
    rng = np.random.default_rng(0)
    for batch, rows, past, keys, other in sizes:
        names = {"B": batch, "S": rows, "P": past, "T": keys, "U": other, "P + S": past + rows}
        feeds = dict(given)
        for value in proto.graph.input:
            if value.name in feeds:
                continue
            tensor = value.type.tensor_type
            shape = [names[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
            boolean = tensor.elem_type == onnx.TensorProto.BOOL
            feeds[value.name] = rng.random(shape) < 0.5 if boolean else rng.standard_normal(shape).astype(np.float32)
        feeds = random_feeds(proto, **feeds)
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
    (block,) = report.blocks
    return block


WRAPPED = {
    "int8": "i_ = Cast<to=3>(i) j_ = Cast<to=3>(j) a = Cast<to=7>(i_) b = Cast<to=7>(j_) m = LessOrEqual(b, a)",
    "uint8": (
        "d = Sub(i, j) u = Cast<to=2>(d) w = Cast<to=7>(u) t = Constant<value=int64 {200}>() m = LessOrEqual(w, t)"
    ),
    "int32": (
        "c = Constant<value=int32 {1073741824}>() i_ = Cast<to=6>(i) j_ = Cast<to=6>(j) a = Mul(i_, c) b = Mul(j_, c) "
        "m = LessOrEqual(b, a)"
    ),
    "int64": "c = Constant<value=int64 {9223372036854775807}>() a = Add(i, c) b = Add(j, c) m = LessOrEqual(b, a)",
    "int64 as int32": (
        "c = Constant<value=int64 {2147483647}>() a = Add(i, c) b = Add(j, c) a_ = Cast<to=6>(a) b_ = Cast<to=6>(b) "
        "m = LessOrEqual(b_, a_)"
    ),
    "float32": (
        "c = Constant<value=int64 {1073741824}>() a = Add(i, c) b = Add(j, c) a_ = Cast<to=1>(a) b_ = Cast<to=1>(b) "
        "m = LessOrEqual(b_, a_)"
    ),
}


@pytest.mark.parametrize("mask", WRAPPED.values(), ids=WRAPPED)
def test_numbers_that_their_type_does_not_hold(mask: str) -> None:
    """Positions that wrap around or are rounded are no positions any more."""
    assert agree(model(mask)).mask == "atten_mask"


LARGE = "huge = Constant<value=float {1e36}>() d = Sub(i, j) n = LessOrEqual(d, two) "


@pytest.mark.parametrize("bias", ["bias = Where(n, huge, nothing)", "bias = Where(n, nothing, huge)"])
@pytest.mark.parametrize("order", [("bias", "f"), ("f", "bias")])
def test_a_bias_as_large_as_a_mask_is_none(bias: str, order: tuple[str, str]) -> None:
    """It swallows the scores, but excludes nothing, although it holds two numbers on a band. The mask does."""
    use = f"f = Where(m, nothing, low) x0 = Add(s, {order[0]}) x = Add(x0, {order[1]}) "
    assert agree(model("m = LessOrEqual(j, i) " + LARGE + bias, use)).mask in ("causal+real_shift", None)


@pytest.mark.parametrize("number", [1e31, 1e32, 1e36, -1e32])
@pytest.mark.parametrize("order", [("bias", "f"), ("f", "bias")])
def test_a_bias_that_a_mask_does_not_swallow_decides_its_empty_rows(number: float, order: tuple[str, str]) -> None:
    """Of a row that is masked everywhere the bias is left: -3.4e38 + 1e32 is another float32 than -3.4e38."""
    mask = f"{CORNER} large = Constant<value=float {{{number}}}>() "
    use = f"bias = Where(pad, nothing, large) f = Where(m, nothing, low) x0 = Add(s, {order[0]}) "
    use += f"x = Add(x0, {order[1]}) "
    agree(model(mask, use, CROSS, "bool[B,1,1,T] pad"))


MODERATE = "one_ = Constant<value=float {1.0}>() value = Constant<value=float {-1.0}>() "


@pytest.mark.parametrize(
    ("use", "mask"),
    [
        ("x0 = Add(s, one_) x = Where(m, x0, value) ", "causal+real_shift"),
        ("x0 = Sub(s, one_) x = Where(m, x0, value) ", "causal+real_shift"),
        ("x0 = Where(m, s, value) x = Add(x0, one_) ", "causal"),
    ],
)
def test_one_number_added_to_scores_of_which_some_are_replaced(use: str, mask: str) -> None:
    """It changes no softmax where it is added to all of them, but moves the others where some are replaced later."""
    assert agree(model("m = LessOrEqual(j, i) " + MODERATE, use)).mask == mask


OUTER = (
    "ones_ = ConstantOfShape<value=float[1] {1.0}>(rows_) "
    "col = Unsqueeze(ones_, last) bias = MatMul(col, given) limit = Constant<value=float {-1e30}>() "
)


@pytest.mark.parametrize(
    "use",
    [
        "x0 = Add(s, bias) x = Where(m, x0, limit) ",
        "x0 = Add(s, bias) f = Where(m, nothing, limit) x = Add(x0, f) ",
    ],
)
@pytest.mark.parametrize(
    "given",
    [
        "given = Where(pad, nothing, low) ",
        "n_ = Not(pad) c = Cast<to=1>(n_) sq = Pow(c, two) given = Mul(sq, low) ",
        "n_ = Not(pad) c = Cast<to=11>(n_) wide = Cast<to=11>(low) sq = Pow(c, two) w_ = Mul(sq, wide) "
        "given = Cast<to=1>(w_) ",
        "n_ = Not(pad) c = Cast<to=1>(n_) sq = Pow(c, two) yes = Constant<value=bool {1}>() least = If (yes) <"
        "then_branch = t () => (float w) { w = Identity(low) }, else_branch = e () => (float w) { w = Identity(low) }> "
        "given = Mul(sq, least) ",
        "n_ = Cast<to=6>(pad) most = ReduceMax<keepdims=0>(n_) c = Cast<to=9>(most) given = If (c) <"
        "then_branch = t () => (float[B,1,1,S] w) { w = Where(pad, nothing, low) }, "
        "else_branch = e () => (float[B,1,1,S] w) { w = Where(pad, nothing, low) }> ",
    ],
)
def test_a_product_of_mask_numbers_is_no_score(given: str, use: str) -> None:
    """Where all keys of a row have it, the smaller number of the mask beside it decides."""
    agree(model("m = LessOrEqual(j, i) " + given + OUTER, use, more="bool[B,1,1,S] pad"))


BESIDE = "f0 = Where(pad, nothing, minus) "


@pytest.mark.parametrize("number", ["minus", "low", "value"])
@pytest.mark.parametrize("mask", ["m = LessOrEqual(j, i) ", CORNER])
def test_an_infinite_bias_behind_a_band(mask: str, number: str) -> None:
    """A row whose attended keys all have -inf is NaN, or shared by the others where these keep a number."""
    proto = model(mask + BESIDE + MODERATE, f"x0 = Add(s, f0) x = Where(m, x0, {number}) ", CROSS, "bool[B,1,1,T] pad")
    agree(proto)


SINK = (
    "shape_ = Shape(s) three_ = Constant<value=int64[1] {3}>() one1 = Constant<value=int64[1] {1}>() "
    "lead = Slice(shape_, first, three_, first) full = Concat<axis=0>(lead, one1) e = Expand(t, full) "
)
SUNK = "c = Concat<axis=-1>(x, e) p0 = Softmax<axis=-1>(c) p = Slice(p0, first, last, three_, one1) "
USES = {
    "selected": SELECT,
    "added": FLOAT,
    "replaced": MODERATE + "x = Where(m, s, value) ",
    "infinite bias": BESIDE + "x0 = Add(s, f0) x = Where(m, x0, minus) ",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "sink", ["0.5, 1.5, 0.0, 3.0", "-1e28, 1.5, 0.0, -3.4e38", "-inf, 1.5, 0.0, -inf", "inf, 1, 2, 3"]
)
def test_sinks_beside_rows_without_a_key(use: str, sink: str) -> None:
    """A sink as low as the mask's number shares such a row with it, one of -inf leaves it alone, +inf is NaN."""
    mask = f"{CORNER} t = Constant<value=float[1,4,1,1] {{{sink}}}>() {SINK}"
    body = PRODUCT_QK + NUMBERS + LENGTHS + GRID + mask + use + SUNK + PRODUCT_PV
    block = agree(parse(body, "bool[B,1,1,T] pad" if "pad" in use else "", inputs=CROSS))
    assert (block.status == "declined") == sink.startswith("inf")


VALUES = {
    "causal": CORNER + "w = Identity(m) ",
    "window": CORNER + "lo = Sub(past, two) b = GreaterOrEqual(d, lo) w = And(m, b) ",
    "causal and padded": CORNER + "w = And(m, pad) ",
}


@pytest.mark.parametrize("number", [0.0, -3.0, 50.0, -150.0, 1e30, -1e29])
@pytest.mark.parametrize("mask", VALUES.values(), ids=VALUES)
def test_masked_keys_that_keep_a_score(mask: str, number: float) -> None:
    """They count even where a whole block of keys is outside of the band, or no key is inside."""
    value = f"number = Constant<value=float {{{number}}}>() "
    agree(model(mask + value, "x = Where(w, s, number) ", CROSS, "bool[B,1,1,T] pad" if "pad" in mask else ""))


RUNTIME_ONES = [
    "bool[U,1,1,S] given",
    "bool[B,U,1,S] given",
    "bool[B,1,1,U] given",
    "bool[B,1,U,S] given",
    "bool[U,S] given",
    "bool[S,S] given",
]


@pytest.mark.parametrize("given", RUNTIME_ONES)
@pytest.mark.parametrize("use", [SELECT, FLOAT])
def test_masks_whose_size_is_one_in_some_runs(given: str, use: str) -> None:
    """U is a size of its own: 1 in these runs, where the mask is the same along that dimension."""
    sizes = ((2, 5, 6, 5, 1), (1, 1, 3, 1, 1), (1, 70, 0, 70, 1))
    agree(model("c = LessOrEqual(j, i) m = And(c, given)", use, SELF, given), sizes)


MISTAKABLE = {
    "reversed buffer": "r = Sub(rows, one) i_ = Sub(r, i1) g = Gather(whole, i_) m = Slice(g, first, columns_, last)",
    "negative indices": "i_ = Sub(i1, rows) g = Gather(whole, i_) m = Slice(g, first, columns_, last)",
    "an index before the first": "i_ = Sub(i1, one) g = Gather(whole, i_) m = Slice(g, first, columns_, last)",
    "sums from the end": (
        "o = ConstantOfShape<value=int64[1] {1}>(rows_) c = CumSum<reverse=1>(o, zero) cj = Unsqueeze(c, first) "
        "ci = Unsqueeze(c, last) m = LessOrEqual(cj, ci)"
    ),
    "sums of sums": "c = CumSum(i1, zero) cj = Unsqueeze(c, first) ci = Unsqueeze(c, last) m = LessOrEqual(cj, ci)",
    "a sum of other numbers before its place": (
        "n = Constant<value=int64[1] {5000}>() h = Constant<value=int64[1] {5}>() "
        "o = ConstantOfShape<value=int64[1] {1}>(n) c = Concat<axis=0>(h, o) e = CumSum(c, zero) t = Gather(e, one) "
        "a = Add(i, t) m = Less(j, a)"
    ),
    "one sum without itself": (
        "o = ConstantOfShape<value=int64[1] {1}>(rows_) c = CumSum<exclusive=1>(o, zero) e = CumSum(o, zero) "
        "cj = Unsqueeze(c, first) ci = Unsqueeze(e, last) m = LessOrEqual(cj, ci)"
    ),
    "positions with a gap": (
        "e = Add(rows, three) r = Range(three, e, one) h = Constant<value=int64[2] {0, 1}>() c = Concat<axis=0>(h, r) "
        "ri = Slice(c, first, rows_) a = Unsqueeze(ri, last) m = LessOrEqual(j, a)"
    ),
    "positions twice": (
        "c = Concat<axis=0>(i1, i1) ri = Slice(c, first, rows_) a = Unsqueeze(ri, last) m = LessOrEqual(j, a)"
    ),
    "another first position": (
        "e = Sub(rows, one) r = Range(zero, e, one) c = Concat<axis=0>(r, first) a = Unsqueeze(c, last) "
        "m = LessOrEqual(j, a)"
    ),
    "clamped positions": "a = Min(i, two) m = LessOrEqual(j, a)",
    "position of the last row": "r = Gather(i1, end_) m = LessOrEqual(j, r)",
    "transposed": "t = LessOrEqual(j, i) m = Transpose<perm=[1, 0]>(t)",
    "reshaped": "t = LessOrEqual(i, j) f_ = Reshape(t, last) m = Reshape(f_, square)",
    "one or the other": "a = LessOrEqual(j, i) b = LessOrEqual(i, j) m = Xor(a, b)",
    "selected position": "c = Less(i, j) w = Where(c, i, j) m = Equal(w, j)",
    "larger position": "c = Max(i, j) m = Equal(c, j)",
    "two counts": (
        "a = LessOrEqual(j, i) b = LessOrEqual(i, j) a_ = Cast<to=7>(a) b_ = Cast<to=7>(b) c = Sub(a_, b_) "
        "m = GreaterOrEqual(c, zero)"
    ),
}


@pytest.mark.parametrize("mask", MISTAKABLE.values(), ids=MISTAKABLE)
def test_masks_that_only_nearly_are_a_band(mask: str) -> None:
    rows = ", ".join(str(int(j <= i)) for i in range(30) for j in range(30))
    given = f"whole = Constant<value=bool[30,30] {{{rows}}}>() end_ = Constant<value=int64[1] {{-1}}>() "
    agree(model(given + mask), ((2, 5, 0, 5, 5), (1, 1, 0, 1, 1), (1, 30, 0, 30, 1)))
