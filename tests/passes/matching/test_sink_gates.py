"""A sink written as a gate on the result: sigmoid(logsumexp(scores) - sink)."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import PRODUCT_QK, only_block, parse

NUMBERS = "last = Constant<value=int64[1] {-1}>() heads = Constant<value=float[1,4,1] {-0.5,1.5,0.0,3.0}>() "
KEPT = "heads4 = Constant<value=float[4,1,1] {-0.5,1.5,0.0,3.0}>() one = Constant<value=float {0.7}>() "
SOFTMAX = "p = Softmax<axis=-1>(X) o = MatMul(p, v) "
DROPPED = "l = ReduceLogSumExp<axes=[-1], keepdims=0>(X) d = Sub(l, heads) g0 = Sigmoid(d) g = Unsqueeze(g0, last) "
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)


def model(gate: str = DROPPED, terms: str = "", product: str = "y = Mul(o, g)", more: str = "") -> onnx.ModelProto:
    scores = "x" if terms else "s"
    body = NUMBERS + KEPT + PRODUCT_QK + terms + gate.replace("X", scores) + SOFTMAX.replace("X", scores) + product
    return parse(body, more)


@pytest.mark.parametrize(
    "gate",
    [
        DROPPED,
        "l = ReduceLogSumExp<axes=[-1], keepdims=1>(X) d = Sub(l, heads4) g = Sigmoid(d) ",
        "l = ReduceLogSumExp<axes=[3], keepdims=1>(X) d = Sub(l, one) g = Sigmoid(d) ",
        DROPPED.replace("heads", "one"),
        "l = ReduceLogSumExp<axes=[-1], keepdims=0>(X) d = Sub(l, heads) c = Cast<to=1>(d) g0 = Sigmoid(c) "
        "u = Unsqueeze(g0, last) g = Cast<to=1>(u) ",
    ],
    ids=["dropped", "kept", "one number", "one number, dropped", "with casts"],
)
@pytest.mark.parametrize("product", ["y = Mul(o, g)", "y = Mul(g, o)"])
def test_a_gate_is_a_sink(gate: str, product: str) -> None:
    assert only_block(model(gate, product=product)).status == "fused"


def test_a_gate_beside_powers_to_another_base_is_refused() -> None:
    """The gate sums exponentials, and the softmax is one of powers of two."""
    powers = (
        "base = Constant<value=float {2.0}>() t = ReduceMax<axes=[-1], keepdims=1>(s) z = Sub(s, t) e = Pow(base, z) "
        "a = ReduceSum<keepdims=1>(e, last) p = Div(e, a) o = MatMul(p, v) y = Mul(o, g)"
    )
    block = only_block(parse(NUMBERS + KEPT + PRODUCT_QK + DROPPED.replace("X", "s") + powers))
    assert (block.status, block.code) == ("declined", "probability_term"), block


def masked(number: str) -> str:
    return (
        f"f = Constant<value=float {{{number}}}>() z = Constant<value=float {{0}}>() b = Where(m, z, f) x = Add(s, b) "
    )


def test_rows_of_a_finite_mask_are_zero() -> None:
    block = only_block(model(terms=masked("-3.4028235e38"), more="bool[B,1,1,T] m"), m=PADDING)
    assert block.status == "fused"


@pytest.mark.parametrize(
    "terms",
    [
        masked("-inf"),
        "f = Constant<value=float {-inf}>() x = Where(m, s, f) ",
        masked("-3.4028235e38").replace("x = ", "x1 = ") + "x = Add(x1, b) ",
    ],
    ids=["added", "selected", "twice a finite one"],
)
def test_rows_that_are_all_infinite_are_nan_here(terms: str) -> None:
    assert only_block(model(terms=terms, more="bool[B,1,1,T] m"), m=PADDING).code == "empty_rows"


def test_a_sink_may_be_infinite() -> None:
    gate = DROPPED.replace("heads", "t")
    sinks = np.array([[[0.0], [np.inf], [-np.inf], [1.0]]], np.float32)
    block = only_block(model(gate, more="float[1,4,1] t"), t=sinks)
    assert block.code == "score_term"


def test_a_maximum_is_not_subtracted_from_the_sink() -> None:
    """The gate is of the scores less their maximum, which is another number."""
    less = "most = ReduceMax<axes=[-1], keepdims=1>(s) less = Sub(s, most) two = Constant<value=float {2}>() "
    block = only_block(model(terms=less + "x = Mul(less, two) "))
    assert (block.code, block.culprit) == ("score_term", "less")


def test_a_bias_may_be_infinite() -> None:
    assert only_block(model(terms="x = Add(s, b) ", more="float[B,1,S,T] b")).code == "empty_rows"


@pytest.mark.parametrize(
    ("gate", "product"),
    [
        (DROPPED.replace("axes=[-1]", "axes=[-2]"), "y = Mul(o, g)"),
        (DROPPED.replace("Sub(l, heads)", "Sub(heads, l)"), "y = Mul(o, g)"),
        (DROPPED.replace("Sigmoid", "Tanh"), "y = Mul(o, g)"),
        (DROPPED, "y = Div(o, g)"),
        (DROPPED, "w = Mul(o, g) y = Add(w, o)"),
        (DROPPED, "e = Exp(g) w = Mul(o, g) y = Mul(w, e)"),
        (DROPPED.replace("Sub(l, heads)", "Sub(l, wide)"), "y = Mul(o, g)"),
    ],
    ids=["rows", "turned round", "tanh", "divided", "result read", "gate read", "one number for each row"],
)
def test_what_is_no_sink(gate: str, product: str) -> None:
    wide = "wide = Constant<value=float[5] {1,2,3,4,5}>() "
    inputs = "float[B,4,5,8] q, float[B,4,5,8] k, float[B,4,5,8] v"
    body = wide + NUMBERS + KEPT + PRODUCT_QK + gate.replace("X", "s") + SOFTMAX.replace("X", "s") + product
    assert only_block(parse(body, inputs=inputs, outputs="float[B,4,5,8] y")).status == "declined"


def guarded(terms: str, more: str) -> onnx.ModelProto:
    """A guard makes rows that are NaN behind the softmax 0."""
    guard = SOFTMAX.replace(
        "o = MatMul(p", "nan = IsNaN(p) zero = Constant<value=float {0}>() w = Where(nan, zero, p) o = MatMul(w"
    )
    gate = DROPPED.replace("X", "x") + guard.replace("X", "x")
    return parse(NUMBERS + KEPT + PRODUCT_QK + terms + gate + "y = Mul(o, g)", more)


def test_a_guard_makes_empty_rows_zero() -> None:
    assert only_block(guarded(masked("-inf"), "bool[B,1,1,T] m"), m=PADDING).status == "fused"


def test_a_row_with_a_nan_is_nan_behind_a_guard() -> None:
    """The guard makes it 0, and the gate NaN."""
    bias = np.zeros((2, 1, 5, 6), np.float32)
    bias[0, 0, 1, 2], bias[0, 0, 2], bias[1, 0, 3, 1:] = np.nan, -np.inf, -np.inf
    assert only_block(guarded("x = Add(s, b) ", "float[B,1,S,T] b"), b=bias).status == "fused"


SELECTS = "zero = Constant<value=float {0}>() w = Where(m, p, zero) o = MatMul(w"
MULTIPLIES = "keep = Cast<to=1>(m) w = Mul(p, keep) o = MatMul(w"


@pytest.mark.parametrize(
    ("guard", "first", "fill", "status"),
    [
        (SELECTS, "a = Identity(s) ", "-inf", "fused"),
        (SELECTS, "a = Add(s, b) ", "-inf", "declined"),
        (MULTIPLIES, "a = Identity(s) ", "-inf", "declined"),
        (MULTIPLIES, "a = Identity(s) ", "-3.4028235e38", "fused"),
        (MULTIPLIES, "a = Add(s, b) ", "-3.4028235e38", "declined"),
    ],
)
def test_a_guard_zeroes_what_its_mask_masks(guard: str, first: str, fill: str, status: str) -> None:
    """And not the rows that another term makes -inf: they are NaN, and NaN times 0, too."""
    bias = np.zeros((2, 1, 5, 6), np.float32)
    bias[0, 0, 1] = bias[1, 0, 2] = -np.inf
    terms = f"{first}f = Constant<value=float {{{fill}}}>() x = Where(m, a, f) "
    gate = DROPPED.replace("X", "x") + SOFTMAX.replace("o = MatMul(p", guard).replace("X", "x")
    body = NUMBERS + KEPT + PRODUCT_QK + terms + gate + "y = Mul(o, g)"
    block = only_block(parse(body, "bool[B,1,1,T] m, float[B,1,S,T] b"), m=PADDING, b=bias)
    assert block.status == status


def test_no_mask_is_infinite_behind_a_guard() -> None:
    """A guard makes a row with +inf 0, for the gate is 1; beside a sink it would be NaN."""
    terms = "o1 = Constant<value=float {1}>() low = Constant<value=float {-inf}>() f = Cast<to=1>(m) r = Sub(o1, f) "
    padding = np.array([0, 0, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0]).reshape(2, 1, 1, 6)
    block = only_block(guarded(terms + "b = Mul(r, low) x = Add(s, b) ", "int64[B,1,1,T] m"), m=padding)
    assert (block.code, block.culprit) == ("mask_value", "x")
