"""Dims: every identity they claim is checked by evaluating both sides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.passes.algebra.symbolic import Dim, named, product, zero_minimum

B, S, H, D = (Dim.symbol(name) for name in "BSHD")
ANY_TIME = settings(deadline=None)
NAMES = ("B", "S", "H")
LEAVES = st.one_of(st.integers(-3, 5).map(Dim), st.sampled_from(NAMES).map(Dim.symbol))
POLYNOMIALS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] - pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
    ),
    max_leaves=6,
)
EXPRESSIONS = st.recursive(
    POLYNOMIALS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: Dim.min(*pair)),
        st.tuples(inner, inner).map(lambda pair: Dim.max(*pair)),
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
    ),
    max_leaves=4,
)
BINDINGS = st.fixed_dictionaries({name: st.integers(0, 5) for name in NAMES})


def value(dim: Dim, bindings: dict[str, int]) -> int:
    found = dim.evaluate(bindings)
    assert found is not None
    return found


@ANY_TIME
@given(POLYNOMIALS, POLYNOMIALS, BINDINGS)
def test_arithmetic_is_that_of_the_values(a: Dim, b: Dim, bindings: dict[str, int]) -> None:
    x, y = value(a, bindings), value(b, bindings)
    assert value(a + b, bindings) == x + y
    assert value(a - b, bindings) == x - y
    assert value(a * b, bindings) == x * y
    assert value(-a, bindings) == -x
    assert a - b + b == a
    assert a * b == b * a and hash(a * b) == hash(b * a)


@ANY_TIME
@given(EXPRESSIONS, EXPRESSIONS, BINDINGS)
def test_min_and_max(a: Dim, b: Dim, bindings: dict[str, int]) -> None:
    x, y = value(a, bindings), value(b, bindings)
    assert value(Dim.min(a, b), bindings) == min(x, y)
    assert value(Dim.max(a, b), bindings) == max(x, y)
    assert Dim.min(a, b) == Dim.min(b, a)
    assert Dim.max(a, b) + Dim.min(a, b) == a + b


@ANY_TIME
@given(EXPRESSIONS, st.integers(-4, 4), BINDINGS)
def test_a_proven_bound_holds(a: Dim, bound: int, bindings: dict[str, int]) -> None:
    if a.is_at_least(bound):
        assert value(a, bindings) >= bound
    if a.lower is not None:
        assert value(a, bindings) >= a.lower
    if a.never_one:
        assert value(a, bindings) != 1


@ANY_TIME
@given(EXPRESSIONS, EXPRESSIONS, BINDINGS)
def test_division(a: Dim, b: Dim, bindings: dict[str, int]) -> None:
    x, y = value(a, bindings), value(b, bindings)
    exact = a.exact_div(b)
    if exact is not None:
        assert exact * b == a
    if y:
        assert value(Dim.floordiv(a, b), bindings) == x // y
        assert value(Dim.ceildiv(a, b), bindings) == -(-x // y)
        assert value(Dim.mod(a, b), bindings) == x % y
        truncated = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        assert value(Dim.truncdiv(a, b), bindings) == truncated
        assert value(Dim.fmod(a, b), bindings) == x - y * truncated


@ANY_TIME
@given(POLYNOMIALS, POLYNOMIALS)
def test_a_product_divides_exactly(a: Dim, b: Dim) -> None:
    if b != 0:
        assert (a * b).exact_div(b) == a


@ANY_TIME
@given(EXPRESSIONS, EXPRESSIONS, BINDINGS)
def test_broadcast_in_every_run_that_succeeds(a: Dim, b: Dim, bindings: dict[str, int]) -> None:
    x, y = value(a, bindings), value(b, bindings)
    # An empty axis beside one of size 1 is the case that `broadcast` leaves out.
    if min(x, y) > 0 and (x == y or 1 in (x, y)):
        assert value(Dim.broadcast(a, b), bindings) == max(x, y)


def test_exact_division_of_products() -> None:
    assert (B * H * S * D).exact_div(S * D) == B * H
    assert (B * S * 64).exact_div(B * 64) == S
    assert (B * S).exact_div(H) is None
    assert (6 * S + 4).exact_div(2) == 3 * S + 2
    assert (6 * S + 3).exact_div(2) is None
    assert (B * B - S * S).exact_div(B + S) == B - S
    assert B.exact_div(0) is None


def test_equal_quotients_are_equal_atoms() -> None:
    assert Dim.floordiv(S + 2, 3) == Dim.floordiv(S + 2, 3)
    assert Dim.floordiv(S + 2, 3) != Dim.floordiv(S + 1, 3)
    assert Dim.floordiv(S + 5, 3) == Dim.floordiv(S + 2, 3) + 1
    assert Dim.floordiv(S, 2).is_at_least(0)
    assert Dim.floordiv(64 * B * S, 64 * B * H) == Dim.floordiv(S, H)
    assert Dim.floordiv(Dim.floordiv(S, 4) - 5, 3) == Dim.floordiv(S - 20, 12)
    assert Dim.floordiv(2 * Dim.floordiv(S, 4), 3) != Dim.floordiv(2 * S, 12)


@pytest.mark.parametrize("window", [2, 4, 7])
@pytest.mark.parametrize("padded_by", [Dim.mod, Dim.fmod])
def test_a_side_padded_to_whole_windows_is_divided_by_their_number(
    window: int, padded_by: Callable[[Dim, int], Dim]
) -> None:
    """(window - side % window) % window are added, as Swin does; padded // (padded // window) is the window."""
    side = Dim.floordiv(S + 2, 4)
    padded = side + Dim.mod(window - padded_by(side, window), window)
    windows = Dim.floordiv(padded, window)
    assert Dim.mod(padded, window) == 0 and Dim.fmod(padded, window) == 0
    for divided in (Dim.floordiv, Dim.truncdiv):
        assert divided(padded, windows) == window and divided(-3 * B * padded, windows) == -3 * window * B
    assert Dim.mod(padded, windows) == 0 and Dim.mod(padded, 2 * window) != 0
    assert Dim.floordiv(side, Dim.floordiv(side, window)) != window  # 7 // (7 // 4) is 7
    assert Dim.floordiv(padded, windows + 1) != window
    for size in range(1, 40):
        assert value(padded, {"S": size}) % window == 0


