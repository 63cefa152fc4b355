"""Graphs as exporters write them, and permutations that look like others: what is fused, and that it is right."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from fa_compiler.passes.answer.options import Target
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    SIZES,
    SOFTMAX,
    Array,
    assert_same,
    fused,
    parse,
    random_feeds,
    run,
)

PLAIN = SOFTMAX.format("s") + PRODUCT_PV
SQUARE = "float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v"


def same(model: onnx.ModelProto, **given: Array) -> tuple[list[str], list[Block]]:
    """What is left after the fusion; outputs before and after agree to 1e-5, as float32 sums do."""
    feeds = random_feeds(model, **given)
    result, report = fused(model)
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return [node.op_type for node in result.graph.node], list(report.blocks)


def ints(name: str, *numbers: int) -> str:
    return f"{name} = Constant<value=int64[{len(numbers)}] {{{','.join(map(str, numbers))}}}>() "


# -- layouts that look right and are not ------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "inputs", "left"),
    [
        # A Reshape is no Transpose: what it gives is the key.
        (ints("t", 0, 0, 8, -1) + "kt = Reshape(k, t) s = MatMul(q, kt) " + PLAIN, SQUARE, {"Reshape", "Transpose"}),
        # (0, 2, 3, 1) of BNSD swaps heads, rows and depth: it is no transposed key either.
        (
            "kt = Transpose<perm=[0,2,3,1]>(k) s = MatMul(q, kt) " + PLAIN,
            "float[B,4,4,4] q, float[B,4,4,4] k, float[B,4,4,4] v",
            {"Transpose"},
        ),
        # Rows and keys have one size and change places before the softmax.
        (
            "kt = Transpose<perm=[0,1,3,2]>(k) r = MatMul(q, kt) s = Transpose<perm=[0,1,3,2]>(r) " + PLAIN,
            SQUARE,
            set(),
        ),
        # The values' heads are in another order than the scores'.
        (
            PRODUCT_QK
            + SOFTMAX.format("s")
            + ints("t", 0, 2, 2, 6, 8)
            + ints("u", 0, 4, 6, 8)
            + "v5 = Reshape(v, t) w = Transpose<perm=[0,2,1,3,4]>(v5) v4 = Reshape(w, u) y = MatMul(p, v4)",
            SQUARE,
            {"Reshape", "Transpose"},
        ),
        # The scores' heads change their order before the softmax.
        (
            PRODUCT_QK.replace("s =", "r =")
            + ints("t", 0, 2, 2, 6, 6)
            + ints("u", 0, 4, 6, 6)
            + "r5 = Reshape(r, t) w = Transpose<perm=[0,2,1,3,4]>(r5) s = Reshape(w, u) "
            + PLAIN,
            SQUARE,
            {"Reshape", "Transpose"},
        ),
        # One tensor is query, key and value.
        ("kt = Transpose<perm=[0,1,3,2]>(q) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, q)", SQUARE, set()),
    ],
    ids=["reshape", "0231", "swapped", "values", "scores", "self"],
)
def test_permutations(body: str, inputs: str, left: set[str]) -> None:
    size = inputs.split("[")[1].split("]")[0]
    remaining, (block,) = same(parse(body, inputs=inputs, outputs=f"float[{size}] y"))
    assert block.status == "fused"
    assert set(remaining) - {"Constant"} == left | {"FlashAttentionScore"}


# -- as exporters write it --------------------------------------------------------------------------


def test_gpt2() -> None:
    """One projection for all three, a triangle cut to size by a Slice of computed ends."""
    body = (
        ints("three", 32, 32, 32)
        + "a, b, c = Split<axis=2>(h, three) "
        + ints("apart", 0, 0, 4, 8)
        + "q1 = Reshape(a, apart) k1 = Reshape(b, apart) v1 = Reshape(c, apart) q = Transpose<perm=[0,2,1,3]>(q1) "
        "kt = Transpose<perm=[0,2,3,1]>(k1) v = Transpose<perm=[0,2,1,3]>(v1) r = MatMul(q, kt) "
        "root = Constant<value=float {2.828427}>() s1 = Div(r, root) triangle = Trilu<upper=0>(ones) size = Shape(s1) "
        + ints("from", 3)
        + ints("to", 4)
        + ints("zeros", 0, 0)
        + "n = Slice(size, from, to) ends = Concat<axis=0>(n, n) cut = Slice(triangle, zeros, ends) "
        "keep = Cast<to=9>(cut) low = Constant<value=float {-3.4028234663852886e38}>() x = Where(keep, s1, low) "
        "p = Softmax<axis=-1>(x) o = MatMul(p, v) ot = Transpose<perm=[0,2,1,3]>(o) "
        + ints("merged", 0, 0, 32)
        + "y = Reshape(ot, merged)"
    )
    ones = f"<float[16,16] ones = {{{','.join(['1.0'] * 256)}}}>"
    remaining, (block,) = same(parse(body, inputs="float[B,S,96] h", outputs="float[B,S,32] y", initializers=ones))
    assert (block.status, block.mask, block.layout) == ("fused", "causal", "BSH")
    assert not set(remaining) & {"MatMul", "Softmax", "Transpose", "Div", "Where"}


def test_a_cache_in_front_of_keys_and_values() -> None:
    body = "k2 = Concat<axis=2>(pk, k) v2 = Concat<axis=2>(pv, v) kt = Transpose<perm=[0,1,3,2]>(k2) s = MatMul(q, kt) "
    body += "x = Add(s, m) p = Softmax<axis=-1>(x) y = MatMul(p, v2)"
    rng = np.random.default_rng(2)
    past = {name: rng.standard_normal((2, 4, 3, 8)).astype(np.float32) for name in ("pk", "pv")}
    mask = np.where(rng.random((2, 1, 5, 9)) < 0.5, 0, -np.inf).astype(np.float32)
    model = parse(body, "float[B,4,P,8] pk, float[B,4,P,8] pv, float[B,1,S,L] m")
    remaining, (block,) = same(model, **past, m=mask)
    assert block.mask == "real_shift"
    assert remaining == ["Concat", "Concat", "FlashAttentionScore"]


def test_an_empty_cache() -> None:
    """The first step of a decoder: the past has no rows yet."""
    body = "k2 = Concat<axis=2>(pk, k) v2 = Concat<axis=2>(pv, v) kt = Transpose<perm=[0,1,3,2]>(k2) s = MatMul(q, kt) "
    empty = np.zeros((2, 4, 0, 8), np.float32)
    model = parse(body + SOFTMAX.format("s") + "y = MatMul(p, v2)", "float[B,4,P,8] pk, float[B,4,P,8] pv")
    assert same(model, pk=empty, pv=empty)[1][0].status == "fused"


def test_relative_positions() -> None:
    """A table of biases, gathered for each pair of positions (Swin, BEiT)."""
    body = PRODUCT_QK + "b0 = Gather<axis=0>(table, pairs) " + ints("t", 5, 5, 4) + ints("a", 0)
    body += "b1 = Reshape(b0, t) b2 = Transpose<perm=[2,0,1]>(b1) b3 = Unsqueeze(b2, a) x = Add(s, b3) "
    inputs = "float[B,4,5,8] q, float[B,4,5,8] k, float[B,4,5,8] v"
    model = parse(body + SOFTMAX.format("x") + PRODUCT_PV, "float[9,4] table, int64[25] pairs", inputs=inputs)
    pairs = np.random.default_rng(3).integers(0, 9, 25)
    assert same(model, pairs=pairs)[1][0].mask == "real_shift"


def test_windows() -> None:
    """A mask for each window, windows being the faster part of the batch (Swin)."""
    body = PRODUCT_QK + ints("t", 2, 3, 4, 5, 5) + ints("u", 6, 4, 5, 5)
    body += "s5 = Reshape(s, t) x5 = Add(s5, w) x = Reshape(x5, u) "
    inputs = "float[6,4,5,8] q, float[6,4,5,8] k, float[6,4,5,8] v"
    model = parse(
        body + SOFTMAX.format("x") + PRODUCT_PV, "float[1,3,1,5,5] w", inputs=inputs, outputs="float[6,4,5,8] y"
    )
    mask = np.where(np.random.default_rng(4).random((1, 3, 1, 5, 5)) < 0.4, -100, 0).astype(np.float32)
    assert same(model, w=mask)[1][0].mask == "real_shift"


@pytest.mark.parametrize(("windows", "status"), [("W", "fused"), ("U", "declined")])
def test_windows_of_an_open_number(windows: str, status: str) -> None:
    """Batch and windows are one dimension of the operands: an input tells the batch by which the mask is repeated."""
    body = ints("fold", -1, 5, 32) + ints("apart", -1, 5, 4, 8) + ints("four", -1, 4, 5, 5) + ints("far", 0, 2)
    body += ints("rest", 4, 5, 5) + "x3 = Reshape(x, fold) "
    for name in "qkv":
        body += f"{name}0 = MatMul(x3, w{name}) {name}1 = Reshape({name}0, apart) "
        body += f"{name} = Transpose<perm=[0,2,1,3]>({name}1) "
    body += PRODUCT_QK + "w_ = Shape<start=0, end=1>(m) all = Shape<start=0, end=1>(s) b_ = Div(all, w_) "
    body += "five = Concat<axis=0>(b_, w_, rest) s5 = Reshape(s, five) m5 = Unsqueeze(m, far) t = Add(s5, m5) "
    body += "x4 = Reshape(t, four) " + SOFTMAX.format("x4") + PRODUCT_PV
    weights = "float[32,32] wq, float[32,32] wk, float[32,32] wv"
    inputs = f"float[B,W,5,32] x, float[{windows},5,5] m, {weights}"
    proto = parse(body, inputs=inputs, outputs="float[E,4,5,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == [status]
    for batch, count, masks in ((2, 3, 3), (1, 4, 4), (3, 1, 1), (2, 4, 2)):
        if windows == "W" and count != masks:
            continue
        rng = np.random.default_rng(0)
        given = {"x": rng.standard_normal((batch, count, 5, 32)), "m": rng.standard_normal((masks, 5, 5))}
        feeds = random_feeds(proto, **{name: array.astype(np.float32) for name, array in given.items()})
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-4)


TILED = ints("turns", 1, 3, 1, 1) + "k = Tile(k0, turns) v = Tile(v0, turns) "
SHARED = "float[B,6,S,8] q, float[B,2,T,8] k0, float[B,2,T,8] v0"
OF_HEADS = {
    "nothing": ("x = Identity(s) ", ""),
    "a bias": ("x = Add(s, b) ", "float[1,6,1,T] b"),
    "a mask": ("low = Constant<value=float {-inf}>() x = Where(m, s, low) ", "bool[B,6,S,T] m"),
    "a factor": ("x = Mul(s, f) ", "float[6,1,1] f"),
    "a second product": (
        "r0 = Tile(r, turns) rt = Transpose<perm=[0,1,3,2]>(r0) s1 = MatMul(t, rt) x = Add(s, s1) ",
        "float[B,6,S,4] t, float[B,2,T,4] r",
    ),
    "a second product with keys of other heads": (
        "rt = Transpose<perm=[0,1,3,2]>(r) s1 = MatMul(t, rt) x = Add(s, s1) ",
        "float[B,6,S,4] t, float[B,6,T,4] r",
    ),
}


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize(("terms", "more"), OF_HEADS.values(), ids=OF_HEADS)
def test_heads_that_share_a_key_and_are_no_neighbours(terms: str, more: str, target: Target) -> None:
    """Query and result are brought into another order of heads, and what belongs to a head follows it."""
    proto = parse(
        TILED + PRODUCT_QK + terms + SOFTMAX.format("x") + PRODUCT_PV, more, inputs=SHARED, outputs="float[B,6,S,8] y"
    )
    result, report = fused(proto, target, [] if target == "ort" else ["no-empty-rows"])
    (block,) = report.blocks
    unequal = "MatMul(t, rt)" in terms and "Tile" not in terms and target == "ort"
    if block.status == "fused":
        assert block.heads == (6, 6 if unequal else 2)
    else:
        assert (target, block.code) == ("ascend", "scale")
    if target == "ort":
        feeds = random_feeds(proto)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_a_sink_of_heads_that_are_no_neighbours() -> None:
    sinks = "one_ = Constant<value=int64[1] {1}>() b_ = Shape<start=0, end=1>(s) r_ = Shape<start=2, end=3>(s) "
    sinks += "six = Constant<value=int64[1] {6}>() to = Concat<axis=0>(b_, six, r_, one_) wide = Expand(w, to) "
    sinks += "x = Concat<axis=-1>(s, wide) p0 = Softmax<axis=-1>(x) none = Constant<value=int64[1] {0}>() "
    sinks += "end = Constant<value=int64[1] {-1}>() p = Slice(p0, none, end, end) " + PRODUCT_PV
    proto = parse(TILED + PRODUCT_QK + sinks, "float[1,6,1,1] w", inputs=SHARED, outputs="float[B,6,S,8] y")
    ops, (block,) = same(proto)
    assert block.heads == (6, 2) and "Tile" not in ops


def test_alibi() -> None:
    """A bias of integer positions is provably no mask, so the padding stays a boolean one."""
    body = PRODUCT_QK + "c = Constant<value=float[4,1,1] {0.5,0.25,0.125,0.0625}>() f = Cast<to=1>(positions) "
    body += ints("a", 1, 2) + "p4 = Unsqueeze(f, a) b = Mul(p4, c) x = Add(s, b) "
    body += "low = Constant<value=float {-3.4028234663852886e38}>() w = Where(m, x, low) "
    model = parse(body + SOFTMAX.format("w") + PRODUCT_PV, "int64[B,T] positions, bool[B,1,1,T] m")
    mask = np.array([[0] * 6, [1, 1, 0, 1, 1, 1]], np.bool_).reshape(2, 1, 1, 6)
    positions = np.random.default_rng(5).integers(0, 50, (2, 6))
    assert same(model, m=mask, positions=positions)[1][0].mask == "atten_mask+real_shift"


@pytest.mark.parametrize("mask", ["", "float[B,1,1,T] m", "float[B,N,S,T] m", "float[1,N,1,1] m"])
def test_heads_that_are_not_known_before_the_run(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as batch entries then."""
    monkeypatch.setitem(SIZES, "N", 3)
    body = PRODUCT_QK + ("x = Add(s, m) " if mask else "x = Identity(s) ") + SOFTMAX.format("x") + PRODUCT_PV
    inputs = "float[B,N,S,8] q, float[B,N,T,8] k, float[B,N,T,8] v"
    _, (block,) = same(parse(body, mask, inputs=inputs, outputs="float[B,N,S,8] y"))
    assert (block.status, block.heads) == ("fused", (1, 1))


