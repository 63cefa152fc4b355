"""What the measure of the tests stands on: blocks, mutants, and rows in which any two values meet."""

from __future__ import annotations

import ast
from itertools import combinations, product

import numpy as np
import pytest

from tests.pairs import pairwise
from tests.systems import LIMITS
from tools.mutants.__main__ import THOROUGH
from tools.mutants.blocks import ROOT, all_blocks, blocks, sources
from tools.mutants.mutations import Mutant, drawn, mutants, mutated
from tools.mutants.record import Record
from tools.mutants.thin import OTHERS, PROGRAMS, thinned
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


def test_rows_that_run_nothing_of_their_own_are_left_out() -> None:
    """The slowest first. What stays: a quarter of the rows, what is no row, what is quick, what runs a block that few
    others run, and what runs none, as a test of a program does."""
    rows = [f"a.py::f[{place}]" for place in range(2 * OTHERS)]
    many = [f"a.py::g[{place}]" for place in range(9 * OTHERS)]
    others = ["a.py::f", "a.py::own[0]", "a.py::own[1]", "a.py::program[0]", "a.py::program[1]", "a.py::quick[0]"]
    ran = [[0b10000000]] * len(rows) + [[0b00100000]] * len(many)
    ran += [[0b10000000], [0b01000000], [0b01000000], [0], [0], [0b10000000]]
    seconds = [*np.linspace(1, 2, len(rows)), *np.linspace(1, 2, len(many)), 9, 8, 8, 7, 7, 0.01]
    record = Record([*rows, *many, *others], np.array(seconds), np.array(ran, np.uint8))
    stay = -(-len(many) // 4)
    of_rows, of_many = rows[OTHERS - 2 :], many[stay:]
    assert thinned(record) == sorted(of_rows + of_many)
    assert thinned(record, many[-2:]) == sorted(of_rows + many[stay - 2 : -2])


def test_a_row_beside_one_that_starts_a_program_stays() -> None:
    """It is the only one of its function by then."""
    program = PROGRAMS[-1]
    beside, others = f"{program.split('[')[0]}[other]", [f"a.py::f{place}" for place in range(2 * OTHERS)]
    tests = [program, beside, *others]
    record = Record(tests, np.arange(len(tests), 0.0, -1), np.full((len(tests), 1), 0b10000000, np.uint8))
    assert thinned(record) == [program]


def test_the_rows_that_are_left_out_are_there() -> None:
    """A line whose test has another name by now leaves nothing out: `python -m tools.mutants thin` writes the list."""
    lines = THOROUGH.read_text().splitlines()
    assert lines == sorted(set(lines))
    for file, name in {tuple(line.split("[")[0].split("::")) for line in lines}:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


@pytest.mark.parametrize("sizes", [(2, 3), (4, 3, 3, 7), (3, 4, 9, 3), (1, 2, 1)])
def test_any_two_values_meet(sizes: tuple[int, ...]) -> None:
    rows = pairwise(*map(range, sizes))
    assert len(rows) <= 1.5 * np.prod(sorted(sizes)[-2:])
    for first, second in combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(product(range(sizes[first]), range(sizes[second])))
