"""Chunked prefill: several tokens on cached keys and values, of any number and on any past.

tools/makers/export_chunks.py exported the models.
The causal masks of concatenated caches are offset by the past: bands that end in the bottom right corner, in every run.
A preallocated cache has rows at positions that are an input: its mask stays one.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.graphs import harness
from tests.passes.running import Array, assert_same, fused, run

TOLERANCE = 1e-5
"""Two layers in float32, relative to the largest result."""


def attributes(model: onnx.ModelProto) -> list[dict[str, int]]:
    """The bands of the fused nodes."""
    names = ("sparse_mode", "pre_tockens", "next_tockens")
    return [
        {each.name: each.i for each in node.attribute if each.name in names}
        for node in model.graph.node
        if node.op_type == "FlashAttention"
    ]


def feeds(model: onnx.ModelProto, tokens: int, past: int, start: int) -> dict[str, Array]:
    rng = np.random.default_rng(tokens * 100 + past)
    given: dict[str, Array] = {}
    for value in model.graph.input:
        if value.name == "ids":
            given["ids"] = rng.integers(0, 64, (2, tokens))
        elif value.name == "start":
            given["start"] = np.array(start, np.int64)
        else:
            given[value.name] = rng.standard_normal((2, 2, past, 16)).astype(np.float32)
    return given


CHUNKS = {
    "chunk_gqa__tsn": ("causal", {"sparse_mode": 3}, [(6, 10, 0), (1, 9, 0), (40, 3, 0), (2, 70, 0)]),
    "chunk_window__dynamo": (
        "band",
        {"sparse_mode": 4, "pre_tockens": 4, "next_tockens": 0},
        [(6, 10, 0), (3, 2, 0), (40, 3, 0), (2, 70, 0)],
    ),
    "chunk_static__dynamo": ("atten_mask", {"sparse_mode": 0}, [(6, 32, 10), (6, 32, 0), (20, 32, 12), (2, 32, 30)]),
}
"""The mask, the band, and sizes to run: tokens, past and the position of the first token."""


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_fuse_and_stay_equal(name: str) -> None:
    word, band, sizes = CHUNKS[name]
    model = harness.load(name)
    after, report = fused(model)
    assert [(block.op, block.mask) for block in report.blocks] == [("FlashAttentionScore", word)] * 2
    for found in attributes(after):
        assert found.items() >= band.items()
    for tokens, past, start in sizes:
        given = feeds(model, tokens, past, start)
        for got, wanted in zip(run(after, given), run(model, given), strict=True):
            assert_same(got, wanted, TOLERANCE)


@pytest.mark.parametrize("name", ["chunk_gqa__tsn", "chunk_window__dynamo"])
def test_a_product_takes_the_same_bands(name: str) -> None:
    after, report = fused(harness.load(name), "ascend")
    assert [block.mask for block in report.blocks] == [CHUNKS[name][0]] * 2
    assert all(found.items() >= CHUNKS[name][1].items() for found in attributes(after))
