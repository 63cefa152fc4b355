"""Forms that are no attention, or not yet: one rule for each form, and a reason that names it."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler.passes import Block
from fa_compiler.passes.matching.probability_path import DIFFERENCE_ADVICE
from fa_compiler.passes.matching.scores import PARTS_ADVICE
from tests.passes.running import fused, parse

CONSTANTS = (
    "thirds = Constant<value=int64[3] {8,8,8}>() rows = Constant<value=int64[3] {0,4,-1}>() "
    "features = Constant<value=int64[3] {0,8,-1}>() sizes = Constant<value=int64[2] {3,3}>() "
    "i0 = Constant<value=int64[1] {0}>() i3 = Constant<value=int64[1] {3}>() i6 = Constant<value=int64[1] {6}>() "
    "last = Constant<value=int64[1] {-1}>() "
)
TOKENS, PICTURE = "float[B,T,8] x", "float[B,8,6,6] x"
HEADS = "float[2,2,5,8] q, float[2,2,3,8] k, float[2,2,3,8] v, float[2,2,3,8] k2, float[2,2,3,8] v2, float[2,2,5,8] q2"
QKV = "h = MatMul(x, w24) g = Relu(h) q, k, v = Split<axis=2>(g, thirds) vt = Transpose<perm=[0,2,1]>(v) "
SCORES = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) k2t = Transpose<perm=[0,1,3,2]>(k2) s2 = MatMul(q, k2t) "
JOINED = SCORES + "j = Concat<axis=-1>(s, s2) p = Softmax<axis=-1>(j) p1, p2 = Split<axis=-1>(p, sizes) "
WEIGHTS = {
    "w1": (8, 1),
    "w24": (8, 24),
    "bins": (3, 1),
    "w12": (8, 12),
    "c1": (1, 8, 1, 1),
    "c4": (4, 8, 1, 1),
    "mix": (2, 2, 1, 1),
    "mix3": (2, 2, 3, 3),
    "heads": (2,),
    "mixture": (4, 8),
}


def block(body: str, inputs: str) -> Block:
    rng = np.random.default_rng(0)
    numbers = {name: rng.standard_normal(shape) for name, shape in WEIGHTS.items() if name in body}
    texts = [
        f"float[{','.join(map(str, each.shape))}] {name} = {{{','.join(f'{number:.3f}' for number in each.ravel())}}}"
        for name, each in numbers.items()
    ]
    initializers = f"<{', '.join(texts)}>" if texts else ""
    proto = parse(
        CONSTANTS + body,
        inputs=inputs,
        outputs="float[K,L,M] y" if inputs != HEADS else "float[2,2,5,8] y",
        initializers=initializers,
    )
    return fused(proto)[1].blocks[0]


MADE_BY_LAYERS = {
    "pooling": ("s = MatMul(x, w1) p = Softmax<axis=1>(s) t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, x)", TOKENS),
    "pooling of a tanh": (
        "h = MatMul(x, w12) a = Tanh(h) p = Softmax<axis=1>(a) t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, x)",
        TOKENS,
    ),
    "pooling, a global context": (
        "s = Conv(x, c1) r = Reshape(s, one) p = Softmax<axis=2>(r) t = Transpose<perm=[0,2,1]>(p) "
        "f = Reshape(x, features) y = MatMul(f, t)",
        PICTURE,
    ),
    "pooling, a lambda network": (
        "k = Conv(x, c4) m = BatchNormalization(k, b, b, b, b) r = Reshape(m, rows) p = Softmax<axis=2>(r) "
        "f = Reshape(x, features) t = Transpose<perm=[0,2,1]>(f) y = MatMul(p, t)",
        PICTURE + ", float[4] b",
    ),
    "linear attention of keys": (
        QKV + "p = Softmax<axis=1>(k) c = MatMul(vt, p) t = Transpose<perm=[0,2,1]>(c) y = MatMul(q, t)",
        TOKENS,
    ),
    "linear attention of queries": (
        QKV + "p = Softmax<axis=2>(q) c = MatMul(vt, k) t = Transpose<perm=[0,2,1]>(c) y = MatMul(p, t)",
        TOKENS,
    ),
    "the mean of weights": (
        "h = MatMul(x, w12) r = Reshape(h, apart) p = Softmax<axis=2>(r) y = MatMul(p, bins)",
        TOKENS,
    ),
    "a learned mixture": ("a = Softmax<axis=1>(mixture) y = MatMul(a, x)", "float[2,8,T] x"),
}


@pytest.mark.parametrize("form", MADE_BY_LAYERS)
def test_what_layers_make_is_no_attention(form: str) -> None:
    body, inputs = MADE_BY_LAYERS[form]
    shapes = "one = Constant<value=int64[3] {0,1,-1}>() apart = Constant<value=int64[3] {-1,4,3}>() "
    found = block(shapes + body, inputs)
    assert (found.status, found.hint) == ("not_attention", None), found
    assert found.reason is not None and found.reason.startswith(form.partition(" of ")[0].partition(", a ")[0])


SUMMED = "h = MatMul(x, w24) q, k, v = Split<axis=2>(h, thirds) qu = Unsqueeze(q, two) ku = Unsqueeze(k, one) "


def test_a_product_of_query_and_key_beside_a_layer_stays_one() -> None:
    """Its bias is a layer's, and its product is written as a sum."""
    body = (
        "one = Constant<value=int64[1] {1}>() two = Constant<value=int64[1] {2}>() "
        "three = Constant<value=int64[1] {3}>() "
        + SUMMED
        + "m = Mul(qu, ku) s = ReduceSum<keepdims=0>(m, three) c = MatMul(x, w1) sh = Shape(s) "
        "b = Expand(c, sh) a = Add(s, b) p = Softmax<axis=-1>(a) y = MatMul(p, v)"
    )
    assert block(body, TOKENS).status == "declined"


