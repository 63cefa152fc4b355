"""Every test that takes `isa` runs on each kernel variant the machine has, and on the scalar reference in C++."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler import ops
from tests.built_library import choose_library

choose_library()

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


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name not in _available():
        pytest.skip(f"this machine does not run the variant {name}")
    monkeypatch.setenv("FA_COMPILER_ISA", name)
    return name


_found: list[str] = []


def _available() -> list[str]:
    if not _found:
        _found.extend(name for name in VARIANTS if _supported(name))
    return _found
