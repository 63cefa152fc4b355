"""Look-alikes of attention's gradient: each is declined and left alone, or still gives what the model gave."""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Code
from fa_compiler.passes.answer.options import Target
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import assert_same, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

BODY = {
    "kt": "kt = Transpose<perm=[0,1,3,2]>(k)",
    "s": "s = MatMul(q, kt)",
    "x": "x = Mul(s, c)",
    "m": "m = Identity(x)",
    "p": "p = Softmax<axis=-1>(m)",
    "y": "y = MatMul(p, v)",
    "pt": "pt = Transpose<perm=[0,1,3,2]>(p)",
    "dv": "dv = MatMul(pt, g)",
    "vt": "vt = Transpose<perm=[0,1,3,2]>(v)",
    "dp": "dp = MatMul(g, vt)",
    "t": "t = Mul(dp, p)",
    "r": "r = ReduceSum<keepdims=1>(t, last)",
    "u": "u = Mul(p, r)",
    "ds": "ds = Sub(t, u)",
    "dm": "dm = Identity(ds)",
    "dx": "dx = Mul(dm, c)",
    "dq": "dq = MatMul(dx, k)",
    "dxt": "dxt = Transpose<perm=[0,1,3,2]>(dx)",
    "dk": "dk = MatMul(dxt, q)",
}
NUMBERS = (
    "<float c = {0.4}, float c2 = {0.7}, int64[1] last = {-1}, int64[1] rows = {2}, float zero = {0.0}, "
    "float low = {-3.4028234663852886e38}, float two = {2.0}, float one = {1.0}>"
)
INPUTS = "float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v, float[B,4,6,8] g"
OUTPUTS = ["y", "dq", "dk", "dv"]
SELECTED = {"m": "m = Where(keep, x, low)", "dm": "dm = Where(keep, ds, zero)"}
KEEP = "bool[B,1,1,6] keep"


def model(changes: Mapping[str, str], more: str = "", outputs: tuple[str, ...] = ()) -> onnx.ModelProto:
    """The plain graph with some lines written otherwise; rows and keys are as many, so that shapes tell nothing."""
    body = " ".join({**BODY, **changes}.values())
    results = [f"float[B,4,6,8] {name}" for name in OUTPUTS] + list(outputs)
    return parse(body, more, inputs=INPUTS, outputs=", ".join(results), initializers=NUMBERS)


DECLINED = {
    "no row sum": ({"ds": "ds = Identity(t)"}, Code.TRAINING),
    "row sum over the rows": ({"r": "r = ReduceSum<keepdims=1>(t, rows)"}, Code.TRAINING),
    "row sum of the gradient alone": ({"r": "r = ReduceSum<keepdims=1>(dp, last)"}, Code.TRAINING),
    "twice the row sum": ({"u": "uu = Mul(p, r) u = Mul(uu, two)"}, Code.TRAINING),
    "the row sum added": ({"ds": "ds = Add(t, u)"}, Code.TRAINING),
    "row sums of the result squared": ({"r": "o = Mul(y, y) r = ReduceSum<keepdims=1>(o, last)"}, Code.TRAINING),
    "row sums of the result and another tensor": (
        {"r": "o = Mul(y, q) r = ReduceSum<keepdims=1>(o, last)"},
        Code.TRAINING,
    ),
    "twice the row sum from the result": (
        {"r": "y2 = Mul(y, two) o = Mul(y2, g) r = ReduceSum<keepdims=1>(o, last)"},
        Code.TRAINING,
    ),
    "probabilities squared": ({"u": "pp = Mul(p, p) u = Mul(pp, r)"}, Code.TRAINING),
    "values of another tensor": ({"vt": "vt = Transpose<perm=[0,1,3,2]>(q)"}, Code.TRAINING),
    "values in another order": ({"vt": "w = Transpose<perm=[0,1,3,2]>(v) vt = Relu(w)"}, Code.TRAINING),
    "gradient of the output changed for dv": ({"dv": "g2 = Relu(g) dv = MatMul(pt, g2)"}, Code.TRAINING),
    "dv without transposition": ({"dv": "dv = MatMul(p, g)"}, Code.TRAINING),
    "dq without the key": ({"dq": "k2 = Relu(k) dq = MatMul(dx, k2)"}, Code.TRAINING),
    "dq from the transposed gradient": ({"dq": "dz = Transpose<perm=[0,1,3,2]>(dx) dq = MatMul(dz, k)"}, Code.TRAINING),
    "dk from the gradient as it is": ({"dk": "dk = MatMul(dx, q)"}, Code.TRAINING),
    "dq and dk confused": ({"dq": "dq = MatMul(dx, q)"}, Code.TRAINING),
    "a probability squared in dv": ({"pt": "pp = Mul(p, p) pt = Transpose<perm=[0,1,3,2]>(pp)"}, Code.TRAINING),
    "dv from the scores' gradient": (
        {"dk": "dk = MatMul(dxt, q) e = Add(dk, dv)", "dv": "dv = MatMul(pt, q)"},
        Code.TRAINING,
    ),
    "a term in the gradient": ({"dm": "dm = Add(ds, c2)"}, Code.TRAINING),
    "another nonlinearity": ({"dm": "dm = Tanh(ds)"}, Code.TRAINING),
    "another softmax": ({"t": "p2 = Softmax<axis=-1>(s) t = Mul(dp, p2)"}, Code.SCORES_ARE_OUTPUT),
    "rounded to integers": ({"dm": "i = Cast<to=7>(ds) dm = Cast<to=1>(i)"}, Code.TRAINING),
    "softmax gradient over the rows": (
        {"ds": "ds = com.microsoft.SoftmaxGrad_13<axis=2>(dp, p)"},
        Code.TRAINING,
    ),
}