PARTS = "a = MatMul(p1, v) b = MatMul(p2, v2) y = Add(a, b)"
PLAIN = SCORES + "p = Softmax<axis=-1>(s) "
NAMED = {
    "talking heads, before": (
        SCORES + "m = Conv(s, mix) p = Softmax<axis=-1>(m) y = MatMul(p, v)",
        "talking heads",
        None,
    ),
    "talking heads, behind": (PLAIN + "m = Conv(p, mix) y = MatMul(m, v)", "talking heads", None),
    "talking heads, normalised": (
        PLAIN + "m = Conv(p, mix) n = BatchNormalization(m, heads, heads, heads, heads) y = MatMul(n, v)",
        "talking heads",
        None,
    ),
    "neighbours": (PLAIN + "m = Conv<pads=[1,1,1,1]>(p, mix3) y = MatMul(m, v)", "neighbouring", None),
    "keys in parts": (JOINED + PARTS.replace("Add", "Mul"), "keys in parts", PARTS_ADVICE),
    "keys in parts with queries of their own": (
        JOINED.replace("(q, k2t)", "(q2, k2t)") + "vv = Concat<axis=2>(v, v2) y = MatMul(p, vv)",
        "a query of its own",
        None,
    ),
    "keys in parts of few rows": (JOINED + PARTS, "for each 5 rows", None),
    "keys in parts of one product": (
        PLAIN + "p1 = Slice(p, i0, last, last) p2 = Slice(p, last, i6, last) v1 = Slice(v, i0, last, two) "
        "v3 = Slice(v, last, i6, two) a = MatMul(p1, v1) b = MatMul(p2, v3) y = Add(a, b)",
        "for each 5 rows",
        None,
    ),
    "a difference": (
        PLAIN + "p2 = Softmax<axis=-1>(s2) d = Sub(p, p2) r = Relu(d) a = MatMul(d, v) b = MatMul(r, v) y = Add(a, b)",
        "differential attention",
        DIFFERENCE_ADVICE,
    ),
}


@pytest.mark.parametrize(("body", "word", "hint"), NAMED.values(), ids=NAMED)
def test_attention_that_cannot_be_fused_is_named(body: str, word: str, hint: str | None) -> None:
    found = block("two = Constant<value=int64[1] {2}>() " + body, HEADS)
    assert (found.status, found.hint) == ("declined", hint), found
    assert found.reason is not None and word in found.reason
