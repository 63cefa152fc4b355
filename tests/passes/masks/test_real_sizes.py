"""The models of bench/real_models.py, cut to few layers, with masks that are too large to be held in memory."""

from __future__ import annotations

import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import fa_compiler
from bench.real_models import MODELS, RealModel, build
from fa_compiler.passes import Report
from fa_compiler.passes.ir.nodes import FOLD_LIMIT, HELD, constant

TOKENS = 2080
"""The masks have more elements than FOLD_LIMIT."""
MASKS = {
    "bert-large": ["atten_mask"],
    "modernbert-large": ["none", "band", "band"],
    "packed-bert": ["packed"],
    "gpt2-xl": ["causal"],
    "gpt-neo-2.7b": ["causal", "band"],
    "llama-3.1-8b": ["causal"],
    "llama-3.1-405b": ["causal"],
    "mistral-7b": ["band"],
    "gemma-2-9b": ["band", "causal"],
    "gemma-3-27b": [*["band"] * 5, "causal"],
    "paligemma-3b": ["prefix"],
    "llama-4-scout": [*["packed+causal"] * 3, "causal"],
    "qwen-2.5-7b": ["causal"],
    "llama-3.2-1b": ["causal"],
    "gemma-3-1b": [*["band"] * 5, "causal"],
}


def optimized(model: RealModel, folder: Path) -> Report:
    """The report of a model that is written into the folder."""
    folder.mkdir(exist_ok=True)
    report = fa_compiler.optimize(build(model, folder), folder / "fused.onnx").report
    (folder / "model.bin").unlink()  # pytest keeps the folders of three runs
    return report


@pytest.mark.parametrize("name", MODELS)
def test_every_block_is_fused_with_the_structure_of_its_mask(name: str, tmp_path: Path) -> None:
    model = MODELS[name].cut(len(MASKS[name]), TOKENS)
    assert TOKENS**2 > FOLD_LIMIT
    assert [block.mask for block in optimized(model, tmp_path).blocks if block.status == "fused"] == MASKS[name]


def test_reading_does_not_grow_with_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share a mask read it once. Layers with masks of their own read each once."""
    read: dict[int, int] = {}
    fromfile = np.fromfile

    def counted(file: str, dtype: np.dtype, count: int, *, offset: int) -> np.ndarray:
        assert offset not in read
        read[offset] = count
        return fromfile(file, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", counted)
    model = replace(MODELS["mistral-7b"].cut(6, TOKENS), hidden=64, heads=2, kv_heads=1, size=32)
    for masks, each in ((1, model), (3, replace(model.cut(3), buffer=TOKENS))):
        read.clear()
        assert [block.mask for block in optimized(each, tmp_path / str(masks)).blocks] == ["band"] * each.layers
        assert sum(read.values()) == masks * TOKENS**2


def test_memory_does_not_grow_with_the_constants(tmp_path: Path) -> None:
    """Two masks of four times as many bytes: the peak rises by less than a hundredth of what is added."""
    peaks = []
    model = replace(MODELS["gpt-neo-2.7b"].cut(2), hidden=64, heads=2, kv_heads=2, size=32, vocabulary=64)
    for tokens in (TOKENS, 2 * TOKENS):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        path = build(replace(model, tokens=tokens, buffer=tokens), folder)
        tracemalloc.start()
        try:
            assert fa_compiler.optimize(path, folder / "fused.onnx").report.count("fused") == 2
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2 * 3 * TOKENS**2 // 100
    assert peaks[0] < 1 << 27  # what is first imported and made, whatever the model


def test_what_is_read_of_a_file_is_not_held(tmp_path: Path) -> None:
    """A constant below the limit is read as a whole; its array leaves memory with the question."""
    path, size = tmp_path / "numbers.bin", HELD + 1
    np.arange(size, dtype=np.int32).tofile(path)
    tensor = ir.ExternalTensor(path, 0, 4 * size, ir.DataType.INT32, shape=ir.Shape([size]), name="numbers")
    array = constant(ir.Value(name="numbers", const_value=tensor))
    assert array is not None and array[-1] == HELD
    gone = weakref.ref(array)
    del array
    assert gone() is None
