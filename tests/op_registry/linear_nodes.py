"""Good nodes of CANN's operators of linear attention, and what to change in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_compiler.op_registry import NodeView, TensorInfo

from .nodes import constant, tensor

BF16, FLOAT, INT32 = "DT_BF16", "DT_FLOAT", "DT_INT32"
Changes = Mapping[str, TensorInfo | None] | None

T, NK, NV, DK, DV, B = 12, 4, 8, 32, 64, 2
S, DIM, K, LINES, LENGTH = 5, 128, 3, 6, 8


def whole(*shape: int) -> TensorInfo:
    return tensor(shape, INT32)


def _node(op_type: str, good: Mapping[str, TensorInfo], inputs: Changes, attrs: Mapping[str, Any] | None) -> NodeView:
    """An input that is changed to None is left out."""
    present = {name: info for name, info in (dict(good) | dict(inputs or {})).items() if info is not None}
    return NodeView(op_type, "node", present, {}, dict(attrs or {}))


def _tokens() -> dict[str, TensorInfo]:
    return {
        "query": tensor((T, NK, DK), BF16),
        "key": tensor((T, NK, DK), BF16),
        "value": tensor((T, NV, DV), BF16),
        "beta": tensor((T, NV), BF16),
        "g": tensor((T, NV), FLOAT),
    }


def chunk(inputs: Changes = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    lengths = {"actual_seq_lengths": constant((4, 8), INT32)}
    state = {"initial_state": tensor((B, NV, DV, DK), BF16)}
    return _node("ChunkGatedDeltaRule", _tokens() | lengths | state, inputs, attrs)


def recurrent(inputs: Changes = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    good = _tokens() | {
        "state": tensor((T + 1, NV, DV, DK), BF16),
        "actual_seq_lengths": constant((4, 8), INT32),
        "ssm_state_indices": constant(range(1, T + 1), INT32),
    }
    return _node("RecurrentGatedDeltaRule", good, inputs, attrs)


def _convolution(k: int) -> dict[str, TensorInfo]:
    return {
        "x": tensor((B, S, DIM)),
        "weight": tensor((k, DIM)),
        "conv_states": tensor((LINES, LENGTH, DIM)),
    }


PACKED = {"x": tensor((T, DIM)), "query_start_loc": constant((0, 4, T), INT32)}
"""The same tokens of two sequences, one behind the other."""


def convolution(inputs: Changes = None, attrs: Mapping[str, Any] | None = None, k: int = 4) -> NodeView:
    return _node("CausalConv1d", _convolution(k), inputs, attrs)


def fused(inputs: Changes = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    return _node("FusedCausalConv1d", _convolution(K), inputs, attrs)


def cached(inputs: Changes = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    """A FusedCausalConv1d with prefix caching."""
    good = {
        "cache_indices": constant([[0, 1, 2], [3, 4, 5]], INT32),
        "num_computed_tokens": constant((2, 2), INT32),
        "block_idx_first_scheduled_token": constant((1, 1), INT32),
        "block_idx_last_scheduled_token": constant((2, 2), INT32),
        "initial_state_idx": constant((0, 0), INT32),
    }
    return fused(good | dict(inputs or {}), {"block_size": 4} | dict(attrs or {}))
