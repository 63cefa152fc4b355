"""Attributes and sizes whose products leave 64 bits: refused with a message, or computed where they mean something.

The kernel is called as a model calls it, without the registry, which refuses most of these first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops
from fa_compiler.lowering.ort.eager import compute
from fa_compiler.op_registry import as_arrays, full_attrs, get

HUGE = 2**62
NOTHING = {name: np.zeros((1, 2, 0), np.float32) for name in ("query", "key", "value")}


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "outputs", "text"),
    [
        (
            "FlashAttentionScore",
            {**NOTHING, "drop_mask": np.zeros(8, np.uint8)},
            {"head_num": HUGE, "input_layout": "BSH", "keep_prob": 0.5},
            ["attention_out"],
            r"input drop_mask has 8 bytes, expected at least 2\^60, a bit for each score",
        ),
        (
            "FlashAttentionScore",
            NOTHING,
            {"head_num": HUGE, "input_layout": "BSH"},
            None,
            r"an output has the shape \[1,4611686018427387904,2,8\], expected sizes that make at most 2\^59 numbers",
        ),
        (
            "FlashAttentionScore",
            {name: np.zeros((2**30, 2**29, 0), np.float32) for name in ("query", "key", "value")}
            | {"real_shift": np.zeros((1, 1), np.float32)}
            | {name: np.array([2**30]) for name in ("actual_seq_qlen", "actual_seq_kvlen")},
            {"head_num": 2**29, "input_layout": "TND"},
            ["attention_out"],
            r"input real_shift has 1 elements, fewer than these sequences have scores",
        ),
        (
            "FlashAttentionScore",
            {name: np.zeros((1, 1, 2**60, 0), np.float32) for name in ("query", "key", "value")},
            {"head_num": 1, "input_layout": "BNSD"},
            ["attention_out"],
            r"an input has the shape \[1,1,1152921504606846976,0\], expected sizes that make at most 2\^59 numbers",
        ),
        (
            "LightningIndexer",
            {
                "query": np.ones((1, 2, 2, 4), np.float32),
                "key": np.ones((1, 3, 1, 4), np.float32),
                "weights": np.ones((1, 2, 2), np.float32),
            },
            {"sparse_count": HUGE},
            None,
            r"an output has the shape \[1,2,1,4611686018427387904\], expected sizes that make at most 2\^59 numbers",
        ),
        (
            "SparseFlashAttention",
            {
                "query": np.zeros((0, 2, 1, 4), np.float32),
                "key": np.zeros((0, 2**40, 1, 4), np.float32),
                "value": np.zeros((0, 2**40, 1, 4), np.float32),
                "sparse_indices": np.zeros((0, 2, 1, 3), np.int32),
                "block_table": np.zeros((0, 2**40), np.int32),
                "actual_seq_lengths_kv": np.zeros(0, np.int32),
            },
            {"layout_kv": "PA_BSND", "attention_mode": 2, "scale_value": 1.0, "sparse_block_size": 1},
            None,
            r"input block_table has shape \[0,1099511627776\] beside pages of 1099511627776 keys",
        ),
    ],
    ids=["dropout", "statistics", "packed bias", "input", "sparse_count", "pages"],
)
def test_refused(op: str, inputs: dict[str, Any], attrs: dict[str, Any], outputs: list[str] | None, text: str) -> None:
    spec = get(op)
    with pytest.raises(ops.KernelError, match=text):
        compute(spec, as_arrays(spec, inputs), full_attrs(spec, attrs), outputs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("FlashAttentionScore", {"head_num": HUGE, "input_layout": "BSH"}),
        ("IncreFlashAttention", {"num_heads": HUGE, "input_layout": "BSH"}),
    ],
)
def test_any_number_of_heads_without_size(op: str, attrs: dict[str, Any]) -> None:
    inputs = NOTHING | {"query": np.zeros((1, 1, 0), np.float32)}
    assert ops.run(op, inputs, attrs, ["attention_out"])["attention_out"].shape == (1, 1, 0)


@pytest.mark.usefixtures("isa")
def test_more_tokens_than_an_int32_has_room_for_their_integers() -> None:
    """With an int8 query: 140,000 products of 127 and 127 are more than 2^31."""
    length = 140_000
    inputs = {
        "query": np.zeros((1, 1, 1), np.int8),
        "key": np.zeros((1, length, 1), np.int8),
        "value": np.full((1, length, 1), 127, np.int8),
        "dequant_scale1": np.ones(1, np.float32),
        "quant_scale1": np.full(1, 127.0, np.float32),
        "dequant_scale2": np.ones(1, np.float32),
    }
    found = ops.run("IncreFlashAttention", inputs, {"num_heads": 1, "input_layout": "BSH"})["attention_out"]
    np.testing.assert_allclose(found.astype(np.float64), 127.0 * 127.0, rtol=2.0**-10)
