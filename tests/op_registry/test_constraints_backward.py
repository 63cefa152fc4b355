"""FAG.1 to FAG.20: each row breaks exactly one constraint of an otherwise good FlashAttentionScoreGrad."""

from __future__ import annotations

from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, operator, verify

from .nodes import DV, N1, N2, S1, S2, SHAPES, B, D, backward, constant, mask, tensor

TRIANGLE = mask(2048, 2048)


def rope(**changes: TensorInfo | None) -> dict[str, TensorInfo | None]:
    """The inputs of a good node with rope, with changes."""
    wide = {name: tensor((s, n, 128), "DT_BF16") for name, s, n in _TENSORS}
    inputs: dict[str, TensorInfo | None] = {
        **wide,
        "dy": wide["query"],
        "attention_in": wide["query"],
        "query_rope": tensor((S1, N1, 64), "DT_BF16"),
        "key_rope": tensor((S2, N2, 64), "DT_BF16"),
        "atten_mask": mask(10, 12),
    }
    return inputs | changes


_TENSORS = (("query", S1, N1), ("key", S2, N2), ("value", S2, N2))


def packed(q: tuple[int, ...], kv: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"actual_seq_qlen": constant(q), "actual_seq_kvlen": constant(kv), **more}


def statistics(*shape: int) -> dict[str, TensorInfo]:
    return {name: tensor(shape, "DT_FLOAT") for name in ("softmax_max", "softmax_sum")}


def square(size: int, **more: TensorInfo) -> dict[str, TensorInfo]:
    out = tensor((B, N1, size, DV))
    return {
        "query": tensor((B, N1, size, D)),
        "key": tensor((B, N2, size, D)),
        "value": tensor((B, N2, size, DV)),
        "dy": out,
        "attention_in": out,
        **statistics(B, N1, size, 8),
        **more,
    }


def sized(b: int = B, n: int = N1, rows: int = S1, keys: int = S2, d: int = D) -> dict[str, TensorInfo]:
    """All inputs of other sizes, key and value with N2 heads, value as wide as key."""
    out = tensor((b, n, rows, d))
    return {
        "query": out,
        "key": tensor((b, N2, keys, d)),
        "value": tensor((b, N2, keys, d)),
        "dy": out,
        "attention_in": out,
        **statistics(b, n, rows, 8),
    }


def empty_heads() -> dict[str, TensorInfo]:
    return {
        "query": tensor((B, N1, S1, 0)),
        "key": tensor((B, N2, S2, 0)),
        "value": tensor((B, N2, S2, 0)),
        "dy": tensor((B, N1, S1, 0)),
        "attention_in": tensor((B, N1, S1, 0)),
    }


OUT = (B, N1, S1, DV)

