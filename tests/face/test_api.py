"""`optimize` from Python: what it accepts, returns and never changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.errors import InputError, InternalError
from tests.graphs import harness

from .builders import SIZE, attention, external, feeds, plain, projected, saved


def types(model: onnx.ModelProto | ir.Model) -> list[str]:
    nodes = model.graph.node if isinstance(model, onnx.ModelProto) else list(model.graph)
    return [node.op_type for node in nodes]


def run(model: onnx.ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    fa_compiler.register_custom_ops(options)
    return np.asarray(ort.InferenceSession(model.SerializeToString(), options).run(None, feeds())[0])


def test_outputs_and_inputs_of_unknown_rank_are_no_fault() -> None:
    """As tf2onnx declares them; ONNX Runtime takes such models, the checker does not."""
    model = attention()
    wanted = run(model)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    result = fa_compiler.optimize(model)
    assert types(result.model) == ["FlashAttention"]
    np.testing.assert_allclose(run(result.model), wanted, rtol=1e-5, atol=1e-6)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    (block,) = fa_compiler.optimize(model).report.blocks
    assert block.code == "rank"


def test_path(tmp_path: Path) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    for given in (path, str(path)):
        result = fa_compiler.optimize(given)
        assert isinstance(result.model, onnx.ModelProto)
        assert types(result.model) == ["FlashAttention"]
        assert result.report.model == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_proto_is_not_changed(tmp_path: Path) -> None:
    model = attention()
    before = model.SerializeToString(deterministic=True)
    result = fa_compiler.optimize(model, tmp_path / "out.onnx")
    assert model.SerializeToString(deterministic=True) == before
    assert isinstance(result.model, onnx.ModelProto)
    assert result.model.SerializeToString(deterministic=True) == onnx.load(tmp_path / "out.onnx").SerializeToString(
        deterministic=True
    )
    np.testing.assert_allclose(run(result.model), run(model), rtol=0, atol=1e-5)


def test_renaming_a_value_does_not_reach_the_given_proto(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnx-ir writes a new name of an initializer through to its tensor; ours are detached from the proto."""
    model = attention()
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(3), "c")))
    honest = fa_compiler.pipeline.fusing.fuse

    def renaming(graph: ir.Model, *args: object) -> object:
        graph.graph.initializers["scale"].name = "renamed"
        for node in graph.graph:
            if node.op_type == "Constant":
                node.attributes["value"].value.name = "renamed"
        return honest(graph, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", renaming)
    before = model.SerializeToString(deterministic=True)
    fa_compiler.optimize(model)
    assert model.SerializeToString(deterministic=True) == before
    given = ir.from_proto(model)
    fa_compiler.optimize(given)
    assert given.graph.initializers["scale"].const_value.name == "scale"


def test_ir_model_gives_an_ir_model(tmp_path: Path) -> None:
    path, weight = projected(tmp_path / "in")
    model = ir.load(path)
    result = fa_compiler.optimize(model)
    assert isinstance(result.model, ir.Model)
    assert "FlashAttention" in types(result.model)
    assert "Softmax" in types(model)
    np.testing.assert_array_equal(result.model.graph.initializers["w"].const_value.numpy(), weight)
    (tmp_path / "out").mkdir()
    result = fa_compiler.optimize(model, tmp_path / "out" / "m.onnx")
    assert isinstance(result.model, ir.Model)
    assert Path(result.model.graph.initializers["w"].const_value.path) == tmp_path / "out" / "m.onnx.data"
    np.testing.assert_array_equal(result.model.graph.initializers["w"].const_value.numpy(), weight)
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), weight)


def test_other_things_are_no_models() -> None:
    with pytest.raises(TypeError, match="not int"):
        fa_compiler.optimize(7)  # type: ignore[arg-type]


def test_options_are_checked() -> None:
    with pytest.raises(fa_compiler.InputError, match="'gpu'"):
        fa_compiler.optimize(plain(), target="gpu")  # type: ignore[arg-type]
    with pytest.raises(fa_compiler.InputError, match="'luck'"):
        fa_compiler.optimize(plain(), assume="luck")
    with pytest.raises(fa_compiler.InputError, match="'Ascend7'"):
        fa_compiler.optimize(plain(), target="ascend", soc_version="Ascend7")


