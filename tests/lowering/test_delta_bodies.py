"""The bodies of CANN's linear attention give what the float64 reference gives, in ONNX Runtime without the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from fa_compiler import reference
from fa_compiler.lowering.onnx_file.delta_bodies import STATES, delta_bodies
from fa_compiler.op_registry import DOMAIN, full_attrs, get, place_inputs
from tests.corrupted import BASES

EPSILON = 2.0**-8
"""Results are rounded to bfloat16 once, here and there."""


def run_body(op_type: str, inputs: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What ONNX Runtime computes. Its results are cast to float32, which NumPy has."""
    spec = get(op_type)
    placed = [name or "" for name in place_inputs(spec, {name: name for name in inputs})]
    made = [f"new_{name}" for name in spec.output_names]
    node = helper.make_node(op_type, placed, made, domain=DOMAIN, **full_attrs(spec, attrs))
    casts = [helper.make_node("Cast", [name], [f"wide_{name}"], to=TensorProto.FLOAT) for name in made]
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    sizes = (inputs["value"].shape, inputs[STATES[op_type]].shape)
    results = [
        helper.make_tensor_value_info(f"wide_{name}", TensorProto.FLOAT, shape)
        for name, shape in zip(made, sizes, strict=True)
    ]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    functions = delta_bodies([node], 17)
    graph = helper.make_graph([node, *casts], "body", given, results)
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=8)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString())
    feeds = {
        name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array,
            helper.np_dtype_to_tensor_dtype(array.dtype),
        )
        for name, array in inputs.items()
    }
    found = session.run_with_ort_values([f"wide_{name}" for name in made], feeds)
    return {name: value.numpy() for name, value in zip(spec.output_names, found, strict=True)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("op_type", STATES)
def test_a_body_computes_what_the_reference_does(op_type: str, seed: int) -> None:
    inputs, attrs = BASES[op_type][0](np.random.default_rng(seed))
    found = run_body(op_type, inputs, attrs)
    for name, wanted in reference.run(op_type, inputs, attrs, dtype="float64").items():
        assert found[name].shape == wanted.shape
        assert np.abs(found[name] - wanted).max() <= EPSILON * np.abs(wanted).max(), name


def test_nodes_with_other_inputs_have_no_body() -> None:
    names = list(get("ChunkGatedDeltaRule").input_names)
    some = helper.make_node("ChunkGatedDeltaRule", names, ["o", "s"], domain=DOMAIN)
    others = helper.make_node("ChunkGatedDeltaRule", names[:-1], ["p", "r"], domain=DOMAIN)
    assert len(delta_bodies([some, some], 17)) == 1
    assert delta_bodies([some, others], 17) == []
    assert delta_bodies([some], 14) == []
