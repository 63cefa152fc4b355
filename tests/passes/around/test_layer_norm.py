"""LayerNorm in every spelling of the grammar, with the near misses that stay as they are."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import assert_equal, attributes, fused, only_line, operators, others, parse

CONSTANTS = "float two = {2}, float one = {1}, float minus = {-0.5}, float half = {0.5}, int64[1] last = {-1}, "
CONSTANTS += "float[8] b = {1,-1,0.5,2,0,3,-2,0.25}"
CENTRED = "a = ReduceMean(x, last) c = Sub(x, a) "
RATE = "s = Pow(c, two) m = ReduceMean(s, last) f = Add(m, e) r = Sqrt(f) "
OUT = "i = Reciprocal(r) g1 = Mul(i, w) xs = Mul(x, g1) as = Mul(a, g1) o = Sub(b, as) "
ROWS = CENTRED + RATE + "n = Div(c, r) "
NORM = ROWS + "z = Mul(n, w) y = Add(z, b)"
HALF, HALF_Y = "float16[B,S,8] h", "float16[B,S,8] y"
TWO, BOTH = "float[B,S,8] p, float[B,S,8] q", "float[B,S,8] y, float[B,S,8] x"


def model(
    body: str, inputs: str = "float[B,S,8] x", outputs: str = "float[B,S,8] y", opset: int = 20, more: str = ""
) -> onnx.ModelProto:
    proto = parse(body, inputs, outputs, opset, CONSTANTS + (f", {more}" if more else ""))
    if re.search(r"[( ]k[,)]", body):
        array = np.array([1, -1, 0.5, 2, 0, 3, -2, 0.25], np.float16)
        proto.graph.initializer.append(numpy_helper.from_array(array, "k"))
    return proto


SPELLINGS = {
    "1, 2 and 4": NORM,
    "the other order": ROWS + "z = Mul(w, n) y = Add(b, z)",
    "a rate": CENTRED + RATE + "i = Reciprocal(r) n = Mul(c, i) z = Mul(n, w) y = Add(z, b)",
    "a power": CENTRED + "s = Mul(c, c) m = ReduceMean(s, last) f = Add(m, e) i = Pow(f, minus) n = Mul(i, c) "
    "z = Mul(n, w) y = Add(z, b)",
    "the axis counted from the front": "t = Constant<value_ints=[2]>() a = ReduceMean(x, t) c = Sub(x, a) "
    + RATE
    + "n = Div(c, r) z = Mul(n, w) y = Add(z, b)",
    "no bias": ROWS + "y = Mul(n, w)",
    "no weight": ROWS + "y = Add(n, b)",
    "neither": ROWS + "y = Identity(n)",
    "a bias that is computed": ROWS + "z = Mul(n, w) d = Add(b, one) y = Add(z, d)",
    "axes of 1": "v = Constant<value_ints=[1,1,8]>() g1 = Reshape(w, v) b1 = Reshape(b, v) "
    + ROWS
    + "z = Mul(n, g1) y = Add(z, b1)",
    "idle casts": "l = Cast<to=1>(x) a = ReduceMean(l, last) c = Sub(l, a) "
    + RATE
    + "n = Div(c, r) d = Cast<to=1>(n) z = Mul(d, w) y = Add(z, b)",
    "no epsilon": CENTRED + "s = Pow(c, two) m = ReduceMean(s, last) r = Sqrt(m) n = Div(c, r) y = Mul(n, w)",
    "7": CENTRED + RATE + OUT + "y = Add(xs, o)",
    "7, the other orders": CENTRED
    + RATE
    + OUT.replace("(i, w)", "(w, i)").replace("(a, g1)", "(g1, a)")
    + "y = Add(o, xs)",
    "1, pooled": "a = GlobalAveragePool(x) c = Sub(x, a) s = Mul(c, c) m = GlobalAveragePool(s) "
    + "f = Add(m, e) r = Sqrt(f) "
    + OUT
    + "y = Add(xs, o)",
    "5 and 9": "y = LayerNormalization<axis=2>(x, w)",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    proto = model(SPELLINGS[spelling])
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.rounded) == ("fused", "LayerNormV4", False)
    assert operators(result) == ["LayerNormV4"]
    assert set(others(result)) <= {"Identity", "Cast", "Reshape"}
    assert_equal(proto, result)


@pytest.mark.parametrize("opset", [13, 14, 17])
def test_older_opsets(opset: int) -> None:
    body = NORM.replace("ReduceMean(x, last)", "ReduceMean<axes=[-1]>(x)")
    proto = model(body.replace("ReduceMean(s, last)", "ReduceMean<axes=[-1]>(s)"), opset=opset)
    result, report = fused(proto)
    assert only_line(report).replaced == 9
    assert others(result) == []
    assert_equal(proto, result)


def test_the_operands_of_the_operator() -> None:
    result, _ = fused(model(ROWS + "y = Mul(n, w)"))
    (node,) = result.graph.node
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    x, shape, gamma, beta = node.input
    assert (x, gamma) == ("x", "w")
    assert (stored[shape].tolist(), stored[shape].dtype) == ([8], np.int32)
    assert stored[beta].tolist() == [0] * 8
    assert node.attribute[0].f == np.float32(1e-5)


NARROW = "x = Cast<to=1>(h) "
ENDS_16 = "d = Cast<to=10>(n) z = Mul(d, g) y = Add(z, k)"
HALVES = {
    "13": (NARROW + ROWS + ENDS_16, True),
    "13, a weight alone": (NARROW + ROWS + "d = Cast<to=10>(n) y = Mul(d, g)", True),
    "13, no weight": (NARROW + ROWS + "y = Cast<to=10>(n)", False),
    "14": (NARROW + ROWS + "z = Mul(n, w) l = Add(z, b) y = Cast<to=10>(l)", False),
    "14, weights of 16 bits": (
        NARROW + ROWS + "g1 = Cast<to=1>(g) b1 = Cast<to=1>(k) z = Mul(n, g1) l = Add(z, b1) y = Cast<to=10>(l)",
        False,
    ),
    "14, a weight of each type": (
        NARROW + ROWS + "g1 = Cast<to=1>(g) z = Mul(n, g1) l = Add(z, b) y = Cast<to=10>(l)",
        False,
    ),
    "3": ("a = ReduceMean(h, last) l = Sub(h, a) c = Cast<to=1>(l) " + RATE + "n = Div(c, r) " + ENDS_16, True),
    "3, no weight": (
        "a = ReduceMean(h, last) l = Sub(h, a) c = Cast<to=1>(l) " + RATE + "n = Div(c, r) y = Cast<to=10>(n)",
        True,
    ),
    "5": ("y = LayerNormalization(h, g)", True),
}


@pytest.mark.parametrize("spelling", HALVES)
def test_sixteen_bits(spelling: str) -> None:
    body, rounded = HALVES[spelling]
    proto = model(body, HALF, HALF_Y)
    result, report = fused(proto)
    line = only_line(report)
    assert (line.op, line.rounded) == ("LayerNormV4", rounded)
    assert set(others(result)) <= {"Cast"}
    assert not others(result) or spelling == "14, a weight of each type"  # gamma stays one of float32
    assert ("rounds to 16 bits" in report.around_lines[0]) == rounded
    assert_equal(proto, result, odd=False)


def test_weights_of_two_types_are_not_joined() -> None:
    proto = model(NARROW + ROWS + "z = Mul(n, w) d = Cast<to=10>(z) y = Add(d, k)", HALF, HALF_Y)
    result, report = fused(proto)
    assert only_line(report).op == "LayerNormV4"
    assert others(result) == ["Add"]
    assert_equal(proto, result, odd=False)


SUMS = {
    "8": "x = Add(p, q) " + NORM,
    "8 and 7": "x = Add(p, q) " + CENTRED + RATE + OUT + "y = Add(xs, o)",
    "8, no bias": "x = Add(p, q) " + ROWS + "y = Mul(n, w)",
    "8 and 5": "x = Add(p, q) y = LayerNormalization(x, w, b)",
    "6": "y, , , x = com.microsoft.SkipLayerNormalization<epsilon=1e-5>(p, q, w, b)",
    "6, no bias": "y, , , x = com.microsoft.SkipLayerNormalization(p, q, w)",
}


@pytest.mark.parametrize("spelling", SUMS)
@pytest.mark.parametrize("read", [True, False])
def test_the_sum_in_front_is_a_result_of_the_norm(spelling: str, read: bool) -> None:
    proto = model(SUMS[spelling], TWO, BOTH if read else "float[B,S,8] y")
    result, report = fused(proto)
    line = only_line(report)
    assert (line.op, line.rounded, others(result)) == ("AddLayerNorm", False, [])
    assert attributes(result)["additional_output"] == read
    assert_equal(proto, result)


def test_a_sum_goes_to_the_first_norm_that_reads_it() -> None:
    proto = model("x = Add(p, q) u = LayerNormalization(x, w) v = LayerNormalization(x, b) y = Add(u, v)", TWO)
    result, _ = fused(proto)
    assert operators(result) == ["AddLayerNorm", "LayerNormV4"]
    assert attributes(fused(proto, soc_version="310P")[0])["additional_output"]  # the rows are too long for LayerNormV4
    assert_equal(proto, result)


def test_a_bias_in_front_of_the_sum() -> None:
    proto = model("y, , , x = com.microsoft.SkipLayerNormalization(p, q, w, b, b)", TWO, BOTH)
    result, report = fused(proto)
    assert (only_line(report).op, only_line(report).added) == ("AddLayerNorm", 2)
    assert others(result) == ["Add"]
    assert_equal(proto, result)
    _, report = fused(model("y, , , x = com.microsoft.SkipLayerNormalization(p, q, w, b, q)", TWO, BOTH))
    assert only_line(report).code == Code.SHAPE


HALF_SUM = "x = Add(p, q) y = LayerNormalization(x, g, k)"


def test_a_sum_of_16_bits_is_not_rounded_by_the_operator() -> None:
    proto = model(HALF_SUM, TWO.replace("float", "float16"), BOTH.replace("float", "float16"))
    result, report = fused(proto)
    assert (only_line(report).op, only_line(report).rounded) == ("AddLayerNorm", True)
    assert_equal(proto, result, odd=False)
    _, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).code == Code.DTYPE
    body = "y, , , x = com.microsoft.SkipLayerNormalization(p, q, g, k, k)"
    _, report = fused(model(body, TWO.replace("float", "float16"), BOTH.replace("float", "float16")))
    assert only_line(report).code == Code.DTYPE


def test_a_ready_made_norm_of_one_tensor_is_one_operator_already() -> None:
    result, report = fused(model("y = LayerNormalization(x, w, b)"))
    assert not report.around
    assert others(result) == ["LayerNormalization"]


NOT_SUMS = {
    "a bias": ("x = Add(p, b) ", "float[B,S,8] p"),
    "what broadcasts": ("x = Add(p, q) ", "float[B,S,8] p, float[1,S,8] q"),
    "sizes of two names": ("x = Add(p, q) ", "float[B,S,8] p, float[B,T,8] q"),
    "twice the same": ("x = Add(p, p) ", "float[B,S,8] p"),
}


@pytest.mark.parametrize("what", NOT_SUMS)
def test_other_sums_stay(what: str) -> None:
    body, inputs = NOT_SUMS[what]
    result, report = fused(model(body + NORM, inputs))
    assert [line.op for line in report.around] == ["LayerNormV4"]
    assert others(result) == ["Add"]


DECLINED = {
    "a mean along another axis": (NORM.replace("(x, last)", "(x, o)"), Code.SHAPE, "int64[1] o = {1}", {}),
    "a variance along another axis": (NORM.replace("(s, last)", "(s, o)"), Code.SHAPE, "int64[1] o = {1}", {}),
    "two axes": (NORM.replace("last", "o"), Code.SHAPE, "int64[2] o = {1,2}", {}),
    "two axes, ready made": (
        "y = LayerNormalization<axis=1>(x, o)",
        Code.SHAPE,
        "float[1,8] o = {1,2,3,4,5,6,7,8}",
        {},
    ),
    "another type": ("y = LayerNormalization<stash_type=11>(x, w)", Code.DTYPE, "", {}),
    "a weight for each row": ("y = LayerNormalization(x, o)", Code.SHAPE, "float[3,1] o = {1,2,3}", {}),
    "the mean is read": (NORM.replace("y =", "t =") + " y = Add(t, a)", Code.READ_INSIDE, "", {}),
    "the mean is read, ready made": ("t, a = LayerNormalization(x, w) y = Add(t, a)", Code.READ_INSIDE, "", {}),
    "an epsilon below 0": (NORM.replace("e)", "o)"), Code.ILLEGAL, "float o = {-1e-6}", {}),
    "float64": (
        CENTRED + "s = Mul(c, c) m = ReduceMean(s, last) r = Sqrt(m) y = Div(c, r)",
        Code.DTYPE,
        "",
        {"inputs": "double[B,S,8] x", "outputs": "double[B,S,8] y"},
    ),
    "16 bits": (
        "a = ReduceMean(h, last) c = Sub(h, a) s = Mul(c, c) m = ReduceMean(s, last) r = Sqrt(m) y = Div(c, r)",
        Code.DTYPE,
        "",
        {"inputs": HALF, "outputs": HALF_Y},
    ),
    "a width that is open": (
        ROWS + "y = Identity(n)",
        Code.SHAPE,
        "",
        {"inputs": "float[B,S,D] x", "outputs": "float[B,S,D] y"},
    ),
    "a sum that broadcasts": (
        "y, , , x = com.microsoft.SkipLayerNormalization(p, q, w)",
        Code.SHAPE,
        "",
        {"inputs": "float[B,S,8] p, float[1,S,8] q", "outputs": BOTH},
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_declined(what: str) -> None:
    body, code, more, options = DECLINED[what]
    result, report = fused(model(body, more=more, **options))
    line = only_line(report)
    assert (line.status, line.code) == ("declined", code), line
    assert line.culprit and line.reason and not line.reason.endswith(".")
    assert operators(result) == []


NEAR_MISSES = {
    "multiplied out, another mean": CENTRED
    + RATE
    + "l = Neg(a) "
    + OUT.replace("(a, g1)", "(l, g1)")
    + "y = Add(xs, o)",
    "multiplied out, a sum": CENTRED + RATE + OUT.replace("Sub(b, as)", "Add(b, as)") + "y = Add(xs, o)",
    "multiplied out, the difference in the other order": CENTRED
    + RATE
    + OUT.replace("Sub(b, as)", "Sub(as, b)")
    + "y = Add(xs, o)",
    "multiplied out, another scale": CENTRED
    + RATE
    + "g2 = Neg(w) "
    + OUT.replace("as = Mul(a, g1)", "h1 = Mul(a, g2) as = Mul(h1, i)")
    + "y = Add(xs, o)",
    "the mean of another tensor": "l = Neg(x) a = ReduceMean(l, last) c = Sub(x, a) " + RATE + "y = Div(c, r)",
    "what is divided is not centred": CENTRED + RATE + "y = Div(x, r)",
    "epsilon behind the root": CENTRED
    + "s = Pow(c, two) m = ReduceMean(s, last) r = Sqrt(m) f = Add(r, e) y = Div(c, f)",
    "the deviation of a sample": CENTRED
    + "s = Mul(c, c) m = ReduceSum(s, last) f = Div(m, half) r = Sqrt(f) y = Div(c, r)",
    "the variance": CENTRED + "s = Pow(c, two) m = ReduceMean(s, last) f = Add(m, e) y = Div(c, f)",
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_near_misses_are_no_norms(what: str) -> None:
    result, report = fused(model(NEAR_MISSES[what]))
    assert [line.op for line in report.around] == []
    assert operators(result) == []


def test_the_mean_minus_the_row_is_a_row_of_its_own() -> None:
    proto = model("a = ReduceMean(x, last) c = Sub(a, x) " + RATE + "y = Div(c, r)")
    result, _ = fused(proto)
    assert (operators(result), others(result)) == (["RmsNorm"], ["ReduceMean", "Sub"])
    assert_equal(proto, result)


def test_a_variance_of_what_is_not_centred_is_no_layer_norm() -> None:
    """The mean is subtracted, but the squares are those of x: neither norm."""
    proto = model(CENTRED + "s = Pow(x, two) m = ReduceMean(s, last) f = Add(m, e) r = Sqrt(f) y = Div(c, r)")
    result, report = fused(proto)
    assert operators(result) == []
    assert not report.around


STAYS_BEHIND = {
    "another row": (ROWS + "z = Mul(n, w) y = Add(z, o)", "float[3,1] o = {1,2,3}"),
    "a tensor of the same shape": (ROWS + "z = Mul(n, w) y = Add(z, x)", ""),
    "a weight for each row": (ROWS + "y = Mul(n, o)", "float[3,1] o = {1,2,3}"),
    "a difference": (ROWS + "y = Sub(n, b)", ""),
    "two readers": (ROWS + "z = Mul(n, w) q = Neg(n) y = Add(z, q)", ""),
}


@pytest.mark.parametrize("what", STAYS_BEHIND)
def test_what_is_no_weight_stays_behind_the_norm(what: str) -> None:
    body, more = STAYS_BEHIND[what]
    proto = model(body, more=more)
    result, _ = fused(proto)
    assert operators(result) == ["LayerNormV4"]
    assert others(result)
    assert_equal(proto, result)


def test_a_residual_of_one_token_is_no_bias() -> None:
    proto = model(ROWS + "z = Mul(n, w) y = Add(z, q)", "float[1,1,8] x, float[1,1,8] q", "float[1,1,8] y")
    result, _ = fused(proto)
    assert operators(result) == ["LayerNormV4"]
    assert others(result) == ["Add"]
    assert_equal(proto, result, odd=False)


def test_attention_alone() -> None:
    proto = model(NORM)
    result, report = fused(proto, only="attention")
    assert not report.around
    assert result == onnx.ModelProto.FromString(proto.SerializeToString())


def test_products_and_releases_without_the_operator() -> None:
    for options, word in (
        ({"soc_version": "310B"}, "310B"),
        ({"soc_version": "310P"}, "LayerNormV4 is refused by 310P: x is DT_FLOAT"),
        ({"cann": "8.0"}, "no variant of LayerNormV4 is known"),
    ):
        _, report = fused(model(NORM), **options)
        line = only_line(report)
        assert line.code == Code.ILLEGAL
        assert word in str(line.reason), line
