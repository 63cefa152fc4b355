"""The constraints of operators around attention that nothing becomes: each row breaks exactly one of a good node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, UnknownVariant, get, infer, verify

from .nodes import tensor

BF16, FLOAT, HALF = "DT_BF16", "DT_FLOAT", "DT_FLOAT16"
GOOD: Mapping[str, Mapping[str, TensorInfo]] = {
    "GemmaRmsNorm": {"x": tensor((2, 5, 64)), "gamma": tensor((64,))},
    "LayerNormV3": {"x": tensor((2, 5, 64)), "gamma": tensor((64,)), "beta": tensor((64,))},
    "InterleaveRope": {"x": tensor((2, 4, 5, 64)), "cos": tensor((2, 1, 5, 64)), "sin": tensor((2, 1, 5, 64))},
    "RotaryMul": {"x": tensor((2, 5, 4, 64)), "r1": tensor((2, 5, 1, 64)), "r2": tensor((2, 5, 1, 64))},
}
ATTRS: Mapping[str, Mapping[str, Any]] = {"LayerNormV3": {"begin_norm_axis": 2, "begin_params_axis": -1}}
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "GemmaRmsNorm": ("A2", "A3", "950"),
    "LayerNormV3": ("A2", "A3", "950", "310P"),
    "RotaryMul": ("A2", "A3", "950", "310P", "910"),
    "InterleaveRope": ("A2", "A3"),
}
EVERY_PRODUCT = ("A2", "A3", "950", "310P", "310B", "910")


def node(op: str, inputs: Mapping[str, TensorInfo] | None = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    return NodeView(op, op, {**GOOD[op], **(inputs or {})}, {}, {**ATTRS.get(op, {}), **(attrs or {})})


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("product", EVERY_PRODUCT)
def test_a_good_node_breaks_nothing_on_the_products_that_have_it(op: str, product: str) -> None:
    found = [entry.constraint for entry in verify(node(op), product)]
    assert found == ([] if product in PRODUCTS[op] else ["G0"])


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("dtype", [HALF, FLOAT, BF16])
def test_types_of_good_nodes(op: str, dtype: str) -> None:
    typed = {name: tensor(info.shape, dtype) for name, info in GOOD[op].items()}
    if (op, dtype) == ("InterleaveRope", FLOAT):
        assert [entry.constraint for entry in verify(node(op, typed))] == ["ILR.1"]
        return
    for product in PRODUCTS[op]:
        assert bool(verify(node(op, typed), product)) == (product in ("310P", "910") and dtype == BF16)
    assert not verify(node(op, typed))


ROWS: list[tuple[str, dict[str, TensorInfo], dict[str, Any], str | None, str]] = [
    ("GemmaRmsNorm", {"x": tensor((2, 64), "DT_INT32"), "gamma": tensor((64,), FLOAT)}, {}, None, "GRN.1"),
    ("GemmaRmsNorm", {"gamma": tensor((64,), BF16)}, {}, "950", "GRN.1"),
    ("GemmaRmsNorm", {"gamma": tensor((64,), FLOAT)}, {}, "A2", "GRN.1"),
    ("GemmaRmsNorm", {"x": tensor((1,) * 8 + (64,))}, {}, None, "GRN.2"),
    ("GemmaRmsNorm", {"gamma": tensor((1, 2, 5, 64))}, {}, None, "GRN.2"),
    ("GemmaRmsNorm", {"gamma": tensor((5, 65))}, {}, None, "GRN.3"),
    ("GemmaRmsNorm", {"x": tensor((0, 64))}, {}, None, "GRN.4"),
    ("GemmaRmsNorm", {}, {"epsilon": -1e-6}, None, "GRN.5"),
    ("LayerNormV3", {"x": tensor((2, 5, 64), "DT_INT8")}, {}, None, "LNT.1"),
    ("LayerNormV3", {name: tensor((64,), BF16) for name in ("gamma", "beta")}, {}, None, "LNT.1"),
    ("LayerNormV3", {"beta": tensor((64,), FLOAT)}, {}, None, "LNT.1"),
    ("LayerNormV3", {}, {"begin_norm_axis": 3}, None, "LNT.2"),
    ("LayerNormV3", {}, {"begin_params_axis": -4}, None, "LNT.2"),
    ("LayerNormV3", {"x": tensor(())}, {}, None, "LNT.2"),
    ("LayerNormV3", {"gamma": tensor((32,))}, {}, None, "LNT.4"),
    ("LayerNormV3", {"beta": tensor((5, 64))}, {}, None, "LNT.4"),
    ("LayerNormV3", {}, {"begin_params_axis": 1}, None, "LNT.4"),
    ("LayerNormV3", {"x": tensor((0, 5, 64))}, {}, None, "LNT.5"),
    ("InterleaveRope", {"cos": tensor((2, 1, 5, 64), BF16)}, {}, None, "ILR.1"),
    ("InterleaveRope", {"x": tensor((2, 5, 64))}, {}, None, "ILR.2"),
    ("InterleaveRope", {"x": tensor((2, 4, 5, 128))}, {}, None, "ILR.2"),
    ("InterleaveRope", {"x": tensor((2, 0, 5, 64))}, {}, None, "ILR.2"),
    ("InterleaveRope", {name: tensor((1, 1, 5, 64)) for name in ("cos", "sin")}, {}, None, "ILR.2"),
    ("InterleaveRope", {name: tensor((2, 4, 5, 64)) for name in ("cos", "sin")}, {}, None, "ILR.2"),
    ("InterleaveRope", {"sin": tensor((2, 1, 1, 64))}, {}, None, "ILR.2"),
    ("RotaryMul", {"x": tensor((2, 5, 4, 64), "DT_INT32")}, {}, None, "RTM.1"),
    ("RotaryMul", {"r2": tensor((2, 5, 1, 64), FLOAT)}, {}, None, "RTM.1"),
    ("RotaryMul", {"x": tensor((5, 4, 64))}, {}, None, "RTM.2"),
    ("RotaryMul", {"r2": tensor((1, 5, 1, 64))}, {}, None, "RTM.3"),
    ("RotaryMul", {name: tensor((1, 5, 4, 64)) for name in ("r1", "r2")}, {}, None, "RTM.3"),
    ("RotaryMul", {name: tensor((2, 5, 1, 32)) for name in ("r1", "r2")}, {}, None, "RTM.3"),
    ("RotaryMul", {name: tensor((1, 1, 1, 64)) for name in ("r1", "r2")}, {}, None, "RTM.3"),
    (
        "RotaryMul",
        {"x": tensor((2, 5, 4, 96)), **{name: tensor((2, 5, 1, 96)) for name in ("r1", "r2")}},
        {},
        None,
        "RTM.4",
    ),
    ("RotaryMul", {"x": tensor((2, 5, 1000, 64))}, {}, None, "RTM.5"),
    (
        "RotaryMul",
        {"x": tensor((32, 5, 32, 64)), **{name: tensor((1, 5, 1, 64)) for name in ("r1", "r2")}},
        {},
        None,
        "RTM.6",
    ),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "product", "number"), ROWS)
def test_each_fault_is_found(
    op: str, inputs: dict[str, TensorInfo], attrs: dict[str, Any], product: str | None, number: str
) -> None:
    changed = node(op, inputs, attrs)
    found = verify(changed) if product is None else verify(changed, product)
    assert {entry.constraint for entry in found} == {number}


@pytest.mark.parametrize("op", GOOD)
def test_sizes_that_are_not_known_break_nothing(op: str) -> None:
    large = {name: info for name, info in GOOD[op].items() if len(info.shape or ()) > 2}
    opened = {name: tensor(("b", None, *(info.shape or ())[2:])) for name, info in large.items()}
    unknown = {name: TensorInfo(info.dtype, None) for name, info in GOOD[op].items()}
    for product in PRODUCTS[op]:
        assert not verify(node(op, opened), product)
        assert not verify(node(op, unknown), product)


def test_a_weight_of_float32_beside_16_bits() -> None:
    for op in ("GemmaRmsNorm", "LayerNormV3"):
        mixed = {name: tensor(info.shape, FLOAT) for name, info in GOOD[op].items() if name != "x"}
        assert not verify(node(op, mixed), "950")
        assert not verify(node(op, mixed))


def test_releases() -> None:
    for op, first in (
        ("GemmaRmsNorm", "8.5.0"),
        ("LayerNormV3", "9.2.0"),
        ("RotaryMul", "8.5.0"),
        ("InterleaveRope", "8.5.0"),
    ):
        assert get(op, first) == get(op)
        with pytest.raises(UnknownVariant):
            get(op, "8.0")


def test_both_axes_are_one_on_950_before_another_release() -> None:
    several = node("LayerNormV3", {}, {"begin_norm_axis": 1})
    assert [entry.constraint for entry in verify(several, "950", "9.1.0")] == ["LNT.3"]
    for product, cann in (("950", "9.2.0"), ("A2", "9.1.0"), ("A2", None)):
        assert not verify(several, product, cann)
    assert not verify(node("LayerNormV3"), "950", "9.0.0")


@pytest.mark.parametrize(
    "table",
    [(1, 1, 4, 64), (2, 1, 4, 64), (2, 5, 4, 64), (1, 5, 1, 64), (2, 5, 1, 64), (2, 1, 1, 64)],
)
def test_orders_of_batch_tokens_and_heads(table: tuple[int, ...]) -> None:
    assert not verify(node("RotaryMul", {name: tensor(table) for name in ("r1", "r2")}), "A2")


def test_one_angle_for_all_tokens() -> None:
    assert not verify(node("InterleaveRope", {name: tensor((2, 1, 1, 64)) for name in ("cos", "sin")}), "A2")


def test_shapes_of_results() -> None:
    x = tensor((2, "s", 4, 8), BF16)
    rows = tensor((2, "s", 1, 1), FLOAT)
    assert infer("GemmaRmsNorm", {"x": x, "gamma": tensor((4, 8), BF16)}, {}) == {"y": x, "rstd": rows}
    weights = {name: tensor((8,), FLOAT) for name in ("gamma", "beta")}
    for axis in (2, -2):
        found = infer("LayerNormV3", {"x": x, **weights}, {"begin_norm_axis": axis, "begin_params_axis": 3})
        assert found == {"y": x, "mean": rows, "rstd": rows}
    assert infer("LayerNormV3", {"x": tensor(None, BF16), **weights}, {})["mean"] == tensor(None, FLOAT)
    assert infer("RotaryMul", dict.fromkeys(("x", "r1", "r2"), x), {}) == {"y": x}
    assert infer("InterleaveRope", dict.fromkeys(("x", "cos", "sin"), x), {}) == {"y": x}
