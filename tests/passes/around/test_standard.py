"""What is around attention as operators of ONNX and ONNX Runtime: for which runtimes, with which tables, what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import fa_compiler
from fa_compiler.op_registry.around_kernels import AROUND
from fa_compiler.op_registry.runtimes import RUNTIMES
from fa_compiler.passes import Report
from fa_compiler.passes.answer.report import Code
from tests.passes.around import test_gelu, test_rms_norm, test_rotary
from tests.passes.around.running import NUMPY, SIZES, Array, feeds, only_line, parse, run

CPU = "ort-cpu"
OPERATORS = {name for operators in AROUND.values() for name in operators}
NORMS = {"contrib": "SimplifiedLayerNormalization", "onnx": "RMSNormalization"}
TARGETS = ["contrib", "onnx"]
CLOSE = {np.dtype(np.float32): 2e-6, np.dtype(np.float16): 4e-3}


def fused(
    proto: onnx.ModelProto, target: str, runtime: str | None = CPU, **options: Any
) -> tuple[onnx.ModelProto, Report]:
    result = fa_compiler.optimize(proto, target=target, runtime=runtime, **options)
    return result.model or proto, result.report


def operators(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node if node.op_type in OPERATORS]


def others(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node if node.op_type not in (*OPERATORS, "Constant")]


def assert_close(ones: list[Array], twos: list[Array]) -> None:
    for one, two in zip(ones, twos, strict=True):
        assert one.dtype == two.dtype
        numbers = np.where(np.isfinite(one), one, 0).astype(np.float64)
        limit = CLOSE[one.dtype] * max(1.0, float(np.abs(numbers).max()))
        np.testing.assert_allclose(two.astype(np.float64), one.astype(np.float64), rtol=0, atol=limit)


def assert_equal(proto: onnx.ModelProto, other: onnx.ModelProto, odd: bool = True) -> None:
    """Both give the same in ONNX Runtime: NaN and infinities at the same places, and numbers that are close."""
    inputs = feeds(proto, odd=odd)
    assert_close(run(proto, inputs), run(other, inputs))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spelling", test_rms_norm.SPELLINGS)
def test_norms(spelling: str, target: str) -> None:
    proto = test_rms_norm.model(test_rms_norm.SPELLINGS[spelling])
    result, report = fused(proto, target)
    line = only_line(report)
    assert (line.status, line.op, line.added, line.rounded) == ("fused", NORMS[target], 1, False)
    assert operators(result) == [NORMS[target]]
    assert_equal(proto, result)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spelling", test_rms_norm.HALVES)
def test_norms_of_16_bits(spelling: str, target: str) -> None:
    body, rounded = test_rms_norm.HALVES[spelling]
    proto = test_rms_norm.model(body, test_rms_norm.HALF, test_rms_norm.HALF_Y)
    result, report = fused(proto, target)
    line = only_line(report)
    assert (line.op, line.rounded) == (NORMS[target], rounded)
    assert others(result) == []
    assert_equal(proto, result)


SUMMED = test_rms_norm.model(f"x = Add(a, b) {test_rms_norm.NORM} y = Mul(n, w)", test_rms_norm.TWO, test_rms_norm.BOTH)


def test_a_sum_before_a_norm() -> None:
    """It is one operator only where ONNX Runtime does not join them itself."""
    alone, _ = fused(SUMMED, "contrib")
    assert operators(alone) == ["SimplifiedLayerNormalization"]
    assert others(alone).count("Add") == 1
    joined, report = fused(SUMMED, "contrib", "ort-webgpu")
    assert operators(joined) == ["SkipSimplifiedLayerNormalization"]
    assert (only_line(report).replaced, only_line(report).added) == (8, 1)
    for result in (alone, joined):
        assert_equal(SUMMED, result)


def test_a_sum_of_two_axes_stays_beside_its_norm() -> None:
    inputs, outputs = "float[B,8] a, float[B,8] b", "float[B,8] y, float[B,8] x"
    proto = test_rms_norm.model(f"x = Add(a, b) {test_rms_norm.NORM} y = Mul(n, w)", inputs, outputs)
    result, _ = fused(proto, "contrib", "ort-webgpu")
    assert operators(result) == ["SimplifiedLayerNormalization"]
    assert_equal(proto, result)


def test_the_onnx_operators_are_those_of_the_specification() -> None:
    proto = test_rms_norm.model(test_rms_norm.SPELLINGS["2"])
    result, _ = fused(proto, "onnx")
    inputs = feeds(proto, odd=False)
    assert_close(run(proto, inputs), ReferenceEvaluator(result).run(None, inputs))
    turned = tables("float[B,S,4] f", "c0 = Concat<axis=-1>(f, f) " + FULL)
    result, _ = fused(turned, "onnx")
    inputs = feeds(turned, odd=False)
    assert_close(run(turned, inputs), ReferenceEvaluator(result).run(None, inputs))


# Rotary positions.

FULL = "c1 = Cos(c0) s1 = Sin(c0) c = Unsqueeze(c1, heads) s = Unsqueeze(s1, heads) "
ROTATED = test_rotary.ROTATED + test_rotary.END
X = "float[B,6,S,8] x"


def tables(inputs: str, body: str, x: str = X, outputs: str = test_rotary.OUT, more: str = "") -> onnx.ModelProto:
    return test_rotary.model(body + ROTATED, f"{x}, {inputs}", outputs, more=more)


TABLES = {
    "1, 3 and 4": tables("float[B,S,4] f", "c0 = Concat<axis=-1>(f, f) " + FULL),
    "1, of one batch entry": tables("float[1,S,4] f", "c0 = Concat<axis=-1>(f, f) " + FULL),
    "5 and 6": tables(
        "float[50,4] f, int64[B,S] p",
        "t = Concat<axis=1>(f, f) k0 = Cos(t) l0 = Sin(t) k1 = Mul(k0, e) l1 = Mul(e, l0) "
        "c1 = Gather(k1, p) s1 = Gather(l1, p) c = Unsqueeze(c1, heads) s = Unsqueeze(s1, heads) ",
    ),
    "behind a Neg and an Identity": tables(
        "float[B,S,4] f",
        "d = Concat<axis=-1>(f, f) d1 = Neg(d) c0 = Identity(d1) " + FULL,
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", TABLES)
def test_tables_of_equal_halves(case: str, target: str) -> None:
    proto = TABLES[case]
    result, report = fused(proto, target)
    line = only_line(report)
    assert (line.status, line.op) == ("fused", "RotaryEmbedding"), line
    assert "Neg" not in others(result) or "Neg" in case
    assert_rotated(proto, result)


def assert_rotated(proto: onnx.ModelProto, result: onnx.ModelProto) -> None:
    random, inputs = np.random.default_rng(3), {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [SIZES.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim]
        inputs[value.name] = random.integers(0, 50, shape)
        if kind.elem_type != onnx.TensorProto.INT64:
            inputs[value.name] = random.normal(size=shape).astype(NUMPY[kind.elem_type])
    inputs[proto.graph.input[0].name].reshape(-1)[:3] = np.inf, -np.inf, np.nan
    assert_close(run(proto, inputs), run(result, inputs))


@pytest.mark.parametrize(("second", "status"), [(1, "fused"), (2, "declined")])
def test_constant_tables(second: int, status: str) -> None:
    """2: the halves of numbers that are known are compared."""
    proto = test_rotary.model(ROTATED, "float[B,6,3,8] x", "float[B,6,3,8] y")
    angles = np.tile(np.arange(12.0).reshape(1, 1, 3, 4), 2)
    angles[..., 7] *= second
    for name, array in (("c", np.cos(angles)), ("s", np.sin(angles))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    result, report = fused(proto, "contrib")
    line = only_line(report)
    assert line.status == status, line
    if status == "declined":
        assert line.code is Code.SHAPE
    assert_rotated(proto, result)


DECLINED = {
    "tables that are inputs": (test_rotary.model(ROTATED), "both numbers of a pair have one angle"),
    "halves of two values": (
        tables("float[B,S,4] f, float[B,S,4] o", "c0 = Concat<axis=-1>(f, o) " + FULL),
        "both numbers of a pair have one angle",
    ),
    "a product with a table": (
        tables("float[B,S,4] f, float[B,S,8] o", "d = Concat<axis=-1>(f, f) c0 = Mul(d, o) " + FULL),
        "both numbers of a pair have one angle",
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", DECLINED)
def test_unproven_tables(case: str, target: str) -> None:
    proto, reason = DECLINED[case]
    result, report = fused(proto, target)
    line = only_line(report)
    assert (line.status, line.code) == ("declined", Code.SHAPE)
    assert reason in (line.reason or "")
    assert operators(result) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spelling", test_rotary.SPELLINGS)
def test_every_spelling_gives_the_same(spelling: str, target: str) -> None:
    """Tables with a number for each pair are fused; those with one for each element are inputs here, and stay."""
    body, inputs, outputs, *_ = test_rotary.SPELLINGS[spelling]
    proto = test_rotary.model(body, inputs, outputs)
    result, report = fused(proto, target)
    line = only_line(report)
    assert (line.status == "fused") == ("4] c" in inputs), line
    assert_rotated(proto, result)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("spelling", test_rotary.OTHER_MODES)
def test_every_other_pair_gives_the_same(spelling: str, target: str) -> None:
    """Complex numbers are rotated as pairs of neighbours. What is joined to the rotated part of a head is joined to the
    operator's result."""
    body, inputs, outputs, *_ = test_rotary.OTHER_MODES[spelling]
    proto = test_rotary.model(body, inputs, outputs)
    result, report = fused(proto, target)
    line = only_line(report)
    assert (line.status == "fused") == ("4] c" in inputs or "4,1] c" in inputs), line
    assert_rotated(proto, result)


