"""Tests that share their cases out among the kernel variants that this machine runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tests import kernel_variants
from tests.built_library import choose_library
from tests.pairs import pairwise

choose_library()
VARIANTS = kernel_variants.compiled()
AVAILABLE = [name for name in VARIANTS if kernel_variants.runs(name)]
"""test_library.py skips a test for each of the others."""


def thinned(**parameters: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with these and `isa`: any two values meet, of the variants, too, but not all of them."""
    rows = pairwise(AVAILABLE, *map(list, parameters.values()))
    return pytest.mark.parametrize(("isa", *parameters), rows, indirect=["isa"])
