"""Terms that are added to the scores under a condition (Keras' Attention): they become terms of all scores."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

LOW = "c = Constant<value=float {1e9}>() low = Sub(s, c) "
FLAGS = "f = Cast<to=1>(m) o = Not(m) g = Cast<to=1>(o) "
CHOSEN = {
    "Keras": LOW + "x = Where(m, low, s) ",
    "kept where true": LOW + "x = Where(m, s, low) ",
    "infinite": LOW.replace("1e9", "inf") + "x = Where(m, low, s) ",
    "added": "low = Add(s, b) x = Where(m, low, s) ",
    "added in front": "low = Add(b, s) x = Where(m, low, s) ",
    "a tensor taken away": "low = Sub(s, b) x = Where(m, low, s) ",
    "tf2onnx": LOW + FLAGS + "t = Mul(f, low) u = Mul(s, g) x = Add(t, u) ",
    "tf2onnx, the scores first": LOW + FLAGS + "t = Mul(low, f) u = Mul(g, s) x = Add(u, t) ",
    "tf2onnx, kept where true": LOW + FLAGS + "t = Mul(g, low) u = Mul(s, f) x = Add(t, u) ",
    "tf2onnx, a constant mask": LOW
    + "e = Constant<value=bool[1,1,1,6] {0,1,0,0,0,1}>() f = Constant<value=float[1,1,1,6] {0,1,0,0,0,1}>() "
    "o = Not(e) g = Cast<to=1>(o) t = Mul(f, low) u = Mul(s, g) x = Add(t, u) ",
    "tf2onnx, behind a scale": "h = Constant<value=float {0.5}>() w = Mul(s, h) "
    + LOW.replace("Sub(s", "Sub(w")
    + FLAGS
    + "t = Mul(g, low) u = Mul(w, f) x = Add(t, u) ",
}
MORE = "bool[B,1,1,T] m, float[1,4,1,T] b"
PADDED = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], np.bool_).reshape(2, 1, 1, 6)


def feeds(body: str, mask: Array) -> dict[str, Array]:
    return {**random_feeds(parse(body, MORE)), "m": mask}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_term_that_is_added_under_a_condition(name: str) -> None:
    """In one batch entry each key is masked, or none, as `m` is read."""
    body = PRODUCT_QK + CHOSEN[name] + SOFTMAX.format("x") + PRODUCT_PV
    result, report = fused(parse(body, MORE))
    assert [block.status for block in report.blocks] == ["fused"]
    assert "Softmax" not in {node.op_type for node in result.graph.node}
    for mask in (PADDED, ~PADDED):
        given = feeds(body, mask)
        assert_same(run(result, given)[0], run(parse(body, MORE), given)[0], 1e-5)


MISTAKABLE = {
    "two scales": (LOW + "h = Constant<value=float {0.5}>() w = Mul(s, h) x = Where(m, low, w) ", "score_term"),
    "from the number": ("c = Constant<value=float {1e9}>() low = Sub(c, s) x = Where(m, low, s) ", "score_term"),
    "no opposite": (LOW + FLAGS.replace("Not(m)", "Identity(m)") + "t = Mul(f, low) u = Mul(s, g) x = Add(t, u) ", ""),
    "no truths": (LOW + "f = Identity(b) o = Sub(c, b) t = Mul(f, low) u = Mul(s, o) x = Add(t, u) ", ""),
    "another constant": (
        LOW + "e = Constant<value=bool[1,1,1,6] {0,1,0,0,0,1}>() f = Constant<value=float[1,1,1,6] {0,1,0,0,1,1}>() "
        "o = Not(e) g = Cast<to=1>(o) t = Mul(f, low) u = Mul(s, g) x = Add(t, u) ",
        "",
    ),
    "0 times infinity": (
        LOW.replace("1e9", "inf") + FLAGS + "t = Mul(f, low) u = Mul(s, g) x = Add(t, u) ",
        "",
    ),
    "0 times any number": ("low = Add(s, b) " + FLAGS + "t = Mul(f, low) u = Mul(s, g) x = Add(t, u) ", ""),
    "behind a mask": (
        "n = Constant<value=float {-inf}>() i = Not(m) w = Where(i, s, n) "
        + LOW.replace("Sub(s", "Sub(w")
        + FLAGS
        + "t = Mul(f, low) u = Mul(w, g) x = Add(t, u) ",
        "",
    ),
}


@pytest.mark.parametrize("name", MISTAKABLE)
def test_what_is_no_choice_of_one_addend(name: str) -> None:
    body, code = MISTAKABLE[name]
    model = parse(PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    _, report = fused(model)
    assert [block.status for block in report.blocks] == ["declined"]
    assert report.blocks[0].code == code or not code
