"""Good nodes of the sparse family, at sizes that every product takes, and what to change in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_compiler.op_registry import NodeView, TensorInfo

from .nodes import constant, tensor

INT64_MAX = 2**63 - 1
Changes = Mapping[str, TensorInfo | None] | None

B, S1, S2, N1, D, DR, K = 2, 16, 4096, 64, 512, 64, 2048
NI, DI = 64, 128
HALF, FLOAT, INT32 = "DT_FLOAT16", "DT_FLOAT", "DT_INT32"


def _tokens(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((B * S1,), (B * S2,)) if layout == "TND" else ((B, S1), (B, S2))


def _ends(names: tuple[str, str], layout: str, dtype: str) -> dict[str, TensorInfo | None]:
    if layout != "TND":
        return {}
    return {names[0]: constant((S1, 2 * S1), dtype), names[1]: constant((S2, 2 * S2), dtype)}


def _statistics(layout: str) -> TensorInfo:
    return tensor((1, B * S1, N1) if layout == "TND" else (B, 1, S1, N1), FLOAT)


def _node(
    op: str,
    tensors: Mapping[str, TensorInfo | None],
    attrs: Mapping[str, Any],
    inputs: Changes,
    changes: Mapping[str, Any] | None,
    outputs: Mapping[str, TensorInfo] | None,
) -> NodeView:
    given = {name: info for name, info in {**tensors, **(inputs or {})}.items() if info is not None}
    kept = {name: value for name, value in {**attrs, **(changes or {})}.items() if value is not None}
    return NodeView(op, "node", given, outputs or {}, kept)


def attention(
    inputs: Changes = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BSND",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = HALF,
) -> NodeView:
    q, k = _tokens(layout)
    tensors = {
        "query": tensor((*q, N1, D), dtype),
        "key": tensor((*k, 1, D), dtype),
        "value": tensor((*k, 1, D), dtype),
        "sparse_indices": tensor((*q, 1, K), INT32),
        "query_rope": tensor((*q, N1, DR), dtype),
        "key_rope": tensor((*k, 1, DR), dtype),
        **_ends(("actual_seq_lengths_query", "actual_seq_lengths_kv"), layout, INT32),
    }
    settings = {"scale_value": 0.04, "layout_query": layout, "layout_kv": layout, "attention_mode": 2}
    return _node("SparseFlashAttention", tensors, settings, inputs, attrs, outputs)


def attention_grad(
    inputs: Changes = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BSND",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = HALF,
) -> NodeView:
    q, _ = _tokens(layout)
    tensors = {
        **attention(layout=layout, dtype=dtype).inputs,
        "d_out": tensor((*q, N1, D), dtype),
        "out": tensor((*q, N1, D), dtype),
        "softmax_max": _statistics(layout),
        "softmax_sum": _statistics(layout),
    }
    settings = {"scale_value": 0.04, "sparse_block_size": 1, "layout": layout}
    return _node("SparseFlashAttentionGrad", tensors, settings, inputs, attrs, outputs)  # type: ignore[arg-type]


def indexer(
    inputs: Changes = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BSND",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = HALF,
) -> NodeView:
    q, k = _tokens(layout)
    tensors = {
        "query": tensor((*q, NI, DI), dtype),
        "key": tensor((*k, 1, DI), dtype),
        "weights": tensor((*q, NI), dtype),
        **_ends(("actual_seq_lengths_query", "actual_seq_lengths_key"), layout, INT32),
    }
    return _node("LightningIndexer", tensors, {"layout_query": layout, "layout_key": layout}, inputs, attrs, outputs)


def indexer_grad(
    inputs: Changes = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BSND",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = HALF,
) -> NodeView:
    q, _ = _tokens(layout)
    tensors = {
        **indexer(layout=layout, dtype=dtype).inputs,
        "dy": tensor((*q, K), dtype),
        "sparse_indices": tensor((*q, 1, K), INT32),
    }
    return _node("LightningIndexerGrad", tensors, {"headNum": NI, "layout": layout}, inputs, attrs, outputs)  # type: ignore[arg-type]


def indexer_loss(
    inputs: Changes = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BSND",
    outputs: Mapping[str, TensorInfo] | None = None,
    dtype: str = HALF,
) -> NodeView:
    q, k = _tokens(layout)
    tensors = {
        "query": tensor((*q, N1, D), dtype),
        "key": tensor((*k, 1, D), dtype),
        "query_index": tensor((*q, NI, DI), dtype),
        "key_index": tensor((*k, 1, DI), dtype),
        "weight": tensor((*q, NI), dtype),
        "sparse_indices": tensor((*q, 1, K), INT32),
        "softmax_max": _statistics(layout),
        "softmax_sum": _statistics(layout),
        "query_rope": tensor((*q, N1, DR), dtype),
        "key_rope": tensor((*k, 1, DR), dtype),
        **_ends(("actual_seq_lengths_query", "actual_seq_lengths_key"), layout, "DT_INT64"),
    }
    settings = {"scale_value": 0.04, "layout": layout}
    return _node("SparseLightningIndexerGradKLLoss", tensors, settings, inputs, attrs, outputs)
