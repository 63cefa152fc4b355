"""The constraints of the operators around attention: each row breaks exactly one of an otherwise good node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, UnknownVariant, get, infer, verify

from .nodes import tensor

BF16, FLOAT, HALF = "DT_BF16", "DT_FLOAT", "DT_FLOAT16"
GOOD: Mapping[str, Mapping[str, TensorInfo]] = {
    "RmsNorm": {"x": tensor((2, 5, 64)), "gamma": tensor((64,))},
    "AddRmsNorm": {"x1": tensor((2, 5, 64)), "x2": tensor((2, 5, 64)), "gamma": tensor((64,))},
    "SwiGlu": {"x": tensor((2, 5, 128))},
}


def node(op: str, inputs: Mapping[str, TensorInfo] | None = None, attrs: Mapping[str, Any] | None = None) -> NodeView:
    return NodeView(op, op, {**GOOD[op], **(inputs or {})}, {}, dict(attrs or {}))


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("product", ["A2", "A3", "950", "310P", None])
@pytest.mark.parametrize("dtype", [HALF, FLOAT, BF16])
def test_a_good_node_breaks_nothing(op: str, product: str | None, dtype: str) -> None:
    typed = {name: tensor(info.shape, dtype) for name, info in GOOD[op].items()}
    found = [] if product is None else verify(node(op, typed), product)
    found += verify(node(op, typed))
    assert bool(found) == (product == "310P" and dtype == BF16)


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
    ("AddRmsNorm", {"x2": tensor((2, 5, 64), BF16)}, {}, None, "ARN.1"),
    ("AddRmsNorm", {"gamma": tensor((64,), FLOAT)}, {}, None, "ARN.1"),
    ("AddRmsNorm", {"x1": tensor(()), "x2": tensor(())}, {}, None, "ARN.2"),
    ("AddRmsNorm", {"x2": tensor((5, 64))}, {}, None, "ARN.3"),
    ("AddRmsNorm", {"x2": tensor((2, 1, 64))}, {}, None, "ARN.3"),
    ("AddRmsNorm", {"gamma": tensor((1,))}, {}, None, "ARN.4"),
    ("AddRmsNorm", {"x1": tensor((0, 64)), "x2": tensor((0, 64))}, {}, None, "ARN.5"),
    ("AddRmsNorm", {}, {"epsilon": -1.0}, None, "ARN.6"),
    ("SwiGlu", {"x": tensor((2, 8), "DT_INT8")}, {}, None, "SG.1"),
    ("SwiGlu", {}, {"dim": 3}, None, "SG.2"),
    ("SwiGlu", {"x": tensor(())}, {}, None, "SG.2"),
    ("SwiGlu", {"x": tensor((2, 7))}, {}, None, "SG.3"),
    ("SwiGlu", {}, {"dim": 1}, None, "SG.3"),
    ("SwiGlu", {"x": tensor((2, 62))}, {}, "310P", "SG.4"),
    ("SwiGlu", {"x": tensor((0, 64))}, {}, "310P", "SG.4"),
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
    opened = {name: tensor(("b", None, *(info.shape or ())[2:])) for name, info in GOOD[op].items() if name != "gamma"}
    assert not verify(node(op, opened), "A2")
    unknown = {name: tensor(None) for name in GOOD[op]}
    assert not verify(node(op, unknown), "310P")


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.parametrize("product", ["310B", "910"])
def test_products_without_the_operators(op: str, product: str) -> None:
    assert [entry.constraint for entry in verify(node(op), product)] == ["G0"]


@pytest.mark.parametrize("op", GOOD)
def test_older_releases_are_not_known(op: str) -> None:
    with pytest.raises(UnknownVariant):
        get(op, "8.0")
    assert get(op, "8.5.0") == get(op)


def test_shapes_of_results() -> None:
    x, gamma = tensor((2, "s", 4, 8), BF16), tensor((4, 8), FLOAT)
    assert infer("RmsNorm", {"x": x, "gamma": gamma}, {}) == {
        "y": x,
        "rstd": tensor((2, "s", 1, 1), FLOAT),
    }
    assert infer("AddRmsNorm", {"x1": x, "x2": x, "gamma": tensor(None)}, {})["rstd"] == tensor(None, FLOAT)
    assert infer("SwiGlu", {"x": x}, {"dim": 1})["y"] == tensor((2, None, 4, 8), BF16)
    assert infer("SwiGlu", {"x": x}, {"dim": -1})["y"] == tensor((2, "s", 4, 4), BF16)
    assert infer("SwiGlu", {"x": tensor(None, BF16)}, {})["y"] == tensor(None, BF16)