BROKEN: list[tuple[str, NodeView, str]] = [
    # 1: types
    ("FAG.1", backward({"dy": tensor(OUT, "DT_BF16"), "attention_in": tensor(OUT, "DT_BF16")}), "dy"),
    ("FAG.1", backward({"pse_shift": tensor((B, N1, S1, S2), "DT_BF16")}), "pse_shift"),
    ("FAG.1", backward(dtype="DT_INT8"), "query"),
    # 2: layout and ranks
    ("FAG.2", backward(attrs={"input_layout": "NTD"}), "input_layout"),
    ("FAG.2", backward({"key": tensor((S2, N2, D))}), "key"),
    # 3: head count
    ("FAG.3", backward(attrs={"head_num": 4}), "head_num"),
    ("FAG.3", backward(attrs={"head_num": -1}), "head_num"),
    # 4: ranks
    ("FAG.4", backward({"sink": tensor((1, N1), "DT_FLOAT")}), "sink"),
    ("FAG.4", backward({"attention_in": tensor((B, N1))}), "attention_in"),
    ("FAG.4", backward(outputs={"dq": tensor((B, N1))}), "dq"),
    (
        "FAG.4",
        backward({"sink": tensor((N1,), "DT_FLOAT")}, outputs={"dsink": tensor((1, N1), "DT_FLOAT")}),
        "dsink",
    ),
    # 5: head sizes
    ("FAG.5", backward({"key": tensor((B, N2, S2, D - 1))}), "key"),
    ("FAG.5", backward(empty_heads()), "query"),
    ("FAG.5", backward(sized(d=769)), "query"),
    # 6: sizes; the ranges are in EXTENDED
    ("FAG.6", backward({"key": tensor((B, 3, S2, D)), "value": tensor((B, 3, S2, DV))}), "key"),
    ("FAG.6", backward({"value": tensor((B, N2, S2 - 1, DV))}), "value"),
    ("FAG.6", backward({"key": tensor((1, N2, S2, D))}), "key"),
    ("FAG.6", backward({"value": tensor((S2, 1, N2 * DV))}, layout="SBH"), "value"),
    # 7: dropout
    ("FAG.7", backward(attrs={"keep_prob": 1.1}), "keep_prob"),
    ("FAG.7", backward({"drop_mask": tensor((5,), "DT_UINT8")}, {"keep_prob": 0.9}), "drop_mask"),
    ("FAG.7", backward(attrs={"keep_prob": 0.9}), "drop_mask"),
    ("FAG.7", backward(attrs={"keep_prob": 0.0}), "keep_prob"),
    # 8: mask and mode
    ("FAG.8", backward({"atten_mask": TRIANGLE}, {"sparse_mode": 5}, "TND"), "sparse_mode"),
    ("FAG.8", backward({"atten_mask": TRIANGLE}, {"sparse_mode": 9}, "TND"), "sparse_mode"),
    ("FAG.8", backward({"atten_mask": mask(S1, S2)}, {"sparse_mode": 8}), "sparse_mode"),
    ("FAG.8", backward({"atten_mask": mask(B, 1, 2, S2)}), "atten_mask"),
    ("FAG.8", backward({"atten_mask": mask(S1, S2)}, {"sparse_mode": 2}), "atten_mask"),
    ("FAG.8", backward({"atten_mask": tensor((S1, S2), "DT_FLOAT16")}), "atten_mask"),
    # 9: pse_type
    ("FAG.9", backward(attrs={"pse_type": 3}), "pse_shift"),
    ("FAG.9", backward({"pse_shift": tensor((B, N1, S1, S2))}, {"pse_type": 9}), "pse_type"),
    ("FAG.9", backward(square(S1, pse_shift=tensor((N1,))), {"pse_type": 2}), "pse_shift"),
    ("FAG.9", backward({"pse_shift": tensor((N1,), "DT_FLOAT")}, {"pse_type": 2}), "pse_shift"),
    ("FAG.9", backward({"pse_shift": tensor((N1,), "DT_FLOAT")}, {"pse_type": 2}), "pse_shift"),
    (
        "FAG.9",
        backward(
            packed((10, 16), (12, 18), atten_mask=TRIANGLE, pse_shift=tensor((N1,), "DT_FLOAT")),
            {"sparse_mode": 8, "pse_type": 3},
            "TND",
        ),
        "pse_shift",
    ),
    # 10: rope; what the products want besides is in ROPE
    ("FAG.10", backward(rope(query_rope=tensor((S1 + 1, N1, 64), "DT_BF16")), layout="TND"), "query_rope"),
    ("FAG.10", backward(rope(key_rope=tensor((S2, N2, 64), "DT_FLOAT")), layout="TND"), "key_rope"),
    # 11: statistics
    ("FAG.11", backward(statistics(B, N1, S1, 1)), "softmax_max softmax_sum"),
    ("FAG.11", backward({"softmax_sum": None}), "softmax_sum"),
    (
        "FAG.11",
        backward(attrs={"softmax_in_layout": "same_as_input"}, layout="TND"),
        "softmax_max softmax_sum",
    ),
    # 12: order of the statistics
    ("FAG.12", backward(attrs={"softmax_in_layout": "BSND"}), "softmax_in_layout"),
    # 13: the forward result
    ("FAG.13", backward({"attention_in": None}), "attention_in"),
    ("FAG.13", backward({"attention_in": tensor(OUT, "DT_BF16")}), "attention_in"),
    ("FAG.13", backward({"attention_in": tensor(SHAPES["BNSD"][0])}), "attention_in"),
    (
        "FAG.13",
        backward({n: tensor((B, S1, N1 * DV + 1)) for n in ("dy", "attention_in")}, layout="BSH"),
        "dy",
    ),
    # 14: packed sequences
    ("FAG.14", backward({"actual_seq_kvlen": None}, layout="TND"), "actual_seq_kvlen"),
    ("FAG.14", backward({"actual_seq_qlen": constant([16])}, layout="TND"), "actual_seq_kvlen"),
    ("FAG.14", backward({"actual_seq_kvlen": constant([S2])}), "actual_seq_kvlen"),
    # 15: sink
    ("FAG.15", backward({"sink": tensor((N1,))}), "sink"),
    ("FAG.15", backward({"sink": tensor((N2,), "DT_FLOAT")}), "sink"),
    (
        "FAG.15",
        backward({"sink": tensor((N1,), "DT_FLOAT")}, outputs={"dsink": tensor((N2,), "DT_FLOAT")}),
        "dsink",
    ),
    # 16: reserved
    ("FAG.16", backward({"padding_mask": tensor((B, S2))}), "padding_mask"),
    ("FAG.16", backward({"softmax_in": tensor((B, S2))}), "softmax_in"),
    ("FAG.16", backward(outputs={"dpse": tensor((B, N1, S1, S2))}), "dpse"),
    (
        "FAG.16",
        backward({"pse_shift": tensor((B, N1, S1, S2))}, outputs={"dpse": tensor((B, N1, S1))}),
        "dpse",
    ),
    # 17: prefix
    ("FAG.17", backward({"atten_mask": mask(3072, 2048)}, {"sparse_mode": 6}), "prefix"),
    (
        "FAG.17",
        backward({"atten_mask": mask(3072, 2048), "prefix": constant([S2, -1])}, {"sparse_mode": 6}),
        "prefix",
    ),
    # 18: the bias
    ("FAG.18", backward({"pse_shift": tensor((1, N1, 2, S2))}), "pse_shift"),
    ("FAG.18", backward({"pse_shift": tensor((B, 2, S1, S2))}), "pse_shift"),
    ("FAG.18", backward(square(2048, pse_shift=tensor((1, N1, 1024, 2048)))), "pse_shift"),
    (
        "FAG.18",
        backward(packed((10, 16), (12, 24), pse_shift=tensor((N1 * 24, 1))), layout="TND"),
        "pse_shift",
    ),
    # These have a diagnostic of G0 besides, because they are extensions.
    ("FAG.8", backward({"pse_shift": tensor((B, N1, S1, S2))}, {"cpu_masked_bias": "added"}), "cpu_masked_bias"),
    ("FAG.8", backward({"atten_mask": mask(S1, S2)}, {"cpu_masked_bias": "added"}), "cpu_masked_bias"),
    ("FAG.20", backward(attrs={"cpu_softcap": 1e7}), "cpu_softcap"),
    ("FAG.20", backward({"pse_shift": tensor((B, N1, S1, S2))}, {"cpu_softcap": 5.0}), "pse_type"),
]


