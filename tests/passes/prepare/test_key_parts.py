"""Keys in parts (PEGASUS-X, BigBird): joined scores and added products become those of joined keys and values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.passes import Report
from tests.examples import examples
from tests.passes.running import Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

INPUTS = (
    "float[B,4,S,8] q, float[B,4,3,8] k, float[B,4,3,8] v, float[1,4,2,8] k2, float[B,4,2,8] v2, "
    "float[B,1,1,3] t, float[B,1,S,2] t2, bool[B,1,1,5] m, float[B,4,S,8] q2"
)
NUMBERS = (
    "c = Constant<value=float {0.25}>() c2 = Constant<value=float {0.5}>() low = Constant<value=float {-inf}>() "
    "sizes = Constant<value=int64[2] {3,2}>() i0 = Constant<value=int64[1] {0}>() i2 = Constant<value=int64[1] {2}>() "
    "i3 = Constant<value=int64[1] {3}>() less = Constant<value=int64[1] {-2}>() end = Constant<value=int64[1] {99}>() "
)
PRODUCTS = (
    "kt = Transpose<perm=[0,1,3,2]>(k) a = MatMul(q, kt) kt2 = Transpose<perm=[0,1,3,2]>(k2) a2 = MatMul(q, kt2) "
)
SCALED = PRODUCTS + "b = Mul(a, c) b2 = Mul(c, a2) "
SCALED_SCORES = NUMBERS + SCALED
CONCAT = "s = Concat<axis=-1>({}, {}) "
SCORES = SCALED_SCORES + CONCAT.format("b", "b2")
SOFTMAX = "p = Softmax<axis=-1>(s) "
SPLIT = "p1, p2 = Split<axis=-1>(p, sizes) "
RESULT = "y1 = MatMul(p1, v) y2 = MatMul(p2, v2) y = Add(y1, y2) "
AFTER = SOFTMAX + SPLIT + RESULT
SPELLINGS = {
    "products": NUMBERS + PRODUCTS + CONCAT.format("a", "a2") + AFTER,
    "scaled": SCORES + AFTER,
    "divided": SCORES.replace("Mul(a, c)", "Div(a, c)").replace("Mul(c, a2)", "Div(a2, c)") + AFTER,
    "terms": SCALED_SCORES + "d = Add(b, t) d2 = Add(t2, b2) " + CONCAT.format("d", "d2") + AFTER,
    "a term of one part": SCALED_SCORES + "d2 = Add(t2, b2) " + CONCAT.format("b", "d2") + AFTER,
    "one number for all keys of a part": SCALED_SCORES
    + "r = ReduceMax<axes=[3]>(t) d = Add(b, r) "
    + CONCAT.format("d", "b2")
    + AFTER,
    "a mask behind": SCALED_SCORES + CONCAT.format("b", "b2").replace("s =", "s0 =") + "s = Where(m, s0, low) " + AFTER,
    "slices": SCORES + SOFTMAX + "p1 = Slice(p, i0, i3, i3) p2 = Slice(p, i3, end, i3) " + RESULT,
    "slices from the end": SCORES + SOFTMAX + "p2 = Slice(p, less, end, i3) p1 = Slice(p, i0, less, i3) " + RESULT,
    "added the other way": SCORES + SOFTMAX + SPLIT + RESULT.replace("Add(y1, y2)", "Add(y2, y1)"),
    "joined values": SCORES + SOFTMAX + "w2 = Identity(v2) vv = Concat<axis=2>(v, w2) y = MatMul(p, vv) ",
    "joined keys": NUMBERS + "kk = Concat<axis=2>(v, v2) kt = Transpose<perm=[0,1,3,2]>(kk) s = MatMul(q, kt) " + AFTER,
    "three parts": SCALED_SCORES
    + "a3 = MatMul(q, kt) b3 = Mul(a3, c) "
    + "s = Concat<axis=-1>(b, b2, b3) three = Constant<value=int64[3] {3,2,3}>() "
    + SOFTMAX
    + "p1, p2, p3 = Split<axis=-1>(p, three) y1 = MatMul(p1, v) y2 = MatMul(p2, v2) y3 = MatMul(p3, v) "
    "y12 = Add(y1, y2) y = Add(y3, y12) ",
    "values of another order": SCORES
    + SOFTMAX
    + SPLIT
    + 'y1 = Einsum<equation="bhst,bhtd->bhsd">(p1, v) w2 = Transpose<perm=[2,0,1,3]>(v2) '
    'y2 = Einsum<equation="bhst,tbhd->bhsd">(p2, w2) y = Add(y1, y2) ',
}


def attention(body: str, kind: str = "float") -> onnx.ModelProto:
    return parse(body, inputs=INPUTS.replace("float[", f"{kind}["), outputs=f"{kind}[B,4,S,8] y")


def same(proto: onnx.ModelProto, tolerance: float = 1e-5, **given: Array) -> tuple[set[str], Report]:
    """Compare before and after. Returns the operators after it, and the report."""
    result, report = fused(proto)
    mask = np.ones((2, 1, 1, 5), np.bool_)
    mask[0, 0, 0, 1:3] = False
    feeds = random_feeds(proto, m=mask, **given)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], tolerance)
    return {node.op_type for node in result.graph.node}, report


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str) -> None:
    ops, report = same(attention(body))
    assert [(block.status, block.reason, block.assumed) for block in report.blocks] == [("fused", None, ())]
    assert not {"Softmax", "MatMul", "Einsum", "Split", "Slice"} & ops


def test_values_that_are_infinite() -> None:
    values = np.ones((2, 4, 3, 8), np.float32)
    values[0, 0, 0, 0], values[1, 1, 1, 1] = np.inf, np.nan
    assert same(attention(SPELLINGS["scaled"]), v=values)[1].count("fused") == 1


def test_float16() -> None:
    numbers = NUMBERS.replace("c = ", "cf = ").replace("c2 = ", "c2f = ") + "c = Cast<to=10>(cf) "
    body = SPELLINGS["a term of one part"].replace(NUMBERS, numbers)
    assert same(attention(body, "float16"), 5e-3)[1].count("fused") == 1


BLOCKS = "float[B,4,N,32,8] q, float[B,4,N,32,8] k, float[B,4,N,32,8] v, float[B,4,G,8] g, float[B,4,G,8] w"
GLOBAL = (
    'a = Einsum<equation="BHNKF,BHGF->BHNKG">(q, g) b = Einsum<equation="BHNKF,BHNXF->BHNKX">(q, k) '
    "s = Concat<axis=-1>(a, b) p = Softmax<axis=-1>(s) y0 = Shape(g) i2 = Constant<value=int64[1] {2}>() "
    "i0 = Constant<value=int64[1] {0}>() n = Gather<axis=0>(y0, i2) y1 = Constant<value=int64[1] {4}>() "
    "end = Constant<value=int64[1] {9223372036854775807}>() "
    "p1 = Slice(p, i0, n, y1) p2 = Slice(p, n, end, y1) "
    'c = Einsum<equation="BHNKG,BHGF->BHNKF">(p1, w) d = Einsum<equation="BHNKX,BHNXF->BHNKF">(p2, v) y = Add(c, d) '
)


def test_global_keys_are_repeated_for_each_block() -> None:
    """The number of blocks and of global keys is that of the run. Blocks of few rows stay as they are."""
    proto = parse(GLOBAL, inputs=BLOCKS, outputs="float[B,4,N,32,8] y")
    result, report = fused(proto)
    assert [(block.status, block.reason) for block in report.blocks] == [("fused", None)]
    rng = np.random.default_rng(0)
    for blocks, keys in ((3, 5), (1, 5), (3, 1), (1, 1)):
        shapes = dict.fromkeys("qkv", (2, 4, blocks, 32, 8)) | dict.fromkeys("gw", (2, 4, keys, 8))
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    few = parse(GLOBAL, inputs=BLOCKS.replace("32", "16"), outputs="float[B,4,N,16,8] y")
    (block,) = fused(few)[1].blocks
    assert block.status == "declined" and "for each 16 rows" in (block.reason or "")


I4 = "i1 = Constant<value=int64[1] {1}>() i4 = Constant<value=int64[1] {4}>() "
READ = "y3 = Add(y1, y2) r = ReduceMax<axes=[3]>({}) y = Add(y3, r) "
KEPT = {
    "queries of their own": SCORES.replace("MatMul(q, kt2)", "MatMul(q2, kt2)") + AFTER,
    "scales of their own": SCORES.replace("Mul(c, a2)", "Mul(c2, a2)") + AFTER,
    "an operator on a part": SCORES.replace("b2 = Mul(c, a2)", "b2 = Relu(a2)") + AFTER,
    "one part is no product": SCALED_SCORES + "d2 = Sub(b2, t2) " + CONCAT.format("b", "d2") + AFTER,
    "a part is read, too": SCORES + AFTER.replace("y = Add(y1, y2)", READ.format("b2")),
    "cuts that overlap": SCORES + SOFTMAX + I4 + "p1 = Slice(p, i0, i3, i3) p2 = Slice(p, i2, i4, i3) " + RESULT,
    "a key is left out": SCORES
    + SOFTMAX
    + I4
    + "p1 = Slice(p, i0, i3, i3) p2 = Slice(p, i3, i4, i3) w = Slice(v2, i0, i1, i2) "
    + RESULT.replace("MatMul(p2, v2)", "MatMul(p2, w)"),
    "backwards": SCORES
    + SOFTMAX
    + "back = Constant<value=int64[1] {-1}>() p1 = Slice(p, i0, i3, i3) p2 = Slice(p, end, i2, i3, back) "
    + RESULT,
    "a product of products": SCORES + SOFTMAX + SPLIT + RESULT.replace("Add(y1, y2)", "Mul(y1, y2)"),
    "the probabilities are read, too": SCORES + AFTER.replace("y = Add(y1, y2)", READ.format("p")),
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_what_stays_as_it_is(body: str) -> None:
    proto = attention(body)
    result, report = fused(proto)
    assert report.count("fused") == 0
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in proto.graph.node]


@settings(max_examples=examples(6))
@given(seed=st.integers(0, 2**32 - 1), steep=st.sampled_from([0.1, 1.0, 20.0]))
def test_parts_in_float64(seed: int, steep: float) -> None:
    proto = attention(SPELLINGS["terms"])
    result, report = fused(proto)
    assert report.count("fused") == 1
    feeds = random_feeds(proto, seed)
    feeds["q"] *= np.float32(steep)
    q, k, v, k2, v2, t, t2 = (feeds[name].astype(np.float64) for name in ("q", "k", "v", "k2", "v2", "t", "t2"))
    scores = [0.25 * q @ keys.swapaxes(-1, -2) + term for keys, term in ((k, t), (k2, t2))]
    joined = np.concatenate([np.broadcast_to(each, (2, 4, 5, each.shape[-1])) for each in scores], axis=-1)
    weights = np.exp(joined - joined.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert_same(run(result, feeds)[0], weights[..., :3] @ v + weights[..., 3:] @ v2, 1e-5)
