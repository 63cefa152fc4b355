"""Operators that change nothing, wherever they stand: the result is one fused operator, and nothing else remains."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from fa_compiler.passes import fuse
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run


def computed(model: onnx.ModelProto) -> list[str]:
    """The operators of a model, without constants."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


NO_RATIO = "ratio = Constant<value=float {0.0}>() training = Constant<value=bool {1}>() "
"""As TorchScript writes `torch.dropout(p, 0.0, train=True)`."""
PROBABILITIES = {
    "dropout of ratio 0": (NO_RATIO + "x, kept = Dropout(p, ratio, training) ", ""),
    "dropout of ratio 0 that may train": (NO_RATIO + "x = Dropout(p, ratio, t) ", "bool t"),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_on_the_probabilities(name: str) -> None:
    step, more = PROBABILITIES[name]
    model = parse(PRODUCT_QK + SOFTMAX.format("s") + step + "y = MatMul(x, v) ", more)
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model, **({"t": np.array(True)} if more else {}))
    feeds["v"][0, 0, 0, 0] = float("nan")
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize("operand", ["q", "k", "s"])
def test_dropout_of_ratio_0_before_the_softmax(operand: str) -> None:
    body = PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV
    step = f"d = Dropout({operand}, ratio, training) "
    if operand == "s":
        body = body.replace("Softmax<axis=-1>(s)", "Softmax<axis=-1>(d)").replace("p = ", step + "p = ")
    else:
        body = step + body.replace(f"({operand}", "(d")
    model = parse(NO_RATIO + body)
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("ratio", "more"),
    [
        ("ratio = Constant<value=float {1e-30}>() ", ""),
        ("ratio = Constant<value=float {nan}>() ", ""),
        ("", "float ratio"),
    ],
    ids=["tiny", "nan", "an input"],
)
def test_another_ratio_drops(ratio: str, more: str) -> None:
    training = "training = Constant<value=bool {1}>() "
    body = PRODUCT_QK + SOFTMAX.format("s") + "x = Dropout(p, ratio, training) y = MatMul(x, v) "
    (block,) = fused(parse(ratio + training + body, more))[1].blocks
    assert (block.status, block.code) == ("declined", "probability_term")


ZERO = "eighth = Constant<value=float {0.125}>() zero = Constant<value=float[1] {0.0}>() "
OPERANDS = "kt = Transpose<perm=[0,1,3,2]>({}) s = MatMul({}, kt) p = Softmax<axis=-1>(s) y = MatMul(p, {})"
ADDED = {
    "a scale of Paddle": "f = Mul(q, eighth) a = Add(f, zero) " + OPERANDS.format("k", "a", "v"),
    "0 in front": "f = Mul(q, eighth) a = Add(zero, f) " + OPERANDS.format("k", "a", "v"),
    "before the factor": "f = Add(q, zero) a = Mul(f, eighth) " + OPERANDS.format("k", "a", "v"),
    "subtracted from the key": "a = Sub(k, zero) " + OPERANDS.format("a", "q", "v"),
    "on the values": "a = Add(v, zero) " + OPERANDS.format("k", "q", "a"),
}


@pytest.mark.parametrize("name", ADDED)
def test_0_is_added(name: str) -> None:
    model = parse(ZERO + ADDED[name])
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model)
    feeds["k"][0, 0, 0, 0] = float("inf")
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_the_sign_of_a_zero_shows_nowhere() -> None:
    """Values that are all -0: a sum that begins at 0 is 0, as if they were 0."""
    model = parse(ZERO + ADDED["on the values"])
    feeds = random_feeds(model)
    feeds["v"][:] = -0.0
    assert not any(np.signbit(run(each, feeds)[0]).any() for each in (model, fused(model)[0]))


@pytest.mark.parametrize("step", ["a = Sub(zero, q)", "a = Add(q, least)", "a = Add(q, wide)"])
def test_what_changes_the_operand_stays(step: str) -> None:
    more = "least = Constant<value=float {1e-45}>() wide = Constant<value=float[1,4,1,1] {0.0,0.0,0.0,0.0}>() "
    model = parse(ZERO + more + step + " " + OPERANDS.format("k", "a", "v"))
    if "wide" in step:  # it makes four heads of one
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    result, report = fused(model)
    assert report.blocks[0].status == "fused"
    assert computed(result) != ["FlashAttentionScore"]
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


