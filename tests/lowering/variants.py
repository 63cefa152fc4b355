"""The kernel variants that this machine runs, and tests that share their cases out among them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from fa_compiler import ops
from tests.built_library import choose_library
from tests.pairs import pairwise

VARIANTS = ("avx512bf16", "avx512", "avx2", "baseline", "reference")


def _supported(name: str) -> bool:
    one = np.ones((1, 1, 1, 1), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_COMPILER_ISA", name)
        try:
            ops.run(
                "FlashAttentionScore",
                {"query": one, "key": one, "value": one},
                {"head_num": 1, "input_layout": "BNSD"},
                ["attention_out"],
            )
        except ops.KernelError as error:
            # Not compiled for this architecture, or not on this processor.
            assert "is unknown" in str(error) or "lacks" in str(error)
            return False
    return True


choose_library()
AVAILABLE = [name for name in VARIANTS if _supported(name)]
"""test_library.py skips a test for each of the others."""


def thinned(**parameters: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with these and `isa`: any two values meet, of the variants, too, but not all of them."""
    rows = pairwise(AVAILABLE, *map(list, parameters.values()))
    return pytest.mark.parametrize(("isa", *parameters), rows, indirect=["isa"])
