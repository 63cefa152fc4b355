"""How dense the code is: no function decides more than a reader can keep in mind.

A branch is an `if`, `for`, `while`, `except` or `assert`, each further operand of `and` and `or`, a conditional
expression, and a comprehension with each of its conditions. A function may have 15 of them, the function itself
counted, without those of the functions in it. A statement may have one conditional expression: the second decision has
a line of its own.

A function with more has an idea that is not written down: a table of rows in place of a ladder of `if`, a record whose
properties name the questions, a function that is a noun of the field, an early return for each reason. To cut it in the
middle does not help a reader.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.systems import SOURCES

pytestmark = SOURCES

ROOT = Path(__file__).parent.parent

MOST_BRANCHES = 15

EXCEPTIONS: dict[str, str] = {}
"""Functions that may have more branches, "folder/file.py:function", each with the reason."""

LONG = {
    "fa_compiler": 0,
    "lowering": 0,
    "op_registry": 0,
    "passes": 0,
}
"""How many functions have more branches than they may. The numbers only fall."""

CROWDED = {
    "fa_compiler": 0,
    "lowering": 0,
    "op_registry": 0,
    "passes": 0,
}
"""How many statements have two conditional expressions or more. The numbers only fall."""

BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.Assert, ast.ExceptHandler)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Counts(NamedTuple):
    """The branches of each function, and the conditional expressions of each statement that has one."""

    branches: Counter[Function]
    conditionals: Counter[ast.stmt]


@pytest.mark.parametrize("folder", LONG)
def test_no_function_has_too_many_branches(folder: str) -> None:
    functions = {name: branches for name, branches in long_functions(folder) if name not in EXCEPTIONS}
    listed = "\n".join(f"{branches} {name}" for name, branches in functions.items())
    check("LONG", folder, len(functions), LONG[folder], f"functions have more than {MOST_BRANCHES} branches", listed)


@pytest.mark.parametrize("folder", CROWDED)
def test_a_statement_has_one_conditional_expression(folder: str) -> None:
    places = crowded_statements(folder)
    check("CROWDED", folder, len(places), CROWDED[folder], "statements have several", "\n".join(places))


def test_the_exceptions_are_long_functions() -> None:
    long = {name for folder in LONG for name, _ in long_functions(folder)}
    assert EXCEPTIONS.keys() <= long, "a function that has become shorter, or has gone, is no exception"


def check(table: str, folder: str, count: int, most: int, what: str, listed: str) -> None:
    """A folder has as many as its table says. If it has fewer, the table has to follow."""
    assert count <= most, f"{folder}/: {count} {what}, expected at most {most}:\n{listed}"
    assert count == most, f"{folder}/: only {count} {what}: write this number into {table}, so that it stays"


def test_what_counts_as_a_branch() -> None:
    text = """
def outer(rows):
    assert rows
    for row in rows:
        if row.a and row.b or row.c:
            return [x if x else 0 for x in row if x > 1 if x < 9]
    def inner():
        return 1 if rows else 2
    return inner
"""
    counts = counts_of(ast.parse(text))
    # The function, assert, for, if, and, or, the comprehension with two conditions, and the conditional expression.
    outer = 1 + 1 + 1 + 1 + 2 + 3 + 1
    assert {function.name: branches for function, branches in counts.branches.items()} == {"outer": outer, "inner": 2}
    assert {statement.lineno: count for statement, count in counts.conditionals.items()} == {6: 1, 8: 1}


def long_functions(folder: str) -> list[tuple[str, int]]:
    """The functions of a folder that have too many branches, with their number."""
    return [
        (f"{name}:{function.name}", branches)
        for name, counts in counted(folder).items()
        for function, branches in counts.branches.items()
        if branches > MOST_BRANCHES
    ]


def crowded_statements(folder: str) -> list[str]:
    """The places of the statements that have several conditional expressions."""
    return [
        f"{name}:{statement.lineno}"
        for name, counts in counted(folder).items()
        for statement, count in counts.conditionals.items()
        if count > 1
    ]


@cache
def counted(folder: str) -> dict[str, Counts]:
    """The counts of the Python files of a folder, without those behind its links to other folders."""
    root = ROOT / folder
    own = (path for path in sorted(root.rglob("*.py")) if path.resolve().is_relative_to(root.resolve()))
    return {str(path.relative_to(ROOT)): counts_of(ast.parse(path.read_text(encoding="utf-8"))) for path in own}


def counts_of(tree: ast.Module) -> Counts:
    """The counts of one file. What is in a function belongs to the innermost one; a lambda and a class have none."""
    counts = Counts(Counter(), Counter())
    ahead: list[tuple[ast.AST, Function | None, ast.stmt | None]] = [(tree, None, None)]
    while ahead:
        parent, function, statement = ahead.pop()
        for node in ast.iter_child_nodes(parent):
            own, place = function, statement
            if isinstance(node, Function):
                own = node
                counts.branches[node] = 1
            elif isinstance(node, ast.Lambda | ast.ClassDef):
                own = None
            elif function is not None:
                counts.branches[function] += weight(node)
            if isinstance(node, ast.stmt):
                place = node
            elif isinstance(node, ast.ExceptHandler | ast.match_case):
                place = None
            elif isinstance(node, ast.IfExp) and statement is not None:
                counts.conditionals[statement] += 1
            ahead.append((node, own, place))
    return counts


def weight(node: ast.AST) -> int:
    """How many branches a node is."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))
