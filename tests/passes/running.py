"""Fusing a model given as text or proto, checking the result, and running models in ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import onnxruntime.capi.onnxruntime_pybind11_state as ort_errors
import pytest
from onnx import helper

from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.lowering.ort.library import OPERATORS
from fa_compiler.op_registry import DOMAIN, names, verify
from fa_compiler.passes import Block, Options, Report, analyse, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.rewrite.node_view import node_view

Array = npt.NDArray[np.generic]
Feeds = Mapping[str, Array]

ORIGINAL_OFF = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
LEVELS = (
    ORIGINAL_OFF,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)
"""ONNX Runtime's optimisations, from none to all: a fused model means the same with each of them."""
PRODUCT = "A2"


QKV = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
SIZES = {"B": 2, "S": 5, "T": 6}

PRODUCT_QK = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) "
SOFTMAX = "p = Softmax<axis=-1>({}) "
PRODUCT_PV = "y = MatMul(p, v) "


def parse(
    body: str,
    more: str = "",
    *,
    inputs: str = QKV,
    outputs: str = "float[B,4,S,8] y",
    opset: int = 17,
    ir_version: int = 8,
    initializers: str = "",
    functions: str = "",
) -> onnx.ModelProto:
    """A valid model from ONNX text; by default its inputs are q, k, v of four heads of size 8, and `more`."""
    domains = f'"": {opset}, "com.microsoft": 1, "f": 1, "own": 1'
    model = onnx.parser.parse_model(
        f"<ir_version: {ir_version}, opset_import: [{domains}]> "
        f"g ({inputs}{', ' if more else ''}{more}) => ({outputs}) {initializers} {{ {body} }} {functions}"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def refused(match: str) -> pytest.RaisesExc[Exception]:
    """A run that ONNX Runtime or an operator refuses with words that match."""
    return pytest.raises((ort_errors.Fail, ort_errors.InvalidArgument), match=match)


def random_feeds(model: onnx.ModelProto, seed: int = 0, **given: Array) -> dict[str, Array]:
    """Inputs for a model: normal numbers, fair coins for booleans, sizes of named dimensions from SIZES."""
    rng = np.random.default_rng(seed)
    feeds = dict(given)
    owned = {each.name for each in model.graph.initializer}
    for value in model.graph.input:
        if value.name in feeds or value.name in owned:
            continue
        tensor = value.type.tensor_type
        shape = [SIZES.get(dim.dim_param, 1) if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feeds[value.name] = rng.random(shape) < 0.5 if dtype == np.bool_ else rng.standard_normal(shape).astype(dtype)
    return feeds


def feeds_of(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Random inputs of these sizes: fair coins for booleans, -1 to 2 for integers, normal numbers for the others."""
    rng = np.random.default_rng(0)
    given: dict[str, Array] = {}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims]
        match value.type.tensor_type.elem_type:
            case onnx.TensorProto.BOOL:
                given[value.name] = rng.random(shape) < 0.5
            case onnx.TensorProto.INT64:
                given[value.name] = rng.integers(-1, 3, shape)
            case _:
                given[value.name] = rng.standard_normal(shape).astype(np.float32)
    return given


def fused_alike(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model whose first attention is fused, which gives what the model gives."""
    result, report = fused(proto)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    feeds = random_feeds(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return result


def fused(
    model: onnx.ModelProto,
    target: Target = "ort",
    assume: Sequence[str] = (),
    in_place_caches: bool = False,
    only: str | None = None,
) -> tuple[onnx.ModelProto, Report]:
    """The model after the fusion, and the report. The result has passed every static check there is."""
    graph = ir.from_proto(model)
    report = fuse(graph, Options(target, assume=frozenset(assume), in_place_caches=in_place_caches, only=only))
    result = ir.to_proto(graph)
    onnx.checker.check_model(result, full_check=True)
    made, info = [node for node in graph.graph.all_nodes() if node.domain == DOMAIN], analyse(graph)
    violations = [
        str(violation)
        for node in made
        for violation in verify(node_view(node, info), "ort" if target == "ort" else PRODUCT)
        if target == "ascend" or violation.extension is None
    ]
    assert not violations, violations
    return result, report


def session(model: onnx.ModelProto, level: ort.GraphOptimizationLevel = ORIGINAL_OFF) -> ort.InferenceSession:
    """A session, which computes every node as it is written if no other level is asked for; the same one for the same
    model and level.

    It knows only those fused operators that the model may have, because each of them takes time.
    """
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    used = {*_op_types(nodes)}
    operators = tuple(name for name in names() if name in used)
    return _session(model.SerializeToString(), operators, level)


def _op_types(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Those of the nodes, and of what they contain."""
    for node in nodes:
        yield node.op_type
        for attr in node.attribute:
            yield from _op_types(attr.g.node)


@functools.lru_cache(maxsize=32)
def _session(model: bytes, operators: tuple[str, ...], level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if operators:
        options.add_session_config_entry(OPERATORS, ",".join(operators))
        register_custom_ops(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, feeds: Feeds, level: ort.GraphOptimizationLevel = ORIGINAL_OFF) -> list[Array]:
    """All outputs of a model."""
    return list(session(model, level).run(None, dict(feeds)))


def bound_run(model: onnx.ModelProto, feeds: Feeds, buffers: Mapping[str, str]) -> list[Array]:
    """All outputs of a run in which the outputs in `buffers` lie in the memory of the inputs they are named with."""
    running = session(model)
    binding = running.io_binding()
    memory = {name: array.copy() for name, array in feeds.items()}  # an OrtValue of an array has no memory of its own
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in memory.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in running.get_outputs():
        if output.name in buffers:
            binding.bind_ortvalue_output(output.name, values[buffers[output.name]])
        else:
            binding.bind_output(output.name)
    running.run_with_iobinding(binding)
    return [output.numpy().copy() for output in binding.get_outputs()]


def assert_same(got: Array, wanted: Array, tolerance: float | Array) -> None:
    """Shapes, NaN and infinities agree, and the finite rest relative to the largest finite value wanted."""
    assert got.shape == wanted.shape
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), "NaN positions")
    infinite = np.isinf(wanted) | np.isinf(got)
    np.testing.assert_array_equal(got[infinite], wanted[infinite], "infinities")
    finite = np.isfinite(wanted)
    if not finite.any():
        return
    scale = max(float(np.abs(wanted[finite]).max()), np.finfo(np.float32).tiny)
    error = np.zeros_like(wanted)
    error[finite] = np.abs(got[finite] - wanted[finite]) / scale
    worst = np.unravel_index(np.argmax(error - tolerance), error.shape)
    assert (error <= tolerance).all(), f"{error[worst]:.3g} off at {worst}: {got[worst]} instead of {wanted[worst]}"


def only_block(proto: onnx.ModelProto, assume: Sequence[str] = (), **given: Array) -> Block:
    """The only block of a model whose numbers were compared, float32 in and out."""
    result, report = fused(proto, assume=assume)
    feeds = random_feeds(proto, **given)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    (block,) = report.blocks
    return block
