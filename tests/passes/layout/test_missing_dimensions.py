"""Queries whose one row is no dimension, values of one number for each key, keys whose batch the query lacks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import assert_same, fused, parse, random_feeds, run

SIZES = ((2, 3, 6), (1, 1, 1), (3, 1, 5), (1, 4, 70))
"""B, N and T."""
POOLED = "last = Constant<value=int64[1] {1}>() row = Unsqueeze(p, last) y = MatMul(row, k)"
KEYS = "float[B,T,8] k, float[8] w"


def same(body: str, inputs: str, output: str, more: str = "") -> Block:
    """The block of the model, which gives the same at all sizes."""
    proto = parse(body, more, inputs=inputs, outputs=f"float[{output}] y")
    result, report = fused(proto)
    for batch, rows, keys in SIZES:
        feeds = random_feeds(proto, **_feeds(proto, {"B": batch, "N": rows, "T": keys}))
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    (block,) = report.blocks
    return block


def _feeds(proto: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
        boolean = tensor.elem_type == onnx.TensorProto.BOOL
        feeds[value.name] = rng.random(shape) < 0.6 if boolean else rng.standard_normal(shape).astype(np.float32)
    return feeds


def einsum(scores: str, result: str, between: str = "x = Identity(s)") -> str:
    return (
        f's = Einsum<equation="{scores}">(q, k) {between} p = Softmax<axis=-1>(x) y = Einsum<equation="{result}">(p, v)'
    )


@pytest.mark.parametrize(
    ("body", "inputs", "output"),
    [
        (f"s = MatMul(k, w) p = Softmax<axis=-1>(s) {POOLED}", KEYS, "B,1,8"),
        (f"kt = Transpose<perm=[0,2,1]>(k) s = MatMul(w, kt) p = Softmax<axis=-1>(s) {POOLED}", KEYS, "B,1,8"),
        ("s = MatMul(k, w) p = Softmax<axis=-1>(s) y = MatMul(p, k)", "float[T,8] k, float[8] w", "8"),
        (einsum("bd,bsd->bs", "bs,bsd->bd"), "float[B,8] q, float[B,T,8] k, float[B,T,8] v", "B,8"),
        (einsum("bhd,bshd->bhs", "bhs,bshd->bhd"), "float[B,4,8] q, float[B,T,4,8] k, float[B,T,4,8] v", "B,4,8"),
        (
            einsum("bhgd,bshd->bhgs", "bhgs,bshd->bhgd"),
            "float[B,2,3,8] q, float[B,T,2,8] k, float[B,T,2,1] v",
            "B,2,3,1",
        ),
        (einsum("hd,bshd->bhs", "bhs,bshd->bhd"), "float[4,8] q, float[B,T,4,8] k, float[B,T,4,8] v", "B,4,8"),
        (einsum("nd,bsd->bns", "bns,bsd->bnd"), "float[N,8] q, float[B,T,8] k, float[B,T,8] v", "B,N,8"),
        (einsum("bnd,bhsd->bhns", "bhns,bsd->bhnd"), "float[B,N,8] q, float[B,4,T,8] k, float[B,T,8] v", "B,4,N,8"),
        (einsum("bhqd,bhkd->bhqk", "bhqk,bk->bhq"), "float[B,4,N,8] q, float[B,4,T,8] k, float[B,T] v", "B,4,N"),
    ],
)
def test_a_dimension_that_is_not_there(body: str, inputs: str, output: str) -> None:
    assert same(body, inputs, output).status == "fused"


@pytest.mark.parametrize("fill", ["-inf", "-1e9", "-3.4028235e38"])
def test_masks_on_the_scores_of_one_row(fill: str) -> None:
    mask = f"f = Constant<value=float {{{fill}}}>() x = Where(m, s, f)"
    body = einsum("bhd,bshd->bhs", "bhs,bshd->bhd", mask)
    inputs = "float[B,4,8] q, float[B,T,4,8] k, float[B,T,4,8] v"
    assert same(body, inputs, "B,4,8", "bool[B,1,T] m").status == "fused"


def test_a_softmax_over_the_batch_of_the_keys() -> None:
    block = same(f"s = MatMul(k, w) p = Softmax<axis=0>(s) {POOLED}", KEYS, "B,1,8")
    assert block.code == "no_value_matmul"


LAYER = "w = Constant<value=float[8,2] {{1,2,3,4,5,6,7,8,8,7,6,5,4,3,2,1}}>() {}s = MatMul(k, {}) "
POOLS = "t = Transpose<perm=[0,2,1]>(s) p = Softmax<axis=-1>(t) y = MatMul(p, k)"


@pytest.mark.parametrize("weights", ["", "w2 = Identity(w) "])
def test_a_linear_layer_is_no_query(weights: str) -> None:
    """As in linear attention, whose keys go through a softmax over the tokens."""
    body = LAYER.format(weights, "w2" if weights else "w") + POOLS
    block = same(body, "float[B,T,8] k", "B,2,8")
    assert (block.status, block.code) == ("not_attention", "not_attention")


@pytest.mark.parametrize(
    "product", ["t = Transpose<perm=[0,2,1]>(k) s = MatMul(w, t)", 's = Einsum<equation="nd,btd->bnt">(w, k)']
)
def test_learned_queries(product: str) -> None:
    """As in PatchMerger: a constant in front of the keys, of two dimensions."""
    queries = "w = Constant<value=float[2,8] {1,2,3,4,5,6,7,8,8,7,6,5,4,3,2,1}>() "
    body = f"{queries}{product} p = Softmax<axis=-1>(s) y = MatMul(p, k)"
    assert same(body, "float[B,T,8] k", "B,2,8").status == "fused"


BEHIND = {
    "a matrix of each head": "s = MatMul(k, w) t = Transpose<perm=[0,1,3,2]>(s) p = Softmax<axis=-1>(t) "
    "y = MatMul(p, v)",
    "over the rows": "s = MatMul(k, w) p = Softmax<axis=-2>(s) t = Transpose<perm=[0,1,3,2]>(p) y = MatMul(t, v)",
    "Einsum": 's = Einsum<equation="bhtd,hdm->bhmt">(k, w) p = Softmax<axis=-1>(s) y = MatMul(p, v)',
}


@pytest.mark.parametrize("body", BEHIND.values(), ids=BEHIND)
def test_learned_queries_behind_the_keys(body: str) -> None:
    """A constant with a matrix for each head is no linear layer, which has one for all."""
    numbers = ",".join(str(number % 7) for number in range(64))
    queries = f"w = Constant<value=float[4,8,2] {{{numbers}}}>() "
    assert same(queries + body, "float[B,4,T,8] k, float[B,4,T,8] v", "B,4,2,8").status == "fused"


def test_talking_heads_are_attention() -> None:
    """A linear layer over the heads of scores."""
    square = "w = Constant<value=float[4,4] {1,2,3,4,5,6,7,8,8,7,6,5,4,3,2,1}>() "
    body = (
        "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) " + square + "t = Transpose<perm=[0,2,3,1]>(s) "
        "u = MatMul(t, w) x = Transpose<perm=[0,3,1,2]>(u) p = Softmax<axis=-1>(x) y = MatMul(p, v)"
    )
    block = same(body, "float[B,4,N,8] q, float[B,4,T,8] k, float[B,4,T,8] v", "B,4,N,8")
    assert (block.status, block.code, block.culprit) == ("declined", "score_term", "u")


@pytest.mark.parametrize("taken", ["ReduceMean<axes=[1], keepdims=0>(p)", "Gather<axis=1>(p, i)"])
def test_some_or_the_mean_of_the_heads_are_attention(taken: str) -> None:
    body = (
        "i = Constant<value=int64 {1}>() kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) "
        f"x = {taken} y = MatMul(x, v)"
    )
    block = same(body, "float[B,4,N,8] q, float[B,4,T,8] k, float[B,T,8] v", "B,N,8")
    assert (block.status, block.code, block.culprit) == ("declined", "probability_term", "x")
