"""Each method of the operators that the passes write stands for the operator that it is named after."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes.emit.operators import AttrValue, Operators
from fa_compiler.passes.values.shapes import ShapeInfo

OF_SEVERAL = ("op", "ints", "again", "cast", "dimension", "reduce")
"""Methods that write no operator, one of several, or two."""
OTHER_NAMES = {"shape_of": "Shape"}
METHODS = sorted(
    name
    for name, method in vars(Operators).items()
    if inspect.isfunction(method) and not name.startswith("_") and name not in OF_SEVERAL
)


class Noted(Operators):
    """Notes what is written."""

    def __init__(self, opset: int = 18) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset})
        self.info = ShapeInfo({}, self.graph, overridable=True)
        self.written: list[tuple[str, int, list[str]]] = []

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], attrs: Mapping[str, AttrValue] | None = None
    ) -> ir.Value:
        self.written.append((op_type, len(inputs), sorted(attrs or {})))
        return ir.Value(name="result")

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        return ir.Value(name=str(list(numbers)))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_writes_the_operator_of_its_name(name: str) -> None:
    noted, method = Noted(), getattr(Operators, name)
    arguments = {"perm": (1, 0), "axis": 1, "parts": [ir.Value(), ir.Value()]}
    if name == "cum_sum":
        del arguments["axis"]
    given = [arguments.get(each, ir.Value(name=each)) for each in list(inspect.signature(method).parameters)[1:]]
    method(noted, *given)
    ((op_type, count, attrs),) = noted.written
    assert op_type.lower() == OTHER_NAMES.get(name, name).replace("_", "").lower()
    schema = onnx.defs.get_schema(op_type)
    assert schema.min_input <= count <= schema.max_input and set(attrs) <= set(schema.attributes)


def test_what_changes_nothing_is_not_written() -> None:
    noted, x = Noted(), ir.Value(name="x")
    assert noted.transpose(x, (0, 1, 2)) is x and noted.concat([x], 1) is x
    assert not noted.written


def test_numbers_become_constants() -> None:
    noted, x = Noted(), ir.Value(name="x")
    noted.slice(x, [1], [5], [0], [2])
    noted.reshape(x, [0, -1])
    noted.gather(x, ir.Value(name="indices"), 0)
    assert noted.written == [("Slice", 5, []), ("Reshape", 2, []), ("Gather", 2, ["axis"])]


def test_a_cast_to_its_own_type_is_not_written() -> None:
    noted, x = Noted(), ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    assert noted.cast(x, ir.DataType.FLOAT) is x
    noted.cast(x, ir.DataType.INT64)
    assert noted.written == [("Cast", 1, ["to"])]


def test_a_dimension_is_picked_from_the_shape() -> None:
    noted = Noted()
    noted.dimension(ir.Value(name="x"), 1)
    assert [op_type for op_type, _, _ in noted.written] == ["Shape", "Gather"]


@pytest.mark.parametrize(
    ("op_type", "opset", "is_input"),
    [("ReduceSum", 12, False), ("ReduceSum", 13, True), ("ReduceMax", 17, False), ("ReduceMax", 18, True)],
)
def test_axes_are_an_input_from_an_opset_on(op_type: str, opset: int, is_input: bool) -> None:
    noted = Noted(opset)
    noted.reduce(op_type, ir.Value(name="x"), [1], keepdims=0)
    assert noted.written == [(op_type, 1 + is_input, ["keepdims"] if is_input else ["axes", "keepdims"])]


def test_a_node_again_keeps_its_attributes() -> None:
    noted, x = Noted(), ir.Value(name="x")
    noted.again(ir.node("Softmax", [ir.Value(name="y")], {"axis": 1}), [x])
    assert noted.written == [("Softmax", 1, ["axis"])]