@pytest.mark.parametrize("target", ["ort", "A2"])
@pytest.mark.parametrize(("constraint", "node", "culprits"), BROKEN)
def test_one_broken_constraint_is_found(constraint: str, node: NodeView, culprits: str, target: str) -> None:
    found = [each for each in verify(node, target) if each.extension not in ("EXT-SOFTCAP", "EXT-MASKED-BIAS")]
    assert [(v.constraint, v.tensor) for v in found] == [(constraint, name) for name in culprits.split()]
    assert {v.code for v in found} == {161002}
    assert all(v.extension is None and v.tensor in v.message for v in found)


def test_every_number_a_node_can_break_has_a_row() -> None:
    numbers = operator("FlashAttentionScoreGrad").rules.table
    assert sorted(numbers) == [*range(1, 19), 20]
    assert {constraint for constraint, _, _ in BROKEN} == {f"FAG.{number}" for number in numbers}


def test_a_missing_rope_input_is_a_null_pointer() -> None:
    node = backward(rope(key_rope=None), layout="TND")
    assert [(v.constraint, v.code, v.tensor, v.extension) for v in verify(node)] == [
        ("FAG.10", 161001, "key_rope", None)
    ]


def _half(like: dict[str, TensorInfo | None]) -> dict[str, TensorInfo | None]:
    """The rope inputs in another type, too."""
    return {name: tensor(info.shape or ()) for name in ("query_rope", "key_rope") if (info := like[name]) is not None}


def _in_four_dimensions() -> dict[str, TensorInfo]:
    wide = {
        name: tensor((*shape[:-1], 128), "DT_BF16")
        for name, shape in zip(("query", "key", "value"), SHAPES["BNSD"], strict=True)
    }
    rope_inputs = {"query_rope": tensor((B, N1, S1, 64), "DT_BF16"), "key_rope": tensor((B, N2, S2, 64), "DT_BF16")}
    return wide | {"dy": wide["query"], "attention_in": wide["query"], "atten_mask": mask(S1, S2)} | rope_inputs


