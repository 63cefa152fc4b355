"""The packages of passes stand on each other in one order; within one, no file imports another in a circle."""

from __future__ import annotations

from pathlib import Path

from tests.layers import Layers
from tests.systems import SOURCES

pytestmark = SOURCES

LAYERS = Layers(
    "fa_compiler.passes",
    Path(__file__).parent.parent.parent / "passes",
    (
        *("answer", "ir", "algebra", "ops", "values", "layout", "emit", "masks", "matching", "rewrite"),
        *("attention_ops", "sparse", "backward", "convolution", "linear", "around"),
        *("in_place", "parallel", "prepare", "fusion"),
    ),
)
"""From the ground up."""


def test_every_package_has_its_place() -> None:
    assert {LAYERS.layer(file) for file in LAYERS.files} == set(LAYERS.order)


def test_a_layer_knows_those_below_only() -> None:
    assert LAYERS.arrows_upward() == []


def test_no_circles() -> None:
    LAYERS.assert_no_circles()
