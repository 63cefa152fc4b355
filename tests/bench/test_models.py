"""The parts and tables of `python -m bench models` on made-up numbers, its inputs and errors. No model is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from bench import model_tables, models

ORIGINAL = {"q", "scores", "softmax", "out", "mlp", "/mlp/Add"}
FUSED = {"q", "attention", "out", "mlp", "/mlp/Add", "fa_Not"}


def test_the_attention_of_the_original_is_what_the_fusion_removes() -> None:
    """ONNX Runtime changes the names of nodes that it rewrites; the names of nodes that it makes belong to neither."""
    nodes = [("q", "MatMul", 1.0), ("scores/MatMulScaleFusion/", "FusedMatMul", 2.0), ("softmax", "Softmax", 4.0),
             ("SkipLayerNormalization_token_1", "SkipLayerNormalization", 8.0)]  # fmt: skip
    assert model_tables.original_parts(nodes, ORIGINAL, FUSED)["seconds"] == {"attention": 6.0, "other": 9.0}


def test_what_a_fusion_causes() -> None:
    """A node that only the fused file has, and a Transpose that ONNX Runtime has made."""
    nodes = [("q", "MatMul", 1.0), ("attention", "FlashAttentionBody2", 2.0), ("fa_Not", "Not", 4.0),
             ("token_7", "Transpose", 8.0), ("mlp/QuickGeluFusion/", "QuickGelu", 16.0),
             ("/mlp/Add", "Add", 32.0), ("token_8", "BiasGelu", 64.0)]  # fmt: skip
    found = model_tables.fused_parts(nodes, ORIGINAL, FUSED)
    assert found["seconds"] == {"attention": 2.0, "other": 113.0, "caused": 12.0}
    assert found["caused"] == {"Not": 4.0, "Transpose": 8.0} and found["count"] == 2
    assert found["kinds"]["BiasGelu"] == 64.0


def variant(ms: float, difference: float, peak: float) -> dict[str, Any]:
    return {"ms": ms, "difference": difference, "peak_mib": peak, "made": 0.5, "first_ms": 2 * ms}


def test_the_document() -> None:
    row: dict[str, Any] = {
        "model": "gpt2", "length": 512, "absent": {"openvino": "crashed (exit -9)"},
        "variants": {"ort": variant(200.0, 0.0, 900.0), "ort-optimizer": variant(150.0, 0.5, 800.0),
                     "ours": variant(100.0, 1e-6, 400.0)},
        "where": {"ort": {"seconds": {"attention": 0.12, "other": 0.08}},
                  "ours": {"seconds": {"attention": 0.019, "other": 0.08, "caused": 0.001}, "count": 3,
                           "caused": {"Not": 0.0004, "Reshape": 0.0006}}},
    }  # fmt: skip
    results = {"threads": 2, "layers": 2, "date": "2026-01-01", "versions": ["onnxruntime 9"],
               "optimizer": {"gpt2": "0"}, "rows": [row]}  # fmt: skip
    lines = model_tables.document(results).splitlines()
    tables = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "| gpt2 " in line]
    assert tables == [
        ["gpt2", "512", "200", "(150)", "100", "2.00"],
        ["gpt2", "512", "120", "80", "19", "80", "1", "1.00 %", "3", "Reshape 0.6, Not 0.4"],
        ["gpt2", "512", "0.50 + 400", "0.50 + 300", "0.50 + 200"],
        ["gpt2", "512", "900", "800", "400"],
    ]
    assert "at most 2 layers" in lines[0]
    assert "- gpt2 512: openvino: crashed (exit -9)" in lines
    assert any(line.endswith("gpt2 0.") for line in lines)


@pytest.mark.parametrize("past", [False, True])
def test_inputs_have_the_asked_number_of_tokens(past: bool) -> None:
    """An eighth of a sentence is padding; of a step's mask nothing, and it also has the new token."""
    sizes: dict[str, tuple[int, list[Any]]] = {
        "input_ids": (TensorProto.INT64, ["batch", 1 if past else "sequence"]),
        "attention_mask": (TensorProto.INT64, ["batch", "s50" if past else "sequence"]),
    }
    if past:
        sizes["past.0"] = (TensorProto.FLOAT, ["batch", 2, "past", 4])
    inputs = [helper.make_tensor_value_info(name, *each) for name, each in sizes.items()]
    feeds = models.feeds(onnx.ModelProto(graph=helper.make_graph([], "model", inputs, [])), 16)
    assert feeds["input_ids"].shape == (1, 1 if past else 16)
    assert feeds["attention_mask"].tolist() == [[1] * 17 if past else [1] * 14 + [0] * 2]
    assert not past or feeds["past.0"].shape == (1, 2, 16, 4)


def test_a_model_that_was_not_exported_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--models", str(tmp_path), "--names", "gpt2", "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "does not exist" in error and "--export-python" in error
    assert not (tmp_path / "out").exists()
