"""PackedMultiHeadAttention and PackedAttention give what their schemas say. ONNX Runtime has no CPU kernel for them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.passes.running import LEVELS, Array, assert_same, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

CONTRIB = "com.microsoft"
NAMES = ("query", "key", "value", "bias", "token_offset", "cumulative_sequence_length", "attention_bias")
PROJECTED = ("input", "weights", "bias", "token_offset", "cumulative_sequence_length", "attention_bias")
HEADS, SIZE = 3, 8
WIDTH = HEADS * SIZE
ENDS = np.array([0, 4, 4, 9, 10], np.int32)
TOLERANCE = {"float32": 1e-5, "float16": 4e-3}
"""Rounding of float32 sums, and of results of 16 bits."""


def of_schema(query: Array, key: Array, value: Array, scale: float) -> Array:
    """The softmax of each sequence in float64, for tensors [T, N * D]."""
    out = np.zeros((len(query), value.shape[1]))
    for first, end in pairwise(ENDS):
        q, k, v = (
            part[first:end].astype(np.float64).reshape(end - first, HEADS, part.shape[1] // HEADS).swapaxes(0, 1)
            for part in (query, key, value)
        )
        scores = np.exp(scale * q @ k.swapaxes(1, 2))
        weights = scores / scores.sum(axis=-1, keepdims=True)
        out[first:end] = (weights @ v).swapaxes(0, 1).reshape(end - first, value.shape[1])
    return out


def model_of(op_type: str, feeds: Mapping[str, Array], names: tuple[str, ...], attrs: Mapping[str, Any]) -> Any:
    """A model of one node. The number of tokens is an open size, and weights are constants."""
    inputs = [name if name in feeds else "" for name in names]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(op_type, inputs, ["y"], domain=CONTRIB, num_heads=HEADS, **attrs)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    declared = [
        helper.make_tensor_value_info(
            name, kinds[name], ["T", *array.shape[1:]] if name in (*NAMES[:3], "input") else array.shape
        )
        for name, array in feeds.items()
        if name != "weights"
    ]
    weights = [onnx.numpy_helper.from_array(feeds["weights"], "weights")] if "weights" in feeds else []
    result = helper.make_tensor_value_info("y", kinds[names[0]], [None, None])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    graph = helper.make_graph([node], "packed", declared, [result], weights)
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def drawn(width: int = WIDTH, dtype: str = "float32") -> dict[str, Array]:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((10, WIDTH)).astype(dtype) for name in NAMES[:2]}
    feeds["value"] = rng.standard_normal((10, width)).astype(dtype)
    return feeds | {"token_offset": np.zeros((4, 5), np.int32), "cumulative_sequence_length": ENDS}


def check(model: onnx.ModelProto, feeds: Mapping[str, Array], wanted: Array, dtype: str = "float32") -> None:
    result, report = fused(model)
    (block,) = report.blocks
    assert (block.op, block.layout, block.mask, block.heads) == ("FlashAttentionScore", "TND", "packed", (HEADS, HEADS))
    given = {name: array for name, array in feeds.items() if name != "weights"}
    for level in LEVELS:
        (got,) = run(result, given, level)
        assert got.dtype == dtype
        assert_same(got, wanted.astype(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
def test_three_operands(width: int, dtype: str) -> None:
    feeds = drawn(width, dtype)
    wanted = of_schema(feeds["query"], feeds["key"], feeds["value"], SIZE**-0.5)
    check(model_of("PackedMultiHeadAttention", feeds, NAMES, {}), feeds, wanted, dtype)


@pytest.mark.parametrize("packed", [False, True])
def test_a_bias_and_a_scale(packed: bool) -> None:
    feeds = drawn()
    bias = np.random.default_rng(1).standard_normal(3 * WIDTH).astype(np.float32)
    parts = [feeds[name] + each for name, each in zip(NAMES, np.split(bias, 3), strict=False)]
    wanted = of_schema(*parts, 0.5)
    if packed:
        split = [feeds.pop(name).reshape(10, HEADS, 1, SIZE) for name in NAMES[:3]]
        feeds = {"query": np.concatenate(split, axis=2), **feeds}
    check(
        model_of("PackedMultiHeadAttention", {**feeds, "bias": bias}, NAMES, {"scale": 0.5}),
        {**feeds, "bias": bias},
        wanted,
    )


@pytest.mark.parametrize("sizes", [None, (WIDTH, WIDTH, 2 * WIDTH)])
def test_a_projection(sizes: tuple[int, ...] | None) -> None:
    rng, widths = np.random.default_rng(2), sizes or (WIDTH, WIDTH, WIDTH)
    feeds = {
        "input": rng.standard_normal((10, 6)).astype(np.float32),
        "weights": rng.standard_normal((6, sum(widths))).astype(np.float32),
        "bias": rng.standard_normal(sum(widths)).astype(np.float32),
        "token_offset": np.zeros((4, 5), np.int32),
        "cumulative_sequence_length": ENDS,
    }
    joined = feeds["input"].astype(np.float64) @ feeds["weights"] + feeds["bias"]
    wanted = of_schema(*np.split(joined, np.cumsum(widths)[:2], axis=1), SIZE**-0.5)
    attrs = {} if sizes is None else {"qkv_hidden_sizes": sizes}
    check(model_of("PackedAttention", feeds, PROJECTED, attrs), feeds, wanted)


@pytest.mark.parametrize(
    ("more", "target", "words"),
    [
        ({"attention_bias": np.zeros((1, 1, 5, 5), np.float32)}, "ort", "padding"),
        ({}, "ascend", "data"),
        ({}, "contrib", "data"),
    ],
)
def test_what_is_declined(more: dict[str, Array], target: Any, words: str) -> None:
    _, report = fused(model_of("PackedMultiHeadAttention", {**drawn(), **more}, NAMES, {}), target)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert words in (block.reason or "")