PAIR = "d = Unsqueeze(f, last) "
REPEATED = {
    "2 and 3": PAIR + "t = Tile(d, times) c0 = Reshape(t, merged) ",
    "3, an Expand": PAIR + "t = Expand(d, times) c0 = Reshape(t, merged) ",
    "4": PAIR + "t = Concat<axis=-1>(d, d) c0 = Reshape(t, merged) ",
}
TIMES = "int64[4] times = {1,1,1,2}, int64[3] merged = {0,0,8}"
NEIGHBOURS = test_rotary.NEIGHBOURS.replace("t = Concat", "o = Concat").replace("Reshape(t,", "Reshape(o,")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", REPEATED)
def test_tables_of_equal_neighbours(case: str, target: str) -> None:
    body = f"{REPEATED[case]}{FULL}{NEIGHBOURS}{test_rotary.END}"
    proto = test_rotary.model(body, f"{X}, float[B,S,4] f", more=TIMES)
    result, report = fused(proto, target)
    assert only_line(report).op == "RotaryEmbedding", report.around
    (node,) = (node for node in result.graph.node if node.op_type == "RotaryEmbedding")
    assert {attr.name: attr.i for attr in node.attribute} == {"interleaved": 1}
    assert_rotated(proto, result)


@pytest.mark.parametrize(
    "wrong",
    [
        "c0 = Concat<axis=-1>(f, f) ",
        PAIR + "d1 = Neg(d) t = Concat<axis=-1>(d, d1) c0 = Reshape(t, merged) ",
        "t = Concat<axis=1>(f, f) c0 = Reshape(t, merged) ",
    ],
)
def test_other_tables_of_neighbours(wrong: str) -> None:
    body = f"{wrong}{FULL}{NEIGHBOURS}{test_rotary.END}"
    proto = test_rotary.model(body, f"{X}, float[B,S,4] f", more=TIMES)
    result, report = fused(proto, "contrib")
    assert only_line(report).code is Code.SHAPE
    assert operators(result) == []


