"""Every vector gets the verdict that GE's own loading code gave it. There are no differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa_compiler.lowering.ascend.air import AirError, read
from fa_compiler.lowering.ascend.air.check import REJECTED, check, verdict
from tests.lowering.ascend.vector_table import verdicts


@pytest.mark.parametrize(("file", "expected"), verdicts(".air"))
def test_verdict(vectors: Path, file: str, expected: str) -> None:
    diagnostics = check(vectors / file)
    assert verdict(diagnostics) == expected, [str(diagnostic) for diagnostic in diagnostics]
    if expected == REJECTED:
        with pytest.raises(AirError):
            read(vectors / file)
    else:
        assert read(vectors / file).root.ops
