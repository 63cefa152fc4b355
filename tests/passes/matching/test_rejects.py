"""What has to be declined, each with its code and the node at fault; and beside it what may not be.

One row a graph, in ONNX text. Nodes have no names there, so the culprit is known by its first output.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, fused, parse

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

MASK = "bool[B,1,1,T] m"
ADDED = "float[B,1,1,T] b"
MIN = "-3.4028234663852886e38"


def number(name: str, value: str, kind: str = "float") -> str:
    return f"{name} = Constant<value={kind} {{{value}}}>() "


def after(body: str, softmax: str = "x") -> str:
    """Plain attention with `body` between the product s and the softmax."""
    return PRODUCT_QK + body + " " + SOFTMAX.format(softmax) + PRODUCT_PV


def behind(body: str) -> str:
    """Plain attention with `body` between the probabilities p and the product."""
    return PRODUCT_QK + SOFTMAX.format("s") + body + " y = MatMul(x, v)"


@dataclass(frozen=True)
class Row:
    """A graph, what the report has to say, and options for `parse`."""

    name: str
    code: str
    culprit: str
    body: str
    more: str = ""
    outputs: str = "float[B,4,S,8] y"
    inputs: str = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
    initializers: str = ""
    opset: int = 17
    status: str = "declined"
    assume: tuple[str, ...] = ()
    target: str = "ort"


HALF = "float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v"
DOUBLE = "double[B,4,S,8] q, double[B,4,T,8] k, double[B,4,T,8] v"
SQUARE = "float[B,4,8,8] q, float[B,4,8,8] k, float[B,4,8,8] v"

ROWS = [
    # Only the CPU kernels cap scores, once, and before anything else is done to them but scaling.
    Row(
        "softcap",
        "softcap",
        "c",
        after(number("n", "30.0") + "a = Div(s, n) c = Tanh(a) x = Mul(c, n)"),
        target="ascend",
    ),
    Row(
        "softcap_before_a_mask_on_ascend",
        "softcap",
        "c",
        after(number("n", "30.0") + number("f", "-inf") + "a = Div(s, n) c = Tanh(a) d = Mul(n, c) x = Where(m, d, f)"),
        MASK,
        target="ascend",
    ),
    Row(
        "softcap_behind_a_mask",
        "softcap",
        "c",
        after(number("n", "30.0") + number("f", "-inf") + "b = Where(m, s, f) a = Div(b, n) c = Tanh(a) x = Mul(c, n)"),
        MASK,
    ),
    Row("softcap_behind_an_added_mask", "softcap", "c", after("a = Add(s, b) c = Tanh(a) x = Identity(c)"), ADDED),
    Row("softcap_twice", "softcap", "c", after("a = Tanh(s) c = Tanh(a) x = Identity(c)")),
    Row("capped_scores_times_a_tensor", "scale", "x", after("a = Tanh(s) x = Mul(a, w)"), "float[4,1,1] w"),
    Row("softcap_out_of_range", "illegal_for_target", "p", after(number("n", "2e6") + "a = Tanh(s) x = Mul(a, n)")),
    # Somebody else wants the scores or the probabilities.
    Row(
        "scores_are_output",
        "scores_are_output",
        "s",
        after("x = Identity(s)"),
        outputs="float[B,4,S,8] y, float[B,4,S,T] s",
    ),
    Row(
        "scores_are_the_values",
        "scores_are_output",
        "y",
        PRODUCT_QK + number("f", "-inf") + "x = Where(m, s, f) " + SOFTMAX.format("x") + " y = MatMul(p, x)",
        "bool[S,S] m",
        inputs="float[B,4,S,8] q, float[B,4,S,8] k",
        outputs="float[B,4,S,S] y",
    ),
    Row(
        "values_that_are_a_mask",
        "no_value_matmul",
        "y",
        PRODUCT_QK
        + number("f", "-inf")
        + number("z", "0.0")
        + "a = Where(m, z, f) x = Add(s, a) "
        + SOFTMAX.format("x")
        + " y = MatMul(p, a)",
        "bool[S,S] m",
        inputs="float[B,4,S,8] q, float[B,4,S,8] k",
        outputs="float[B,4,S,S] y",
    ),
    Row(
        "open_heads_of_the_values",
        "shape",
        "s",
        after("x = Identity(s)"),
        inputs="float[B,4,S,8] q, float[B,1,T,8] k, float[B,H,T,8] v",
    ),
    Row(
        "open_heads_of_the_query",
        "shape",
        "s",
        after("x = Identity(s)"),
        inputs="float[B,H,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
    ),
    Row(
        "masked_scores_are_output",
        "scores_are_output",
        "x",
        after(number("f", "-inf") + "x = Where(m, s, f)"),
        MASK,
        outputs="float[B,4,S,8] y, float[B,4,S,T] x",
    ),
    Row(
        "scores_read_elsewhere",
        "scores_are_output",
        "s",
        after("x = Identity(s) z = Relu(s)"),
        outputs="float[B,4,S,8] y, float[B,4,S,T] z",
    ),
    Row(
        "mask_made_of_the_scores",
        "scores_are_output",
        "s",
        after(number("f", "-inf") + number("n", "0.0") + "m = Less(s, n) x = Where(m, f, s)"),
    ),
    Row(
        "mask_made_of_the_probabilities_of_the_same_scores",
        "scores_are_output",
        "s",
        PRODUCT_QK
        + number("f", "-inf")
        + number("n", "0.1")
        + "p0 = Softmax<axis=-1>(s) m = Less(p0, n) x = Where(m, f, s) p = Softmax<axis=-1>(x) y = MatMul(p, v)",
    ),
    Row(
        "maximum_of_another_axis_subtracted",
        "score_term",
        "x",
        after("n = ReduceMax<axes=[2], keepdims=1>(s) x = Sub(s, n)"),
    ),
    Row("minimum_subtracted", "scores_are_output", "s", after("n = ReduceMin<axes=[-1], keepdims=1>(s) x = Sub(s, n)")),
    Row(
        "own_maximum_read_elsewhere",
        "scores_are_output",
        "n",
        after("n = ReduceMax<axes=[-1], keepdims=1>(s) x = Sub(s, n)"),
        outputs="float[B,4,S,8] y, float[B,4,S,1] n",
    ),
    Row(
        "probabilities_are_output",
        "probabilities_are_output",
        "p",
        behind("x = Identity(p)"),
        outputs="float[B,4,S,8] y, float[B,4,S,T] p",
    ),
    Row(
        "normalised_again_behind_a_mask",
        "probability_term",
        "a",
        behind("a = Mul(p, b) ax = Constant<value=int64[1] {-1}>() t = ReduceSum<keepdims=1>(a, ax) x = Div(a, t)"),
        more="float[B,1,S,T] b",
    ),
    Row(
        "probabilities_read_elsewhere",
        "probabilities_are_output",
        "z",
        behind("x = Identity(p) z = ReduceSum<keepdims=0>(p)"),
        outputs="float[B,4,S,8] y, float z",
    ),
    Row(
        "probabilities_of_two_products_and_more",
        "probabilities_are_output",
        "r",
        PRODUCT_QK + SOFTMAX.format("s") + "y = MatMul(p, v) r = Relu(p) z = MatMul(r, k)",
        outputs="float[B,4,S,8] y, float[B,4,S,8] z",
    ),
    Row(
        "dropout_mask_is_read",
        "probabilities_are_output",
        "x",
        behind(number("r", "0.5") + "x, d = Dropout(p, r) z = Not(d)"),
        outputs="float[B,4,S,8] y, bool[B,4,S,T] z",
    ),
    Row(
        "exponentials_are_output",
        "scores_are_output",
        "e",
        PRODUCT_QK
        + "n = ReduceMax<axes=[-1], keepdims=1>(s) d = Sub(s, n) e = Exp(d) a = Constant<value=int64[1] {-1}>() "
        "t = ReduceSum<keepdims=1>(e, a) p = Div(e, t) y = MatMul(p, v)",
        outputs="float[B,4,S,8] y, float[B,4,S,T] e",
    ),
    # The softmax runs over another axis than the second product sums over. All sizes are equal on purpose.
    Row(
        "softmax_over_rows",
        "softmax_axis|no_value_matmul",
        "y|p",
        PRODUCT_QK + "p = Softmax<axis=2>(s) y = MatMul(p, v)",
        inputs=SQUARE,
        outputs="float[B,4,8,8] y",
    ),
    Row(
        "softmax_without_its_maximum",
        "softmax_overflows",
        "p",
        PRODUCT_QK
        + "e = Exp(s) last = Constant<value=int64[1] {-1}>() t = ReduceSum<keepdims=1>(e, last) p = Div(e, t) "
        + PRODUCT_PV,
    ),
    Row("softmax_over_heads", "softmax_axis", "p", PRODUCT_QK + "p = Softmax<axis=1>(s) y = MatMul(p, v)"),
    Row("softmax_over_batch", "softmax_axis", "p", PRODUCT_QK + "p = Softmax<axis=0>(s) y = MatMul(p, v)"),
    Row(
        "softmax_of_opset_11_flattens",
        "softmax_axis",
        "p",
        PRODUCT_QK + "p = Softmax<axis=1>(s) y = MatMul(p, v)",
        opset=11,
    ),
    Row(
        "softmax_of_opset_11_by_default", "softmax_axis", "p", PRODUCT_QK + "p = Softmax(s) y = MatMul(p, v)", opset=11
    ),
    Row(
        "softmax_over_two_merged_axes",
        "softmax_axis",
        "p4",
        PRODUCT_QK + "a = Constant<value=int64[3] {0,4,-1}>() f = Reshape(s, a) p4 = Softmax<axis=-1>(f) "
        "sh = Shape(s) p = Reshape(p4, sh) y = MatMul(p, v)",
    ),
    # Products that are not what they look like. Sizes are equal again.
    Row(
        "values_summed_over_depth",
        "no_value_matmul",
        "y",
        PRODUCT_QK + SOFTMAX.format("s") + "pt = Transpose<perm=[0,1,3,2]>(p) y = MatMul(pt, v)",
        inputs=SQUARE,
        outputs="float[B,4,8,8] y",
    ),
    Row(
        "probabilities_times_themselves",
        "no_value_matmul",
        "y",
        PRODUCT_QK + SOFTMAX.format("s") + "y = MatMul(p, p)",
        inputs=SQUARE,
        outputs="float[B,4,8,8] y",
    ),
    Row(
        "no_first_product",
        "no_scores_matmul",
        "x",
        "x = Relu(q) " + SOFTMAX.format("x") + PRODUCT_PV,
        inputs=SQUARE,
        outputs="float[B,4,8,8] y",
    ),
    Row("scores_are_an_input", "no_scores_matmul", "p", SOFTMAX.format("x") + PRODUCT_PV, "float[B,4,S,T] x"),
    # The scale.
    Row("scale_is_an_input", "scale", "x", after("x = Mul(s, c)"), "float c", target="ascend"),
    Row("scale_is_an_input_divided_by", "scale", "x", after("x = Div(s, c)"), "float[1] c", target="ascend"),
    Row("scale_divides", "scale", "x", after(number("c", "2.0") + "x = Div(c, s)")),
    Row("scale_nan", "scale", "x", after(number("c", "nan") + "x = Mul(s, c)")),
    Row("scale_infinite", "scale", "x", after(number("c", "inf") + "x = Mul(s, c)")),
    Row("scale_by_division_by_zero", "scale", "x", after(number("c", "0.0") + "x = Div(s, c)")),
    Row("scale_overflows", "scale", "s", after(number("c", "1e30") + "a = Mul(s, c) x = Mul(a, c)")),
    Row("scale_is_zero", "scale", "s", after(number("c", "0.0") + "a = Mul(s, c) x = Add(a, b)"), "float[B,1,S,T] b"),
    Row(
        "scale_is_overridable",
        "scale",
        "x",
        after("x = Mul(s, c)"),
        "float c",
        initializers="<float c = {0.5}>",
        target="ascend",
    ),
    Row("scores_squared", "scale", "x", after("x = Mul(s, s)")),
    # What is done to the scores.
    Row("narrowing_cast", "cast", "h", after("h = Cast<to=10>(s) x = Cast<to=1>(h)")),
    Row("scores_clipped", "score_term", "x", after(number("n", "5.0") + "x = Min(s, n)")),
    Row("scores_relu", "score_term", "x", after("x = Relu(s)")),
    Row("filler_is_a_tensor", "score_term", "x", after("x = Where(m, s, b)"), MASK + ", float[1,1,1,T] b"),
    Row(
        "filler_is_overridable",
        "score_term",
        "x",
        after("x = Where(m, s, f)"),
        MASK + ", float f",
        initializers="<float f = {-1e30}>",
    ),
    Row("filler_1e4", "mask_value", "x", after(number("f", "-1e4") + "x = Where(m, s, f)"), MASK, target="ascend"),
    Row("filler_positive", "mask_value", "x", after(number("f", "1e30") + "x = Where(m, s, f)"), MASK, target="ascend"),
    Row("filler_nan", "mask_value", "x", after(number("f", "nan") + "x = Where(m, s, f)"), MASK),
    Row(
        "filler_turned_positive",
        "mask_value",
        "a",
        after(number("f", "-inf") + number("c", "-1.0") + "a = Where(m, s, f) x = Mul(a, c)"),
        MASK,
    ),
    Row(
        "filler_turned_small",
        "mask_value",
        "a",
        after(number("f", MIN) + number("c", "1e-20") + "a = Where(m, s, f) x = Mul(a, c)"),
        MASK,
        target="ascend",
    ),
    Row(
        "filler_minus_65504_in_float16",
        "mask_value",
        "x",
        after(number("f", "-65504", "float16") + "x = Where(m, s, f)"),
        MASK,
        inputs=HALF,
        outputs="float16[B,4,S,8] y",
        target="ascend",
    ),
    Row(
        "filler_0_with_dominate",
        "mask_value",
        "x",
        after(number("f", "0.0") + "x = Where(m, s, f)"),
        MASK,
        assume=("masks-dominate",),
        target="ascend",
    ),
    Row(
        "bias_adds_a_dimension",
        "shape",
        "x",
        after("x = Add(s, b)"),
        "float[2,B,4,S,T] b",
        outputs="float[2,B,4,S,8] y",
    ),
    Row(
        "mask_enlarges_the_batch",
        "shape",
        "x",
        after(number("f", "-inf") + "x = Where(m, s, f)"),
        "bool[3,1,1,T] m",
        inputs="float[1,4,S,8] q, float[1,4,T,8] k, float[1,4,T,8] v",
        outputs="float[3,4,S,8] y",
    ),
    Row(
        "bias_enlarges_rows",
        "shape",
        "x",
        after("x = Add(s, b)"),
        "float[1,1,7,T] b",
        inputs="float[B,4,1,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
        outputs="float[B,4,7,8] y",
    ),
    # What is done to the probabilities.
    Row("head_mask", "probability_term", "x", behind("x = Mul(p, h)"), "float[4,1,1] h"),
    Row("probabilities_renormalised", "probability_term", "p", behind("t = ReduceSum(p) x = Div(p, t)")),
    Row(
        "dropout_in_training",
        "probability_term",
        "x",
        behind(number("r", "0.5") + "t = Constant<value=bool {1}>() x = Dropout(p, r, t)"),
    ),
    Row(
        "dropout_mode_is_an_input",
        "probability_term",
        "x",
        behind(number("r", "0.5") + "x = Dropout(p, r, t)"),
        "bool t",
    ),
    Row(
        "guard_with_one",
        "probability_term",
        "x",
        behind(number("n", "1.0") + "i = IsNaN(p) x = Where(i, n, p)"),
    ),
    Row(
        "guard_of_another_tensor",
        "probability_term",
        "x",
        behind(number("n", "0.0") + "i = IsNaN(o) x = Where(i, n, p)"),
        "float[B,4,S,T] o",
    ),
    Row(
        "guard_upside_down",
        "probability_term",
        "x",
        behind(number("n", "0.0") + "i = IsNaN(p) x = Where(i, p, n)"),
    ),
    Row(
        "guard_flag_is_output",
        "probabilities_are_output",
        "x",
        behind(number("n", "0.0") + "i = IsNaN(p) x = Where(i, n, p)"),
        outputs="float[B,4,S,8] y, bool[B,4,S,T] i",
    ),
    Row(
        "bias_guard_of_another_bias",
        "probability_term",
        "x",
        PRODUCT_QK
        + number("n", "0.0")
        + number("l", "-inf")
        + "z = Add(s, b) p = Softmax<axis=-1>(z) "
        + "r = ReduceMax<axes=[-1], keepdims=1>(o) e = Equal(r, l) x = Where(e, n, p) y = MatMul(x, v)",
        "float[B,1,S,T] b, float[B,1,S,T] o",
    ),
    Row(
        "bias_guard_with_another_number",
        "probability_term",
        "x",
        PRODUCT_QK
        + number("n", "0.0")
        + number("l", "-1.0")
        + "z = Add(s, b) p = Softmax<axis=-1>(z) "
        + "r = ReduceMax<axes=[-1], keepdims=1>(b) e = Equal(r, l) x = Where(e, n, p) y = MatMul(x, v)",
        "float[B,1,S,T] b",
    ),
    # Types and sizes.
    Row("double", "dtype", "y", after("x = Identity(s)"), inputs=DOUBLE, outputs="double[B,4,S,8] y"),
    Row(
        "head_size",
        "head_size_over_768",
        "s",
        after("x = Identity(s)"),
        inputs="float[B,4,S,769] q, float[B,4,T,769] k, float[B,4,T,8] v",
    ),
    Row(
        "value_head_size",
        "head_size_over_768",
        "y",
        after("x = Identity(s)"),
        inputs="float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,769] v",
        outputs="float[B,4,S,769] y",
    ),
    Row(
        "head_size_unknown",
        "shape",
        "s",
        after("x = Identity(s)"),
        inputs="float[B,4,S,D] q, float[B,4,T,D] k, float[B,4,T,8] v",
    ),
    # Not attention.
    Row(
        "classifier",
        "not_attention",
        "p",
        "p = Softmax<axis=-1>(q)",
        outputs="float[B,4,S,8] p",
        status="not_attention",
    ),
    Row(
        "router",
        "not_attention",
        "y",
        PRODUCT_QK + SOFTMAX.format("s") + "n = Constant<value=int64[1] {1}>() y, i = TopK(p, n)",
        outputs="float[B,4,S,1] y, int64[B,4,S,1] i",
        status="not_attention",
    ),
    # As Longformer moves the probabilities of its windows: attention all the same.
    Row(
        "probabilities_padded",
        "probability_term",
        "a",
        behind(
            "o = Constant<value=int64[8] {0,0,0,1,0,0,0,1}>() a = Pad(p, o) i = Constant<value=int64[1] {1}>() "
            "e = Constant<value=int64[1] {-1}>() l = Constant<value=int64[1] {3}>() x = Slice(a, i, e, l)"
        ),
    ),
    # As torch's cross entropy and its gradient read a softmax: p - 1 at the target, times the matrix of the last layer.
    Row(
        "loss",
        "not_attention",
        "dz",
        PRODUCT_QK
        + "l = LogSoftmax<axis=-1>(s) p = Exp(l) n = Constant<value=int64[1] {1}>() first = Gather<axis=3>(l, n) "
        + "one = Constant<value=float {1.0}>() dz = Sub(p, one) y = MatMul(dz, v)",
        outputs="float[B,4,S,8] y, float[B,4,S,1] first",
        status="not_attention",
    ),
    # Ascend has no attributes of ours.
    Row(
        "ascend_value_wider_than_key",
        "illegal_for_target",
        "p",
        after("x = Identity(s)"),
        target="ascend",
        inputs="float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,16] v",
        outputs="float[B,4,S,16] y",
    ),
    Row(
        "ascend_guard_behind_a_bias",
        "empty_rows",
        "z",
        PRODUCT_QK
        + number("n", "0.0")
        + "z = Add(s, b) p = Softmax<axis=-1>(z) i = IsNaN(p) x = Where(i, n, p) y = MatMul(x, v)",
        "float[B,1,S,T] b",
        target="ascend",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_declined(row: Row) -> None:
    model = parse(
        row.body,
        row.more,
        inputs=row.inputs,
        outputs=row.outputs,
        opset=row.opset,
        initializers=row.initializers,
    )
    result, report = fused(model, row.target, row.assume)  # type: ignore[arg-type]
    block = report.blocks[-1]
    assert (block.status, block.code) in [(row.status, code) for code in row.code.split("|")], block
    assert block.culprit in row.culprit.split("|"), block
    assert block.reason
    assert result == ir.to_proto(ir.from_proto(model)), "a declined model was changed"
