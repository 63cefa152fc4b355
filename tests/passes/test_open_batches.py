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
