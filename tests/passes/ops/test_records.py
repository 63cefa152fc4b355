"""What an operator means is said once, beside its shape: other files ask for it and name no long lists of operators."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fa_compiler.passes.ops import RULES
from fa_compiler.passes.ops.elementwise import POINTWISE
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.reduce import ALONG_AXES, REDUCTIONS
from tests.systems import SOURCES

pytestmark = SOURCES

PASSES = Path(__file__).parents[3] / "passes"
COMMON = (
    "Transpose Reshape Unsqueeze Squeeze Expand Slice Concat Gather Split Flatten Identity Cast Where Add Sub Mul Div "
    "Pow Sqrt Exp Log Tanh Sigmoid MatMul Gemm Einsum Softmax ReduceSum ReduceMax ReduceMean Tile Pad ScatterND "
    "ScatterElements GatherND GatherElements Shape Range Trilu CumSum"
)
MANY = 8
NAMING = {
    "ops/elementwise.py": "the records of the operators that compute element by element",
    "ops/numbers.py": "the numbers that each operator gives",
    "emit/operators.py": "a method that writes each operator",
    "linear/operators.py": "what each operator makes of numbers of a finite field",
    "linear/meetings.py": "which numbers each operator lets a length meet",
    "parallel/move_rules.py": "the nodes that a rank needs for each operator",
    "matching/scores.py": "a grammar",
    "matching/softmax.py": "a grammar",
    "matching/exponentials.py": "a grammar",
    "matching/probability_path.py": "a grammar",
    "matching/other_softmaxes.py": "a grammar",
    "matching/linear_attention.py": "a grammar",
    "backward/region.py": "a grammar",
    "around/rotary.py": "a grammar",
}
"""The files that name many of the common operators, each with what it lists them for."""


def test_files_that_name_many_operators() -> None:
    found = {file.relative_to(PASSES).as_posix() for file in PASSES.rglob("*.py") if names_many(file)}
    new, gone = found - NAMING.keys(), NAMING.keys() - found
    assert not new, f"{new}: what is true of an operator wherever it stands belongs into passes/ops/"
    assert not gone, f"{gone}: these name few operators now, and are no exceptions any more"


def names_many(file: Path) -> bool:
    """Does a file name so many of the common operators?"""
    strings = {node.value for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant)}
    return sum(operator in strings for operator in COMMON.split()) >= MANY


@pytest.mark.parametrize(
    "group", [POINTWISE, REDUCTIONS, ALONG_AXES, MOVES], ids=["pointwise", "reduced", "along", "moved"]
)
def test_operators_of_a_group_have_a_rule_for_their_shape(group: tuple[str, ...]) -> None:
    """A rank computes its part of their results, and shapes are what it asks for."""
    assert not [op_type for op_type in group if ("", op_type) not in RULES]
