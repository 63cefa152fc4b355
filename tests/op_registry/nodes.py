"""Nodes for the tests: a good one of each operator and layout, and what to change in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa_compiler.op_registry import NodeView, TensorInfo

B, N1, N2, S1, S2, D, DV = 2, 8, 4, 16, 24, 64, 32
Q_ENDS, KV_ENDS = (10, 10, 16), (12, 12, 24)

SHAPES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "BSH": ((B, S1, N1 * D), (B, S2, N2 * D), (B, S2, N2 * DV)),
    "SBH": ((S1, B, N1 * D), (S2, B, N2 * D), (S2, B, N2 * DV)),
    "BSND": ((B, S1, N1, D), (B, S2, N2, D), (B, S2, N2, DV)),
    "BNSD": ((B, N1, S1, D), (B, N2, S2, D), (B, N2, S2, DV)),
    "TND": ((S1, N1, D), (S2, N2, D), (S2, N2, DV)),
}
"""Query, key and value of each layout."""


def tensor(shape: tuple[Any, ...] | None, dtype: str = "DT_FLOAT16") -> TensorInfo:
    return TensorInfo(dtype, shape)


def constant(values: Any, dtype: str = "DT_INT64") -> TensorInfo:
    array = np.asarray(values)
    return TensorInfo(dtype, array.shape, array)


def mask(*shape: Any) -> TensorInfo:
    return TensorInfo("DT_BOOL", shape)


def forward(
    inputs: Mapping[str, TensorInfo | None] | None = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BNSD",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = "DT_FLOAT16",
) -> NodeView:
    """A good FlashAttentionScore, with changes; an input or attribute changed to None is left out."""
    query, key, value = (tensor(shape, dtype) for shape in SHAPES[layout])
    tensors: dict[str, TensorInfo | None] = {"query": query, "key": key, "value": value}
    if layout == "TND":
        tensors |= {"actual_seq_qlen": constant(Q_ENDS), "actual_seq_kvlen": constant(KV_ENDS)}
    return _node("FlashAttentionScore", tensors, layout, inputs, attrs, outputs)


def backward(
    inputs: Mapping[str, TensorInfo | None] | None = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BNSD",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = "DT_FLOAT16",
) -> NodeView:
    """A good FlashAttentionScoreGrad, with changes."""
    query, key, value = (tensor(shape, dtype) for shape in SHAPES[layout])
    shape = query.shape or ()
    out = tensor((*shape[:-1], N1 * DV if layout in ("BSH", "SBH") else DV), dtype)
    statistics = tensor((S1, N1, 8) if layout == "TND" else (B, N1, S1, 8), "DT_FLOAT")
    tensors: dict[str, TensorInfo | None] = {
        "query": query,
        "key": key,
        "value": value,
        "dy": out,
        "attention_in": out,
        "softmax_max": statistics,
        "softmax_sum": statistics,
    }
    if layout == "TND":
        tensors |= {"actual_seq_qlen": constant(Q_ENDS), "actual_seq_kvlen": constant(KV_ENDS)}
    return _node("FlashAttentionScoreGrad", tensors, layout, inputs, attrs, outputs)


def _node(
    op_type: str,
    tensors: dict[str, TensorInfo | None],
    layout: str,
    inputs: Mapping[str, TensorInfo | None] | None,
    attrs: Mapping[str, Any] | None,
    outputs: Mapping[str, TensorInfo] | None,
) -> NodeView:
    present = {name: info for name, info in (tensors | dict(inputs or {})).items() if info is not None}
    values = {"head_num": N1, "input_layout": layout, "scale_value": 0.125} | dict(attrs or {})
    return NodeView(op_type, "attention", present, outputs or {}, {k: v for k, v in values.items() if v is not None})
