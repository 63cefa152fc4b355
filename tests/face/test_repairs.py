"""Models that ONNX Runtime loads and the ONNX checker refuses: they are mended, and the report says how."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.case.node import _NodeTestCases, flexattention  # noqa: F401  the cases of FlexAttention
from onnx.backend.test.case.test_case import TestCase

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.errors import InputError
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.model_files.repairs import NEWEST, repaired
from tests.systems import said

from .builders import attention, plain, saved

Edit = Callable[[onnx.ModelProto], object]


def _info(name: str, *sizes: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, sizes)


def packed() -> onnx.ModelProto:
    """ONNX Runtime's own Attention, and a Relu behind it."""
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((16, 48)).astype(np.float32), "w"),
        onnx.numpy_helper.from_array(rng.standard_normal(48).astype(np.float32), "b"),
    ]
    nodes = [
        helper.make_node("Attention", ["x", "w", "b"], ["a"], "attn", domain="com.microsoft", num_heads=2),
        helper.make_node("Relu", ["a"], ["y"], "relu"),
    ]
    graph = helper.make_graph(nodes, "packed", [_info("x", "B", "S", 16)], [_info("y", "B", "S", 16)], weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def with_past(domain: str = "com.microsoft") -> onnx.ModelProto:
    """ONNX Runtime's MultiHeadAttention with a cache, as a decoder has it."""
    inputs = [*(_info(name, "B", 1, 16) for name in "qkv"), *(_info(name, "B", 2, "P", 8) for name in ("pk", "pv"))]
    names = ["q", "k", "v", "", "", "", "pk", "pv"]
    nodes = [
        helper.make_node("MultiHeadAttention", names, ["a", "rk", "rv"], "attn", domain=domain, num_heads=2),
        helper.make_node("Relu", ["a"], ["y"], "relu"),
    ]
    outputs = [_info("y", "B", 1, 16), _info("rk", "B", 2, "P + 1", 8), _info("rv", "B", 2, "P + 1", 8)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    return helper.make_model(helper.make_graph(nodes, "decoder", inputs, outputs), opset_imports=imports, ir_version=8)


def _backwards(nodes: list[onnx.NodeProto]) -> None:
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(nodes)]
    del nodes[:]
    nodes.extend(copies)


def _branch(model: onnx.ModelProto) -> onnx.GraphProto:
    """Put the attention into a branch of an If that depends on an input; returns the branch."""
    graph = model.graph
    body = helper.make_graph(list(graph.node), "body", [], [_info("out", "b", 4, "s", 16)])
    other = helper.make_graph([helper.make_node("Identity", ["query"], ["same"])], "same", [], [_info("same")])
    other.output[0].type.tensor_type.ClearField("shape")
    del graph.node[:]
    node = helper.make_node("If", ["c"], ["y"], "if", then_branch=body, else_branch=other)
    graph.node.append(node)
    graph.input.append(_info("c", dtype=TensorProto.BOOL))
    graph.output[0].name = "y"
    return next(attr.g for attr in graph.node[0].attribute if attr.name == "then_branch")


def _domain(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.domain = "ai.onnx"


def _renamed_import(model: onnx.ModelProto, *opsets: tuple[str, int]) -> None:
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*opset) for opset in opsets)


def _declare(model: onnx.ModelProto, name: str, *sizes: int | str) -> None:
    model.graph.value_info.append(_info(name, *sizes))


def _outer(model: onnx.ModelProto) -> None:
    """A branch reads what a later node makes."""
    branch = _branch(model)
    branch.node[1].input[0] = "negative"
    model.graph.node.append(helper.make_node("Neg", ["query"], ["negative"], "neg"))


def _size(info: onnx.ValueInfoProto, axis: int, size: int) -> None:
    info.type.tensor_type.shape.dim[axis].dim_value = size


def _open(model: onnx.ModelProto) -> None:
    for info in (*model.graph.input, *model.graph.output):
        _size(info, 0, -1)


def _devices(model: onnx.ModelProto) -> None:
    """Device configurations without an id, which onnx-ir cannot write."""
    model.ir_version = 11
    for node in model.graph.node[:2]:
        node.device_configurations.add()


def _early_devices(model: onnx.ModelProto) -> None:
    model.configuration.add(name="pair", num_devices=2)
    model.graph.node[0].device_configurations.add(configuration_id="pair")


def _passed_on(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("q", TensorProto.FLOAT16, ["other", 3]))