CAPPED = {"x": "x0 = Mul(s, c) xa = Div(x0, two) th = Tanh(xa) x = Mul(th, two)"}
"""A soft cap of 2."""
THROUGH_CAP = {
    "torch": "b = Mul(dm, two) sq = Mul(th, th) sl = Sub(one, sq) e = Mul(b, sl) f = Div(e, two) dx = Mul(f, c)",
    "a power, negated": "sq = Pow(th, two) n = Neg(sq) sl = Add(n, one) e = Mul(sl, dm) dx = Mul(e, c)",
    "jax": "gt = Mul(dm, th) gs = Add(dm, gt) sl = Sub(one, th) e = Mul(gs, sl) dx = Mul(e, c)",
    "as onnxruntime-training has it": "e = com.microsoft.TanhGrad(dm, th) dx = Mul(e, c)",
    "multiplied out": "sq = Mul(th, th) e = Mul(dm, sq) f = Sub(dm, e) dx = Mul(f, c)",
}
NOT_THROUGH_CAP = {
    "no derivative": ("dx = Mul(dm, c)", Code.TRAINING),
    "another tanh's": ("t2 = Tanh(dm) e = com.microsoft.TanhGrad(dm, t2) dx = Mul(e, c)", Code.TRAINING),
    "1 - tanh": ("sl = Sub(one, th) e = Mul(dm, sl) dx = Mul(e, c)", Code.TRAINING),
    "1 + tanh^2": ("sq = Mul(th, th) sl = Add(one, sq) e = Mul(dm, sl) dx = Mul(e, c)", Code.TRAINING),
    "2 - tanh^2": ("sq = Mul(th, th) sl = Sub(two, sq) e = Mul(dm, sl) dx = Mul(e, c)", Code.TRAINING),
    "tanh^2 - 1, of what is no tanh": (
        "sq = Mul(x, x) sl = Sub(one, sq) e = Mul(dm, sl) dx = Mul(e, c)",
        Code.SCORES_ARE_OUTPUT,
    ),
}


@pytest.mark.parametrize("name", THROUGH_CAP)
def test_gradients_of_capped_scores(name: str) -> None:
    original = model({**CAPPED, "dx": THROUGH_CAP[name]})
    changed, report = fused_pair(original)
    assert [(block.status, block.op) for block in report.blocks] == [
        ("fused", "FlashAttentionScore"),
        ("fused", "FlashAttentionScoreGrad"),
    ]
    assert all("EXT-SOFTCAP" in block.extensions for block in report.blocks)
    feeds = random_feeds(original)
    got, wanted = evaluate(changed, feeds), evaluate(original, feeds)
    for output in OUTPUTS:
        assert_close(got[output], wanted[output], 1e-5)


@pytest.mark.parametrize(("change", "code"), NOT_THROUGH_CAP.values(), ids=NOT_THROUGH_CAP)
def test_what_is_no_gradient_of_capped_scores(change: str, code: Code) -> None:
    declined(model({**CAPPED, "dx": change}), code)


def test_a_gradient_beside_a_cap_of_no_attention() -> None:
    """The derivative of a cap that the forward part does not have."""
    declined(
        model({"dx": "th = Tanh(x) sq = Mul(th, th) sl = Sub(one, sq) e = Mul(dm, sl) dx = Mul(e, c)"}),
        Code.SCORES_ARE_OUTPUT,
    )


def declined(original: onnx.ModelProto, code: Code) -> None:
    changed, report = fused_pair(original)
    assert not any(block.status == "fused" for block in report.blocks)
    assert report.blocks[0].code == code, report.blocks[0]
    assert report.blocks[0].culprit and report.blocks[0].reason
    assert changed == ir.to_proto(ir.from_proto(original)), "a declined model was changed"


@pytest.mark.parametrize(("changes", "code"), DECLINED.values(), ids=DECLINED)
def test_a_look_alike_is_declined(changes: Mapping[str, str], code: Code) -> None:
    declined(model(changes), code)


def test_a_gradient_that_is_declined_declines_its_attention() -> None:
    """Fusing the forward part alone would compute the softmax twice."""
    _, report = fused_pair(model({"dm": "dm = Tanh(ds)"}))
    assert [(block.kind, block.status, block.code, block.pair) for block in report.blocks] == [
        ("forward", "declined", Code.TRAINING, 1),
        ("backward", "declined", Code.TRAINING, 0),
    ]


def test_exponentials_that_may_overflow_are_the_reason() -> None:
    """And not those who read the probabilities, as a gradient does."""
    exponentials = "e = Exp(m) z = ReduceSum<keepdims=1>(e, last) p = Div(e, z)"
    _, report = fused_pair(model({"p": exponentials}))
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", Code.OVERFLOW)
    assert "--assume bounded-scores" in (block.hint or "")
    _, report = fused_pair(model({"p": exponentials}), assume=["bounded-scores"])
    assert [block.status for block in report.blocks] == ["fused", "fused"]


VALUES = {
    "values from their gradient": "v = Relu(dv)",
    "values and their gradient": "w = ReduceSum<keepdims=1>(dv, last) v = Add(given, w)",
    "values and their gradient in a branch": "w = ReduceSum<keepdims=1>(dv, last) b = Cast<to=9>(c) "
    "v = If (b) <then_branch = a () => (float[B,4,6,8] va) { va = Add(given, w) }, "
    "else_branch = e () => (float[B,4,6,8] ve) { ve = Sub(given, w) }>",
}


@pytest.mark.parametrize("line", VALUES.values(), ids=VALUES)
def test_values_that_are_computed_from_their_gradient_are_declined(line: str) -> None:
    """One operator for the gradients would read what it gives."""
    body = {name: BODY[name] for name in ("kt", "s", "x", "m", "p", "pt", "dv")} | {"v": line} | BODY
    original = parse(
        " ".join(body.values()),
        inputs=INPUTS.replace(" v,", " given,"),
        outputs=", ".join(f"float[B,4,6,8] {name}" for name in OUTPUTS),
        initializers=NUMBERS,
    )
    declined(original, Code.TRAINING)