@pytest.mark.parametrize(("batch", "given"), [("K", 1), ("K", 2), ("1", 1)])
def test_keys_of_batch_one(batch: str, given: int) -> None:
    """MatMul repeats them for every query; another name for the batch may stand for 1 when the model runs."""
    inputs = f"float[B,4,S,8] q, float[{batch},4,T,8] k, float[{batch},4,T,8] v"
    rng = np.random.default_rng(6)
    pair = {name: rng.standard_normal((given, 4, 6, 8)).astype(np.float32) for name in "kv"}
    assert same(parse(PRODUCT_QK + PLAIN, inputs=inputs), **pair)[1][0].status == "fused"


@pytest.mark.parametrize("order", ["s, m", "m, s"])
def test_a_mask_of_its_own_length_before_a_reshape(order: str) -> None:
    """The sum has the size of both names; it is that of the scores wherever the model runs (BLOOM, Keras)."""
    body = PRODUCT_QK + f"x = Add({order}) h = Shape<start=2>(x) " + ints("many", -1)
    body += "folded = Concat<axis=0>(many, h) x3 = Reshape(x, folded) p3 = Softmax<axis=-1>(x3) "
    body += ints("heads", -1, 4) + "apart = Concat<axis=0>(heads, h) p = Reshape(p3, apart) " + PRODUCT_PV
    mask = np.where(np.random.default_rng(7).random((2, 1, 1, 6)) < 0.4, -1e9, 0).astype(np.float32)
    remaining, (block,) = same(parse(body, "float[C,1,1,L] m"), m=mask)
    assert (block.status, block.mask) == ("fused", "real_shift")
    assert set(remaining) - {"Constant"} == {"FlashAttentionScore", "Shape", "Concat"} & set(remaining)