def test_a_size_with_a_lower_bound_is_a_symbol_of_its_own() -> None:
    long = Dim.symbol("S", 36)
    assert long != S and str(long) == str(S) and long == Dim.symbol("S", 36)
    assert Dim.floordiv(long, 4).is_at_least(9) and not Dim.floordiv(long, 4).is_at_least(10)
    assert Dim.truncdiv(Dim.floordiv(long, 4) - 9, 4) == Dim.floordiv(Dim.floordiv(long, 4) - 9, 4)
    assert Dim.truncdiv(Dim.floordiv(long, 4) - 10, 4) != Dim.floordiv(Dim.floordiv(long, 4) - 10, 4)


def test_names_and_proofs_stay_short_however_deep_the_quotients() -> None:
    length = S
    for _ in range(200):
        length = Dim.floordiv(Dim.broadcast(length, H) * length, B)
    assert len(str(length)) < 1000
    assert length.is_known and length == length + B - B


def test_window_of_a_triangle_broadcasts_to_the_scores() -> None:
    assert Dim.broadcast(Dim.min(B + S, 64), B + S) == B + S
    assert Dim.broadcast(S, Dim.min(S, 64)) == S
    assert Dim.broadcast(Dim.min(S, B), B + 1) not in (S, B + 1)


def test_broadcast_keeps_what_is_known() -> None:
    assert Dim.broadcast(S, S) == S
    assert Dim.broadcast(S, 1) == S and Dim.broadcast(1, S) == S
    assert Dim.broadcast(S, 8) == 8 and Dim.broadcast(8, S) == 8
    assert Dim.broadcast(S, 0) == 0
    assert Dim.broadcast(S, 2 * H) == 2 * H
    either = Dim.broadcast(S, H)
    assert either not in (S, H)
    assert either == Dim.broadcast(H, S) == Dim.broadcast(either, S)
    assert either.evaluate({"S": 1, "H": 7}) == 7


def test_fresh_symbols_are_unequal() -> None:
    a, b = Dim.fresh(), Dim.fresh()
    assert a != b and a == a
    assert a.is_at_least(0) and not Dim.fresh(None).is_at_least(0)
    assert not (a + 1).is_known and (S + 1).is_known and not Dim.min(a, S).is_known
    assert a.evaluate({"S": 1}) is None
    # A declared name cannot be taken for one.
    assert str(Dim.symbol("?1")) == "'?1'"


def test_constants_behave_like_integers() -> None:
    assert Dim(3) == 3 and hash(Dim(3)) == hash(3) and Dim(3).const == 3
    assert 2 + S - S == 2 and 5 - Dim(2) == 3
    assert (S - S).const == 0 and S.const is None and Dim(0).is_const
    assert S != "S"
    assert product([]) == 1 and product([B, S, Dim(2)]) == 2 * B * S
    with pytest.raises(TypeError):
        S + 0.5  # type: ignore[operator]


def test_names_that_are_expressions() -> None:
    assert named("past + 1") == Dim.symbol("past") + 1
    assert named("2*batch - (a+b)") == 2 * Dim.symbol("batch") - Dim.symbol("a") - Dim.symbol("b")
    for text in ("batch size", "s//2", "Max(s, 1)", "1.5", "", "a.b", "-"):
        assert named(text) == Dim.symbol(text)


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (Dim(0), "0"),
        (B * S, "B*S"),
        (2 * S + 1, "2*S + 1"),
        (1 - S, "-S + 1"),
        (B * B - 3, "B*B - 3"),
        (Dim.min(S, 4), "min(S - 4, 0) + 4"),
        (Dim.floordiv(S, 2), "((S)//(2))"),
    ],
)
def test_printing(dim: Dim, text: str) -> None:
    assert str(dim) == text


def test_copies_are_the_same_symbols() -> None:
    dim = Dim.fresh() * S
    assert copy.deepcopy(dim) is dim and copy.copy(dim) is dim


def test_upper_bounds() -> None:
    t, s = Dim.symbol("T"), Dim.symbol("S")
    assert [Dim(4).upper, Dim.min(t, 5).upper, Dim.min(5, t).upper, (Dim.min(t, 5) + 2).upper] == [4, 5, 5, 7]
    assert {
        t.upper,
        Dim.min(s, t).upper,
        (Dim.min(t, 5) * 2).upper,
        (Dim.min(t, 5) + t).upper,
        Dim.max(t, 5).upper,
    } == {None}


@pytest.mark.parametrize("other", [0, 1])
def test_a_minimum_that_is_no_less_than_one_of_its_sizes(other: int) -> None:
    """How a minimum is written depends on which of its sizes was named first, and what is found does not."""
    sizes = Dim.symbol("named_first"), Dim.symbol("named_second")
    least, size = Dim.min(*sizes), sizes[other]
    assert least.substitute(zero_minimum((least - size) * 3)) == size
    assert zero_minimum((least - size) * B) == {} == zero_minimum(least)
