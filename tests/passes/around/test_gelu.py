"""Gelu and GeGLU in every spelling of the grammar, with the near misses that stay as they are."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import onnx
import pytest

from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import assert_equal, attributes, fused, only_line, operators, others
from tests.passes.around.test_swiglu import OUT, SPLIT
from tests.passes.around.test_swiglu import model as gated

NUMBERS = f"float half = {{0.5}}, float one = {{1}}, float two = {{2}}, float three = {{3}}, float r = {{{sqrt(2)}}}, "
NUMBERS += f"float i = {{{sqrt(0.5)}}}, float k = {{0.044715}}, float h = {{{sqrt(2 / pi)}}}"
SHARE = "c = Div(a, r) d = Erf(c) t = Add(d, one) "
CUBE = "c = Pow(a, three) d = Mul(k, c) e1 = Add(a, d) f = Mul(h, e1) t1 = Tanh(f) t = Add(t1, one) "
GELU = "u = Mul(a, t) g1 = Mul(u, half) "


def model(body: str, **options: Any) -> onnx.ModelProto:
    options["more"] = NUMBERS + (f", {options['more']}" if "more" in options else "")
    return gated(body, **options)


SPELLINGS = {
    "1": "g1 = Gelu(a) ",
    "1 of com.microsoft": "g1 = com.microsoft.Gelu(a) ",
    "3 and 4": SHARE + GELU,
    "3, half of the gate first": "l = Mul(half, a) " + SHARE + "g1 = Mul(l, t) ",
    "3, the half of the share": SHARE + "u = Mul(t, half) g1 = Mul(a, u) ",
    "3, a sum of two": "l = Mul(half, a) c = Div(a, r) d = Erf(c) v = Mul(l, d) g1 = Add(l, v) ",
    "4, a product": "c = Mul(a, i) d = Erf(c) t = Add(one, d) " + GELU,
}
BY_TANH = {
    "1 by tanh": 'g1 = Gelu<approximate="tanh">(a) ',
    "2": "g1 = com.microsoft.FastGelu(a) ",
    "3 and 5": CUBE + GELU,
    "5, a product of three": CUBE.replace("Pow(a, three)", "Mul(a1, a)").replace("c =", "a1 = Mul(a, a) c =") + GELU,
    "5, the factors first": "a1 = Mul(a, k) a2 = Mul(a1, a) a3 = Mul(a2, a) e1 = Add(a, a3) f = Mul(e1, h) "
    "t1 = Tanh(f) t = Add(t1, one) " + GELU,
    "5, the gate outside": "a1 = Mul(a, a) a2 = Mul(a1, k) e1 = Add(a2, one) l = Mul(a, h) f = Mul(l, e1) "
    "t1 = Tanh(f) t = Add(one, t1) " + GELU,
}


@pytest.mark.parametrize("spelling", [*SPELLINGS, *BY_TANH])
def test_spellings(spelling: str) -> None:
    proto = model(SPLIT + (SPELLINGS | BY_TANH)[spelling] + "y = Mul(g1, b)")
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.added, line.rounded) == ("fused", "GeGluV2", 1, False)
    assert others(result) == []
    expected = {"dim": -1, "approximate": int(spelling in BY_TANH), "activate_left": True}
    assert attributes(result) == expected
    assert_equal(proto, result)


SLICES = "b = Slice(x, zero, four, last) a = Slice(x, four, eight, last) "


@pytest.mark.parametrize("parts", ["b, a = Split<axis=-1, num_outputs=2>(x) ", SLICES])
@pytest.mark.parametrize("form", ["1", "3 and 5"])
def test_the_second_half_may_be_the_gate(parts: str, form: str) -> None:
    proto = model(parts + (SPELLINGS | BY_TANH)[form] + "y = Mul(b, g1)")
    result, _ = fused(proto)
    assert (operators(result), others(result)) == (["GeGluV2"], [])
    assert not attributes(result)["activate_left"]
    assert_equal(proto, result)


def test_two_products_are_joined() -> None:
    proto = model("c0 = MatMul(x, gates) a = Add(c0, bias) b = MatMul(x, ups) " + SHARE + GELU + "y = Mul(g1, b)")
    result, report = fused(proto, join_weights="none")
    assert (only_line(report).op, only_line(report).added) == ("GeGluV2", 2)
    assert others(result) == ["MatMul", "Add", "MatMul", "Concat"]
    assert_equal(proto, result, odd=False)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_older_opsets(opset: int) -> None:
    split = SPLIT if opset >= 18 else SPLIT.replace(", num_outputs=2", "")
    proto = model(split + CUBE + GELU + "y = Mul(g1, b)", opset=opset)
    result, _ = fused(proto)
    assert operators(result) == ["GeGluV2"]
    assert_equal(proto, result)


HALF = {"inputs": "float16[B,S,8] x", "outputs": "float16[B,S,4] y"}


@pytest.mark.parametrize(("form", "rounded"), [("1", False), ("1 by tanh", False), ("3 and 5", True)])
def test_sixteen_bits(form: str, rounded: bool) -> None:
    names = ("half", "one", "two", "three", "r", "i", "k", "h")
    more = ", ".join(f"float16 {name}_ = {{0}}" for name in names)
    casts = "".join(f"{name}16 = Cast<to=10>({name}) " for name in names)
    body = (SPELLINGS | BY_TANH)[form]
    for name in names:
        body = body.replace(f" {name})", f" {name}16)").replace(f"({name},", f"({name}16,")
    proto = model(casts + SPLIT + body + "y = Mul(g1, b)", more=more, **HALF)
    result, report = fused(proto)
    assert (only_line(report).op, only_line(report).rounded) == ("GeGluV2", rounded)
    assert_equal(proto, result, odd=False)
    _, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).code == Code.DTYPE


def test_products_without_the_exact_form() -> None:
    proto = model(SPLIT + SPELLINGS["1"] + "y = Mul(g1, b)")
    _, report = fused(proto, soc_version="310P")
    assert only_line(report).code == Code.ILLEGAL
    assert "GG.5" in str(only_line(report).reason)
    result, _ = fused(model(SPLIT + SHARE + GELU + "y = Mul(g1, b)"), soc_version="310P")
    assert operators(result) == ["GeluV2"]
    _, report = fused(model(SPLIT + BY_TANH["2"] + "y = Mul(g1, b)"), soc_version="310P")
    assert only_line(report).status == "fused"


DECLINED = {
    "the argument is read": (SPLIT + SHARE + GELU + "v = Mul(g1, b) y = Add(v, c)", Code.READ_INSIDE, {}),
    "the cube is an output": (
        SPLIT + CUBE + GELU + "y = Mul(g1, b)",
        Code.READ_INSIDE,
        {"outputs": f"{OUT}, float[B,S,4] c"},
    ),
    "float64": (
        SPLIT + "g1 = Gelu(a) y = Mul(g1, b)",
        Code.DTYPE,
        {"inputs": "double[B,S,8] x", "outputs": "double[B,S,4] y"},
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_declined(what: str) -> None:
    body, code, options = DECLINED[what]
    result, report = fused(model(body, **options))
    assert only_line(report).code == code
    assert operators(result) == []


NEAR_MISSES = {
    "another constant of tanh": (CUBE.replace("k, c", "z, c") + GELU, "float z = {0.0447}"),
    "another factor of tanh": (CUBE.replace("h, e1", "z, e1") + GELU, "float z = {0.797}"),
    "another root": (SHARE.replace("(a, r)", "(a, z)") + GELU, "float z = {1.41}"),
    "a square in place of the cube": (CUBE.replace("three", "two") + GELU, ""),
    "no half": (SHARE + "g1 = Mul(a, t) ", ""),
    "half of another share": ("c = Div(b, r) d = Erf(c) t = Add(d, one) " + GELU, ""),
    "the share plus 2": (SHARE.replace("one", "two") + GELU, ""),
    "QuickGelu": ("g1 = com.microsoft.QuickGelu(a) ", ""),
    "a bias": ("g1 = com.microsoft.FastGelu(a, bias) ", ""),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_are_no_gelu(what: str) -> None:
    body, more = NEAR_MISSES[what]
    result, report = fused(model(SPLIT + body + "y = Mul(g1, b)", **({"more": more} if more else {})))
    assert not report.around
    assert operators(result) == []


WRITTEN_OUT = {name: body for name, body in (SPELLINGS | BY_TANH).items() if name[0] in "345"}


@pytest.mark.parametrize("spelling", WRITTEN_OUT)
@pytest.mark.parametrize("opset", [13, 20])
def test_gelu_alone(spelling: str, opset: int) -> None:
    proto = model("a = Neg(x) " + WRITTEN_OUT[spelling] + "y = Neg(g1)", outputs="float[B,S,8] y", opset=opset)
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.added, line.rounded) == ("fused", "GeluV2", 1, False)
    assert others(result) == ["Neg", "Neg"]
    assert attributes(result)["approximate"] == (b"tanh" if spelling in BY_TANH else b"none")
    assert_equal(proto, result)


@pytest.mark.parametrize("form", ["1", "1 of com.microsoft", "1 by tanh", "2"])
def test_a_gelu_alone_that_is_ready_made_stays(form: str) -> None:
    proto = model("a = Neg(x) " + (SPELLINGS | BY_TANH)[form] + "y = Neg(g1)", outputs="float[B,S,8] y")
    result, report = fused(proto)
    assert not report.around
    assert len(others(result)) == 3


NOT_GATED = {
    "Gelu is read twice": SPLIT + "{} v = Mul(g1, b) y = Add(v, g1)",
    "the gate is read": SPLIT + "{} v = Mul(g1, b) y = Add(v, a)",
    "what multiplies is read": SPLIT + "{} v = Mul(g1, b) y = Add(v, b)",
    "Gelu is not multiplied": SPLIT + "{} y = Add(g1, b)",
    "the gate multiplies itself": SPLIT + "{} v = Mul(g1, a) y = Add(v, b)",
    "a scale": SPLIT + "{} v = Mul(g1, half) y = Add(v, b)",
    "tensors of no product": SPLIT + "l = Neg(b) {} y = Mul(g1, l)",
}


@pytest.mark.parametrize("what", NOT_GATED)
def test_other_products_stay(what: str) -> None:
    result, report = fused(model(NOT_GATED[what].format(SPELLINGS["1"])))
    assert not report.around
    assert operators(result) == []
    proto = model(NOT_GATED[what].format(SHARE + GELU))
    result, report = fused(proto)
    assert operators(result) == ["GeluV2"]
    assert_equal(proto, result)


def test_a_share_that_is_read_stays() -> None:
    result, report = fused(model(SPLIT + SHARE + GELU + "v = Mul(g1, b) y = Add(v, d)"))
    assert not report.around
    assert operators(result) == []


@pytest.mark.parametrize(("assume", "expected"), [((), ["GeluV2"]), (("non-finite-scores",), [])])
def test_a_quotient_shows_the_sign_of_zero(assume: tuple[str, ...], expected: list[str]) -> None:
    """x / 2 + x / 2 erf is 0 far below, and the operator gives -0: other infinities, if there may be any."""
    body = SPELLINGS["3, a sum of two"].replace("a, ", "x, ").replace(", a)", ", x)") + "y = Div(x, g1)"
    result, _ = fused(model(body, outputs="float[B,S,8] y"), assume=assume)
    assert operators(result) == expected