def test_row_sums_along_another_dimension_are_declined() -> None:
    """With one head and one row, the sums of all batch entries can stand along the heads, and are summed over again."""
    changes = {
        "r": "w = ReduceSum<keepdims=0>(t, last) front = Constant<value=int64[1] {0}>() r = Unsqueeze(w, front)",
        "dk": "dk1 = MatMul(dxt, q) heads = Constant<value=int64[1] {1}>() dk = ReduceSum<keepdims=1>(dk1, heads)",
    }
    lines = {**BODY, **changes}
    del lines["dq"], lines["pt"], lines["dv"]
    original = parse(
        " ".join(lines.values()),
        inputs="float[2,1,1,8] q, float[2,1,6,8] k, float[2,1,6,8] v, float[2,1,1,8] g",
        outputs="float[2,1,1,8] y, float[2,1,6,8] dk",
        initializers=NUMBERS,
    )
    declined(original, Code.TRAINING)


SECOND = {
    "s": "krt = Transpose<perm=[0,1,3,2]>(kr) r2 = MatMul(qr, krt) s1 = MatMul(q, kt) s = Add(s1, r2)",
    "dk": "dk = MatMul(dxt, q) dqr = MatMul(dx, kr)",
}


@pytest.mark.parametrize(("line", "fused"), [("MatMul(dxt, qr)", True), ("MatMul(qr, dx)", False)])
def test_the_depth_of_a_second_product_is_not_the_rows(line: str, fused: bool) -> None:
    """Both are 6 here, so that the sum over either is a product that runs."""
    original = parse(
        " ".join({**BODY, **SECOND, "last": f"dkr = {line}"}.values()),
        "float[B,4,6,6] qr, float[B,4,6,6] kr",
        inputs=INPUTS,
        outputs=", ".join(
            [*(f"float[B,4,6,8] {name}" for name in OUTPUTS), "float[B,4,6,6] dqr", "float[B,4,6,6] dkr"]
        ),
        initializers=NUMBERS,
    )
    if not fused:
        declined(original, Code.TRAINING)
        return
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    feeds = random_feeds(original)
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


MASKS = {
    "another mask": {"dm": "dm = Where(other, ds, zero)"},
    "the mask turned round": {"dm": "dm = Where(keep, zero, ds)"},
    "the mask negated": {"dm": "drop = Not(keep) dm = Where(drop, ds, zero)"},
    "ones instead of zeros": {"dm": "dm = Where(keep, ds, one)"},
    "the mask along the rows": {"dm": "turned = Transpose<perm=[0,1,3,2]>(keep) dm = Where(turned, ds, zero)"},
    "a selection beside an addend": {
        "m": "b = Where(keep, zero, low) m = Add(x, b)",
        "dm": "dm = Where(keep, ds, zero)",
    },
}


@pytest.mark.parametrize("changes", MASKS.values(), ids=MASKS)
def test_a_mask_that_is_not_the_forward_parts_is_declined(changes: Mapping[str, str]) -> None:
    """An addend's mask counts as foreign, too: it says nothing about the gradient of a row that it masks whole."""
    declined(model({**SELECTED, **changes}, f"{KEEP}, bool[B,1,1,6] other"), Code.TRAINING)


ZEROS_TIMES_ROWS = {
    "of the probabilities' gradient": {"t": "dz = Where(keep, dp, zero) t = Mul(dz, p)"},
    "of the difference": {"u": "d0 = Sub(dp, r) d1 = Where(keep, d0, zero)", "ds": "ds = Mul(d1, p)"},
    "of the scores' gradient, as tf2onnx writes it": {
        "dm": "b = Cast<to=1>(keep) d0 = Mul(b, ds) n = Not(keep) nb = Cast<to=1>(n) z = Mul(zero, nb) dm = Add(d0, z)"
    },
}


@pytest.mark.parametrize("changes", ZEROS_TIMES_ROWS.values(), ids=ZEROS_TIMES_ROWS)
@pytest.mark.parametrize("low", ["-inf", "-3.4028234663852886e38", "-2.0"])
def test_zeros_that_are_multiplied_by_the_probabilities_of_an_empty_row(changes: Mapping[str, str], low: str) -> None:
    """With -inf these are NaN, and so is the gradient; otherwise they are the mean, and the gradient is zero. Of -2 the
    masked keys have a share."""
    lines = {"kt": f"low2 = Constant<value=float {{{low}}}>() {BODY['kt']}", "m": "m = Where(keep, x, low2)"}
    original = model({**lines, **changes}, KEEP)
    if low == "-2.0" and "t" in changes:
        declined(original, Code.MASK_VALUE)  # the row sums are without the masked keys
    else:
        fused_with_an_empty_row(original)


ZEROED_BY_BOTH = {
    "Where first": "d0 = Where(other, ds, zero) dm = Mul(d0, kf)",
    "Mul first": "d0 = Mul(ds, kf) dm = Where(other, d0, zero)",
    "Where last": "d0 = Mul(ds, kf) d1 = Mul(d0, of) dm = Where(keep, d1, zero)",
    "Mul alone": "d0 = Mul(ds, kf) dm = Mul(d0, of)",
    "Mul between": "d0 = Mul(ds, kf) d1 = Where(keep, d0, zero) dm = Where(other, d1, zero)",
}


@pytest.mark.parametrize("low", ["-inf", "-2.0"])
@pytest.mark.parametrize("name", ZEROED_BY_BOTH)
def test_zeros_of_which_some_are_products(name: str, low: str) -> None:
    """In a row whose probabilities are NaN the products are NaN, and the zeros of a Where are not."""
    lines = f"low2 = Constant<value=float {{{low}}}>() kf = Cast<to=1>(keep) of = Cast<to=1>(other)"
    changes = {"m": f"{lines} m0 = Where(keep, x, low2) m = Where(other, m0, low2)", "dm": ZEROED_BY_BOTH[name]}
    original = model(changes, f"{KEEP}, bool[B,1,1,6] other")
    if low == "-inf" and name in ("Where first", "Mul first", "Where last"):
        declined(original, Code.EMPTY_ROWS)
    else:
        fused_with_an_empty_row(original)


def fused_with_an_empty_row(original: onnx.ModelProto) -> None:
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    feeds = random_feeds(original)
    feeds["keep"][0] = False
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


