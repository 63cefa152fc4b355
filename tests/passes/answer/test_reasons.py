"""What the report says of attention that is left alone: a true reason, and a hint that helps."""

from __future__ import annotations

import onnx
import pytest

from fa_compiler.passes import Block, Code
from fa_compiler.passes.matching.scores import PARTS_ADVICE, QUANTISED_ADVICE
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

STEP = "step = Constant<value=float {0.01}>() point = Constant<value=uint8 {0}>() "
THROUGH = "{1} = DequantizeLinear({0}q, step, point) "
QUANTISE = "{0}q = QuantizeLinear({0}, step, point) "
WEIGHT = "w = Constant<value=float[2,2] {1,2,3,4}>() "


def only(proto: onnx.ModelProto) -> Block:
    (block,) = fused(proto)[1].blocks
    assert block.status != "fused"
    return block


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (
            SOFTMAX.format("s") + "pq = QuantizeLinear(p, step, point) vq = QuantizeLinear(v, step, point) "
            "m = com.microsoft.QLinearWhere(none, pq, step, point, pq, step, point, step, point) "
            "yq = QLinearMatMul(m, step, point, vq, step, point, step, point) " + THROUGH.format("y", "y"),
            "probability_term",
        ),
        (
            SOFTMAX.format("s") + "wide = com.microsoft.DynamicQuantizeMatMul(p, weights, step, point) "
            "y = Identity(wide)",
            "probability_term",
        ),
    ],
    ids=["selected", "dynamic"],
)
def test_quantised_attention(body: str, code: str) -> None:
    block = only(parse(STEP + PRODUCT_QK + body, "bool[S,T] none, uint8[T,8] weights"))
    assert (block.code, block.hint) == (code, QUANTISED_ADVICE)


def quantised_softmax(behind: str, outputs: str = "float[B,4,S,8] y") -> onnx.ModelProto:
    """As quantize_static writes it with QuantFormat.QOperator."""
    softmax = "pq = com.microsoft.QLinearSoftmax<axis=-1, opset=17>(sq, step, point, step, point) "
    return parse(STEP + PRODUCT_QK + QUANTISE.format("s") + softmax + behind, outputs=outputs)


def test_a_softmax_of_integers_is_named() -> None:
    vq = QUANTISE.format("v") + "yq = QLinearMatMul(pq, step, point, vq, step, point, step, point) "
    block = only(quantised_softmax(vq + THROUGH.format("y", "y")))
    assert (block.code, block.hint) == ("dtype", QUANTISED_ADVICE)
    assert block.reason is not None and "8-bit" in block.reason


def test_a_softmax_of_integers_that_is_no_attention() -> None:
    block = only(quantised_softmax(THROUGH.format("p", "y"), "float[B,4,S,T] y"))
    assert block.status == "not_attention"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (SOFTMAX.format("s") + 'x = Einsum<equation="bhij,hg->bgij">(p, w) y = MatMul(x, v)', "probability_term"),
        ('x = Einsum<equation="bhij,hg->bgij">(s, w) ' + SOFTMAX.format("x") + PRODUCT_PV, "score_term"),
    ],
    ids=["probabilities", "scores"],
)
def test_heads_that_are_mixed(body: str, code: str) -> None:
    inputs = "float[B,2,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v"
    block = only(parse(WEIGHT + PRODUCT_QK + body, inputs=inputs, outputs="float[B,2,S,8] y"))
    assert (block.code, block.hint) == (code, None)
    assert block.reason is not None and "a linear layer mixes" in block.reason


def test_the_softmax_of_keys_in_linear_attention_is_none_of_scores() -> None:
    """As CoaT's factorised attention: the softmax of the keys themselves, over their sequence."""
    body = "h = MatMul(q, w) a, b = Split<axis=-1>(h) p = Softmax<axis=2>(b) t = Transpose<perm=[0,1,3,2]>(p) "
    weight = "w = Constant<value=float[2,4] {1,2,3,4,5,6,7,8}>() "
    proto = parse(
        weight + body + "c = MatMul(t, v) y = MatMul(a, c)",
        inputs="float[B,2,S,2] q, float[B,2,S,8] v",
        outputs="float[B,2,S,8] y",
        opset=13,
    )
    block = only(proto)
    assert block.status == "not_attention" and block.reason is not None and "a linear layer" in block.reason