def _weight(shape: list[int], dtype: int = TensorProto.FLOAT) -> Edit:
    """A weight of shape [2] becomes an output that is declared with this shape and type."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [2], [0.5, 1.5]))
        model.graph.output.append(helper.make_tensor_value_info("w", dtype, shape))

    return edit


def _twice(other: float) -> Edit:
    """Two weights of one name, 0.5 and another number, beside a node that reads them."""

    def edit(model: onnx.ModelProto) -> None:
        first, second = (onnx.numpy_helper.from_array(np.full(2, each, np.float32), "w") for each in (0.5, other))
        model.graph.initializer.extend([first, second])
        model.graph.node.append(helper.make_node("Neg", ["w"], ["weight"], "neg"))
        model.graph.output.append(_info("weight", 2))

    return edit


def _keys(model: onnx.ModelProto) -> None:
    for value in ("first", "second"):
        model.metadata_props.add(key="made by", value=value)


def _groups(model: onnx.ModelProto) -> None:
    """GroupNormalization of opset 18, which onnx calls deprecated: one scale and bias for each group of channels."""
    model.opset_import[0].version = 18
    for name in ("group_scale", "group_bias"):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0.5, 2.0], np.float32), name))
    inputs = ["query", "group_scale", "group_bias"]
    model.graph.node.append(helper.make_node("GroupNormalization", inputs, ["normal"], "normal", num_groups=2))
    model.graph.output.append(_info("normal", "b", "h", "s", "d"))


MENDED: dict[str, tuple[Callable[[], onnx.ModelProto], Edit, str]] = {
    "no import of ONNX Runtime's": (packed, lambda m: m.opset_import.pop(), "no opset of domain 'com.microsoft'"),
    "no import of ONNX's": (packed, lambda m: m.opset_import.pop(0), f"no opset of domain 'ai.onnx': {NEWEST['']} is"),
    "domain spelt out": (attention, _domain, "5 nodes of domain 'ai.onnx'"),
    "two imports": (attention, lambda m: m.opset_import.insert(0, helper.make_opsetid("ai.onnx", 11)), "before it, 11"),
    "unsorted": (attention, lambda m: _backwards(m.graph.node), "nodes of graph 'attention' stood before others"),
    "branch reads on": (attention, _outer, "nodes of graph 'attention' stood before others"),
    "no name": (attention, lambda m: m.graph.ClearField("name"), "1 graph had no name"),
    "a weight as an output": (
        attention,
        _weight([2, 4, 8]),
        "the output 'w' is a weight, and declared with another type",
    ),
    "a weight of another type": (attention, _weight([2], TensorProto.FLOAT16), "it has that of the weight"),
    "a weight of another size": (attention, _weight([3]), "it has that of the weight"),
    "equal weights of one name": (attention, _twice(0.5), "the weight 'w' is in the model twice with equal numbers"),
    "two entries of one key": (attention, _keys, "the metadata hold the key 'made by' more than once"),
    "an input as an output": (with_past, _passed_on, "the output 'q' is an input, and declared with another type"),
    "size below 0": (with_past, _open, "'q' and 7 more declared with a size below 0"),
    "incomplete devices": (attention, _devices, "device configurations of Transpose 'transpose' and 1 more"),
    "devices before they were": (attention, _early_devices, "device configurations of the model and 1 more"),
    "wrong value": (packed, lambda m: _declare(m, "a", "B", "S", 99), "declared shape of 'a' is not what"),
    "wrong rank of a value": (packed, lambda m: _declare(m, "a", "B", 16), "declared shape of 'a' is not what"),
    "wrong output": (packed, lambda m: _size(m.graph.output[0], 2, 99), "declared shape of 'y' is not what"),
    "wrong present": (with_past, lambda m: _size(m.graph.output[1], 3, 64), "declared shape of 'rk' is not what"),
    "rank of present": (
        with_past,
        lambda m: m.graph.output[2].type.tensor_type.shape.dim.pop(),
        "declared shape of 'rv' is not what",
    ),
}

TAKEN: dict[str, Edit] = {
    "value without a type": lambda m: m.graph.value_info.add(name="probs"),
    "output without a type": lambda m: m.graph.output[0].ClearField("type"),
    "initializer that is no input": lambda m: setattr(m, "ir_version", 3),
    "opsets before they were": lambda m: setattr(m, "ir_version", 2),
    "truth value": lambda m: _branch(m),
    "deprecated operator": _groups,
}


@pytest.mark.parametrize("case", MENDED)
def test_mended(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime loads the original; the result is fused, valid, and computes the same."""
    make, edit, told = MENDED[case]
    model = make()
    edit(model)
    path = saved(model, tmp_path / "model.onnx")
    ort.InferenceSession(path)
    capfd.readouterr()
    verify = [] if case == "size below 0" else ["--verify"]
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), *verify]) == 0
    text, errors = capfd.readouterr()
    assert told in text
    assert not errors
    assert "1 fused" in text
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), full_check=True)


@pytest.mark.parametrize("case", TAKEN)
def test_taken(case: str, tmp_path: Path) -> None:
    model = attention()
    TAKEN[case](model)
    path = saved(model, tmp_path / "model.onnx")
    ort.InferenceSession(path)
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), "--verify", "--quiet"]) == 0
    assert fa_compiler.optimize(path).report.count("fused") == 1


