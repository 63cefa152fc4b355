"""One distribution over several values (LiLT): one attention with joined values, where their sizes agree."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.passes import Report
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from tests.examples import examples
from tests.passes.running import PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

INPUTS = (
    "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[B,4,S,4] lq, float[B,4,T,4] lk, float[B,4,T,4] w, "
    "float[B,1,1,T] m"
)
OUTPUTS = "float[B,4,S,8] y, float[B,4,S,4] z"
TWO = "c = Constant<value=float {0.5}>() lkt = Transpose<perm=[0,1,3,2]>(lk) l0 = MatMul(lq, lkt) l = Mul(l0, c) "
SUMS = PRODUCT_QK + TWO + "a = Add(s, l) b = Add(l, s) am = Add(a, m) bm = Add(m, b) "
PRODUCTS = "y = MatMul(p, v) z = MatMul(r, w) "
LILT = SUMS + "p = Softmax<axis=-1>(am) r = Softmax<axis=-1>(bm) " + PRODUCTS
ONE = PRODUCT_QK + "p = Softmax<axis=-1>(s) y = MatMul(p, v) z = MatMul(p, w) "
JOINED = {
    "sums in another order": (LILT, 2),
    "numbers of their own": (
        LILT.replace("b = Add(l, s)", "c2 = Constant<value=float {0.5}>() l2 = Mul(c2, l0) b = Add(l2, s)"),
        2,
    ),
    "one softmax": (ONE, 1),
    "one cast": (ONE.replace("(s) ", "(s) r = Cast<to=1>(p) ").replace("MatMul(p", "MatMul(r"), 1),
    "two casts each": (
        ONE.replace("(s) ", "(s) c = Cast<to=1>(p) d = Cast<to=1>(p) r = Cast<to=1>(c) t = Cast<to=1>(d) ")
        .replace("MatMul(p, v)", "MatMul(r, v)")
        .replace("MatMul(p, w)", "MatMul(t, w)"),
        1,
    ),
    "one softmax and two": (LILT.replace("z = ", "z0 = ") + "z1 = MatMul(p, w) z = Add(z0, z1) ", 2),
}


def attention(body: str, opset: int = 17) -> onnx.ModelProto:
    return parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=opset)


def same(proto: onnx.ModelProto, **given: Array) -> tuple[list[str], Report]:
    """Compare before and after. Returns the operators after it, and the report."""
    result, report = fused(proto)
    feeds = random_feeds(proto, **given)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return [node.op_type for node in result.graph.node], report


@pytest.mark.parametrize(("body", "softmaxes"), JOINED.values(), ids=JOINED)
def test_values_are_joined(body: str, softmaxes: int) -> None:
    """The report has a line for every softmax of the model."""
    values = np.random.default_rng(0).standard_normal((2, 4, 6, 8)).astype(np.float32)
    values[0, 1, 2, 3], values[1, 1, 1, 1] = np.inf, np.nan
    ops, report = same(attention(body), v=values)
    assert ops.count("FlashAttentionScore") == 1 and not {"MatMul", "Softmax"} & set(ops)
    assert [block.status for block in report.blocks] == ["fused"] * softmaxes
    assert len({block.anchor for block in report.blocks}) == softmaxes


def test_opset_11() -> None:
    """Split has its sizes as an attribute."""
    assert same(attention(ONE, opset=11))[0].count("FlashAttentionScore") == 1


APART = {
    "a batch of its own": ONE.replace("w)", "w2)").replace("z = ", ""
    "w2 = ReduceMax<axes=[0]>(w) z = "),
    "other types": ONE.replace("(s) ", "(s) c = Cast<to=1>(p) d = Cast<to=10>(p) r = Cast<to=1>(d) ")
    .replace("MatMul(p, v)", "MatMul(c, v)")
    .replace("MatMul(p, w)", "MatMul(r, w)"),
    "another mask": LILT.replace("bm = Add(m, b)", "m2 = Neg(m) bm = Add(m2, b)"),
    "another number": LILT.replace(
        "b = Add(l, s)", "c2 = Constant<value=float {0.25}>() l2 = Mul(c2, l0) b = Add(l2, s)"
    ),
    "a difference in another order": LILT.replace("a = Add(s, l)", "a = Sub(s, l)").replace("Add(l, s)", "Sub(l, s)"),
}  # fmt: skip


@pytest.mark.parametrize("body", APART.values(), ids=APART)
def test_what_is_not_joined(body: str) -> None:
    assert same(attention(body))[0].count("FlashAttentionScore") != 1


def test_values_that_are_too_large_together() -> None:
    inputs = INPUTS.replace("T,8] v", "T,512] v").replace("T,4] w", "T,512] w")
    proto = parse(ONE, inputs=inputs, outputs=OUTPUTS.replace("8]", "512]").replace("4] z", "512] z"))
    assert same(proto)[0].count("FlashAttentionScore") == 2


@pytest.mark.parametrize("more", ["n = Neg(p) ", "n = Shape(p) "])
def test_probabilities_that_are_read_elsewhere(more: str) -> None:
    kind = "float[B,4,S,T]" if "Neg" in more else "int64[4]"
    proto = parse(ONE + more, inputs=INPUTS, outputs=f"{OUTPUTS}, {kind} n")
    assert same(proto)[0].count("FlashAttentionScore") != 1


def test_what_the_target_refuses_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both softmaxes are back, and each has its reason."""

    def refuse(self: Rewriter, match: AttentionMatch) -> Fused:
        raise Decline(Code.ILLEGAL, "refused for the test", match.anchor.node)

    monkeypatch.setattr(Rewriter, "emit", refuse)
    proto = attention(LILT)
    ops, report = same(proto)
    assert sorted(ops) == sorted(node.op_type for node in proto.graph.node)
    assert [(block.anchor, block.status) for block in report.blocks] == [("p", "declined"), ("r", "declined")]
    assert len({block.reason for block in report.blocks}) == 1


@settings(max_examples=examples(6))
@given(seed=st.integers(0, 2**32 - 1), steep=st.sampled_from([0.1, 1.0, 10.0]))
def test_lilt_in_float64(seed: int, steep: float) -> None:
    proto = attention(LILT)
    result, _ = fused(proto)
    feeds = random_feeds(proto, seed)
    feeds["q"] *= np.float32(steep)
    q, k, v, lq, lk, w, m = (feeds[name].astype(np.float64) for name in ("q", "k", "v", "lq", "lk", "w", "m"))
    scores = q @ k.swapaxes(-1, -2) + 0.5 * lq @ lk.swapaxes(-1, -2) + m
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for got, values in zip(run(result, feeds), (v, w), strict=True):
        assert_same(got, weights @ values, 1e-5)


def test_products_in_a_branch_stay() -> None:
    """Both products stand in the branches of an If, the softmax before it."""
    body = PRODUCT_QK + "p = Softmax<axis=-1>(s) yes = Constant<value=bool {1}>() "
    branch = "g () => (float[B,4,S,8] {0}) {{ {0}a = MatMul(p, v) {0}b = MatMul(p, v) {0} = Add({0}a, {0}b) }}"
    body += f"y = If(yes) <then_branch = {branch.format('t')}, else_branch = {branch.format('e')}> z = Identity(lq) "
    _, report = same(attention(body))
    assert report.count("fused") == 0
