"""Masks and biases of a batch of their own name: where it is larger than a batch of 1 they enlarge the scores, which
the fused operator must not miss, whatever becomes of the mask."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, assert_same, fused, parse, random_feeds, refused, run

NUMBERS = (
    "<float zero = {0.0}, float one = {1.0}, float low = {-inf}, float huge = {-1e38}, int64 none = {0}, "
    "int64 step = {1}, int64[1] first = {0}, int64[1] second = {1}, int64[3] ones = {1, 1, 1}, "
    "int64[2] inner = {1, 2}, int64[2] rows = {1, 3}>"
)
SHAPE = "batch = Shape<start=0, end=1>(o) shape = Concat<axis=0>(batch, ones) "
CAUSAL = (
    "size = Shape<start=2, end=3>(q) n = Squeeze(size) i = Range(none, n, step) r = Unsqueeze(i, second) "
    "c = Unsqueeze(i, first) m0 = LessOrEqual(c, r) "
)
SELECT = "x = Where(m, s, low) "
TERMS = {
    "zeros": (SHAPE + "z = ConstantOfShape(shape) x = Add(s, z) ", "real_shift"),
    "a band": (CAUSAL + SHAPE + "m = Expand(m0, shape) " + SELECT, "atten_mask"),
    "a band beside its own padding": (CAUSAL + "m = And(m0, o) " + SELECT, "causal+atten_mask"),
    "repeated padding": (SHAPE + "m = Expand(keep, shape) " + SELECT, "atten_mask"),
    "a repeated mask": (SHAPE + "f = Where(keep, zero, low) z = Expand(f, shape) x = Add(s, z) ", "atten_mask"),
    "a repeated bias": (SHAPE + "z = Expand(b, shape) x = Add(s, z) ", "real_shift"),
    "a repeated part of a sum": (
        SHAPE + "t = Tanh(b) z = Expand(t, shape) f = Where(keep, zero, huge) w = Add(z, f) x = Add(s, w) ",
        "atten_mask+real_shift",
    ),
    "labels": (
        "flags = Cast<to=7>(o) f2 = Squeeze(flags, inner) label = CumSum(f2, step) row = Unsqueeze(label, rows) "
        "column = Unsqueeze(label, inner) m = Equal(row, column) " + SELECT,
        "packed",
    ),
    "arithmetic": (
        SHAPE
        + "f = Cast<to=1>(keep) z = Expand(f, shape) g = Mul(s, z) d = Sub(one, z) h = Mul(huge, d) x = Add(g, h) ",
        "atten_mask",
    ),
}
MORE = "bool[O,1,1,S] o, bool[1,1,1,S] keep, float[1,1,S,S] b"


@pytest.mark.parametrize(("term", "mask"), TERMS.values(), ids=TERMS)
def test_a_larger_batch_of_a_mask_is_refused(term: str, mask: str) -> None:
    inputs = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v"
    body = PRODUCT_QK + term + "p = Softmax<axis=-1>(x) " + PRODUCT_PV
    model = parse(body, MORE, inputs=inputs, outputs="float[N,4,S,8] y", initializers=NUMBERS)
    result, report = fused(model)
    (block,) = report.blocks
    assert (block.status, block.mask) == ("fused", mask)
    for own in (1, 2):
        shape = own, 1, 1, 5
        feeds = random_feeds(model, o=np.ones(shape, bool), keep=np.arange(5).reshape(1, 1, 1, 5) < 3)
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    few = {name: value[:1] for name, value in feeds.items() if name in "qkv"}
    feeds = {**feeds, **few, "o": np.ones((3, 1, 1, 5), bool)}
    assert run(model, feeds)[0].shape[0] == 3
    with refused("real_shift|atten_mask|actual_seq_qlen"):
        run(result, feeds)


@pytest.mark.parametrize(
    ("target", "words"), [("ort", "atten_mask"), ("onnx", "attn_mask"), ("contrib", "key_padding_mask")]
)
def test_why_a_larger_batch_of_a_mask_is_refused(target: str, words: str) -> None:
    """A Reshape to the query's batch behind the attention joins the batches of the mask with the tokens: the fused
    operator takes it for what it is beside equal batches, and must not run beside others."""
    body = """
        form = Constant<value=int64[4] {0, 0, 4, 8}>()
        q4 = Reshape(q3, form) k4 = Reshape(k3, form) v4 = Reshape(v3, form)
        q = Transpose<perm=[0, 2, 1, 3]>(q4) kt = Transpose<perm=[0, 2, 3, 1]>(k4) v = Transpose<perm=[0, 2, 1, 3]>(v4)
        s = MatMul(q, kt) x = Where(m, s, low) p = Softmax<axis=-1>(x) o = MatMul(p, v)
        t = Transpose<perm=[0, 2, 1, 3]>(o) batch = Shape<start=0, end=1>(q3)
        rest = Constant<value=int64[2] {-1, 32}>() joined = Concat<axis=0>(batch, rest) y = Reshape(t, joined)
    """
    inputs = "float[B,S,32] q3, float[B,S,32] k3, float[B,S,32] v3"
    model = parse(
        body, "bool[O,1,1,S] m", inputs=inputs, outputs="float[B,M,32] y", initializers="<float low = {-1e30}>"
    )
    result, report = fused(model, target=target)
    assert [block.status for block in report.blocks] == ["fused"]
    for batch, own in ((2, 2), (2, 1), (1, 3)):
        feeds = {name: value[:batch] for name, value in random_feeds(model, m=np.ones((own, 1, 1, 5), bool)).items()}
        feeds["m"] = np.ones((own, 1, 1, 5), bool)
        want = run(model, feeds)[0]
        if own <= batch:
            assert_same(run(result, feeds)[0], want, 1e-5)
            continue
        assert want.shape == (1, 15, 32)
        with refused(words):
            run(result, feeds)


@pytest.mark.parametrize(
    "mask", ["m = Expand(keep, two) " + SELECT, "f = Where(keep, zero, low) z = Expand(f, two) x = Add(s, z) "]
)
def test_a_mask_of_more_rows_than_the_query_is_refused(mask: str) -> None:
    """Its rows are equal, but as many as there are, the result has."""
    numbers = NUMBERS[:-1] + ", int64[4] two = {1, 1, 2, 1}>"
    body = PRODUCT_QK + mask + "p = Softmax<axis=-1>(x) " + PRODUCT_PV
    inputs = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
    model = parse(body, "bool[1,1,1,T] keep", inputs=inputs, outputs="float[B,4,N,8] y", initializers=numbers)
    result, report = fused(model)
    assert [block.status for block in report.blocks] == ["fused"]
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 2, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 8)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["keep"] = np.arange(6).reshape(1, 1, 1, 6) < 4
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    feeds["q"] = feeds["q"][:, :, :1]
    assert run(model, feeds)[0].shape[2] == 2
    with refused("atten_mask"):
        run(result, feeds)


@pytest.mark.parametrize("rows", ["S", "1"])
def test_an_operator_whose_mask_has_more_rows_than_the_query(rows: str) -> None:
    """ONNX's Attention, which ONNX Runtime then computes by its definition."""
    body = "two = Constant<value=int64[4] {1, 1, 2, 1}>() m = Expand(keep, two) y = Attention(q, k, v, m)"
    inputs = f"float[1,4,{rows},8] q, float[1,4,T,8] k, float[1,4,T,8] v"
    model = parse(body, "bool[1,1,1,T] keep", inputs=inputs, outputs="float[1,4,N,8] y", opset=25, ir_version=11)
    result, report = fused(model)
    assert [block.status for block in report.blocks] == ["fused" if rows == "S" else "declined"]
    feeds = {name: np.ones((1, 4, 6, 8), np.float32) for name in "kv"}
    feeds |= {"q": np.ones((1, 4, 1, 8), np.float32), "keep": np.ones((1, 1, 1, 6), np.bool_)}
    (want,) = run(model, feeds)
    assert want.shape == (1, 4, 2, 8)
    if rows == "1":
        assert_same(run(result, feeds)[0], want, 1e-5)
    else:
        with refused("atten_mask"):
            run(result, feeds)


