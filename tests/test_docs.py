"""docs/ascend.md: its commands are commands, and it tells of every route."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fa_compiler.atc.routes import ROUTES
from fa_compiler.atc.shapes import parse_gears, parse_shapes
from fa_compiler.cli import parser
from fa_compiler.op_registry.products import PRODUCTS
from fa_compiler.op_registry.soc import soc_version
from fa_compiler.passes.options import EMPTY_BIAS, HALF_ATTENTION

TEXT = (Path(__file__).parent.parent / "docs" / "ascend.md").read_text()
COMMANDS = re.findall(r"^    fa-compiler (.+)$", TEXT.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str) -> None:
    args = parser().parse_args(shlex.split(line, comments=True))
    if args.command == "atc":
        assert soc_version(args.soc_version)
        assert parse_shapes(args.input_shape)
        assert args.dynamic_dims is None or parse_gears(args.dynamic_dims)


def test_it_tells_of_everything() -> None:
    assert {"atc", "registry", "air"} <= {line.split()[0] for line in COMMANDS}
    for route in ROUTES:
        assert f"`--route {route}`" in TEXT
        assert f"**{route}.**" in TEXT
    for word in (*(product.name for product in PRODUCTS), EMPTY_BIAS, HALF_ATTENTION):
        assert word in TEXT, word
