"""The documentation: its commands are commands, and it tells of every option, assumption, exit code and route."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from fa_compiler.atc.run import ROUTES
from fa_compiler.atc.shapes import parse_gears, parse_shapes
from fa_compiler.command_line.main import BAD_INPUT, DIFFERENT, INTERNAL, INTERRUPTED, OK, parser
from fa_compiler.op_registry.products import PRODUCTS
from fa_compiler.op_registry.runtimes import matrix
from fa_compiler.op_registry.soc import soc_version
from fa_compiler.passes.options import ASSUMPTIONS, EMPTY_BIAS, HALF_ATTENTION, Target

ROOT = Path(__file__).parent.parent
ASCEND = (ROOT / "docs" / "ascend.md").read_text()
COMMAND_LINE = (ROOT / "docs" / "commands.md").read_text()
README = (ROOT / "README.md").read_text()
RUNTIMES_PAGE = (ROOT / "docs" / "runtimes.md").read_text()
COMMANDS = re.findall(
    r"^    fa-compiler (.+)$",
    "\n".join((ASCEND, COMMAND_LINE, README, RUNTIMES_PAGE)).replace("\\\n", " "),
    re.MULTILINE,
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str) -> None:
    words = shlex.split(line, comments=True)
    if "..." in words:
        return
    args = parser().parse_args(words)
    if args.command == "atc":
        assert soc_version(args.soc_version)
        assert parse_shapes(args.input_shape)
        assert args.dynamic_dims is None or parse_gears(args.dynamic_dims)


def _options(of: argparse.ArgumentParser) -> Iterator[str]:
    for action in of._actions:
        yield from (option for option in action.option_strings if option not in ("-h", "--help"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


def test_every_option_is_documented() -> None:
    for option in sorted(set(_options(parser()))):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", COMMAND_LINE + ASCEND), option


def test_assumptions_and_exit_codes() -> None:
    for name, sentence in ASSUMPTIONS.items():
        assert f"| `{name}` | {sentence} |" in COMMAND_LINE
    assert re.findall(r"^\| (\d+) \|", COMMAND_LINE, re.MULTILINE) == [
        str(code) for code in (OK, DIFFERENT, BAD_INPUT, INTERNAL, INTERRUPTED)
    ]


def test_ascend_tells_of_everything() -> None:
    assert {"atc", "registry", "air"} <= {line.split()[0] for line in COMMANDS}
    for route in ROUTES:
        assert f"`--route {route}`" in ASCEND
        assert f"**{route}.**" in ASCEND
    for word in (*(product.name for product in PRODUCTS), EMPTY_BIAS, HALF_ATTENTION):
        assert word in ASCEND, word


def test_the_page_of_runtimes_is_the_table() -> None:
    assert RUNTIMES_PAGE.endswith(matrix() + "\n")
    for target in get_args(Target):
        assert f"| `{target}` |" in RUNTIMES_PAGE


def test_every_environment_variable_is_documented() -> None:
    sources = [path for folder in ("fa_compiler", "lowering") for path in (ROOT / folder).rglob("*.*")]
    text = "\n".join(path.read_text() for path in sources if path.suffix in (".py", ".cc"))
    named = set(re.findall(r'"(FA_COMPILER_[A-Z0-9_]+)"', text))
    assert named == set(re.findall(r"^\| `(FA_COMPILER_\w+)` \|", COMMAND_LINE, re.MULTILINE))