INDICES = (
    "i0 = Constant<value=int64 {0}>() i1 = Constant<value=int64 {1}>() i2 = Constant<value=int64 {2}>() "
    "last = Constant<value=int64 {-1}>() only = Constant<value=int64[1] {96}>() "
    "threes = Constant<value=int64[3] {3,3,3}>() at = Constant<value=int64[1] {2}>() "
)
PARTS = "each = Constant<value=int64 {32}>() sizes = Constant<value=int64[3] {32,32,32}>() "
HEADS = "heads = Constant<value=int64[4] {0,0,4,8}>() joined = Constant<value=int64[3] {0,0,32}>() "
ATTENTION = (
    "q4 = Reshape(a, heads) k4 = Reshape(b, heads) v4 = Reshape(c, heads) q = Transpose<perm=[0,2,1,3]>(q4) "
    "kt = Transpose<perm=[0,2,3,1]>(k4) v = Transpose<perm=[0,2,1,3]>(v4) s = MatMul(q, kt) p = Softmax<axis=-1>(s) "
    "o = MatMul(p, v) t = Transpose<perm=[0,2,1,3]>(o) y = Reshape(t, joined) "
)
THREE = "a0, b0, c0 = Split<axis=2>(x, sizes) "
AT = "a = SequenceAt(l, i0) b = SequenceAt(l, i1) c = SequenceAt(l, last) "
CUT = "a, b, c = Split<axis=-1>(w, sizes) "
PACKED = {
    "1 a Concat of one": THREE + "a = Concat<axis=1>(a0) b = Concat<axis=-1>(b0) c = Concat<axis=0>(c0) ",
    "2 a Split into one": "w = Split<axis=2>(x, only) " + CUT,
    "3 parts joined again": THREE + "w = Concat<axis=-1>(a0, b0, c0) " + CUT,
    "3 a whole cut again": "f = Relu(x) g = Tanh(x) h = Sigmoid(x) a1, d1, e1 = Split<axis=2>(f, sizes) "
    "d2, b1, e2 = Split<axis=2>(g, sizes) d3, e3, c1 = Split<axis=2>(h, sizes) w = Concat<axis=2>(a1, b1, c1) " + CUT,
    "5 SplitToSequence": "l = SplitToSequence<axis=2>(x, sizes) " + AT,
    "5 SplitToSequence of one size": "l = SplitToSequence<axis=-1>(x, each) " + AT,
    "5 SplitToSequence of computed sizes": "shape = Shape(x) third = Div(shape, threes) width = Gather(third, at) "
    "three = Concat<axis=0>(width, width, width) three32 = Cast<to=6>(three) l = SplitToSequence<axis=2>(x, three32) "
    + AT,
    "5 SequenceConstruct": THREE + "l = SequenceConstruct(a0, b0, c0) " + AT,
    "6 ConcatFromSequence": THREE + "l = SequenceConstruct(a0, b0, c0) w = ConcatFromSequence<axis=-1>(l) " + CUT,
    "7 a sequence joined again": "l = SplitToSequence<axis=2>(x, sizes) w = ConcatFromSequence<axis=-1>(l) " + CUT,
    "9 SequenceInsert": THREE + "e = SequenceEmpty<dtype=1>() l0 = SequenceInsert(e, c0) "
    "l1 = SequenceInsert(l0, a0, i0) l = SequenceInsert(l1, b0, last) " + AT,
    "9 SequenceErase": THREE + "l0 = SequenceConstruct(a0, b0, a0, c0, b0) l1 = SequenceErase(l0) "
    "l = SequenceErase(l1, i2) " + AT,
    "11 Identity": THREE + "l0 = SequenceConstruct(a0, b0, c0) l = Identity(l0) " + AT,
}


@pytest.mark.parametrize("name", PACKED)
def test_query_key_and_value_of_one_tensor(name: str) -> None:
    model = parse(
        INDICES + PARTS + HEADS + PACKED[name] + ATTENTION, inputs="float[B,S,96] x", outputs="float[B,S,32] y"
    )
    result, report = fused(model)
    left = {"Split", "FlashAttentionScore", "Relu", "Tanh", "Sigmoid"}
    left |= {"Shape", "Div", "Gather", "Concat", "Cast"} if "computed" in name else set()
    assert report.blocks[0].status == "fused" and set(computed(result)) <= left
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


KEPT = {
    "an index of the run": (THREE + "l = SequenceConstruct(a0, b0, c0) " + AT.replace("i1", "i"), "SequenceAt"),
    "parts in another order": (THREE + "w0 = Concat<axis=2>(b0, a0, c0) w = Relu(w0) " + CUT, "Concat"),
    "parts joined along another axis": (THREE + "a = Concat<axis=1>(a0, b0, c0) b = Relu(a) c = Tanh(a) ", "Concat"),
    "a whole cut elsewhere": (
        THREE + "two = Constant<value=int64[2] {32,96}>() w = Concat<axis=2>(x, a0) a, d = Split<axis=2>(w, two) "
        "b = Relu(b0) c = Relu(c0) ",
        "Concat",
    ),
}


