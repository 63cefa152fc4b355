"""Gradients of float16: what the scale of a loss keeps from 0, or float32 from infinity, is kept by the operator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes import Code
from tests.passes.gradients import evaluate, fused_pair
from tests.passes.running import parse

FORWARD = """
    kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) x = Mul(s, half) p = Softmax<axis=-1>(x) y = MatMul(p, v)
    vt = Transpose<perm=[0,1,3,2]>(v) pt = Transpose<perm=[0,1,3,2]>(p)
"""
HALF = """
    g = Cast<to=10>(given) dp = MatMul(g, vt) gw = Identity(g)
    t = Mul(dp, p) r = ReduceSum<keepdims=1>(t, last) u = Mul(p, r) ds = Sub(t, u) dx = Mul(ds, half)
    dxt = Transpose<perm=[0,1,3,2]>(dx) dqh = MatMul(dx, k) dkh = MatMul(dxt, q) dvh = MatMul(pt, gw)
    dqf = Cast<to=1>(dqh) dkf = Cast<to=1>(dkh) dvf = Cast<to=1>(dvh)
    dq = Mul(dqf, factor) dk = Mul(dkf, factor) dv = Mul(dvf, factor)
"""
SINGLE = """
    pf = Cast<to=1>(p) ptf = Cast<to=1>(pt) vtf = Cast<to=1>(vt) kf = Cast<to=1>(k) qf = Cast<to=1>(q)
    hf = Cast<to=1>(half) dp = MatMul(given, vtf)
    t = Mul(dp, pf) r = ReduceSum<keepdims=1>(t, last) u = Mul(pf, r) ds = Sub(t, u) dx = Mul(ds, hf)
    dxt = Transpose<perm=[0,1,3,2]>(dx) dq = MatMul(dx, kf) dk = MatMul(dxt, qf) dv = MatMul(ptf, given)
"""
SCALED = HALF.replace("g = Cast<to=10>(given)", "narrow = Cast<to=10>(given) g = Mul(narrow, thousand)")
HALF_SUM = (
    HALF.replace("dk = Mul(dkf, factor)", "dk1 = Mul(dkf, factor) dk = ReduceSum<keepdims=0>(dk1, first)")
    .replace("dv = Mul(dvf, factor)", "dv1 = Mul(dvf, factor) dv = ReduceSum<keepdims=0>(dv1, first)")
)  # fmt: skip
CASES: Mapping[str, tuple[str, float, float, ir.DataType]] = {
    "the scale of the loss undone in float32": (HALF, 1 / 1024, 1e-3, ir.DataType.FLOAT16),
    "a scale below what float16 holds": (HALF, 1e-9, 1.0, ir.DataType.FLOAT16),
    "a factor beyond what float16 holds": (HALF, 1e5, 1.0, ir.DataType.FLOAT16),
    "the scale undone before a sum over the batch": (HALF_SUM, 1e4, 1.0, ir.DataType.FLOAT16),
    "the scale of the loss put on a float16 gradient": (SCALED, 1 / 1024, 1e-6, ir.DataType.FLOAT),
    "large gradients computed in float32": (SINGLE, 1.0, 1e6, ir.DataType.FLOAT),
    "small gradients computed in float32": (SINGLE, 1.0, 1e-8, ir.DataType.FLOAT),
}


@pytest.mark.parametrize(("backward", "factor", "size", "dtype"), CASES.values(), ids=CASES)
def test_range(backward: str, factor: float, size: float, dtype: ir.DataType) -> None:
    """The tolerance is some roundings of float16, each of 2**-11 at most, for the graph's own numbers are no smaller
    than 1e-3."""
    rank = "4,6,8" if "first" in backward else "B,4,6,8"
    original = parse(
        FORWARD + backward,
        inputs="float16[B,4,6,8] q, float16[B,4,6,8] k, float16[B,4,6,8] v, float[B,4,6,8] given",
        outputs=f"float16[B,4,6,8] y, float[B,4,6,8] dq, float[{rank}] dk, float[{rank}] dv",
        initializers=f"<float16 half = {{14336}}, float16 thousand = {{25600}}, float factor = {{{factor:.12f}}}, "
        "int64[1] last = {-1}, int64[1] first = {0}>",
    )
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    node = next(node for node in changed.graph.node if node.op_type == "FlashAttentionScoreGrad")
    types = {info.name: info.type.tensor_type.elem_type for info in (*changed.graph.value_info, *changed.graph.output)}
    assert types[node.output[0]] == dtype
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 4, 6, 8)).astype(np.float16) for name in "qkv"}
    feeds["given"] = (size * rng.standard_normal((2, 4, 6, 8))).astype(np.float32)
    wanted, got = evaluate(original, feeds), evaluate(changed, feeds)
    for name in ("dq", "dk", "dv"):
        largest = np.abs(wanted[name]).max()
        assert 0.0 < largest < np.inf
        np.testing.assert_allclose(got[name], wanted[name], rtol=0.0, atol=4e-3 * largest, err_msg=name)


def test_float64_is_declined() -> None:
    backward = SINGLE.replace("to=1>", "to=11>").replace("given", "wide")
    original = parse(
        FORWARD + "wide = Cast<to=11>(given) " + backward,
        inputs="float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v, double[B,4,6,8] given",
        outputs="float[B,4,6,8] y, double[B,4,6,8] dq, double[B,4,6,8] dk, double[B,4,6,8] dv",
        initializers="<float half = {0.5}, int64[1] last = {-1}>",
    )
    _, report = fused_pair(original)
    assert {block.status for block in report.blocks} == {"declined"}
    assert report.blocks[0].code == Code.DTYPE
