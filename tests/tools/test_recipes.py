"""The recipes for other packages: make compat runs every one that the page has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.systems import TOOLS
from tools.compat import measured
from tools.compat.check_packages import PAGE, RECIPES, Workplace, differ, section


def test_every_recipe_is_run() -> None:
    """The pass of onnx_ir is run by tests/test_docs.py, which needs no other package."""
    titles = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert {*titles} == {recipe.title for recipe in RECIPES} | {"onnx_ir"}


@pytest.mark.parametrize("title", [recipe.title for recipe in RECIPES])
def test_commands_run_the_blocks(title: str) -> None:
    text = section(title)
    files = re.findall(r"```python\n# (\S+\.py)\n", text)
    assert len(files) == text.count("```python")
    run = re.findall(r"^    (?:FA_COMPILER_PROVIDER=1 )?python (\S+)", text, re.MULTILINE)
    assert run
    assert {*run} <= {*files}


@TOOLS
def test_the_last_statement_is_measured(tmp_path: Path) -> None:
    """The commands of a recipe run in its folder, with `python` and `fa-compiler` of the environment."""
    place = Workplace(tmp_path)
    (place.folder / "script.py").write_text("import sys\nfirst = [1]\nvalues = (*first, sys.argv[1], 0.5)\n")
    measure = place.run("python script.py word")
    assert measure is not None
    assert measure.made == {"values": [1, "word", 0.5]}
    assert measure.bytes > 2**20
    assert place.run("fa-compiler library > path.txt") is None
    assert (place.folder / "path.txt").read_text(encoding="utf-8").endswith(".so\n")
    with pytest.raises(SystemExit, match="no such command"):
        place.run("echo no such command; exit 1")


@TOOLS
def test_measured_needs_nothing_but_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("words = ['a', *('b', 'c')]")
    words = [sys.executable, "-S", measured.__file__, str(tmp_path / "result.json"), str(tmp_path / "script.py")]
    subprocess.run(words, check=True)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["made"] == {"words": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("first", "second", "different"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0001]}, False),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.01]}, True),
        ({"a": [1.0, 2.0]}, {"a": [1.0]}, True),
        ({"a": [1.0]}, {"b": [1.0]}, True),
        ({"a": [1.0]}, {"a": [float("nan")]}, True),
        (["a", "b"], ["a", "c"], True),
        ([1, 2], [1, 2], False),
        ([[1], [2, 3]], [[1], [2, 3]], False),
    ],
)
def test_results_that_differ(first: object, second: object, different: bool) -> None:
    assert differ(first, second) is different