NARROW = {name: tensor((s, h, 96), "DT_BF16") for name, s, h in (*_TENSORS, ("dy", S1, N1), ("attention_in", S1, N1))}
HALVES = {name: tensor((s, h, 128)) for name, s, h in (*_TENSORS, ("dy", S1, N1), ("attention_in", S1, N1))}
WIDE = {"query_rope": tensor((S1, N1, 129), "DT_BF16"), "key_rope": tensor((S2, N2, 129), "DT_BF16")}
ROPE = [
    ("FAG.10", 161001, backward(rope(atten_mask=None), layout="TND"), "atten_mask"),
    (
        "FAG.10",
        161002,
        backward(rope() | HALVES | _half(rope()), layout="TND"),
        "query key value query_rope key_rope",
    ),
    (
        "FAG.10",
        161002,
        backward(rope(**packed((10, 16), (12, 24), pse_shift=tensor((N1 * 24,), "DT_BF16"))), layout="TND"),
        "pse_shift",
    ),
    ("FAG.10", 161002, backward(rope(drop_mask=tensor((10**4,), "DT_UINT8")), layout="TND"), "drop_mask"),
    (
        "FAG.10",
        161002,
        backward(rope(drop_mask=tensor((10**4,), "DT_UINT8")), {"keep_prob": 0.5}, "TND"),
        "drop_mask keep_prob",
    ),
    ("FAG.10", 161002, backward(_in_four_dimensions()), "input_layout"),
    ("FAG.10", 161002, backward(rope() | NARROW, layout="TND"), "query"),
    ("FAG.10", 161002, backward(rope() | WIDE, layout="TND"), "query_rope"),
    (
        "FAG.8",
        161002,
        backward(rope(atten_mask=mask(3072, 2048), prefix=constant([12, 0, 12])), {"sparse_mode": 6}, "TND"),
        "sparse_mode",
    ),
]


@pytest.mark.parametrize("target", ["ort", "A2"])
@pytest.mark.parametrize(("constraint", "code", "node", "culprits"), ROPE)
def test_what_only_the_products_want_of_rope(
    constraint: str, code: int, node: NodeView, culprits: str, target: str
) -> None:
    found = [(v.constraint, v.code, v.tensor, v.extension) for v in verify(node, target)]
    assert found == [(constraint, code, name, "EXT-GRAD-ROPE") for name in culprits.split()]


GOOD = [
    *((layout, backward(layout=layout)) for layout in SHAPES),
    *((dtype, backward(dtype=dtype)) for dtype in ("DT_FLOAT", "DT_BF16")),
    ("mask", backward({"atten_mask": mask(B, 1, S1, S2)})),
    ("triangle", backward({"atten_mask": TRIANGLE}, {"sparse_mode": 3})),
    ("bias", backward({"pse_shift": tensor((1, N1, S1, S2))})),
    ("slopes", backward(square(S1, pse_shift=tensor((N1,), "DT_FLOAT")), {"pse_type": 2})),
    (
        "compressed ALiBi",
        backward(square(2048, pse_shift=tensor((1, N1, 1024, 2048)), atten_mask=TRIANGLE), {"sparse_mode": 2}),
    ),
    ("flat bias", backward(packed((10, 16), (12, 24), pse_shift=tensor((N1 * 24,))), layout="TND")),
    (
        "statistics as the input",
        backward(statistics(N1, S1, 8), {"softmax_in_layout": "same_as_input"}, "TND"),
    ),
    (
        "sink",
        backward({"sink": tensor((N1,), "DT_FLOAT")}, outputs={"dsink": tensor((N1,), "DT_FLOAT")}),
    ),
    ("rope", backward(rope(), layout="TND")),
    ("prefix", backward({"atten_mask": mask(3072, 2048), "prefix": constant([8, 24])}, {"sparse_mode": 6})),
    (
        "outputs",
        backward(outputs={"dq": tensor(SHAPES["BNSD"][0]), "dk": tensor(SHAPES["BNSD"][1]), "dpse": tensor((0,))}),
    ),
]


@pytest.mark.parametrize("target", ["ort", "A2", "A3", "950"])
@pytest.mark.parametrize("node", [node for _, node in GOOD], ids=[name for name, _ in GOOD])
def test_a_good_node_breaks_nothing(node: NodeView, target: str) -> None:
    assert verify(node, target) == []


def test_a2_has_no_float32_gradient_with_a_byte_mask() -> None:
    node = backward({"atten_mask": TensorInfo("DT_UINT8", (S1, S2))}, dtype="DT_FLOAT")
    assert verify(node) == []
    assert verify(node, "950") == []
    (violation,) = verify(node, "A2")
    assert (violation.constraint, violation.code) == ("G0", 161002)
    assert "query DT_FLOAT" in violation.message
    assert "atten_mask DT_UINT8" in violation.message


