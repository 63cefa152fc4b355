"""What is read off a single node."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes.ir.nodes import axes_of


@pytest.mark.parametrize(
    ("axes", "read"),
    [(np.array([-1, 2]), [-1, 2]), (np.array([np.nan]), None), (np.array([1.0]), None), (np.array([True]), None)],
)
def test_axes_of_a_reduction_are_integers(axes: np.ndarray, read: list[int] | None) -> None:
    """A damaged model may hold any type; ONNX Runtime loads no other than int64."""
    given = ir.Value(name="axes", const_value=ir.tensor(axes))
    assert axes_of(ir.node("ReduceMax", [ir.Value(name="x"), given])) == read
