"""IFA.1 to IFA.15, RAU and AU: each row breaks exactly one constraint of an otherwise good node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, extensions_used, infer, operator, verify

from .nodes import constant, tensor

B, N1, N2, S, D = 2, 8, 4, 96, 64
KEYS: Mapping[str, tuple[int, ...]] = {"BSH": (B, S, N2 * D), "BSND": (B, S, N2, D), "BNSD": (B, N2, S, D)}
QUERIES: Mapping[str, tuple[int, ...]] = {"BSH": (B, 1, N1 * D), "BSND": (B, 1, N1, D), "BNSD": (B, N1, 1, D)}

Given = TensorInfo | list[TensorInfo] | None


def decode(
    inputs: Mapping[str, Given] | None = None,
    attrs: Mapping[str, Any] | None = None,
    layout: str = "BNSD",
    dtype: str = "DT_FLOAT16",
    cache: str | None = None,
    outputs: Mapping[str, TensorInfo] | None = None,
) -> NodeView:
    """A good IncreFlashAttention, with changes; an input or attribute changed to None is left out."""
    key = tensor(KEYS[layout], cache or dtype)
    tensors: dict[str, Given] = {"query": tensor(QUERIES[layout], dtype), "key": [key], "value": [key]}
    given = {name: info for name, info in (tensors | dict(inputs or {})).items() if info is not None}
    heads = {"num_heads": N1, "num_key_value_heads": N2, "input_layout": layout, "scale_value": 0.125}
    chosen = {name: value for name, value in (heads | dict(attrs or {})).items() if value is not None}
    return NodeView("IncreFlashAttention", "decode", given, dict(outputs or {}), chosen)


def both(shape: tuple[int, ...], dtype: str = "DT_FLOAT16", count: int = 1) -> dict[str, Given]:
    return {name: [tensor(shape, dtype)] * count for name in ("key", "value")}


def paged(layout: str = "BNSD", dtype: str = "DT_FLOAT16", **more: Given) -> dict[str, Given]:
    shape = (9, N2, 32, D) if layout == "BNSD" else (9, 32, N2 * D)
    lengths = {"actual_seq_lengths": constant([50, 96]), "block_table": tensor((B, 3), "DT_INT32")}
    return {**both(shape, dtype), **lengths, **more}


def quantised(**more: Given) -> dict[str, Given]:
    return {**both(KEYS["BNSD"], "DT_INT8"), "antiquant_scale": tensor((2,)), **more}


def int8_path(**more: Given) -> dict[str, Given]:
    scales: dict[str, Given] = {name: tensor((1,), "DT_FLOAT") for name in ("dequant_scale1", "quant_scale1")}
    return {**scales, "dequant_scale2": tensor((1,), "DT_UINT64"), **more}


GOOD = [
    *(decode(layout=layout) for layout in KEYS),
    decode(both((1, N2, 40, D), count=B)),
    decode({"atten_mask": tensor((B, S), "DT_BOOL"), "pse_shift": tensor((1, N1, 1, S + 5))}),
    decode({"atten_mask": tensor((B, 1, 1, S + 7), "DT_INT8"), "actual_seq_lengths": constant([0])}),
    decode({"actual_seq_lengths": constant([90, 3]), "kv_padding_size": constant([6])}),
    *(decode(paged(layout), {"block_size": 32}, layout) for layout in KEYS),
    decode(paged("BSH"), {"block_size": 32}),
    *(
        decode(quantised(antiquant_scale=tensor(shape), antiquant_offset=tensor(shape)))
        for shape in ((2,), (2, N2, 1, D), (2, N2, D), (2, N2 * D))
    ),
    decode({"quant_scale2": tensor((1, N1, 1, D), "DT_FLOAT")}, outputs={"attention_out": tensor(None, "DT_INT8")}),
    decode({"quant_scale2": tensor((1,), "DT_BF16"), "quant_offset2": tensor((1,), "DT_BF16")}, dtype="DT_BF16"),
    decode(attrs={"num_key_value_heads": None}, inputs=both((B, N1, S, D))),
]

BROKEN: list[tuple[str, NodeView, str]] = [
    ("IFA.1", decode(dtype="DT_DOUBLE"), "query"),
    ("IFA.1", decode(both(KEYS["BNSD"], "DT_BF16")), "key"),
    ("IFA.1", decode({"value": [tensor(KEYS["BNSD"], "DT_INT8")]}), "value"),
    ("IFA.2", decode(attrs={"input_layout": "TND"}), "input_layout"),
    ("IFA.2", decode({"query": tensor((B, N1, 2, D))}), "query"),
    ("IFA.2", decode({"key": [tensor((B, S, N2 * D))]}), "key"),
    ("IFA.2", decode(paged("BNSD"), {"block_size": 32}, "BSND"), "key"),
    ("IFA.3", decode(attrs={"num_heads": 0}), "num_heads"),
    ("IFA.3", decode(attrs={"num_heads": 16}), "num_heads"),
    ("IFA.3", decode({"query": tensor((B, 1, N1 * D + 4))}, layout="BSH"), "num_heads"),
    ("IFA.3", decode(both((B, 3, S, D)), {"num_key_value_heads": 3}), "num_key_value_heads"),
    (
        "IFA.3",
        decode({"query": tensor((B, 65, 1, D)), **both((B, 1, S, D))}, {"num_heads": 65, "num_key_value_heads": 1}),
        "num_key_value_heads",
    ),
    ("IFA.4", decode({"query": tensor((B, N1, 1, 528)), **both((B, N2, S, 528))}), "query"),
    (
        "IFA.4",
        decode({"query": tensor((65537, N1, 1, D)), **both((65537, N2, S, D))}),
        "query",
    ),
    (
        "IFA.4",
        decode(
            {"query": tensor((B, 257, 1, D)), **both((B, 257, S, D))}, {"num_heads": 257, "num_key_value_heads": 257}
        ),
        "key",
    ),
    ("IFA.5", decode({"value": [tensor((B, N2, S - 1, D))]}), "value"),
    ("IFA.5", decode({"value": [tensor(KEYS["BNSD"])] * 2}), "value"),
    ("IFA.5", decode(both((1, N2, S, D), count=3)), "key"),
    ("IFA.5", decode(both((B, N2, S, D), count=2)), "key"),
    ("IFA.5", decode(both((1, N2, S, D))), "key"),
    ("IFA.5", decode(both((B, N2, S, D // 2))), "key"),
    ("IFA.5", decode(both((B, N2 // 2, S, 2 * D))), "key"),
    ("IFA.6", decode({"atten_mask": tensor((B, S), "DT_FLOAT16")}), "atten_mask"),
    ("IFA.6", decode({"atten_mask": tensor((B, S - 1), "DT_BOOL")}), "atten_mask"),
    ("IFA.6", decode({"atten_mask": tensor((1, S), "DT_BOOL")}), "atten_mask"),
    ("IFA.6", decode({"atten_mask": tensor((B, N1, 1, S), "DT_BOOL")}), "atten_mask"),
    ("IFA.6", decode({"atten_mask": tensor((S,), "DT_BOOL")}), "atten_mask"),
    ("IFA.6", decode({"atten_mask": constant([[0] * 95 + [3]] * B, "DT_UINT8")}), "atten_mask"),
    ("IFA.6", decode(paged(atten_mask=tensor((B, 95), "DT_BOOL")), {"block_size": 32}), "atten_mask"),
    ("IFA.7", decode({"pse_shift": tensor((B, N1, 1, S), "DT_BF16")}), "pse_shift"),
    ("IFA.7", decode({"pse_shift": tensor((B, 1, 1, S))}), "pse_shift"),
    ("IFA.7", decode({"pse_shift": tensor((B, N1, 1, S - 1))}), "pse_shift"),
    ("IFA.7", decode({"pse_shift": tensor((B, N1, S))}), "pse_shift"),
    ("IFA.8", decode({"actual_seq_lengths": tensor((3,), "DT_INT64")}), "actual_seq_lengths"),
    ("IFA.8", decode({"actual_seq_lengths": constant([3, 97])}), "actual_seq_lengths"),
    ("IFA.8", decode({"actual_seq_lengths": constant([-1])}), "actual_seq_lengths"),
    ("IFA.9", decode(paged(), {"block_size": 0}), "block_size"),
    ("IFA.9", decode(paged(), {"block_size": 24}), "block_size"),
    ("IFA.9", decode(paged(), {"block_size": 528}), "block_size"),
    ("IFA.9", decode(paged(), {"block_size": 48}), "key"),
    ("IFA.9", decode(paged(block_table=tensor((3, 3), "DT_INT32")), {"block_size": 32}), "block_table"),
    ("IFA.9", decode(paged(actual_seq_lengths=None), {"block_size": 32}), "actual_seq_lengths"),
    ("IFA.9", decode(paged(kv_padding_size=constant([0])), {"block_size": 32}), "kv_padding_size"),
    ("IFA.9", decode(paged() | both((9, N2, 32, D), count=2), {"block_size": 32}), "key"),
    (
        "IFA.9",
        decode(paged(block_table=constant([[0, 1, 99], [2, 3, 9]], "DT_INT32")), {"block_size": 32}),
        "block_table",
    ),
    ("IFA.10", decode({"kv_padding_size": constant([3])}), "actual_seq_lengths"),
    ("IFA.10", decode({"kv_padding_size": constant([3, 4]), "actual_seq_lengths": constant([3])}), "kv_padding_size"),
    ("IFA.10", decode({"kv_padding_size": constant([30]), "actual_seq_lengths": constant([70])}), "kv_padding_size"),
    ("IFA.11", decode(quantised(antiquant_scale=None)), "antiquant_scale"),
    ("IFA.11", decode(quantised(antiquant_scale=tensor((2,), "DT_BF16"))), "antiquant_scale"),
    ("IFA.11", decode(quantised(antiquant_scale=tensor((2, N1, D)))), "antiquant_scale"),
    ("IFA.11", decode(quantised(antiquant_offset=tensor((2, N2, D)))), "antiquant_offset"),
    ("IFA.11", decode({"antiquant_scale": tensor((2,))}), "antiquant_scale"),
    ("IFA.12", decode({"quant_offset2": tensor((1,), "DT_FLOAT")}), "quant_scale2"),
    ("IFA.12", decode(outputs={"attention_out": tensor(QUERIES["BNSD"], "DT_INT8")}), "quant_scale2"),
    ("IFA.12", decode({"quant_scale2": tensor((N2, D), "DT_FLOAT")}), "quant_scale2"),
    ("IFA.12", decode({"quant_scale2": tensor((1,), "DT_BF16")}), "quant_scale2"),
    (
        "IFA.12",
        decode({"quant_scale2": tensor((1,), "DT_FLOAT"), "quant_offset2": tensor((N1, D), "DT_FLOAT")}),
        "quant_offset2",
    ),
    ("IFA.12", decode({"dequant_scale1": tensor((1,), "DT_FLOAT")}), "dequant_scale1"),
    ("IFA.14", decode(attrs={"inner_precise": 2}), "inner_precise"),
    ("IFA.15", decode(attrs={"cpu_softcap": 1e7}), "cpu_softcap"),
]

ON_310P: list[tuple[str, NodeView, str]] = [
    (
        "IFA.1",
        decode(dtype="DT_BF16", attrs={"num_key_value_heads": 0}, inputs=both((B, N1, S, D), "DT_BF16")),
        "query",
    ),
    ("IFA.3", decode(), "num_key_value_heads"),
    (
        "IFA.4",
        decode({"query": tensor((B, N1, 1, 40)), **both((B, N1, S, 40))}, {"num_key_value_heads": 0}),
        "query",
    ),
    (
        "IFA.4",
        decode(both((B, N1, 65537, D)), {"num_key_value_heads": 0}),
        "key",
    ),
    (
        "IFA.13",
        decode(both((B, N1, S, D)) | {"quant_scale2": tensor((1,), "DT_FLOAT")}, {"num_key_value_heads": 0}),
        "quant_scale2",
    ),
]


@pytest.mark.parametrize("node", GOOD)
def test_good_nodes_break_nothing(node: NodeView) -> None:
    assert verify(node) == []
    assert verify(node, "A2") == []


@pytest.mark.parametrize(("constraint", "node", "culprit"), BROKEN)
def test_each_limit_has_its_number(constraint: str, node: NodeView, culprit: str) -> None:
    found = [each for each in verify(node) if each.extension != "EXT-SOFTCAP"]  # which IFA.15 is about
    assert [(entry.constraint, entry.tensor, entry.code) for entry in found] == [(constraint, culprit, 161002)]
    assert culprit in found[0].message


@pytest.mark.parametrize(("constraint", "node", "culprit"), ON_310P)
def test_limits_of_310p(constraint: str, node: NodeView, culprit: str) -> None:
    assert (constraint, culprit) in [(entry.constraint, entry.tensor) for entry in verify(node, "310P")]


def test_a_soft_cap_is_read_as_float32() -> None:
    def broken(cap: float) -> list[str]:
        found = verify(decode(attrs={"cpu_softcap": cap}), "ort")
        return [each.constraint for each in found if each.extension != "EXT-SOFTCAP"]

    assert (broken(-1e-45), broken(-1e-46)) == (["IFA.15"], [])


def test_extensions_of_the_cpu_kernel() -> None:
    assert extensions_used(decode(dtype="DT_FLOAT")) == ("EXT-DECODE-FLOAT",)
    assert extensions_used(decode(attrs={"cpu_softcap": 30.0})) == ("EXT-SOFTCAP",)
    assert extensions_used(decode(int8_path(), dtype="DT_INT8")) == ("EXT-DECODE-INT8",)
    assert [entry.constraint for entry in verify(decode(int8_path(quant_scale1=None), dtype="DT_INT8"))] == [
        "IFA.1",
        "IFA.12",
    ]


def test_a_missing_list_is_a_missing_input() -> None:
    (found,) = verify(decode({"key": None, "value": []}))[:1]
    assert (found.constraint, found.code, found.tensor) == ("G0", 161001, "key")


def test_shape_and_type_of_the_result() -> None:
    query = tensor(QUERIES["BSH"], "DT_BF16")
    attrs = {"num_heads": N1, "input_layout": "BSH"}
    inputs: dict[str, Any] = {"query": query, "key": [query], "value": [query]}
    assert infer("IncreFlashAttention", inputs, attrs)["attention_out"] == query
    quantised = infer("IncreFlashAttention", {**inputs, "quant_scale2": tensor((1,), "DT_FLOAT")}, attrs)
    assert quantised["attention_out"] == tensor(QUERIES["BSH"], "DT_INT8")


T, W = 12, 128


def ring(
    inputs: Mapping[str, TensorInfo | None] | None = None, attrs: Mapping[str, Any] | None = None, layout: str = "TND"
) -> NodeView:
    out = tensor((T, N1, W) if layout == "TND" else (S, B, N1 * D))
    rows = tensor((T, N1, 8) if layout == "TND" else (B, N1, S, 8), "DT_FLOAT")
    tensors: dict[str, TensorInfo | None] = {}
    for part in ("prev", "cur"):
        tensors |= {f"{part}_attn_out": out, f"{part}_softmax_max": rows, f"{part}_softmax_sum": rows}
    if layout == "TND":
        tensors["actual_seq_qlen"] = constant([0, 5, 5, T])
    given = {name: info for name, info in (tensors | dict(inputs or {})).items() if info is not None}
    return NodeView("RingAttentionUpdate", "ring", given, {}, {"input_layout": layout, **(attrs or {})})


def update(inputs: Mapping[str, list[TensorInfo]] | None = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    lists = {"lse": [tensor((T,), "DT_FLOAT")] * 2, "go": [tensor((T, D))] * 2}
    return NodeView(
        "AttentionUpdate", "update", {**lists, **(inputs or {})}, {}, {"update_type": 1, "sp": 2, **(attrs or {})}
    )


MERGES: list[tuple[str, NodeView, str, int]] = [
    ("RAU.1", ring({"cur_attn_out": tensor((T, N1, W), "DT_BF16")}), "cur_attn_out", 161002),
    ("RAU.2", ring(attrs={"input_layout": "BSH"}), "input_layout", 161002),
    ("RAU.2", ring({"cur_attn_out": tensor((T, N1, W + 64))}), "cur_attn_out", 161002),
    ("RAU.3", ring({"cur_softmax_sum": tensor((T, N1, 1), "DT_FLOAT")}), "cur_softmax_sum", 161002),
    (
        "RAU.3",
        ring({"prev_softmax_max": tensor((B, N1 + 1, S, 8), "DT_FLOAT")}, layout="SBH"),
        "prev_softmax_sum",
        161002,
    ),
    ("RAU.4", ring({f"{part}_attn_out": tensor((T, N1, 96)) for part in ("prev", "cur")}), "prev_attn_out", 161002),
    ("RAU.5", ring({"actual_seq_qlen": None}), "actual_seq_qlen", 161001),
    ("RAU.5", ring({"actual_seq_qlen": constant([5, T])}), "actual_seq_qlen", 161002),
    ("RAU.6", ring(attrs={"input_softmax_layout": "BSH"}), "input_softmax_layout", 161002),
    ("AU.1", update({"lse": [tensor((T,), "DT_FLOAT16")] * 2}), "lse", 161002),
    ("AU.1", update({"go": [tensor((T, D)), tensor((T, D), "DT_BF16")]}), "go", 161002),
    ("AU.2", update(attrs={"sp": 17}), "sp", 161002),
    ("AU.2", update(attrs={"sp": 3}, inputs={"go": [tensor((T, D))] * 3}), "lse", 161002),
    ("AU.3", update(attrs={"update_type": 2}), "update_type", 161002),
    ("AU.5", update({"go": [tensor((T - 1, D))] * 2}), "go", 161002),
]


@pytest.mark.parametrize("node", [ring(), ring(layout="SBH"), update(), update(attrs={"update_type": 0})])
def test_good_merges_break_nothing(node: NodeView) -> None:
    assert verify(node) == []


@pytest.mark.parametrize(("constraint", "node", "culprit", "code"), MERGES)
def test_each_limit_of_merging_has_its_number(constraint: str, node: NodeView, culprit: str, code: int) -> None:
    found = [(entry.constraint, entry.tensor, entry.code) for entry in verify(node)]
    assert found == [(constraint, culprit, code)]


def test_every_number_is_in_the_tables() -> None:
    numbers = {int(constraint.split(".")[1]) for constraint, *_ in (*BROKEN, *ON_310P)}
    assert numbers == set(operator("IncreFlashAttention").rules.table)
    assert {int(c.split(".")[1]) for c, *_ in MERGES if c.startswith("RAU")} == set(
        operator("RingAttentionUpdate").rules.table
    )