def test_neighbours_are_not_halves() -> None:
    """Equal neighbours do not make equal halves."""
    proto = test_rotary.model(REPEATED["2 and 3"] + FULL + ROTATED, f"{X}, float[B,S,4] f", more=TIMES)
    assert only_line(fused(proto, "contrib")[1]).code is Code.SHAPE


def test_rows_of_all_heads() -> None:
    """What a Reshape and a Transpose cut into heads is rotated as it was before them."""
    more = "int64[4] cut = {0,0,6,8}"
    body = "c0 = Concat<axis=-1>(f, f) " + FULL + "h = Reshape(z, cut) x = Transpose<perm=[0,2,1,3]>(h) " + ROTATED
    proto = test_rotary.model(body, "float[B,S,48] z, float[B,S,4] f", test_rotary.OUT, more=more)
    result, _ = fused(proto, "contrib")
    (node,) = (node for node in result.graph.node if node.op_type == "RotaryEmbedding")
    assert node.input[0] == "z"
    assert {attr.name: attr.i for attr in node.attribute} == {"interleaved": 0, "num_heads": 6}
    assert others(result).count("Transpose") == 1
    inputs = feeds(proto, odd=False)
    assert_close(run(proto, inputs), run(result, inputs))


NARROW = X.replace("float", "float16")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("factor", "status"), [("", "fused"), ("small", "fused"), ("large", "declined")])
def test_rotations_of_16_bits(factor: str, status: str, target: str) -> None:
    """Products with numbers that may be larger than 1 may overflow where the operator does not."""
    scaled = f"k0 = Mul(c2, {factor}) l0 = Mul(s2, {factor}) " if factor else "k0 = Identity(c2) l0 = Identity(s2) "
    body = "d = Concat<axis=-1>(f, f) c1 = Cos(d) s1 = Sin(d) c2 = Cast<to=10>(c1) s2 = Cast<to=10>(s1) " + scaled
    body += "c = Unsqueeze(k0, heads) s = Unsqueeze(l0, heads) "
    proto = tables("float[B,S,4] f", body, NARROW, test_rotary.OUT.replace("float", "float16"))
    if factor == "large":
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.25, np.float16), "large"))
    result, report = fused(proto, target)
    line = only_line(report)
    assert line.status == status, line
    assert line.rounded == (status == "fused")
    assert_rotated(proto, result)


