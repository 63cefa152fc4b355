"""Batches of open size that are one dimension with something else: 1 in some run, they are not taken apart."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import assert_same, fused, parse, random_feeds, run

FLAT = """
    d0 = Shape<start=0, end=1>(x) d1 = Shape<start=1, end=2>(x)
    flat = Constant<value=int64[2] {-1, 16}>() heads = Constant<value=int64[2] {2, 8}>()
    width = Constant<value=int64[1] {16}>() one = Constant<value=int64[1] {1}>() long = Constant<value=int64[1] {-1}>()
    c = Constant<value=float {0.35}>() low = Constant<value=float {-inf}>()
    x2 = Reshape(x, flat) x3 = MatMul(x2, w) {scaled} to = Concat<axis=0>(d0, d1, width) x5 = Reshape(x4, to)
    apart = Concat<axis=0>(d0, d1, heads) x6 = Reshape(x5, apart)
    k = Transpose<perm=[0, 2, 3, 1]>(x6) v = Transpose<perm=[0, 2, 1, 3]>(x6)
    s0 = MatMul(q, k) s = Mul(s0, c) {mask}
    p = Softmax<axis=-1>(t) y = MatMul(p, v)
"""
PLAIN = "t = Identity(s)"
MASK = """
    e0 = Shape<start=0, end=1>(m) e1 = Shape<start=1, end=2>(m) m1 = Reshape(m, long) m2 = Not(m1)
    ms = Concat<axis=0>(e0, one, one, e1) m3 = Reshape(m2, ms) t = Where(m3, s, low)
"""


def flat(query: str, keys: str, scaled: str = "x4 = Identity(x3)", mask: str = PLAIN) -> onnx.ModelProto:
    """Keys that come out of a product in which batch and tokens are one dimension."""
    more = "bool[M,U] m" if mask == MASK else ""
    inputs = f"float[{query},2,S,8] q, float[{keys},T,16] x, float[16,16] w"
    body = FLAT.replace("{scaled}", scaled).replace("{mask}", mask)
    return parse(body, more, inputs=inputs, outputs="float[E,2,S,8] y")


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 2), (2, 1, 1), (1, 3, 3), (4, 1, 4), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("mask", [PLAIN, MASK], ids=["plain", "mask"])
@pytest.mark.parametrize("query", ["2", "B"])
def test_a_batch_of_one_that_was_folded_with_its_tokens(query: str, mask: str, sizes: tuple[int, int, int]) -> None:
    """What is folded is not taken apart by a batch that it may not have: 4 keys of one batch are not 2 of two."""
    batch, keys, masks = sizes
    if query == "2" and batch != 2:
        return
    proto = flat(query, "C", mask=mask)
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    feeds = random_feeds(proto, q=normal(batch, 2, 3, 8), x=normal(keys, 4, 16))
    if mask == MASK:
        feeds["m"] = np.random.default_rng(1).random((masks, 4)) < 0.3
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_a_scaled_folded_operand_is_taken_apart_only_where_its_batch_is_proven() -> None:
    """Behind a factor the operand is read from before it, where its batch is folded."""
    scaled = "x4 = Mul(x3, c)"
    assert [block.code for block in fused(flat("B", "C", scaled))[1].blocks] == ["shape"]
    proto = flat("B", "B", scaled)
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    feeds = random_feeds(proto, q=normal(2, 2, 3, 8), x=normal(2, 4, 16))
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_batches_whose_product_no_tensor_has() -> None:
    """Two batches of 2^32, which the checker takes, cannot be one dimension."""
    sizes = "4294967296,4294967296,2"
    inputs = f"float[{sizes},3,4] q, float[{sizes},4,5] k, float[{sizes},5,4] v"
    body = "s = MatMul(q, k) p = Softmax<axis=-1>(s) y = MatMul(p, v)"
    (block,) = fused(parse(body, inputs=inputs, outputs=f"float[{sizes},3,4] y"))[1].blocks
    assert (block.status, block.code) == ("declined", "shape")
