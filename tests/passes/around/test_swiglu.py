"""SwiGLU in every spelling of the grammar, with the near misses that stay as they are."""

from __future__ import annotations

import onnx
import pytest

from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import assert_equal, fused, only_line, operators, others, parse

BOUNDS = "int64[1] zero = {0}, int64[1] four = {4}, int64[1] eight = {8}, int64[1] last = {-1}, int64[1] far = {1000}"
BOUNDS += ", float[8,4] gates = {" + ",".join(str((7 * n % 11 - 5) / 4) for n in range(32)) + "}"
BOUNDS += ", float[8,4] ups = {" + ",".join(str((5 * n % 13 - 6) / 4) for n in range(32)) + "}"
BOUNDS += ", float[4] bias = {1,-1,0.5,0}"
OUT = "float[B,S,4] y"
SWISH = "s = Sigmoid(a) t = Mul(a, s) "
SPLIT = "a, b = Split<axis=-1, num_outputs=2>(x) "


def model(
    body: str, inputs: str = "float[B,S,8] x", outputs: str = OUT, opset: int = 20, more: str = ""
) -> onnx.ModelProto:
    return parse(body, inputs, outputs, opset, BOUNDS + (f", {more}" if more else ""))


HALVES = {
    "1, 3 and 4": SPLIT + SWISH + "y = Mul(t, b)",
    "the other orders": SPLIT + "s = Sigmoid(a) t = Mul(s, a) y = Mul(b, t)",
    "4, an axis in the middle": "a, b = Split<axis=2, num_outputs=2>(x) " + SWISH + "y = Mul(t, b)",
    "slices": "a = Slice(x, zero, four, last) b = Slice(x, four, eight, last) " + SWISH + "y = Mul(t, b)",
    "slices beyond the end": "a = Slice(x, zero, four, last) b = Slice(x, four, far, last) " + SWISH + "y = Mul(t, b)",
}
JOINED = {
    "5": "a = MatMul(x, gates) b = MatMul(x, ups) " + SWISH + "y = Mul(t, b)",
    "5, with a bias": "c = MatMul(x, gates) a = Add(c, bias) b = MatMul(x, ups) " + SWISH + "y = Mul(t, b)",
    "5, slices in the other order": "b = Slice(x, zero, four, last) a = Slice(x, four, eight, last) "
    + SWISH
    + "y = Mul(t, b)",
    "5, a split in the other order": "b, a = Split<axis=-1, num_outputs=2>(x) " + SWISH + "y = Mul(t, b)",
}


@pytest.mark.parametrize("spelling", HALVES)
def test_halves_of_one_tensor(spelling: str) -> None:
    proto = model(HALVES[spelling])
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.added, line.rounded) == ("fused", "SwiGlu", 1, False)
    assert others(result) == []
    assert_equal(proto, result)


@pytest.mark.parametrize("spelling", JOINED)
def test_two_tensors_are_joined(spelling: str) -> None:
    proto = model(JOINED[spelling])
    result, report = fused(proto, join_weights="none")
    line = only_line(report)
    assert (line.op, line.replaced, line.added) == ("SwiGlu", 3, 2)
    assert others(result).count("Concat") == 1
    assert_equal(proto, result, odd=False)  # a product spreads NaN of a row, in an order of its own


def test_swish_of_opset_24() -> None:
    """ONNX Runtime has no kernel of Swish; the graph alone is looked at."""
    result, report = fused(model(SPLIT + "t = Swish(a) y = Mul(t, b)", opset=24))
    assert operators(result) == ["SwiGlu"]
    result, report = fused(model(SPLIT + "t = Swish<alpha=1.702>(a) y = Mul(t, b)", opset=24))
    assert not report.around


@pytest.mark.parametrize("opset", [13, 14, 17, 18])
def test_older_opsets(opset: int) -> None:
    split = SPLIT if opset >= 18 else SPLIT.replace(", num_outputs=2", "")
    proto = model(split + SWISH + "y = Mul(t, b)", opset=opset)
    result, _ = fused(proto)
    assert operators(result) == ["SwiGlu"]
    assert_equal(proto, result)


