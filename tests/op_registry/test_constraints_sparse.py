"""The constraints of the sparse family: each row breaks exactly one of an otherwise good node, with the code and the
extension it has; good nodes, shapes, and the samples of the operator documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, extensions_used, infer, names, operator, verify

from .nodes import constant, tensor
from .sparse_nodes import (
    DI,
    DR,
    INT32,
    INT64_MAX,
    N1,
    NI,
    S1,
    S2,
    B,
    D,
    K,
    attention,
    attention_grad,
    indexer,
    indexer_grad,
    indexer_loss,
)

FLOAT, BF16 = "DT_FLOAT", "DT_BF16"
SIZES, HEADS, FLOATS = "EXT-SPARSE-SIZES", "EXT-SPARSE-HEADS", "EXT-SPARSE-FLOAT"
BUILDERS: tuple[Callable[..., NodeView], ...] = (attention, attention_grad, indexer, indexer_grad, indexer_loss)
GOOD = [
    (make(layout=layout, dtype=dtype))
    for make in BUILDERS
    for layout in ("BSND", "TND")
    for dtype in ("DT_FLOAT16", BF16)
]
ENDS = constant((S1, 2 * S1), INT32)
TOO_LONG = (128 << 10) + 1


def paged(attrs: dict[str, Any] | None = None, page: int = 128, **changes: Any) -> NodeView:
    inputs = {
        "key": tensor((64, page, 1, D)),
        "value": tensor((64, page, 1, D)),
        "key_rope": tensor((64, page, 1, DR)),
        "block_table": tensor((B, 32), INT32),
        "actual_seq_lengths_kv": tensor((B,), INT32),
    }
    return attention(inputs | changes, {"layout_kv": "PA_BSND", **(attrs or {})})


def paged_index(attrs: dict[str, Any] | None = None, page: int = 128, **changes: Any) -> NodeView:
    inputs = {
        "key": tensor((64, page, 1, DI)),
        "block_table": tensor((B, 32), INT32),
        "actual_seq_lengths_key": tensor((B,), INT32),
    }
    return indexer(inputs | changes, {"layout_key": "PA_BSND", **(attrs or {})})


def heads(make: Callable[..., NodeView], count: int, **more: Any) -> NodeView:
    """With another number of heads of attention."""
    changes = {"query": tensor((B, S1, count, D)), "query_rope": tensor((B, S1, count, DR))}
    if make is attention_grad:
        changes |= {name: tensor((B, S1, count, D)) for name in ("d_out", "out")}
    if make is not attention:
        changes |= {name: tensor((B, 1, S1, count), FLOAT) for name in ("softmax_max", "softmax_sum")}
    return make(changes | more)


def width(make: Callable[..., NodeView], size: int) -> NodeView:
    """With another head size of query and key."""
    return make({"query": tensor((B, S1, N1, size)), "key": tensor((B, S2, 1, size))})


def key_heads(make: Callable[..., NodeView], count: int, indices: int, statistics: bool) -> NodeView:
    changes = {
        "key": tensor((B, S2, count, D)),
        "value": tensor((B, S2, count, D)),
        "key_rope": tensor((B, S2, count, DR)),
        "sparse_indices": tensor((B, S1, indices, K), INT32),
    }
    if statistics:
        changes |= {name: tensor((B, count, S1, N1 // count), FLOAT) for name in ("softmax_max", "softmax_sum")}
    return make(changes)


def rope(make: Callable[..., NodeView], size: int) -> NodeView:
    return make({"query_rope": tensor((B, S1, N1, size)), "key_rope": tensor((B, S2, 1, size))})


def index_heads(make: Callable[..., NodeView], count: int, **attrs: Any) -> NodeView:
    weight, query = ("weight", "query_index") if make is indexer_loss else ("weights", "query")
    return make({query: tensor((B, S1, count, DI)), weight: tensor((B, S1, count))}, attrs)


def batched(make: Callable[..., NodeView], batch: int) -> NodeView:
    """With another batch, in every tensor."""
    kept = {name: info for name, info in make().inputs.items() if isinstance(info, TensorInfo) and info.shape}
    return make({name: replace(info, shape=(batch, *(info.shape or ())[1:])) for name, info in kept.items()})


def listed(make: Callable[..., NodeView], count: int) -> NodeView:
    changes = {"sparse_indices": tensor((B, S1, 1, count), INT32)}
    return make(changes | ({"dy": tensor((B, S1, count))} if make is indexer_grad else {}))


Row = tuple[str, NodeView, str, int, str | None]
I, N = 161002, 161001  # noqa: E741  (the codes' names in the constraints list)

BROKEN: list[Row] = [
    # SparseFlashAttention
    ("SFA.1", attention({"key": tensor((B, S2, 1, D), BF16)}), "key", I, None),
    ("SFA.1", attention(dtype="DT_INT8"), "query", I, None),
    ("SFA.1", attention(dtype=FLOAT), "query", I, FLOATS),
    ("SFA.2", attention(attrs={"layout_query": "BNSD"}), "layout_query", I, None),
    ("SFA.2", attention(attrs={"layout_kv": "SBND"}), "layout_kv", I, None),
    ("SFA.2", attention({"value": tensor((B * S2, 1, D))}), "value", I, None),
    (
        "SFA.2",
        attention(
            {"key": tensor((S2, 1, D)), "value": tensor((S2, 1, D)), "key_rope": tensor((S2, 1, DR))},
            {"layout_kv": "TND"},
        ),
        "layout_kv",
        I,
        None,
    ),
    (
        "SFA.2",
        attention({name: tensor((3, S2, 1, size)) for name, size in (("key", D), ("value", D), ("key_rope", DR))}),
        "key",
        I,
        None,
    ),
    ("SFA.3", heads(attention, 48), "query", I, SIZES),
    ("SFA.3", heads(attention, 256), "query", I, SIZES),
    ("SFA.3", key_heads(attention, 2, 2, False), "key", I, HEADS),
    ("SFA.4", attention({"key": tensor((B, S2, 1, 256))}), "key", I, None),
    ("SFA.4", width(attention, 256), "query", I, SIZES),
    ("SFA.4", attention({"value": tensor((B, S2, 1, 128))}), "value", I, SIZES),
    ("SFA.4", attention({"value": tensor((B, S2 - 1, 1, D))}), "value", I, None),
    ("SFA.5", attention(attrs={"attention_mode": None}), "attention_mode", I, None),
    ("SFA.6", attention({"key_rope": None}), "key_rope", N, None),
    ("SFA.6", attention({"key_rope": tensor((B, S2, 1, 32))}), "key_rope", I, None),
    ("SFA.6", rope(attention, 32), "query_rope", I, SIZES),
    ("SFA.7", attention(attrs={"sparse_mode": 2}), "sparse_mode", I, None),
    ("SFA.7", attention(attrs={"pre_tokens": 65536}), "pre_tokens", I, None),
    ("SFA.7", attention(attrs={"next_tokens": 0}), "next_tokens", I, None),
    ("SFA.8", attention(attrs={"sparse_block_size": 3}), "sparse_block_size", I, SIZES),
    ("SFA.8", attention(attrs={"sparse_block_size": 0}), "sparse_block_size", I, None),
    ("SFA.8", paged({"sparse_block_size": 32}, page=48), "sparse_block_size", I, SIZES),
    ("SFA.9", attention({"sparse_indices": tensor((B, S1, 1, K), "DT_INT64")}), "sparse_indices", I, None),
    ("SFA.9", attention({"sparse_indices": tensor((B, S1, K), INT32)}), "sparse_indices", I, None),
    ("SFA.9", attention({"sparse_indices": tensor((B, S1, 2, K), INT32)}), "sparse_indices", I, None),
    ("SFA.10", attention({"actual_seq_lengths_query": None}, layout="TND"), "actual_seq_lengths_query", N, None),
    ("SFA.10", attention({"actual_seq_lengths_kv": None}, layout="TND"), "actual_seq_lengths_kv", N, None),
    (
        "SFA.10",
        attention({"actual_seq_lengths_query": constant((20, 10), INT32)}, layout="TND"),
        "actual_seq_lengths_query",
        I,
        None,
    ),
    ("SFA.10", attention({"actual_seq_lengths_kv": constant((S2,), INT32)}), "actual_seq_lengths_kv", I, None),
    ("SFA.10", attention({"actual_seq_lengths_kv": constant((S2, S2 + 1), INT32)}), "actual_seq_lengths_kv", I, None),
    ("SFA.10", paged(actual_seq_lengths_kv=None), "actual_seq_lengths_kv", N, None),
    ("G0", paged(actual_seq_lengths_kv=tensor((B,), "DT_INT64")), "actual_seq_lengths_kv", I, None),
    ("SFA.10", attention({"actual_seq_lengths_query": constant((S1,), INT32)}), "actual_seq_lengths_query", I, None),
    ("SFA.11", paged(block_table=None), "block_table", N, None),
    ("SFA.11", paged(block_table=tensor((B + 1, 32), INT32)), "block_table", I, None),
    ("G0", paged(block_table=tensor((B, 32), "DT_INT64")), "block_table", I, None),
    ("SFA.11", attention({"block_table": tensor((B, 32), INT32)}), "block_table", I, None),
    ("SFA.12", paged(page=24), "key", I, SIZES),
    ("SFA.12", paged(page=2048), "key", I, SIZES),
    ("SFA.13", paged({"return_softmax_lse": True}), "return_softmax_lse", I, None),
    ("SFA.14", attention({"sinks": tensor((N1 + 1,), FLOAT)}), "sinks", I, None),
    ("SFA.14", attention({"sinks": tensor((N1,), FLOAT)}), "sinks", I, None),
    # SparseFlashAttentionGrad
    ("SFAG.1", attention_grad({"d_out": tensor((B, S1, N1, D), BF16)}), "d_out", I, None),
    ("SFAG.1", attention_grad({"sparse_indices": tensor((B, S1, 1, K), "DT_INT64")}), "sparse_indices", I, None),
    (
        "SFAG.1",
        attention_grad({"actual_seq_lengths_query": constant((S1, 2 * S1))}, layout="TND"),
        "actual_seq_lengths_query",
        I,
        None,
    ),
    ("SFAG.1", attention_grad({"softmax_max": tensor((B, 1, S1, N1))}), "softmax_max", I, None),
    ("SFAG.1", attention_grad(outputs={"d_query": tensor((B, S1, N1, D), BF16)}), "d_query", I, None),
    ("SFAG.1", attention_grad(dtype=FLOAT), "query", I, FLOATS),
    ("SFAG.2", attention_grad(attrs={"layout": "PA_BSND"}), "layout", I, None),
    ("SFAG.2", attention_grad({"d_out": tensor((S1, N1, D))}), "d_out", I, None),
    ("SFAG.3", heads(attention_grad, 12), "query", I, SIZES),
    ("SFAG.3", key_heads(attention_grad, 2, 2, True), "key", I, HEADS),
    ("SFAG.4", width(attention_grad, 128), "query", I, SIZES),
    (
        "SFAG.4",
        attention_grad(
            {"value": tensor((B, S2, 1, 128))} | {name: tensor((B, S1, N1, 128)) for name in ("d_out", "out")}
        ),
        "value",
        I,
        SIZES,
    ),
    ("SFAG.4", attention_grad({"out": tensor((B, S1, N1, D - 1))}), "out", I, None),
    ("SFAG.4", attention_grad({"query_rope": None}), "query_rope", N, None),
    ("SFAG.4", rope(attention_grad, 32), "query_rope", I, SIZES),
    ("SFAG.5", attention_grad({"sparse_indices": tensor((B, S1, 2, K), INT32)}), "sparse_indices", I, None),
    ("SFAG.5", listed(attention_grad, 1024), "sparse_indices", I, SIZES),
    ("SFAG.6", attention_grad(attrs={"sparse_block_size": 4}), "sparse_block_size", I, SIZES),
    ("SFAG.6", attention_grad(attrs={"sparse_block_size": 128}), "sparse_block_size", I, SIZES),
    ("SFAG.6", attention_grad(attrs={"sparse_block_size": 0}), "sparse_block_size", I, None),
    ("SFAG.7", attention_grad(attrs={"sparse_mode": 4}), "sparse_mode", I, None),
    ("SFAG.7", attention_grad(attrs={"pre_tokens": INT64_MAX}), "pre_tokens", I, None),
    ("SFAG.7", attention_grad(attrs={"next_tokens": 0}), "next_tokens", I, None),
    ("SFAG.8", attention_grad({"actual_seq_lengths_query": None}, layout="TND"), "actual_seq_lengths_query", N, None),
    ("SFAG.8", attention_grad({"actual_seq_lengths_kv": None}, layout="TND"), "actual_seq_lengths_kv", N, None),
    (
        "SFAG.8",
        attention_grad({"actual_seq_lengths_kv": constant((S2, 2 * S2 + 1), INT32)}, layout="TND"),
        "actual_seq_lengths_kv",
        I,
        None,
    ),
    (
        "SFAG.8",
        attention_grad(
            {name: tensor((257,), INT32) for name in ("actual_seq_lengths_query", "actual_seq_lengths_kv")},
            layout="TND",
        ),
        "actual_seq_lengths_query",
        I,
        SIZES,
    ),
    ("SFAG.8", batched(attention_grad, 257), "query", I, SIZES),
    (
        "SFAG.8",
        attention_grad(
            {name: tensor((B, TOO_LONG, 1, size)) for name, size in (("key", D), ("value", D), ("key_rope", DR))}
        ),
        "key",
        I,
        SIZES,
    ),
    (
        "SFAG.8",
        attention_grad({"actual_seq_lengths_kv": constant((S2,), INT32)}, layout="TND"),
        "actual_seq_lengths_kv",
        I,
        None,
    ),
    ("SFAG.9", attention_grad({"softmax_sum": tensor((B, N1, S1, 8), FLOAT)}), "softmax_sum", I, None),
    ("SFAG.9", attention_grad({"softmax_max": tensor((1, S1, N1), FLOAT)}), "softmax_max", I, None),
    (
        "SFAG.10",
        attention_grad({"query_rope": None, "key_rope": None}, outputs={"d_query_rope": tensor((B, S1, N1, DR))}),
        "d_query_rope",
        I,
        None,
    ),
    # LightningIndexer
    ("LI.1", indexer({"weights": tensor((B, S1, NI), BF16)}), "weights", I, None),
    ("LI.1", indexer({"key": tensor((B, S2, 1, DI), BF16)}), "key", I, None),
    ("LI.1", indexer(dtype=FLOAT), "query", I, FLOATS),
    ("LI.2", index_heads(indexer, 32), "query", I, SIZES),
    ("LI.2", indexer({"query": tensor((B, S1, NI, 64)), "key": tensor((B, S2, 1, 64))}), "query", I, SIZES),
    ("LI.2", indexer({"key": tensor((B, S2, 2, DI))}), "key", I, None),
    ("LI.2", indexer({"key": tensor((B, S2, 1, 64))}), "key", I, None),
    ("LI.2", indexer({"weights": tensor((B, S1, NI, 1))}), "weights", I, None),
    ("LI.3", indexer(attrs={"layout_key": "SBND"}), "layout_key", I, None),
    ("LI.3", indexer(attrs={"layout_query": "BNSD"}), "layout_query", I, None),
    ("LI.3", indexer({"key": tensor((S2, 1, DI))}, {"layout_key": "TND"}), "layout_key", I, None),
    ("LI.3", indexer({"key": tensor((S2, 1, DI))}), "key", I, None),
    ("LI.4", indexer(attrs={"sparse_count": 2049}), "sparse_count", I, SIZES),
    ("LI.4", indexer(attrs={"sparse_count": 0}), "sparse_count", I, None),
    ("LI.5", indexer(attrs={"sparse_mode": 1}), "sparse_mode", I, None),
    ("LI.5", indexer(attrs={"next_tokens": 1}), "next_tokens", I, None),
    ("LI.5", indexer(attrs={"pre_tokens": 2147483647}), "pre_tokens", I, None),
    ("LI.6", paged_index({"return_values": True}), "return_values", I, None),
    ("LI.7", paged_index(block_table=None), "block_table", N, None),
    ("LI.7", indexer({"block_table": tensor((B, 32), INT32)}), "block_table", I, None),
    ("LI.7", indexer({"actual_seq_lengths_query": None}, layout="TND"), "actual_seq_lengths_query", N, None),
    ("LI.7", paged_index(actual_seq_lengths_key=None), "actual_seq_lengths_key", N, None),
    ("LI.7", indexer({"actual_seq_lengths_key": tensor((B,), "DT_INT64")}), "actual_seq_lengths_key", I, None),
    ("LI.7", indexer({"actual_seq_lengths_key": None}, layout="TND"), "actual_seq_lengths_key", N, None),
    # LightningIndexerGrad
    ("LIG.1", indexer_grad(attrs={"layout": "SBND"}), "layout", I, None),
    ("LIG.1", indexer_grad({"dy": tensor((B, S1, K), BF16)}), "dy", I, None),
    ("LIG.2", indexer_grad({"query": tensor((B, S1, NI, 64)), "key": tensor((B, S2, 1, 64))}), "query", I, SIZES),
    ("LIG.3", indexer_grad(attrs={"headNum": 32}), "headNum", I, None),
    (
        "LIG.3",
        indexer_grad({"key": tensor((B, S2, 2, DI)), "sparse_indices": tensor((B, S1, 2, K), INT32)}),
        "key",
        I,
        None,
    ),
    ("LIG.3", index_heads(indexer_grad, 32, headNum=32), "query", I, SIZES),
    ("LIG.4", listed(indexer_grad, 1024), "sparse_indices", I, SIZES),
    ("LIG.4", indexer_grad({"dy": tensor((B, S1, NI, DI))}), "dy", I, None),
    ("LIG.5", indexer_grad({"key": tensor((B, 2047, 1, DI))}), "key", I, SIZES),
    ("LIG.5", batched(indexer_grad, 1025), "query", I, SIZES),
    ("LIG.6", indexer_grad(attrs={"sparseMode": 2}), "sparseMode", I, None),
    ("LIG.7", indexer_grad({"actual_seq_lengths_query": ENDS}), "actual_seq_lengths_query", I, None),
    ("LIG.7", indexer_grad({"actual_seq_lengths_query": None}, layout="TND"), "actual_seq_lengths_query", N, None),
    ("LIG.7", indexer_grad({"actual_seq_lengths_key": None}, layout="TND"), "actual_seq_lengths_key", N, None),
    # SparseLightningIndexerGradKLLoss
    ("KL.1", indexer_loss({"key_index": tensor((B, S2, 1, DI), BF16)}), "key_index", I, None),
    ("KL.1", indexer_loss({"weight": tensor((B, S1, NI), BF16)}), "weight", I, None),
    ("KL.1", indexer_loss({"key_rope": tensor((B, S2, 1, DR), BF16)}), "key_rope", I, None),
    ("KL.1", indexer_loss(dtype=FLOAT), "query", I, FLOATS),
    ("KL.2", indexer_loss({"actual_seq_lengths_query": ENDS}), "actual_seq_lengths_query", I, None),
    ("KL.2", indexer_loss({"sparse_indices": tensor((B, S1, 1, K), "DT_INT64")}), "sparse_indices", I, None),
    ("KL.2", indexer_loss({"softmax_sum": tensor((B, 1, S1, N1))}), "softmax_sum", I, None),
    ("KL.3", indexer_loss(attrs={"layout": "BNSD"}), "layout", I, None),
    ("KL.4", heads(indexer_loss, 32), "query", I, SIZES),
    ("KL.4", indexer_loss({"sinks": tensor((N1,), FLOAT)}), "sinks", I, None),
    ("KL.5", index_heads(indexer_loss, 24), "query_index", I, SIZES),
    ("KL.5", indexer_loss({"weight": tensor((B, S1, 32))}), "weight", I, None),
    ("KL.6", indexer_loss({"key_index": tensor((B, S2, 2, DI))}), "key_index", I, None),
    ("KL.7", width(indexer_loss, 128), "query", I, SIZES),
    (
        "KL.7",
        indexer_loss({"query_index": tensor((B, S1, NI, 64)), "key_index": tensor((B, S2, 1, 64))}),
        "query_index",
        I,
        SIZES,
    ),
    ("KL.7", indexer_loss({"key_index": tensor((B, S2 + 1, 1, DI))}), "key_index", I, None),
    ("KL.7", indexer_loss({"query_rope": None}), "query_rope", N, None),
    ("KL.7", rope(indexer_loss, 32), "query_rope", I, SIZES),
    ("KL.8", indexer_loss(attrs={"sparse_mode": 0}), "sparse_mode", I, None),
    ("KL.9", listed(indexer_loss, 512), "sparse_indices", I, SIZES),
    ("KL.9", listed(indexer_loss, 1536), "sparse_indices", I, SIZES),
    ("KL.9", listed(indexer_loss, 16384), "sparse_indices", I, SIZES),
    (
        "KL.10",
        indexer_loss(
            {"key": tensor((B, 8, 1, D)), "key_rope": tensor((B, 8, 1, DR)), "key_index": tensor((B, 8, 1, DI))}
        ),
        "query",
        I,
        None,
    ),
    (
        "KL.10",
        indexer_loss({"actual_seq_lengths_query": constant((S1, 2 * S1 - 1))}, layout="TND"),
        "actual_seq_lengths_query",
        I,
        None,
    ),
    (
        "KL.10",
        indexer_loss({"actual_seq_lengths_key": constant((S2, 2 * S2 - 1))}, layout="TND"),
        "actual_seq_lengths_key",
        I,
        None,
    ),
    (
        "KL.10",
        indexer_loss({"actual_seq_lengths_key": constant((2 * S2,))}, layout="TND"),
        "actual_seq_lengths_key",
        I,
        None,
    ),
    (
        "KL.10",
        indexer_loss({"actual_seq_lengths_key": constant((S1 - 1, 2 * S2))}, layout="TND"),
        "query",
        I,
        None,
    ),
    ("KL.11", indexer_loss({"softmax_max": tensor((B, N1, S1, 8), FLOAT)}), "softmax_max", I, None),
    ("KL.12", batched(indexer_loss, 257), "query", I, SIZES),
    (
        "KL.12",
        indexer_loss(
            {name: tensor((B, TOO_LONG, 1, size)) for name, size in (("key", D), ("key_rope", DR), ("key_index", DI))}
        ),
        "key",
        I,
        SIZES,
    ),
]


@pytest.mark.parametrize(("constraint", "node", "at", "code", "extension"), BROKEN, ids=[row[0] for row in BROKEN])
def test_one_fault_is_found_once(constraint: str, node: NodeView, at: str, code: int, extension: str | None) -> None:
    found = verify(node, "A2")
    assert [(fault.constraint, fault.tensor, fault.code, fault.extension) for fault in found][:1] == [
        (constraint, at, code, extension)
    ]
    counted = [fault for fault in found if fault.constraint != "G0" or constraint == "G0"]
    assert len({(fault.constraint, fault.tensor) for fault in counted}) == 1, found


def test_tokens_without_sequences() -> None:
    """Neither the reference nor the kernel takes them, whatever a product says to a batch of 0."""
    ends = {name: constant(()) for name in ("actual_seq_lengths_query", "actual_seq_lengths_key")}
    found = {
        (fault.constraint, fault.tensor, fault.extension) for fault in verify(indexer_loss(ends, layout="TND"), "A2")
    }
    assert {("KL.10", name, None) for name in ends} <= found


def test_every_number_is_broken_by_a_row() -> None:
    numbers = {
        f"{rules.prefix}.{number}"
        for rules in (operator(op).rules for op in names() if op.startswith(("Sparse", "Lightning")))
        for number in rules.table
    }
    # No tokens, heads or columns: see below; query of 0 tokens cannot be had beside good sizes.
    assert numbers - {row[0] for row in BROKEN} == {"SFAG.11"}


@pytest.mark.parametrize("node", GOOD, ids=lambda node: node.op_type)
def test_good_nodes_and_what_they_give(node: NodeView) -> None:
    for product in ("ort", "A2", "A3"):
        assert verify(node, product) == []
    found = infer(node.op_type, node.inputs, node.attrs)
    assert verify(replace(node, outputs=found), "A2") == []
    assert extensions_used(node) == ()


def test_what_950_takes() -> None:
    """Any number of heads up to 128, sinks, and single keys only; the gradient in its order of 2026."""
    sunk = tensor((48,), FLOAT)
    assert verify(heads(attention, 48, sinks=sunk), "950") == []
    assert [fault.constraint for fault in verify(heads(attention, 129), "950")] == ["SFA.3"]
    found = verify(attention(attrs={"sparse_block_size": 8}), "950")
    assert [(fault.constraint, fault.tensor, fault.code) for fault in found] == [("SFA.8", "sparse_block_size", I)]
    assert [fault.constraint for fault in verify(attention_grad(), "950")] == ["G0"]
    assert verify(attention_grad(), "950", "opdef_2026_reordered") == []


def test_lists_of_the_loss_are_2048_before_2026() -> None:
    for count in (1024, 8192):
        node = listed(indexer_loss, count)
        assert verify(node, "A2") == []
        found = verify(node, "A2", "opdef_2025_12")
        assert [(fault.constraint, fault.tensor, fault.code) for fault in found] == [("KL.9", "sparse_indices", I)]
    assert verify(indexer_loss(), "A2", "opdef_2025_12") == []


def test_long_packed_sequences_of_the_loss() -> None:
    many = {
        name: constant((0,) * 256 + (end,))
        for name, end in (("actual_seq_lengths_query", 2 * S1), ("actual_seq_lengths_key", 2 * S2))
    }
    assert [fault.constraint for fault in verify(indexer_loss(many, layout="TND"), "A2")] == ["KL.12"]
    long: dict[str, TensorInfo] = {"actual_seq_lengths_key": constant((S2, TOO_LONG + S2))}
    long |= {name: tensor((TOO_LONG + S2, 1, size)) for name, size in (("key", D), ("key_rope", DR), ("key_index", DI))}
    found = verify(indexer_loss(long, layout="TND"), "A2")
    assert [(fault.constraint, fault.tensor) for fault in found] == [("KL.12", "actual_seq_lengths_key")]


def test_both_parts_of_the_loss_positions_are_needed() -> None:
    found = verify(indexer_loss({"query_rope": None, "key_rope": None}), "A2")
    assert [(fault.constraint, fault.tensor, fault.code) for fault in found] == [
        ("KL.7", "query_rope", N),
        ("KL.7", "key_rope", N),
    ]


@pytest.mark.parametrize("make", BUILDERS, ids=lambda make: make().op_type)
def test_what_is_required_and_products_without_the_operator(make: Callable[..., NodeView]) -> None:
    for product in ("310P", "310B", "910"):
        assert [fault.constraint for fault in verify(make(), product)] == ["G0"]
    found = verify(make({"query": None}), "A2")
    assert ("G0", "query", N) in {(fault.constraint, fault.tensor, fault.code) for fault in found}


def test_no_heads() -> None:
    empty = {"query": tensor((B, S1, 0, D)), "query_rope": tensor((B, S1, 0, DR))}
    assert "SFAG.11" in {fault.constraint for fault in verify(attention_grad(empty))}
    assert "SFA.14" in {fault.constraint for fault in verify(attention(empty))}


def test_paged_keys_are_good() -> None:
    assert verify(paged(), "A2") == []
    assert verify(paged_index(), "A2") == []


def test_sizes_of_results() -> None:
    shapes = {
        name: info.shape for name, info in infer("SparseFlashAttention", attention().inputs, attention().attrs).items()
    }
    assert shapes == {"attention_out": (B, S1, N1, D), "softmax_max": (0,), "softmax_sum": (0,)}
    node = attention(attrs={"return_softmax_lse": True}, layout="TND")
    assert infer(node.op_type, node.inputs, node.attrs)["softmax_sum"] == TensorInfo(FLOAT, (1, B * S1, N1))
    node = indexer(attrs={"sparse_count": 7, "return_values": True})
    found = infer(node.op_type, node.inputs, node.attrs)
    assert found["sparse_indices"] == TensorInfo(INT32, (B, S1, 1, 7))
    assert found["sparse_values"] == TensorInfo("DT_FLOAT16", (B, S1, 1, 7))
    assert infer("SparseLightningIndexerGradKLLoss", indexer_loss().inputs, indexer_loss().attrs)["loss"].shape == (1,)


def test_the_reordered_gradient_has_an_optional_value_and_sinks() -> None:
    node = attention_grad({"value": None})
    assert {fault.code for fault in verify(node, "A2")} == {161001}
    assert verify(node, "A2", "opdef_2026_reordered") == []
    with_sinks = replace(
        attention_grad({"value": None, "sinks": tensor((N1,), FLOAT)}), outputs={"d_sinks": tensor((N1,), FLOAT)}
    )
    assert verify(with_sinks, "A2", "opdef_2026_reordered") == []
    for changes, rule, name in (
        ({"sinks": tensor((N1 + 1,), FLOAT)}, "SFAG.3", "sinks"),
        ({"sinks": None}, "SFAG.10", "d_sinks"),
    ):
        broken = replace(attention_grad({"value": None, **changes}), outputs=with_sinks.outputs)
        found = verify(broken, "A2", "opdef_2026_reordered")
        assert [(fault.constraint, fault.tensor) for fault in found] == [(rule, name)]
    merged = replace(attention_grad({"value": None}), outputs={"d_value": tensor((B, S2, 1, D))})
    assert [fault.constraint for fault in verify(merged, "A2", "opdef_2026_reordered")] == ["SFAG.10"]
    assert {fault.tensor for fault in verify(with_sinks, "A2")} == {"sinks", "d_sinks", "value"}
    without_size = attention_grad({"value": None}, {"sparse_block_size": None})
    assert verify(without_size, "A2", "opdef_2026_reordered") == []


def test_rope_is_optional_since_2026() -> None:
    node = attention({"query_rope": None, "key_rope": None})
    assert verify(node, "A2") == []
    assert [fault.tensor for fault in verify(node, "A2", "opdef_2025_12")] == ["query_rope", "key_rope"]


def test_sinks_of_the_loss_are_one_for_each_head() -> None:
    assert verify(indexer_loss({"sinks": tensor((N1,), FLOAT)}), "ort") == []
    found = verify(indexer_loss({"sinks": tensor((N1, 1), FLOAT)}), "ort")
    assert [(fault.constraint, fault.tensor) for fault in found] == [("KL.4", "sinks")]


def test_float_weights_of_the_indexer_on_950() -> None:
    node = indexer({"weights": tensor((B, S1, NI), FLOAT)})
    assert verify(node, "ort") == []
    assert [fault.constraint for fault in verify(node, "ort", "opdef_2025_12")] == ["LI.1"]
    assert [fault.constraint for fault in verify(node, "A2")] == ["G0"]


def test_float_weights_since_2026() -> None:
    node = indexer_loss({"weight": tensor((B, S1, NI), FLOAT)})
    assert [fault.constraint for fault in verify(node, "ort", "opdef_2025_12")] == ["KL.1"]
    assert verify(node, "ort") == []
    assert [fault.constraint for fault in verify(node, "A2")] == ["G0"]


def test_the_sample_of_the_gradient_document() -> None:
    """aclnnSparseFlashAttentionGrad's sample: its lengths are INT64 where the operator has INT32 (its table makes
    sparse_indices INT64, too, which its sample does not)."""

    def sample(lengths: str, indices: str = INT32) -> NodeView:
        wide = tensor((1, 16, 512))
        inputs = {
            "query": wide,
            "key": tensor((2048, 1, 512)),
            "value": tensor((2048, 1, 512)),
            "sparse_indices": tensor((1, 1, 2048), indices),
            "d_out": wide,
            "out": wide,
            "softmax_max": tensor((1, 1, 16), FLOAT),
            "softmax_sum": tensor((1, 1, 16), FLOAT),
            "actual_seq_lengths_query": constant((1,), lengths),
            "actual_seq_lengths_kv": constant((2048,), lengths),
            "query_rope": tensor((1, 16, 64)),
            "key_rope": tensor((2048, 1, 64)),
        }
        attrs = {"scale_value": 0.088388, "sparse_block_size": 1, "layout": "TND", "sparse_mode": 0}
        return NodeView("SparseFlashAttentionGrad", "sample", inputs, {}, attrs)

    found = verify(sample("DT_INT64"), "A2")
    assert {(fault.constraint, fault.tensor) for fault in found} == {
        ("SFAG.1", "actual_seq_lengths_query"),
        ("SFAG.1", "actual_seq_lengths_kv"),
    }
    assert verify(sample(INT32), "A2") == []
    assert [fault.tensor for fault in verify(sample(INT32, "DT_INT64"), "A2")] == ["sparse_indices"]


def test_the_sample_of_the_loss_document() -> None:
    """aclnnSparseLightningIndexerGradKLLoss's sample: 64 weights beside 32 index heads, one list of indices of rank 2
    for four tokens, and statistics of rank 2; all three are wrong."""
    wrong = {"weight": tensor((4, 64)), "sparse_indices": tensor((1, 2048), INT32)}
    wrong |= {name: tensor((4, 64), FLOAT) for name in ("softmax_max", "softmax_sum")}
    right = {"weight": tensor((4, 32)), "sparse_indices": tensor((4, 1, 2048), INT32)}
    right |= {name: tensor((1, 4, 64), FLOAT) for name in ("softmax_max", "softmax_sum")}
    good = {
        "query": tensor((4, 64, 512)),
        "key": tensor((8, 1, 512)),
        "query_index": tensor((4, 32, 128)),
        "key_index": tensor((8, 1, 128)),
        "query_rope": tensor((4, 64, 64)),
        "key_rope": tensor((8, 1, 64)),
        "actual_seq_lengths_query": constant((4,)),
        "actual_seq_lengths_key": constant((8,)),
    }
    attrs = {"scale_value": 1.0, "layout": "TND", "sparse_mode": 3, "pre_tokens": 65536, "next_tokens": 65536}
    found = verify(NodeView("SparseLightningIndexerGradKLLoss", "sample", good | wrong, {}, attrs), "A2")
    assert {(fault.constraint, fault.tensor) for fault in found} == {
        ("KL.5", "weight"),
        ("KL.9", "sparse_indices"),
        ("KL.11", "softmax_max"),
        ("KL.11", "softmax_sum"),
    }
    assert verify(NodeView("SparseLightningIndexerGradKLLoss", "sample", good | right, {}, attrs), "A2") == []


@pytest.mark.parametrize(
    ("make", "names", "number", "most"),
    [
        (attention, ("actual_seq_lengths_query", "actual_seq_lengths_kv"), "", None),
        (indexer, ("actual_seq_lengths_query", "actual_seq_lengths_key"), "", None),
        (attention_grad, ("actual_seq_lengths_query", "actual_seq_lengths_kv"), "SFAG.8", 256),
        (indexer_grad, ("actual_seq_lengths_query", "actual_seq_lengths_key"), "LIG.7", 1024),
        (indexer_loss, ("actual_seq_lengths_query", "actual_seq_lengths_key"), "KL.12", 256),
    ],
)
def test_the_number_of_packed_sequences(
    make: Callable[..., NodeView], names: tuple[str, str], number: str, most: int | None
) -> None:
    """Only the gradients have a limit, each its own; contents are left open."""
    for count in (256, 257, 1024, 1025):
        dtype = "DT_INT64" if number == "KL.12" else "DT_INT32"
        found = verify(make({name: tensor((count,), dtype) for name in names}, layout="TND"))
        assert [each.constraint for each in found] == ([number] if most is not None and count > most else [])
