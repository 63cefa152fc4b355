"""Batches of query and keys whose sizes have different names: equal in most runs, and in some one of them is 1."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.running import assert_same, fused, parse, run

BODY = """
    q = Transpose<perm=[1, 0, 2]>(x)
    kt = Transpose<perm=[0, 2, 1]>(x)
    s = MatMul(q, kt)
    p = Softmax<axis=-1>(s)
    o = MatMul(p, x)
    batch = Shape<start=0, end=1>(x)
    rest = Constant<value=int64[2] {-1, 8}>()
    form = Concat<axis=0>(batch, rest)
    y = Reshape(o, form)
"""


@pytest.mark.parametrize("sizes", [(1, 5), (3, 3), (1, 1)], ids=str)
def test_a_batch_of_one_beside_another(sizes: tuple[int, int]) -> None:
    """The Reshape is the identity only where both batches are equal."""
    proto = parse(BODY, inputs="float[B,S,8] x", outputs="float[M,N,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    feeds = {"x": np.random.default_rng(0).standard_normal((*sizes, 8)).astype(np.float32)}
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


HEADS = """
    qs = Shape<start=0, end=2>(q4) ks = Shape<start=0, end=2>(k4) vs = Shape<start=0, end=2>(v4)
    qn = ReduceProd<keepdims=1>(qs) kn = ReduceProd<keepdims=1>(ks) vn = ReduceProd<keepdims=1>(vs)
    rest = Constant<value=int64[1] {-1}>() eight = Constant<value=int64[1] {8}>()
    qf = Concat<axis=0>(qn, rest, eight) kf = Concat<axis=0>(kn, rest, eight) vf = Concat<axis=0>(vn, rest, eight)
    q3 = Reshape(q4, qf) k3 = Reshape(k4, kf) v3 = Reshape(v4, vf)
    kt = Transpose<perm=[0, 2, 1]>(k3) s3 = MatMul(q3, kt)
    most = Max(qs, ks) rows = Shape<start=2, end=3>(q4) columns = Shape<start=2, end=3>(k4)
    full = Concat<axis=0>(most, rows, columns) s = Reshape(s3, full)
    p = Softmax<axis=-1>(s)
    ps = Shape<start=0, end=2>(p) pn = ReduceProd<keepdims=1>(ps) pf = Concat<axis=0>(pn, rest, columns)
    p3 = Reshape(p, pf) y3 = MatMul(p3, v3)
    both = Max(ps, vs) out = Concat<axis=0>(both, rows, eight) y = Reshape(y3, out)
"""


@pytest.mark.parametrize("value", ["float[V,4,T,8] v4", "float[K,4,T,8] v4"])
def test_a_batch_that_is_the_larger_of_two(value: str) -> None:
    """tf2onnx writes an Einsum so: batch and heads in one dimension, which the product makes equal."""
    inputs = f"float[Q,4,S,8] q4, float[K,4,T,8] k4, {value}"
    proto = parse(HEADS, inputs=inputs, outputs="float[N,4,S,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    rng = np.random.default_rng(0)
    for batch, rows, keys in ((2, 5, 7), (1, 1, 1), (3, 1, 4)):
        sizes = {"q4": rows, "k4": keys, "v4": keys}
        feeds = {name: rng.standard_normal((batch, 4, size, 8)).astype(np.float32) for name, size in sizes.items()}
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


NAMES = """
    q = Add(a, b) kt = Transpose<perm=[0, 1, 3, 2]>(q) s = MatMul(q, kt)
    low = Constant<value=float {-1e38}>() x = Where(m, s, low) p = Softmax<axis=-1>(x)
    rest = Constant<value=int64[1] {-1}>()
    ps = Shape<start=0, end=2>(p) pn = ReduceProd<keepdims=1>(ps) pc = Shape<start=3, end=4>(p)
    pf = Concat<axis=0>(pn, rest, pc) p3 = Reshape(p, pf)
    vs = Shape<start=0, end=2>(q) vn = ReduceProd<keepdims=1>(vs) vc = Shape<start=3, end=4>(q)
    vf = Concat<axis=0>(vn, rest, vc) v3 = Reshape(q, vf)
    y = MatMul(p3, v3)
"""


def test_a_batch_of_three_names() -> None:
    """Tokens, segments and the mask have a batch of their own each, as inputs of a Keras model have."""
    inputs = "float[A,4,S,8] a, float[B,4,S,8] b, bool[C,1,1,S] m"
    proto = parse(NAMES, inputs=inputs, outputs="float[M,N,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    rng = np.random.default_rng(0)
    for batches in ((2, 2, 2), (1, 3, 1), (3, 1, 3), (1, 1, 1)):
        feeds = {
            name: rng.standard_normal((n, 4, 5, 8)).astype(np.float32)
            for name, n in zip("ab", batches[:2], strict=True)
        }
        feeds["m"] = rng.random((batches[2], 1, 1, 5)) < 0.6
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


ONE_KEY_HEAD = """
    shape = Shape(q) batch = Gather<axis=0>(shape, first) rows = Gather<axis=0>(shape, second) all = Mul(rows, four)
    folded = Concat<axis=0>(batch, all, eight) q3 = Reshape<allowzero=1>(q, folded)
    kt = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q3, kt) p = Softmax<axis=-1>(s) o = MatMul(p, v)
    apart = Concat<axis=0>(batch, rows, width) y = Reshape<allowzero=1>(o, apart)