def test_sixteen_bits_are_rounded_once() -> None:
    body = SPLIT + SWISH + "y = Mul(t, b)"
    proto = model(body, "float16[B,S,8] x", "float16[B,S,4] y")
    result, report = fused(proto)
    assert only_line(report).rounded
    assert_equal(proto, result, odd=False)
    _, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).code == Code.DTYPE
    assert "leave out --assume non-finite-scores" in str(only_line(report).hint)
    _, report = fused(model(body, "float16[B,S,8] x", "float16[B,S,4] y", opset=18))
    assert only_line(report).status == "fused"
    old = model(body.replace(", num_outputs=2", ""), "float16[B,S,8] x", "float16[B,S,4] y", opset=14)
    _, report = fused(old)
    assert only_line(report).code == Code.OPSET


def test_a_product_that_310p_does_not_take() -> None:
    proto = model(SPLIT + SWISH + "y = Mul(t, b)")
    result, report = fused(proto, soc_version="310P")
    assert only_line(report).code == Code.ILLEGAL
    assert "SG.4" in str(only_line(report).reason)
    assert others(result) == others(proto)


NEAR_MISSES = {
    "QuickGelu": (SPLIT + "c = Mul(a, k) s = Sigmoid(c) t = Mul(a, s) y = Mul(t, b)", {"more": "float k = {1.702}"}),
    "the sigmoid of another tensor": (SPLIT + "s = Sigmoid(b) t = Mul(a, s) y = Mul(t, b)", {}),
    "a gate without Swish": (SPLIT + "s = Sigmoid(a) y = Mul(s, b)", {}),
    "Swish is read twice": (SPLIT + SWISH + "u = Mul(t, b) y = Add(u, t)", {}),
    "the sigmoid is read twice": (SPLIT + SWISH + "u = Mul(t, b) y = Add(u, s)", {}),
    "Swish is an output": (SPLIT + SWISH + "y = Mul(t, b)", {"outputs": f"{OUT}, float[B,S,4] t"}),
    "the gate is an output": (SPLIT + SWISH + "y = Mul(t, b)", {"outputs": f"{OUT}, float[B,S,4] a"}),
    "parts of other sizes": (
        "a, b, c = Split<axis=-1>(x, k) " + SWISH + "u = Mul(t, b) y = Concat<axis=-1>(u, c)",
        {"more": "int64[3] k = {2,2,4}", "outputs": "float[B,S,6] y"},
    ),
    "a scale for each row": (
        "b = ReduceMean(x, last) s = Sigmoid(x) t = Mul(x, s) y = Mul(t, b)",
        {"outputs": "float[B,S,8] y"},
    ),
    "overlapping slices": (
        "a = Slice(x, zero, four, last) b = Slice(x, k, six, last) " + SWISH + "y = Mul(t, b)",
        {"more": "int64[1] k = {2}, int64[1] six = {6}"},
    ),
    "slices with a step": (
        "a = Slice(x, zero, eight, last, k) b = Slice(x, one, eight, last, k) " + SWISH + "y = Mul(t, b)",
        {"more": "int64[1] k = {2}, int64[1] one = {1}"},
    ),
    "slices of two tensors": (
        "z = Neg(x) a = Slice(x, zero, four, last) b = Slice(z, four, eight, last) " + SWISH + "y = Mul(t, b)",
        {},
    ),
    "tensors of no product": (SWISH + "y = Mul(t, b)", {"inputs": "float[B,S,4] a, float[B,S,4] b"}),
    "the square of Swish": ("a = MatMul(x, gates) " + SWISH + "y = Mul(t, t)", {}),
    "the gate twice": ("a = MatMul(x, gates) " + SWISH + "y = Mul(t, a)", {}),
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_stay(what: str) -> None:
    body, options = NEAR_MISSES[what]
    proto = model(body, **options)
    result, report = fused(proto)
    assert not report.around
    assert operators(result) == []


def test_types_that_the_operator_does_not_take() -> None:
    proto = model(SPLIT + SWISH + "y = Mul(t, b)", "double[B,S,8] x", "double[B,S,4] y")
    _, report = fused(proto)
    assert only_line(report).code == Code.DTYPE
