"""Every kept graph: what is fused, what is declined and why, and that the outputs stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import weights
from tests.graphs import harness
from tests.graphs.examine import examine

INDEX = harness.read_index()


@pytest.mark.parametrize("name", sorted(INDEX))
def test_graph(name: str, tmp_path: Path) -> None:
    entry = INDEX[name]
    seen = examine(name, tmp_path)
    assert seen.problems == []
    assert seen.blocks == entry["blocks"]
    # A newer ONNX Runtime may run what the one it was kept with did not.
    assert seen.compared in (entry["compared"], "ort")


def test_every_kept_graph_is_in_the_index() -> None:
    kept = {path.name.removesuffix(".onnx.xz") for path in harness.HERE.glob("*.onnx.xz")}
    assert kept == set(INDEX)


def test_weights_are_the_same_each_time() -> None:
    first, second = (harness.load("bert__tsn_eager_op14") for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert weights.strip(first) > 0


def test_comparison_sees_a_difference() -> None:
    import numpy as np

    from tools.corpus import compare_outputs

    right = np.array([1.0, -2.0, np.inf], np.float32)
    for wrong in ([1.0, -2.0001, np.inf], [1.0, -2.0, -np.inf], [1.0, np.nan, np.inf]):
        assert compare_outputs.compare(["y"], [right], [np.array(wrong, np.float32)])[0].problem
    near = np.array([1.0, -2.00001, np.inf], np.float32)
    assert compare_outputs.compare(["y"], [right], [near])[0].problem is None
    assert compare_outputs.compare(["y"], [right], [near.astype(np.float64)])[0].problem
