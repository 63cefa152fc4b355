"""The parts of a Concat and of a Split, beside what NumPy and ONNX Runtime make of them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.parts import (
    EqualPart,
    concat_of,
    concat_on_arrays,
    cut_from,
    equal_part,
    split_of,
    split_on_arrays,
    start_along,
)
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

SIZES = (2, 0, 3)


def built(op: str, axis: int, inputs: dict[str, list[int | str]], outputs: list[str], opset: int = 18) -> ir.Model:
    """A model of one node."""
    node = helper.make_node(op, list(inputs), outputs, axis=axis)
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "g", given, made)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


def known(model: ir.Model) -> tuple[ir.Node, ShapeInfo]:
    """The node, and what is known of its values."""
    return model.graph.node(0), analyse(model)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_parts_of_a_concat(axis: int) -> None:
    shapes = {f"x{number}": [4, size, 5] if axis == 1 else [4, 5, 6] for number, size in enumerate(SIZES)}
    if axis != 1:
        for number, size in enumerate(SIZES):
            shapes[f"x{number}"][axis] = size
    model = built("Concat", axis, shapes, ["y"])
    node, info = known(model)
    joined = concat_of(node, info)
    assert joined is not None and split_of(node, info) is None
    assert (joined.axis, joined.is_last, joined.whole) == (axis % 3, axis == -1, node.outputs[0])
    assert [joined.size(part, info) for part in joined.parts] == list(map(Dim, SIZES))
    assert [joined.start(part, info) for part in joined.parts] == [Dim(0), Dim(2), Dim(2)]
    assert [part.name for part in joined.with_elements(info)] == ["x0", "x2"]
    arrays = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    np.testing.assert_array_equal(concat_on_arrays(node)(*arrays.values()), session.run(None, arrays)[0])


@pytest.mark.parametrize(("opset", "length", "count"), [(13, 6, 3), (18, 7, 4), (18, 4, 1)])
@pytest.mark.parametrize("axis", [0, -1])
def test_the_parts_of_a_split(axis: int, opset: int, length: int, count: int) -> None:
    shape: list[int | str] = [3, 2]
    shape[axis] = length
    model = built("Split", axis, {"x": shape}, [f"y{number}" for number in range(count)], opset)
    node, info = known(model)
    if opset >= 18:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", count)
    split = split_of(node, info)
    assert split is not None and concat_of(node, info) is None and split.axis == axis % 2
    array = np.random.default_rng(0).random(shape, np.float32)
    moves = split_on_arrays(node, array.shape, lambda index: None)
    assert moves is not None
    expected = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": array})
    for part, move, right in zip(split.parts, moves, expected, strict=True):
        np.testing.assert_array_equal(move(array), right)
        begin = split.start(part, info)
        assert begin is not None and start_along(part, split.axis, info) == begin.const
        assert split.size(part, info) == right.shape[axis]
        assert start_along(part, 1 - split.axis, info) is None
        assert cut_from(part, info) == (None if count == 1 else (split.whole, split.axis, begin.const))


def test_what_is_unknown() -> None:
    node, info = known(built("Concat", 1, {"x": ["B", "S"], "z": ["B", "T"]}, ["y"]))
    joined = concat_of(node, info)
    assert joined is not None and len(joined.with_elements(info)) == 2
    assert joined.start(joined.parts[1], info) == info.shape(joined.parts[0])[1]  # type: ignore[index]
    assert concat_of(*known(built("Concat", 2, {"x": [2, 3], "z": [2, 3]}, ["y"]))) is None  # no such axis
    assert split_of(*known(built("Split", 2, {"x": [2, 3]}, ["y", "z"]))) is None
    assert concat_of(None, info) is None and split_of(None, info) is None


def test_parts_that_do_not_fit() -> None:
    node = ir.node("Split", [None, None], {"axis": 0}, num_outputs=4)
    assert split_on_arrays(node, (5,), lambda index: None) is None  # 2, 2, 2 and -1
    assert split_on_arrays(node, (5,), lambda index: np.array([1, 1, 1, 1])) is None
    moves = split_on_arrays(node, (5,), lambda index: np.array([1, 0, 1, 3]))
    assert moves is not None and [move(np.arange(5)).tolist() for move in moves] == [[0], [], [1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("op", "place", "expected"),
    [
        ("Split", 1, (1, 3, False)),
        ("Slice", 0, (1, 3, False)),
        ("Gather", 0, (1, 1, True)),
        ("Slice of another length", 0, None),
        ("Slice that begins within a part", 0, None),
        ("Gather of a vector", 0, None),
        ("Identity", 0, None),
    ],
)
def test_equal_parts(op: str, place: int, expected: tuple[int, int, bool] | None) -> None:
    more = {
        "Split": [],
        "Slice": [[4], [6], [1]],
        "Slice of another length": [[2], [6], [1]],
        "Slice that begins within a part": [[1], [3], [1]],
        "Gather": [2],
        "Gather of a vector": [[2]],
    }.get(op, [])
    inputs = [helper.make_tensor(f"c{i}", TensorProto.INT64, np.shape(n), np.ravel(n)) for i, n in enumerate(more)]
    axis = {"axis": 1} if op.startswith(("Split", "Gather")) else {}
    count = 3 if op == "Split" else 1
    outputs = [f"y{number}" for number in range(count)]
    node = helper.make_node(op.split()[0], ["x", *(tensor.name for tensor in inputs)], outputs, **axis)
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 6, 5])]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "g", given, made, inputs)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    value = model.graph.node(0).outputs[place]
    wanted = None if expected is None else EqualPart(model.graph.inputs[0], *expected)
    assert equal_part(value, analyse(model)) == wanted
