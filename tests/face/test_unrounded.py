"""`verify` of models that round to integers: a step more or less is no fault, a wrong fusion is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.unrounded import NotKnown, roundings, unrounded
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from tests.face.builders import saved
from tests.passes.prepare.test_quantised_softmax import (
    BODIES,
    INTEGER_RESULT,
    INTEGER_SOFTMAX,
    ON_INTEGERS,
    built,
    on_integers,
)

INPUTS = "float[2,4,512,64] q, float[2,4,8,64] k, float[2,4,8,64] v"
ATTENTION = (
    "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) c = Constant<value=float {0.125}>() t = Mul(s, c) "
    "p = Softmax<axis=-1>(t) y = MatMul(p, v) "
)
RESIDUE = "most = Constant<value=float {0.9}>() e = Mul(y, most) z = Sub(d, e) "
"""A tenth of the result, beside which one step more or less is ten times as large."""
BEHIND = {
    "a DequantizeLinear": "i, scale, point = DynamicQuantizeLinear(y) d = DequantizeLinear(i, scale, point) ",
    "a product of integers": (
        "i, scale, point = DynamicQuantizeLinear(y) m = MatMulInteger(i, eye, point) f = Cast<to=1>(m) "
        "d = Mul(f, scale) "
    ),
    "a product of floats and integers": "d = com.microsoft.DynamicQuantizeMatMul(y, eye, unit) ",
    "a constant scale": (
        "step = Constant<value=float {0.01}>() i = QuantizeLinear(y, step, zero) d = DequantizeLinear(i, step, zero) "
    ),
}


def model(behind: str, attention: str = ATTENTION, inputs: str = INPUTS) -> onnx.ModelProto:
    """An attention, and what rounds its result."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g ({inputs}) => (float[2,4,512,64] z) '
        f"<int8 zero = {{3}}, float unit = {{1.0}}> {{ {attention} {behind} {RESIDUE} }}"
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.int8), "eye"))
    return proto


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_a_right_fusion_whose_result_falls_to_another_integer(behind: str) -> None:
    """Of 262,144 numbers some lie so near to the middle between two integers that the last bit decides."""
    proto = model(behind)
    result = fa_compiler.optimize(proto)
    assert result.report.count("fused") == 1
    (output,) = fa_compiler.verify(proto, result.model).outputs
    assert output.largest is not None and output.largest > 5e-3
    assert output.fault is None
    assert output.unrounded is not None and output.unrounded < 1e-5


def _attention(fused: onnx.ModelProto) -> onnx.NodeProto:
    return next(node for node in fused.graph.node if node.op_type == "FlashAttention")


def _other_scale(fused: onnx.ModelProto) -> None:
    next(attr for attr in _attention(fused).attribute if attr.name == "scale_value").f = 0.1255


def _other_operand(fused: onnx.ModelProto) -> None:
    _attention(fused).input[1] = "v"


def _other_step(fused: onnx.ModelProto) -> None:
    (node,) = (node for node in fused.graph.node if node.output[0] == "step")
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0.0101)))


def _other_point(fused: onnx.ModelProto) -> None:
    (node,) = (node for node in fused.graph.node if node.op_type == "DequantizeLinear")
    del node.input[2:]