@pytest.mark.parametrize(("past", "status"), [("P", "fused"), ("O", "declined")])
def test_the_row_of_a_triangle_that_a_cache_asks_for(past: str, status: str) -> None:
    """One row from the length of the cache on, where the triangle's columns are the keys: there it has such a row."""
    body = "k2 = Concat<axis=2>(pk, k) kt = Transpose<perm=[0,1,3,2]>(k2) s = MatMul(q, kt) v2 = Concat<axis=2>(pv, v) "
    body += "n = Shape<start=2, end=3>(past) " + ints("one", 1) + ints("rows", 2) + ints("columns", 3) + ints("zero", 0)
    body += "to = Add(n, one) len = Shape<start=2, end=3>(k2) a = Slice(triangle, n, to, rows, one) "
    body += "keep = Slice(a, zero, len, columns, one) low = Constant<value=float {-3.4028234663852886e38}>() "
    body += "x = Where(keep, s, low) " + SOFTMAX.format("x") + "y = MatMul(p, v2)"
    inputs = "float[B,4,1,8] q, float[B,4,1,8] k, float[B,4,1,8] v, float[B,4,P,8] pk, float[B,4,P,8] pv"
    triangle = ",".join("1" if j <= i else "0" for i in range(8) for j in range(8))
    model = parse(
        body,
        f"float[B,4,{past},8] past",
        inputs=inputs,
        outputs="float[B,4,1,8] y",
        initializers=f"<bool[1,1,8,8] triangle = {{{triangle}}}>",
    )
    rng = np.random.default_rng(8)
    given = {name: rng.standard_normal((2, 4, 3, 8)).astype(np.float32) for name in ("pk", "pv", "past")}
    assert same(model, **given)[1][0].status == status


