"""The parameters of a Pad, which are attributes, inputs or left out."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes.ops.cuts import filler_of, pads_along
from fa_compiler.passes.values.shapes import ShapeInfo

KNOWN = ShapeInfo({}, None, overridable=False)


def constant(numbers: object, dtype: type = np.int64) -> ir.Value:
    """A constant with these numbers."""
    tensor = ir.tensor(np.array(numbers, dtype))
    return ir.Value(name="c", const_value=tensor)


def pad(widths: object, axes: object = None, value: object = None, **attributes: object) -> ir.Node:
    """A Pad of some opset."""
    numbers = None if value is None else constant(value, np.float32)
    inputs = [ir.Value(name="x"), constant(widths), numbers]
    return ir.node("Pad", [*inputs, None if axes is None else constant(axes)], attributes)


@pytest.mark.parametrize(
    ("node", "widths"),
    [
        (pad([0, 1, 2, 3]), {0: (0, 2), 1: (1, 3)}),
        (ir.node("Pad", [ir.Value(name="x")], {"pads": [0, 1, 2, 3]}), {0: (0, 2), 1: (1, 3)}),
        (pad([1, 2], [-1]), {1: (1, 2)}),
        (pad([1, 2], 0), {0: (1, 2)}),
        (pad([1, -2, 0, 0], [1, 0]), {1: (1, 0), 0: (-2, 0)}),
        (pad([1, 2]), None),  # for one axis of two
        (pad([1, 2], [2]), None),
        (pad([1, 2, 3, 4], [1, -1]), None),
    ],
)
def test_the_widths(node: ir.Node, widths: object) -> None:
    assert pads_along(node, KNOWN, 2) == widths


def test_unknown_pads() -> None:
    node = ir.node("Pad", [ir.Value(name="x"), ir.Value(name="pads")])
    assert pads_along(node, KNOWN, 2) is None


@pytest.mark.parametrize(
    ("node", "number"),
    [
        (pad([1, 1]), 0.0),
        (pad([1, 1], value=-2.0), -2.0),
        (ir.node("Pad", [ir.Value(name="x")], {"pads": [1, 1], "value": 3.0}), 3.0),
        (pad([1, 1], mode="reflect"), None),
        (ir.node("Pad", [ir.Value(name="x"), constant([1, 1]), ir.Value(name="number")]), None),
    ],
)
def test_the_number_around_a_tensor(node: ir.Node, number: float | None) -> None:
    assert filler_of(node, KNOWN) == number
