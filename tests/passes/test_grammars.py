"""The numbered cases of a file's grammar and the places in the code that cite them belong together."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.systems import SOURCES

pytestmark = SOURCES

ROOT = Path(__file__).parents[2] / "passes"
CASE = re.compile(r"^ {2,8}(\d{1,2})[ |]+\S", re.MULTILINE)
"""A line of a grammar: the number of the case, then the case."""
NUMBERS = re.compile(r"(?<![\w.*/^-])(\d{1,2})(?: to (\d{1,2}))?(?![\w.]*\d)")
CITED = re.compile(r"^# (\d{1,2}(?:(?: to |, | and )\d{1,2})*)(?=$|[ :;.,(])")
"""A comment that begins with the numbers of cases."""
ELSEWHERE = re.compile(r"\b(\w+\.py), (\d{1,2}(?:(?: to |, | and )\d{1,2})*)")
"""A case of another file's grammar."""


def expanded(text: str) -> set[int]:
    """The numbers in a text, those of ranges included."""
    pairs = [(int(first), int(last or first)) for first, last in NUMBERS.findall(text)]
    return {number for first, last in pairs for number in range(first, last + 1)}


def grammar(tree: ast.Module) -> set[int]:
    """The numbers of the cases that a file's docstring lists; empty where it lists none from 1 on."""
    numbers = {int(number) for number in CASE.findall(ast.get_docstring(tree, clean=False) or "")}
    return numbers if numbers == set(range(1, len(numbers) + 1)) and len(numbers) > 1 else set()


def notes(text: str, tree: ast.Module) -> list[str]:
    """The comments of a file, and the strings that are no values: docstrings, and texts below constants."""
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)][1:]
    return [
        *comments,
        *(node.value for node in expressions if isinstance(node, ast.Constant) and isinstance(node.value, str)),
    ]


TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
NOTES = {path: notes(TEXTS[path], TREES[path]) for path in TEXTS}
GRAMMARS = {path: cases for path, tree in TREES.items() if (cases := grammar(tree))}


def cited_elsewhere(name: str) -> set[int]:
    """The cases of a file that other files cite."""
    found = (match for texts in NOTES.values() for text in texts for match in ELSEWHERE.findall(text))
    return {number for file, numbers in found if file == name for number in expanded(numbers)}


@pytest.mark.parametrize("path", GRAMMARS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_case_is_cited(path: Path) -> None:
    cited = {number for text in NOTES[path] for number in expanded(text)} | cited_elsewhere(path.name)
    assert not GRAMMARS[path] - cited, "these cases stand in the grammar, and no branch cites them"


@pytest.mark.parametrize("path", GRAMMARS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_cited_case_is_in_the_grammar(path: Path) -> None:
    cited = {number for text in NOTES[path] for match in CITED.findall(text) for number in expanded(match)}
    assert not cited - GRAMMARS[path], "these numbers are cited, and the grammar has no such case"


def test_the_grammars_are_found() -> None:
    """More than twenty files have one: a change of the form of grammars changes CASE, too."""
    assert len(GRAMMARS) > 20
