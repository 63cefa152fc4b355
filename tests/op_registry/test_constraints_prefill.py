"""PFA.1 to PFA.11 and FIA.1 to FIA.17: each row breaks exactly one constraint of an otherwise good node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, infer, operator, verify

from .nodes import constant, tensor

B, N1, N2, S1, S2, D = 2, 8, 4, 40, 96, 64
SHAPES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "BSH": ((B, S1, N1 * D), (B, S2, N2 * D)),
    "BSND": ((B, S1, N1, D), (B, S2, N2, D)),
    "BNSD": ((B, N1, S1, D), (B, N2, S2, D)),
    "TND": ((S1, N1, D), (S2, N2, D)),
    "NTD": ((N1, S1, D), (N2, S2, D)),
}
Given = TensorInfo | list[TensorInfo] | None
Changes = Mapping[str, Given]
PFA, FIA = "PromptFlashAttention", "FusedInferAttentionScore"
TRIANGLE = tensor((2048, 2048), "DT_BOOL")


def node(
    op_type: str,
    inputs: Changes | None = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BNSD",
    dtype: str = "DT_FLOAT16",
    outputs: Mapping[str, TensorInfo] | None = None,
) -> NodeView:
    """A good node, with changes; an input or attribute changed to None is left out."""
    query, key = SHAPES[layout.partition("_")[0]]
    keys: Given = tensor(key, dtype)
    tensors: dict[str, Given] = {"query": tensor(query, dtype), "key": keys, "value": keys}
    given = {name: info for name, info in (tensors | dict(inputs or {})).items() if info is not None}
    if op_type == FIA:
        given |= {name: [info] for name in ("key", "value") if isinstance(info := given.get(name), TensorInfo)}
    heads = {"num_heads": N1, "num_key_value_heads": N2, "input_layout": layout}
    chosen = {name: value for name, value in (heads | dict(attrs or {})).items() if value is not None}
    return NodeView(op_type, "prompt", given, dict(outputs or {}), chosen)


def pfa(inputs: Changes | None = None, attrs: Mapping[str, Any] | None = None, **more: Any) -> NodeView:
    return node(PFA, inputs, attrs, **more)


def fia(inputs: Changes | None = None, attrs: Mapping[str, Any] | None = None, **more: Any) -> NodeView:
    return node(FIA, inputs, attrs, **more)


def each(dtype: str, shape: tuple[int, ...] | None = None, **more: Given) -> dict[str, Given]:
    query, key = SHAPES["BNSD"]
    keys = tensor(shape or key, dtype)
    return {"query": tensor(query, dtype), "key": keys, "value": keys, **more}


def int8(names: str, **more: Given) -> dict[str, Given]:
    return {**each("DT_INT8"), **{name: tensor((1,), "DT_FLOAT") for name in names.split()}, **more}


def mask(*shape: int, dtype: str = "DT_BOOL") -> TensorInfo:
    return tensor(shape, dtype)


ENDS = {"actual_seq_lengths": constant([S1]), "actual_seq_lengths_kv": constant([S2])}
SCALE2 = {"quant_scale2": tensor((1,), "DT_FLOAT"), "quant_offset2": tensor((1,), "DT_FLOAT")}
INT8_OUT = {"attention_out": tensor(None, "DT_INT8")}
PREFIX = {name: tensor((1, N2, 5, D)) for name in ("key_shared_prefix", "value_shared_prefix")}

ANTIQUANT = {name: tensor((1,)) for name in ("key_antiquant_scale", "value_antiquant_scale")}
INT8_KEYS = tensor((B, N2, S2, D), "DT_INT8")
PAGED = {"block_table": tensor((B, 3), "DT_INT32"), "actual_seq_lengths_kv": constant([S2])}
LONGER = {"key": tensor((B, N2, 30, D)), "value": tensor((B, N2, 30, D)), "actual_seq_lengths": constant([30, 8])}
"""Fewer keys than rows of query, of which no more are used."""
SHORTER = {"actual_seq_lengths": constant([20]), "actual_seq_lengths_kv": constant([15, 16])}
"""Fewer keys than queries, which a prefix of 5 makes up for."""


def packed(
    inputs: Changes | None = None, attrs: Mapping[str, Any] | None = None, layout: str = "TND", d: int = 128
) -> NodeView:
    """A good node of a packed layout."""
    q, k = ((*shape[:2], d) for shape in SHAPES[layout.partition("_")[0]])
    sized = {"query": tensor(q, "DT_BF16"), "key": tensor(k, "DT_BF16"), "value": tensor(k, "DT_BF16")}
    return fia({**sized, **ENDS, **dict(inputs or {})}, attrs, layout=layout)


def latent(
    inputs: Changes | None = None, attrs: Mapping[str, Any] | None = None, layout: str = "TND", heads: int = N1
) -> NodeView:
    """A good node of a packed layout with one key head of size 512, in pages."""
    pages = {"key": tensor((9, 32, 512), "DT_BF16"), "value": tensor((9, 32, 512), "DT_BF16")}
    rows = (heads, S1) if layout.startswith("NTD") else (S1, heads)
    pages |= {"query_rope": tensor((*rows, 64), "DT_BF16"), "key_rope": tensor((9, 32, 64), "DT_BF16")}
    pages |= {"query": tensor((*rows, 512), "DT_BF16"), "block_table": tensor((1, 3), "DT_INT32")}
    usual = {"num_heads": heads, "num_key_value_heads": 1, "block_size": 32}
    return fia({**pages, **ENDS, **dict(inputs or {})}, {**usual, **dict(attrs or {})}, layout=layout)


GOOD = [
    *(pfa(layout=layout) for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND")),
    *(pfa({"atten_mask": mask(*shape)}) for shape in ((S1, S2), (B, S1, S2), (1, 1, S1, S2), (B, 1, S1 + 8, S2 + 32))),
    *(pfa({"atten_mask": mask(*lead, 2048, 2048, dtype="DT_INT8")}, {"sparse_mode": 3}) for lead in ((), (1,), (1, 1))),
    pfa({"pse_shift": tensor((1, N1, S1, S2 + 32))}),
    pfa({"actual_seq_lengths": constant([3]), "actual_seq_lengths_kv": constant([3, 9])}),
    pfa(each("DT_BF16")),
    pfa(int8("deq_scale1 quant_scale1 deq_scale2")),
    pfa({**SCALE2}, {"pre_tokens": 99}, outputs=INT8_OUT),
    pfa(
        {"query": tensor((None, N1, None, D)), "key": tensor(("b", N2, "s", D)), "value": None}
        | {"value": tensor(None)}
    ),
    *(fia(layout=layout) for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_BNSD")),
    *(packed(layout=layout) for layout in ("TND", "NTD", "NTD_TND")),
    packed(d=192),
    packed({"value": tensor((S2, N2, 128), "DT_BF16")}, d=192),
    packed({"query_rope": tensor((S1, N1, 64), "DT_BF16"), "key_rope": tensor((S2, N2, 64), "DT_BF16")}),
    *(latent(layout=layout) for layout in ("TND", "TND_NTD")),
    latent(attrs={"block_size": 1024}),
    fia({"atten_mask": mask(S1, S2)}, {"softmax_lse_flag": True}),
    fia({"key": [tensor((1, N2, S2, D))] * B, "value": [tensor((1, N2, S2, D))] * B}),
    fia({"query_rope": tensor((B, N1, S1, 64)), "key_rope": tensor((B, N2, S2, 64))}),
    fia(PREFIX),
    fia({"kv_padding_size": constant([3]), "actual_seq_lengths_kv": constant([3])}),
    fia(int8("dequant_scale1 quant_scale1 dequant_scale2")),
    fia({"query": tensor((B, N1, 1, D)), "atten_mask": mask(B, S2)}),
    fia({"query": tensor((B, N1, 1, D)), "atten_mask": mask(B, 1, S2 + 7)}, {"sparse_mode": 3}),
    fia({"query": tensor((B, N1, 1, D))}, {"sparse_mode": 4}),
    fia({"pse_shift": tensor((B, N1), "DT_FLOAT")}, {"pse_type": 3}),
    fia({"query": tensor((B, N1, 1, 192)), "key": tensor((B, N2, S2, 192)), "value": tensor((B, N2, S2, 128))}),
    fia({**PREFIX, "actual_shared_prefix_len": constant([5])}),
    fia(attrs={"value_antiquant_mode": 1}),
    fia({**ANTIQUANT, "key": INT8_KEYS, "value": INT8_KEYS}, {"value_antiquant_mode": 1}),
    fia(PAGED, {"block_size": 512}),
    # Rows without a key are those of the lengths, not of the tensors, whatever these hold besides.
    pfa({**SCALE2, "atten_mask": TRIANGLE, **LONGER}, {"sparse_mode": 3}, outputs=INT8_OUT),
    fia({**SCALE2, "atten_mask": TRIANGLE, **LONGER}, {"sparse_mode": 3}, outputs=INT8_OUT),
    fia({**SCALE2, "atten_mask": TRIANGLE, **PREFIX, **SHORTER}, {"sparse_mode": 3}, outputs=INT8_OUT),
    pfa({**SCALE2, "atten_mask": TRIANGLE, "actual_seq_lengths_kv": tensor((B,), "DT_INT64")}, {"sparse_mode": 3}),
]


@pytest.mark.parametrize("good", GOOD, ids=lambda good: good.op_type)
def test_good(good: NodeView) -> None:
    assert verify(good) == []
    assert verify(good, "A2") == []


LISTS = {name: [tensor((1, N2, S2, D))] * B for name in ("key", "value")}
TWO_PACKED: Given = [tensor((S2, N2, 128), "DT_BF16")] * 2
HALF_PACKED = {"query": tensor((S1, N1, 128))}
ROPE = {"query_rope": tensor((B, N1, S1, 64)), "key_rope": tensor((B, N2, S2, 64))}
INT4_KEYS = tensor((B, N2, S2, 96), "DT_INT4")
ONE_ROW = tensor((B, N1, 1, D), "DT_INT8")
HALF_OUT = {"attention_out": tensor(None)}
CHANNELS = {"quant_scale2": tensor((N1, D), "DT_FLOAT")}
BAND = {"sparse_mode": 4, "pre_tokens": 99, "next_tokens": -1}
BAD: list[tuple[str, NodeView, str]] = [
    ("PFA.1", pfa(each("DT_INT32")), "query"),
    ("PFA.1", pfa({"value": tensor(SHAPES["BNSD"][1], "DT_BF16")}), "value"),
    ("PFA.2", pfa(attrs={"input_layout": "TND"}), "input_layout"),
    ("PFA.2", pfa({"value": tensor((B, S2, D))}), "value"),
    ("PFA.3", pfa({"atten_mask": TRIANGLE}, {"sparse_mode": 5}), "sparse_mode"),
    ("PFA.3", pfa({"atten_mask": mask(S1, S2)}, {"sparse_mode": 2}), "atten_mask"),
    ("PFA.3", pfa({"atten_mask": mask(2, 2048, 2048)}, {"sparse_mode": 2}), "atten_mask"),
    ("PFA.3", pfa({"atten_mask": mask(S1, S2, dtype="DT_FLOAT16")}), "atten_mask"),
    ("PFA.3", pfa({"atten_mask": mask(B, N1, S1, S2)}), "atten_mask"),
    ("PFA.3", pfa({"atten_mask": mask(3, 1, S1, S2)}), "atten_mask"),
    ("PFA.3", pfa({"atten_mask": mask(S1 - 1, S2)}), "atten_mask"),
    ("PFA.3", pfa({"atten_mask": mask(S1, S2 - 1)}), "atten_mask"),
    ("PFA.4", pfa(outputs=INT8_OUT), "quant_scale2"),
    ("PFA.4", pfa(int8("deq_scale1 quant_scale1")), "deq_scale2"),
    ("PFA.4", pfa({**SCALE2, "atten_mask": mask(S1, S2)}, {"next_tokens": -1}), "sparse_mode"),
    (
        "PFA.4",
        pfa({"quant_scale2": tensor((1,), "DT_FLOAT"), "atten_mask": TRIANGLE, **SHORTER}, {"sparse_mode": 3}),
        "sparse_mode",
    ),
    ("PFA.4", pfa({**SCALE2, "atten_mask": TRIANGLE}, {"sparse_mode": 4, "pre_tokens": -1}), "sparse_mode"),
    ("PFA.8", pfa(attrs={"num_heads": 0, "num_key_value_heads": 0}), "num_heads"),
    ("PFA.8", pfa(attrs={"num_heads": 4}), "num_heads"),
    ("PFA.8", pfa(attrs={"num_key_value_heads": 3}), "num_key_value_heads"),
    ("PFA.8", pfa(attrs={"num_key_value_heads": 0}), "key"),
    ("PFA.8", pfa({"key": tensor((B, S2, 3 * D)), "value": tensor((B, S2, 3 * D))}, layout="BSH"), "key"),
    ("PFA.9", pfa({"value": tensor((B, N2, S2 + 1, D))}), "value"),
    ("PFA.9", pfa({"key": tensor((B, N2, S2, 32)), "value": tensor((B, N2, S2, 32))}), "key"),
    ("PFA.9", pfa({"key": tensor((3, N2, S2, D)), "value": tensor((3, N2, S2, D))}), "key"),
    ("PFA.10", pfa({"pse_shift": tensor((1, N1, S1, S2), "DT_BF16")}), "pse_shift"),
    ("PFA.10", pfa({"pse_shift": tensor((1, 1, S1, S2))}), "pse_shift"),
    ("PFA.10", pfa({"pse_shift": tensor((1, N1, S1, S2 - 1))}), "pse_shift"),
    ("PFA.11", pfa({"actual_seq_lengths": tensor((B,), "DT_INT32")}), "actual_seq_lengths"),
    (
        "PFA.11",
        pfa(
            {
                "query": tensor((4, N1, S1, D)),
                "key": tensor((4, N2, S2, D)),
                "value": tensor((4, N2, S2, D)),
                "actual_seq_lengths_kv": constant([1, 2]),
            }
        ),
        "actual_seq_lengths_kv",
    ),
    ("FIA.1", fia({"query": tensor(SHAPES["BNSD"][0], "DT_INT32")}), "query"),
    ("FIA.1", fia({"value": tensor(SHAPES["BNSD"][1], "DT_BF16")}), "value"),
    ("FIA.2", fia(attrs={"input_layout": "SBH"}), "input_layout"),
    ("FIA.2", fia(LISTS, {"input_layout": "SBH"}), "input_layout"),
    ("FIA.3", fia(attrs={"num_heads": 4}), "num_heads"),
    ("FIA.4", fia({"value": tensor((B, N2, S2 + 1, D))}), "value"),
    ("FIA.4", fia({"key": INT4_KEYS, "value": INT4_KEYS, "query": tensor((B, N1, S1, 96))}), "query"),
    ("FIA.5", fia({"atten_mask": TRIANGLE}, {"sparse_mode": 6}), "sparse_mode"),
    ("FIA.5", fia({"query": tensor((B, N1, 1, D)), "atten_mask": TRIANGLE}, {"sparse_mode": 3}), "atten_mask"),
    ("FIA.5", fia({"query": tensor((B, N1, 1, D)), "atten_mask": mask(B, S2)}, {"sparse_mode": 5}), "sparse_mode"),
    ("FIA.6", fia({"pse_shift": tensor((1, N1, 1, S2))}), "pse_shift"),
    ("FIA.6", fia(attrs={"pse_type": 1}), "pse_type"),
    ("FIA.6", fia(attrs={"pse_type": 2}), "pse_shift"),
    ("FIA.6", fia({"pse_shift": tensor((1, N1, S1, S2), "DT_FLOAT")}, {"pse_type": 2}), "pse_shift"),
    ("FIA.6", fia({"pse_shift": tensor((N1,))}, {"pse_type": 3}), "pse_shift"),
    ("FIA.7", fia(int8("dequant_scale1 quant_scale1")), "dequant_scale2"),
    ("FIA.7", fia({"quant_scale1": tensor((1,), "DT_FLOAT")}), "quant_scale1"),
    ("FIA.7", fia(outputs=INT8_OUT), "quant_scale2"),
    ("FIA.8", fia({**SCALE2, "atten_mask": mask(S1, S2)}, {"next_tokens": -1}), "sparse_mode"),
    ("FIA.7", fia({**int8("dequant_scale1 quant_scale1 dequant_scale2"), "query": ONE_ROW}), "query"),
    ("FIA.7", fia(int8("dequant_scale1 quant_scale1 dequant_scale2 quant_scale2"), outputs=HALF_OUT), "quant_scale2"),
    ("FIA.8", fia({**SCALE2, "atten_mask": TRIANGLE, **SHORTER}, {"sparse_mode": 3}), "sparse_mode"),
    ("FIA.8", fia({**CHANNELS, "kv_padding_size": constant([3]), **ENDS}), "kv_padding_size"),
    ("FIA.8", fia(CHANNELS, {"softmax_lse_flag": True}), "softmax_lse_flag"),
    ("FIA.9", fia({"block_table": tensor((B, 3), "DT_INT32"), **ENDS}), "block_size"),
    ("FIA.9", fia({**PAGED, "block_table": tensor((3, 3), "DT_INT32")}, {"block_size": 32}), "block_table"),
    ("FIA.9", fia({**PAGED, **LISTS}, {"block_size": 32}), "key"),
    ("FIA.9", fia({**PAGED, **PREFIX}, {"block_size": 32}), "key_shared_prefix"),
    ("FIA.9", fia({"block_table": tensor((B, 3), "DT_INT32")}, {"block_size": 32}), "actual_seq_lengths_kv"),
    ("FIA.10", fia({"query_padding_size": constant([3])}), "actual_seq_lengths"),
    ("FIA.10", packed({"kv_padding_size": constant([3])}), "kv_padding_size"),
    ("FIA.10", fia({"kv_padding_size": constant([3, 4]), **ENDS}), "kv_padding_size"),
    ("FIA.10", fia({"kv_padding_size": constant([3]), **ENDS, **LISTS}), "kv_padding_size"),
    ("FIA.11", fia({**LISTS, "key": [tensor((1, N2, S2, D)), tensor((2, N2, S2, D))]}), "key"),
    ("FIA.11", fia({**LISTS, "value": [tensor((1, N2, S2, D)), tensor((1, N2, S2, 128))]}), "value"),
    ("FIA.11", packed({"key": [tensor((S2, N2, 128), "DT_BF16")] * 2, "value": TWO_PACKED}), "key"),
    ("FIA.11", fia({"key": [tensor((1, N2, S2, D))] * B}), "value"),
    ("FIA.11", fia({"key": [tensor((1, N2, S2, D))] * 3, "value": [tensor((1, N2, S2, D))] * 3}), "key"),
    ("FIA.12", packed({"actual_seq_lengths_kv": None}), "actual_seq_lengths_kv"),
    ("FIA.12", packed({"pse_shift": tensor((1, N1, S1, S2), "DT_BF16")}), "pse_shift"),
    ("FIA.13", fia({"query_rope": tensor((B, N1, S1, 64))}), "key_rope"),
    ("FIA.13", fia({**ROPE, "query_rope": tensor((B, N1, S1, 64), "DT_INT8")}), "query_rope"),
    ("FIA.13", fia({**ROPE, "pse_shift": tensor((1, N1, S1, S2))}), "pse_shift"),
    ("FIA.13", fia({**ROPE, "quant_scale2": tensor((1,), "DT_FLOAT")}), "quant_scale2"),
    ("FIA.13", fia({**ROPE, **LISTS}), "key"),
    ("FIA.15", fia({"value_shared_prefix": tensor((1, N2, 5, D))}), "key_shared_prefix"),
    ("FIA.15", fia({**PREFIX, "key_shared_prefix": tensor((2, N2, 5, D))}), "key_shared_prefix"),
    ("FIA.15", fia({**PREFIX, "value_shared_prefix": tensor((1, N2, 5, D), "DT_BF16")}), "value_shared_prefix"),
    ("FIA.15", fia({**PREFIX, "actual_shared_prefix_len": constant([6])}), "actual_shared_prefix_len"),
    ("FIA.15", fia({**PREFIX, "actual_shared_prefix_len": constant([2, 2])}), "actual_shared_prefix_len"),
    ("FIA.16", fia({**ANTIQUANT, "key_antiquant_offset": tensor((1,))}), "value_antiquant_offset"),
    ("FIA.16", fia(ANTIQUANT, {"key_antiquant_mode": 1}), "value_antiquant_mode"),
    ("FIA.16", fia({"key_antiquant_scale": tensor((1,))}), "value_antiquant_scale"),
    ("FIA.17", fia({"dequant_scale_query": tensor((1,), "DT_FLOAT")}), "query_quant_mode"),
]


@pytest.mark.parametrize(("constraint", "bad", "name"), BAD, ids=[f"{row[0]}-{row[2]}" for row in BAD])
def test_bad(constraint: str, bad: NodeView, name: str) -> None:
    (violation,) = verify(bad)
    assert (violation.constraint, violation.tensor, violation.code) == (constraint, name, 161002)
    assert violation.extension is None


EXTENDED: list[tuple[str, NodeView, str, str]] = [
    ("PFA.1", pfa(each("DT_FLOAT")), "query", "FLOAT"),
    ("PFA.9", pfa({"value": tensor((B, N2, S2, 32))}), "value", "SIZES"),
    (
        "PFA.9",
        pfa({"query": tensor((B, N1, S1, 60)), **dict.fromkeys(("key", "value"), tensor((B, N2, S2, 60)))}),
        "query",
        "SIZES",
    ),
    (
        "PFA.8",
        pfa(
            {"query": tensor((B, 130, S1, D)), **dict.fromkeys(("key", "value"), tensor((B, 2, S2, D)))},
            {"num_heads": 130, "num_key_value_heads": 2},
        ),
        "num_key_value_heads",
        "SIZES",
    ),
    ("FIA.1", fia(each("DT_FLOAT")), "query", "FLOAT"),
    ("FIA.12", packed({"pse_shift": tensor((N1,), "DT_FLOAT")}, {"pse_type": 2}), "pse_shift", "PACKED"),
    ("FIA.4", fia({"value": tensor((B, N2, S2, 32))}), "value", "SIZES"),
    (
        "FIA.8",
        fia({**CHANNELS, **each("DT_FLOAT16", (B, N2, S2, 48)), "query": tensor((B, N1, S1, 48))}),
        "query",
        "SIZES",
    ),
    ("FIA.8", fia({"quant_scale2": tensor((1,), "DT_FLOAT"), "atten_mask": TRIANGLE}, BAND), "sparse_mode", "MODES"),
    ("FIA.9", fia(PAGED, {"block_size": 528}), "block_size", "SIZES"),
    (
        "FIA.9",
        fia({**PAGED, **ANTIQUANT, "key": INT8_KEYS, "value": INT8_KEYS}, {"block_size": 16}),
        "block_size",
        "SIZES",
    ),
    ("PFA.3", pfa(attrs={"sparse_mode": 1}), "atten_mask", "MODES"),
    ("FIA.12", packed(d=64), "query", "PACKED"),
    (
        "FIA.12",
        fia(ENDS | dict.fromkeys(("key", "value"), tensor((S2, N2, 128))) | HALF_PACKED, layout="TND"),
        "query",
        "PACKED",
    ),
    ("FIA.12", packed(layout="TND_NTD"), "input_layout", "PACKED"),
    ("FIA.12", latent(layout="NTD"), "input_layout", "PACKED"),
    ("FIA.12", latent(heads=12), "query", "PACKED"),
    ("FIA.12", latent(attrs={"num_key_value_heads": 2}), "num_key_value_heads", "PACKED"),
    ("FIA.12", latent({"atten_mask": TRIANGLE}, {"sparse_mode": 2}), "sparse_mode", "PACKED"),
    ("FIA.12", latent({"query_rope": None, "key_rope": None}), "query_rope", "PACKED"),
    ("FIA.12", latent(attrs={"softmax_lse_flag": True}), "softmax_lse_flag", "PACKED"),
    ("FIA.13", fia({**ROPE, "key_rope": tensor((B, N2, S2, 32))}), "key_rope", "SIZES"),
    ("FIA.14", fia(attrs={"softmax_lse_flag": True}, layout="BNSD_NBSD"), "softmax_lse_flag", "STATISTICS"),
]
"""What Ascend refuses and the CPU kernel takes: the constraint, the node, what it names, the extension."""


@pytest.mark.parametrize(
    ("constraint", "node", "name", "extension"), EXTENDED, ids=[f"{row[0]}-{row[2]}-{row[3]}" for row in EXTENDED]
)
def test_extended(constraint: str, node: NodeView, name: str, extension: str) -> None:
    (violation,) = verify(node)
    assert (violation.constraint, violation.tensor) == (constraint, name)
    assert violation.extension == f"EXT-PROMPT-{extension}"


LARGE: list[tuple[str, dict[str, Given], str]] = [
    ("batch size 65 537", {"query": tensor((65537, N1, S1, D))}, "at most 65 536"),
    ("head size 528", {"query": tensor((B, N1, S1, 528))}, "at most 512"),
    ("sequence length", {"query": tensor((B, N1, 20971521, D))}, "at most 20 971 520"),
    ("multiple of 16", {"query": tensor((B, N1, S1, 60))}, "multiple of 16"),
]


@pytest.mark.parametrize(("what", "query", "phrase"), LARGE, ids=[row[0] for row in LARGE])
@pytest.mark.parametrize("op_type", [PFA, FIA])
def test_ranges(op_type: str, what: str, query: dict[str, Given], phrase: str) -> None:
    unknown: Given = tensor(None)
    number = "PFA.9" if op_type == PFA else "FIA.4"
    found = verify(node(op_type, {**query, "key": unknown, "value": unknown}))
    assert [violation.constraint for violation in found] == [number]
    assert phrase in found[0].message


ON_310P: list[tuple[str, NodeView, str]] = [
    ("PFA.1", pfa(each("DT_BF16", (B, N1, S2, D)), {"num_key_value_heads": 0}), "query"),
    ("PFA.7", pfa({"atten_mask": TRIANGLE}, {"sparse_mode": 2}), "sparse_mode"),
    ("PFA.7", pfa(attrs={"pre_tokens": None}), "pre_tokens"),
    ("PFA.7", pfa(attrs={"next_tokens": 5}), "next_tokens"),
    ("PFA.7", pfa({"pse_shift": tensor((1, N1, S1, S2))}), "pse_shift"),
    ("PFA.7", pfa({"atten_mask": mask(S1, S2, dtype="DT_INT8")}), "atten_mask"),
    ("PFA.9", pfa(each("DT_FLOAT16", (B, N1, 65536, D))), "key"),
]


def test_the_mistyped_default_is_explained() -> None:
    found = next(found for found in verify(pfa(attrs={"pre_tokens": None}), "310P") if found.tensor == "pre_tokens")
    assert found.message.endswith("the default of the prototype is a typing error, so give pre_tokens=2147483647")
    other = next(found for found in verify(pfa(attrs={"pre_tokens": 7}), "310P") if found.tensor == "pre_tokens")
    assert other.message == "pre_tokens is 7, expected 2147483647 on 310P"


@pytest.mark.parametrize(("constraint", "bad", "name"), ON_310P, ids=[f"{row[0]}-{row[2]}" for row in ON_310P])
def test_on_310p(constraint: str, bad: NodeView, name: str) -> None:
    wide = tensor((B, N1, S2, D))
    keys = {"key": wide, "value": wide} if name != "key" and constraint != "PFA.1" else {}
    usual = {"num_key_value_heads": 0, "pre_tokens": 2147483647, "next_tokens": 0}
    usual = {key: value for key, value in usual.items() if key != name}
    own = {key: value for key, value in bad.attrs.items() if key != "num_key_value_heads"}
    fixed = NodeView(PFA, "prompt", {**bad.inputs, **keys}, {}, {**own, **usual})
    (violation,) = verify(fixed, "310P")
    assert (violation.constraint, violation.tensor) == (constraint, name)
    groups = NodeView(
        PFA, "prompt", {**bad.inputs, "key": wide}, {}, {**usual, "num_heads": 8, "num_key_value_heads": 4}
    )
    assert any(found.tensor == "num_key_value_heads" for found in verify(groups, "310P"))


def test_products() -> None:
    assert [found.constraint for found in verify(fia(), "310P")] == ["G0"]
    assert verify(pfa(), "A3") == []


def test_every_number_is_provoked() -> None:
    for op_type, prefix in ((PFA, "PFA"), (FIA, "FIA")):
        numbers = {f"{prefix}.{number}" for number in operator(op_type).rules.table}
        provoked = {row[0] for row in (*BAD, *ON_310P, *EXTENDED) if row[0].startswith(prefix)}
        assert numbers == provoked


OUT: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = [
    (FIA, "BSH", (B, S1, N1 * D), (B, N1, S1, 1)),
    (FIA, "BNSD_BSND", (B, S1, N1, D), (B, N1, S1, 1)),
    (FIA, "BSND_NBSD", (N1, B, S1, D), (B, N1, S1, 1)),
    (FIA, "BSH_BNSD", (B, N1, S1, D), (B, N1, S1, 1)),
    (FIA, "TND_NTD", (N1, S1, D), (S1, N1, 1)),
    (FIA, "NTD_TND", (S1, N1, D), (S1, N1, 1)),
    (PFA, "BNSD_BSND", (B, S1, N1, D), ()),
    (PFA, "BSND", (B, S1, N1, D), ()),
]


@pytest.mark.parametrize(("op_type", "layout", "out", "lse"), OUT, ids=[f"{row[0]}-{row[1]}" for row in OUT])
def test_results(op_type: str, layout: str, out: tuple[int, ...], lse: tuple[int, ...]) -> None:
    given = node(op_type, layout=layout, attrs={"softmax_lse_flag": True} if op_type == FIA else {})
    found = infer(op_type, given.inputs, given.attrs)
    assert found["attention_out"] == tensor(out)
    assert op_type == PFA or found["softmax_lse"] == tensor(lse, "DT_FLOAT")
    plain = infer(op_type, given.inputs, {key: value for key, value in given.attrs.items() if "lse" not in key})
    assert op_type == PFA or plain["softmax_lse"].shape == (0,)


def test_types_of_results() -> None:
    assert infer(PFA, pfa(int8("deq_scale1")).inputs, {"num_heads": N1})["attention_out"].dtype == "DT_FLOAT16"
    scaled = pfa(SCALE2)
    assert infer(PFA, scaled.inputs, scaled.attrs)["attention_out"].dtype == "DT_INT8"
