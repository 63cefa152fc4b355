"""Scores and probabilities that a quantiser rounds to integers and back: the roundings go if the user says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

import fa_compiler
from fa_compiler.passes import Block
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.matching.activation_rounding import HINT as ROUNDING_ADVICE
from fa_compiler.passes.matching.scores import QUANTISED_ADVICE
from tests.passes.running import PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

CONSTANTS = (
    "step = Constant<value=float {0.04}>() fine = Constant<value=float {0.004}>() "
    "point = Constant<value=uint8 {128}>() "
    "zero = Constant<value=uint8 {0}>() c = Constant<value=float {0.3}>() low = Constant<value=float {-10000.0}>() "
)
WIDE = "wstep = Constant<value=float {0.001}>() wpoint = Constant<value=uint16 {32768}>() "


def rounded(name: str, step: str = "step", point: str = "point", domain: str = "") -> str:
    """x_ is x, rounded."""
    made = f"{name}i = {domain}QuantizeLinear({name}, {step}, {point}) "
    return made + f"{name}_ = {domain}DequantizeLinear({name}i, {step}, {point}) "


S, X, P = rounded("s"), rounded("x"), rounded("p", "fine", "zero")
BODIES = {
    "behind the product": "{S}x = Mul(s_, c) p = Softmax<axis=-1>(x) y = MatMul(p, v)",
    "behind the mask": "t = Mul(s, c) x = Where(m, t, low) {X}p = Softmax<axis=-1>(x_) y = MatMul(p, v)",
    "everywhere": "{S}t = Mul(s_, c) x = Where(m, t, low) {X}p = Softmax<axis=-1>(x_) {P}y = MatMul(p_, v)",
    "to 16 bits": "{W}t = Mul(s_, c) x = Where(m, t, low) p = Softmax<axis=-1>(x) y = MatMul(p, v)",
}


def built(body: str, dropped: bool = False) -> onnx.ModelProto:
    """The model, or without its roundings."""
    parts = {"S": S, "X": X, "P": P, "W": WIDE + rounded("s", "wstep", "wpoint", "com.microsoft.")}
    if dropped:
        parts = {"S": "s_ = Identity(s) ", "X": "x_ = Identity(x) ", "P": "p_ = Identity(p) ", "W": "s_ = Identity(s) "}
    return parse(CONSTANTS + PRODUCT_QK + body.format(**parts), "bool[S,T] m")


def block_of(model: onnx.ModelProto, *assume: str) -> Block:
    (block,) = fused(model, assume=assume)[1].blocks
    return block


@pytest.mark.parametrize("name", BODIES)
def test_what_the_hint_says(name: str) -> None:
    """The fused model gives what the model gives without the roundings."""
    model, plain = built(BODIES[name]), built(BODIES[name], dropped=True)
    block = block_of(model)
    assert block.code in ("score_term", "probability_term")
    assert f"--assume {DROP_ROUNDINGS}" in (block.hint or "")
    result, report = fused(model, assume=[DROP_ROUNDINGS])
    (block,) = report.blocks
    assert (block.status, block.assumed) == ("fused", (DROP_ROUNDINGS,))
    assert not any(node.op_type == "QuantizeLinear" for node in result.graph.node)
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(plain, feeds)[0], 1e-5)


LEFT = {
    "another scale on the way back": "si = QuantizeLinear(s, step, point) s_ = DequantizeLinear(si, fine, point) "
    "p = Softmax<axis=-1>(s_) y = MatMul(p, v)",
    "another zero point": "si = QuantizeLinear(s, step, point) s_ = DequantizeLinear(si, step, zero) "
    "p = Softmax<axis=-1>(s_) y = MatMul(p, v)",
    "integers that are read": "{S}p = Softmax<axis=-1>(s_) o = MatMul(p, v) f = Cast<to=1>(si) "
    "r = ReduceMax<keepdims=1>(f) y = Add(o, r)",
    "no scale": "none = Constant<value=float {{0.0}}>() si = QuantizeLinear(s, none, point) "
    "s_ = DequantizeLinear(si, none, point) p = Softmax<axis=-1>(s_) y = MatMul(p, v)",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_rounding(name: str) -> None:
    block = block_of(built(LEFT[name]), DROP_ROUNDINGS)
    assert block.status == "declined"
    assert DROP_ROUNDINGS not in (block.hint or "")


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ("40.0", True),
        ("0.04", False),
    ],
)
@pytest.mark.parametrize("mask", ["x = Where(m, t, low) ", "f = Cast<to=1>(m) g = Mul(f, low) x = Add(t, g) "])
def test_a_step_that_leaves_one_number(steps: str, lost: bool, mask: str) -> None:
    """An earlier rounding tells how large the scores are: between -5.12 and 5.08, times 0.3."""
    coarse = f"coarse = Constant<value=float {{{steps}}}>() "
    body = coarse + PRODUCT_QK + S + "t = Mul(s_, c) " + mask + rounded("x", "coarse") + "p = Softmax<axis=-1>(x_) "
    model = parse(CONSTANTS + body + "y = MatMul(p, v)", "bool[S,T] m")
    said = "the step of the scores to 40, and all scores, which lie between -1.54 and 1.52,"
    assert (said in (block_of(model).reason or "")) == lost
    notes = fused(model, assume=[DROP_ROUNDINGS])[1].notes
    assert any(said in note for note in notes) == lost


def test_a_step_beside_scores_of_unknown_size() -> None:
    """A bias that was rounded finely says nothing of the scores."""
    fine = "bi = QuantizeLinear(b, step, point) b_ = DequantizeLinear(bi, step, point) t = Add(s, b_) "
    coarse = "coarse = Constant<value=float {40.0}>() x = Where(m, t, low) " + rounded("x", "coarse")
    body = CONSTANTS + PRODUCT_QK + fine + coarse + "p = Softmax<axis=-1>(x_) y = MatMul(p, v)"
    assert "one number" not in (block_of(parse(body, "bool[S,T] m, float[B,4,S,T] b")).reason or "")


class Once(CalibrationDataReader):  # type: ignore[misc]
    """The inputs of one run."""

    def __init__(self, feeds: dict[str, Array]) -> None:
        self.left = [feeds]

    def get_next(self) -> dict[str, Array] | None:
        return self.left.pop() if self.left else None


def test_fused_models_are_nearer_to_the_model_before_it_was_quantised(tmp_path: Path) -> None:
    """quantize_static chooses one step for scores and masks together: a mask of -1e4 rounds all scores away. It is best
    to fuse first; to fuse afterwards without the roundings is as good here."""
    plain = built(BODIES["everywhere"], dropped=True)
    feeds = random_feeds(plain)
    (wanted,) = run(plain, feeds)

    def distance(found: Array) -> float:
        return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))

    def quantised(model: onnx.ModelProto) -> onnx.ModelProto:
        quantize_static(model, tmp_path / "quantised.onnx", Once(feeds), QuantFormat.QDQ)
        return onnx.load(tmp_path / "quantised.onnx")

    integers = quantised(plain)
    result, report = fused(integers, assume=[DROP_ROUNDINGS])
    assert report.count("fused") == 1
    # The mask of -1e4 has widened the step, which is said whether the rounding goes or not.
    assert any("are rounded to one number" in note for note in report.notes)
    assert "are rounded to one number" in (block_of(integers).reason or "")
    first = quantised(fa_compiler.optimize(plain).model)
    assert "FlashAttention" in {node.op_type for node in first.graph.node}
    # Measured: 0.41, 0.011, which the 8 bits of query, key, value and result leave, and 0: nothing else is quantised.
    assert distance(run(integers, feeds)[0]) > 0.3
    assert distance(run(result, feeds)[0]) < 0.03
    assert distance(run(first, feeds)[0]) < 0.03


STEPS = "step, point"
INTEGERS = (
    "qi = QuantizeLinear(q, step, point) ki = QuantizeLinear(kt, step, point) vi = QuantizeLinear(v, step, point) "
)
INTEGER_PRODUCT = f"si = QLinearMatMul(qi, {STEPS}, ki, {STEPS}, {STEPS}) "
INTEGER_SOFTMAX = f"pi = com.microsoft.QLinearSoftmax<axis=-1, opset=17>(xi, {STEPS}, fine, zero) "
INTEGER_RESULT = f"yi = QLinearMatMul(pi, fine, zero, vi, {STEPS}, {STEPS}) y = DequantizeLinear(yi, {STEPS}) "
SCALED = "ci = QuantizeLinear(c, fine, zero) "
ON_INTEGERS = {
    "alone": INTEGER_PRODUCT.replace("si = ", "xi = "),
    "scaled": INTEGER_PRODUCT + SCALED + f"xi = com.microsoft.QLinearMul(si, {STEPS}, ci, fine, zero, {STEPS}) ",
    "scaled, and a mask": INTEGER_PRODUCT
    + SCALED
    + f"ti = com.microsoft.QLinearMul(ci, fine, zero, si, {STEPS}, {STEPS}) "
    + f"bi = QuantizeLinear(b, {STEPS}) xi = com.microsoft.QLinearAdd(ti, {STEPS}, bi, {STEPS}, {STEPS}) ",
}


IN_FLOAT32 = f"fi = DequantizeLinear(si, {STEPS}) gi = Div(fi, two) xi = QuantizeLinear(gi, {STEPS}) "
MOVED = "wi = Unsqueeze(si, four) xi = Squeeze(wi, four) "
GUARD = (
    "pf = DequantizeLinear(pi, fine, zero) nan = IsNaN(pf) pz = Where(nan, nothing, pf) "
    "pq = QuantizeLinear(pz, fine, zero) "
)
APART = {
    "in float32": (INTEGER_PRODUCT + IN_FLOAT32, INTEGER_RESULT),
    "moved": (INTEGER_PRODUCT + MOVED, INTEGER_RESULT),
    "guarded": (INTEGER_PRODUCT.replace("si = ", "xi = "), GUARD + INTEGER_RESULT.replace("pi,", "pq,")),
    "guarded and moved": (
        INTEGER_PRODUCT + MOVED,
        GUARD + "pw = Unsqueeze(pq, four) ps = Squeeze(pw, four) " + INTEGER_RESULT.replace("pi,", "ps,"),
    ),
}
APART_CONSTANTS = (
    "two = Constant<value=float {2.0}>() nothing = Constant<value=float {0.0}>() four = Constant<value_ints=[4]>() "
)


def on_integers(body: str) -> onnx.ModelProto:
    """Attention on integers, as quantize_static writes it with QuantFormat.QOperator."""
    return parse(CONSTANTS + "kt = Transpose<perm=[0,1,3,2]>(k) " + INTEGERS + body, "float[1,1,S,T] b")


@pytest.mark.parametrize("scores", ON_INTEGERS.values(), ids=ON_INTEGERS)
def test_operators_on_integers(scores: str) -> None:
    """The hint names the word, and with it the result differs by what the roundings of the scores made of it."""
    model = on_integers(scores + INTEGER_SOFTMAX + INTEGER_RESULT)
    block = block_of(model)
    assert (block.code, block.hint) == ("dtype", ROUNDING_ADVICE)
    result, report = fused(model, assume=[DROP_ROUNDINGS])
    (after,) = report.blocks
    assert (after.status, after.assumed, after.anchor) == ("fused", (DROP_ROUNDINGS,), block.anchor)
    assert not any(node.op_type.startswith("QLinear") for node in result.graph.node)
    feeds = {name: array * np.float32(0.5) for name, array in random_feeds(model).items()}
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 0.1)


@pytest.mark.parametrize("parts", APART.values(), ids=APART)
def test_operators_on_integers_with_others_between_them(parts: tuple[str, str]) -> None:
    scores, result_of = parts
    model = on_integers(APART_CONSTANTS + scores + INTEGER_SOFTMAX + result_of)
    assert block_of(model).hint == ROUNDING_ADVICE
    result, report = fused(model, assume=[DROP_ROUNDINGS])
    assert [block.status for block in report.blocks] == ["fused"]
    assert not any(node.op_type.startswith("QLinear") for node in result.graph.node)
    feeds = {name: array * np.float32(0.5) for name, array in random_feeds(model).items()}
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 0.1)


@pytest.mark.parametrize("read", ["gi", "pz"])
def test_a_model_on_integers_that_does_not_match_stays_as_it_is(read: str) -> None:
    """The change is made first, and undone, because what is computed in float32 between the integers is an output."""
    body = INTEGER_PRODUCT + IN_FLOAT32 + INTEGER_SOFTMAX + GUARD + INTEGER_RESULT.replace("pi,", "pq,")
    body = body.replace("y = ", "o = ") + f"r = ReduceMax({read}) y = Add(o, r) "
    model = on_integers(APART_CONSTANTS + body)
    result, report = fused(model, assume=[DROP_ROUNDINGS])
    assert [block.code for block in report.blocks] == ["dtype"]
    assert [(node.op_type, *node.input) for node in result.graph.node] == [
        (node.op_type, *node.input) for node in model.graph.node
    ]


ALONE = ON_INTEGERS["alone"]
READ = INTEGER_RESULT.replace("y = ", "o = ") + "w = DequantizeLinear(pi, fine, zero) r = ReduceMax(w) y = Add(o, r) "
STAYING = {
    "another axis": ALONE + INTEGER_SOFTMAX.replace("axis=-1", "axis=2") + INTEGER_RESULT,
    "no product of integers": "x = MatMul(q, kt) xi = QuantizeLinear(x, step, point) "
    + INTEGER_SOFTMAX
    + INTEGER_RESULT,
    "probabilities that are read": ALONE + INTEGER_SOFTMAX + READ,
}


@pytest.mark.parametrize("body", STAYING.values(), ids=STAYING)
def test_operators_on_integers_that_stay(body: str) -> None:
    """Nothing of the model is changed, and no hint names the word."""
    model = on_integers(body)
    assert block_of(model).hint == QUANTISED_ADVICE
    result, report = fused(model, assume=[DROP_ROUNDINGS])
    (block,) = report.blocks
    assert (block.code, block.hint) == ("dtype", QUANTISED_ADVICE)
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in model.graph.node]


DYNAMIC = "qi, qs, qz = DynamicQuantizeLinear(q) ki, ks, kz = DynamicQuantizeLinear(kt) "
PRODUCTS_OF_INTEGERS = {
    "MatMulInteger": DYNAMIC + "m = MatMulInteger(qi, ki, qz, kz) f = Cast<to=1>(m) r = Mul(qs, ks) s = Mul(f, r) ",
    "the factor first": DYNAMIC + "m = MatMulInteger(qi, ki, qz, kz) f = Cast<to=1>(m) r = Mul(qs, ks) s = Mul(r, f) ",
    "MatMulIntegerToFloat": DYNAMIC + "s = com.microsoft.MatMulIntegerToFloat(qi, ki, qs, ks, qz, kz) ",
    "DynamicQuantizeMatMul": DYNAMIC + "s = com.microsoft.DynamicQuantizeMatMul(q, ki, ks, kz) ",
}


@pytest.mark.parametrize("name", PRODUCTS_OF_INTEGERS)
def test_scores_that_are_a_product_of_integers(name: str) -> None:
    """The product is named, and not what scales it."""
    body = "kt = Transpose<perm=[0,1,3,2]>(k) " + PRODUCTS_OF_INTEGERS[name] + "t = Mul(s, c) x = Where(m0, t, low) "
    model = parse(CONSTANTS + body + "p = Softmax<axis=-1>(x) y = MatMul(p, v)", "bool[S,T] m0")
    block = block_of(model)
    product = "MatMulInteger" if name == "the factor first" else name
    assert (block.code, block.reason) == ("dtype", f"the scores are a product of integers, by {product}")
    assert (block.culprit, block.hint) == (
        "m" if "MatMulInteger(" in PRODUCTS_OF_INTEGERS[name] else "s",
        QUANTISED_ADVICE,
    )


def test_a_classifier_on_integers_is_no_attention() -> None:
    """Its logits are a product with a weight."""
    body = "w = Constant<value=int8[8,3] {" + ",".join("1" * 24) + "}>() qi, qs, qz = DynamicQuantizeLinear(q) "
    body += "m = MatMulInteger(qi, w, qz) f = Cast<to=1>(m) s = Mul(f, qs) y = Softmax<axis=-1>(s) "
    block = block_of(parse(body, outputs="float[B,4,S,3] y"))
    assert block.code != "dtype"