def test_an_older_opset() -> None:
    """Slice and Unsqueeze have attributes there."""
    body = (
        "d = Concat<axis=-1>(f, f) c1 = Cos(d) s1 = Sin(d) c = Unsqueeze<axes=[1]>(c1) s = Unsqueeze<axes=[1]>(s1) "
        "a = Slice<axes=[3], starts=[0], ends=[4]>(x) b = Slice<axes=[3], starts=[4], ends=[8]>(x) n = Neg(b) "
        f"r = Concat<axis=-1>(n, a) {test_rotary.END}"
    )
    for opset, status in ((9, "declined"), (12, "fused")):
        modern = body if opset < 10 else body[: body.index("a = Slice")] + ROTATED
        proto = test_rotary.model(modern, f"{X}, float[B,S,4] f", opset=opset)
        result, report = fused(proto, "contrib")
        assert only_line(report).status == status
        assert_rotated(proto, result)


# Which runtimes.


def test_nothing_without_a_runtime() -> None:
    for target in TARGETS:
        proto = TABLES["1, 3 and 4"]
        assert not fused(proto, target, None)[1].around
        assert not fused(proto, target, only="attention")[1].around


@pytest.mark.parametrize("runtime", sorted({*RUNTIMES} - {"ort-cpu", "ort-cuda", "ort-webgpu"}))
def test_runtimes_that_are_given_nothing(runtime: str) -> None:
    for target in TARGETS:
        assert not fused(TABLES["1, 3 and 4"], target, runtime)[1].around


def test_an_older_release_is_not_measured() -> None:
    _, report = fused(test_rms_norm.model(test_rms_norm.SPELLINGS["2"]), "contrib", "ort-cpu=1.20")
    assert only_line(report).reason == "ort-cpu 1.20 is not given SimplifiedLayerNormalization for float32"


def test_a_norm_of_16_bits_is_one_of_float32_on_webgpu() -> None:
    """Its kernel of float16 rounds more than the nodes."""
    body, _ = test_rms_norm.HALVES["13"]
    proto = test_rms_norm.model(body, test_rms_norm.HALF, test_rms_norm.HALF_Y)
    result, report = fused(proto, "contrib", "ort-webgpu")
    assert (only_line(report).op, only_line(report).rounded) == ("SimplifiedLayerNormalization", False)
    assert others(result) == ["Cast", "Cast", "Mul"]
    assert_equal(proto, result)


@pytest.mark.parametrize(("form", "expected"), [("3 and 4", "Gelu"), ("3 and 5", "FastGelu")])
def test_gelu_on_webgpu(form: str, expected: str) -> None:
    body = f"a = Neg(x) {(test_gelu.SPELLINGS | test_gelu.BY_TANH)[form]}y = Neg(g1)"
    proto = test_gelu.model(body, outputs="float[B,S,8] y")
    result, report = fused(proto, "contrib", "ort-webgpu")
    assert operators(result) == [expected]
    assert only_line(report).added == 1
    assert_equal(proto, result)
    assert operators(fused(proto, "contrib")[0]) == []


def test_ready_made_norms_and_rotations_stay() -> None:
    proto = parse("y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)")
    assert not fused(proto, "contrib")[1].around


@pytest.mark.parametrize("target", TARGETS)
def test_a_decoder(target: str) -> None:
    """The attention reads what the operator gives, without a Transpose in between."""
    proto = onnx.load(Path(__file__).parents[3] / "examples" / "models" / "llama.onnx")
    result, report = fused(proto, target, assume=["no-empty-rows"])
    layers = report.count("fused")
    assert layers > 0
    found = operators(result)
    assert found.count("RotaryEmbedding") == 2 * layers
    assert found.count(NORMS[target]) == 2 * layers + 1
    alone, _ = fused(proto, target, assume=["no-empty-rows"], only="attention")
    assert len(result.graph.node) < len(alone.graph.node) - 18 * layers