@pytest.mark.parametrize(("body", "op_type"), KEPT.values(), ids=KEPT)
def test_what_does_more_than_hand_on(body: str, op_type: str) -> None:
    index = "int64 i" if op_type == "SequenceAt" else ""
    model = parse(
        INDICES + PARTS + HEADS + body + ATTENTION, index, inputs="float[B,S,96] x", outputs="float[B,M,32] y"
    )
    result, _ = fused(model)
    assert op_type in computed(result)
    feeds = random_feeds(model, **({"i": np.array(1)} if index else {}))
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_an_output_stays() -> None:
    body = "t0 = Concat<axis=0>(q) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(t0, kt) " + SOFTMAX.format("s")
    model = parse(body + PRODUCT_PV, outputs="float[B,4,S,8] y, float[B,4,S,8] t0")
    result, _ = fused(model)
    assert sorted(computed(result)) == ["Concat", "FlashAttentionScore"]
    feeds = random_feeds(model)
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize("step", ["c = Concat<axis=0>(q)", "c = Resize(q, , ones)"])
def test_a_declined_model_stays(step: str) -> None:
    """Its own nodes come back, in their order, and no other one is named."""
    ones = "ones = Constant<value=float[4] {1,1,1,1}>() "
    body = f"{ones}{step} kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(c, kt) x = Relu(s) p = Softmax<axis=-1>(x) "
    proto = parse(body + PRODUCT_PV + "z = CastLike(c, q) ", outputs="float[B,4,S,8] y, float[B,4,S,8] z")
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "unused"))
    graph, (block,) = ir.from_proto(proto), fused(proto)[1].blocks
    assert (block.status, block.culprit) == ("declined", "x")
    fuse(graph)
    wanted = ir.to_proto(ir.from_proto(proto))
    next(node for node in wanted.graph.node if node.op_type == "CastLike").op_type = "Cast"
    assert [(node.op_type, node.input[:1]) for node in ir.to_proto(graph).graph.node] == [
        (node.op_type, node.input[:1]) for node in wanted.graph.node
    ]
    assert ir.to_proto(graph).graph.initializer == wanted.graph.initializer


def test_a_model_without_attention_stays() -> None:
    proto = parse("y = Concat<axis=0>(x)", inputs="float[B] x", outputs="float[B] y")
    graph = ir.from_proto(proto)
    fuse(graph)
    assert ir.to_proto(graph) == ir.to_proto(ir.from_proto(proto))


RESIZED = {
    "sizes": ("r = Resize(table, , , sizes)", 13),
    "sizes of a shape": ("shape = Shape(table) r = Resize<mode='cubic'>(table, , , shape)", 18),
    "factors": ("r = Resize<mode='linear', coordinate_transformation_mode='align_corners'>(table, , ones)", 13),
    "factors before opset 11": ("r = Resize(table, ones)", 10),
    "Upsample": ("r = Upsample<mode='linear'>(table, ones)", 9),
}
BIASED = "sizes = Constant<value=int64[4] {1,4,5,6}>() ones = Constant<value=float[4] {1,1,1,1}>() "


@pytest.mark.parametrize(("step", "opset"), RESIZED.values(), ids=RESIZED)
def test_a_bias_resized_to_its_own_size(step: str, opset: int) -> None:
    body = BIASED + PRODUCT_QK + step.replace("'", '"') + " x = Add(s, r) " + SOFTMAX.format("x") + PRODUCT_PV
    model = parse(body, "float[1,4,5,6] table", inputs=FIXED, outputs="float[2,4,5,8] y", opset=opset)
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model)
    feeds["table"][0, 0, 0, :2] = -np.inf, np.nan
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


FIXED = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v"
OTHER_SIZES = {
    "another factor": "near = Constant<value=float[4] {1,1,1.1,1}>() r = Resize(table, , near)",
    "a region": "r = Resize<coordinate_transformation_mode='tf_crop_and_resize', mode='linear'>(table, roi, , sizes)",
    "the size of an input": "r = Resize(table, , , n)",
}


@pytest.mark.parametrize("step", OTHER_SIZES.values(), ids=OTHER_SIZES)
def test_a_resize_that_is_not_proven_to_copy_stays(step: str) -> None:
    roi = "roi = Constant<value=float[8] {0,0,0,0,1,1,1,0.5}>() "
    body = BIASED + roi + PRODUCT_QK + step.replace("'", '"') + " x = Add(s, r) " + SOFTMAX.format("x") + PRODUCT_PV
    more = "float[1,4,5,6] table" + (", int64[4] n" if "n)" in step else "")
    model = parse(body, more, inputs=FIXED, outputs="float[2,4,5,8] y", opset=13)
    assert "Resize" in computed(fused(model)[0])