CAUSAL = "tri = Constant<value=bool[6,6] {1,0,0,0,0,0,1,1,0,0,0,0,1,1,1,0,0,0,1,1,1,1,0,0,1,1,1,1,1,0,1,1,1,1,1,1}>()"
PADDED = (
    f"{CAUSAL} low2 = Constant<value=float {{LOW}}>() pad = Constant<value=float {{PAD}}>() "
    "kf = Cast<to=1>(keep) n = Sub(one, kf) padding = Mul(n, pad)"
)
SELECTED_AND_ADDED = {
    "m": f"{PADDED} m0 = Where(tri, x, low2) m = Add(m0, padding)",
    "dm": "dm = Where(tri, ds, zero)",
}
BLENDED_AND_ADDED = {
    "m": f"{PADDED} b = Cast<to=1>(tri) nt = Not(tri) nb = Cast<to=1>(nt) fill = Mul(low2, nb) xb = Mul(x, b) "
    "m0 = Add(xb, fill) m = Add(m0, padding)",
    "dm": "dm = Mul(ds, b)",
}
"""GPT-2's masks: a causal one that puts a number in place of the scores, and padding that adds one."""


def padded(changes: Mapping[str, str], low: str, pad: str, more: str = KEEP) -> onnx.ModelProto:
    return model({name: line.replace("LOW", low).replace("PAD", pad) for name, line in changes.items()}, more)


@pytest.mark.parametrize(
    ("changes", "low", "pad"),
    [
        (SELECTED_AND_ADDED, "-1e4", "-1e4"),
        (SELECTED_AND_ADDED, "-2.0", "-3.0"),
        (SELECTED_AND_ADDED, "-inf", "-1e4"),
        (SELECTED_AND_ADDED, "-3.4028234663852886e38", "-3.4028234663852886e38"),
        (BLENDED_AND_ADDED, "-1e4", "-1e4"),
    ],
)
def test_masked_keys_keep_what_is_added_to_their_number(changes: Mapping[str, str], low: str, pad: str) -> None:
    """As in GPT-2 by onnxruntime-training and by tf2onnx. A row whose keys are all padding gives all keys a share."""
    original = padded(changes, low, pad)
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    assert all("EXT-MASKED-BIAS" in block.extensions for block in report.blocks)
    feeds = random_feeds(original)
    feeds["keep"][0] = False
    feeds["keep"][1, ..., 0] = False
    wanted = evaluate(original, feeds)
    for got in (evaluate(changed, feeds), named(changed, run(changed, feeds))):
        for name, value in wanted.items():
            assert_close(got[name], value, 2e-5)


OTHER_GRADIENTS = {
    "the mask is not the gradient's": ({**SELECTED_AND_ADDED, "dm": BODY["dm"]}, "-1e4", "-2.0", Code.MASK_VALUE),
    "nor is it of a number that outweighs": ({**SELECTED_AND_ADDED, "dm": BODY["dm"]}, "-1e38", "-2.0", None),
    "zeros times a row that may be -inf everywhere": (BLENDED_AND_ADDED, "-3e38", "-3e38", Code.EMPTY_ROWS),
    "zeros times a row that may be NaN": (
        {**BLENDED_AND_ADDED, "m": f"{BLENDED_AND_ADDED['m'].replace('padding)', 'given)')}"},
        "-1e4",
        "-2.0",
        Code.MASK_VALUE,
    ),
}


@pytest.mark.parametrize(("changes", "low", "pad", "code"), OTHER_GRADIENTS.values(), ids=OTHER_GRADIENTS)
def test_masked_keys_whose_number_the_gradient_does_not_leave_out(
    changes: Mapping[str, str], low: str, pad: str, code: Code | None
) -> None:
    """Then the mask is a bias, if its number is one that outweighs the scores."""
    original = padded(changes, low, pad, f"{KEEP}, float[B,1,1,6] given")
    if code is not None:
        declined(original, code)
        return
    changed, report = fused_pair(original)
    assert [block.mask for block in report.blocks] == ["real_shift", "real_shift"]
    feeds = random_feeds(original)
    wanted, got = evaluate(original, feeds), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


@pytest.mark.parametrize("number", ["-2.0", "-1e4", "-1e30"])
def test_gradients_of_scores_that_are_multiplied_by_the_mask(number: str) -> None:
    """As GPT-1 and TensorFlow's GPT-2 mask: w * b + number * (1 - b)."""
    masked = f"n = Constant<value=float {{{number}}}>() b = Cast<to=1>(keep) xb = Mul(x, b) nb = Sub(one, b)"
    changes = {"m": f"{masked} f = Mul(nb, n) m = Add(xb, f)", "dm": "dm = Mul(ds, b)"}
    fused_with_an_empty_row(model(changes, KEEP))


FACTORS = {
    "another mask": "b = Cast<to=1>(other)",
    "the opposite of the mask": "n = Not(keep) b = Cast<to=1>(n)",
    "numbers besides 0 and 1": "b0 = Cast<to=1>(keep) b = Mul(b0, two)",
}


@pytest.mark.parametrize("line", FACTORS.values(), ids=FACTORS)
def test_a_factor_that_is_not_the_mask_is_declined(line: str) -> None:
    changes = {"m": SELECTED["m"], "dm": f"{line} dm = Mul(ds, b)"}
    declined(model(changes, f"{KEEP}, bool[B,1,1,6] other"), Code.TRAINING)


COMPUTED_TWICE = {
    "in the same way": ("And(keep, other)", "And(keep, other)"),
    "by another operator": ("And(keep, other)", "Or(keep, other)"),
    "from another operand": ("And(keep, other)", "And(keep, keep)"),
    "with another attribute": ("Trilu<upper=0>(square)", "Trilu<upper=1>(square)"),
    "from a zero of another sign": ("Greater(up, half)", "Greater(down, half)"),
    "from a made zero of another sign": ("Greater(over, half)", "Greater(under, half)"),
    "with a zero of another sign as attribute": ("Greater(above, half)", "Greater(below, half)"),
    "by chance": ("Bernoulli<dtype=9>(chance)", "Bernoulli<dtype=9>(chance)"),
}


