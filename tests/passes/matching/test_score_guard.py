"""The guard that asks whether a row has any score but -inf, in the ways torch's decompositions write it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, assert_same, fused, parse, random_feeds, run

NUMBERS = "<float zero = {0.0}, float low = {-inf}, int64[1] last = {-1}, int64[1] rows = {2}>"
MASKED = PRODUCT_QK + "x = Where(keep, s, low) p0 = Softmax<axis=-1>(x) "
ANY = (
    "e = Equal(x, low) n = Not(e) i = Cast<to=7>(n) m = ReduceMax<axes=[-1]>(i) a = Cast<to=9>(m) d = Not(a) "
    "p = Where(d, zero, p0) "
)
ALL = "e = Equal(x, low) i = Cast<to=1>(e) m = ReduceMin<axes=[-1]>(i) a = Cast<to=9>(m) p = Where(a, zero, p0) "
KEPT = ANY.replace("d = Not(a) p = Where(d, zero, p0)", "p = Where(a, p0, zero)")


def feeds_of(model: object, seed: int) -> dict[str, np.ndarray]:
    feeds = random_feeds(model, seed)  # type: ignore[arg-type]
    feeds["keep"][0] = False
    return feeds


@pytest.mark.parametrize("guard", [ANY, ALL, KEPT], ids=["any", "all", "kept"])
@pytest.mark.parametrize("masked", [MASKED, MASKED.replace("Where(keep, s, low)", "Add(s, b)")], ids=["select", "add"])
def test_rows_of_nothing_but_minus_infinity_are_zero(guard: str, masked: str) -> None:
    bias = "b = Where(keep, zero, low) " if "Add(s, b)" in masked else ""
    model = parse(bias + masked + guard + PRODUCT_PV, "bool[B,1,1,T] keep", initializers=NUMBERS)
    changed, report = fused(model)
    (block,) = report.blocks
    assert block.status == "fused", block
    for seed in range(3):
        feeds = feeds_of(model, seed)
        assert not run(model, feeds)[0][0].any()
        assert_same(run(changed, feeds)[0], run(model, feeds)[0], 1e-5)


def test_scores_that_overflow_to_minus_infinity() -> None:
    """Without any mask the guard still has its work."""
    model = parse(PRODUCT_QK + "x = Identity(s) p0 = Softmax<axis=-1>(x) " + ALL + PRODUCT_PV, initializers=NUMBERS)
    changed, report = fused(model)
    assert report.blocks[0].status == "fused"
    feeds = random_feeds(model)
    feeds["q"][0, 0, 0] = 3e38
    feeds["k"][0, 0] = -3e38
    wanted = run(model, feeds)[0]
    assert not wanted[0, 0, 0].any()
    assert_same(run(changed, feeds)[0], wanted, 1e-5)


LOOK_ALIKES = {
    "any of those that are -inf": ANY.replace("n = Not(e) i = Cast<to=7>(n)", "i = Cast<to=7>(e)"),
    "all of the others": ALL.replace("i = Cast<to=1>(e)", "n = Not(e) i = Cast<to=1>(n)"),
    "kept where it drops": ANY.replace("Where(d, zero, p0)", "Where(d, p0, zero)"),
    "over the rows": ANY.replace("axes=[-1]", "axes=[2]"),
    "of the scores before the mask": ANY.replace("Equal(x, low)", "Equal(s, low)"),
    "another number": ANY.replace("Equal(x, low)", "Equal(x, zero)"),
    "ones": ANY.replace("Where(d, zero, p0)", "Where(d, one, p0)"),
    "no any": "e = Equal(x, low) p = Where(e, zero, p0) ",
}


@pytest.mark.parametrize("guard", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_a_look_alike_is_declined(guard: str) -> None:
    numbers = NUMBERS.replace("<", "<float one = {1.0}, ")
    _, report = fused(parse(MASKED + guard + PRODUCT_PV, "bool[B,1,1,T] keep", initializers=numbers))
    assert report.blocks[0].status == "declined"


@pytest.mark.parametrize(
    "softmax",
    [
        "p0 = Softmax<axis=2>(x) ",
        "m0 = ReduceMax<axes=[2]>(x) d0 = Sub(x, m0) e0 = Exp(d0) t0 = ReduceSum(e0, rows) p0 = Div(e0, t0) ",
    ],
    ids=["softmax", "written out"],
)
def test_a_test_over_the_rows_of_turned_scores_is_declined(softmax: str) -> None:
    """The softmax runs over the keys, the last axis is that of the queries."""
    body = "qt = Transpose<perm=[0,1,3,2]>(q) s = MatMul(k, qt) x = Where(keep, s, low) " + softmax + ANY
    body += "pt = Transpose<perm=[0,1,3,2]>(p) " + PRODUCT_PV.replace("(p,", "(pt,")
    _, report = fused(parse(body, "bool[B,1,T,S] keep", initializers=NUMBERS))
    (block,) = report.blocks
    assert block.reason == "the guard tests the scores along another axis than the keys'"


CONSTANT = "<float[1,1] highest = {0.0}, float[2,1] mixed = {0.0, -inf}>"
DROPPED = "e = Equal(highest, low) p = Where(e, zero, p0) "
FOLDED = {"dropped": DROPPED, "kept": "e = Equal(highest, low) n = Not(e) p = Where(n, p0, zero) "}


@pytest.mark.parametrize("guard", FOLDED.values(), ids=FOLDED)
def test_a_guard_that_never_has_work(guard: str) -> None:
    """Its test is computed from constants: ONNX Runtime leaves this where the only mask is a constant 0."""
    numbers = f"{NUMBERS[:-1]}, {CONSTANT[1:]}"
    body = PRODUCT_QK + "p0 = Softmax<axis=-1>(s) " + guard + PRODUCT_PV
    model = parse(body, initializers=numbers)
    changed, report = fused(model)
    assert report.blocks[0].status == "fused"
    feeds = random_feeds(model)
    feeds["q"][0, 0, 0] = np.nan
    assert_same(run(changed, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    "guard",
    [DROPPED.replace("Where(e, zero, p0)", "Where(e, p0, zero)"), DROPPED.replace("highest", "mixed")],
    ids=["drops all", "drops some rows"],
)
def test_a_constant_guard_that_has_work(guard: str) -> None:
    numbers = f"{NUMBERS[:-1]}, {CONSTANT[1:]}"
    _, report = fused(parse(PRODUCT_QK + "p0 = Softmax<axis=-1>(s) " + guard + PRODUCT_PV, initializers=numbers))
    assert report.blocks[0].status == "declined"
