"""Keys that run over several dimensions of their own, such as the height and width of an image."""

from __future__ import annotations

import onnx
import pytest

from tests.passes.running import assert_same, fused, parse, random_feeds, run

INPUTS = "float[B,2,3,4,8] q, float[B,2,5,6,8] k, float[B,2,5,6,8] v"
SCORES = 'a = Einsum<equation="bnxyd,bnijd->bnxyij">(q, k) '
FLAT = "f = Constant<value=int64[5] {0,0,3,4,30}>() s = Reshape(a, f) p = Softmax<axis=-1>(s) "
APART = "g = Constant<value=int64[6] {0,0,3,4,5,6}>() r = Reshape(p, g) "
OUTPUT = "float[B,2,3,4,8] y"


def model(body: str, more: str = "", inputs: str = INPUTS, outputs: str = OUTPUT) -> onnx.ModelProto:
    return parse(body, more, inputs=inputs, outputs=outputs, opset=17)


def same(proto: onnx.ModelProto) -> str:
    """The status, after comparing the results."""
    result, report = fused(proto)
    feeds = random_feeds(proto)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 2e-5)
    (block,) = report.blocks
    return block.status if block.code is None else block.code.value


POSITIONS = "b1 = Tanh(tall) b2 = Tanh(wide) a1 = Add(a0, b1) a = Add(a1, b2) "
"""Biases that are known not to round the scores."""


@pytest.mark.parametrize(
    "values",
    [
        APART + 'y = Einsum<equation="bnxyij,bnijd->bnxyd">(r, v)',
        APART + 'y = Einsum<equation="bnijd,bnxyij->bnxyd">(v, r)',
        'h = Constant<value=int64[4] {0,0,30,8}>() w = Reshape(v, h) y = Einsum<equation="bnxyk,bnkd->bnxyd">(p, w)',
        "m = Constant<value=int64[4] {0,0,12,30}>() r = Reshape(p, m) h = Constant<value=int64[4] {0,0,30,8}>() "
        "w = Reshape(v, h) z = MatMul(r, w) o = Constant<value=int64[5] {0,0,3,4,8}>() y = Reshape(z, o)",
    ],
    ids=["over both", "operands turned", "flat values", "flat rows, too"],
)
@pytest.mark.parametrize(
    "terms",
    ["", POSITIONS, "c = Constant<value=float {0.3}>() a = Mul(a0, c) "],
    ids=["no term", "relative positions", "scaled"],
)
def test_two_dimensions_of_keys(terms: str, values: str) -> None:
    scores = SCORES.replace("a =", "a0 =") if terms else SCORES
    more = "float[B,2,3,4,5,1] tall, float[B,2,3,4,1,6] wide"
    assert same(model(scores + terms + FLAT + values, more)) == "fused"


def test_dimensions_that_change_places() -> None:
    """The values are turned where the probabilities are: sizes alone would not tell."""
    square = "float[B,2,3,4,8] q, float[B,2,5,5,8] k, float[B,2,5,5,8] v"
    flat = FLAT.replace("30}", "25}") + APART.replace("5,6}", "5,5}")
    for equation in ("bnxyij,bnijd->bnxyd", "bnxyji,bnijd->bnxyd"):
        assert same(model(SCORES + flat + f'y = Einsum<equation="{equation}">(r, v)', inputs=square)) == "fused"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (SCORES + "p = Softmax<axis=-1>(a) " + 'y = Einsum<equation="bnxyij,bnijd->bnxyd">(p, v)', "no_value_matmul"),
        (SCORES + FLAT + APART + 'y = Einsum<equation="bnxyij,bnijd->bxyd">(r, v)', "no_value_matmul"),
        (SCORES + FLAT + APART + 'y = Einsum<equation="bnxyij,bnijd->bnxyjd">(r, v)', "no_value_matmul"),
    ],
    ids=["softmax over one of them", "heads are summed up", "one of them is kept"],
)
def test_other_sums(body: str, code: str) -> None:
    rank = {"heads": "float[B,3,4,8] y", "kept": "float[B,2,3,4,6,8] y"}
    outputs = rank["heads"] if "->bxyd" in body else rank["kept"] if "->bnxyjd" in body else OUTPUT
    assert same(model(body, outputs=outputs)) == code


BOTH = (
    "axes = Constant<value=int64[2] {4,5}>() n = ReduceMax<axes=[4,5], keepdims=1>(a) d = Sub(a, n) e = Exp(d) "
    "t = ReduceSum<keepdims=1>(e, axes) r = Div(e, t) "
)
LOGARITHM = BOTH.replace("r = Div(e, t)", "l = Log(t) o = Add(l, n) u = Sub(a, o) r = Exp(u)")


@pytest.mark.parametrize("softmax", [BOTH, LOGARITHM], ids=["written out", "by its logarithm"])
@pytest.mark.parametrize("term", ["", POSITIONS, "a = Where(m, a0, low) "])
def test_a_softmax_over_two_axes(softmax: str, term: str) -> None:
    """TensorFlow writes one so, Keras' attention_axes need it."""
    scores = SCORES.replace("a =", "a0 =") + "low = Constant<value=float {-inf}>() " if term else SCORES
    more = "float[B,2,3,4,5,1] tall, float[B,2,3,4,1,6] wide, bool[B,1,1,1,5,6] m"
    # A bias may be as large as a mask's number, which the logarithm would lose.
    wanted = "score_term" if softmax is LOGARITHM and "Add" in term else "fused"
    assert same(model(scores + term + softmax + 'y = Einsum<equation="bnxyij,bnijd->bnxyd">(r, v)', more)) == wanted


@pytest.mark.parametrize(
    ("softmax", "code"),
    [
        (BOTH.replace("{4,5}", "{3,5}").replace("[4,5]", "[3,5]"), "softmax_axis"),
        (BOTH.replace("ReduceMax<axes=[4,5]", "ReduceMax<axes=[4]"), "softmax_spelling"),
        (
            BOTH.replace(
                "t = ReduceSum<keepdims=1>(e, axes)", "w = Constant<value=int64[1] {5}>() t = ReduceSum(e, w)"
            ),
            "softmax_spelling",
        ),
    ],
    ids=["a row among them", "a maximum over one", "a sum over one"],
)
def test_other_axes(softmax: str, code: str) -> None:
    proto = model(SCORES + softmax + 'y = Einsum<equation="bnxyij,bnijd->bnxyd">(r, v)')
    _, report = fused(proto)
    assert [block.code for block in report.blocks] == [code]
