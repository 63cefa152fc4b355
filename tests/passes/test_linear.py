"""Compiling takes time in proportion to the number of nodes, counted in calls, which no other load disturbs."""

import cProfile
import lzma
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import fuse
from tools.makers.repeat_layers import place_weights, repeat

ROOT = Path(__file__).parents[2]


def calls(model: ir.Model) -> int:
    """The Python calls that fusing a model makes."""
    profile = cProfile.Profile(builtins=False)
    report = profile.runcall(fuse, model)
    assert report.count("fused") == len(report.blocks) > 0
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("name", ["llama__dynamon_sdpa_op20", "llama__tsn_sdpa_op17", "llama_past__tsn_sdpa_op17"])
def test_every_layer_costs_the_same(name: str, tmp_path: Path) -> None:
    packed = (ROOT / "tests" / "graphs" / f"{name}.onnx.xz").read_bytes()
    model = onnx.load_model_from_string(lzma.decompress(packed))
    place_weights(model, tmp_path / "weights")
    counts = [calls(ir.from_proto(repeat(model, layers))) for layers in (2, 2, 5, 8)]
    _, two, five, eight = counts  # the first run fills caches
    assert eight - five == pytest.approx(five - two, rel=0.025)