def test_float64_throughout_is_a_matter_of_the_type() -> None:
    inputs = "double[B,2,S,8] q, double[B,2,T,8] k, double[B,2,T,8] v"
    body = "c = Constant<value=double {0.5}>() " + PRODUCT_QK + "x = Mul(s, c) " + SOFTMAX.format("x") + PRODUCT_PV
    block = only(parse(body, inputs=inputs, outputs="double[B,2,S,8] y"))
    assert block.code == "dtype" and block.hint is not None and "float32" in block.hint


@pytest.mark.parametrize("name", ["LongformerAttention", "DecoderAttention", "QOrderedAttention"])
def test_attention_operators_without_a_conversion_are_named(name: str) -> None:
    block = only(parse(f"y = com.microsoft.{name}(q, k, v)"))
    assert block.code == "ready_made" and block.reason is not None and name in block.reason


# -- one softmax, one block ------------------------------------------------------------------------

LATE = (
    PRODUCT_QK + "last = Constant<value_ints=[-1]>() peak = ReduceMax<keepdims=1>(s, last) d = Sub(s, peak) e = Exp(d) "
    "total = ReduceSum<keepdims=1>(e, last) o = MatMul(e, v) y = Div(o, total) "
)


def late(more: str, outputs: str = "") -> onnx.ModelProto:
    return parse(LATE + more, outputs="float[B,4,S,8] y" + outputs, opset=18)


def test_probabilities_beside_a_late_division_are_of_the_same_softmax() -> None:
    for more, outputs in (
        ("p = Div(e, total)", ", float[B,4,S,T] p"),
        ("r = Reciprocal(total) p = Mul(e, r)", ", float[B,4,S,T] p"),
        ("p = Div(e, total) z = MatMul(p, v)", ", float[B,4,S,8] z"),
    ):
        block = only(late(more, outputs))
        assert (block.code, block.culprit) == ("probabilities_are_output", "e")
        assert block.hint is not None and "output_attentions=False" in block.hint


def test_a_product_divided_by_sums_of_probabilities_is_not_told_to_drop_an_output() -> None:
    masked = "last = Constant<value_ints=[-1]>() zero = Constant<value_float=0.0>() x = Where(c, p, zero) "
    body = (
        PRODUCT_QK + SOFTMAX.format("s") + masked + "o = MatMul(x, v) t = ReduceSum<keepdims=1>(x, last) y = Div(o, t)"
    )
    block = only(parse(body, "bool[1,1,S,T] c", opset=18))
    assert block.code == "probability_term"
    assert block.hint is not None and "mask the scores instead" in block.hint


# -- what nothing needs ----------------------------------------------------------------------------


def test_keys_in_parts_are_told_to_be_one() -> None:
    """PEGASUS-X and BigBird: one softmax over the products with two kinds of keys. The advice leads to a fusion."""
    inputs = "float[B,4,S,8] q, float[B,4,G,8] k1, float[B,4,T,8] k2, float[B,4,G,8] v1, float[B,4,T,8] v2"
    sizes = "zero = Constant<value=int64[1] {0}>() last = Constant<value=int64[1] {3}>() g = Shape<start=2, end=3>(k1) "
    sizes += "all = Shape<start=3>(s) "
    parts = "k1t = Transpose<perm=[0,1,3,2]>(k1) k2t = Transpose<perm=[0,1,3,2]>(k2) s1 = MatMul(q, k1t) "
    parts += "s2 = MatMul(q, k2t) s = Concat<axis=-1>(s1, s2) " + sizes + SOFTMAX.format("s")
    parts += "p1 = Slice(p, zero, g, last) p2 = Slice(p, g, all, last) y1 = MatMul(p1, v1) y2 = MatMul(p2, v2) "
    block = only(parse(parts + "y = Add(y1, y2)", inputs=inputs))
    assert (block.code, block.hint) == ("probability_term", PARTS_ADVICE)
    joined = "k = Concat<axis=2>(k1, k2) v = Concat<axis=2>(v1, v2) "
    (block,) = fused(parse(joined + PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV, inputs=inputs))[1].blocks
    assert block.status == "fused"


