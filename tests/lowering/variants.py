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
DECODING = "avx512vnni"
"""A variant that differs from the one below it by the kernel of decoding alone."""
AVAILABLE = [name for name in VARIANTS if kernel_variants.runs(name)]
"""test_library.py skips a test for each of the others."""
WHOLE = [name for name in AVAILABLE if name != DECODING]
"""Those on which all kernels are tested."""


def thinned(**parameters: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with these and `isa`: any two values meet, of the variants, too, but not all of them."""
    rows = pairwise(WHOLE, *map(list, parameters.values()))
    return pytest.mark.parametrize(("isa", *parameters), rows, indirect=["isa"])
