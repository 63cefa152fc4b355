"""The models that bench.convolution measures are those that are fused, at each number of tokens."""

from __future__ import annotations

import pytest

import fa_compiler
from bench.convolution import exported, measured


@pytest.mark.parametrize(("tokens", "columns", "nodes"), [(1, 3, 1), (1, 4, 4), (8, 4, 3)])
def test_what_is_measured(tokens: int, columns: int, nodes: int) -> None:
    """A state of 4 columns is cut and joined with its token; that of a prompt is cut and transposed."""
    fused = fa_compiler.optimize(exported(16, tokens, columns)).model
    assert len([node for node in fused.graph.node if node.op_type != "Constant"]) == nodes
    assert set(measured(16, tokens, columns, threads=1, seconds=0)) == {"as exported", "fused"}