@pytest.mark.parametrize(
    "proto",
    [
        parse(PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV + "x, m = Dropout(p)"),
        parse(PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV + "r = Relu(p) x = Transpose(r) z = Shape(x)"),
        parse(PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV + "r = ReduceMax<axes=[1]>(s)"),
        late("p = Div(e, total)"),
    ],
    ids=["dropout", "several", "scores", "probabilities of a late division"],
)
def test_what_nothing_needs_is_no_reader(proto: onnx.ModelProto) -> None:
    model, report = fused(proto)
    (block,) = report.blocks
    assert block.status == "fused", block
    assert {node.op_type for node in model.graph.node} == {"FlashAttentionScore"}
    feeds = random_feeds(proto)
    assert_same(run(model, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_dead_nodes_of_a_model_that_is_not_fused_stay() -> None:
    proto = parse(
        PRODUCT_QK + SOFTMAX.format("s") + "y = MatMul(p, v) z = Relu(p) x = Relu(p) w = Relu(s)",
        outputs=("float[B,4,S,8] y, float[B,4,S,T] z"),
    )
    model, report = fused(proto)
    assert report.blocks[0].code == "probabilities_are_output"
    assert [node.op_type for node in model.graph.node] == [node.op_type for node in proto.graph.node]


# -- operators that do nothing ---------------------------------------------------------------------

END = "zero = Constant<value_ints=[0]>() end = Constant<value_ints=[9223372036854775807]>() "
LAST = "last = Constant<value_ints=[-1]>() "
ONES = "ones = Constant<value_ints=[1,1,1,1]>() "
KEYS = "two = Constant<value_ints=[2]>() sh = Shape(k) t = Gather(sh, two) "


@pytest.mark.parametrize(
    "body",
    [
        END + LAST + PRODUCT_QK + SOFTMAX.format("s") + "x = Slice(p, zero, end, last) y = MatMul(x, v)",
        END + LAST + PRODUCT_QK + "x = Slice(s, zero, end, last) " + SOFTMAX.format("x") + PRODUCT_PV,
        END + LAST + KEYS + PRODUCT_QK + "x = Slice(s, zero, t, last) " + SOFTMAX.format("x") + PRODUCT_PV,
        END + LAST + KEYS + PRODUCT_QK + SOFTMAX.format("s") + "x = Slice(p, zero, t, last) y = MatMul(x, v)",
        PRODUCT_QK + SOFTMAX.format("s") + "sh = Shape(p) x = Expand(p, sh) y = MatMul(x, v)",
        PRODUCT_QK + ONES + "x = Expand(s, ones) z = Tile(x, ones) " + SOFTMAX.format("z") + PRODUCT_PV,
    ],
    ids=[
        "probabilities",
        "scores",
        "scores up to the keys' length",
        "probabilities up to it",
        "expanded",
        "repeated once",
    ],
)
def test_a_slice_that_leaves_out_nothing(body: str) -> None:
    """Nor does an Expand or a Tile that repeats nothing."""
    proto = parse(body)
    model, report = fused(proto)
    assert report.blocks[0].status == "fused", report.blocks[0]
    feeds = random_feeds(proto)
    assert_same(run(model, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_an_expand_that_repeats_probabilities() -> None:
    more = "more = Constant<value_ints=[2,1,1,1]>() "
    block = only(parse(PRODUCT_QK + SOFTMAX.format("s") + more + "x = Expand(p, more) y = MatMul(x, v)"))
    assert (block.code, block.culprit) == ("probability_term", "x")


@pytest.mark.parametrize(
    "cut",
    [
        "{0} = Slice({1}, last, low, {2}, last) ",
        "{0} = Slice({1}, zero, last, {2}) ",
        "{0} = Slice({1}, zero, end, {2}, two) ",
    ],
    ids=["reversed", "shorter", "stepped"],
)
def test_a_slice_that_does_something(cut: str) -> None:
    numbers = "two = Constant<value_ints=[2]>() low = Constant<value_ints=[-9223372036854775807]>() "
    body = END + LAST + numbers + PRODUCT_QK + cut.format("x", "s", "last") + cut.format("w", "v", "two")
    block = only(parse(body + SOFTMAX.format("x") + "y = MatMul(p, w)"))
    assert (block.code, block.culprit) == ("score_term", "x")


# -- hints that fit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guard",
    ["i = IsNaN(p) x = Where(i, p, zero) ", "i = IsNaN(p) x = Where(i, half, p) "],
    ids=["swapped", "with another number"],
)
def test_a_guard_that_is_none_is_no_output(guard: str) -> None:
    numbers = "zero = Constant<value_float=0.0>() half = Constant<value_float=0.5>() "
    block = only(parse(numbers + PRODUCT_QK + SOFTMAX.format("s") + guard + "y = MatMul(x, v)"))
    assert (block.code, block.culprit) == ("probability_term", "x")
    assert block.hint is not None and "guard against NaN" in block.hint


@pytest.mark.parametrize(("fill", "word"), [("nan", "become NaN"), ("5.0", "become 5"), ("-1e4", "become -10000")])
def test_a_fill_that_no_assumption_makes_a_mask(fill: str, word: str) -> None:
    """What the user can vouch for does not make it one, so it is not offered. The CPU kernel takes any number."""
    body = f"f = Constant<value_float={fill}>() " + PRODUCT_QK + "z = Where(c, s, f) x = Add(z, b) "
    proto = parse(body + SOFTMAX.format("x") + PRODUCT_PV, "bool[1,1,S,T] c, float[1,1,S,T] b")
    for assume in ((), ("masks-dominate",)):
        (block,) = fused(proto, "ascend", assume)[1].blocks
        assert block.code == "mask_value" and block.reason is not None and word in block.reason
        assert block.hint is not None and "-inf" in block.hint and "--assume" not in block.hint


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("x0 = Unsqueeze(s, a) x = Squeeze(x0, a) ", "rank"),
        ("m = Squeeze(b, a) x = Add(s, m) ", "rank"),
        ("u = Tanh(s) x = Mul(u, c) ", "scale"),
    ],
    ids=["a rank", "a rank further up", "a number"],
)
def test_an_initializer_that_callers_may_replace_is_named(body: str, code: str) -> None:
    proto = parse(
        PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV,
        "int64[1] a, float c, float[1,B,4,S,T] b",
        initializers="<int64[1] a = {0}, float c = {0.5}>",
    )
    block = only(proto)
    assert block.code == code
    assert block.hint is not None and f"make '{'c' if code == 'scale' else 'a'}' a constant" in block.hint


def test_inputs_of_unknown_rank_are_what_is_to_be_declared() -> None:
    """No initializer is to blame where the model itself does not say."""
    body = PRODUCT_QK + "m = Squeeze(b) x = Add(s, m) " + SOFTMAX.format("x") + PRODUCT_PV
    block = only(parse(body, "float[X,B,4,S,T] b"))
    assert (block.code, block.hint) == ("rank", Code.RANK.advice)


def test_a_softmax_by_the_logarithm_of_its_sum_says_what_is_rounded_away() -> None:
    mask = "f = Constant<value_float=-1e4>() last = Constant<value_ints=[-1]>() x = Where(c, s, f) "
    softmax = "g = ReduceLogSumExp<keepdims=1>(x, last) d = Sub(x, g) p = Exp(d) "
    block = only(parse(PRODUCT_QK + mask + softmax + PRODUCT_PV, "bool[1,1,S,T] c", opset=18))
    assert block.code == "score_term"
    assert block.reason is not None and "the logarithm is rounded away" in block.reason
    assert block.hint is not None and "write it as a Softmax" in block.hint and "no-empty-rows" in block.hint
