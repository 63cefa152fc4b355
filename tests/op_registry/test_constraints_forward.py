"""FA.1 to FA.24: each row breaks exactly one constraint of an otherwise good FlashAttentionScore."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, extensions_used, operator, verify

from .nodes import DV, KV_ENDS, N1, N2, Q_ENDS, S1, S2, SHAPES, B, D, constant, forward, mask, tensor

FULL = mask(B, 1, S1, S2)
TRIANGLE = mask(2048, 2048)
HALF = {"keep_prob": 0.5}


def prefix(*values: int) -> dict[str, Any]:
    return {"atten_mask": mask(3072, 2048), "prefix": constant(values)}


def packed(q: tuple[int, ...] = Q_ENDS, kv: tuple[int, ...] = KV_ENDS, **more: Any) -> dict[str, Any]:
    return {"actual_seq_qlen": constant(q), "actual_seq_kvlen": constant(kv), **more}


def batch_one(layout: str, name: str) -> TensorInfo:
    """query, key or value of a good node, with batch 1."""
    shape = SHAPES[layout][("query", "key", "value").index(name)]
    axis = 1 if layout == "SBH" else 0
    return tensor((*shape[:axis], 1, *shape[axis + 1 :]))


BROKEN: list[tuple[str, NodeView, str]] = [
    # 1: types of query, key and value
    ("FA.1", forward({"key": tensor(SHAPES["BNSD"][1], "DT_BF16")}), "key"),
    ("FA.1", forward(dtype="DT_INT8"), "query"),
    ("FA.1", forward(dtype="DT_FLOAT8_E5M2"), "query"),
    # 2: layout and ranks
    ("FA.2", forward(attrs={"input_layout": "NSD"}), "input_layout"),
    ("FA.2", forward(attrs={"input_layout": "bnsd"}), "input_layout"),
    ("FA.2", forward({"value": tensor((B, S2, N2 * DV))}), "value"),
    # 3: head count
    ("FA.3", forward(attrs={"head_num": 4}), "head_num"),
    ("FA.3", forward(attrs={"head_num": 0}), "head_num"),
    ("FA.3", forward(attrs={"head_num": 7}, layout="BSH"), "head_num"),
    # 4: head sizes
    ("FA.4", forward({"key": tensor((B, N2, S2, D + 1))}), "key"),
    ("FA.4", forward({"value": tensor((B, N2, S2, 769))}), "value"),
    ("FA.4", forward({"value": tensor((B, S2, N2 * DV + 1))}, layout="BSH"), "value"),
    ("FA.4", forward({"query": tensor((B, N1, S1, 769)), "key": tensor((B, N2, S2, 769))}), "query"),
    # 5: head groups
    ("FA.5", forward({"key": tensor((B, 3, S2, D)), "value": tensor((B, 3, S2, DV))}), "key"),
    ("FA.5", forward({"key": tensor((B, S2, 100)), "value": tensor((B, S2, 100))}, layout="BSH"), "key"),
    # 6: one batch, key like value
    ("FA.6", forward({"query": tensor((3, N1, S1, D))}), "key"),
    ("FA.6", forward({"query": tensor((S1, 3, N1 * D))}, layout="SBH"), "key"),
    ("FA.6", forward({"value": tensor((3, N2, S2, DV))}), "value"),
    ("FA.6", forward({"query": tensor((0, N1, S1, D))}), "key"),
    ("FA.6", forward({"value": tensor((B, N2, S2 + 1, DV))}), "value"),
    ("FA.6", forward({"value": tensor((B, 2, S2, DV))}), "value"),
    ("FA.6", forward({"value": tensor((S2 + 1, N2, DV))}, layout="TND"), "value"),
    # 7: keep_prob
    ("FA.7", forward(attrs={"keep_prob": 0.0}), "keep_prob"),
    ("FA.7", forward(attrs={"keep_prob": 1.5}), "keep_prob"),
    # 8: pse_type
    ("FA.8", forward({"real_shift": tensor((B, N1, S1, S2))}, {"pse_type": 4}), "pse_type"),
    ("FA.8", forward(attrs={"pse_type": 0}), "real_shift"),
    ("FA.8", forward(attrs={"pse_type": 2}), "real_shift"),
    # 9: type of the bias, and the slopes
    ("FA.9", forward({"real_shift": tensor((B, N1, S1, S2), "DT_BF16")}), "real_shift"),
    (
        "FA.9",
        forward(
            {"real_shift": tensor((N1,)), "key": tensor((B, N2, S1, D)), "value": tensor((B, N2, S1, DV))},
            {"pse_type": 2},
        ),
        "real_shift",
    ),
    (
        "FA.9",
        forward(
            {
                "real_shift": tensor((N1, B), "DT_FLOAT"),
                "key": tensor((B, N2, S1, D)),
                "value": tensor((B, N2, S1, DV)),
            },
            {"pse_type": 3},
        ),
        "real_shift",
    ),
    ("FA.9", forward({"real_shift": tensor((N1,), "DT_FLOAT")}, {"pse_type": 2}), "real_shift"),
    (
        "FA.9",
        forward(
            packed(real_shift=tensor((N1,), "DT_FLOAT"), atten_mask=TRIANGLE),
            {"pse_type": 2, "sparse_mode": 7, "next_tockens": 0},
            "TND",
        ),
        "real_shift",
    ),
    (
        "FA.9",
        forward(
            packed((10, 16), (10, 24), real_shift=tensor((N1,), "DT_FLOAT"), atten_mask=TRIANGLE),
            {"pse_type": 2, "sparse_mode": 8},
            "TND",
        ),
        "real_shift",
    ),
    (
        "FA.9",
        forward(
            packed(
                (10, 16),
                (18, 24),
                real_shift=tensor((N1,), "DT_FLOAT"),
                atten_mask=TRIANGLE,
                q_start_idx=constant([3]),
            ),
            {"pse_type": 2, "sparse_mode": 8},
            "TND",
        ),
        "real_shift",
    ),
    # 10: shape of the bias
    ("FA.10", forward({"real_shift": tensor((B, N1, S1, S2 + 1))}), "real_shift"),
    ("FA.10", forward({"real_shift": tensor((N1, S1, S2))}), "real_shift"),
    ("FA.10", forward({"real_shift": tensor((1, N1, 1024, S2))}), "real_shift"),
    (
        "FA.10",
        forward(
            {
                "query": tensor((B, N1, 2048, D)),
                "key": tensor((B, N2, 2048, D)),
                "value": tensor((B, N2, 2048, DV)),
                "real_shift": tensor((1, N1, 1024, 2048)),
            }
        ),
        "real_shift",
    ),
    (
        "FA.10",
        forward(
            {
                "query": tensor((B, N1, 2048, D)),
                "key": tensor((B, N2, 2049, D)),
                "value": tensor((B, N2, 2049, DV)),
                "real_shift": tensor((1, N1, 1024, 2049)),
                "atten_mask": TRIANGLE,
            },
            {"sparse_mode": 2},
        ),
        "real_shift",
    ),
    ("FA.10", forward(packed((10, 16), (12, 24), real_shift=tensor((N1 * S2,))), layout="TND"), "real_shift"),
    ("FA.10", forward(packed((10, 16), (12, 24), real_shift=tensor((1, N1, 1024, 12))), layout="TND"), "real_shift"),
    ("FA.10", forward(packed((10, 16), (12, 24), real_shift=tensor((N1, S2))), layout="TND"), "real_shift"),
    # 11: the mask
    ("FA.11", forward({"atten_mask": tensor((B, 1, S1, S2), "DT_FLOAT16")}), "atten_mask"),
    ("FA.11", forward({"atten_mask": mask(B, S1, S2)}), "atten_mask"),
    ("FA.11", forward({"atten_mask": mask(B, 1, S1, S2 + 1)}), "atten_mask"),
    ("FA.11", forward({"atten_mask": mask(S1, S2)}, {"sparse_mode": 2}), "atten_mask"),
    ("FA.11", forward({"atten_mask": TRIANGLE, "prefix": constant([S2, S2])}, {"sparse_mode": 6}), "atten_mask"),
    (
        "FA.11",
        forward(
            {"atten_mask": TensorInfo("DT_BOOL", (2048, 2048), np.tril(np.ones((2048, 2048), bool)))},
            {"sparse_mode": 3},
        ),
        "atten_mask",
    ),
    ("FA.11", forward({"atten_mask": mask(11, 12)}, layout="TND"), "atten_mask"),
    (
        "FA.11",
        forward({"atten_mask": TRIANGLE}, {"sparse_mode": 3, "cpu_mask_batch": "repeated"}, "TND"),
        "cpu_mask_batch",
    ),
    ("FA.11", forward({"atten_mask": mask(1, 1, 11, 12)}, layout="TND"), "atten_mask"),
    ("FA.11", forward({"atten_mask": mask(2, 1, 10, 12)}, layout="TND"), "atten_mask"),
    # 12: sparse_mode
    ("FA.12", forward({"atten_mask": FULL}, {"sparse_mode": 7}), "sparse_mode"),
    ("FA.12", forward({"atten_mask": FULL}, {"sparse_mode": -1}), "sparse_mode"),
    ("FA.12", forward({"atten_mask": mask(10, 12)}, {"sparse_mode": 5}, "TND"), "sparse_mode"),
    # 13: the band
    ("FA.13", forward({"atten_mask": FULL}, {"pre_tockens": -1, "next_tockens": -1}), "pre_tockens"),
    ("FA.13", forward({"atten_mask": FULL}, {"pre_tockens": -8, "next_tockens": 4}), "pre_tockens"),
    ("FA.13", forward({"atten_mask": FULL}, {"pre_tockens": 4, "next_tockens": -8}), "next_tockens"),
    (
        "FA.13",
        forward({"atten_mask": TRIANGLE}, {"sparse_mode": 4, "pre_tockens": 4, "next_tockens": -20}),
        "pre_tockens",
    ),
    ("FA.13", forward({"atten_mask": mask(10, 12)}, {"next_tockens": -1}, "TND"), "next_tockens"),
    (
        "FA.13",
        forward(packed((10, 16), (2, 24), atten_mask=mask(10, 22)), {"pre_tockens": 4, "next_tockens": 4}, "TND"),
        "pre_tockens",
    ),
    ("FA.13", forward(packed((10, 16), (8, 24), atten_mask=TRIANGLE), {"sparse_mode": 3}, "TND"), "actual_seq_qlen"),
    ("FA.13", forward({"atten_mask": TRIANGLE}, {"sparse_mode": 4, "pre_tockens": -1}, "TND"), "pre_tockens"),
    (
        "FA.13",
        forward(packed((10, 16), (4, 24), atten_mask=TRIANGLE), {"sparse_mode": 4, "next_tockens": 5}, "TND"),
        "next_tockens",
    ),
    ("FA.13", forward({"atten_mask": TRIANGLE}, {"sparse_mode": 7}, "TND"), "next_tockens"),
    (
        "FA.13",
        forward({"atten_mask": TRIANGLE}, {"sparse_mode": 7, "pre_tockens": 11, "next_tockens": 0}, "TND"),
        "pre_tockens",
    ),
    ("FA.13", forward({"atten_mask": TRIANGLE}, {"sparse_mode": 8, "pre_tockens": 11}, "TND"), "pre_tockens"),
    # 14: prefix
    ("FA.14", forward({"atten_mask": mask(3072, 2048)}, {"sparse_mode": 6}), "prefix"),
    ("FA.14", forward(prefix(S2 - S1, S2 - S1 - 1), {"sparse_mode": 6}), "prefix"),
    ("FA.14", forward(prefix(S2, S2 + 1), {"sparse_mode": 6}), "prefix"),
    ("FA.14", forward(prefix(S2), {"sparse_mode": 6}), "prefix"),
    ("FA.14", forward(packed((10, 16), (12, 24)) | prefix(1, 12), {"sparse_mode": 6}, "TND"), "prefix"),
    # 15: dropout
    ("FA.15", forward({"drop_mask": tensor((B * N1 * S1 * S2 // 8 - 1,), "DT_UINT8")}, HALF), "drop_mask"),
    ("FA.15", forward({"drop_mask": tensor((10**6,), "DT_BOOL")}, HALF), "drop_mask"),
    ("FA.15", forward({"drop_mask": tensor((191,), "DT_UINT8")}, HALF, "TND"), "drop_mask"),
    ("FA.15", forward(attrs=HALF), "drop_mask"),
    # 16: sink
    ("FA.16", forward({"sink": tensor((N1,), "DT_FLOAT16")}), "sink"),
    ("FA.16", forward({"sink": tensor((N2,), "DT_FLOAT")}), "sink"),
    ("FA.16", forward({"sink": tensor((1, N1), "DT_FLOAT")}), "sink"),
    # 17: lengths of packed sequences
    ("FA.17", forward({"actual_seq_qlen": None}, layout="TND"), "actual_seq_qlen"),
    ("FA.17", forward(packed((10, 16), KV_ENDS), layout="TND"), "actual_seq_kvlen"),
    ("FA.17", forward(packed((10, 10, 17)), layout="TND"), "actual_seq_qlen"),
    ("FA.17", forward(packed((10, 8, 16)), layout="TND"), "actual_seq_qlen"),
    ("FA.17", forward({"actual_seq_qlen": tensor((1, 3), "DT_INT64")}, layout="TND"), "actual_seq_qlen"),
    ("FA.17", forward({"actual_seq_qlen": constant(Q_ENDS)}), "actual_seq_qlen"),
    ("FA.17", forward({"actual_seq_kvlen": constant([S2 + 1])}), "actual_seq_kvlen"),
    ("FA.17", forward({"actual_seq_kvlen": constant([4, 5])}), "actual_seq_kvlen"),
    # 18: rope
    ("FA.18", forward({"query_rope": tensor((S1, N1, 64))}, layout="TND"), "key_rope"),
    (
        "FA.18",
        forward({"query_rope": tensor((S1, N1, 64)), "key_rope": tensor((S2, N2, 32))}, layout="TND"),
        "key_rope",
    ),
    (
        "FA.18",
        forward({"query_rope": tensor((B, S1, N1 * 8)), "key_rope": tensor((B, S2, N2 * 8 + 1))}, layout="BSH"),
        "key_rope",
    ),
    (
        "FA.18",
        forward({"query_rope": tensor((S1, N1, 64)), "key_rope": tensor((S2, N1, 64))}, layout="TND"),
        "key_rope",
    ),
    (
        "FA.18",
        forward({"query_rope": tensor((S1, N1, 64)), "key_rope": tensor((S2, N2, 64), "DT_BF16")}, layout="TND"),
        "key_rope",
    ),
    # 19: start indices
    ("FA.19", forward({"q_start_idx": constant([[0]])}), "q_start_idx"),
    ("FA.19", forward({"q_start_idx": constant([0]), "kv_start_idx": constant([2**31])}), "kv_start_idx"),
    ("FA.19", forward({"q_start_idx": constant([2**31 + 1])}), "kv_start_idx"),
    # 20 to 22
    ("FA.20", forward({"padding_mask": tensor((B, S2))}), "padding_mask"),
    ("FA.21", forward(attrs={"softmax_out_layout": "TND"}), "softmax_out_layout"),
    ("FA.22", forward(attrs={"out_dtype": 2}), "out_dtype"),
    # 23: a sequence with queries and no key
    ("FA.23", forward(packed((10, 16), (0, 24)), layout="TND"), "actual_seq_kvlen"),
    # 24: soft caps, which have a diagnostic of G0 besides: they are an extension
    ("FA.24", forward(attrs={"cpu_softcap": -1.0}), "cpu_softcap"),
    ("FA.24", forward(attrs={"cpu_softcap": 1e-7}), "cpu_softcap"),
    ("FA.24", forward(attrs={"cpu_softcap": -1e-45}), "cpu_softcap"),
    ("FA.24", forward(attrs={"cpu_softcap": 1e5, "scale_value": 1e-34}), "scale_value"),
    ("FA.24", forward(attrs={"cpu_softcap": 1e-5, "scale_value": 1e34}), "scale_value"),
    ("FA.24", forward({"real_shift": tensor((B, N1, S1, S2))}, {"cpu_softcap": 5.0}), "pse_type"),
]


@pytest.mark.parametrize("target", ["ort", "Ascend910B2", "A3"])
@pytest.mark.parametrize(("constraint", "node", "culprit"), BROKEN)
def test_one_broken_constraint_is_found(constraint: str, node: NodeView, culprit: str, target: str) -> None:
    found = [each for each in verify(node, target) if each.extension not in ("EXT-SOFTCAP", "EXT-MASK-BATCH")]
    extension = {"FA.13": "EXT-BAND-OUTSIDE", "FA.23": "EXT-EMPTY-SEQUENCES"}.get(constraint)
    assert [(v.constraint, v.code, v.tensor, v.extension) for v in found] == [(constraint, 161002, culprit, extension)]
    assert culprit in found[0].message


def test_every_number_has_a_row() -> None:
    numbers = operator("FlashAttentionScore").rules.table
    assert sorted(numbers) == list(range(1, 25))
    assert {constraint for constraint, _, _ in BROKEN} == {f"FA.{number}" for number in numbers}


def square(size: int, dtype: str = "DT_FLOAT16") -> dict[str, TensorInfo]:
    return {
        "query": tensor((B, N1, size, D), dtype),
        "key": tensor((B, N2, size, D), dtype),
        "value": tensor((B, N2, size, DV), dtype),
    }


UPPER = TensorInfo("DT_BOOL", (2048, 2048), np.triu(np.ones((2048, 2048), bool), 1))
PREFIX_MASK = TensorInfo(
    "DT_UINT8",
    (3072, 2048),
    np.concatenate([np.triu(np.ones((2048, 2048), np.uint8), 1), np.repeat([[0, 1]], 1024, 1).repeat(1024, 0)]).astype(
        np.uint8
    ),
)

GOOD: list[tuple[str, NodeView]] = [
    *((layout, forward(layout=layout)) for layout in SHAPES),
    *((dtype, forward(dtype=dtype)) for dtype in ("DT_FLOAT", "DT_BF16")),
    ("mask of each head", forward({"atten_mask": mask(B, N1, S1, S2)})),
    ("mask of each batch", forward({"atten_mask": mask(B, 1, S1, S2)})),
    ("mask of all, rank 4", forward({"atten_mask": mask(1, 1, S1, S2)})),
    ("mask of all, rank 2", forward({"atten_mask": mask(S1, S2)})),
    ("symbolic mask", forward({"atten_mask": mask("batch", 1, "s", "t")})),
    ("triangle", forward({"atten_mask": UPPER}, {"sparse_mode": 3})),
    ("triangle in TND", forward({"atten_mask": UPPER}, {"sparse_mode": 2}, "TND")),
    ("prefix", forward({"atten_mask": PREFIX_MASK, "prefix": constant([8, 24])}, {"sparse_mode": 6})),
    ("band", forward({"atten_mask": UPPER}, {"sparse_mode": 4, "pre_tockens": 3, "next_tockens": 0})),
    ("TND mode 7", forward({"atten_mask": UPPER}, {"sparse_mode": 7, "next_tockens": 0}, "TND")),
    ("TND mode 8", forward({"atten_mask": UPPER}, {"sparse_mode": 8}, "TND")),
    ("packed mask", forward({"atten_mask": mask(10, 12)}, layout="TND")),
    ("packed mask of rank 4", forward({"atten_mask": mask(1, 1, 10, 12)}, layout="TND")),
    ("packed mask over all", forward({"atten_mask": mask(16, 24)}, layout="TND")),
    ("mode ignored without a mask", forward(attrs={"sparse_mode": 99, "pre_tockens": -5})),
    ("bias", forward({"real_shift": tensor((B, N1, S1, S2))})),
    ("bias of all", forward({"real_shift": tensor((1, N1, S1, S2))}, {"pse_type": 0})),
    ("bias of one row", forward({"real_shift": tensor((B, N1, 1, S2))})),
    ("bias of one row of all", forward({"real_shift": tensor((1, N1, 1, S2))})),
    ("full bias of 1024 rows", forward(square(1024) | {"real_shift": tensor((1, N1, 1024, 1024))})),
    (
        "compressed ALiBi",
        forward(square(2048) | {"real_shift": tensor((1, N1, 1024, 2048)), "atten_mask": UPPER}, {"sparse_mode": 2}),
    ),
    (
        "slopes",
        forward(square(S1) | {"real_shift": tensor((B, N1), "DT_FLOAT")}, {"pse_type": 3}),
    ),
    ("flat bias", forward(packed((10, 16), (12, 24), real_shift=tensor((N1 * 24, 1))), layout="TND")),
    ("dropout", forward({"drop_mask": tensor((B * N1 * S1 * S2 // 8,), "DT_UINT8")}, HALF)),
    ("sink", forward({"sink": tensor((N1,), "DT_FLOAT")})),
    ("start", forward({"q_start_idx": constant([4]), "kv_start_idx": constant([4])})),
    ("trailing empty sequences", forward(packed((10, 16, 0), (12, 24, 0)), layout="TND")),
    ("lengths unknown", forward(packed() | {"actual_seq_qlen": tensor((3,), "DT_INT64")}, layout="TND")),
    ("empty batch", forward({n: tensor((0, h, 4, D)) for n, h in (("query", N1), ("key", N2), ("value", N2))})),
    ("no keys", forward({"key": tensor((B, N2, 0, D)), "value": tensor((B, N2, 0, DV))})),
    (
        "shapes unknown",
        forward({"query": tensor(None), "key": tensor(None), "value": tensor(None), "atten_mask": mask("a", "b")}),
    ),
    (
        "rope",
        forward(
            {
                "query": tensor((S1, N1, 128), "DT_BF16"),
                "key": tensor((S2, N2, 128), "DT_BF16"),
                "value": tensor((S2, N2, 128), "DT_BF16"),
                "query_rope": tensor((S1, N1, 64), "DT_BF16"),
                "key_rope": tensor((S2, N2, 64), "DT_BF16"),
            },
            layout="TND",
        ),
    ),
]


OF_SIX = {"query": tensor((6, N1, S1, D)), "key": tensor((6, N2, S2, D)), "value": tensor((6, N2, S2, DV))}


@pytest.mark.parametrize(
    "windows, allowed", [(1, True), (2, True), (3, True), (6, True), (4, False), (12, False), (0, False)]
)
def test_a_mask_of_a_part_of_the_batch(windows: int, allowed: bool) -> None:
    """Its batch divides that of the operands, if cpu_mask_batch says so; without it, it is theirs or 1."""
    full, keys = mask(windows, N1, S1, S2), mask(windows, N1, 1, S2)
    bias = {"real_shift": tensor((windows, N1, S1, S2))}
    for inputs, mode in (({"atten_mask": full}, 0), ({"atten_mask": keys}, 2), (bias, 0)):
        for batch in ("repeated", ""):
            node = forward(OF_SIX | inputs, {"sparse_mode": mode, "cpu_mask_batch": batch})
            refused = [each for each in verify(node) if each.extension is None]
            assert (not refused) == (allowed if batch else windows in (1, 6)), (inputs, batch)


@pytest.mark.parametrize("target", ["ort", "A2", "Ascend910_9392", "950"])
@pytest.mark.parametrize("node", [node for _, node in GOOD], ids=[name for name, _ in GOOD])
def test_a_good_node_breaks_nothing(node: NodeView, target: str) -> None:
    assert verify(node, target) == []


EXTENDED = [
    ("EXT-MASK-BROADCAST", "FA.11", forward({"atten_mask": mask(B, 1, 1, S2)})),
    ("EXT-MASK-BROADCAST", "FA.11", forward({"atten_mask": mask("batch", 1, 1, "s")})),
    ("EXT-MASK-BROADCAST", "FA.11", forward({"atten_mask": mask(1, N1, S1, S2)})),
    ("EXT-MASK-BROADCAST", "FA.11", forward({"atten_mask": mask(1, S2)})),
    ("EXT-MASK-BROADCAST", "FA.11", forward({"atten_mask": mask(S1, 1)}, layout="BSH")),
    (
        "EXT-MASK-BROADCAST",
        "FA.14",
        forward({"atten_mask": mask(S1, S2), "prefix": constant([S2, S2])}, {"sparse_mode": 5}),
    ),
    (
        "EXT-MASK-BROADCAST",
        "FA.14",
        forward({"atten_mask": mask(1, 1, S1, S2), "prefix": constant([S2, S2])}, {"sparse_mode": 5}),
    ),
    ("EXT-BAND-OUTSIDE", "FA.13", forward({"atten_mask": FULL}, {"pre_tockens": -1, "next_tockens": -1})),
    ("EXT-SHIFT-BROADCAST", "FA.10", forward({"real_shift": tensor((B, 1, 1, S2))})),
    ("EXT-SHIFT-BROADCAST", "FA.10", forward({"real_shift": tensor((1, 1, S1, S2))})),
    ("EXT-SHIFT-BROADCAST", "FA.10", forward({"real_shift": tensor((B, N1, S1, 1))})),
    ("EXT-SHIFT-FLOAT", "FA.9", forward({"real_shift": tensor((B, N1, S1, S2), "DT_FLOAT")}, {"pse_type": 0})),
    ("EXT-EMPTY-ROWS", "G0", forward({"atten_mask": mask(S1, S2)}, {"cpu_empty_rows": "mean"})),
    ("EXT-NAN-ROWS", "G0", forward({"atten_mask": mask(S1, S2)}, {"cpu_nan_rows": "zero"})),
    ("EXT-MASK-VALUE", "G0", forward({"atten_mask": mask(S1, S2)}, {"cpu_mask_value": -1e4})),
    ("EXT-SOFTCAP", "G0", forward(attrs={"cpu_softcap": 50.0})),
    (
        "EXT-MASKED-BIAS",
        "G0",
        forward({"atten_mask": mask(S1, S2), "real_shift": tensor((B, N1, S1, S2))}, {"cpu_masked_bias": "added"}),
    ),
    ("EXT-MASKED-VALUES", "G0", forward({"atten_mask": mask(S1, S2)}, {"cpu_masked_values": "zero"})),
    ("EXT-MASK-BATCH", "G0", forward({"atten_mask": mask(B, 1, S1, S2)}, {"cpu_mask_batch": "repeated"})),
    ("EXT-BAND-MASK", "FA.11", forward({"atten_mask": mask(B, 1, 1, S2)}, {"sparse_mode": 2})),
    ("EXT-BAND-MASK", "FA.11", forward({"atten_mask": mask(1, N1, 1, 1)}, {"sparse_mode": 4})),
    ("EXT-VALUE-WIDER", "FA.4", forward({"value": tensor((B, N2, S2, D + 8))})),
    ("EXT-SINK-FLOAT", "FA.16", forward({"sink": tensor((N1,), "DT_FLOAT")}, dtype="DT_FLOAT")),
    (
        "EXT-ROPE",
        "FA.18",
        forward({"query_rope": tensor((B, N1, S1, 8)), "key_rope": tensor((B, N2, S2, 8))}),
    ),
    (
        "EXT-RANGE",
        "FA.5",
        forward({"query": tensor((B, 512, S1, D))}, {"head_num": 512}),
    ),
    ("EXT-RANGE", "FA.6", forward({"query": tensor((B, N1, 2**20 + 1, D))})),
    ("EXT-KEY-LENGTH", "FA.17", forward({"actual_seq_kvlen": tensor((1,), "DT_INT64")})),
    ("EXT-KEY-LENGTH", "FA.17", forward({"actual_seq_kvlen": constant([4]), "value": tensor((B, N2, 4, DV))})),
    ("EXT-KEY-LENGTH", "FA.17", forward({"actual_seq_kvlen": constant([4]), "atten_mask": mask(B, 1, S1, 4)})),
    *(
        ("EXT-BATCH-BROADCAST", "FA.6", forward({name: batch_one(layout, name)}, layout=layout))
        for layout in ("BSH", "SBH", "BSND", "BNSD")
        for name in ("query", "key", "value")
    ),
    ("EXT-BATCH-BROADCAST", "FA.6", forward({"query": tensor((1, N1, S1, D)), "atten_mask": FULL})),
    ("EXT-BATCH-BROADCAST", "FA.6", forward({"query": tensor((1, N1, S1, D)), "value": tensor(("b", N2, S2, DV))})),
]


def test_two_of_three_may_have_batch_one() -> None:
    node = forward({"key": batch_one("BNSD", "key"), "value": batch_one("BNSD", "value")})
    assert [(v.constraint, v.tensor, v.message) for v in verify(node)] == [
        ("FA.6", "key", "key has the batch size 1, expected 2 as query"),
        ("FA.6", "value", "value has the batch size 1, expected 2 as query"),
    ]
    assert extensions_used(node) == ("EXT-BATCH-BROADCAST",)
    (violation,) = verify(forward({"query": batch_one("BNSD", "query")}))
    assert violation.message == "query has the batch size 1, expected 2 as key"


def test_a_batch_of_one_excuses_no_other() -> None:
    """1, 2 and 3: the 1 could be repeated, but not to both."""
    node = forward({"query": tensor((1, N1, S1, D)), "value": tensor((3, N2, S2, DV))})
    assert [(v.tensor, v.extension) for v in verify(node)] == [("query", "EXT-BATCH-BROADCAST"), ("value", None)]
    packed_heads = forward({"key": tensor((S2, 1, D)), "value": tensor((1, N2, DV))}, layout="TND")
    assert extensions_used(packed_heads) == ()


def test_masks_are_measured_by_the_common_batch() -> None:
    node = forward({"query": tensor((1, N1, S1, D)), "atten_mask": mask(3, 1, S1, S2)})
    assert [(v.constraint, v.extension) for v in verify(node)] == [
        ("FA.6", "EXT-BATCH-BROADCAST"),
        ("FA.11", None),
    ]


@pytest.mark.parametrize(("extension", "constraint", "node"), EXTENDED)
def test_an_extension_is_reported_for_every_target(extension: str, constraint: str, node: NodeView) -> None:
    for target in ("ort", "A2"):
        assert [(v.constraint, v.extension) for v in verify(node, target)] == [(constraint, extension)]
    assert extensions_used(node) == (extension,)


def test_the_extension_table_is_closed() -> None:
    found = verify(forward(attrs={"cpu_fast": 1}))
    assert [(v.constraint, v.extension) for v in found] == [("G0", None)]
    found = verify(forward(attrs={"cpu_empty_rows": "none"}))
    assert [(v.constraint, v.extension) for v in found] == [("G0", None)]
    assert "'unmasked'" in found[0].message


def test_several_broken_constraints_come_in_order() -> None:
    node = forward({"atten_mask": mask(3, 3), "padding_mask": tensor((1,))}, {"head_num": 4, "keep_prob": 2.0})
    assert [v.constraint for v in verify(node)] == ["FA.3", "FA.7", "FA.11", "FA.20"]


def test_a_message_names_what_was_found_and_expected() -> None:
    (violation,) = verify(forward({"atten_mask": mask(B, 1, S1, 7)}))
    assert violation.message == (
        "atten_mask has the shape [2,1,16,7], expected [2,8,16,24] or [2,1,16,24] or [1,1,16,24]"
    )
    assert str(violation) == f"FA.11 (161002): {violation.message}"
    assert violation.stage == "tiling"


def test_eight_bit_floats_need_950_and_their_scales() -> None:
    scales = {name: tensor((1,), "DT_FLOAT") for name in ("d_scale_q", "d_scale_k", "d_scale_v")}
    node = forward(scales, dtype="DT_FLOAT8_E4M3FN")
    assert verify(node, "950") == []
    assert [v.constraint for v in verify(node, "A2")] == ["FA.1"]
    assert [v.tensor for v in verify(forward(dtype="DT_HIFLOAT8"), "950")] == list(scales)


def test_950_draws_its_own_dropout() -> None:
    assert verify(forward(attrs=HALF), "950") == []
