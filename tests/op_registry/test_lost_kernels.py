"""The table of lost kernels against the installed onnxruntime."""

from __future__ import annotations

import onnxruntime as ort
import pytest

from fa_compiler.op_registry.lost_kernels import lost_kernels, lost_types
from tests.kernel_probe import lost, may_be_lost, operators, table

READ = ".".join(ort.__version__.split(".")[:2])


@pytest.mark.skipif(READ != "1.32", reason="the table is of onnxruntime 1.32")
def test_the_table_is_what_the_installed_runtime_loads() -> None:
    """tests/kernel_probe.py writes it anew. An operator without a body whose kernels take the same types in the newest
    opset as before has lost none."""
    some = [operator for operator in operators() if may_be_lost(operator)]
    rows = {(row.operator, row.first, row.last, row.inputs, row.outputs) for row in lost_kernels()}
    found = table(lost(some)).splitlines()[2:]
    written = [line.split("\t") for line in found]
    assert {
        (operator, int(first), int(last), tuple(given.replace("-", "").split()), tuple(made.split()))
        for operator, first, last, given, made in written
    } == rows


def test_types_are_lost_between_two_opsets() -> None:
    assert lost_types("Relu", 18, 23) == {"int64"}
    assert lost_types("Relu", 17, 23) == lost_types("Relu", 19, 23) == lost_types("Relu", 18, 18) == set()
    assert lost_types("PRelu", 16, 23) == {"double", "int32", "int64", "uint32"}
    assert "float" in lost_types("RandomNormal", 13, 23)