WRONG = {
    "another scale of the scores": (_other_scale, "a DequantizeLinear"),
    "the same before a product": (_other_scale, "a product of integers"),
    "another key": (_other_operand, "a DequantizeLinear"),
    "another key before a constant scale": (_other_operand, "a constant scale"),
    "another step": (_other_step, "a constant scale"),
    "another zero point": (_other_point, "a constant scale"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_fusion_is_found(name: str) -> None:
    """Its difference without the roundings is larger than that of rounding."""
    change, behind = WRONG[name]
    proto = model(BEHIND[behind])
    fused = fa_compiler.optimize(proto).model
    assert isinstance(fused, onnx.ModelProto)
    assert fa_compiler.verify(proto, fused).same
    change(fused)
    (output,) = fa_compiler.verify(proto, fused).outputs
    assert output.fault is not None


def test_a_rounding_that_is_lost_is_found() -> None:
    proto = model(BEHIND["a DequantizeLinear"])
    other = model("d = Identity(y) ")
    (output,) = fa_compiler.verify(proto, other).outputs
    assert output.fault is not None
    assert "1 and 0 operators round to integers, or others do; --assume drop-activation-quantisation" in output.fault
    (output,) = fa_compiler.verify(other, proto).outputs
    assert output.fault is not None


@pytest.mark.parametrize(
    "proto",
    [
        built(BODIES["behind the product"]),
        built(BODIES["everywhere"]),
        on_integers(ON_INTEGERS["scaled, and a mask"] + INTEGER_SOFTMAX + INTEGER_RESULT),
    ],
    ids=["behind the product", "everywhere", "operators on integers"],
)
def test_roundings_that_the_user_does_not_need(proto: onnx.ModelProto, tmp_path: Path) -> None:
    """The command that the decline recommends passes its own comparison."""
    source, target = saved(proto, tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    word = ["--assume", DROP_ROUNDINGS]
    assert main(["optimize", str(source), "-o", str(target), "--verify", "--strict", *word]) == 0
    assert main(["verify", str(source), str(target), *word]) == 0
    assert main(["verify", str(source), str(target)]) == 1


OPERATORS = {
    "by axis": "i = QuantizeLinear<axis=1>(x, steps, points) z = DequantizeLinear<axis=1>(i, steps, points)",
    "by the last axis": (
        "i = QuantizeLinear<axis=-1>(x, steps4, points4) z = DequantizeLinear<axis=-1>(i, steps4, points4)"
    ),
    "a weight": "d = DequantizeLinear(w, step, point) z = MatMul(x, d)",
    "a weight by column": "d = DequantizeLinear<axis=1>(w, steps4, points4) z = MatMul(x, d)",
    "a product of integers": (
        "i, s, p = DynamicQuantizeLinear(x) m = MatMulInteger(i, w, p, points4) f = Cast<to=1>(m) t = Mul(s, steps4) "
        "z = Mul(f, t)"
    ),
    "moved": (
        "i, s, p = DynamicQuantizeLinear(x) t = Transpose<perm=[0,1,3,2]>(i) u = Transpose<perm=[0,1,3,2]>(t) "
        "z = DequantizeLinear(u, s, p)"
    ),
    "a convolution": (
        "i, s, p = DynamicQuantizeLinear(x) m = ConvInteger<kernel_shape=[1,1]>(i, k, p, point) f = Cast<to=1>(m) "
        "t = Mul(s, step) z = Mul(f, t)"
    ),
    "QLinearConv": (
        "i = QuantizeLinear(x, step, point) m = QLinearConv<kernel_shape=[1,1]>(i, step, point, k, steps, zeros, step, "
        "point, bias) z = DequantizeLinear(m, step, point)"
    ),
    "QLinearMatMul": (
        "i = QuantizeLinear(x, step, point) m = QLinearMatMul(i, step, point, w, steps4, points4, step, point) "
        "z = DequantizeLinear(m, step, point)"
    ),
    "MatMulIntegerToFloat": (
        "i, s, p = DynamicQuantizeLinear(x) z = com.microsoft.MatMulIntegerToFloat(i, w, s, steps4, p, points4, floats)"
    ),
    "DynamicQuantizeMatMul": "z = com.microsoft.DynamicQuantizeMatMul(x, w, steps4, points4, floats)",
    "operators on integers": (
        "i = QuantizeLinear(x, step, point) a = com.microsoft.QLinearAdd(i, step, point, i, step, point, wide, point) "
        "b = com.microsoft.QLinearMul(a, wide, point, i, step, point, wide, point) "
        "c = com.microsoft.QLinearSigmoid(b, wide, point, fine, low) "
        "d = com.microsoft.QLinearConcat<axis=1>(fine, low, c, fine, low, c, fine, low) "
        "e = DequantizeLinear(d, fine, low) ends = Constant<value_ints=[3]>() none = Constant<value_ints=[0]>() "
        "one = Constant<value_ints=[1]>() z = Slice(e, none, ends, one)"
    ),
    "in a branch": (
        "yes = Constant<value=bool {1}>() z = If(yes) <then_branch = a () => (float[2,3,5,4] r) {"
        "i = QuantizeLinear(x, step, point) r = DequantizeLinear(i, step, point)}, "
        "else_branch = b () => (float[2,3,5,4] o) {o = Identity(x)}>"
    ),
}


def small(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[2,3,5,4] x) => (float[2,3,5,4] z) '
        "<int8[4,4] w = {1,-2,3,-4, 5,-6,7,-8, 9,8,7,6, -5,4,-3,2}, float step = {0.04}, int8 point = {2}, "
        "float[3] steps = {0.03, 0.04, 0.05}, int8[3] points = {1, -2, 3}, int8[3] zeros = {0, 0, 0}, "
        "float[4] steps4 = {0.03, 0.04, 0.05, 0.06}, int8[4] points4 = {1, -2, 3, 0}, float wide = {0.1}, "
        "float fine = {0.00390625}, int8 low = {-128}, float[4] floats = {0.5, 1.0, -1.0, 0.25}, "
        "int8[3,3,1,1] k = {1,-2,3,-4,5,-6,7,-8,9}, int32[3] bias = {10, -20, 30}> "
        f"{{ {body} }}"
    )


@pytest.mark.parametrize("body", OPERATORS.values(), ids=OPERATORS)
def test_a_model_in_real_numbers_is_near_to_the_one_that_rounds(body: str) -> None:
    proto = small(body)
    made = unrounded(proto)
    ort.set_default_logger_severity(4)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with_steps, without = (
        ort.InferenceSession(each.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for each in (proto, made)
    )
    assert not np.array_equal(with_steps, without) or "weight" in body or "w, step" in body
    np.testing.assert_allclose(with_steps, without, atol=0.13)
    assert not roundings(made)


@pytest.mark.parametrize(("point", "is_kept"), [("low", True), ("point", False)])
def test_small_numbers_beside_a_large_mask(point: str, is_kept: bool) -> None:
    """A mask of -3.4e38 makes the step so large that the numbers beside it vanish in a sum with the zero point. Only
    the sum with the same one is left out: another one moves all numbers."""
    proto = small(f"i = QuantizeLinear(x, large, low) z = DequantizeLinear(i, large, {point})")
    proto.graph.initializer.append(numpy_helper.from_array(np.array(1.3e36, np.float32), "large"))
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    session = ort.InferenceSession(unrounded(proto).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    assert np.allclose(found, x, atol=1e-6) is is_kept


UNKNOWN = {
    "a scale that is computed": "s = ReduceMax<keepdims=0>(x) i = QuantizeLinear(x, s) z = DequantizeLinear(i, s)",
    "an operator of integers": "i = QuantizeLinear(x, step, point) a = com.microsoft.QLinearGlobalAveragePool("
    "i, step, point, step, point) z = DequantizeLinear(a, step, point)",
}


@pytest.mark.parametrize("body", UNKNOWN.values(), ids=UNKNOWN)
def test_models_of_which_there_is_none_in_real_numbers(body: str) -> None:
    with pytest.raises(NotKnown, match=r"the scale or zero point s is computed|no QLinearGlobalAveragePool"):
        unrounded(small(body))


def test_scales_by_block_and_old_opsets() -> None:
    proto = small("i = QuantizeLinear(x, step, point) z = DequantizeLinear(i, step, point)")
    proto.graph.node[1].attribute.append(onnx.helper.make_attribute("block_size", 2))
    with pytest.raises(NotKnown, match="scales by block"):
        unrounded(proto)
    proto.opset_import[0].version = 12
    with pytest.raises(NotKnown, match="opset below 13"):
        unrounded(proto)