def test_nobody_else_speaks_to_the_user(tmp_path: Path) -> None:
    """onnx-ir warns of what it carries through, such as a text that is not UTF-8."""
    model = attention()
    model.graph.node.append(helper.make_node("Own", ["query"], ["own"], domain="own", text=b"\xff"))
    model.opset_import.append(helper.make_opsetid("own", 1))
    path = saved(model, tmp_path / "model.onnx")
    command = [sys.executable, "-m", "fa_compiler", "optimize", str(path), "-o", str(tmp_path / "out.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said(done.stderr)) == (0, "")


@pytest.mark.parametrize("size", [2, 40_000])
def test_equal_weights(size: int, tmp_path: Path) -> None:
    """Also those that are not read with the graph. What is behind the one that is left out keeps its bytes."""
    model = attention()
    for name, value in (("w", 3.0), ("v", 2.0), ("w", 3.0), ("u", 4.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(size, value, np.float32), name))
    model.graph.node.append(helper.make_node("Concat", ["w", "v", "u"], ["all"], "all", axis=0))
    model.graph.output.append(_info("all", 3 * size))
    path, out = saved(model, tmp_path / "model.onnx"), tmp_path / "out.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--verify", "--quiet"]) == 0
    found = {tensor.name: onnx.numpy_helper.to_array(tensor)[0] for tensor in onnx.load(out).graph.initializer}
    assert {name: float(found[name]) for name in "wvu"} == {"w": 3.0, "v": 2.0, "u": 4.0}
    other = onnx.numpy_helper.from_array(np.append(np.full(size - 1, 3.0, np.float32), np.float32(5.0)), "w")
    model.graph.initializer.append(other)
    with pytest.raises(InputError, match="2 weights have the name 'w', and their numbers differ"):
        fa_compiler.inspect(saved(model, path))


def test_the_last_entry_of_a_key_counts() -> None:
    model = attention()
    _keys(model)
    path = model.SerializeToString()
    told = ort.InferenceSession(path).get_modelmeta().custom_metadata_map
    result = fa_compiler.optimize(model).model
    assert {prop.key: prop.value for prop in result.metadata_props}["made by"] == told["made by"] == "second"


def test_sorted_everywhere() -> None:
    """ONNX Runtime sorts the main graph only; a subgraph and a function are sorted all the same."""
    model = attention()
    _backwards(_branch(model).node)
    result = fa_compiler.optimize(model)
    assert result.report.count("fused") == 1
    assert "nodes of graph 'body' stood before others" in result.report.notes[0]
    model = attention()
    nodes = list(model.graph.node)
    _backwards(nodes)
    names = ["query", "key", "value", "scale"]
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Attend", names, ["out"], nodes, imports))
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Attend", names, ["out"], "call", domain="own"))
    model.opset_import.add(domain="own", version=1)
    result = fa_compiler.optimize(model)
    assert result.report.count("fused") == 1
    assert "nodes of function 'Attend' stood before others" in result.report.notes[0]


def test_order_is_kept_where_it_can_be() -> None:
    """A node moves no further than behind what it needs."""
    model = attention()
    nodes = model.graph.node
    nodes.insert(0, nodes.pop(2))
    nodes.append(helper.make_node("Relu", ["query"], ["more"], "more"))
    mended, notes = repaired(model)
    assert [node.name for node in mended.graph.node] == [
        *("transpose", "scores", "scale_scores", "attn/Softmax", "context", "more"),
    ]
    assert len(notes) == 1
    assert nodes[0].name == "scale_scores"  # what was given is as it was


def test_the_last_opset_counts() -> None:
    """Of "" and "ai.onnx" ONNX Runtime takes the version that comes last: before opset 13 a Softmax runs over more."""
    for opsets, axes in ((("", 17), ("ai.onnx", 11)), 2), ((("ai.onnx", 11), ("", 17)), 1):
        x = _info("x", 2, 3, 4)
        graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=1)], "g", [x], [_info("y", 2, 3, 4)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*opset) for opset in opsets], ir_version=8)
        values = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
        for each in (model, fa_compiler.optimize(model).model):
            (found,) = ort.InferenceSession(each.SerializeToString()).run(None, {"x": values})
            summed = found.sum((1, 2) if axes == 2 else 1)
            np.testing.assert_allclose(summed, np.ones_like(summed), rtol=1e-5)
    assert [(opset.domain, opset.version) for opset in fa_compiler.optimize(model).model.opset_import] == [("", 17)]


def test_nothing_fused_is_told_with_the_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = plain()
    model.graph.ClearField("name")
    path = saved(model, tmp_path / "model.onnx")
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx")]) == 0
    assert "nothing was fused: the output is the input with the changes above" in capfd.readouterr().out
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"))


