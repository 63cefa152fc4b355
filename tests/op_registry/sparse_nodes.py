"""Good nodes of the sparse family, at sizes that every product takes, and what to change in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

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


Parts = tuple[Mapping[str, TensorInfo | None], Mapping[str, Any]]


class Builder(Protocol):
    """Makes a node; an input or attribute that is changed to None is left out."""

    def __call__(
        self,
        inputs: Changes = None,
        attrs: Mapping[str, Any] | None = None,
        layout: str = "BSND",
        outputs: Mapping[str, TensorInfo] | None = None,
        dtype: str = HALF,
    ) -> NodeView: ...


def _builder(op: str, parts: Callable[[str, str], Parts]) -> Builder:
    """`parts` gives the inputs and attributes of a good node in a layout and a type."""

    def build(
        inputs: Changes = None,
        attrs: Mapping[str, Any] | None = None,
        layout: str = "BSND",
        outputs: Mapping[str, TensorInfo] | None = None,
        dtype: str = HALF,
    ) -> NodeView:
        tensors, settings = parts(layout, dtype)
        given = {name: info for name, info in {**tensors, **(inputs or {})}.items() if info is not None}
        kept = {name: value for name, value in {**settings, **(attrs or {})}.items() if value is not None}
        return NodeView(op, "node", given, outputs or {}, kept)

    return build


def _rope(layout: str, dtype: str) -> Mapping[str, TensorInfo | None]:
    q, k = _tokens(layout)
    return {"query_rope": tensor((*q, N1, DR), dtype), "key_rope": tensor((*k, 1, DR), dtype)}


def _selected(layout: str) -> Mapping[str, TensorInfo | None]:
    return {"sparse_indices": tensor((*_tokens(layout)[0], 1, K), INT32)}


def _both_statistics(layout: str) -> Mapping[str, TensorInfo | None]:
    return {name: _statistics(layout) for name in ("softmax_max", "softmax_sum")}


def _attention(layout: str, dtype: str) -> Parts:
    q, k = _tokens(layout)
    tensors = {
        "query": tensor((*q, N1, D), dtype),
        "key": tensor((*k, 1, D), dtype),
        "value": tensor((*k, 1, D), dtype),
        **_selected(layout),
        **_rope(layout, dtype),
        **_ends(("actual_seq_lengths_query", "actual_seq_lengths_kv"), layout, INT32),
    }
    return tensors, {"scale_value": 0.04, "layout_query": layout, "layout_kv": layout, "attention_mode": 2}


def _attention_grad(layout: str, dtype: str) -> Parts:
    out = tensor((*_tokens(layout)[0], N1, D), dtype)
    tensors = {**_attention(layout, dtype)[0], "d_out": out, "out": out, **_both_statistics(layout)}
    return tensors, {"scale_value": 0.04, "sparse_block_size": 1, "layout": layout}


def _indexer(layout: str, dtype: str) -> Parts:
    q, k = _tokens(layout)
    tensors = {
        "query": tensor((*q, NI, DI), dtype),
        "key": tensor((*k, 1, DI), dtype),
        "weights": tensor((*q, NI), dtype),
        **_ends(("actual_seq_lengths_query", "actual_seq_lengths_key"), layout, INT32),
    }
    return tensors, {"layout_query": layout, "layout_key": layout}


def _indexer_grad(layout: str, dtype: str) -> Parts:
    dy = tensor((*_tokens(layout)[0], K), dtype)
    return {**_indexer(layout, dtype)[0], "dy": dy, **_selected(layout)}, {"headNum": NI, "layout": layout}


def _indexer_loss(layout: str, dtype: str) -> Parts:
    q, k = _tokens(layout)
    tensors = {
        "query": tensor((*q, N1, D), dtype),
        "key": tensor((*k, 1, D), dtype),
        "query_index": tensor((*q, NI, DI), dtype),
        "key_index": tensor((*k, 1, DI), dtype),
        "weight": tensor((*q, NI), dtype),
        **_selected(layout),
        **_both_statistics(layout),
        **_rope(layout, dtype),
        **_ends(("actual_seq_lengths_query", "actual_seq_lengths_key"), layout, "DT_INT64"),
    }
    return tensors, {"scale_value": 0.04, "layout": layout}


attention = _builder("SparseFlashAttention", _attention)
attention_grad = _builder("SparseFlashAttentionGrad", _attention_grad)
indexer = _builder("LightningIndexer", _indexer)
indexer_grad = _builder("LightningIndexerGrad", _indexer_grad)
indexer_loss = _builder("SparseLightningIndexerGradKLLoss", _indexer_loss)
