"""SwiGLU between limits in every spelling of the grammar, with the near misses that stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import assert_equal, attributes, feeds, fused, only_line, operators, others, run
from tests.passes.around.test_swiglu import OUT, SPLIT
from tests.passes.around.test_swiglu import model as gated

NUMBERS = "float high = {1.5}, float low = {-1.5}, float k = {1.702}, float one = {1}, "
NUMBERS += "float lowest = {-3.4028234663852886e38}, "
NUMBERS += "int64[1] first = {0}, int64[1] second = {1}, int64[1] two = {2}, int64[1] end = {9223372036854775807}"
PAIRS = "a = Slice(x, first, end, last, two) b = Slice(x, second, end, last, two) "
CLIPS = "c = Clip(a, , high) d = Clip(b, low, high) "
SWISH = "l = Mul(c, k) s = Sigmoid(l) t = Mul(c, s) "
END = "u = Add(d, one) y = Mul(u, t)"


def model(body: str, **options: Any) -> onnx.ModelProto:
    options["more"] = NUMBERS + (f", {options['more']}" if "more" in options else "")
    return gated(body, **options)


SPELLINGS = {
    "1 to 3, 5 and 7": PAIRS + CLIPS + SWISH + END,
    "the other orders": PAIRS + CLIPS + "l = Mul(k, c) s = Sigmoid(l) t = Mul(s, c) u = Add(one, d) y = Mul(t, u)",
    "1, a bound that binds nothing": PAIRS + "c = Clip(a, lowest, high) d = Clip(b, low, high) " + SWISH + END,
    "1, Min": PAIRS + "c = Min(a, high) d = Clip(b, low, high) " + SWISH + END,
    "2, Min and Max": PAIRS + "c = Min(a, high) d1 = Min(b, high) d = Max(d1, low) " + SWISH + END,
    "2, Max and Min": PAIRS + "c = Min(high, a) d1 = Max(low, b) d = Min(high, d1) " + SWISH + END,
    "4": PAIRS + CLIPS + "s = Sigmoid(c) t = Mul(c, s) " + END,
    "6": PAIRS + CLIPS + SWISH + "y = Mul(t, d)",
    "8": SPLIT + CLIPS + SWISH + END,
    "8, slices": "a = Slice(x, zero, four, last) b = Slice(x, four, eight, last) " + CLIPS + SWISH + END,
}
JOINED = {
    "9": "a = MatMul(x, gates) b = MatMul(x, ups) " + CLIPS + SWISH + END,
    "9, halves in the other order": "b, a = Split<axis=-1, num_outputs=2>(x) " + CLIPS + SWISH + END,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    proto = model(SPELLINGS[spelling])
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.added, line.rounded) == ("fused", "ClippedSwiglu", 1, False)
    assert others(result) == []
    alpha, bias = np.float32(1.0 if spelling == "4" else 1.702), 0.0 if spelling == "6" else 1.0
    expected = {"dim": -1, "alpha": alpha, "limit": 1.5, "bias": bias, "interleaved": not spelling.startswith("8")}
    assert attributes(result) == expected
    assert_equal(proto, result)


@pytest.mark.parametrize("spelling", JOINED)
def test_two_tensors_are_joined(spelling: str) -> None:
    proto = model(JOINED[spelling])
    result, report = fused(proto, join_weights="none")
    assert (only_line(report).op, only_line(report).added) == ("ClippedSwiglu", 2)
    assert others(result).count("Concat") == 1
    assert not attributes(result)["interleaved"]
    assert_equal(proto, result, odd=False)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_older_opsets(opset: int) -> None:
    proto = model(SPELLINGS["1 to 3, 5 and 7"], opset=opset)
    result, _ = fused(proto)
    assert operators(result) == ["ClippedSwiglu"]
    assert_equal(proto, result)


def test_sixteen_bits_are_rounded_once() -> None:
    casts = "".join(f"{name}16 = Cast<to=10>({name}) " for name in ("high", "low", "k", "one"))
    body = PAIRS + "c = Clip(a, , high16) d = Clip(b, low16, high16) l = Mul(c, k16) s = Sigmoid(l) t = Mul(c, s) "
    body += "u = Add(d, one16) y = Mul(u, t)"
    proto = model(casts + body, inputs="float16[B,S,8] x", outputs="float16[B,S,4] y")
    result, report = fused(proto)
    assert (only_line(report).op, only_line(report).rounded) == ("ClippedSwiglu", True)
    assert_equal(proto, result, odd=False)
    _, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).code == Code.DTYPE


def test_a_clip_makes_a_finite_number_of_minus_infinity() -> None:
    """The operator does not: its result would be NaN."""
    proto = model(SPELLINGS["1 to 3, 5 and 7"])
    _, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).code == Code.ILLEGAL
    assert "minus infinity" in str(only_line(report).reason)
    proto = model(SPELLINGS["1, Min"])
    result, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).status == "fused"
    inputs = feeds(proto)
    inputs["x"][0] = -np.inf
    np.testing.assert_array_equal(np.isnan(run(result, inputs)[0]), np.isnan(run(proto, inputs)[0]))


def test_products_and_releases_without_the_operator() -> None:
    proto = model(SPELLINGS["1 to 3, 5 and 7"])
    for options, word in (
        ({"soc_version": "310P"}, "310P"),
        ({"cann": "8.0"}, "no variant of ClippedSwiglu is known"),
    ):
        _, report = fused(proto, **options)
        assert only_line(report).code == Code.ILLEGAL
        assert word in str(only_line(report).reason)
    assert only_line(fused(proto, soc_version="950")[1]).status == "fused"


DECLINED = {
    "the argument is read": (
        PAIRS + CLIPS + SWISH + "u = Add(d, one) v = Mul(u, t) y = Add(v, l)",
        Code.READ_INSIDE,
        {},
    ),
    "the clipped gate is an output": (
        PAIRS + CLIPS + SWISH + END,
        Code.READ_INSIDE,
        {"outputs": f"{OUT}, float[B,S,4] c"},
    ),
    "float64": (
        "high8 = Cast<to=11>(high) low8 = Cast<to=11>(low) one8 = Cast<to=11>(one) "
        + PAIRS
        + "c = Clip(a, , high8) d = Clip(b, low8, high8) s = Sigmoid(c) t = Mul(c, s) u = Add(d, one8) y = Mul(u, t)",
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
    "the least of three": PAIRS + "c = Min(a, high, one) d = Clip(b, low, high) " + SWISH + END,
    "crossed pairs": PAIRS.replace("first", "z").replace("second", "first").replace("z", "second")
    + CLIPS
    + SWISH
    + END,
    "pairs along another axis": "a = Slice(x, first, end, axis, two) b = Slice(x, second, end, axis, two) "
    + CLIPS
    + SWISH
    + END,
    "every third": PAIRS.replace("two", "three") + CLIPS + SWISH + END,
    "two limits": PAIRS + "c = Clip(a, , other) d = Clip(b, low, high) " + SWISH + END,
    "limits that are not opposite": PAIRS + "c = Clip(a, , high) d = Clip(b, nil, high) " + SWISH + END,
    "a gate with two bounds": PAIRS + "c = Clip(a, low, high) d = Clip(b, low, high) " + SWISH + END,
    "no clip of the gate": PAIRS + "d = Clip(b, low, high) l = Mul(a, k) s = Sigmoid(l) t = Mul(a, s) " + END,
    "no clip of the other": PAIRS + "c = Clip(a, , high) " + SWISH + "u = Add(b, one) y = Mul(u, t)",
    "the sigmoid of the gate before it is clipped": PAIRS + CLIPS + "l = Mul(a, k) s = Sigmoid(l) t = Mul(c, s) " + END,
    "the gate is read": PAIRS + CLIPS + SWISH + "u = Add(d, one) v = Mul(u, t) y = Add(v, a)",
    "a bias of each column": PAIRS + CLIPS + SWISH + "u = Add(d, bias) y = Mul(u, t)",
    "a difference": PAIRS + CLIPS + SWISH + "u = Sub(d, one) y = Mul(u, t)",
    "tensors of no product": PAIRS.replace("b =", "b1 =") + "b = Neg(b1) " + CLIPS + SWISH + END,
    "an empty clip": PAIRS + "c = Min(a, high) d1 = Max(b, far1) d = Clip(d1, low, high) " + SWISH + END,
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_stay(what: str) -> None:
    more = "float other = {7}, float nil = {0}, int64[1] three = {3}, int64[1] axis = {1}, float far1 = {9}"
    options: dict[str, Any] = {"more": more}
    if what == "pairs along another axis":
        options |= {"inputs": "float[2,4,4] x", "outputs": "float[2,2,4] y"}
    if what == "every third":
        options |= {"inputs": "float[B,S,6] x", "outputs": "float[B,S,2] y"}
    result, report = fused(model(NEAR_MISSES[what], **options))
    assert not report.around
    assert operators(result) == []
