"""The numbered cases of a file's grammar and the places in the code that cite them belong together."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Grammars:
    """The cases of the files that have a grammar, and the notes of all files."""

    cases: Mapping[Path, set[int]]
    notes: Mapping[Path, list[str]]


@functools.cache
def grammars() -> Grammars:
    """Those of passes/. They are read by the first test: reading them takes two seconds."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    return Grammars(
        {path: cases for path, tree in trees.items() if (cases := grammar(tree))},
        {path: notes(texts[path], trees[path]) for path in texts},
    )


def cited_elsewhere(name: str) -> set[int]:
    """The cases of a file that other files cite."""
    found = (match for texts in grammars().notes.values() for text in texts for match in ELSEWHERE.findall(text))
    return {number for file, numbers in found if file == name for number in expanded(numbers)}


def test_every_case_is_cited() -> None:
    missed = {}
    for path, cases in grammars().cases.items():
        cited = {number for text in grammars().notes[path] for number in expanded(text)}
        missed[path] = cases - cited - cited_elsewhere(path.name)
    assert not {path: left for path, left in missed.items() if left}, "grammars have these cases, no branch cites them"


def test_every_cited_case_is_in_the_grammar() -> None:
    unknown = {}
    for path, cases in grammars().cases.items():
        found = (match for text in grammars().notes[path] for match in CITED.findall(text))
        unknown[path] = {number for match in found for number in expanded(match)} - cases
    assert not {path: left for path, left in unknown.items() if left}, "these numbers are cited, no grammar has them"


def test_the_grammars_are_found() -> None:
    """More than twenty files have one: a change of the form of grammars changes CASE, too."""
    assert len(grammars().cases) > 20
