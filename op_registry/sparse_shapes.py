"""Sizes of the sparse family's tensors, and the shapes of its outputs.

| layout | query | key, value | sparse_indices | statistics |
|---|---|---|---|---|
| BSND | B,S1,N1,D | B,S2,N2,D | B,S1,N2,K | B,N2,S1,N1/N2 |
| TND | T1,N1,D | T2,N2,D | T1,N2,K | N2,T1,N1/N2 |
| PA_BSND (key side only) | | blocks,block_size,N2,D | | none |

The statistics have one column for each query head of a group and no trailing 8. Sources: the operator documents of
SparseFlashAttentionGrad and SparseLightningIndexerGradKLLoss, and the operators' own shape inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.geometry import Shape, divide, same, shape_of
from fa_compiler.op_registry.node import Dim, TensorInfo

Inputs = Mapping[str, TensorInfo]

PAGED = "PA_BSND"

QUERY_LAYOUTS = {"BSND": 4, "TND": 3}
"""Layouts of the query side, and the rank of query in each."""

KEY_LAYOUTS = {**QUERY_LAYOUTS, PAGED: 4}
"""Layouts of the key side."""


@dataclass(frozen=True)
class SparseSizes:
    """Sizes of a call, None where unknown. `queries` are the leading dimensions of everything that has one row for a
    query token, [B,S1] or [T1]; `keys` those of key, [B,S2], [T2] or [blocks, block size]."""

    queries: Shape
    keys: Shape
    n1: Dim
    n2: Dim
    d: Dim

    @property
    def statistics(self) -> Shape:
        """Shape of softmax_max and softmax_sum."""
        group: Dim = 1 if same(self.n1, self.n2) else divide(self.n1, self.n2)
        return (*self.queries[:-1], self.n2, self.queries[-1], group)


def sparse_sizes(
    query_layout: str, key_layout: str, query: TensorInfo | None, key: TensorInfo | None
) -> SparseSizes | None:
    """The sizes, or None where a layout is unknown."""
    if query_layout not in QUERY_LAYOUTS or key_layout not in KEY_LAYOUTS:
        return None
    q = shape_of(query, QUERY_LAYOUTS[query_layout])
    k = shape_of(key, KEY_LAYOUTS[key_layout])
    return SparseSizes(q[:-2], k[:-2], q[-2], k[-2], q[-1])


def _sizes(
    inputs: Inputs, query_layout: str, key_layout: str, rows: tuple[str, ...], keys: tuple[str, ...]
) -> SparseSizes:
    for layout, known, names in ((query_layout, QUERY_LAYOUTS, rows), (key_layout, KEY_LAYOUTS, keys)):
        if layout not in known:
            raise NodeError(f"the layout is {layout!r}, expected one of {', '.join(known)}")
        for name in names:
            shape = inputs[name].shape if name in inputs else None
            if shape is not None and len(shape) != known[layout]:
                raise NodeError(f"{name} has rank {len(shape)}, expected {known[layout]} for the layout {layout}")
    sizes = sparse_sizes(query_layout, key_layout, inputs[rows[0]], inputs[keys[0]])
    assert sizes is not None
    return sizes


def _attention(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """attention_out as query with the head size of value; statistics if return_softmax_lse, else empty, [0]."""
    query, layout = inputs["query"], attrs["layout_query"]
    sizes = _sizes(inputs, layout, attrs["layout_kv"], ("query",), ("key", "value"))
    width = shape_of(inputs["value"], KEY_LAYOUTS[attrs["layout_kv"]])[-1]
    out = None if query.shape is None else (*query.shape[:-1], width)
    statistics: Shape = sizes.statistics if attrs["return_softmax_lse"] else (0,)
    return {
        "attention_out": TensorInfo(query.dtype, out),
        "softmax_max": TensorInfo("DT_FLOAT", statistics),
        "softmax_sum": TensorInfo("DT_FLOAT", statistics),
    }


def _attention_grad(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Each gradient has its input's shape; without that input it is empty, [0]."""
    _sizes(inputs, attrs["layout"], attrs["layout"], ("query",), ("key", "value"))
    names = {
        "d_query": "query",
        "d_key": "key",
        "d_value": "value",
        "d_query_rope": "query_rope",
        "d_key_rope": "key_rope",
    }
    dtype = inputs["query"].dtype
    found = {name: TensorInfo(dtype, inputs[of].shape if of in inputs else (0,)) for name, of in names.items()}
    if "sinks" in inputs:
        found["d_sinks"] = TensorInfo("DT_FLOAT", inputs["sinks"].shape)
    return found


def _indexer(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """sparse_count indices for each query token; their scores if return_values, else empty, [0]."""
    sizes = _sizes(inputs, attrs["layout_query"], attrs["layout_key"], ("query",), ("key",))
    selected = (*sizes.queries, sizes.n2, attrs["sparse_count"])
    return {
        "sparse_indices": TensorInfo("DT_INT32", selected),
        "sparse_values": TensorInfo(inputs["query"].dtype, selected if attrs["return_values"] else (0,)),
    }


def _indexer_grad(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Each gradient is like its input."""
    _sizes(inputs, attrs["layout"], attrs["layout"], ("query",), ("key",))
    return {
        gradient: TensorInfo(inputs[name].dtype, inputs[name].shape) if name in inputs else TensorInfo("")
        for gradient, name in (("dq", "query"), ("dk", "key"), ("dweights", "weights"))
    }


def _indexer_loss(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Each gradient is like its input; the loss is one number, [1]."""
    _sizes(inputs, attrs["layout"], attrs["layout"], ("query", "query_index"), ("key", "key_index"))
    found = {
        f"d_{name}": TensorInfo(inputs[name].dtype, inputs[name].shape) if name in inputs else TensorInfo("")
        for name in ("query_index", "key_index", "weight")
    }
    return {**found, "loss": TensorInfo("DT_FLOAT", (1,))}


RULES: Mapping[str, Callable[[Inputs, Mapping[str, Any]], dict[str, TensorInfo]]] = {
    "SparseFlashAttention": _attention,
    "SparseFlashAttentionGrad": _attention_grad,
    "LightningIndexer": _indexer,
    "LightningIndexerGrad": _indexer_grad,
    "SparseLightningIndexerGradKLLoss": _indexer_loss,
}