def test_output_may_not_be_the_input(tmp_path: Path) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    with pytest.raises(fa_compiler.InputError, match="input itself"):
        fa_compiler.optimize(path, path)


@pytest.mark.parametrize("ir_version", [7, 8, 10])
def test_versions_are_kept(ir_version: int) -> None:
    model = attention(ir_version=ir_version)
    model.opset_import.add(domain="my.domain", version=3)
    result = fa_compiler.optimize(model).model
    assert isinstance(result, onnx.ModelProto)
    assert result.ir_version == ir_version
    assert {opset.domain: opset.version for opset in result.opset_import} == {"": 17, "my.domain": 3, "fa_compiler": 1}


def test_without_a_fused_node_there_is_no_new_domain() -> None:
    model = plain()
    result = fa_compiler.optimize(model).model
    assert result == model
    assert result is not model


def test_inference_is_not_lost() -> None:
    """The checker accepts the result and knows the type of every value of the fused graph."""
    result = fa_compiler.optimize(attention()).model
    assert isinstance(result, onnx.ModelProto)
    onnx.checker.check_model(result, full_check=True)


def test_unknown_domains_and_ops_are_left_alone(tmp_path: Path) -> None:
    """Ops nobody knows, in their own domain and in the standard one, beside attention."""
    model = attention()
    model.opset_import.add(domain="my.domain", version=1)
    model.graph.node.append(helper.make_node("Strange", ["out"], ["z"], "strange", domain="my.domain", depth=3))
    model.graph.node.append(helper.make_node("SimplifiedLayerNormalization", ["z"], ["y"], "norm", epsilon=1e-5))
    model.graph.output[0].name = "y"
    model.graph.value_info.append(helper.make_tensor_value_info("out", 1, ["batch", 4, "seq", 16]))
    result = fa_compiler.optimize(model, tmp_path / "out.onnx").model
    assert types(result) == ["FlashAttention", "Strange", "SimplifiedLayerNormalization"]
    assert isinstance(result, onnx.ModelProto)
    assert list(result.graph.node[1:]) == list(model.graph.node[5:])


def test_weights_in_a_branch_stay_outside(tmp_path: Path) -> None:
    """External tensors of subgraphs, as initializers and as Constant nodes, follow the model."""

    def branch(name: str, offset: int, constant: bool) -> onnx.GraphProto:
        tensor = external(f"w_{name}", (SIZE, SIZE), "w.bin", offset)
        nodes = [helper.make_node("MatMul", ["out", f"w_{name}"], [f"y_{name}"])]
        if constant:
            nodes.insert(0, helper.make_node("Constant", [], [f"w_{name}"], value=tensor))
        y = helper.make_tensor_value_info(f"y_{name}", 1, None)
        return helper.make_graph(nodes, name, [], [y], [] if constant else [tensor])

    model = attention(batch=2, length=8)
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    branches = {"then_branch": branch("yes", 0, True), "else_branch": branch("no", 4 * SIZE * SIZE, False)}
    model.graph.node.append(helper.make_node("If", ["flag"], ["y"], "choose", **branches))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [2, 4, 8, SIZE]))
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    path, out = saved(model, tmp_path / "in" / "m.onnx"), tmp_path / "out" / "m.onnx"
    weights = np.random.default_rng(0).standard_normal((2, SIZE, SIZE)).astype(np.float32)
    (tmp_path / "in" / "w.bin").write_bytes(weights.tobytes())
    assert fa_compiler.optimize(path, out).report.count("fused") == 1
    original = ort.InferenceSession(str(path))
    for given in (out, path):
        session = fa_compiler.InferenceSession(given)
        for flag in (False, True):
            inputs = {**feeds(), "flag": np.array(flag)}
            expected = original.run(None, inputs)[0]
            np.testing.assert_allclose(session.run(None, inputs)[0], expected, rtol=0, atol=1e-4)