@pytest.mark.parametrize("route", ["air", "onnx"])
@pytest.mark.parametrize("case", ["wrong output", "wrong value"])
def test_atc(case: str, route: str, tmp_path: Path) -> None:
    """A declared shape that cannot be is no reason to say that the sizes do not fit."""
    model = attention()
    if case == "wrong value":
        _declare(model, "probs", "b", 5, "s", "s")
    else:
        _size(model.graph.output[0], 1, 5)
    path = saved(model, tmp_path / "model.onnx")
    shapes = ";".join(f"{name}:2,4,8,16" for name in ("query", "key", "value"))
    command = ["atc", str(path), "-o", str(tmp_path / "out"), "--soc-version", "Ascend910B2", "--quiet"]
    assert main([*command, "--route", route, "--input-shape", shapes]) == 0


@pytest.mark.parametrize("case", ["cycle", "two producers", "two initializers"])
def test_refused(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = attention()
    if case == "cycle":
        model.graph.node[1].input[0] = "probs"
    elif case == "two producers":
        model.graph.node.insert(0, helper.make_node("Relu", ["probs"], ["scaled"], "twice"))
    else:
        _twice(1.5)(model)
    assert main(["inspect", str(saved(model, tmp_path / "model.onnx"))]) == 2
    told = {
        "cycle": "the nodes form a cycle: MatMul 'scores' -> Mul 'scale_scores' -> ",
        "two producers": "'scaled' is made by Relu 'twice' and by Mul 'scale_scores'",
        "two initializers": "2 weights have the name 'w', and their numbers differ",
    }
    assert told[case] in capfd.readouterr().err


FLEX = [case for case in _NodeTestCases if "flexattention" in case.name and "expanded" not in case.name]


@pytest.mark.parametrize("case", FLEX, ids=lambda case: case.name)
def test_flex_attention_runs(case: TestCase, caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime has no kernel of FlexAttention: what is not fused is written out as its definition."""
    with caplog.at_level(logging.WARNING):
        result = fa_compiler.optimize(case.model)
    assert not caplog.records
    declined = result.report.count("declined")
    assert result.report.count("fused") + declined == 1
    assert ("Y: FlexAttention is written out as its definition" in " ".join(result.report.notes)) == bool(declined)
    inputs, outputs = case.data_sets[0]
    options = ort.SessionOptions()
    register_custom_ops(options)
    feeds = {info.name: array for info, array in zip(case.model.graph.input, inputs, strict=True)}
    (found,) = ort.InferenceSession(result.model.SerializeToString(), options).run(None, feeds)
    rtol = 2e-3 if outputs[0].dtype == np.float16 else 1e-5
    np.testing.assert_allclose(found, outputs[0], rtol=rtol, atol=rtol)


def causal_flex(**constants: list[int]) -> onnx.ModelProto:
    """ONNX's FlexAttention with a causal mask, with other constants in the graph that changes the scores."""
    model = onnx.ModelProto()
    model.CopyFrom(next(case.model for case in FLEX if case.name.endswith("causal_mask")))
    body = next(attr.g for attr in model.graph.node[0].attribute if attr.name == "score_mod")
    for name, numbers in constants.items():
        tensor = next(tensor for tensor in body.initializer if tensor.name == name)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(numbers), name))
    return model


def test_flex_attention_of_an_opset_before_its_definition() -> None:
    """What it is made of is not there, so that it stays what it is."""
    model = onnx.ModelProto()
    model.CopyFrom(next(case.model for case in FLEX if case.name.endswith("gqa")))
    del model.opset_import[:]
    model.opset_import.add(domain="", version=1)
    model.graph.node[0].input[:] = ["V", "Q", "K"]  # of too many heads to be fused
    result = fa_compiler.optimize(model)
    assert [block.status for block in result.report.blocks] == ["declined"]
    assert [node.op_type for node in result.model.graph.node] == ["FlexAttention"]


def test_flex_attention_whose_definition_does_not_fit_its_inputs() -> None:
    """Its mask is for seven rows and not for two: the model runs nowhere, and stays what it is."""
    result = fa_compiler.optimize(causal_flex(q_shape=[1, 1, 7, -1]))
    assert [block.status for block in result.report.blocks] == ["declined"]
    assert [node.op_type for node in result.model.graph.node] == ["FlexAttention"]


def test_flex_attention_with_a_size_below_0_in_its_definition() -> None:
    """The ONNX checker does not look into the graph that changes the scores; the node that is wrong stands there."""
    with pytest.raises(InputError, match="model: a FlexAttention of it is not valid: .*Invalid dimension value: -108"):
        fa_compiler.optimize(causal_flex(k_shape=[1, 1, 1, -108]))
