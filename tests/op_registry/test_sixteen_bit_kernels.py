"""Which operators the installed onnxruntime lets read numbers of float16 unrounded.

A sum is moved by one operator and then read. Where the reader has no kernel of 16 bits, all three are computed in
float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.op_registry.sixteen_bit_kernels import GIVE_FLOAT32, MOVED_AS_FLOAT32, READ_16_BITS, READ_FLOAT32
from fa_compiler.passes.ops.movers import MOVES

STEP = 2.0**-13
"""Beside 1 it is lost in float16."""
SUM = ([1.0, 0.25], [STEP, 0.0])
SUMS = {
    **dict.fromkeys(("Floor", "Cast", "Less"), ([1.0, 0.25], [-STEP, 0.0])),
    "ArgMax": ([1.0, 1.0], [0.0, STEP]),
    "ReduceMin": ([1.0, 3.0], [STEP, 0.0]),
    "Round": ([0.5, 0.25], [STEP, 0.0]),
}
"""The rows that are added up, where an operator makes the same of SUM when it is rounded."""
OPERANDS: dict[str, list[Any]] = {
    **{kind: [1.5] for kind in ("Add", "Sub", "Sum", "Mul", "Div", "Pow")},
    **{kind: [1.0] for kind in ("Equal", "Less")},
    "Max": [0.0],
    "Min": [4.0],
    "Clip": [0.0, 4.0],
    "MatMul": [[[[1.0], [1.0]]]],
    "Concat": [[[[0.0, 0.0]]]],
}
"""The operands behind the first one, of its type."""
AXES = {"ReduceSum": np.array([2]), "CumSum": np.array(2)}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "Cast": {"to": TensorProto.INT64},
    **{kind: {"axis": 2} for kind in ("Concat", "ArgMax")},
    **{kind: {"axes": [2]} for kind in ("ReduceMax", "ReduceMin", "ReduceMean")},
}
TELL_NOTHING = {"IsNaN", "Shape"}
"""Operators that make the same of a number and of the number rounded."""


def ran(operator: str, dtype: int, rounds: bool = False) -> np.ndarray:
    """What an operator makes, in float32, of a sum of this type that is moved and, if it `rounds`, cast to float16
    and back."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    rows = SUMS.get(operator, SUM)
    others = [np.array(each, kind) for each in OPERANDS.get(operator, [])]
    others += [AXES[operator]] if operator in AXES else []
    constants = {f"c{place}": array for place, array in enumerate(others)}
    source = "wide" if rounds else "moved"
    operands = [source, *constants]
    if operator == "Where":
        constants, operands = {"condition": np.array(True)}, ["condition", source, source]
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Unsqueeze", ["sum", "front"], ["moved"])]
    if rounds:
        nodes.append(helper.make_node("Cast", ["moved"], ["narrow"], to=TensorProto.FLOAT16))
        nodes.append(helper.make_node("Cast", ["narrow"], ["wide"], to=TensorProto.FLOAT))
    nodes.append(helper.make_node(operator, operands, ["read"], **ATTRIBUTES.get(operator, {})))
    nodes.append(helper.make_node("Cast", ["read"], ["y"], to=TensorProto.FLOAT))
    tensors = [numpy_helper.from_array(array, name) for name, array in {**constants, "front": np.array([0])}.items()]
    given = [helper.make_tensor_value_info(name, dtype, [1, 2]) for name in "ab"]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, made, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {name: np.array([row], kind) for name, row in zip("ab", rows, strict=True)}
    return np.asarray(session.run(None, feeds)[0])


RELEASE = ".".join(ort.__version__.split(".")[:2])


@pytest.mark.skipif(RELEASE != "1.32", reason="the table is of onnxruntime 1.32")
@pytest.mark.parametrize("operator", sorted({*READ_FLOAT32, *READ_16_BITS, *GIVE_FLOAT32} - TELL_NOTHING))
def test_what_an_operator_reads(operator: str) -> None:
    exact, rounded = (ran(operator, TensorProto.FLOAT, rounds) for rounds in (False, True))
    assert np.abs(exact - rounded).max() > 1e-5
    own = ran(operator, TensorProto.FLOAT16)
    reads_float32 = np.abs(own - exact).max() < np.abs(own - rounded).max()
    assert reads_float32 == (operator in READ_FLOAT32)


MOVED: dict[str, list[np.ndarray]] = {
    **{key: [] for key in ("Identity", "Flatten", "Transpose", "DepthToSpace", "SpaceToDepth")},
    **{key: [np.array([1, 4, 2, 2])] for key in ("Tile", "Expand")},
    **{key: [np.array([0])] for key in ("Unsqueeze", "Squeeze", "Gather")},
    "Reshape": [np.array([1, 16])],
    "Slice": [np.array([0]), np.array([2]), np.array([1])],
    "GatherElements": [np.zeros((1, 4, 2, 2), np.int64)],
    "GatherND": [np.zeros((1, 1), np.int64)],
    "ReverseSequence": [np.array([1, 1])],
}
"""The operands behind the first one, [1, 4, 2, 2]."""
BLOCKS = {key: {"blocksize": 2} for key in ("DepthToSpace", "SpaceToDepth")}


@pytest.mark.skipif(RELEASE != "1.32", reason="the table is of onnxruntime 1.32")
@pytest.mark.parametrize("operator", MOVES)
def test_which_operators_that_move_have_a_kernel_of_16_bits(operator: str, tmp_path: Path) -> None:
    """The others get casts around them when the session is made."""
    tensors = [numpy_helper.from_array(array, f"c{place}") for place, array in enumerate(MOVED[operator])]
    node = helper.make_node(operator, ["x", *(each.name for each in tensors)], ["y"], **BLOCKS.get(operator, {}))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, 4, 2, 2])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)]
    graph = helper.make_graph([node], "g", given, made, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "made.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    made_nodes = [each.op_type for each in onnx.load(tmp_path / "made.onnx").graph.node]
    assert ("Cast" in made_nodes) == (operator in MOVED_AS_FLOAT32), made_nodes
