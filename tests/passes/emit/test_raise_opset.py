"""Models whose opset is raised for ONNX's Attention: everything else computes what it did."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime.capi.onnxruntime_pybind11_state as ort_errors
import pytest

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.raise_opset import raise_opset
from tests.passes.running import Array, parse, run, session

INPUTS, OUTPUTS = "float[2,3,8,8] x", "float[?,?,?,?] y"
ROI = "<float[1,4] roi = {0.5, 1.0, 5.0, 6.5}, int64[1] batch = {0}>"
GRID = "<float[2,2,2,2] grid = {-0.5,0.1,0.3,0.9,-0.9,0.2,0.4,0.6,0.0,0.1,-0.2,0.8,0.7,-0.7,0.35,-0.4}>"
KEPT: dict[str, tuple[str, int, str]] = {
    # the body, its opset, initializers
    "ReduceMax with axes": ("y = ReduceMax<axes=[1,-1]>(x)", 13, ""),
    "ReduceMean of everything": ("y = ReduceMean(x)", 17, ""),
    "ReduceL2 in a subgraph": (
        "t = Constant<value=bool {1}>() y = If(t) <"
        "then_branch = a () => (float[2,3,8,1] r) {r = ReduceL2<axes=[3]>(x)}, "
        "else_branch = b () => (float[2,3,8,1] r) {r = ReduceMin<axes=[3]>(x)}>",
        14,
        "",
    ),
    "Split without sizes": ("a, y = Split<axis=2>(x)", 13, ""),
    "GridSample": ('y = GridSample<mode="bilinear">(x, grid)', 16, GRID),
    "pooling": ("y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)", 13, ""),
    "Resize": ('y = Resize<mode="linear">(x, , scales)', 13, "<float[4] scales = {1.0, 1.0, 1.5, 2.0}>"),
    "BatchNormalization": ("y = BatchNormalization(x, v, v, v, v)", 13, "<float[3] v = {1.0, 2.0, 0.5}>"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_raised_model_gives_the_same(name: str) -> None:
    body, opset, initializers = KEPT[name]
    model = parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=opset, initializers=initializers)
    graph = ir.from_proto(model)
    raise_opset(graph, 23)
    raised = ir.to_proto(graph)
    onnx.checker.check_model(raised, full_check=True)
    assert next(each.version for each in raised.opset_import if not each.domain) == 23
    feeds: dict[str, Array] = {"x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)}
    (wanted,), (got,) = run(model, feeds), run(raised, feeds)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)  # kernels of newer opsets may sum in another order


REFUSED: dict[str, tuple[str, int, str]] = {
    "an old opset": ("y = Relu(x)", 12, ""),
    "pooling whose border changed": ("y = AveragePool<kernel_shape=[3,3], ceil_mode=1>(x)", 13, ""),
    "an operator without a kernel": ("y = RoiAlign<output_height=2, output_width=2>(x, roi, batch)", 13, ROI),
    "an operator that nobody looked at": ("y = Bernoulli(x)", 15, ""),
}


WITHOUT_KERNEL: dict[str, tuple[str, str, int]] = {
    # the body, the type, the opset: with another type, or in a later opset, the node is raised, or does not load before
    "LeakyRelu": ("y = LeakyRelu(x)", "double", 16),
    "PRelu": ("s = Identity(x) y = PRelu(x, s)", "double", 16),
    "PRelu of integers": ("y = PRelu(x, x)", "int64", 17),
    "Relu of integers": ("y = Relu(x)", "int64", 18),
    "Softplus in a subgraph": (
        "t = Constant<value=bool {1}>() y = If(t) <"
        "then_branch = a () => (double[2,3,8,8] r) {r = Softsign(x)}, "
        "else_branch = b () => (double[2,3,8,8] r) {r = Identity(x)}>",
        "double",
        18,
    ),
    "ReduceLogSumExp": ("y = ReduceLogSumExp(x)", "uint32", 18),
}


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_a_kernel_that_the_newer_opset_lacks_stops_it(name: str) -> None:
    """The node means the same there. ONNX Runtime loads it as it is, and not raised."""
    body, kind, opset = WITHOUT_KERNEL[name]
    inputs, outputs = INPUTS.replace("float", kind), OUTPUTS.replace("float", kind)
    model = parse(body, inputs=inputs, outputs=outputs, opset=opset)
    session(model)
    with pytest.raises(Decline, match="ONNX Runtime has no kernel of"):
        raise_opset(ir.from_proto(model), 23)
    for domain in model.opset_import:
        domain.version = 23 if not domain.domain else domain.version
    with pytest.raises(ort_errors.NotImplemented):
        session(model)
    if kind == "double":
        other = parse(body.replace("double", "float"), inputs=INPUTS, outputs=OUTPUTS, opset=opset)
        graph = ir.from_proto(other)
        raise_opset(graph, 23)
        session(ir.to_proto(graph))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_changed_stops_it(name: str) -> None:
    body, opset, initializers = REFUSED[name]
    graph = ir.from_proto(parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=opset, initializers=initializers))
    before = ir.to_proto(graph)
    with pytest.raises(Decline) as caught:
        raise_opset(graph, 23)
    assert caught.value.code == Code.OPSET
    assert caught.value.hint == "export again with opset 23"
    assert ir.to_proto(graph) == before
