"""Conversion to an opset that ATC's ONNX parser takes: equal outputs, the rules of the parser kept, clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import defs, helper

from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.onnx_route import UnsupportedModel, lower, only_known_entries, parser
from fa_compiler.lowering.ascend.onnx_route.changes import CHANGES
from fa_compiler.lowering.ascend.onnx_route.expansions import EXPANSIONS
from fa_compiler.passes.answer.options import NEWEST_OPSET
from tests.graphs import harness
from tests.lowering.ascend.onnx_models import drawn, lowered, opset, parsed, run

X = "float[2,6,4] x"

EQUAL: dict[str, tuple[int, str]] = {
    "gelu": (20, f"g({X}) => (float[2,6,4] y) {{ y = Gelu(x) }}"),
    "gelu tanh": (20, f'g({X}) => (float[2,6,4] y) {{ y = Gelu<approximate = "tanh">(x) }}'),
    "gelu half": (20, "g(float16[2,6,4] x) => (float16[2,6,4] y) { y = Gelu(x) }"),
    "the same gelu twice, one is an output": (
        20,
        f"g({X}) => (float[2,6,4] a, float[2,6,4] b, float[2,6,4] c) {{ a = Gelu(x) b = Gelu(x) d = Gelu(x) "
        "c = Neg(d) }",
    ),
    "swish": (24, f"g({X}) => (float[2,6,4] y) {{ y = Swish<alpha = 1.5>(x) }}"),
    "mish": (18, f"g({X}) => (float[2,6,4] y) {{ y = Mish(x) }}"),
    "a remainder of floats": (28, "g(float[2,6] x, float[6] d) => (float[2,6] y) { y = Mod(x, d) }"),
    "blocks by rows": (
        28,
        'g(float[1,2,4,4] x) => (float[1,8,2,2] y) { y = SpaceToDepth<blocksize = 2, mode = "DCR">(x) }',
    ),
    "a range whose stash type is written": (
        27,
        "g(float[4] x) => (float[4] y) { a = Constant<value_float=0.5>() b = Constant<value_float=4.5>() "
        "c = Constant<value_float=1.0>() r = Range<stash_type = 1>(a, b, c) y = Add(x, r) }",
    ),
    "rms": (23, f"g({X}, float[4] s) => (float[2,6,4] y) {{ y = RMSNormalization<epsilon = 0.01>(x, s) }}"),
    "rms of two axes": (
        23,
        f"g({X}, float[6,4] s) => (float[2,6,4] y) {{ y = RMSNormalization<axis = 1>(x, s) }}",
    ),
    "rms half": (
        23,
        "g(float16[2,6,4] x, float16[4] s) => (float16[2,6,4] y) { y = RMSNormalization(x, s) }",
    ),
    "groups of 21": (
        21,
        f"g({X}, float[6] s, float[6] b) => (float[2,6,4] y) {{ y = GroupNormalization<num_groups = 3>(x, s, b) }}",
    ),
    "groups of 18": (
        18,
        f"g({X}, float[3] s, float[3] b) => (float[2,6,4] y) {{ y = GroupNormalization<num_groups = 3>(x, s, b) }}",
    ),
    "rotary": (
        23,
        "g(float[2,3,6,8] x, float[2,6,4] c, float[2,6,4] s) => (float[2,3,6,8] y) { y = RotaryEmbedding(x, c, s) }",
    ),
    "rotary by positions": (
        23,
        "g(float[2,3,6,8] x, float[9,4] c, float[9,4] s, int64[2,6] p) => (float[2,3,6,8] y) "
        "{ y = RotaryEmbedding(x, c, s, p) }",
    ),
    "rotary of one width": (
        23,
        "g(float[2,6,24] x, float[2,6,4] c, float[2,6,4] s) => (float[2,6,24] y) "
        "{ y = RotaryEmbedding<num_heads = 3>(x, c, s) }",
    ),
    "rotary in pairs, in part": (
        23,
        "g(float[2,3,6,8] x, float[2,6,2] c, float[2,6,2] s) => (float[2,3,6,8] y) "
        "{ y = RotaryEmbedding<interleaved = 1, rotary_embedding_dim = 4>(x, c, s) }",
    ),
    "reductions": (
        18,
        f"g({X}) => (float[2,6,1] a, float[4] b, float[] c, float[2,1,4] d, float[2,6,4] e) "
        "{ one = Constant<value_ints = [-1]>() two = Constant<value_ints = [0, 1]>() m = Constant<value_ints = [1]>() "
        "a = ReduceMean(x, one) b = ReduceMax<keepdims = 0>(x, two) c = ReduceSumSquare<keepdims = 0>(x) "
        "d = ReduceL2(x, m) e = ReduceMin<noop_with_empty_axes = 1>(x) }",
    ),
    "any and all": (
        20,
        "g(bool[2,6] x) => (bool[2,1] a, bool[6] b) { one = Constant<value_ints = [1]>() "
        "zero = Constant<value_ints = [0]>() a = ReduceMax(x, one) c = ReduceMin<keepdims = 0>(x, zero) b = Not(c) }",
    ),
    "equal parts": (18, f"g({X}) => (float[] a, float[] b) {{ a, b = Split<axis = 1, num_outputs = 2>(x) }}"),
    "a shorter part": (
        18,
        "g(float[2,7] x) => (float[] a, float[] b, float[] c, float[] d) "
        "{ a, b, c, d = Split<axis = 1, num_outputs = 4>(x) }",
    ),
    "parts of an open size": (
        18,
        "g(float[2,S] x) => (float[] a, float[] b) { a, b = Split<axis = 1, num_outputs = 2>(x) }",
    ),
    "pads of some axes": (
        19,
        f"g({X}) => (float[] y) {{ p = Constant<value_ints = [1, 2]>() z = Constant<value_float = 3.0>() "
        "a = Constant<value_ints = [-1]>() y = Pad(x, p, z, a) }",
    ),
    "grid": (
        20,
        'g(float[1,2,5,5] x, float[1,3,3,2] p) => (float[] y) { y = GridSample<mode = "cubic">(x, p) }',
    ),
    "infinite halves": (20, "g(float16[2,6] x) => (bool[2,6] y) { y = IsInf(x) }"),
    "casts": (24, f"g({X}, float16[1] t) => (float16[] y, float16[] z) {{ y = CastLike(x, t) z = Cast<to = 10>(x) }}"),
    "bits": (18, "g(int32[2,6] x) => (int32[] y, int32[] z) { y = BitwiseNot(x) z = ReduceL1(x) }"),
    "largest": (24, f"g({X}) => (float[] v, int64[] i) {{ k = Constant<value_ints = [2]>() v, i = TopK(x, k) }}"),
    "in a branch": (
        20,
        f"g({X}, bool c) => (float[2,6,4] y) {{ y = If(c) <then_branch = t() => (float[2,6,4] a) {{ a = Gelu(x) }}, "
        "else_branch = e() => (float[2,6,4] b) { s = Constant<value_ints = [-1]>() m = ReduceMean(x, s) "
        "b = Sub(x, m) }> }",
    ),
    "unnamed outputs": (17, f"g({X}) => (float[] y) {{ a, m = Dropout(x) y = Relu(a) }}"),
}


@pytest.mark.parametrize("case", sorted(EQUAL))
def test_equal_outputs(case: str) -> None:
    version, text = EQUAL[case]
    model = parsed(text, version)
    result = lowered(model)
    needs_18 = case == "bits"
    assert opset(result) == (18 if needs_18 else 17)
    for seed in range(2):
        feeds = drawn(model, seed)
        tolerance = 4e-3 if "half" in case else 1e-6
        for left, right in zip(run(model, feeds), run(result, feeds), strict=True):
            np.testing.assert_allclose(right, left, rtol=tolerance, atol=tolerance)


def test_functions_are_inlined() -> None:
    body = (
        'g(float[2,3] x) => (float[2,3] y) { y = local.Twice(x) } <domain: "local", opset_import: ["" : 20]> '
        "Twice(a) => (c) { b = Gelu(a) c = Add(b, b) }"
    )
    model = parsed(body, 20, domains=', "local" : 1')
    result = lowered(model)
    assert not result.functions
    assert [entry.domain for entry in result.opset_import] == [""]
    feeds = drawn(model)
    np.testing.assert_allclose(run(result, feeds)[0], run(model, feeds)[0], rtol=1e-6)


def test_a_function_named_like_an_operator_of_onnx_runtime_is_not_inlined() -> None:
    """ONNX Runtime, whose reading counts, runs its operator and not the function."""
    model = parsed("g(float[2,3] x) => (float[2,3] y) { y = Relu(x) }", 17)
    negative = helper.make_node("Neg", ["a"], ["b"])
    model.functions.append(helper.make_function("", "Relu", ["a"], ["b"], [negative], [helper.make_opsetid("", 17)]))
    result = lowered(model)
    assert [node.op_type for node in result.graph.node] == ["Relu"] and not result.functions
    feeds = drawn(model)
    np.testing.assert_array_equal(run(result, feeds)[0], run(model, feeds)[0])


REFUSED: dict[str, tuple[int, str, str]] = {
    "attention of ONNX Runtime": (
        17,
        "g(float[1,2,12] x) => (float[] y) { y = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x) }",
        "attention that was not fused",
    ),
    "attention": (23, "g(float[1,2,3,4] x) => (float[] y) { y = Attention(x, x, x) }", "attention that was not fused"),
    "linear attention of ONNX Runtime": (
        17,
        "g(float[1,2,8] x) => (float[1,2,8] y) { y = com.microsoft.LinearAttention"
        '<q_num_heads = 2, kv_num_heads = 2, update_rule = "linear">(x, x, x) }',
        "linear attention that was not fused",
    ),
    "linear attention": (
        27,
        "g(float[1,2,8] x) => (float[1,2,8] y, float[1,2,4,4] s) { y, s = LinearAttention"
        '<q_num_heads = 2, kv_num_heads = 2, update_rule = "linear">(x, x, x) }',
        "linear attention that was not fused",
    ),
    "quantisation": (21, f"g({X}, float s) => (uint8[] y) {{ y = QuantizeLinear(x, s) }}", "quantisation"),
    "no inputs": (17, "g() => (float[] y) { y = Constant<value_float = 1.0>() }", "no inputs"),
    "no outputs": (17, "g(float[] x) => () { y = Relu(x) }", "no outputs"),
    "a sequence": (17, "g(seq(float) x) => (int64[] y) { y = SequenceLength(x) }", "'x' is not a tensor"),
    "axes that are computed": (18, f"g({X}, int64[1] a) => (float[] y) {{ y = ReduceMean(x, a) }}", "not constant"),
    "parts": (
        18,
        "g(float[5] x) => (float[] y, float[] b, float[] c, float[] d) { y, b, c, d = Split<num_outputs = 4>(x) }",
        "have no 4 parts",
    ),
    "old": (7, "g(float[2] x) => (float[2] y) { y = Relu(x) }", "is of opset 7"),
    "new": (
        NEWEST_OPSET + 1,
        "g(float[2] x) => (float[2] y) { y = Relu(x) }",
        f"is of opset {NEWEST_OPSET + 1}",
    ),
    "blocks by columns": (
        28,
        'g(float[1,2,4,4] x) => (float[] y) { y = SpaceToDepth<blocksize = 2, mode = "CRD">(x) }',
        "mode is 'CRD'",
    ),
    "a range of 16 bits": (27, "g(float16 x) => (float16[] y) { y = Range(x, x, x) }", "'x' is FLOAT16"),
    "wrapped": (19, f'g({X}, int64[6] p) => (float[] y) {{ y = Pad<mode = "wrap">(x, p) }}', "'wrap'"),
    "pool": (
        19,
        "g(float[1,1,8] x) => (float[] y) { y = AveragePool<kernel_shape = [2], dilations = [2]>(x) }",
        "dilations",
    ),
    "a cast to a type too new": (
        19,
        "g(float[2] x) => (float8e4m3fn[2] y) { y = Cast<to = 17, saturate = 0>(x) }",
        "its output 'y' is FLOAT8E4M3FN",
    ),
    "a type too new": (22, "g(bfloat16[2] x) => (bfloat16[2] y) { y = Sin(x) }", "'x' is BFLOAT16"),
    "layer normalisation too old": (
        14,
        f"g({X}, float[4] s) => (float[] y) {{ y = LayerNormalization(x, s) }}",
        "E13010",
    ),
    "a foreign operator": (17, f"g({X}) => (float[] y) {{ y = com.microsoft.Gelu(x) }}", "E13010"),
    "volumes": (
        20,
        "g(float[1,1,4,4,4] x, float[1,2,2,2,3] p) => (float[] y) { y = GridSample(x, p) }",
        "4 dimensions only",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refusals_name_the_node(case: str) -> None:
    version, text, phrase = REFUSED[case]
    domains = ', "com.microsoft" : 1' if "microsoft" in text else ""
    model = ir.from_proto(parsed(text, version, domains=domains))
    with pytest.raises(UnsupportedModel) as error:
        lower(model)
    assert len(error.value.problems) == 1
    assert phrase in error.value.problems[0]
    whole = case in ("no inputs", "no outputs", "old", "new", "a sequence")
    assert whole or error.value.problems[0].startswith("y (")


@pytest.mark.parametrize(
    ("text", "advised"),
    [
        ("g(uint8[2,2] x, uint8[2,2] w) => (int32[] y) { y = MatMulInteger(x, w) }", True),
        ("g(float[1,4,1] x) => (float[] y) { y = DFT(x) }", False),
    ],
)
def test_route_air_is_advised_where_it_has_the_operator(text: str, advised: bool) -> None:
    model = ir.from_proto(parsed(text, 18))
    with pytest.raises(UnsupportedModel) as error:
        lower(model.clone())
    assert error.value.problems[0].endswith(", or try --route air") == advised
    if advised:
        to_ge(model)
    else:
        with pytest.raises(UnmappedError):
            to_ge(model)


def test_all_problems_are_told() -> None:
    text = "g(float[4] x, float s) => (uint8[] a, float[] b) { a = QuantizeLinear(x, s) b = com.microsoft.Gelu(x) }"
    with pytest.raises(UnsupportedModel) as error:
        lower(ir.from_proto(parsed(text, 21, domains=', "com.microsoft" : 1')))
    assert [problem.split(" ")[0] for problem in error.value.problems] == ["a", "b"]


def test_names() -> None:
    """No node shares its name with another, an input or the parser's node for an initializer; no output is unnamed."""
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [4], [1, 2, 3, 4])
    nodes = [
        helper.make_node("LayerNormalization", ["x", "w"], ["a", "", "i"], name="x"),
        helper.make_node("Relu", ["a"], ["b"], name="same"),
        helper.make_node("Relu", ["b"], ["c"], name="same"),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"], name="w_initializer_0"),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx", 17)])
    result = lowered(model)
    names = [node.name for node in result.graph.node]
    assert all(names)
    assert len({*names, "x", "w_initializer_0"}) == len(names) + 2
    assert all(output for node in result.graph.node for output in node.output)
    assert [entry.domain for entry in result.opset_import] == [""]


