"""Fused files are read by other tools: each fused node has one output, and a body in standard operators that all nodes
of its name share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16

import fa_compiler
from fa_compiler.op_registry import FILE_DOMAIN, FILE_OPS
from tests.graphs import harness

Array = np.ndarray
Feeds = dict[str, Array]
# The number of bodies. The oldest opset has no CastLike; BART has nodes with and without a causal mask.
NAMES = {"bert__tso_eager_op13": 1, "bert__dynamon_sdpa_op20": 1, "bart__tsn_sdpa_op17": 2}
TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-2


def run(model: onnx.ModelProto | bytes, feeds: Feeds, library: bool) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library:
        fa_compiler.register_custom_ops(options)
    data = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return [np.asarray(result) for result in session.run(None, feeds)]


def assert_close(got: list[Array], wanted: list[Array], tolerance: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        if other.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * float(np.abs(other).max()))
        else:
            np.testing.assert_array_equal(one, other)


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == FILE_DOMAIN and node.op_type in FILE_OPS]


def metadata(model: onnx.ModelProto) -> str:
    (text,) = [entry.value for entry in model.metadata_props if entry.key == "fa_compiler"]
    return text


@pytest.mark.parametrize("name", NAMES)
def test_other_tools_read_a_fused_file(name: str, tmp_path: Path) -> None:
    original, feeds = harness.load(name), harness.inputs(harness.read_index()[name])
    wanted = run(original, feeds, library=False)
    result = fa_compiler.optimize(original)
    fused = result.model
    assert isinstance(fused, onnx.ModelProto)
    assert len(nodes(fused)) == result.report.count("fused")
    assert all(len(node.output) == 1 and node.output[0] for node in nodes(fused))
    assert len(fused.functions) == NAMES[name]
    assert "the functions of this model compute the same" in metadata(fused)
    onnx.checker.check_model(fused, full_check=True)
    for library in (True, False):
        assert_close(run(fused, feeds, library), wanted, TOLERANCE)

    half = convert_float_to_float16(fused, keep_io_types=True)
    assert_close(run(half, feeds, library=True), wanted, HALF_TOLERANCE)
    if "op13" not in name:  # CastLike came with opset 15
        assert_close(run(half, feeds, library=False), wanted, HALF_TOLERANCE)


@pytest.mark.parametrize("count", [len(FILE_OPS), len(FILE_OPS) + 1])
def test_nodes_with_different_bodies_have_different_names(count: int) -> None:
    """The library has a kernel for each name, and ONNX Runtime without it finds each node's own body. For more bodies
    there are no names, so the file has none."""
    heads = range(1, count + 1)
    shapes = [f"float[2,{n},5,{8 * (n % 2 + 1)}]" for n in heads]
    inputs = ", ".join(f"{shape} x{n}" for n, shape in zip(heads, shapes, strict=True))
    outputs = ", ".join(f"{shape} y{n}" for n, shape in zip(heads, shapes, strict=True))
    attention = (
        "kt@ = Transpose<perm=[0, 1, 3, 2]>(x@) s@ = MatMul(x@, kt@) p@ = Softmax<axis=-1>(s@) y@ = MatMul(p@, x@) "
    )
    body = "".join(attention.replace("@", str(n)) for n in heads)
    original = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> several ({inputs}) => ({outputs}) {{ {body} }}'
    )
    fused = fa_compiler.optimize(original).model
    assert isinstance(fused, onnx.ModelProto)
    onnx.checker.check_model(fused, full_check=True)
    complete = count <= len(FILE_OPS)
    assert [node.op_type for node in nodes(fused)] == list(FILE_OPS if complete else FILE_OPS[:1] * count)
    assert [function.name for function in fused.functions] == list(FILE_OPS if complete else ())
    rng = np.random.default_rng(0)
    feeds = {f"x{n}": rng.standard_normal((2, n, 5, 8 * (n % 2 + 1))).astype(np.float32) for n in heads}
    wanted = run(original, feeds, library=False)
    if complete:
        assert_close(run(fused, feeds, library=False), wanted, TOLERANCE)
    del fused.functions[:]
    assert_close(run(fused, feeds, library=True), wanted, TOLERANCE)


@pytest.mark.parametrize(("library", "suffix"), [(True, ".onnx"), (False, ".ort")])
def test_a_model_that_onnx_runtime_optimised_and_saved(library: bool, suffix: str, tmp_path: Path) -> None:
    """With the library it keeps the nodes, and the saved model needs the library. Without it, the bodies are in their
    place, and any session runs the saved model. convert_onnx_models_to_ort does the same."""
    name = "bart__tsn_sdpa_op17"
    feeds = harness.inputs(harness.read_index()[name])
    fused = fa_compiler.optimize(harness.load(name)).model
    assert isinstance(fused, onnx.ModelProto)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / f"saved{suffix}")
    if library:
        fa_compiler.register_custom_ops(options)
    ort.InferenceSession(fused.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = Path(options.optimized_model_filepath).read_bytes()
    if library:
        assert len(nodes(onnx.load_from_string(saved))) == len(nodes(fused))
        with pytest.raises(Exception, match="fa_compiler:FlashAttention"):
            run(saved, feeds, library=False)
    assert_close(run(saved, feeds, library), run(harness.load(name), feeds, library=False), TOLERANCE)


class _Calibration(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is not typed
    def __init__(self, feeds: Feeds) -> None:
        self._left = iter([feeds])

    def get_next(self) -> Feeds | None:
        return next(self._left, None)


def test_static_quantisation_calibrates_without_the_library(tmp_path: Path) -> None:
    """ONNX Runtime also runs the result: a DequantizeLinear reaches the body (bodies.py, `lacking_values`)."""
    name = "bert__dynamon_sdpa_op20"
    feeds = harness.inputs(harness.read_index()[name])
    source, target = tmp_path / "fused.onnx", tmp_path / "quantised.onnx"
    fa_compiler.optimize(harness.load(name), source)
    quantize_static(str(source), str(target), _Calibration(feeds))
    quantised = onnx.load(target)
    assert len(nodes(quantised)) == 2
    assert_close(run(quantised, feeds, library=True), run(quantised, feeds, library=False), 1e-3)


def test_a_fused_file_is_fused_and_has_nothing_to_do() -> None:
    """What reads a fused file sees the nodes of the graph, not the softmax of their bodies."""
    fused = fa_compiler.optimize(harness.load("bert__tso_eager_op13")).model
    again = fa_compiler.optimize(fused)
    assert again.model == fused
    assert {block.status for block in again.report.blocks} == {"already_fused"}
    assert again.report.count("already_fused") == len(nodes(fused))
    assert f"0 fused, {len(nodes(fused))} already fused (of {len(nodes(fused))})" in again.report.outcome
    ascend = fa_compiler.optimize(harness.load("bert__tso_eager_op13"), target="ascend", only="attention").model
    assert isinstance(ascend, onnx.ModelProto)
    assert not ascend.functions
    assert not nodes(ascend)


def test_without_bodies() -> None:
    fused = fa_compiler.optimize(harness.load("bert__tso_eager_op13"), bodies=False).model
    assert isinstance(fused, onnx.ModelProto)
    assert not fused.functions
    assert len(nodes(fused)) == 2
    assert "register_custom_ops_library" in metadata(fused)
    assert "cannot run without it" in metadata(fused)
    with pytest.raises(Exception, match="fa_compiler:FlashAttention"):
        run(fused, harness.inputs(harness.read_index()["bert__tso_eager_op13"]), library=False)
