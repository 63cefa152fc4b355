"""Soft caps, c * tanh(scores / c), in the spellings of exporters and models: the kernels cap what the model capped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.examples import examples
from tests.passes.builder import build
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    SOFTMAX,
    assert_same,
    fused,
    only_block,
    parse,
    random_feeds,
    run,
)
from tests.passes.spelling import Spelling, consistent, may_decline
from tests.passes.strategies import SPELLINGS

NUMBERS = (
    "<float c = {1.5}, float i = {0.6666667}, float n = {-1.5}, float s1 = {0.35}, float low = {-1e4}, float z = {0.0}>"
)
DIVIDED = "a = Div(r, c) t = Tanh(a) x = Mul(t, c) "
SPELT: dict[str, tuple[str, float, float]] = {
    # the body between the product s and the softmax of x, the operator's scale, its cap
    "divided": ("r = Identity(s) " + DIVIDED, 1.0, 1.5),
    "scaled before, as Gemma": ("r = Mul(s, s1) " + DIVIDED, 0.35, 1.5),
    "times the reciprocal": ("a = Mul(s, i) t = Tanh(a) x = Mul(c, t) ", 1.0, 1.5),
    "scale and reciprocal in one number": ("a = Mul(s, s1) t = Tanh(a) x = Mul(t, c) ", 0.525, 1.5),
    "scaled behind, too": ("a = Div(s, c) t = Tanh(a) b = Mul(t, c) x = Mul(b, s1) ", 0.35, 0.525),
    "a negative number on both sides": ("a = Div(s, n) t = Tanh(a) x = Mul(t, n) ", 1.0, 1.5),
    "a negative number on one side": ("a = Div(s, c) t = Tanh(a) x = Mul(t, n) ", -1.0, 1.5),
    "no number": ("x = Tanh(s) ", 1.0, 1.0),
    "zero added before it": ("b = Add(s, z) a = Div(b, c) t = Tanh(a) x = Mul(t, c) ", 1.0, 1.5),
    "moved before and behind it": (
        "a = Transpose<perm=[0,1,3,2]>(s) b = Div(a, c) t = Tanh(b) d = Transpose<perm=[0,1,3,2]>(t) x = Mul(d, c) ",
        1.0,
        1.5,
    ),
}
BEHIND = {
    "a mask, selected": ("x = Where(m, d, low)", "atten_mask"),
    "a mask, added": ("x = Add(d, b)", "real_shift"),
    "causal, as Grok": (
        "w = Constant<value=float {-1e30}>() u = Trilu<upper=0>(ones) k1 = Cast<to=9>(u) x = Where(k1, d, w)",
        "causal",
    ),
}


def attention(body: str, more: str = "", extra: str = "") -> onnx.ModelProto:
    return parse(
        PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV, more, initializers=NUMBERS.replace(">", extra + ">")
    )


def cap_of(model: onnx.ModelProto) -> tuple[float, float]:
    (node,) = (each for each in model.graph.node if each.domain == "ascend")
    attrs = {each.name: each.f for each in node.attribute}
    return attrs["scale_value"], attrs["cpu_softcap"]


@pytest.mark.parametrize("name", SPELT)
def test_spellings(name: str) -> None:
    body, scale, cap = SPELT[name]
    proto = attention(body)
    block = only_block(proto)
    assert (block.status, block.mask, block.extensions) == ("fused", "none", ("EXT-SOFTCAP",)), block.reason
    assert cap_of(fused(proto)[0]) == pytest.approx((scale, cap), rel=1e-6)


@pytest.mark.parametrize("name", BEHIND)
def test_masks_and_biases_behind_a_cap(name: str) -> None:
    body, mask = BEHIND[name]
    square = "float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v"
    more = {"causal, as Grok": "float[6,6] ones", "a mask, added": "float[B,1,6,6] b"}.get(name, "bool[B,1,6,6] m")
    text = (
        PRODUCT_QK + "r = Identity(s) " + DIVIDED.replace("x =", "d =") + body + " " + SOFTMAX.format("x") + PRODUCT_PV
    )
    proto = parse(text, more, inputs=square, outputs="float[B,4,6,8] y", initializers=NUMBERS)
    if name.startswith("causal"):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 6), np.float32), "ones"))
        del proto.graph.input[-1]
    block = only_block(proto)
    assert (block.status, block.mask) == ("fused", mask), block.reason


def test_a_product_added_behind_a_cap_is_a_bias() -> None:
    """Added before it, it is a part of the scores; the operator caps their sum, and nothing else."""
    second = "ut = Transpose<perm=[0,1,3,2]>(u) s2 = MatMul(q, ut) "
    before = attention(second + "e = Add(s, s2) r = Identity(e) " + DIVIDED, "float[B,4,T,8] u")
    behind = attention(
        second + "r = Identity(s) " + DIVIDED.replace("x =", "d =") + "x = Add(d, s2) ", "float[B,4,T,8] u"
    )
    for proto, mask, count in ((before, "none", 5), (behind, "real_shift", 4)):
        block = only_block(proto)
        assert (block.status, block.mask) == ("fused", mask), block.reason
        (node,) = (each for each in fused(proto)[0].graph.node if each.domain == "ascend")
        assert sum(bool(name) for name in node.input) == count


def test_a_cap_that_vanishes_is_none_of_the_kernel() -> None:
    """As a float32 attribute, 1e-50 would be 0: no cap. The scale is the product of the numbers on both sides, 1."""
    numbers = "".join(f"h{index} = Mul({before}, big) " for index, before in enumerate(("s", "h0", "h1", "h2", "h3")))
    numbers += "t = Tanh(h4) " + "".join(
        f"l{index} = Mul({before}, small) " for index, before in enumerate(("t", "l0", "l1", "l2"))
    )
    block = only_block(attention(numbers + "x = Mul(l3, small) ", extra=", float big = {1e10}, float small = {1e-10}"))
    assert (block.code, block.reason) == ("softcap", "the soft cap 1e-50 overflows or vanishes")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype: str) -> None:
    """The kernels cap in float32 what the model caps in 16 bits."""
    inputs = ", ".join(f"float[B,4,{axis},8] {name}f" for name, axis in (("q", "S"), ("k", "T"), ("v", "T")))
    kind = {"float16": 10, "bfloat16": 16}[dtype]
    casts = "".join(f"{name} = Cast<to={kind}>({name}f) " for name in "qkv") + f"c = Cast<to={kind}>(cf) "
    body = (
        casts + PRODUCT_QK + "r = Identity(s) " + DIVIDED + SOFTMAX.format("x") + "yh = MatMul(p, v) y = Cast<to=1>(yh)"
    )
    proto = parse(body, inputs=inputs, initializers="<float cf = {1.5}>")
    result, report = fused(proto)
    assert report.blocks[0].status == "fused"
    feeds = random_feeds(proto)
    wide = parse(body.replace(f"to={kind}", "to=1"), inputs=inputs, initializers="<float cf = {1.5}>")
    assert_same(run(result, feeds)[0], run(wide, feeds)[0], {"float16": 4e-3, "bfloat16": 3e-2}[dtype])


@settings(max_examples=examples(12))
@given(SPELLINGS, st.integers(0, 1 << 16))
def test_a_cap_in_every_spelling(spelling: Spelling, seed: int) -> None:
    """tanh behind the scaled product of any spelling: fused as the spelling itself, or declined; the same result."""
    spelling = consistent(replace(spelling, dtype="float32", upcast=False))
    case = build(spelling)
    model, value = case.model, case.marks["scores"]
    index = next(place for place, node in enumerate(model.graph.node) if value in node.output)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == value:
                node.input[place] = "capped"
    nodes = list(model.graph.node)
    nodes.insert(index + 1, helper.make_node("Tanh", [value], ["capped"], name="cap"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    result, report = fused(model)
    (block,) = report.blocks
    feeds = case.feeds(seed)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-4)
    assert block.status == "fused" or block.code in {"softcap"} | may_decline(spelling), block