"""


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0), (0, 0), (2, 5)], ids=str)
def test_an_empty_batch(sizes: tuple[int, int]) -> None:
    """Rows and heads lie in one dimension (GPT BigCode), and a Reshape of the result has to compute the rows: it may
    not infer them, for there is nothing to infer them from when the batch is empty."""
    proto = parse(
        ONE_KEY_HEAD,
        inputs="float[B,S,32] q, float[B,T,8] k, float[B,T,8] v",
        outputs="float[B,S,32] y",
        initializers="<int64[1] first = {0}, int64[1] second = {1}, int64[1] four = {4}, int64[1] eight = {8}, "
        "int64[1] width = {32}>",
    )
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    (batch, rows), rng = sizes, np.random.default_rng(0)
    shapes = {"q": (batch, rows, 32), "k": (batch, 6, 8), "v": (batch, 6, 8)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    got, wanted = run(result, feeds)[0], run(proto, feeds)[0]
    assert got.shape == wanted.shape
    assert_same(got, wanted, 1e-5)


SHAPES = """
    kt = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, k)
"""
MOVED = "t = Transpose<perm=[2, 0, 1]>(s) one = Constant<value_ints=[1]>() w = Unsqueeze(t, one) "


@pytest.mark.parametrize("reader", ["n = Shape(p)", MOVED + "n = Shape(w)"], ids=["itself", "moved"])
@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (2, 2), (1, 1), (0, 1), (1, 0)])
def test_the_shape_of_probabilities_of_two_batches(batches: tuple[int, int], reader: str) -> None:
    """Each may be 1; the probabilities have the other one. So have the scores, also where they are only moved."""
    rank = 4 if "w" in reader else 3
    inputs, outputs = "float[Q,S,8] q, float[K,T,8] k", f"float[N,S,8] y, int64[{rank}] n"
    proto = parse(SHAPES + reader, inputs=inputs, outputs=outputs)
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal((batch, 5, 8)).astype(np.float32) for name, batch in zip("qk", batches, strict=True)
    }
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize("reader", ["z = Identity(w)", "n = Shape(w) z = Neg(w)"])
def test_moved_scores_that_are_read_are_not_fused(reader: str) -> None:
    inputs, outputs = "float[Q,S,8] q, float[K,T,8] k", "float[N,S,8] y, float[T,1,N,S] z"
    proto = parse(SHAPES + MOVED + reader, inputs=inputs, outputs=outputs)
    assert [block.code for block in fused(proto)[1].blocks] == ["scores_are_output"]


RESHAPED_TO_ITS_OWN_SIZES = """
    q4 = Reshape(q, heads) q5 = Transpose<perm=[0, 2, 1, 3]>(q4) k4 = Reshape(k, heads)
    k5 = Transpose<perm=[0, 2, 1, 3]>(k4) kt = Transpose<perm=[0, 2, 3, 1]>(k4)
    s = MatMul(q5, kt) p = Softmax<axis=-1>(s) o = MatMul(p, k5) n = Shape(o) o2 = Reshape(o, n)
    t = Transpose<perm=[0, 2, 1, 3]>(o2) m = Shape(t) front = Slice(m, zero, two) all = Concat<axis=0>(front, width)
    y = Reshape(t, all)
"""


@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (2, 2), (1, 1)])
def test_a_result_that_is_reshaped_to_its_own_sizes(batches: tuple[int, int]) -> None:
    """As TorchScript does it: nothing reads the elements between the product and the last Reshape, but the sizes, so no
    copy is left. The sizes come from query and key, of which either may have batch 1."""
    proto = parse(
        RESHAPED_TO_ITS_OWN_SIZES,
        inputs="float[Q,S,32] q, float[K,T,32] k",
        outputs="float[N,S,32] y, int64[4] n, int64[4] m",
        initializers="<int64[4] heads = {0, 0, 4, 8}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] width = {32}>",
    )
    result, report = fused(proto)
    assert [(block.status, block.layout) for block in report.blocks] == [("fused", "BSH")]
    assert not {"Reshape", "Transpose"} & {node.op_type for node in result.graph.node}
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal((batch, 5, 32)).astype(np.float32) for name, batch in zip("qk", batches, strict=True)
    }
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


MADE_OF_THE_SHAPE = """
    kt = Transpose<perm=[0, 2, 1]>(k) s = MatMul(q, kt)
    n = Shape(s) e = Expand(keep, n) b = Cast<to=9>(e)
    n2 = Shape(s) e2 = Expand(seen, n2) b2 = Cast<to=9>(e2)
    low = Constant<value=float {-1e38}>() x = Where(b, s, low) x2 = Where(b2, x, low)
    p = Softmax<axis=-1>(x2) y = MatMul(p, k)
"""


@pytest.mark.parametrize("batches", [(1, 2), (2, 1), (2, 2)])
def test_a_mask_that_is_made_of_the_shape_of_the_scores(batches: tuple[int, int]) -> None:
    """Their shape is not computed from the mask, nor from another mask that is made of it."""
    masks, inputs = "int64[1,T] keep, int64[1,T] seen", "float[Q,S,8] q, float[K,T,8] k"
    proto = parse(MADE_OF_THE_SHAPE, masks, inputs=inputs, outputs="float[N,S,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal((batch, 5, 8)).astype(np.float32) for name, batch in zip("qk", batches, strict=True)
    }
    feeds |= {name: rng.integers(0, 2, (1, 5)) for name in ("keep", "seen")}
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
