"""RMSNorm in every spelling of the grammar, with the near misses that stay as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import fa_compiler
from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import assert_equal, fused, only_line, operators, others, parse

CONSTANTS = "float two = {2}, float one = {1}, float minus = {-0.5}, float half = {0.5}, int64[1] last = {-1}"
HALF = "float16[B,S,8] h"
HALF_Y = "float16[B,S,8] y"
MEAN = "s = Pow(x, two) m = ReduceMean<keepdims=1>(s, last) f = Add(m, e) "
RATE = MEAN + "r = Sqrt(f) i = Reciprocal(r) "
NORM = RATE + "n = Mul(x, i) "
OLD_NORM = "s = Pow(x, two) m = ReduceMean<axes=[-1], keepdims=1>(s) f = Add(m, e) r = Sqrt(f) i = Reciprocal(r) "
OLD_NORM += "n = Mul(x, i) "


def model(
    body: str, inputs: str = "float[B,S,8] x", outputs: str = "float[B,S,8] y", opset: int = 20, more: str = ""
) -> onnx.ModelProto:
    return parse(body, inputs, outputs, opset, CONSTANTS + (f", {more}" if more else ""))


SPELLINGS = {
    "1": "s = Mul(x, x) m = ReduceMean<keepdims=1>(s, last) f = Add(m, e) r = Sqrt(f) i = Reciprocal(r) "
    "n = Mul(x, i) y = Mul(n, w)",
    "2": NORM + "y = Mul(n, w)",
    "3, the axis counted from the front": "a = Constant<value_ints=[2]>() s = Pow(x, two) "
    "m = ReduceMean<keepdims=1>(s, a) f = Add(m, e) r = Sqrt(f) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w)",
    "4, the other order": "s = Pow(x, two) m = ReduceMean(s, last) f = Add(e, m) r = Sqrt(f) i = Reciprocal(r) "
    "n = Mul(i, x) y = Mul(w, n)",
    "5": "s = Pow(x, two) m = ReduceMean(s, last) r = Sqrt(m) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w)",
    "6, a power": MEAN + "r = Pow(f, half) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w)",
    "7, a division": MEAN + "r = Sqrt(f) i = Div(one, r) n = Mul(x, i) y = Mul(n, w)",
    "8": MEAN + "i = Pow(f, minus) n = Mul(x, i) y = Mul(n, w)",
    "10": MEAN + "r = Sqrt(f) n = Div(x, r) y = Mul(n, w)",
    "11, axes of 1": "v = Constant<value_ints=[1,1,8]>() k = Reshape(w, v) " + NORM + "y = Mul(n, k)",
    "11, a weight that is computed": NORM + "c = Add(w, one) y = Mul(n, c)",
    "11, idle casts": "c = Cast<to=1>(x) s = Pow(c, two) m = ReduceMean(s, last) f = Add(m, e) r = Sqrt(f) "
    "i = Div(one, r) n = Mul(c, i) d = Cast<to=1>(n) y = Mul(d, w)",
    "no weight": NORM + "y = Identity(n)",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    proto = model(SPELLINGS[spelling])
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.rounded) == ("fused", "RmsNorm", False)
    assert operators(result) == ["RmsNorm"]
    assert set(others(result)) <= {"Identity", "Cast", "Reshape"}
    assert_equal(proto, result)


@pytest.mark.parametrize("opset", [13, 14, 17])
def test_older_opsets(opset: int) -> None:
    proto = model(OLD_NORM + "y = Mul(n, w)", opset=opset)
    result, report = fused(proto)
    assert operators(result) == ["RmsNorm"]
    assert only_line(report).replaced == 7
    assert_equal(proto, result)


def test_the_weight_that_is_computed_is_one_of_the_file() -> None:
    result, _ = fused(model(NORM + "c = Add(w, one) y = Mul(n, c)"))
    (node,) = result.graph.node
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    assert stored[node.input[1]].tolist() == [2, 3, 4, 0, 1.5, 1.25, -1, 2]


@pytest.mark.parametrize("move", ["Identity(grid)", "Transpose(grid)"])
def test_the_computed_weight_has_constants_of_another_shape(move: str) -> None:
    grid = "float[2,4] grid = {1, 2, 3, 4, 5, 6, 7, 8}"
    body = NORM + f"v = Constant<value_ints=[8]>() k = {move} q = Reshape(k, v) c = Add(q, w) y = Mul(n, c)"
    proto = model(body, more=grid)
    result, report = fused(proto)
    assert only_line(report).op == "RmsNorm"
    assert operators(result) == ["RmsNorm"] and others(result) == []
    assert_equal(proto, result)


NARROW = "x = Cast<to=1>(h) "
HALVES = {
    "13": (NARROW + NORM + "c = Cast<to=10>(n) y = Mul(c, g)", True),
    "13, x cast twice": (NARROW + RATE + "z = Cast<to=1>(h) n = Mul(z, i) c = Cast<to=10>(n) y = Mul(c, g)", True),
    "14, a weight of float32": (NARROW + NORM + "z = Mul(n, w) y = Cast<to=10>(z)", False),
    "14, a weight of 16 bits": (NARROW + NORM + "k = Cast<to=1>(g) z = Mul(n, k) y = Cast<to=10>(z)", False),
    "13, no weight": (NARROW + NORM + "y = Cast<to=10>(n)", False),
}


@pytest.mark.parametrize("spelling", HALVES)
def test_sixteen_bits(spelling: str) -> None:
    body, rounded = HALVES[spelling]
    proto = model(body, HALF, HALF_Y)
    result, report = fused(proto)
    line = only_line(report)
    assert (line.op, line.rounded) == ("RmsNorm", rounded)
    assert others(result) == []
    assert ("rounds to 16 bits" in report.around_lines[0]) == rounded
    assert_equal(proto, result)


def test_a_weight_of_float32_beside_16_bits_stays_apart_on_310p() -> None:
    proto = model(NARROW + NORM + "z = Mul(n, w) y = Cast<to=10>(z)", "float16[B,S,8] h", HALF_Y)
    result, report = fused(proto, soc_version="310P")
    assert only_line(report).op == "RmsNorm"
    assert others(result) == ["Cast", "Cast"]
    assert_equal(proto, result)


def test_sixteen_bits_below_opset_15_are_normalised_in_float32() -> None:
    proto = model(NARROW + OLD_NORM + "c = Cast<to=10>(n) y = Mul(c, g)", HALF, HALF_Y, opset=14)
    result, report = fused(proto)
    assert only_line(report).op == "RmsNorm"
    assert others(result) == ["Cast", "Cast", "Mul"]
    assert_equal(proto, result)


def test_ready_made_norms() -> None:
    proto = model("y = RMSNormalization<epsilon=0.01>(x, w)", opset=23)
    result, report = fused(proto)
    assert only_line(report).op == "RmsNorm"
    assert_equal(proto, result)
    proto = model("y = SimplifiedLayerNormalization<axis=-1, epsilon=0.01>(x, w)")
    result, report = fused(proto)
    assert only_line(report).op == "RmsNorm"
    assert result.graph.node[0].attribute[0].f == np.float32(0.01)


TWO = "float[B,S,8] a, float[B,S,8] b"
BOTH = "float[B,S,8] y, float[B,S,8] x"


def test_the_sum_in_front_is_a_result_of_the_norm() -> None:
    proto = model("x = Add(a, b) " + NORM + "y = Mul(n, w)", TWO, BOTH)
    result, report = fused(proto)
    assert only_line(report).op == "AddRmsNorm"
    assert others(result) == []
    assert [value.name for value in result.graph.output] == ["y", "x"]
    assert_equal(proto, result)


def test_a_sum_goes_to_the_first_norm_that_reads_it() -> None:
    second = NORM.translate(str.maketrans({"s": "t", "m": "o", "f": "j", "r": "k", "i": "l", "n": "p"}))
    second = "t = Pow(x, two) o = ReduceMean(t, last) j = Add(o, e) k = Sqrt(j) l = Reciprocal(k) p = Mul(x, l) "
    proto = model("x = Add(a, b) " + NORM + second + "u = Mul(n, w) v = Mul(p, w) y = Add(u, v)", TWO)
    result, _ = fused(proto)
    assert sorted(operators(result)) == ["AddRmsNorm", "RmsNorm"]
    assert_equal(proto, result)


def test_a_sum_of_16_bits_is_taken_where_the_model_rounds_as_the_operator() -> None:
    ends = {"c = Cast<to=10>(n) y = Mul(c, g)": "AddRmsNorm", "z = Mul(n, w) y = Cast<to=10>(z)": "RmsNorm"}
    for end, op in ends.items():
        proto = model("h = Add(a, b) " + NARROW + NORM + end, TWO.replace("float", "float16"), HALF_Y)
        result, _ = fused(proto)
        assert operators(result) == [op]
        assert_equal(proto, result, odd=False)


def test_skip_simplified_layer_normalization() -> None:
    body = "y, m, i, x = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.01>(a, b, w)"
    proto = model(body.replace("y, m, i, x", "y, , , x"), TWO, BOTH)
    result, report = fused(proto)
    assert only_line(report).op == "AddRmsNorm"
    assert_equal(proto, result)


def test_skip_simplified_layer_normalization_with_a_bias() -> None:
    body = "y, , , x = com.microsoft.SkipSimplifiedLayerNormalization(a, b, w, bias)"
    proto = model(body, TWO, BOTH, more="float[8] bias = {1,0,-1,2,0.5,0,0,3}")
    result, report = fused(proto)
    assert (only_line(report).op, only_line(report).added) == ("AddRmsNorm", 2)
    assert others(result) == ["Add"]
    assert_equal(proto, result)
    _, report = fused(model(body, f"{TWO}, float[B,S,8] bias", BOTH))
    assert only_line(report).code == Code.SHAPE


NOT_SUMS = {
    "a bias": ("x = Add(a, w) ", "float[B,S,8] a"),
    "what broadcasts": ("x = Add(a, b) ", "float[B,S,8] a, float[1,S,8] b"),
    "sizes of two names": ("x = Add(a, b) ", "float[B,S,8] a, float[B,T,8] b"),
    "twice the same": ("x = Add(a, a) ", "float[B,S,8] a"),
}


@pytest.mark.parametrize("what", NOT_SUMS)
def test_other_sums_stay(what: str) -> None:
    body, inputs = NOT_SUMS[what]
    result, report = fused(model(body + NORM + "y = Mul(n, w)", inputs))
    assert [line.op for line in report.around] == ["RmsNorm"]
    assert others(result) == ["Add"]


DECLINED = {
    "the mean of two axes": (NORM.replace("last", "k") + "y = Mul(n, w)", Code.SHAPE, "int64[2] k = {1,2}", {}),
    "the mean of another axis": (NORM.replace("last", "k") + "y = Mul(n, w)", Code.SHAPE, "int64[1] k = {1}", {}),
    "the rate is read": (NORM + "z = Mul(n, w) y = Add(z, i)", Code.READ_INSIDE, "", {}),
    "an epsilon below 0": (NORM.replace("e)", "k)") + "y = Mul(n, w)", Code.ILLEGAL, "float k = {-1e-6}", {}),
    "float64": (
        "s = Mul(x, x) m = ReduceMean(s, last) r = Sqrt(m) y = Div(x, r)",
        Code.DTYPE,
        "",
        {"inputs": "double[B,S,8] x", "outputs": "double[B,S,8] y"},
    ),
    "an epsilon of more axes": (
        NORM.replace("e)", "k)") + "y = Mul(n, w)",
        Code.SHAPE,
        "float[1,1,1,1] k = {1e-5}",
        {},
    ),
    "an exponent of more axes": (NORM.replace("two", "k") + "y = Mul(n, w)", Code.SHAPE, "float[1,1,1,1] k = {2}", {}),
    "a width that is open": (
        NORM + "y = Identity(n)",
        Code.SHAPE,
        "",
        {"inputs": "float[B,S,D] x", "outputs": "float[B,S,D] y"},
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_declined(what: str) -> None:
    body, code, more, options = DECLINED[what]
    proto = model(body, more=more, **options)
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.code) == ("declined", code), line
    assert line.culprit and line.reason and not line.reason.endswith(".")
    assert operators(result) == []


def test_squares_of_float16_are_declined() -> None:
    body = "s = Mul(x, x) m = ReduceMean(s, last) f = Add(m, small) r = Sqrt(f) n = Div(x, r) y = Mul(n, g)"
    proto = model(body, "float16[B,S,8] x", HALF_Y)
    _, report = fused(proto)
    line = only_line(report)
    assert line.code == Code.DTYPE
    assert line.hint == "export again with norms in float32"


@pytest.mark.parametrize(
    "body",
    [
        NORM.replace("two", "three") + "y = Mul(n, w)",  # the mean of cubes
        "s = Mul(x, x) m = ReduceSum(s, last) f = Add(m, e) r = Sqrt(f) y = Div(x, r)",  # the sum: another norm
        "s = Mul(x, x) m = ReduceMean(s, last) f = Add(m, e) r = Sqrt(f) y = Div(r, x)",  # the reciprocal
        RATE + "z = Neg(x) y = Mul(z, i)",  # another tensor
        MEAN + "y = Mul(x, f)",  # no root
    ],
)
def test_near_misses_are_no_norms(body: str) -> None:
    result, report = fused(model(body, more="float three = {3}"))
    assert not report.around
    assert operators(result) == []


@pytest.mark.parametrize(
    "body",
    [
        NORM + "y = Mul(n, k)",  # a number for each row
        NORM + "y = Add(n, w)",
        NORM + "z = Mul(n, w) q = Neg(n) y = Add(z, q)",  # two readers of the normalised rows
        NORM + "z = Mul(n, more) y = Squeeze(z, front)",  # a weight of more axes than x
    ],
)
def test_what_is_no_weight_stays_behind_the_norm(body: str) -> None:
    more = "float[3,1] k = {1,2,3}, float[1,1,1,8] more = {1,2,3,4,5,6,7,8}, int64[1] front = {0}"
    proto = model(body, more=more)
    result, _ = fused(proto)
    assert operators(result) == ["RmsNorm"]
    assert others(result)
    assert_equal(proto, result)


def test_attention_alone() -> None:
    proto = model(NORM + "y = Mul(n, w)")
    result, report = fused(proto, only="attention")
    assert not report.around
    assert result == onnx.ModelProto.FromString(proto.SerializeToString())


def test_products_and_releases_without_the_operator() -> None:
    proto = model(NORM + "y = Mul(n, w)")
    for options, word in (({"soc_version": "310B"}, "310B"), ({"cann": "8.0"}, "no variant of RmsNorm is known")):
        _, report = fused(proto, **options)
        line = only_line(report)
        assert line.code == Code.ILLEGAL
        assert word in str(line.reason)
        assert report.around_lines[0].startswith(f"around attention: {line}")


def test_the_pass_of_onnx_ir_gives_the_functions_too() -> None:
    proto = model(NORM + "y = Mul(n, w)")
    once = fa_compiler.FuseAttention("ascend")(ir.from_proto(proto))
    assert once.modified
    assert_equal(proto, ir.to_proto(once.model))
    again = fa_compiler.FuseAttention("ascend")(once.model)
    assert not again.modified
    assert_equal(proto, ir.to_proto(again.model))


def test_a_fused_file_is_read_again() -> None:
    proto = model(NORM + "y = Mul(n, w)")
    once, _ = fused(proto)
    again, report = fused(once)
    assert not report.around
    assert operators(again) == ["RmsNorm"]
    assert [function.name for function in once.functions] == ["RmsNorm"]
    assert_equal(once, again)
