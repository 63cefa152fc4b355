"""Maps and opaque types, which onnx-ir cannot hold, beside attention: the result has them as the original had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, TypeProto, helper

import fa_compiler
from fa_compiler.command_line.main import main

from .builders import attention, saved


def _map() -> TypeProto:
    """A map from strings to float32 numbers."""
    kind = TypeProto()
    kind.map_type.key_type = TensorProto.STRING
    kind.map_type.value_type.tensor_type.elem_type = TensorProto.FLOAT
    kind.map_type.value_type.tensor_type.shape.SetInParent()
    return kind


def _with_maps() -> onnx.ModelProto:
    """Attention, and beside it a map that becomes a vector, and a vector that becomes a sequence of maps."""
    model = attention(batch=2, length=8)
    vector = helper.make_node("DictVectorizer", ["m"], ["d"], domain="ai.onnx.ml", string_vocabulary=["a", "b"])
    maps = helper.make_node("ZipMap", ["d"], ["z"], domain="ai.onnx.ml", classlabels_strings=["a", "b"])
    model.graph.node.extend([vector, maps])
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    model.graph.input.append(onnx.ValueInfoProto(name="m", type=_map()))
    several = TypeProto()
    several.sequence_type.elem_type.CopyFrom(_map())
    model.graph.output.append(onnx.ValueInfoProto(name="z", type=several))
    return model


def _run(model: onnx.ModelProto) -> list[Any]:
    options = ort.SessionOptions()
    fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"m": {"b": 3.0}}
    random = np.random.default_rng(5)
    for info in session.get_inputs():
        if info.name != "m":
            feeds[info.name] = random.standard_normal(info.shape).astype(np.float32)
    return list(session.run(None, feeds))


def test_maps_beside_attention() -> None:
    model = _with_maps()
    result = fa_compiler.optimize(model)
    assert [block.status for block in result.report.blocks] == ["fused"]
    assert result.model.graph.input[-1] == model.graph.input[-1]
    assert result.model.graph.output[-1] == model.graph.output[-1]
    (out, maps), (expected, expected_maps) = _run(result.model), _run(model)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)  # float32 sums in another order
    assert maps == expected_maps == [{"a": 0.0, "b": 3.0}] * len(maps)


@pytest.mark.parametrize("nested", [False, True])
def test_opaque_types(nested: bool) -> None:
    """No runtime at hand takes them, so that the types alone can be compared."""
    model = attention()
    info = model.graph.input.add(name="o")
    kind = info.type.optional_type.elem_type if nested else info.type
    kind.opaque_type.name = "engine"
    result = fa_compiler.optimize(model)
    assert result.report.count("fused") == 1
    assert result.model.graph.input[-1] == info


@pytest.mark.parametrize("route", ["air", "onnx"])
def test_no_maps_for_atc(route: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(_with_maps(), tmp_path / "maps.onnx")
    line = ["atc", str(path), "-o", str(tmp_path / "out"), "--soc-version", "Ascend910B2", "--route", route]
    assert main(line) == 2
    assert "the input 'm' has the type 'map', and ATC takes only tensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
