"""The packages of fa_compiler stand on each other in one order; within one, no file imports another in a circle."""

from __future__ import annotations

import re
from pathlib import Path

import fa_compiler
from tests.layers import Layers
from tests.systems import SOURCES

pytestmark = SOURCES

ROOT = Path(__file__).parent.parent
LAYERS = Layers(
    "fa_compiler",
    ROOT / "fa_compiler",
    (
        *("version", "errors", "shell", "reference", "ops", "protos", "checks", "model_files", "pipeline", "fuse_pass"),
        *("session", "comparison", "decoding", "measuring", "page", "running", "parallel", "atc", "provider"),
        *("everywhere", "command_line", "__main__"),
    ),
    ("op_registry", "passes", "lowering"),
)
"""From the ground up. The folders apart are those that fa_compiler/ stands on; the linter checks their order."""


def test_every_package_has_its_place() -> None:
    assert {LAYERS.layer(file) for file in LAYERS.files} == set(LAYERS.order)


def test_a_layer_knows_those_below_only() -> None:
    assert LAYERS.arrows_upward() == []


def test_no_circles() -> None:
    LAYERS.assert_no_circles()


def test_the_page_has_the_same_order() -> None:
    page = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
    table = page[page.index("## The packages of fa_compiler/") :]
    rows = re.findall(r"^\| (`[^|]+`) \|", table[: table.index("\n## ", 1)], re.MULTILINE)
    words = [word.removesuffix(".py").rstrip("/") for row in rows for word in re.findall(r"`([^`]+)`", row)]
    assert words == list(LAYERS.order)


def test_the_names_of_the_package_are_in_modules_below_it() -> None:
    for name in fa_compiler.__all__:
        assert getattr(fa_compiler, name) is not None
