"""Exported models as GE graphs, through the file and back to ONNX: the outputs are the original's.

One kept graph for each kind of model and exporter; tools/corpus/ascend.py does the same over a whole corpus.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.graphs import harness

KEPT = (
    "bert__tsn_eager_op14",
    "bert__dynamo_sdpa_op23",
    "bert_fp16__dynamon_sdpa_op20",
    "gpt2__tsn_sdpa_op17",
    "vit__dynamon_sdpa_op20",
    "clip_vision__tsn_eager_op14",
    "bart_decpast__dynamon_sdpa_op20",
    "whisper_enc__tsn_eager_op14",
    "t5_decpast__dynamon_sdpa_op20",
    "llama_past__tso_eager_op13",
    "mistral__dynamon_sdpa_op20",
    "qwen3__dynamon_sdpa_op20",
    "deepseekv3__dynamon_sdpa_op20",
    "tfbart__tf2onnx_op13",
    "train_sdpa__fxjoint_op18",
    "chunk_static__dynamo",
    "chunk_gqa__tsn",
)


@pytest.mark.parametrize("name", KEPT)
def test_a_model_goes_to_ge_and_back(name: str, tmp_path: Path) -> None:
    from tools.corpus import compare_ascend, compare_run

    paths = {key: str(tmp_path / f"{key}.onnx") for key in ("original", "optimised")}
    onnx.save(harness.load(name), paths["original"])
    inputs = str(tmp_path / "inputs.npz")
    np.savez(inputs, allow_pickle=False, **harness.inputs(harness.read_index()[name]))

    seen = compare_ascend.round_trip(paths["original"], paths["optimised"])
    assert seen["fused"] > 0
    assert seen["unmapped"] == []
    assert seen["findings"] == []
    assert seen["types"] is None
    fused = [op for op in seen["operators"] if op.startswith("FlashAttentionScore")]
    assert fused and "SoftmaxV2" not in seen["operators"]

    library = str(compare_ascend.library_path())
    verdict = compare_run.run({**paths, "inputs": inputs, "library": library, "coarsest": seen["coarsest"]})
    assert verdict["original_error"] is None
    assert verdict["problems"] == []