# -- a Sum of several ---------------------------------------------------------------------------------

TERMS = "float[B,4,6,6] b, float[4,6,6] c, bool[B,1,1,6] m"
ADDENDS = PRODUCT_QK.replace("s =", "r =") + (
    "low = Constant<value=float {LOW}>() zero = Constant<value=float {0}>() a = Where(m, zero, low) "
)


@pytest.mark.parametrize("low", ["-inf", "-3.4e38", "-1e9"])
@pytest.mark.parametrize("order", ["r, a, b", "a, r, b", "b, r, a", "r, b, c, a"])
def test_a_sum_is_a_chain_of_adds(order: str, low: str) -> None:
    first, *rest = order.split(", ")
    chain = "".join(f"x{at} = Add({'x' + str(at - 1) if at else first}, {term}) " for at, term in enumerate(rest))
    body = ADDENDS.replace("LOW", low)
    written = parse(body + f"s = Sum({order}) " + PLAIN, TERMS, inputs=SQUARE)
    added = parse(body + chain + SOFTMAX.format(f"x{len(rest) - 1}") + PRODUCT_PV, TERMS, inputs=SQUARE)
    _, blocks = same(written)
    _, wanted = same(added)
    assert (blocks[0].status, blocks[0].mask, blocks[0].reason) == (wanted[0].status, wanted[0].mask, wanted[0].reason)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("a, b, r", "Sum adds its first two operands to each other, and 'r', the scores, to their sum"),
        ("a, b, c", "the scores come from"),
        ("r, b, b", "Sum on the scores"),
    ],
)
def test_a_sum_that_is_no_chain(order: str, reason: str) -> None:
    body = ADDENDS.replace("LOW", "-inf")
    _, blocks = same(parse(body + f"s = Sum({order}) " + PLAIN, TERMS, inputs=SQUARE))
    assert blocks[0].status in ("declined", "not_attention"), blocks[0]
    assert reason in (blocks[0].reason or "")


