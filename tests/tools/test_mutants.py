"""What the measure of the tests stands on: blocks, mutants, and rows in which any two values meet."""

from __future__ import annotations

import ast
from itertools import combinations, product

import numpy as np
import pytest

from tests.pairs import pairwise
from tests.systems import LIMITS
from tools.mutants.blocks import all_blocks, blocks, sources
from tools.mutants.mutations import Mutant, drawn, mutants, mutated
from tools.mutants.record import Record
from tools.mutants.trials import living, ordered, place

pytestmark = LIMITS

FILE = "passes/masks/score_ops.py"


def test_blocks_start_behind_branches() -> None:
    text = """
def outer(x):
    "Words."
    y = x
    if x:
        y = 1
    elif y:
        return 2
    z = y
    class Inner:
        size = 3
        def method(self):
            return 4
    return z
"""
    found = [(body[position].lineno) for body, positions in blocks(ast.parse(text).body) for position in positions]
    assert sorted(found) == [4, 6, 7, 8, 9, 13, 14]


def test_each_mutant_changes_one_statement() -> None:
    found = mutants(FILE)
    source = ast.unparse(ast.parse(sources()[FILE])).splitlines()
    assert {"negate", "return", "swap"} <= {mutant.kind for mutant in found}
    for mutant in found[::31]:
        tree, text = mutated(mutant)
        changed = set(ast.unparse(tree).splitlines()) - set(source)
        assert text == "pass" or any(text in line for line in changed), mutant


def test_a_draw_is_the_same_each_time_and_takes_one_of_a_block() -> None:
    covered = set(all_blocks().values())
    sample = drawn(1, covered, 20, only=FILE)
    assert sample == drawn(1, covered, 20, only=FILE)
    assert len({mutant.block for mutant in sample}) == len(sample)


def test_a_mutant_takes_the_place_of_its_function() -> None:
    """In a process of its own it would stay there; here the function gets its code back."""
    from fa_compiler.op_registry import soc

    before = soc.soc_version.__code__
    file = "op_registry/soc.py"
    mutant: Mutant = next(each for each in mutants(file) if each.function == "soc_version" and each.kind == "return")
    try:
        assert place(mutant, living())
        assert soc.soc_version("Ascend910B2") is None
    finally:
        soc.soc_version.__code__ = before
    assert soc.soc_version("Ascend910B2") is not None


def test_the_quickest_test_of_each_function_comes_first() -> None:
    tests = ["a.py::f[1]", "a.py::f[2]", "a.py::g", "a.py::h"]
    record = Record(tests, np.array([0.1, 0.2, 0.5, 9.0]), np.zeros((4, 1), np.uint8))
    assert ordered(record, [0, 1, 2, 3], 1.0) == [0, 2, 1]
    assert ordered(record, [0, 1, 2, 3], 1.0, first="a.py::f[2]") == [1, 0, 2]
    assert ordered(record, [3], 1.0) == [3]


@pytest.mark.parametrize("sizes", [(2, 3), (4, 3, 3, 7), (3, 4, 9, 3), (1, 2, 1)])
def test_any_two_values_meet(sizes: tuple[int, ...]) -> None:
    rows = pairwise(*map(range, sizes))
    assert len(rows) <= 1.5 * np.prod(sorted(sizes)[-2:])
    for first, second in combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(product(range(sizes[first]), range(sizes[second])))
