"""Attention without a softmax is named, with a status of its own, and nothing else is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Code, Report
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, feeds_of, fused, parse, run

WEIGHTS = {"w": (16, 48), "w8": (16, 8), "o": (16, 16), "c": (48, 16, 1), "rot": (16, 9)}
CONSTANTS = (
    "thirds = Constant<value=int64[3] {16,16,16}>() heads = Constant<value=int64[4] {0,-1,2,8}>() "
    "one = Constant<value_float=1.0>() zero = Constant<value_float=0.0>() last = Constant<value_ints=[-1]>() "
    "i1 = Constant<value_ints=[1]>() i2 = Constant<value_ints=[2]>() i3 = Constant<value_ints=[3]>() "
)
PROJECTED = (
    "h = MatMul(x, w) q0, k0, v0 = Split<axis=2>(h, thirds) q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) "
    "v1 = Reshape(v0, heads) q2 = Transpose<perm=[0,2,1,3]>(q1) k2 = Transpose<perm=[0,2,1,3]>(k1) "
    "v = Transpose<perm=[0,2,1,3]>(v1) "
)
POSITIVE = "qe = Elu(q2) q = Add(qe, one) ke = Relu(k2) k = Add(ke, one) "
TRANSPOSED = "kt = Transpose<perm=[0,1,3,2]>(k) "
STATE = "s = MatMul(kt, v) "
NORM = "z0 = ReduceSum<keepdims=0>(k, i2) z = Unsqueeze(z0, last) n = MatMul(q, z) "
FOUND = {
    "a sum for all rows": PROJECTED + POSITIVE + TRANSPOSED + STATE + "y = MatMul(q, s)",
    "divided by its norm": PROJECTED + POSITIVE + TRANSPOSED + STATE + NORM + "a = MatMul(q, s) y = Div(a, n)",
    "scaled in between": PROJECTED + POSITIVE + TRANSPOSED + STATE + "m = Mul(s, one) y = MatMul(q, m)",
    "by Einsum": PROJECTED
    + POSITIVE
    + 's = Einsum<equation="bhtd,bhte->bhde">(k, v) y = Einsum<equation="bhtd,bhde->bhte">(q, s)',
    "transposed, as of channels first": "h = Conv(x, c) q0, k0, v = Split<axis=1>(h, thirds) q = Relu(q0) k = Relu(k0) "
    "kt = Transpose<perm=[0,2,1]>(k) s = MatMul(v, kt) y = MatMul(s, q)",
    "weights for each row": PROJECTED + POSITIVE + TRANSPOSED + "s = MatMul(q, kt) y = MatMul(s, v)",
    "weights with a decay": PROJECTED + POSITIVE + TRANSPOSED + "s = MatMul(q, kt) m = Mul(s, d) y = MatMul(m, v)",
    "weights with zeros": PROJECTED
    + POSITIVE
    + TRANSPOSED
    + "s = MatMul(q, kt) m = Trilu<upper=0>(s) y = MatMul(m, v)",
    "a running sum": PROJECTED
    + "ku = Unsqueeze(k2, last) i3b = Constant<value_ints=[3]>() vu = Unsqueeze(v, i3b) o = Mul(ku, vu) "
    "axis = Constant<value_int=2>() acc = CumSum(o, axis) qu = Unsqueeze(q2, i3b) z = MatMul(qu, acc) "
    "y = Squeeze(z, i3b)",
    "chunks with a state": PROJECTED
    + POSITIVE
    + TRANSPOSED
    + STATE
    + "y0 = MatMul(q, s) m = Mul(s, d1) s1 = Add(m, s) y1 = MatMul(q, s1) p = MatMul(q, kt) r = Mul(p, d) "
    "y2 = MatMul(r, v) a = Add(y0, y1) y = Add(a, y2)",
}


def model(body: str, more: str = "", outputs: str = "") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    used = {name: rng.standard_normal(shape) for name, shape in WEIGHTS.items() if f" {name})" in body}
    texts = [
        f"float[{','.join(map(str, each.shape))}] {name} = {{{','.join(f'{number:.3f}' for number in each.ravel())}}}"
        for name, each in used.items()
    ]
    first = "float[B,16,T] x" if "Conv(x" in body else "float[B,T,16] x"
    inputs = ", ".join([first, *(["float[1,2,T,T] d"] if " d)" in body else []), *([more] if more else [])])
    inputs += ", float[1,2,1,1] d1" if "d1)" in body else ""
    rank = "float[K,L,M] y" if "Conv(x" in body else "float[K,L,M,N] y"
    return parse(
        CONSTANTS + body, inputs=inputs, outputs=rank + outputs, initializers=f"<{', '.join(texts)}>" if texts else ""
    )


def report(body: str, more: str = "", outputs: str = "") -> Report:
    proto = model(body, more, outputs)
    result, found = fused(proto)
    assert len(result.graph.node) == len(proto.graph.node)
    return found


PROVEN = ("a running sum", "weights with zeros")
"""Those that passes/linear proves and fuses."""


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_what_is_proven_is_fused(name: str, tokens: int) -> None:
    proto = model(FOUND[name])
    result, found = fused(proto)
    (block,) = found.blocks
    assert (block.status, block.op, block.rule) == ("fused", "FlashLinearAttention", "rule: linear")
    feeds = {"x": np.random.default_rng(tokens).standard_normal((2, tokens, 16)).astype(np.float32)}
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize("name", sorted(FOUND.keys() - PROVEN))
def test_attention_without_a_softmax_is_named(name: str) -> None:
    found = report(FOUND[name])
    (block,) = found.blocks
    assert (block.status, block.kind, block.code) == ("linear_attention", "no_softmax", Code.LINEAR)
    assert block.hint is not None and "LinearAttention" in block.hint
    assert (found.softmaxes, found.count("linear_attention"), found.advice != []) == (0, 1, True)
    assert ": linear attention: 0 fused (of 1), " in found.summary


STEP = "m = Mul(s0, g) u = MatMul(kc, vr) s1 = Add(m, u) "
OTHER_KEY = (
    "m = Mul(s0, g) qs = Transpose<perm=[0,1,3,2]>(qr) e = Mul(m, qs) r = ReduceSum<keepdims=1>(e, i2) n = Sub(vr, r) "
    "u = MatMul(kc, n) s1 = Add(m, u) y = MatMul(qr, s1)"
)
AFTER_WRITE = (
    "m = Mul({}, g) u = MatMul(kc, vr) w = Add(m, u) qs = Transpose<perm=[0,1,3,2]>(qr) e = Mul(w, qs) "
    "r = ReduceSum<keepdims=1>(e, i2) n = MatMul(kc, r) s1 = Add(w, n) y = MatMul(qr, s1)"
)
STEPS = {
    "a product": STEP + "y = MatMul(qr, s1)",
    "a sum of products": STEP + "qs = Transpose<perm=[0,1,3,2]>(qr) p = Mul(s1, qs) y = ReduceSum<keepdims=1>(p, i2)",
    "two tokens": "a = Mul(s0, g) u = MatMul(kc, vr) b = Add(a, u) y0 = MatMul(qr, b) m = Mul(b, g) s1 = Add(m, u) "
    "y1 = MatMul(qr, s1) y = Add(y0, y1)",
    "the delta rule": "m = Mul(s0, g) e = Mul(m, kc) r = ReduceSum<keepdims=1>(e, i2) n = Sub(vr, r) u = MatMul(kc, n) "
    "s1 = Add(m, u) y = MatMul(qr, s1)",
    "a bent state": "b = Tanh(s0) m = Mul(b, g) u = MatMul(kc, vr) s1 = Add(m, u) y = MatMul(qr, s1)",
    "the memory of another key": OTHER_KEY,
    "a correction after the write": AFTER_WRITE.format("s0"),
    "read before the write": STEP + "y = MatMul(qr, s0)",
    "a bonus": STEP + "b = Mul(u, kc) t = Add(s0, b) y = MatMul(qr, t)",
    "a bonus of the second token": "a = Mul(s0, g) u = MatMul(kc, vr) b = Add(a, u) m = Mul(b, g) u1 = Mul(kc, vr) "
    "s1 = Add(m, u1) p = Mul(u1, kc) t = Add(b, p) y = MatMul(qr, t)",
}
STATES = "float[B,2,8,8] s0, float[B,2,1,1] g, float[B,2,8,1] kc, float[B,2,1,8] vr, float[B,2,1,8] qr"
PROVEN_STEPS = ("a product", "a sum of products", "the delta rule", "a bent state", "the memory of another key")
"""Those that passes/linear proves and fuses."""


@pytest.mark.parametrize("name", sorted(STEPS.keys() - PROVEN_STEPS))
def test_a_state_that_is_updated(name: str) -> None:
    """One token of a decoder; its state is an input and an output."""
    (block,) = report(STEPS[name], STATES, ", float[B,2,8,8] s1").blocks
    assert (block.status, block.culprit) == ("linear_attention", "s1")
    is_before = block.reason is not None and "RWKV-6" in block.reason
    assert is_before == (name.startswith(("read", "a bonus")))
    assert (block.hint is None) == is_before


@pytest.mark.parametrize("name", PROVEN_STEPS)
def test_a_step_with_an_open_batch_is_fused(name: str) -> None:
    """The batch is the only size that is open."""
    proto = model(STEPS[name], STATES, ", float[B,2,8,8] s1")
    result, found = fused(proto)
    (block,) = found.blocks
    assert (block.status, block.op) == ("fused", "FlashLinearAttention")
    for batch in (1, 2, 7):
        feeds = feeds_of(proto, {"B": batch, "T": 16})
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


def test_a_scan_over_tokens() -> None:
    body = (
        "z, ys = Scan<num_scan_inputs=3, body=step (float[2,8,8] s0, float[2,1,8] qr, float[2,8,1] kc, "
        "float[2,1,8] vr) => (float[2,8,8] s1, float[2,1,8] o) "
        "{ u = MatMul(kc, vr) s1 = Add(s0, u) o = MatMul(qr, s1) }>(s, qs, ks, vs) y = Identity(ys)"
    )
    inputs = "float[2,8,8] s, float[T,2,1,8] qs, float[T,2,8,1] ks, float[T,2,1,8] vs"
    (block,) = fused(parse(body, inputs=inputs, outputs="float[T,2,1,8] y"))[1].blocks
    assert (block.status, block.op, block.rule) == ("fused", "FlashLinearAttention", "rule: linear")


def test_operators_of_it_are_named() -> None:
    proto = parse(
        "y = com.microsoft.LinearAttentionGate(x, x, x)",
        inputs="float[B,T,16] x",
        outputs="float[B,T,16] y",
    )
    (block,) = fused(proto)[1].blocks
    assert (block.status, block.hint) == ("linear_attention", None)


OTHERS = {
    "two layers": "h = MatMul(x, o) r = Relu(h) z = MatMul(r, w8) y = Unsqueeze(z, i1)",
    "rotations": "r = MatMul(x, rot) three = Constant<value=int64[4] {0,-1,3,3}>() a = Reshape(r, three) f = Relu(a) "
    "b = MatMul(a, f) y = MatMul(f, b)",
    "values without a layer": "a = Unsqueeze(x, i1) t = Transpose<perm=[0,1,3,2]>(a) s = MatMul(t, a) y = MatMul(a, s)",
    "a gate": PROJECTED + "g = Sigmoid(q2) m = Mul(g, k2) y = Mul(m, v)",
    "scores alone": PROJECTED + "kt = Transpose<perm=[0,1,3,2]>(k2) y = MatMul(q2, kt)",
    "weights behind an activation": PROJECTED
    + "kt = Transpose<perm=[0,1,3,2]>(k2) s = MatMul(q2, kt) r = Relu(s) y = MatMul(r, v)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_what_is_no_linear_attention(body: str) -> None:
    assert not report(body).blocks


def test_attention_with_a_softmax_is_no_linear_attention() -> None:
    """Nor are two of them, where the result of one is a key and value of the next."""
    again = "p1 = Softmax<axis=-1>(s) k3 = MatMul(p1, v) t3 = Transpose<perm=[0,1,3,2]>(k3) s3 = MatMul(q2, t3) "
    first = PROJECTED + "kt = Transpose<perm=[0,1,3,2]>(k2) s = MatMul(q2, kt) "
    proto = model(first + again + "p = Softmax<axis=-1>(s3) y = MatMul(p, k3)")
    assert {block.status for block in fused(proto)[1].blocks} <= {"fused", "declined"}
    plain = parse(PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV)
    assert [block.status for block in fused(plain)[1].blocks] == ["fused"]


NO_STATE = {
    "nobody multiplies it": STEP + "y = Relu(s1)",
    "its squares": STEP + "p = Mul(s1, s1) y = ReduceSum<keepdims=1>(p, i2)",
    "of a layer": "m = Mul(s0, g) u = MatMul(kc, vr) s1 = Add(m, u) rw = Constant<value=float[8,2] "
    "{1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}>() y = MatMul(s1, rw)",
    "not decayed but bent": "b = Tanh(s0) " + AFTER_WRITE.format("b"),
    "read before an update that is no outer product": "m = Mul(s0, g) u = Mul(s0, s0) s1 = Add(m, u) "
    "y = MatMul(qr, s0)",
    "read before an update by weights": "m = Mul(s0, g) cw = Constant<value=float[1,2] {1,2}>() f = MatMul(kc, cw) "
    "z = ReduceSum<keepdims=1>(f, i3) s1 = Add(m, z) y = MatMul(qr, s0)",
}


@pytest.mark.parametrize("body", NO_STATE.values(), ids=NO_STATE)
def test_a_state_of_another_kind(body: str) -> None:
    assert not report(body, STATES, ", float[B,2,8,8] s1").blocks
