"""Linear attention of one token becomes FlashLinearAttention in any spelling; what differs in one place is left."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from tests.passes.running import assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

TOLERANCE = 1e-5
"""float32 sums of a few products, in another order."""
INPUTS = (
    "float[3,2,4] q, float[3,2,4] k, float[3,2,5] v, float[3,2] g, float[3,2,4] gk, float[3,2] b, float[3,2,4] k2, "
    "float[3,2,5] gv, float[3,2,4,5] s0"
)
AXES = (
    "ax2 = Constant<value_ints=[2]>() ax3 = Constant<value_ints=[3]>() ax23 = Constant<value_ints=[2,3]>() "
    "scale = Constant<value_float=0.5>() "
)
DECAYS = {
    "none": "d = Identity(s0) ",
    "head": "e = Exp(g) eu = Unsqueeze(e, ax23) d = Mul(s0, eu) ",
    "key dimension": "e = Exp(gk) eu = Unsqueeze(e, ax3) d = Mul(eu, s0) ",
}
MEMORY = {
    "Mul and ReduceSum": "ku = Unsqueeze(k, ax3) km = Mul(d, ku) m = ReduceSum<keepdims=0>(km, ax2) ",
    "MatMul": "kr = Unsqueeze(k, ax2) mm = MatMul(kr, d) m = Squeeze(mm, ax2) ",
    "Einsum": 'm = Einsum<equation="bhk,bhkv->bhv">(k, d) ',
}
WRITE = {
    "Mul and ReduceSum": "kw = Unsqueeze(k, ax3) cu = Unsqueeze(c, ax2) w = Mul(cu, kw) ",
    "MatMul": "kw = Unsqueeze(k, ax3) cu = Unsqueeze(c, ax2) w = MatMul(kw, cu) ",
    "Einsum": 'w = Einsum<equation="bhk,bhv->bhkv">(k, c) ',
}
READ = {
    "Mul and ReduceSum": "qu = Unsqueeze(q, ax3) qs = Mul(s, qu) r = ReduceSum<keepdims=0>(qs, ax2) ",
    "MatMul": "qr = Unsqueeze(q, ax2) qm = MatMul(qr, s) r = Squeeze(qm, ax2) ",
    "Einsum": 'r = Einsum<equation="bhk,bhkv->bhv">(q, s) ',
}
CORRECTIONS = {
    "plain": "c = Identity(v) ",
    "delta": "{memory}c0 = Sub(v, m) bu = Unsqueeze(b, ax2) c = Mul(bu, c0) ",
}
RULES = {
    ("plain", "none"): "linear",
    ("plain", "head"): "gated",
    ("plain", "key dimension"): "gated",
    ("delta", "none"): "delta",
    ("delta", "head"): "gated_delta",
    ("delta", "key dimension"): "gated_delta",
}
STEP = "{decay}{correction}{write}s = Add(d, w) {read}y = Mul(r, scale) "


def step(decay: str, correction: str, spelling: str, template: str = STEP) -> onnx.ModelProto:
    """A step with a state."""
    corrected = CORRECTIONS.get(correction, correction).format(memory=MEMORY[spelling])
    body = template.format(
        decay=DECAYS.get(decay, decay), correction=corrected, write=WRITE[spelling], read=READ[spelling]
    )
    return parse(AXES + body, inputs=INPUTS, outputs="float[3,2,5] y, float[3,2,4,5] s", opset=18)


def compared(model: onnx.ModelProto, tokens: Mapping[str, np.ndarray] | None = None) -> str | None:
    """The rule of the only linear attention of a model whose numbers were compared."""
    result, report = fused(model)
    feeds = random_feeds(model, **(tokens or {}))
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, TOLERANCE)
    (block,) = [each for each in report.blocks if each.status == "fused"]
    assert block.op == "FlashLinearAttention"
    return block.rule


@pytest.mark.parametrize("spelling", MEMORY)
@pytest.mark.parametrize("correction, decay", RULES)
def test_a_step(correction: str, decay: str, spelling: str) -> None:
    gate = "" if decay == "none" else f", a decay for each {decay}"
    assert compared(step(decay, correction, spelling)) == f"rule: {RULES[correction, decay]}{gate}"


def test_a_transposed_state() -> None:
    body = (
        "e = Exp(g) eu = Unsqueeze(e, ax23) d = Mul(s0, eu) kr = Unsqueeze(k, ax2) vu = Unsqueeze(v, ax3) "
        "w = Mul(vu, kr) s = Add(w, d) qr = Unsqueeze(q, ax2) qs = Mul(s, qr) y = ReduceSum<keepdims=0>(qs, ax3)"
    )
    inputs = INPUTS.replace("[3,2,4,5] s0", "[3,2,5,4] s0")
    model = parse(AXES + body, inputs=inputs, outputs="float[3,2,5] y, float[3,2,5,4] s", opset=18)
    assert compared(model) == "rule: gated, a decay for each head"


GUARDED = STEP.replace("y = ", "y0 = ") + "n = IsNaN(y0) zero = Constant<value_float=0.0>() y = Where(n, zero, y0) "


def test_an_output_that_is_chosen() -> None:
    """A guard, and the mask of padded tokens, stay behind the operator."""
    value = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(np.float32)
    value[1, 0, 2] = np.nan
    assert compared(step("head", "plain", "MatMul", GUARDED), {"v": value}) == "rule: gated, a decay for each head"


AFTER = "{correction}{write}s1 = Add(s0, w) e = Exp(g) eu = Unsqueeze(e, ax23) s = Mul(s1, eu) {read}y = Mul(r, scale) "
NEAR = {
    "the memory is added": step("head", "{memory}c0 = Add(v, m) bu = Unsqueeze(b, ax2) c = Mul(bu, c0) ", "MatMul"),
    "beta on the memory only": step("head", "{memory}bu = Unsqueeze(b, ax2) mb = Mul(m, bu) c = Sub(v, mb) ", "MatMul"),
    "the memory of another key": step(
        "head",
        "kr = Unsqueeze(k2, ax2) mm = MatMul(kr, d) m = Squeeze(mm, ax2) c0 = Sub(v, m) bu = Unsqueeze(b, ax2) "
        "c = Mul(bu, c0) ",
        "MatMul",
    ),
    "the memory before the decay": step(
        "head",
        'm = Einsum<equation="bhk,bhkv->bhv">(k, s0) c0 = Sub(v, m) bu = Unsqueeze(b, ax2) c = Mul(bu, c0) ',
        "Einsum",
    ),
    "the correction after the write": step(
        "head",
        "c = Identity(v) ",
        "Einsum",
        '{decay}{correction}{write}s1 = Add(d, w) m = Einsum<equation="bhk,bhkv->bhv">(k, s1) '
        'w2 = Einsum<equation="bhk,bhv->bhkv">(k, m) s = Sub(s1, w2) {read}y = Mul(r, scale) ',
    ),
    "read before the write": step(
        "head", "delta", "Einsum", STEP.replace("{read}", 'r = Einsum<equation="bhk,bhkv->bhv">(q, d) ')
    ),
    "read before the decay": step(
        "head", "delta", "Einsum", STEP.replace("{read}", 'r = Einsum<equation="bhk,bhkv->bhv">(q, s0) ')
    ),
    "a bonus for the token": step(
        "head",
        "plain",
        "Einsum",
        STEP.replace("{read}", 'sb = Add(s, w) r = Einsum<equation="bhk,bhkv->bhv">(q, sb) '),
    ),
    "a decay for each value": step("e = Exp(gv) eu = Unsqueeze(e, ax2) d = Mul(s0, eu) ", "delta", "MatMul"),
    "the decay after the write": step(
        "none", "delta", "MatMul", AFTER.replace("{correction}", "d = Identity(s0) {correction}")
    ),
    "a decay of the first head only": step(
        "one = Constant<value_float=1.0>() h0 = Constant<value=bool[1,2] {1,0}>() e0 = Exp(g) e = Where(h0, e0, one) "
        "eu = Unsqueeze(e, ax23) d1 = Mul(s0, eu) d = Add(d1, d1) ",
        "plain",
        "MatMul",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_step(name: str) -> None:
    """A fusion that leaves a part of it outside, and gives the same numbers, is none of the whole step."""
    result, report = fused(NEAR[name])
    feeds = random_feeds(NEAR[name])
    for got, wanted in zip(run(result, feeds), run(NEAR[name], feeds), strict=True):
        assert_same(got, wanted, TOLERANCE)
    assert not any(block.rule == "rule: gated_delta, a decay for each head" for block in report.blocks)
