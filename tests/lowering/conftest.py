"""Every kernel variant that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .remembering import remembered
from .variants import WHOLE


@pytest.fixture(params=WHOLE)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setenv("FA_COMPILER_ISA", name)
    return name


@pytest.fixture(autouse=True, scope="module")
def _reference_computes_once() -> Iterator[None]:
    with remembered():
        yield
