"""examples/generate.py: the same tokens, and caches that stay where they are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

import fa_compiler

ROOM = 24


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_generates_in_place(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"LAYERS": 2, "HEADS": 4, "SIZE": 8, "WIDTH": 32, "INNER": 32, "WORDS": 50}.items():
        monkeypatch.setattr(example, name, size)
    original, fused = tmp_path / "step.onnx", tmp_path / "fused.onnx"
    onnx.save(example.build(ROOM), original)
    report = fa_compiler.optimize(original, fused).report
    assert [block.status for block in report.blocks] == ["fused"] * 2
    plain, bound = example.Plain(original, ROOM), example.Bound(fused, ROOM)
    addresses = {name: cache.data_ptr() for name, cache in bound.caches.items()}
    names = [*(f"present_{name}" for name in bound.caches), "logits"]  # as they were bound
    before = {name: cache.numpy().copy() for name, cache in bound.caches.items()}
    for position in range(ROOM):
        assert plain.step(position % 50, position) == bound.step(position % 50, position)
        outputs = dict(zip(names, bound.binding.get_outputs(), strict=True))
        for name, address in addresses.items():
            assert outputs[f"present_{name}"].data_ptr() == address
            after = bound.caches[name].numpy()
            # What was written is the new token's row of each key head, and nothing else.
            changed = np.unique(np.nonzero(after != before[name])[2])
            assert changed.tolist() == [position]
            before[name] = after.copy()
            np.testing.assert_allclose(after, plain.caches[name], rtol=0, atol=1e-5)
    tokens = [example.generate(run.step, [3, 1, 4], 10)[0] for run in (plain, bound)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 10
