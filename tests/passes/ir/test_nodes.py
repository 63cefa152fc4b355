"""What is read off a single node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes.ir.nodes import (
    ABSENT,
    all_known,
    axes_of,
    constant,
    elsewhere,
    first,
    inputs_of,
    is_op,
    number_of,
    operand_at,
    operand_orders,
    operands,
    others_of,
    producer,
    sole,
)
from fa_compiler.passes.values.shapes import analyse


@pytest.mark.parametrize(
    ("axes", "read"),
    [(np.array([-1, 2]), [-1, 2]), (np.array([np.nan]), None), (np.array([1.0]), None), (np.array([True]), None)],
)
def test_axes_of_a_reduction_are_integers(axes: np.ndarray, read: list[int] | None) -> None:
    """A damaged model may hold any type; ONNX Runtime loads no other than int64."""
    given = ir.Value(name="axes", const_value=ir.tensor(axes))
    assert axes_of(ir.node("ReduceMax", [ir.Value(name="x"), given])) == read


def test_operands_of_a_node() -> None:
    """An absent operand, and those of no node, need no test of their own."""
    left, right = ir.Value(name="left"), ir.Value(name="right")
    add, clip = ir.node("Add", [left, right]), ir.node("Clip", [left, None, right])
    assert operands(add) == (left, right)
    assert operands(clip) == (left, ABSENT, right)
    assert operands(None) == ()
    assert [operand_at(clip, 2), operand_at(clip, 1), operand_at(clip, 3), operand_at(None, 0)] == [right] + [
        ABSENT
    ] * 3
    assert inputs_of(clip) == inputs_of(clip, "Add", "Clip") == [left, right]
    assert inputs_of(clip, "Add") == inputs_of(None) == []
    assert operand_orders(add, "Add") == ((left, right), (right, left))
    assert operand_orders(add, "Mul") == operand_orders(None, "Mul") == ()
    assert others_of(add, left) == [right]
    assert others_of(clip, ir.Value(name="other")) == [left, right]


def test_nothing_is_known_of_an_absent_operand() -> None:
    info = analyse(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10))
    assert (
        producer(ABSENT) is constant(ABSENT) is info.shape(ABSENT) is info.dtype(ABSENT) is info.scalar(ABSENT) is None
    )
    assert not is_op(producer(ABSENT), "Add")
    assert not ABSENT.uses(), "no node reads what stands for nothing"


def test_the_first_and_the_only_one() -> None:
    assert first([None, 0, 1]) == 0
    assert first([None]) is None
    assert sole([0]) == 0
    assert sole([0, 1]) is sole([]) is None
    assert sole(number for number in (1, 2, 3) if number > 2) == 3


@pytest.mark.parametrize(
    ("attributes", "number"),
    [({"value_int": 3}, 3), ({"value_ints": [3]}, 3), ({"value_ints": [3, 4]}, None), ({"value_ints": []}, None)],
)
def test_the_one_number_of_a_constant(attributes: dict[str, int | list[int]], number: int | None) -> None:
    assert number_of(ir.node("Constant", [], attributes).outputs[0]) == number


def test_what_is_known_and_what_stands_elsewhere() -> None:
    assert all_known([1, 2]) == [1, 2] and all_known([]) == [] and all_known([1, None]) is None
    assert elsewhere("abcd", {0, 2, None}) == ["b", "d"]
