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
ENDS = np.array([0, 3, 7, 7, 10], np.int32)
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


def with_bias(query: Array, key: Array, value: Array, bias: Array, places: Array) -> Array:
    """The softmax in float64, with the bias of a padded batch. `places` are those of the tokens in it."""
    rows = bias.shape[2]
    out = np.zeros((len(query), value.shape[1]))
    for first, end in pairwise(ENDS):
        own = places[first:end]
        for head in range(HEADS):
            q, k, v = (
                np.split(part[first:end].astype(np.float64), HEADS, axis=1)[head] for part in (query, key, value)
            )
            added = bias[own[:, None] // rows % len(bias), head % bias.shape[1], own[:, None] % rows, own % rows]
            scores, width = SIZE**-0.5 * q @ k.T + added, value.shape[1] // HEADS
            with np.errstate(invalid="ignore"):
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
                weights /= weights.sum(axis=-1, keepdims=True)
                out[first:end, head * width : (head + 1) * width] = weights @ v
    return out


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(4, HEADS), (1, HEADS), (4, 1), (1, 1)])
def test_a_bias_on_the_scores(shape: tuple[int, int], dtype: str, left: bool) -> None:
    """It is that of a padded batch, in which token_offset says where the tokens are."""
    rows, feeds = 6, drawn(2 * WIDTH, dtype)
    bias = np.random.default_rng(3).standard_normal((*shape, rows, rows)).astype(dtype)
    lengths = np.diff(ENDS)
    batch = np.arange(4 * rows).reshape(4, rows)
    used = np.array([[row >= rows - length if left else row < length for row in range(rows)] for length in lengths])
    offsets = np.concatenate([batch[used], batch[~used]]).reshape(4, rows).astype(np.int32)
    feeds |= {"token_offset": offsets, "attention_bias": bias}
    bias[0, 0, :, 1] = -np.inf
    feeds["value"][9, 0] = np.inf
    model = model_of("PackedMultiHeadAttention", feeds, NAMES, {})
    result, report = fused(model)
    (block,) = report.blocks
    assert (block.op, block.layout, block.mask) == ("FlashAttentionScore", "BSND", "atten_mask+real_shift")
    wanted = with_bias(*(feeds[name] for name in NAMES[:3]), bias, batch[used])
    for level in LEVELS:
        assert_same(run(result, feeds, level)[0], wanted.astype(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("more", "target", "words"),
    [
        ({"attention_bias": np.zeros((1, 2, 5, 5), np.float32)}, "ort", "one for all 3"),
        ({}, "ascend", "data"),
        ({}, "contrib", "data"),
    ],
)
def test_what_is_declined(more: dict[str, Array], target: Any, words: str) -> None:
    _, report = fused(model_of("PackedMultiHeadAttention", {**drawn(), **more}, NAMES, {}), target)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert words in (block.reason or "")


def test_an_old_opset() -> None:
    model = model_of("PackedMultiHeadAttention", drawn(), NAMES, {})
    model.opset_import[0].version = 10
    assert "in opset 10" in (fused(model)[1].blocks[0].reason or "")