VALUES = (("value", N2, S2), ("dy", N1, S1), ("attention_in", N1, S1))
EXTENDED = [
    ("EXT-MASK-BROADCAST", "FAG.8", backward({"atten_mask": mask(B, 1, 1, S2)})),
    ("EXT-BAND-MASK", "FAG.8", backward({"atten_mask": mask(B, 1, 1, S2)}, {"sparse_mode": 3})),
    ("EXT-BAND-OUTSIDE", "FAG.8", backward({"atten_mask": mask(S1, S2)}, {"pre_tockens": -1, "next_tockens": -1})),
    (
        "EXT-BAND-OUTSIDE",
        "FAG.8",
        backward(
            packed((10, 16), (12, 24), atten_mask=TRIANGLE),
            {"sparse_mode": 4, "pre_tockens": 0, "next_tockens": 0},
            "TND",
        ),
    ),
    (
        "EXT-GRAD-BIAS-MODES",
        "FAG.8",
        backward(
            packed((10, 16), (12, 24), atten_mask=TRIANGLE, pse_shift=tensor((N1 * 24,))),
            {"sparse_mode": 7, "next_tockens": 0},
            "TND",
        ),
    ),
    (
        "EXT-GRAD-BIAS-MODES",
        "FAG.8",
        backward(
            packed((10, 16), (12, 24), atten_mask=TRIANGLE, pse_shift=tensor((N1 * 24,))),
            {"sparse_mode": 8},
            "TND",
        ),
    ),
    ("EXT-GRAD-NO-KEYS", "FAG.6", backward({"key": tensor((B, 0, S2, D)), "value": tensor((B, 0, S2, DV))})),
    ("EXT-EMPTY-SEQUENCES", "FAG.14", backward({"pse_shift": tensor((N1 * 24,))}, layout="TND")),
    ("EXT-SHIFT-BROADCAST", "FAG.18", backward({"pse_shift": tensor((1, N1, 1, S2))})),
    ("EXT-SHIFT-BROADCAST", "FAG.18", backward({"pse_shift": tensor((B, 1, S1, S2))})),
    ("EXT-SHIFT-FLOAT", "FAG.1", backward({"pse_shift": tensor((B, N1, S1, S2), "DT_FLOAT")})),
    ("EXT-GRAD-EMPTY-ROWS", "G0", backward({"atten_mask": mask(S1, S2)}, {"cpu_empty_rows": "mean"})),
    ("EXT-NAN-ROWS", "G0", backward({"atten_mask": mask(S1, S2)}, {"cpu_nan_rows": "zero"})),
    ("EXT-MASK-VALUE", "G0", backward({"atten_mask": mask(S1, S2)}, {"cpu_mask_value": -1e4})),
    (
        "EXT-MASKED-BIAS",
        "G0",
        backward({"atten_mask": mask(S1, S2), "pse_shift": tensor((B, N1, S1, S2))}, {"cpu_masked_bias": "added"}),
    ),
    ("EXT-SOFTCAP", "G0", backward(attrs={"cpu_softcap": 50.0})),
    ("EXT-VALUE-WIDER", "FAG.5", backward(sized() | {n: tensor((B, h, s, D + 8)) for n, h, s in VALUES})),
    ("EXT-RANGE", "FAG.6", backward(sized(n=512), {"head_num": 512})),
    ("EXT-RANGE", "FAG.6", backward(sized(b=2**21 + 1))),
    ("EXT-RANGE", "FAG.6", backward(sized(rows=2**20 + 1))),
    ("EXT-RANGE", "FAG.6", backward(sized(keys=2**20 + 1))),
    (
        "EXT-RANGE",
        "FAG.6",
        backward(sized(b=1025) | {"atten_mask": mask(3072, 2048), "prefix": constant([16] * 1025)}, {"sparse_mode": 6}),
    ),
]


@pytest.mark.parametrize(("extension", "constraint", "node"), EXTENDED)
def test_an_extension_is_reported_for_every_target(extension: str, constraint: str, node: NodeView) -> None:
    for target in ("ort", "A2"):
        assert [(v.constraint, v.extension) for v in verify(node, target)] == [(constraint, extension)]


def test_an_unmasked_row_has_no_gradient_rule() -> None:
    (violation,) = verify(backward({"atten_mask": mask(S1, S2)}, {"cpu_empty_rows": "unmasked"}))
    assert violation.extension is None
