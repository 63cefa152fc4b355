"""The operators RotaryEmbedding, with what of them stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import CLOSE, SIZES, fused, only_line, operators, others, parse, run
from tests.passes.around.test_rotary import modes

ROWS = 7
HEADS_LAST = "float[B,S,24] x"
HEADS_FIRST = "float[B,3,S,8] x"
PLACES = "int64[B,S] p"


def model(body: str, inputs: str, outputs: str, opset: int = 20, width: int = 4, **options: Any) -> onnx.ModelProto:
    """A model of one operator, with tables c and s of 7 positions and this width."""
    proto = parse(body, inputs, outputs, opset, **options)
    rng = np.random.default_rng(1)
    dtype = np.float16 if "float16" in inputs else np.float32
    for name in ("c", "s"):
        table = rng.standard_normal((ROWS, width)).astype(dtype)
        proto.graph.initializer.append(numpy_helper.from_array(table, name))
    return proto


def assert_equal(proto: onnx.ModelProto, other: onnx.ModelProto) -> None:
    rng, feeds = np.random.default_rng(2), {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = tuple(SIZES.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim)
        if kind.elem_type == onnx.TensorProto.INT64:
            feeds[value.name] = rng.integers(0, ROWS, shape)
        else:
            feeds[value.name] = rng.standard_normal(shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    onnx.checker.check_model(other, full_check=True)
    for one, two in zip(run(proto, feeds), run(other, feeds), strict=True):
        np.testing.assert_allclose(two.astype(np.float64), one.astype(np.float64), atol=4 * CLOSE[one.dtype])


CONTRIB = "y = com.microsoft.RotaryEmbedding"
SPELLINGS = {
    "2, 3, 6 and 9": (f"{CONTRIB}(x, p, c, s)", HEADS_LAST, ["Gather"] * 2, 0, 4),
    "3, the number of heads": (f"{CONTRIB}<num_heads=3>(x, p, c, s)", HEADS_LAST, ["Gather"] * 2, 0, 4),
    "4": (f"{CONTRIB}(x, p, c, s)", HEADS_FIRST, ["Gather"] * 2, 0, 4),
    "8": (f"{CONTRIB}<num_heads=3, rotary_embedding_dim=4>(x, p, c, s)", HEADS_LAST, ["Gather"] * 2, 0, 2),
    "10": (f"{CONTRIB}<interleaved=1>(x, p, c, s)", HEADS_LAST, ["Gather"] * 4, 1, 4),
    "10, heads first": (f"{CONTRIB}<interleaved=1>(x, p, c, s)", HEADS_FIRST, ["Gather"] * 4, 1, 4),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_operators_of_onnx_runtime(spelling: str) -> None:
    body, x, gathers, mode, width = SPELLINGS[spelling]
    proto = model(body, f"{x}, {PLACES}", x.replace(" x", " y"), width=width)
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.rounded) == ("fused", "RotaryPositionEmbedding", False)
    assert modes(result) == [mode]
    assert [op for op in others(result) if op == "Gather"] == gathers
    assert "RotaryEmbedding" not in others(result)
    assert_equal(proto, result)


def test_a_reshape_in_front_is_not_needed() -> None:
    body = "v = Constant<value_ints=[0,0,-1]>() x = Reshape(z, v) " + CONTRIB + "<num_heads=3>(x, p, c, s)"
    proto = model(body, f"float[B,S,3,8] z, {PLACES}", "float[B,S,24] y")
    result, _ = fused(proto)
    assert others(result).count("Reshape") == 1
    assert_equal(proto, result)


def test_query_and_key_share_their_tables() -> None:
    body = f"{CONTRIB}(x, p, c, s) z = com.microsoft.RotaryEmbedding(w1, p, c, s)"
    proto = model(body, f"{HEADS_LAST}, float[B,S,8] w1, {PLACES}", "float[B,S,24] y, float[B,S,8] z")
    result, report = fused(proto)
    assert [line.op for line in report.around] == ["RotaryPositionEmbedding"] * 2
    assert sorted(others(result)).count("Gather") == 2
    assert_equal(proto, result)


STANDARD = {
    "1 and 6": ("y = RotaryEmbedding(x, c, s, p)", f"{HEADS_FIRST}, {PLACES}", ["Gather"] * 2),
    "1 and 7": ("y = RotaryEmbedding(x, k, l)", f"{HEADS_FIRST}, float[B,S,4] k, float[B,S,4] l", []),
    "3 and 7": ("y = RotaryEmbedding<num_heads=3>(x, k, l)", f"{HEADS_LAST}, float[B,S,4] k, float[B,S,4] l", []),
    "8 and 10": (
        "y = RotaryEmbedding<interleaved=1, rotary_embedding_dim=4>(x, k, l)",
        f"{HEADS_FIRST}, float[B,S,2] k, float[B,S,2] l",
        ["Gather"] * 2,
    ),
}


@pytest.mark.parametrize("spelling", STANDARD)
def test_operators_of_opset_23(spelling: str) -> None:
    body, inputs, gathers = STANDARD[spelling]
    proto = model(body, inputs, inputs.split(" ")[0] + " y", 23)
    result, report = fused(proto)
    assert only_line(report).op == "RotaryPositionEmbedding"
    assert [op for op in others(result) if op == "Gather"] == gathers
    assert_equal(proto, result)


def test_sixteen_bits() -> None:
    proto = model(f"{CONTRIB}(x, p, c, s)", f"float16[B,S,24] x, {PLACES}", "float16[B,S,24] y")
    result, report = fused(proto)
    assert (only_line(report).op, only_line(report).rounded) == ("RotaryPositionEmbedding", True)
    assert_equal(proto, result)


DECLINED = {
    "one position for all": (f"{CONTRIB}(x, p, c, s)", f"{HEADS_LAST}, int64[1] p", Code.SHAPE),
    "positions of another length": (f"{CONTRIB}(x, p, c, s)", f"{HEADS_LAST}, int64[B,T] p", Code.SHAPE),
    "positions of another batch": (f"{CONTRIB}(x, p, c, s)", f"{HEADS_LAST}, int64[A,S] p", Code.SHAPE),
    "a scale": (f"{CONTRIB}<scale=2.0>(x, p, c, s)", f"{HEADS_LAST}, {PLACES}", Code.ILLEGAL),
    "packed batches": (f"{CONTRIB}<is_packed_batching=1>(x, p, c, s)", f"{HEADS_LAST}, {PLACES}", Code.ILLEGAL),
    "an open width": (f"{CONTRIB}(x, p, c, s)", f"float[B,S,D] x, {PLACES}", Code.SHAPE),
    "heads of no whole size": (f"{CONTRIB}<num_heads=5>(x, p, c, s)", f"{HEADS_LAST}, {PLACES}", Code.SHAPE),
    "tables of another width": (f"{CONTRIB}<num_heads=2>(x, p, c, s)", f"{HEADS_LAST}, {PLACES}", Code.SHAPE),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_declined(what: str) -> None:
    body, inputs, code = DECLINED[what]
    result, report = fused(model(body, inputs, inputs.split(" ")[0] + " y"))
    line = only_line(report)
    assert (line.status, line.code) == ("declined", code), line
    assert line.culprit
    assert operators(result) == []


def test_an_attribute_that_is_not_known() -> None:
    proto = model(f"{CONTRIB}(x, p, c, s)", f"{HEADS_LAST}, {PLACES}", "float[B,S,24] y")
    proto.graph.node[0].attribute.append(onnx.helper.make_attribute("mrope", 1))
    _, report = fused(proto)
    assert only_line(report).code == Code.ILLEGAL
    assert "mrope" in str(only_line(report).reason)


def test_tables_of_another_type() -> None:
    proto = model(f"{CONTRIB}(x, p, c, s)", f"{HEADS_LAST}, {PLACES}", "float[B,S,24] y")
    del proto.graph.initializer[-2:]
    for name in ("c", "s"):
        proto.graph.initializer.append(numpy_helper.from_array(np.zeros((ROWS, 4), np.float16), name))
    _, report = fused(proto)
    assert only_line(report).code == Code.DTYPE


def test_positions_inside_of_an_attention_operator() -> None:
    """GroupQueryAttention rotates queries and keys itself; what is written out for it becomes the operator."""
    body = "y, pk, pv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2, do_rotary=1>"
    body += "(q, k, v, , , lengths, total, c, s)"
    inputs = "float[1,5,64] q, float[1,5,32] k, float[1,5,32] v"
    outputs = "float[1,5,64] y, float[1,2,5,16] pk, float[1,2,5,16] pv"
    more = "int32[1] lengths = {4}, int32 total = {5}"
    proto = model(body, inputs, outputs, width=8, initializers=more)
    result, report = fused(proto)
    assert [line.op for line in report.around] == ["RotaryPositionEmbedding"] * 2
    assert operators(result).count("RotaryPositionEmbedding") == 2
