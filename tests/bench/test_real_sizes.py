"""The tables of `python -m bench.real_sizes` on made-up numbers, and small versions of its models, run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fa_compiler
from bench import real_sizes
from bench.real_models import MODELS, build
from tests.passes.running import assert_same

TOKENS = 24


def test_the_document() -> None:
    row = {"model": "m", "layers": 32, "tokens": 8192, "constants": 256.0, "dense": 64.0, "blocks": 32, "fused": 31,
           "masks": Counter({"band": 31, "softcap": 1}), "seconds": 0.5, "cpu": 3.0, "memory": 120.0}  # fmt: skip
    run = {"model": "r", "layers": 1, "tokens": 4096, "masks": Counter(band=1),
           "ms": {"original": 200.0, "fused": 50.0}, "ratio": 4.1,
           "peaks": {"original": 900.0, "fused": 90.0}, "difference": 2e-6}  # fmt: skip
    lines = real_sizes.document(row | {"cpu": 2.5, "memory": 100.0}, [row], [run]).splitlines()
    (first, second) = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:4] in ("| m ", "| r ")
    ]
    assert first == ["m", "32", "8192", "256", "64", "31/32", "band 31, softcap 1", "0.50", "0.50", "120", "20"]
    assert second == ["r", "1", "4096", "band 1", "200", "50", "4.10", "900", "90", "2e-06"]


@pytest.mark.parametrize("name", ["bert-large", "packed-bert", "gpt-neo-2.7b", "gemma-2-9b", "llama-4-scout"])
def test_models_run(name: str, tmp_path: Path) -> None:
    """With random weights, and the masks of all their layers; the original is the truth. Each family is among them."""
    model = MODELS[name].cut(2, TOKENS)
    masks = tuple(mask and replace(mask, size=7) for mask in model.masks)
    model = replace(
        model, hidden=64, heads=4, kv_heads=2 if model.family == "llama" else 4, size=16, vocabulary=99, masks=masks
    )
    path = build(model, tmp_path, numbers=0)
    fa_compiler.optimize(path, tmp_path / "fused.onnx")
    feeds = {"input_ids": np.random.default_rng(0).integers(0, 99, (1, TOKENS))}
    sessions = [fa_compiler.InferenceSession(tmp_path / file) for file in ("model.onnx", "fused.onnx")]
    results = [session.run(None, feeds)[0] for session in sessions]
    assert np.std(results[0]) > 0.1
    assert_same(results[1], results[0], 1e-5)
