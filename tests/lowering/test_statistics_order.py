"""What aclnn calls softmax_in_layout, and what the operator does."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler import ops

ENDS = np.array([3, 3, 8])


def _gradients(order: str) -> dict[str, np.ndarray]:
    """Forward and backward of packed sequences with the statistics handed over in the order aclnn wants them."""
    rng = np.random.default_rng(0)
    query, key, value, dy = (rng.standard_normal((8, 2, 8), np.float32) for _ in range(4))
    inputs = {"query": query, "key": key, "value": value, "actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}
    attrs = {"head_num": 2, "input_layout": "TND", "scale_value": 0.3}
    forward = ops.run("FlashAttentionScore", inputs, attrs | {"softmax_out_layout": order})
    given = {name: ops.statistics_from_aclnn(forward[name], order) for name in ("softmax_max", "softmax_sum")} | {
        "dy": dy,
        "attention_in": forward["attention_out"],
    }
    return ops.run(
        "FlashAttentionScoreGrad", inputs | given, attrs | {"softmax_in_layout": order}, outputs=["dq", "dk", "dv"]
    )


def test_both_orders_give_the_same_gradients() -> None:
    blocks, true = _gradients(""), _gradients("same_as_input")
    for name, wanted in blocks.items():
        np.testing.assert_array_equal(true[name], wanted)
        assert np.abs(wanted).max() > 0.1


def test_only_packed_sequences_have_an_order() -> None:
    plain = np.zeros((2, 4, 6, 8), np.float32)
    assert ops.statistics_from_aclnn(plain, "same_as_input", "BNSD") is plain
    with pytest.raises(ValueError, match="expected '' or 'same_as_input'"):
        ops.statistics_from_aclnn(plain, "TND")
    with pytest.raises(ValueError, match=r"expected \[T,N,8\]"):
        ops.statistics_from_aclnn(plain, "same_as_input")