FLAT = "float[B,S,8] q, float[B,T,8] k, float[B,T,8] v"
"""One head without a dimension of its own: the scores have three dimensions."""
FLAT_SCORES = "kt = Transpose<perm=[0,2,1]>(k) s = MatMul(q, kt) "
DEEPER = {
    "added": ("x = Add(s, m)", "float[1,1,S,T] m", "1,B"),
    "added for each batch entry": ("x = Add(m, s)", "float[1,B,1,T] m", "1,B"),
    "subtracted": ("x = Sub(s, m)", "float[1,1,S,T] m", "1,B"),
    "selected": ("x = Where(m, s, low)", "bool[1,1,1,T] m", "1,B"),
    "two dimensions more": ("x = Where(m, s, low)", "bool[1,1,1,1,T] m", "1,1,B"),
    "twice": ("a = Add(s, m) x = Where(o, a, low)", "float[1,1,S,T] m, bool[1,1,1,1,T] o", "1,1,B"),
    "a factor behind it": ("a = Add(m, s) x = Mul(a, two)", "float[1,1,S,T] m", "1,B"),
}


@pytest.mark.parametrize(("term", "more", "batch"), DEEPER.values(), ids=DEEPER)
def test_a_mask_of_more_dimensions(term: str, more: str, batch: str) -> None:
    body = f"{FLAT_SCORES} {term} p = Softmax<axis=-1>(x) y = MatMul(p, v)"
    outputs = f"float[{batch},S,8] y"
    model = parse(body, more, inputs=FLAT, outputs=outputs, initializers="<float low = {-inf}, float two = {2.0}>")
    result, report = fused(model)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize("batch", ["2", "M"])
def test_a_mask_of_more_dimensions_that_enlarges_the_scores(batch: str) -> None:
    body = f"{FLAT_SCORES} x = Add(s, m) p = Softmax<axis=-1>(x) y = MatMul(p, v)"
    model = parse(body, f"float[{batch},1,S,T] m", inputs=FLAT, outputs=f"float[{batch},B,S,8] y")
    (block,) = fused(model)[1].blocks
    assert (block.status, block.code) == ("declined", "shape")
