"""The constraints of the operators around attention: each row breaks exactly one of an otherwise good node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, UnknownVariant, get, infer, verify

from .nodes import constant, tensor

BF16, FLOAT, HALF = "DT_BF16", "DT_FLOAT", "DT_FLOAT16"
ROTARY = "RotaryPositionEmbedding"
GOOD: Mapping[str, Mapping[str, TensorInfo]] = {
    "RmsNorm": {"x": tensor((2, 5, 64)), "gamma": tensor((64,))},
    "AddRmsNorm": {"x1": tensor((2, 5, 64)), "x2": tensor((2, 5, 64)), "gamma": tensor((64,))},
    "LayerNormV4": {
        "x": tensor((2, 5, 60)),
        "normalized_shape": constant([60], "DT_INT32"),
        "gamma": tensor((60,)),
        "beta": tensor((60,)),
    },
    "AddLayerNorm": {
        "x1": tensor((2, 5, 64)),
        "x2": tensor((2, 5, 64)),
        "gamma": tensor((64,)),
        "beta": tensor((64,)),
        "bias": tensor((64,)),
    },
    "SwiGlu": {"x": tensor((2, 5, 128))},
    "GeGluV2": {"x": tensor((2, 5, 128))},
    "ClippedSwiglu": {"x": tensor((2, 5, 128))},
    "GeluV2": {"x": tensor((2, 5, 128))},
    "RotaryPositionEmbedding": {
        "x": tensor((2, 5, 4, 64)),
        "cos": tensor((2, 5, 1, 64)),
        "sin": tensor((2, 5, 1, 64)),
    },
    "ApplyRotaryPosEmb": {
        "query": tensor((2, 5, 4, 64)),
        "key": tensor((2, 5, 2, 64)),
        "cos": tensor((2, 5, 1, 64)),
        "sin": tensor((2, 5, 1, 64)),
    },
}


def node(op: str, inputs: Mapping[str, TensorInfo] | None = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    return NodeView(op, op, {**GOOD[op], **(inputs or {})}, {}, dict(attrs or {}))


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("product", ["A2", "A3", "950", "310P", None])
@pytest.mark.parametrize("dtype", [HALF, FLOAT, BF16])
def test_a_good_node_breaks_nothing(op: str, product: str | None, dtype: str) -> None:
    typed = {name: info if info.dtype == "DT_INT32" else tensor(info.shape, dtype) for name, info in GOOD[op].items()}
    found = [] if product is None else verify(node(op, typed), product)
    found += verify(node(op, typed))
    absent = (
        op in ("RotaryPositionEmbedding", "ClippedSwiglu") or dtype == BF16 or (op == "LayerNormV4" and dtype == FLOAT)
    )
    assert bool(found) == (product == "310P" and absent)


SBND = {"query": 4, "key": 2, "cos": 1, "sin": 1}
ROWS: list[tuple[str, dict[str, TensorInfo], dict[str, Any], str | None, str]] = [
    ("RmsNorm", {"x": tensor((2, 64), "DT_INT32"), "gamma": tensor((64,), FLOAT)}, {}, None, "RN.1"),
    ("RmsNorm", {"gamma": tensor((64,), BF16)}, {}, None, "RN.1"),
    ("RmsNorm", {"x": tensor((2, 64), FLOAT), "gamma": tensor((64,))}, {}, None, "RN.1"),
    ("RmsNorm", {"x": tensor((1,) * 8 + (64,))}, {}, None, "RN.2"),
    ("RmsNorm", {"gamma": tensor((1, 2, 5, 64))}, {}, None, "RN.2"),
    ("RmsNorm", {"gamma": tensor(())}, {}, None, "RN.2"),
    ("RmsNorm", {"gamma": tensor((65,))}, {}, None, "RN.3"),
    ("RmsNorm", {"gamma": tensor((4, 64))}, {}, None, "RN.3"),
    ("RmsNorm", {"x": tensor((0, 64))}, {}, None, "RN.4"),
    ("RmsNorm", {}, {"epsilon": -1e-6}, None, "RN.5"),
    ("RmsNorm", {"x": tensor((2, 15)), "gamma": tensor((15,))}, {}, "310P", "RN.6"),
    *(
        ("ApplyRotaryPosEmb", inputs, attrs, product, f"APE.{code}")
        for inputs, attrs, product, code in (
            ({"key": tensor((2, 5, 2, 64), FLOAT)}, {}, None, 1),
            ({"query": tensor((2, 5, 4, 64), "DT_INT32")}, {}, None, 1),
            ({}, {"layout": 5}, None, 2),
            ({n: tensor((5, 2, heads, 64)) for n, heads in SBND.items()}, {"layout": 2}, "A2", 2),
            ({"key": tensor((5, 2, 64))}, {}, None, 2),
            ({"key": tensor((2, 6, 2, 64))}, {}, None, 3),
            ({"sin": tensor((2, 5, 1, 32))}, {}, None, 4),
            ({name: tensor((2, 5, 4, 64)) for name in ("cos", "sin")}, {}, None, 4),
            ({name: tensor((1, 5, 1, 64)) for name in ("cos", "sin")}, {}, "A3", 4),
            ({}, {"rotary_mode": "full"}, None, 5),
            ({}, {"rotary_mode": "interleave"}, "A2", 5),
            ({name: tensor((2, 5, 1, 96)) for name in ("query", "key", "cos", "sin")}, {}, "A2", 6),
            ({name: tensor((2, 5, 1, 2048)) for name in ("query", "key", "cos", "sin")}, {}, None, 6),
            (
                {name: tensor((2, 5, 1, 66)) for name in ("query", "key", "cos", "sin")},
                {"rotary_mode": "quarter"},
                None,
                6,
            ),
            ({"query": tensor((2, 5, 254, 64))}, {}, "A2", 7),
            ({name: tensor((2, 0, 1, 64)) for name in ("query", "key", "cos", "sin")}, {}, None, 8),
        )
    ),
    ("AddRmsNorm", {"x2": tensor((2, 5, 64), BF16)}, {}, None, "ARN.1"),
    ("AddRmsNorm", {"gamma": tensor((64,), FLOAT)}, {}, None, "ARN.1"),
    ("AddRmsNorm", {"x1": tensor(()), "x2": tensor(())}, {}, None, "ARN.2"),
    ("AddRmsNorm", {"x2": tensor((5, 64))}, {}, None, "ARN.3"),
    ("AddRmsNorm", {"x2": tensor((2, 1, 64))}, {}, None, "ARN.3"),
    ("AddRmsNorm", {"gamma": tensor((1,))}, {}, None, "ARN.4"),
    ("AddRmsNorm", {"x1": tensor((0, 64)), "x2": tensor((0, 64))}, {}, None, "ARN.5"),
    ("AddRmsNorm", {}, {"epsilon": -1.0}, None, "ARN.6"),
    ("LayerNormV4", {"x": tensor((2, 60), "DT_INT8")}, {}, None, "LN.1"),
    ("LayerNormV4", {"gamma": tensor((60,), BF16), "beta": tensor((60,), BF16)}, {}, None, "LN.1"),
    ("LayerNormV4", {"beta": tensor((60,), FLOAT)}, {}, None, "LN.1"),
    ("LayerNormV4", {"x": tensor((1,) * 8 + (60,))}, {}, None, "LN.2"),
    ("LayerNormV4", {"x": tensor((60,)), "normalized_shape": constant([1, 60], "DT_INT32")}, {}, None, "LN.2"),
    ("LayerNormV4", {"normalized_shape": constant([[60]], "DT_INT32")}, {}, None, "LN.2"),
    ("LayerNormV4", {"normalized_shape": constant([30], "DT_INT32")}, {}, None, "LN.3"),
    ("LayerNormV4", {"beta": tensor((1,))}, {}, None, "LN.4"),
    ("LayerNormV4", {"gamma": tensor((5, 60))}, {}, None, "LN.4"),
    ("LayerNormV4", {"x": tensor((0, 60))}, {}, None, "LN.5"),
    ("LayerNormV4", {}, {"epsilon": -1.0}, None, "LN.6"),
    (
        "LayerNormV4",
        {
            "x": tensor((2, 5, 64)),
            "normalized_shape": constant([64], "DT_INT32"),
            "gamma": tensor((64,)),
            "beta": tensor((64,)),
        },
        {},
        "310P",
        "LN.7",
    ),
    ("AddLayerNorm", {"x1": tensor((2, 5, 64), "DT_INT8")}, {}, None, "ALN.1"),
    ("AddLayerNorm", {"x2": tensor((2, 5, 64), BF16)}, {}, None, "ALN.1"),
    ("AddLayerNorm", {"x2": tensor((2, 5, 64), FLOAT)}, {}, None, "ALN.1"),
    ("AddLayerNorm", {"beta": tensor((64,), FLOAT)}, {}, None, "ALN.1"),
    ("AddLayerNorm", {"bias": tensor((64,), FLOAT)}, {}, None, "ALN.1"),
    ("AddLayerNorm", {"x1": tensor(()), "x2": tensor(())}, {}, None, "ALN.2"),
    ("AddLayerNorm", {"x2": tensor((2, 1, 64))}, {}, None, "ALN.3"),
    ("AddLayerNorm", {"beta": tensor((1,))}, {}, None, "ALN.4"),
    ("AddLayerNorm", {"bias": tensor((5, 64))}, {}, None, "ALN.5"),
    ("AddLayerNorm", {"x1": tensor((0, 64)), "x2": tensor((0, 64))}, {}, None, "ALN.6"),
    ("AddLayerNorm", {}, {"epsilon": -1.0}, None, "ALN.7"),
    (
        "AddLayerNorm",
        {name: tensor((2, 15)) for name in ("x1", "x2")} | {name: tensor((15,)) for name in ("gamma", "beta", "bias")},
        {},
        "310P",
        "ALN.8",
    ),
    ("SwiGlu", {"x": tensor((2, 8), "DT_INT8")}, {}, None, "SG.1"),
    ("SwiGlu", {}, {"dim": 3}, None, "SG.2"),
    ("SwiGlu", {"x": tensor(())}, {}, None, "SG.2"),
    ("SwiGlu", {"x": tensor((2, 7))}, {}, None, "SG.3"),
    ("SwiGlu", {}, {"dim": 1}, None, "SG.3"),
    ("SwiGlu", {"x": tensor((2, 62))}, {}, "310P", "SG.4"),
    ("SwiGlu", {"x": tensor((0, 64))}, {}, "310P", "SG.4"),
    ("GeGluV2", {"x": tensor((2, 8), "DT_INT8")}, {}, None, "GG.1"),
    ("GeGluV2", {}, {"dim": -4}, None, "GG.2"),
    ("GeGluV2", {"x": tensor(())}, {}, None, "GG.2"),
    ("GeGluV2", {"x": tensor((1,) * 8 + (2,))}, {}, None, "GG.2"),
    ("GeGluV2", {}, {"dim": 1}, None, "GG.2"),
    ("GeGluV2", {"x": tensor((0, 64))}, {}, None, "GG.3"),
    ("GeGluV2", {}, {"approximate": 2}, None, "GG.4"),
    ("GeGluV2", {}, {"approximate": 0}, "310P", "GG.5"),
    ("GeluV2", {"x": tensor((2, 8), "DT_INT8")}, {}, None, "GV.1"),
    ("GeluV2", {}, {"approximate": "erf"}, None, "GV.2"),
    ("ClippedSwiglu", {"x": tensor((2, 8), "DT_INT8")}, {}, None, "CS.1"),
    ("ClippedSwiglu", {"x": tensor((2, 7))}, {}, None, "CS.2"),
    ("ClippedSwiglu", {"x": tensor((0, 8))}, {}, None, "CS.3"),
    ("ClippedSwiglu", {}, {"limit": 0.0}, None, "CS.4"),
    ("ClippedSwiglu", {"group_index": tensor((8193,), "DT_INT64")}, {}, None, "CS.5"),
    ("ClippedSwiglu", {"group_index": tensor((2, 2), "DT_INT64")}, {}, None, "CS.5"),
    (ROTARY, {"cos": tensor((2, 5, 1, 64), FLOAT)}, {}, None, "RPE.1"),
    (ROTARY, {"x": tensor((5, 64))}, {}, None, "RPE.2"),
    (ROTARY, {"sin": tensor((5, 1, 64))}, {}, None, "RPE.2"),
    (ROTARY, {"sin": tensor((1, 5, 1, 64))}, {}, None, "RPE.3"),
    (ROTARY, {name: tensor((2, 3, 1, 64)) for name in ("cos", "sin")}, {}, None, "RPE.3"),
    (ROTARY, {name: tensor((2, 5, 1, 32)) for name in ("cos", "sin")}, {}, None, "RPE.3"),
    (ROTARY, {name: tensor((2, 5, 1, 1)) for name in ("cos", "sin")}, {}, None, "RPE.3"),
    (ROTARY, {}, {"mode": 4}, None, "RPE.4"),
    (ROTARY, {}, {"mode": 2}, "A2", "RPE.4"),
    (ROTARY, {"x": tensor((2, 5, 4, 7)), **dict.fromkeys(("cos", "sin"), tensor((2, 5, 1, 7)))}, {}, None, "RPE.5"),
    (ROTARY, {"x": tensor((2, 5, 4, 898)), **dict.fromkeys(("cos", "sin"), tensor((2, 5, 1, 898)))}, {}, "A3", "RPE.5"),
    (ROTARY, {"x": tensor((2, 9, 2, 64)), **dict.fromkeys(("cos", "sin"), tensor((1, 1, 2, 64)))}, {}, "A2", "RPE.6"),
    (ROTARY, {"x": tensor((2, 9, 20, 12)), **dict.fromkeys(("cos", "sin"), tensor((1, 1, 20, 12)))}, {}, "A2", "RPE.6"),
    (
        ROTARY,
        {"x": tensor((1, 5, 1000, 64)), **dict.fromkeys(("cos", "sin"), tensor((1, 5, 1, 64)))},
        {},
        "A2",
        "RPE.7",
    ),
    (ROTARY, {"rotate": tensor((64, 32))}, {}, None, "RPE.8"),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "product", "number"), ROWS)
def test_each_fault_is_found(
    op: str, inputs: dict[str, TensorInfo], attrs: dict[str, Any], product: str | None, number: str
) -> None:
    changed = node(op, inputs, attrs)
    found = verify(changed) if product is None else verify(changed, product)
    assert {entry.constraint for entry in found} == {number}
    assert product is None or not verify(changed)


@pytest.mark.parametrize("op", GOOD)
def test_sizes_that_are_not_known_break_nothing(op: str) -> None:
    large = {name: info for name, info in GOOD[op].items() if len(info.shape or ()) > 1}
    opened = {name: tensor(("b", None, *(info.shape or ())[2:])) for name, info in large.items()}
    assert not verify(node(op, opened), "A2")
    unknown = {name: TensorInfo(info.dtype, None) for name, info in GOOD[op].items()}
    assert not verify(node(op, unknown), "A3" if op in (ROTARY, "ClippedSwiglu") else "310P")


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("product", ["310B", "910"])
def test_products_without_the_operators(op: str, product: str) -> None:
    expected = [] if (op, product) == ("GeluV2", "910") else ["G0"]
    assert [entry.constraint for entry in verify(node(op), product)] == expected


@pytest.mark.parametrize("op", GOOD)
def test_older_releases_are_not_known(op: str) -> None:
    with pytest.raises(UnknownVariant):
        get(op, "8.0")
    assert get(op, "9.0") == get(op)
    assert (get(op, "8.5.0") == get(op)) == (op != ROTARY)


def test_shapes_of_results() -> None:
    x, gamma = tensor((2, "s", 4, 8), BF16), tensor((4, 8), FLOAT)
    assert infer("RmsNorm", {"x": x, "gamma": gamma}, {}) == {
        "y": x,
        "rstd": tensor((2, "s", 1, 1), FLOAT),
    }
    assert infer("AddRmsNorm", {"x1": x, "x2": x, "gamma": tensor(None)}, {})["rstd"] == tensor(None, FLOAT)
    rows = tensor((2, "s", 1, 1), FLOAT)
    shape = {"x": x, "normalized_shape": constant([4, 8], "DT_INT32")}
    assert infer("LayerNormV4", shape, {}) == {"y": x, "mean": rows, "rstd": rows}
    assert infer("LayerNormV4", {**shape, "normalized_shape": tensor(None, "DT_INT32")}, {})["mean"] == tensor(
        None, FLOAT
    )
    one = tensor((), "DT_INT32")
    assert infer("LayerNormV4", {**shape, "normalized_shape": one}, {})["mean"] == tensor((2, "s", 4, 1), FLOAT)
    both = {"x1": x, "x2": x, "gamma": gamma, "beta": gamma}
    assert infer("AddLayerNorm", both, {}) == {"y": x, "mean": rows, "rstd": rows, "x": x}
    wide = tensor(x.shape, FLOAT)
    assert infer("AddLayerNorm", {**both, "x2": wide}, {})["x"] == wide
    assert infer("SwiGlu", {"x": x}, {"dim": 1})["y"] == tensor((2, None, 4, 8), BF16)
    assert infer("SwiGlu", {"x": x}, {"dim": -1})["y"] == tensor((2, "s", 4, 4), BF16)
    assert infer("SwiGlu", {"x": tensor(None, BF16)}, {})["y"] == tensor(None, BF16)
    half = tensor((2, "s", 4, 4), BF16)
    assert infer("ClippedSwiglu", {"x": x}, {}) == {"y": half}
    assert infer("GeluV2", {"x": x}, {}) == {"y": x}
    assert infer("GeGluV2", {"x": x}, {}) == {"y": half, "gelu": half}
    assert infer(ROTARY, {"x": x, "cos": x, "sin": x}, {})["y"] == x