def test_saturation_is_left_out() -> None:
    """It is for 8-bit floats, which are refused."""
    result = lowered(parsed(f"g({X}) => (float16[2,6,4] y) {{ y = Cast<to = 10, saturate = 0>(x) }}", 24))
    assert [attr.name for attr in result.graph.node[0].attribute] == ["to"]


@pytest.mark.parametrize("version", [11, 17, 20])
def test_a_condition_becomes_a_scalar(version: int) -> None:
    """GE's If takes [false] for true."""
    model = parsed(
        "g(float[4] x, bool[1] c) => (float[4] y) { y = If(c) <then_branch = t() => (float[4] a) { a = Neg(x) }, "
        "else_branch = e() => (float[4] b) { b = Exp(x) }> }",
        version,
    )
    result = lowered(model)
    types = onnx.shape_inference.infer_shapes(result, strict_mode=True).graph
    (branching,) = [node for node in types.node if node.op_type == "If"]
    (condition,) = [value for value in types.value_info if value.name == branching.input[0]]
    assert len(condition.type.tensor_type.shape.dim) == 0
    for seed in range(3):
        feeds = drawn(model, seed)
        np.testing.assert_array_equal(run(result, feeds)[0], run(model, feeds)[0])


def test_constants_hold_tensors() -> None:
    result = lowered(parsed("g(int64[2] x) => (int64[2] y) { c = Constant<value_ints = [1, 2]>() y = Add(x, c) }", 17))
    constants = [node for node in result.graph.node if node.op_type == "Constant"]
    assert [attr.name for node in constants for attr in node.attribute] == ["value"]


