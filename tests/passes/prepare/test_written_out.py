"""What ONNX Runtime has no CPU kernel for is written out: a float64 reading of the schemas is beside each case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fa_compiler.passes import Options, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.values.shapes import analyse
from tests.passes.running import LEVELS, Array, assert_same, fused, parse, run

CONTRIB, FLOAT = "com.microsoft", ir.DataType.FLOAT
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""One rounding to the type, and those of float32 before."""
EDGES = (0.0, -0.0, 1e-30, -17.0, -30.0, -80.0, 88.0, 300.0, np.inf, np.nan)


def model_of(
    op_type: str,
    feeds: Mapping[str, Array],
    types: Mapping[str, Any],
    outputs: Mapping[str, tuple[str, int]],
    domain: str = CONTRIB,
    opset: int = 21,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node, with sizes that are open but for the last one. Inputs of `types` are cast to these, and the
    outputs, of which types and ranks are given, to float32."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    given = {name: f"{name}_cast" if name in types else name for name in feeds}
    nodes = [
        helper.make_node("Cast", [name], [given[name]], to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))
        for name, kind in types.items()
    ]
    nodes.append(
        helper.make_node(op_type, list(given.values()), [f"{name}_raw" for name in outputs], domain=domain, **attrs)
    )
    wide = [np.float64 if kind == "float64" else np.float32 for kind, _ in outputs.values()]
    nodes += [
        helper.make_node("Cast", [f"{name}_raw"], [name], to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))
        for name, kind in zip(outputs, wide, strict=True)
    ]
    declared = [
        helper.make_tensor_value_info(
            name, kinds[name], array.shape if name in types or array.ndim < 2 else ["B", *array.shape[1:]]
        )
        for name, array in feeds.items()
    ]
    made = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [None] * rank)
        for (name, (_, rank)), kind in zip(outputs.items(), wide, strict=True)
    ]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(helper.make_graph(nodes, "one", declared, made), opset_imports=opsets, ir_version=10)


def rounded(array: Array, dtype: str) -> Array:
    """Numbers that a type holds, as float64."""
    return array.astype(np.dtype(dtype)).astype(np.float64)


def check(model: onnx.ModelProto, feeds: Mapping[str, Array], wanted: Mapping[str, Array], dtype: str) -> None:
    result, report = fused(model)
    assert len(report.written_out) == 1, report.notes
    assert report.is_changed
    assert not report.blocks
    for level in (LEVELS[0], LEVELS[-1]):
        for got, numbers in zip(run(result, feeds, level), wanted.values(), strict=True):
            assert_same(got, numbers, TOLERANCE[dtype])


def of_swiglu(gate: Array, up: Array, attrs: Mapping[str, Any], dtype: str) -> Array:
    """The formula of com.microsoft SwiGLU in float64."""
    limit, alpha = attrs.get("limit", 0.0), attrs.get("activation_alpha", 1.0)
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore", invalid="ignore"):
        activated = gate * (1 / (1 + np.exp(-alpha * gate)))
        if attrs.get("round_activation"):
            activated = rounded(activated, dtype)
        return activated * (up + attrs.get("activation_beta", 0.0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"activation_alpha": 1.702, "activation_beta": 1.0, "limit": 7.0},
        {"round_activation": 1},
        {"limit": -1.0, "activation_alpha": -0.5},
    ],
    ids=lambda attrs: " ".join(attrs) or "plain",
)
@pytest.mark.parametrize("halves", [False, True])
def test_swiglu(attrs: dict[str, Any], dtype: str, halves: bool) -> None:
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((3, 20)).astype(np.float32) * 3 for _ in range(2))
    gate[0, :10] = EDGES
    up[1, :2] = np.nan, np.inf
    feeds = {"gate": np.concatenate([gate, up], axis=1)} if halves else {"gate": gate, "up": up}
    model = model_of("SwiGLU", feeds, dict.fromkeys(feeds, dtype), {"y": (dtype, 2)}, **attrs)
    wanted = of_swiglu(rounded(gate, dtype), rounded(up, dtype), attrs, dtype)
    check(model, feeds, {"y": rounded(wanted, dtype)}, dtype)


