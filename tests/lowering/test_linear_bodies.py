"""The bodies of FlashLinearAttention and ShortConvolution give what the float64 reference gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from fa_compiler import reference
from fa_compiler.lowering.onnx_file.linear_bodies import linear_body, linear_key
from fa_compiler.op_registry import DOMAIN, NodeView, TensorInfo, dtypes, get, place_inputs
from tests.corrupted import BASES

TOLERANCE = 2e-5
"""float32 sums of a few dozen numbers of about 1."""


def view_of(op_type: str, inputs: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> NodeView:
    infos = {
        name: TensorInfo(dtypes.from_numpy(array.dtype) or "", (*("BT"[: array.ndim - 1]), array.shape[-1]))
        if array.ndim == 3 and name != "weight"
        else TensorInfo(dtypes.from_numpy(array.dtype) or "", array.shape)
        for name, array in inputs.items()
    }
    return NodeView(op_type, "node", infos, {}, attrs)


def model_of(op_type: str, inputs: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> onnx.ModelProto:
    """A model of one node, with its body."""
    key = linear_key(view_of(op_type, inputs, attrs), 17)
    assert key is not None
    spec = get(op_type)
    placed = [name or "" for name in place_inputs(spec, {name: name for name in inputs})]
    node = helper.make_node(op_type, placed, spec.output_names, domain=DOMAIN, **attrs)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    results = [helper.make_tensor_value_info(name, 0, None) for name in spec.output_names]
    for result in results:
        result.ClearField("type")
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "body", given, results)
    return helper.make_model(graph, opset_imports=imports, functions=[linear_body(key)], ir_version=8)


def run_body(op_type: str, inputs: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What ONNX Runtime without the library computes."""
    session = ort.InferenceSession(model_of(op_type, inputs, attrs).SerializeToString())
    feeds = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, helper.np_dtype_to_tensor_dtype(array.dtype))
        for name, array in inputs.items()
    }
    names = get(op_type).output_names
    return dict(zip(names, session.run_with_ort_values(names, feeds), strict=True))


@pytest.mark.parametrize("op_type", ["FlashLinearAttention", "ShortConvolution"])
@pytest.mark.parametrize("seed", range(24))
def test_the_body_computes_what_the_operator_does(op_type: str, seed: int) -> None:
    inputs, attrs = BASES[op_type][0](np.random.default_rng(seed))
    if "cu_seqlens" in inputs:
        assert linear_key(view_of(op_type, inputs, attrs), 17) is None
        return
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    found, expected = run_body(op_type, inputs, attrs), reference.run(op_type, inputs, attrs)
    for name, value in found.items():
        np.testing.assert_allclose(value.numpy(), expected[name], atol=TOLERANCE, rtol=TOLERANCE)


def test_results_have_the_types_of_the_operator() -> None:
    inputs, attrs = BASES["FlashLinearAttention"][0](np.random.default_rng(3))
    inputs = {name: array.astype(np.float16) for name, array in inputs.items() if name != "past_state"}
    inputs["past_state"] = np.zeros((2, attrs["kv_num_heads"], 4, 6), np.float32)
    found = run_body("FlashLinearAttention", inputs, attrs)
    assert (found["output"].data_type(), found["present_state"].data_type()) == ("tensor(float16)", "tensor(float)")