def test_external_entries() -> None:
    """The parser takes every entry but location and offset for the length."""
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("checksum", "ab12"), ("offset", "64"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor]))
    only_known_entries(model)
    kept = {entry.key: entry.value for entry in model.graph.initializer[0].external_data}
    assert kept == {"location": "w.bin", "offset": "64", "length": "16"}


def test_weights_of_branches_in_files_move_to_the_main_graph(tmp_path: Path) -> None:
    text = (
        "g(float[4] x, bool c) => (float[4] y) { y = If(c) <then_branch = t() => (float[4] a) <float[4] w> "
        "{ a = Add(x, w) }, else_branch = e() => (float[4] b) { b = Relu(x) }> }"
    )
    model = ir.from_proto(parsed(text, 17))
    branch = next(iter(model.graph)).attributes["then_branch"].as_graph()
    (tmp_path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    value = ir.Value(name="w")
    value.const_value = ir.ExternalTensor(
        "w.bin", 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=tmp_path
    )
    old = next(node for node in branch if node.op_type == "Add").inputs[1]
    branch.register_initializer(value)
    assert old is not None
    ir.convenience.replace_all_uses_with(old, value)
    lower(model)
    assert len(model.graph.initializers) == 1
    assert not branch.initializers


def test_what_changed_between_the_opsets() -> None:
    """Every version after 17 of every operator of the parser has its row, and no row is made up."""
    history: dict[str, set[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        known = 17 < schema.since_version <= min(NEWEST_OPSET, defs.onnx_opset_version())
        taken = any(parser.takes("", schema.name, version) for version in (17, 18)) or schema.name == "Constant"
        if not schema.domain and known and taken:
            history.setdefault(schema.name, set()).add(schema.since_version)
    newest = defs.onnx_opset_version()
    listed = {name: {version for version in rows if version <= newest} for name, rows in CHANGES.items()}
    came_later = {"Mish", *(name for name in history if name.startswith("Bitwise")), "Col2Im"}
    for name in came_later & set(history):
        history[name].discard(18)
    assert {name: rows for name, rows in history.items() if rows} == {
        name: rows for name, rows in listed.items() if rows
    }


def test_expansions_are_for_what_the_parser_lacks() -> None:
    for name in EXPANSIONS:
        assert not (parser.takes("", name, 17) and parser.takes("", name, 18)), name


KEPT = [
    name
    for name in sorted(harness.read_index())
    if any(mark in name for mark in ("op18", "op19", "op2")) and not name.startswith("train")
]


def _takes_extremes(node: onnx.NodeProto) -> bool:
    """Is this a scatter that came with opset 18?"""
    reductions = {attr.s for attr in node.attribute if attr.name == "reduction"}
    return node.op_type in ("ScatterElements", "ScatterND") and bool(reductions & {b"max", b"min"})


@pytest.mark.parametrize("name", KEPT[::4])
def test_kept_graphs(name: str) -> None:
    """Exported models keep their outputs."""
    entry = harness.read_index()[name]
    model, feeds = harness.load(name), harness.inputs(entry)
    if any(node.op_type == "Attention" for node in model.graph.node):
        pytest.skip("attention of opset 23 has to be fused first")
    if any(node.op_type == "Loop" for node in model.graph.node):
        with pytest.raises(UnsupportedModel, match="knows no loops"):
            lowered(model)
        return
    result = lowered(model)
    assert opset(result) == (18 if any(map(_takes_extremes, model.graph.node)) else 17)
    tolerance = 2e-2 if "16" in name else 1e-4
    for left, right in zip(run(model, feeds), run(result, feeds), strict=True):
        np.testing.assert_allclose(right, left, rtol=tolerance, atol=tolerance)