@pytest.mark.parametrize(("first", "second"), COMPUTED_TWICE.values(), ids=COMPUTED_TWICE)
def test_masks_that_are_computed_twice(first: str, second: str) -> None:
    """jax2onnx writes one mask twice, once for the gradient. It is one if the same operators compute it."""
    lines = (
        "one_size = Constant<value=int64[1] {1}>() half = Constant<value=float {0.5}>() f = Cast<to=1>(keep) "
        "chance = Mul(f, half) "
        "minus = Constant<value=float {-0.0}>() up = Div(f, zero) down = Div(f, minus) "
        "z1 = ConstantOfShape<value=float[1] {0.0}>(one_size) z2 = ConstantOfShape<value=float[1] {-0.0}>(one_size) "
        "over = Div(f, z1) under = Div(f, z2) less = Neg(f) "
        "e1 = Elu<alpha=0.0>(less) e2 = Elu<alpha=-0.0>(less) above = Div(half, e1) below = Div(half, e2)"
    )
    original = model(
        {"m": f"{lines} w1 = {first} m = Where(w1, x, low)", "dm": f"w2 = {second} dm = Where(w2, ds, zero)"},
        f"{KEEP}, bool[B,1,1,6] other, bool[B,1,6,6] square",
    )
    if (first, second) == COMPUTED_TWICE["in the same way"]:
        fused_with_an_empty_row(original)
    else:
        declined(original, Code.TRAINING)


BY_EXPONENTIALS = {
    "p": "mx = ReduceMax<axes=[-1], keepdims=1>(m) sh = Sub(m, mx) e = Exp(sh) z = ReduceSum<keepdims=1>(e, last) "
    "p = Div(e, z)",
    "t": "dz = Div(dp, z) t = Mul(dz, e)",
    "u": "rz = Div(r, z) u = Mul(e, rz)",
}


def test_the_reason_is_what_keeps_both_from_being_fused() -> None:
    """And not that the probabilities are read twice: as in jax's gradients, only products read them here."""
    original = model({**BY_EXPONENTIALS, "m": "m = Where(keep, x, two)", "dm": SELECTED["dm"]}, KEEP)
    assert [block.status for block in fused_pair(original)[1].blocks] == ["fused", "fused"]
    (block,) = fused_pair(original, "ascend")[1].blocks
    assert (block.code, block.culprit) == (Code.MASK_VALUE, "m")


FIRST = "kept = Constant<value=bool[1,1,1,6] {1,1,0,1,1,0}>()"
TWICE = "again = Constant<value=bool[1,1,1,6] {1,1,0,1,1,0}>() dm = Where(again, ds, zero)"


