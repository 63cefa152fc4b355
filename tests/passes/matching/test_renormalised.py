"""Masks behind the softmax, and exponentials without a maximum: fused where the user vouches for bounded scores."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler.passes import Block
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    SOFTMAX,
    Array,
    only_block,
    parse,
)

NUMBERS = (
    "last = Constant<value=int64[1] {-1}>() zero = Constant<value=float {0}>() one = Constant<value=float {1}>() "
    "small = Constant<value=float {1e-9}>() "
)
MASKED = "c = Cast<to=1>(m) w = Mul(p, c) "
SUM = "t = ReduceSum<keepdims=1>(w, last) "
GUARDED = SUM + "some = Greater(t, zero) u = Where(some, t, one) n = Div(w, u) x = Where(some, n, zero) "
PLAIN = SUM + "x = Div(w, t) "
VALUES = "y = MatMul(x, v)"
KEYS, ROWS = "bool[B,1,1,T] m", "bool[B,1,S,1] m"
MASK = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]], np.bool_).reshape(2, 1, 1, 6)
BOUNDED = ("bounded-scores",)


def block_of(body: str, more: str = KEYS, assume: tuple[str, ...] = BOUNDED, **given: Array) -> Block:
    return only_block(parse(NUMBERS + PRODUCT_QK + body, more), assume, **given)


@pytest.mark.parametrize(
    "body",
    [
        SOFTMAX.format("s") + MASKED + GUARDED + VALUES,
        SOFTMAX.format("s") + MASKED + PLAIN + VALUES,
        SOFTMAX.format("s") + "w = Where(m, p, zero) " + GUARDED + VALUES,
        SOFTMAX.format("s") + "d = Not(m) w = Where(d, zero, p) " + PLAIN + VALUES,
    ],
    ids=["as jax2onnx", "plain", "where", "where not"],
)
def test_masked_and_divided_by_what_is_left(body: str) -> None:
    """The second batch entry has no keys: zeros with the guard, NaN without."""
    block = block_of(body, m=MASK)
    assert block.status == "fused" and block.mask == "atten_mask" and block.assumed == BOUNDED
    block = block_of(body, m=MASK, assume=())
    assert block.code == "probability_term" and block.hint is not None and "bounded-scores" in block.hint


def test_beside_a_mask_on_the_scores() -> None:
    """Causal in front of the softmax, a window behind it."""
    f = "f = Constant<value=float {-inf}>() g = Where(k0, s, f) "
    mask = np.tril(np.ones((5, 6), np.bool_))[None, None]
    mask[:, :, 2] = False  # a row whose softmax is NaN
    more = KEYS + ", bool[1,1,S,T] k0"
    block = block_of(f + SOFTMAX.format("g") + MASKED + GUARDED + VALUES, more, m=MASK, k0=mask)
    assert block.status == "fused"


@pytest.mark.parametrize(
    ("body", "more", "code"),
    [
        (MASKED + SUM.replace("last", "rows") + "x = Div(w, t) " + VALUES, KEYS, "probability_term"),
        (MASKED + SUM + "a = Add(t, small) x = Div(w, a) " + VALUES, KEYS, "probability_term"),
        (MASKED + GUARDED.replace("Where(some, n, zero)", "Where(some, n, one)") + VALUES, KEYS, "probability_term"),
        (MASKED + GUARDED.replace("Greater(t, zero)", "Greater(t, small)") + VALUES, KEYS, "probability_term"),
        (MASKED + SUM + "x = Div(p, t) " + VALUES, KEYS, "probabilities_are_output"),
        ("w = Mul(p, c) " + PLAIN + VALUES, "float[B,1,1,T] c", "probability_term"),
    ],
    ids=["over rows", "a small number", "ones", "another bound", "not the masked", "any factor"],
)
def test_what_is_not_divided_by_its_own_sum(body: str, more: str, code: str) -> None:
    body = "rows = Constant<value=int64[1] {2}>() " + SOFTMAX.format("s") + body
    given = {"m": MASK} if "m" in more.split() else {}
    assert block_of(body, more, **given).code == code


EXPONENTIALS = "e = Exp(x) t = ReduceSum<keepdims=1>(e, last) p = Div(e, t) " + PRODUCT_PV


def test_exponentials_without_their_maximum() -> None:
    body = "x = Identity(s) " + EXPONENTIALS
    assert block_of(body, "").assumed == BOUNDED
    block = block_of(body, "", ())
    assert block.code == "softmax_overflows" and block.hint is not None and "bounded-scores" in block.hint


def test_exponentials_under_a_mask() -> None:
    infinite = "f = Constant<value=float {-inf}>() x = Where(m, s, f) "
    assert block_of(infinite + EXPONENTIALS, m=MASK).status == "fused"
    finite = infinite.replace("-inf", "-1e30")
    assert block_of(finite + EXPONENTIALS, m=MASK).code == "empty_rows"
    some = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]], np.bool_).reshape(2, 1, 1, 6)
    block = block_of(finite + EXPONENTIALS, assume=(*BOUNDED, "no-empty-rows"), m=some)
    assert block.status == "fused" and set(block.assumed) == {*BOUNDED, "no-empty-rows"}


@pytest.mark.parametrize(
    "total",
    ["t0 = ReduceSum<keepdims=1>(e, last) t = Add(t0, small) ", "w = Mul(e, c) t = ReduceSum<keepdims=1>(w, last) "],
    ids=["a number added", "masked"],
)
def test_exponentials_that_are_changed_besides(total: str) -> None:
    last = "w" if "w =" in total else "e"
    body = "c = Cast<to=1>(m) e = Exp(s) " + total + f"p = Div({last}, t) " + PRODUCT_PV
    assert block_of(body, m=MASK).code in ("softmax_overflows", "probability_term")