def test_small_numbers_are_exact() -> None:
    """Each number has the precision of float32, however small it is."""
    gate = np.linspace(-85, 20, 300).astype(np.float32)[None]
    feeds = {"gate": gate, "up": np.ones_like(gate)}
    result, _ = fused(model_of("SwiGLU", feeds, {}, {"y": ("float32", 2)}))
    wanted = of_swiglu(gate.astype(np.float64), np.ones(1), {}, "float32")
    np.testing.assert_allclose(run(result, feeds)[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_standard_ones(alpha: float, dtype: str) -> None:
    """ONNX Runtime expands SwiGLU into Swish, and has no kernel for that either."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((2, 3, 10)).astype(np.float64) for _ in range(2))
    a[0, 0] = EDGES
    if dtype != "float64":
        a, b = a.astype(np.float32), b.astype(np.float32)
    attrs = {"activation_alpha": alpha}
    for op_type, opset, feeds in (("SwiGLU", 28, {"a": a, "b": b}), ("Swish", 24, {"a": a})):
        model = model_of(op_type, feeds, dict.fromkeys(feeds, dtype), {"y": (dtype, 3)}, "", opset, alpha=alpha)
        other = rounded(feeds.get("b", np.ones_like(a)), dtype)
        check(model, feeds, {"y": rounded(of_swiglu(rounded(a, dtype), other, attrs, dtype), dtype)}, dtype)


def of_rms_norm_rotary(feeds: Mapping[str, Array], attrs: Mapping[str, Any], types: Mapping[str, str]) -> list[Array]:
    """The formula of RMSNormRotary in float64: the rows after the rotation and before."""
    x, cos, sin = (rounded(feeds[name], types[name]) for name in ("x", "cos", "sin"))
    start, turned = attrs.get("input_start", 0), attrs["rotary_embedding_dim"]
    width = attrs.get("input_width", 0) or x.shape[-1]
    x = x[..., start : start + width]
    rows = x / np.sqrt((x**2).mean(-1, keepdims=True) + attrs.get("epsilon", 1e-6)) * feeds["scale"]
    places = feeds["positions"]
    if places.ndim == 1:
        places = np.broadcast_to(places + np.arange(x.shape[1]), x.shape[:2])
    cos, sin = cos[places][:, :, None], sin[places][:, :, None]
    one, other, rest = np.split(rows, [turned // 2, turned], axis=-1)
    out = np.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)
    out = out.reshape(*x.shape[:2], -1)
    if attrs.get("flatten_batch"):
        out = out.reshape(1, -1, out.shape[-1])
    return [out, rows]


@pytest.mark.parametrize(
    ("types", "attrs", "positions"),
    [
        (("bfloat16", "bfloat16"), {}, (2, 3)),
        (("bfloat16", "float32"), {"input_start": 4, "input_width": 12}, (2, 3)),
        (("float16", "bfloat16"), {"output_fp16": 1, "epsilon": 0.1}, (1,)),
        (("float16", "float32"), {"output_fp16": 1, "flatten_batch": 1, "use_fp32_arithmetic": 0}, (2, 3)),
    ],
    ids=str,
)
def test_rms_norm_rotary(types: tuple[str, str], attrs: dict[str, Any], positions: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    feeds: dict[str, Array] = {
        "x": rng.standard_normal((2, 3, 2, 16)).astype(np.float32),
        "scale": rng.standard_normal(attrs.get("input_width", 16)).astype(np.float32),
        "positions": rng.integers(0, 2, positions),
        "cos": rng.standard_normal((4, 4)).astype(np.float32),
        "sin": rng.standard_normal((4, 4)).astype(np.float32),
    }
    kinds = {"x": types[0], "cos": types[1], "sin": types[1]}
    out = "float16" if attrs.get("output_fp16") else "bfloat16"
    attrs = {**attrs, "rotary_embedding_dim": 8}
    model = model_of("RMSNormRotary", feeds, kinds, {"y": (out, 3), "normed": ("float32", 4)}, **attrs)
    rows, normed = of_rms_norm_rotary(feeds, attrs, kinds)
    check(model, feeds, {"y": rows, "normed": normed}, out)


@pytest.mark.parametrize(
    ("op_type", "change", "attrs", "words"),
    [
        ("SwiGLU", {"gate": np.zeros((2, 3), np.float32)}, {}, "3 columns"),
        ("SwiGLU", {"gate": np.zeros((2, 4), np.float32)}, {"later": 1}, "the attribute 'later'"),
        ("SwiGLU", {"gate": np.zeros((2, 4), np.int32)}, {}, "another one than it takes"),
        ("SparseAttentionIndexer", {"query": np.zeros((2, 4), np.float32)}, {}, "blocks of pooled keys"),
        ("RMSNormRotary", {}, {"rotary_embedding_dim": 20}, "20 of the 16 columns from 0 on"),
        ("RMSNormRotary", {}, {"rotary_embedding_dim": 8, "input_start": 9, "input_width": 8}, "from 9 on"),
        ("RMSNormRotary", {}, {"rotary_embedding_dim": 8, "flatten_batch": 1}, "one position for several"),
    ],
)
def test_what_stays(op_type: str, change: dict[str, Array], attrs: dict[str, Any], words: str) -> None:
    feeds = change or {
        "x": np.zeros((2, 3, 2, 16), np.float16),
        "scale": np.zeros(16, np.float32),
        "positions": np.zeros(1, np.int64),
        "cos": np.zeros((4, 4), np.float32),
        "sin": np.zeros((4, 4), np.float32),
    }
    result, report = fused(model_of(op_type, feeds, {}, {"y": ("float32", 2 if len(feeds) == 1 else 3)}, **attrs))
    assert op_type in [node.op_type for node in result.graph.node]
    assert not report.is_changed
    (note,) = report.notes
    assert words in note


def test_an_old_opset() -> None:
    """The plain operators take all types from opset 13 on."""
    feeds = {"gate": np.zeros((2, 4), np.float32)}
    for opset, count in ((13, 1), (12, 0), (9, 0)):
        _, report = fused(model_of("SwiGLU", feeds, {}, {"y": ("float32", 2)}, opset=opset, limit=1.0))
        assert len(report.written_out) == count
        assert count or "in opset" in report.notes[0]


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_in_a_function(target: Target) -> None:
    """Each call is written out. A model in which nothing is keeps its functions."""
    model = parse(
        "h = f.gated(gate, up) y = f.gated(h, up)",
        inputs="float[B,8] gate, float[B,8] up",
        outputs="float[B,8] y",
        opset=23,
        functions='<opset_import: ["": 23, "com.microsoft": 1], domain: "f"> gated (a, b) => (c) '
        "{ c = com.microsoft.SwiGLU(a, b) }",
    )
    result, report = fused(model, target)
    assert len(report.written_out) == (target == "ort")
    assert len(result.functions) == (target != "ort")
    if target == "ort":
        gate, up = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
        wanted = of_swiglu(of_swiglu(gate, up, {}, "float32"), up, {}, "float32")
        assert_same(run(result, {"gate": gate, "up": up})[0], wanted, TOLERANCE["float32"])


def test_in_a_function_of_another_opset() -> None:
    """Where an operator of it is another one in the model's, it cannot be inlined, and types are not known in it."""
    model = parse("y = f.gated(gate)", inputs="float[B,8] gate", outputs="float[B,4] y", opset=23)
    gated = (
        '<opset_import: ["": 21, "com.microsoft": 1], domain: "f"> gated (a) => (c) '
        "{ b = Identity(a) c = com.microsoft.SwiGLU(b) }"
    )
    model.functions.append(onnx.parser.parse_function(gated))
    report = fuse(ir.from_proto(model), Options())
    assert not report.is_changed
    assert "the function 'gated' cannot be inlined" in report.notes[0]


def test_other_targets_keep_them() -> None:
    feeds = {"gate": np.zeros((2, 4), np.float32)}
    model = model_of("SwiGLU", feeds, {}, {"y": ("float32", 2)}, opset=23)
    for target in ("ascend", "onnx", "contrib"):
        result, report = fused(model, target)
        assert "SwiGLU" in [node.op_type for node in result.graph.node]
        assert not report.written_out


@pytest.mark.parametrize(
    ("op_type", "shapes", "attrs", "wanted"),
    [
        ("SwiGLU", {"gate": [2, 6]}, {}, [(2, 3)]),
        ("SwiGLU", {"gate": [2, 6], "up": [2, 6]}, {}, [(2, 6)]),
        ("RMSNormRotary", {"x": [2, 3, 4, 16]}, {"rotary_embedding_dim": 8}, [(2, 3, 64), (2, 3, 4, 16)]),
        (
            "RMSNormRotary",
            {"x": [2, 3, 4, 16]},
            {"rotary_embedding_dim": 8, "input_width": 8, "flatten_batch": 1},
            [(1, 6, 32), (2, 3, 4, 8)],
        ),
        (
            "PagedAttention",
            {"q": [5, 64], "k": [5, 32], "v": [5, 32], "kc": [9, 16, 2, 16], "vc": [9, 16, 2, 16]},
            {"num_heads": 4},
            [(5, 64), (9, 16, 2, 16), (9, 16, 2, 16)],
        ),
        (
            "DynamicSparseAttention",
            {"q": [2, 5, 64], "k": [2, 5, 32], "v": [2, 5, 32], "pk": [2, 2, 9, 16], "pv": [2, 2, 9, 16]},
            {"num_heads": 4},
            [(2, 5, 64), (2, 2, 9, 16), (2, 2, 9, 16)],
        ),
    ],
)
def test_shapes(
    op_type: str, shapes: dict[str, list[int]], attrs: dict[str, int], wanted: list[tuple[int, ...]]
) -> None:
    """What reads the results of these operators knows their sizes."""
    inputs = [ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(FLOAT)) for name, shape in shapes.items()]
    node = ir.node(op_type, inputs, attrs, domain=CONTRIB, num_outputs=len(wanted))
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, CONTRIB: 1})
    info = analyse(ir.Model(graph, ir_version=10))
    for output, shape in zip(node.outputs, wanted, strict=True):
        assert tuple(size.const for size in info.shape(output) or ()) == shape
