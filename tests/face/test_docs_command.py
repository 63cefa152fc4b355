"""The command docs: the pages in a terminal, by name and by heading, and the texts of the package that name them."""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fa_compiler.command_line import docs
from fa_compiler.command_line.main import main, parser
from tests.systems import SOURCES, TERMINALS

ROOT = Path(__file__).parents[2]
FOLDERS = ("fa_compiler", "passes", "lowering", "op_registry")


def test_every_page_is_listed_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert sorted(name for name, _ in docs.contents()) == docs.names()
    for name, content in docs.contents():
        assert re.search(rf"^ *{name} +{re.escape(content)} *$", listed, re.MULTILINE), name


def test_the_index_has_the_rows_of_the_readme() -> None:
    readme = re.findall(
        r"^\| \[docs/([\w.]+)\.md\]\(docs/[\w.]+\.md\) \| (.+) \|$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert set(readme) <= set(docs.contents())


@pytest.mark.parametrize("word", ["install", "docs/install.md", "Install", "install.md"])
def test_a_pipe_gets_the_page_as_it_is(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", word]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_a_part_of_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert main(["docs", "commands#exit-codes"]) == 0
    part = capsys.readouterr().out
    assert part.startswith("## Exit codes\n")
    assert part in page
    assert page[page.index(part) + len(part) :].lstrip().startswith("## ")


def test_every_link_to_a_heading_is_a_part() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        for name, anchor in re.findall(r"\]\((?:(\w+)\.md)?#([\w-]+)\)", path.read_text(encoding="utf-8")):
            assert docs.find(f"{name or path.stem}#{anchor}").startswith("#")


def test_a_comment_in_code_is_no_heading() -> None:
    text = "# A\n```\n# not B\n```\n## `C`, d's e\n"
    assert [*docs._headings(text)] == [(0, 1, "a"), (4, 2, "c-ds-e")]


WRONG = {
    "runtime": "'runtime' is no page: did you mean 'runtimes'?",
    "xyzzy": f"'xyzzy' is no page: known are {', '.join(docs.names())}",
    "commands#exit-code": "'exit-code' is no heading of the page commands: did you mean 'exit-codes'?",
    "../README": f"'../readme' is no page: known are {', '.join(docs.names())}",
}


@pytest.mark.parametrize("word", WRONG)
def test_a_wrong_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", word]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"fa-compiler: error: {WRONG[word]}\n"


@TERMINALS
def test_a_terminal_gets_it_laid_out() -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "70"}
    command = [sys.executable, "-m", "fa_compiler", "docs", "install"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())
    assert "Installing" in text
    assert "# Installing" not in text
    assert "| --- |" not in text
    assert b"\x1b]8;" not in seen  # a link that no terminal can follow


def _helps(of: argparse.ArgumentParser) -> Iterator[str]:
    yield of.format_help()
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _helps(command)


@pytest.mark.parametrize("columns", [60, 80])
def test_a_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the lines of examples, and an option beside its values."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for text in _helps(parser()):
        assert "\nexit codes:\n  0    done\n" in text
        for line in text.splitlines():
            is_whole = re.match(r"  [A-Za-z]", line) or line.lstrip().startswith("[--")
            assert len(line) <= columns or is_whole, line


def _texts() -> Iterator[tuple[Path, str]]:
    """The texts of the package, apart from those that describe the code."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                    yield path, node.value


@SOURCES
def test_no_text_names_a_file_that_an_installation_lacks() -> None:
    for path, text in _texts():
        assert not re.search(r"docs/\w+\.md", text), f"{path}: name the command fa-compiler docs PAGE instead: {text}"
    for path in (ROOT / "lowering" / "ort" / "csrc").rglob("*.*"):
        strings = re.findall(r'"[^"\n]*"', path.read_text(encoding="utf-8"))
        assert not [text for text in strings if "docs/" in text], path
    assert not [text for text in _helps(parser()) if "docs/" in text]


@SOURCES
def test_the_pages_that_texts_name_are_there() -> None:
    named = {word for _, text in _texts() for word in re.findall(r"fa-compiler docs ([a-z_]+(?:#[\w-]+)?)", text)}
    assert {"runtimes", "ascend"} <= named
    for word in named:
        assert docs.find(word)