def test_a_broken_result_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a pass made an invalid graph, the final checks stop it."""
    honest = fa_compiler.pipeline.fusing.fuse

    def breaking(model: ir.Model, *args: object) -> object:
        report = honest(model, *args)  # type: ignore[arg-type]
        next(node for node in model.graph if node.domain == "ascend").attributes["head_num"] = ir.AttrInt64(
            "head_num", 3
        )
        return report

    monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", breaking)
    with pytest.raises(InternalError, match="attn/FlashAttentionScore"):
        fa_compiler.optimize(attention(), tmp_path / "out.onnx")

    def dangling(model: ir.Model, *args: object) -> object:
        report = honest(model, *args)  # type: ignore[arg-type]
        model.graph.append(ir.node("Relu", [ir.Value(name="nowhere")], num_outputs=1))
        return report

    monkeypatch.setattr("fa_compiler.pipeline.fusing.fuse", dangling)
    with pytest.raises(InternalError, match="nowhere"):
        fa_compiler.optimize(attention(), tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_node_of_the_input_that_ascend_cannot_take(tmp_path: Path) -> None:
    """A file made for ONNX Runtime with an extension is refused for Ascend, and left alone for ONNX Runtime."""
    model = attention()
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", 1, 1, "seq"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(-np.inf, np.float32), "low"))
    model.graph.node.insert(3, helper.make_node("Where", ["mask", "low", "scaled"], ["masked"], "where"))
    model.graph.node[4].input[0] = "masked"
    fused = fa_compiler.optimize(model)
    assert "EXT-MASK-BROADCAST" in fused.report.blocks[0].extensions
    again = fa_compiler.optimize(fused.model)
    assert again.model == fused.model
    with pytest.raises(fa_compiler.InputError, match="start from the original model"):
        fa_compiler.optimize(fused.model, target="ascend")


@pytest.mark.parametrize(
    ("product", "dtype", "told"),
    [
        ("A2", TensorProto.FLOAT, r"\(seed_v2_cann8\) has no attribute 'seed'; CANN 8.5.0-alpha has it"),
        (
            "310P",
            TensorProto.FLOAT16,
            "no variant of PromptFlashAttention is known for CANN 8.0; the first is of",
        ),
    ],
)
def test_a_node_of_the_input_that_an_older_cann_cannot_take(product: str, dtype: int, told: str) -> None:
    """The message names the version, because the product takes the node."""
    fused = fa_compiler.optimize(attention(dtype), target="ascend", soc_version=product).model
    assert fa_compiler.optimize(fused, target="ascend", soc_version=product).model == fused
    said = f"not for {product} with CANN 8.0: node '.*' is refused by {product} with CANN 8.0: .*{told}"
    with pytest.raises(fa_compiler.InputError, match=said):
        fa_compiler.optimize(fused, target="ascend", soc_version=product, cann="8.0")


def test_other_ops_of_the_domain_are_left_alone() -> None:
    model = plain()
    model.opset_import.add(domain="ascend", version=1)
    model.graph.node[0].op_type, model.graph.node[0].domain = "SomethingElse", "ascend"
    for target in ("ort", "ascend"):
        assert fa_compiler.optimize(model, target=target).model == model  # type: ignore[arg-type]


def test_finite_scores_are_assumed_for_ascend_until_they_are_refused() -> None:
    model = harness.load("bert__dynamon_sdpa_op20")  # with where(isnan(p), 0, p)
    for assume in ((), ("finite-scores",)):
        blocks = fa_compiler.optimize(model, target="ascend", assume=assume).report.blocks
        assert all(block.status == "fused" and "finite-scores" in block.assumed for block in blocks)
    for block in fa_compiler.optimize(model, target="ascend", assume=["non-finite-scores"]).report.blocks:
        assert (block.status, block.code) == ("declined", "illegal_for_target")
        assert block.reason is not None
        assert "a guard gives 0 for a row whose softmax is NaN" in block.reason
    for block in fa_compiler.optimize(model, assume=["non-finite-scores"]).report.blocks:
        assert (block.status, block.assumed) == ("fused", ())  # the CPU kernel has the guard
    with pytest.raises(InputError, match="cannot both hold"):
        fa_compiler.optimize(model, target="ascend", assume=["finite-scores", "non-finite-scores"])
