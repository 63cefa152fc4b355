"""Every test that takes `isa` runs on each kernel variant the machine has, and on the scalar reference in C++."""

from __future__ import annotations

import pytest

from tests import kernel_variants
from tests.built_library import choose_library

choose_library()


@pytest.fixture(params=kernel_variants.compiled())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if not kernel_variants.runs(name):
        pytest.skip(f"this machine does not run the variant {name}")
    monkeypatch.setenv("FA_COMPILER_ISA", name)
    return name