def test_a_constant_mask_that_is_written_twice_is_one() -> None:
    """As jax2onnx writes it, which sums over a size of 1 as well."""
    changes = {
        "m": f"{FIRST} m = Where(kept, x, low)",
        "dm": TWICE,
        "u": "r1 = ReduceSum<keepdims=1>(r, last) u = Mul(p, r1)",
    }
    original = model(changes)
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    feeds = random_feeds(original)
    for got, wanted in zip(run(changed, feeds), run(original, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize(("old", "new"), [("{1,1,0,1,1,0}", "{1,1,0,1,1,1}"), ("bool[1,1,1,6]", "bool[1,1,6,1]")])
def test_a_constant_mask_of_other_content_or_shape_is_another(old: str, new: str) -> None:
    declined(model({"m": f"{FIRST} m = Where(kept, x, low)", "dm": TWICE.replace(old, new)}), Code.TRAINING)


def test_a_mask_that_repeats_a_single_row_is_declined() -> None:
    """Of one row it makes two in the gradient alone, and each counts in the sums over the rows."""
    wide = "twice = Constant<value=int64[4] {1,1,2,1}>() wide = Expand(keep, twice) dm = Where(wide, ds, zero)"
    einsum = 'dk = Einsum<equation="bnij,bnik->bnjk">(dx, q)'
    lines = {**BODY, **SELECTED, "dm": wide, "dxt": "", "dk": einsum, "pt": "", "dv": ""}
    inputs = "float[B,4,S,8] q, float[B,4,6,8] k, float[B,4,6,8] v, float[B,4,S,8] g"
    outputs = "float[B,4,S,8] y, float[B,4,6,8] dk"
    body = " ".join(line for name, line in lines.items() if name != "dq")
    declined(parse(body, KEEP, inputs=inputs, outputs=outputs, initializers=NUMBERS), Code.TRAINING)


@pytest.mark.parametrize("perm", ["3,0,1,2", "3,1,0,2"])
def test_heads_of_a_product_that_are_walked_twice(perm: str) -> None:
    """With the heads of the query beside its rows, each of them meets each head of the scores' gradient, and the sum
    over the latter is no gradient of the key."""
    einsum = 'dk = Einsum<equation="bnij,bnik->bjk">(dx, q)'
    if perm == "3,0,1,2":
        einsum = "heads = Constant<value=int64[1] {1}>() w = MatMul(qt, dx) dk = ReduceSum<keepdims=1>(w, heads)"
    lines = {**BODY, "pt": "", "dv": "", "dxt": f"qt = Transpose<perm=[{perm}]>(q)", "dk": einsum}
    inputs = "float[1,2,6,8] q, float[1,1,6,8] k, float[1,1,6,8] v, float[1,2,6,8] g"
    shape = "float[8,1,2,6]" if "MatMul" in einsum else "float[1,6,8]"
    outputs = f"float[1,2,6,8] y, float[1,2,6,8] dq, {shape} dk"
    original = parse(" ".join(lines.values()), inputs=inputs, outputs=outputs, initializers=NUMBERS)
    changed, report = fused_pair(original)
    assert {block.status for block in report.blocks} == {"declined" if "MatMul" in einsum else "fused"}
    feeds = random_feeds(original)
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


FACTORS = {
    "of each head on the probabilities": {
        "y": "ph = Mul(p, h) y = MatMul(ph, v)",
        "pt": "pt = Transpose<perm=[0,1,3,2]>(ph)",
        "dp": "dh = MatMul(g, vt) dp = Mul(dh, h)",
    },
    "of each head on the probabilities of the forward part only": {"y": "ph = Mul(p, h) y = MatMul(ph, v)"},
    "of each head on the scores": {"x": "x = Mul(s, h)", "dx": "dx = Mul(dm, h)"},
    "of each head on the query": {
        "s": "qh = Mul(q, h) s = MatMul(qh, kt)",
        "dq": "dqh = MatMul(dx, k) dq = Mul(dqh, h)",
        "dk": "dk = MatMul(dxt, qh)",
    },
}


@pytest.mark.parametrize("changes", FACTORS.values(), ids=FACTORS)
def test_a_factor_that_is_no_number(changes: Mapping[str, str]) -> None:
    """On the query before the product it is the query's own affair."""
    original = model({"kt": f"h = Sigmoid(h0) {BODY['kt']}", **changes}, "float[4,1,1] h0")
    changed, report = fused_pair(original)
    if report.blocks[0].status != "fused":
        assert changed == ir.to_proto(ir.from_proto(original)), "a declined model was changed"
        return
    feeds = random_feeds(original)
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


TOLD = {
    "one number on the probabilities": (
        {"y": "ph = Mul(p, c2) y = MatMul(ph, v)", "pt": "pt = Transpose<perm=[0,1,3,2]>(ph)"}
        | {"dp": "dh = MatMul(g, vt) dp = Mul(dh, c2)"},
        "a factor behind the softmax",
    ),
    "of each head on the scores": (
        FACTORS["of each head on the scores"],
        "a factor on the scores that is no number known before the run",
    ),
}


@pytest.mark.parametrize(("changes", "told"), TOLD.values(), ids=TOLD)
def test_what_is_said_of_a_factor(changes: Mapping[str, str], told: str) -> None:
    original = model({"kt": f"h = Sigmoid(h0) {BODY['kt']}", **changes}, "float[4,1,1] h0")
    assert f"the gradient of an attention with {told} is not fused" in (fused_pair(original)[1].blocks[0].reason or "")


READ_ELSEWHERE = [
    ("p", Code.PROBABILITIES_ARE_OUTPUT),
    ("ds", Code.TRAINING),
    ("dx", Code.TRAINING),
    ("dp", Code.TRAINING),
    ("t", Code.TRAINING),
    ("s", Code.SCORES_ARE_OUTPUT),
    ("pt", Code.TRAINING),
]


@pytest.mark.parametrize(("value", "code"), READ_ELSEWHERE)
@pytest.mark.parametrize("how", ["output", "reader"])
def test_inner_values_that_are_needed_elsewhere(value: str, code: Code, how: str) -> None:
    shape = "[B,4,6,6]"
    if how == "output":
        declined(model({}, outputs=(f"float{shape} {value}",)), code)
        return
    if value == "p":
        code = Code.TRAINING
    declined(model({"dk": f"{BODY['dk']} z = Relu({value})"}, outputs=(f"float{shape} z",)), code)


def test_a_bias_that_needs_a_gradient() -> None:
    changes = {"m": "m = Add(x, b)", "dk": f"{BODY['dk']} db = ReduceSum<keepdims=1>(ds, first)"}
    original = model(
        {**changes, "kt": f"first = Constant<value_ints=[0]>() {BODY['kt']}"},
        "float[1,4,6,6] b",
        ("float[1,4,6,6] db",),
    )
    _, report = fused_pair(original)
    assert [block.code for block in report.blocks] == [Code.BIAS_GRADIENT] * 2
    assert "db" in (report.blocks[0].reason or "") and report.blocks[0].hint
    declined(original, Code.BIAS_GRADIENT)


STILL_RIGHT = {
    "plain": {},
    "another factor on one branch": {"dx": "dx = Mul(dm, c) dx2 = Mul(dm, c2)", "dq": "dq = MatMul(dx2, k)"},
    "no factor at all": {"dx": "dx = Identity(dm)"},
    "a factor behind": {"dx": "dx = Identity(dm)", "dq": "d1 = MatMul(dx, k) dq = Mul(d1, c)"},
    "a negative gradient": {"ds": "ds = Sub(u, t)"},
    "the gradient of the output scaled": {"dp": "g2 = Mul(g, two) dp = MatMul(g2, vt)"},
    "the value scaled": {"vt": "v2 = Div(v, two) vt = Transpose<perm=[0,1,3,2]>(v2)"},
    "nobody reads a gradient of the mask": {
        "dk": f"{BODY['dk']} dead = ReduceSum<keepdims=1>(ds, last) dead2 = Relu(dead)"
    },
    "a shape is asked for": {"dk": f"{BODY['dk']} shape = Shape(ds) n = ReduceMax<keepdims=0>(shape)"},
    "in double precision": {
        "ds": "t2 = Cast<to=11>(t) u2 = Cast<to=11>(u) d2 = Sub(t2, u2) ds = Cast<to=1>(d2)",
    },
    "as onnxruntime-training has it": {"ds": "ds = com.microsoft.SoftmaxGrad_13<axis=-1>(dp, p)"},
    "as one sum of three": {"ds": "minus = Neg(u) ds = Sum(t, minus)"},
    "the key through another transposition": {"dq": "kk = Transpose<perm=[0,1,3,2]>(kt) dq = MatMul(dx, kk)"},
    "the gradients transposed": {
        "dq": "kz = Transpose<perm=[0,1,3,2]>(k) dz = MatMul(kz, dxt2) dq = Transpose<perm=[0,1,3,2]>(dz)",
        "dx": "dx = Mul(dm, c) dxt2 = Transpose<perm=[0,1,3,2]>(dx)",
    },
    "the same product twice": {"dk": f"{BODY['dk']} again = MatMul(dx, k)", "dq": "dq = MatMul(dx, k)"},
    "the row sums from the result": {"r": "o = Mul(y, g) r = ReduceSum<keepdims=1>(o, last)"},
    "the row sums from multiples in another layout": {
        "r": "g3 = Mul(g, two) g2 = Transpose<perm=[0,2,1,3]>(g3) y2 = Transpose<perm=[0,2,1,3]>(y) o = Mul(g2, y2) "
        "r2 = ReduceSum<keepdims=1>(o, last) r3 = Div(r2, two) r = Transpose<perm=[0,2,1,3]>(r3)"
    },
    "by einsum with another order of axes": {"dk": 'dk = Einsum<equation="bnst,bnsd->bntd">(dx, q)'},
}


@pytest.mark.parametrize("changes", STILL_RIGHT.values(), ids=STILL_RIGHT)
def test_what_can_be_expressed_is_fused(changes: Mapping[str, str]) -> None:
    """Any factor is kept: what the graph computes need not be the gradient."""
    outputs = {"a shape is asked for": ("int64 n",), "the same product twice": ("float[B,4,6,8] again",)}
    name = next(key for key, value in STILL_RIGHT.items() if value is changes)
    original = model(changes, outputs=outputs.get(name, ()))
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    assert not {node.op_type for node in changed.graph.node} & {"Softmax", "MatMul", "Einsum", "SoftmaxGrad_13"}
    for seed in range(3):
        feeds = random_feeds(original, seed)
        wanted = evaluate(original, feeds) if "onnxruntime-training" in name else named(original, run(original, feeds))
        for output, value in wanted.items():
            assert_close(evaluate(changed, feeds)[output], value, 1e-5)


def agree(original: onnx.ModelProto, changed: onnx.ModelProto) -> None:
    """The same with rows that are masked everywhere."""
    for seed in range(4):
        feeds = random_feeds(original, seed)
        feeds["keep"][0] = False
        wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
        for name, value in wanted.items():
            assert_close(got[name], value, 1e-5)


NOT_SO_LOW = "<float lowish = {-1.5}, float c = {0.4}, int64[1] last = {-1}, float zero = {0.0}>"
VALUED = {
    "the gradient masked": ({}, True),
    "the row sums from the result": ({"r": "o = Mul(y, g) r = ReduceSum<keepdims=1>(o, last)"}, True),
    "the gradient not masked": ({"dm": "dm = Identity(ds)"}, False),
    "masked before the row sum": ({"dp": "dp0 = MatMul(g, vt) dp = Where(keep, dp0, zero)"}, False),
    "masked before the row sum only": (
        {"dp": "dp0 = MatMul(g, vt) dp = Where(keep, dp0, zero)", "dm": "dm = Identity(ds)"},
        False,
    ),
    "masked probabilities": ({"pt": "pk = Where(keep, p, zero) pt = Transpose<perm=[0,1,3,2]>(pk)"}, False),
}


@pytest.mark.parametrize(("changes", "expressible"), VALUED.values(), ids=VALUED)
def test_masked_keys_that_keep_a_probability(changes: Mapping[str, str], expressible: bool) -> None:
    """The number that masked scores become is no lower than other scores."""
    body = {**BODY, "m": "m = Where(keep, x, lowish)", "dm": "dm = Where(keep, ds, zero)", **changes}
    results = ", ".join(f"float[B,4,6,8] {name}" for name in OUTPUTS)
    original = parse(" ".join(body.values()), KEEP, inputs=INPUTS, outputs=results, initializers=NOT_SO_LOW)
    if not expressible:
        declined(original, Code.MASK_VALUE)
        return
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    assert "EXT-MASK-VALUE" in report.blocks[1].extensions
    agree(original, changed)


BIASED = {
    "a selection before a bias": {
        "m": "m0 = Where(keep, x, low) tb = Tanh(b) m = Add(m0, tb)",
        "dm": "dm = Identity(ds)",
    },
    "a selection behind a bias": {"m": "m0 = Add(x, b) m = Where(keep, m0, low)", "dm": "dm = Where(keep, ds, zero)"},
}


@pytest.mark.parametrize("changes", BIASED.values(), ids=BIASED)
def test_selections_beside_a_bias(changes: Mapping[str, str]) -> None:
    original = model(changes, f"{KEEP}, float[1,4,6,6] b")
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    agree(original, changed)


def test_a_bias_behind_a_selection_that_may_cancel_its_number() -> None:
    """The gradient of masked keys is computed like any other's, so they would have to be attended."""
    changes = {"m": "m0 = Where(keep, x, low) m = Add(m0, b)", "dm": "dm = Identity(ds)"}
    declined(model(changes, f"{KEEP}, float[1,4,6,6] b"), Code.MASK_VALUE)


def test_a_selection_that_becomes_a_bias_cannot_zero_a_row() -> None:
    """On Ascend. For ONNX Runtime masked keys keep their number and what is added to it."""
    changes = {"m": "m0 = Where(keep, x, low) tb = Tanh(b) m = Add(m0, tb)", "dm": "dm = Where(keep, ds, zero)"}
    original = model(changes, f"{KEEP}, float[1,4,6,6] b")
    assert [block.code for block in fused_pair(original, "ascend")[1].blocks] == [Code.EMPTY_ROWS] * 2
    fused_with_an_empty_row(original)


DECOMPOSED = {
    "p": "mx = ReduceMax<axes=[-1],keepdims=0>(m) mx1 = Unsqueeze(mx, last) sh = Shape(m) mxe = Expand(mx1, sh) "
    "e0 = Sub(m, mxe) e = Exp(e0) l = ReduceSum<keepdims=0>(e, last) l1 = Unsqueeze(l, last) le = Expand(l1, sh) "
    "p = Div(e, le)",
    "r": "r0 = ReduceSum<keepdims=0>(b1, last)",
    "u": "r1 = Unsqueeze(r0, last) u = Expand(r1, sh)",
    "ds": "de = Add(a, u) ds = Mul(de, e)",
}
BY_QUOTIENTS = {
    "over the square": "a = Div(dp, le) ge = Mul(dp, e) l2 = Mul(le, le) b0 = Div(ge, l2) b1 = Neg(b0)",
    "by a power": "n2 = Constant<value = float {-2.0}>() a = Div(dp, l1) ge = Mul(dp, e) ng = Neg(ge) l2 = Pow(l1, n2) "
    "b1 = Mul(ng, l2)",
    "one over the square": "l2i = Mul(l1, l1) l2 = Div(one, l2i) a = Div(dp, l1) ge = Mul(dp, e) ng = Neg(ge) "
    "b1 = Mul(ng, l2)",
    "by reciprocals": "inv = Reciprocal(l1) a = Mul(dp, inv) ge = Mul(dp, e) i2 = Mul(inv, inv) b0 = Mul(ge, i2) "
    "b1 = Neg(b0)",
}


@pytest.mark.parametrize("line", BY_QUOTIENTS.values(), ids=BY_QUOTIENTS)
def test_the_gradient_of_a_quotient(line: str) -> None:
    """As jax differentiates exp(s - max) / sum: through the division and through the exponential."""
    original = model({**DECOMPOSED, "t": line})
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    feeds = random_feeds(original)
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


QUOTIENTS_GONE_WRONG = {
    "over the sum, not its square": "a = Div(dp, le) ge = Mul(dp, e) b0 = Div(ge, le) b1 = Neg(b0)",
    "over the cube": "a = Div(dp, le) ge = Mul(dp, e) l2 = Mul(le, le) l3 = Mul(l2, le) b0 = Div(ge, l3) b1 = Neg(b0)",
    "by a power of NaN": "n2 = Constant<value_float = nan>() a = Div(dp, l1) ge = Mul(dp, e) ng = Neg(ge) "
    "l2 = Pow(l1, n2) b1 = Mul(ng, l2)",
    "by an endless power": "n2 = Constant<value_float = inf>() a = Div(dp, l1) ge = Mul(dp, e) ng = Neg(ge) "
    "l2 = Pow(l1, n2) b1 = Mul(ng, l2)",
    "without the sign": "a = Div(dp, le) ge = Mul(dp, e) l2 = Mul(le, le) b1 = Div(ge, l2)",
}


@pytest.mark.parametrize("line", QUOTIENTS_GONE_WRONG.values(), ids=QUOTIENTS_GONE_WRONG)
def test_the_gradient_of_another_quotient(line: str) -> None:
    declined(model({**DECOMPOSED, "t": line}), Code.TRAINING)


def layer(number: int, query: str, key: str, value: str, gradient: str) -> tuple[str, str]:
    """The forward and the backward lines of one of several attentions."""
    own = {name: f"{name}{number}" for name in BODY} | {"q": query, "k": key, "v": value, "g": gradient}
    lines = {
        name: re.sub(r"\b[a-z]+\b(?!=)", lambda found: own.get(found[0], found[0]), line) for name, line in BODY.items()
    }
    before = ("kt", "s", "x", "m", "p", "y")
    return " ".join(lines[name] for name in before), " ".join(lines[name] for name in lines if name not in before)


def test_two_layers() -> None:
    """What one gradient gives goes into the next; the second attention reads one tensor three times."""
    first, second = layer(0, "q", "k", "v", "total"), layer(1, "y0", "y0", "y0", "g")
    body = f"{first[0]} {second[0]} {second[1]} part = Add(dq1, dk1) total = Add(part, dv1) {first[1]}"
    outputs = "float[B,4,6,8] y1, float[B,4,6,8] dq0, float[B,4,6,8] dk0, float[B,4,6,8] dv0"
    original = parse(body, inputs=INPUTS, outputs=outputs, initializers=NUMBERS)
    changed, report = fused_pair(original)
    assert [(block.kind, block.status, block.pair) for block in report.blocks] == [
        ("forward", "fused", 1),
        ("backward", "fused", 0),
        ("forward", "fused", 3),
        ("backward", "fused", 2),
    ]
    feeds = random_feeds(original)
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


SAME_MASK = {
    "the forward part's": "dm = Where(keep, ds, zero)",
    "negated twice": "drop = Not(keep) dm = Where(drop, zero, ds)",
    "cast to and fro": "flag = Cast<to=9>(keep) dm = Where(flag, ds, zero)",
    "with a tensor of zeros": "zeros = Constant<value = float[1,1,1,6] {0,0,0,0,0,0}>() dm = Where(keep, ds, zeros)",
}


@pytest.mark.parametrize("line", SAME_MASK.values(), ids=SAME_MASK)
def test_the_forward_parts_mask_in_other_words(line: str) -> None:
    original = model({**SELECTED, "dm": line}, KEEP)
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    agree(original, changed)


def test_an_attention_of_its_own_scores() -> None:
    """Query, key and value are one tensor: each product is told by what it sums over."""
    own = {
        name: line.replace("(q, ", "(k, ").replace("(p, v)", "(p, k)").replace("(v)", "(k)").replace(", q)", ", k)")
        for name, line in BODY.items()
    }
    original = model(own)
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused", "fused"], report.blocks[0]
    feeds = random_feeds(original)
    wanted, got = named(original, run(original, feeds)), evaluate(changed, feeds)
    for name, value in wanted.items():
        assert_close(got[name], value, 1e-5)


def test_probabilities_read_by_something_else_than_a_gradient() -> None:
    """No gradient at all: the reason is the ordinary one."""
    body = (
        "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v) "
        "z = ReduceMax<axes=[-1]>(p)"
    )
    _, report = fused_pair(parse(body, outputs="float[B,4,S,8] y, float[B,4,S,1] z"))
    assert [(block.kind, block.code) for block in report.blocks] == [("forward", Code.PROBABILITIES_ARE_OUTPUT)]


@pytest.mark.parametrize("target", ["onnx", "contrib"])
def test_a_target_without_gradients_names_those_that_have_them(target: Target) -> None:
    _, report = fused_pair(model({}), target)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", Code.TRAINING)
    assert block.reason is not None
    assert block.reason.endswith("as a gradient does, and the target has no operator for the gradient of an attention")
    assert block.hint is not None
    assert block.hint.startswith("`fa-compiler optimize --target ort` takes an attention together with its gradient")


def test_a_gradient_that_is_fused_already_is_no_attention_of_its_own() -> None:
    """One attention with its gradient is one attention in the next run, too."""
    fused, first = fused_pair(model({}))
    _, again = fused_pair(fused)
    assert [block.kind for block in again.blocks] == ["forward", "backward"]
    assert (first.attentions, again.attentions, again.ready_attentions) == (1, 1, 1)
    assert "0 fused, 1 already fused (of 1)" in again.outcome
