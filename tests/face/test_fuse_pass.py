"""`FuseAttention` stands in pipelines of onnx_ir passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes import common

import fa_compiler
from fa_compiler.checks import checker
from fa_compiler.passes import Code

from .builders import attention, feeds, plain, projected

TOLERANCE = 1e-5  # float32, relative to the largest value: the order of the additions differs


def run(model: ir.Model, library: bool) -> np.ndarray:
    options = ort.SessionOptions()
    if library:
        fa_compiler.register_custom_ops(options)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options).run(None, feeds())[0]


def test_fuses_a_copy_as_optimize_does() -> None:
    model = ir.from_proto(attention())
    fuse = fa_compiler.FuseAttention()
    assert fuse.report is None
    result = fuse(model)
    assert result.modified
    assert fuse.report is not None and fuse.report.count("fused") == 1
    assert "Softmax" in [node.op_type for node in model.graph]
    proto = ir.to_proto(result.model)
    expected = fa_compiler.optimize(attention()).model
    assert [(node.domain, node.op_type, list(node.output)) for node in proto.graph.node] == [
        (node.domain, node.op_type, list(node.output)) for node in expected.graph.node
    ]
    assert {(each.domain, each.name) for each in proto.functions} == {
        (each.domain, each.name) for each in expected.functions
    }
    assert [each.key for each in proto.metadata_props] == [each.key for each in expected.metadata_props]
    assert checker.fault(proto, full=True) is None
    truth = run(model, library=False)
    for library in (True, False):  # our kernels, and the bodies in standard operators
        assert np.max(np.abs(run(result.model, library) - truth)) <= TOLERANCE * np.max(np.abs(truth))


def test_a_pipeline_ends_when_nothing_is_left_to_fuse() -> None:
    fuse = fa_compiler.FuseAttention(bodies=False)
    passes = ir.passes.PassManager([common.RemoveUnusedNodesPass(), fuse], steps=3)
    result = passes(ir.from_proto(attention()))
    assert [node.op_type for node in result.model.graph] == ["FlashAttention"]
    assert fuse.report is not None and fuse.report.count("fused") == 0  # of the last step


def test_weights_stay_in_their_file(tmp_path: Path) -> None:
    path, weight = projected(tmp_path)
    result = fa_compiler.FuseAttention()(ir.load(path))
    tensor = result.model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), weight)


def test_other_targets_and_models_without_attention() -> None:
    result = fa_compiler.FuseAttention("onnx")(ir.from_proto(attention()))
    assert [(node.domain, node.op_type) for node in result.model.graph] == [("", "Attention")]
    model = ir.from_proto(plain())
    result = fa_compiler.FuseAttention()(model)
    assert not result.modified
    assert ir.to_proto(result.model) == ir.to_proto(model)
    with pytest.raises(fa_compiler.InputError, match="unknown assumption 'speed'"):
        fa_compiler.FuseAttention(assume=["speed"])


def test_what_is_fused_already_stays_so() -> None:
    graph = attention().graph
    first = fa_compiler.FuseAttention()(ir.from_proto(attention())).model
    again = ir.to_proto(first)
    for node in graph.node:
        node.input[:] = [name if name == "scale" else f"second_{name}" for name in node.input]
        node.output[:] = [f"second_{name}" for name in node.output]
    for value in (*graph.input, *graph.output):
        value.name = f"second_{value.name}"
    again.graph.node.extend(graph.node)
    again.graph.input.extend(graph.input)
    again.graph.output.extend(graph.output)
    again.graph.initializer.extend(graph.initializer)
    fuse = fa_compiler.FuseAttention()
    twice = ir.to_proto(fuse(ir.from_proto(again)).model)
    assert fuse.report is not None and [block.code for block in fuse.report.blocks] == [Code.ALREADY_FUSED, None]
    assert [(node.domain, node.op_type) for node in twice.graph.node] == [("fa_compiler", "FlashAttention")] * 2
    assert [function.name for function in twice.functions] == ["FlashAttention"]


def test_a_pass_shows_its_target_and_what_became_of_the_last_model() -> None:
    fuse = fa_compiler.FuseAttention("contrib")
    assert repr(fuse) == "<FuseAttention for contrib>"
    fuse(ir.from_proto(attention()))
    assert repr(fuse).startswith("<FuseAttention for contrib: ") and repr(fuse).endswith("1 fused (of 1)>")


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an onnx_ir\.Model, not ModelProto; fa_compiler\.optimize takes other"):
        fa_compiler.FuseAttention()(attention())  # type: ignore[arg-type]
