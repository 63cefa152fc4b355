"""The tables of `python -m bench models` on made-up numbers, and its errors. Models are not run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import models

ROW: dict[str, Any] = {
    "model": "gpt2", "length": 512, "absent": {"openvino": "crashed (exit -9)"},
    "variants": {
        "ort": {"ms": 200.0, "difference": 0.0, "peak_mib": 900.0},
        "ort-optimizer": {"ms": 150.0, "difference": 0.5, "peak_mib": 800.0},
        "ours": {"ms": 100.0, "difference": 1e-6, "peak_mib": 400.0},
    },
    "kinds": {"MatMul": 3.0, "FlashAttentionScore": 1.0},
}  # fmt: skip


def test_shares_of_attention() -> None:
    """Ours spends a quarter, 25 ms, on attention; the rest, 75 ms, is in the original, too."""
    before, after = models.shares(ROW)
    assert after == 0.25
    assert before == pytest.approx(1 - 75 / 200)
    assert models.shares(ROW | {"kinds": {"MatMul": 1.0}}) == (None, None)


def test_the_document() -> None:
    results = {"threads": 2, "date": "2026-01-01", "versions": ["onnxruntime 9"], "optimizer": {"gpt2": "0"},
               "rows": [ROW]}  # fmt: skip
    lines = models.document(results).splitlines()
    (times, memory, kinds) = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| gpt2 " in line]
    assert times == ["gpt2", "512", "200", "(150)", "100", "2.00", "5120", "62 %", "25 %"]
    assert memory == ["gpt2", "512", "900", "800", "400"]
    assert kinds[2] == "MatMul 75 %, FlashAttentionScore 25 %"
    assert "- gpt2 512: openvino: crashed (exit -9)" in lines
    assert any(line.endswith("gpt2 0.") for line in lines)


def test_a_model_that_was_not_exported_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--models", str(tmp_path), "--names", "gpt2", "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "does not exist" in error and "--export-python" in error
    assert not (tmp_path / "out").exists()