def test_scores_between_limits_or_with_a_scale_of_zero() -> None:
    """No tensor that is added does what a Clip does, and a scale of 0 is a constant."""
    steps = {
        "low = Constant<value=float {-5}>() s = Clip(r, low) ": "leave it out, where the scores stay within its limits",
        "zero = Constant<value=float {0}>() s = Mul(r, zero) ": "give it a scale other than 0 that float32 holds",
    }
    for step, hint in steps.items():
        _, blocks = same(parse(PRODUCT_QK.replace("s =", "r =") + step + PLAIN, inputs=SQUARE))
        assert (blocks[0].status, blocks[0].hint) == ("declined", hint)


# -- Gemm that adds to its product ------------------------------------------------------------------

ONE_HEAD = "float[S,8] q, float[T,8] k, float[T,8] v"


@pytest.mark.parametrize(("attributes", "inputs"), [("", "float[S,T] b"), ("beta=-1.0, ", "float[1,T] b")])
def test_a_gemm_that_adds_a_bias_to_scores(attributes: str, inputs: str) -> None:
    """As graph optimisers write MatMul and Add of one head."""
    body = f"s = Gemm<transB=1, {attributes}alpha=0.3>(q, k, b) p = Softmax<axis=-1>(s) y = MatMul(p, v)"
    left, (block,) = same(parse(body, inputs=f"{ONE_HEAD}, {inputs}", outputs="float[S,8] y"))
    assert block.status == "fused" and "Gemm" not in left


@pytest.mark.parametrize(
    "body",
    [
        "s = Gemm<transB=1, beta=2.0>(q, k, b) ",
        "w = Constant<value=float[8,2] {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}>() k2 = Slice(b, zero, two, one) "
        "c = ReduceSum<keepdims=0>(k2) s = Gemm(q, w, c) ",
    ],
    ids=["another factor", "a linear layer"],
)
def test_a_gemm_that_adds_otherwise(body: str) -> None:
    numbers = ints("zero", 0) + ints("two", 2) + ints("one", 1)
    inputs = f"{ONE_HEAD}, float[S,T] b" if "beta" in body else "float[S,8] q, float[2,8] v, float[S,T] b"
    model = parse(numbers + body + "p = Softmax<axis=-1>(s) y = MatMul(p, v)", inputs=inputs, outputs="float[S,8] y")
    wanted = "no_scores_matmul" if "beta" in body else "not_attention"
    assert [block.code for block in same(model)[1]] == [wanted]
