"""The constraints of KvRmsNormRopeCache and QkvRmsNormRopeCache: each row breaks exactly one of a good node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fa_compiler.op_registry import NodeView, TensorInfo, UnknownVariant, get, infer, verify

from .nodes import constant, tensor

OP, QKV = "KvRmsNormRopeCache", "QkvRmsNormRopeCache"
INT8, FLOAT, BF16 = "DT_INT8", "DT_FLOAT", "DT_BF16"
TABLES = {name: tensor((2, 1, 3, 64)) for name in ("cos", "sin")}
LATENT: Mapping[str, TensorInfo] = {
    "kv": tensor((2, 1, 3, 576)),
    "gamma": tensor((512,)),
    **TABLES,
    "index": tensor((2, 3), "DT_INT64"),
    "k_cache": tensor((2, 1, 9, 64)),
    "ckv_cache": tensor((2, 1, 9, 512)),
}
PAGES: Mapping[str, TensorInfo] = {
    **LATENT,
    "index": tensor((6,), "DT_INT64"),
    "k_cache": tensor((5, 32, 1, 64)),
    "ckv_cache": tensor((5, 32, 1, 512)),
}
INTEGERS: Mapping[str, TensorInfo] = {
    **PAGES,
    "k_cache": tensor((5, 32, 1, 64), INT8),
    "ckv_cache": tensor((5, 32, 1, 512), INT8),
    "k_rope_scale": tensor((64,), FLOAT),
    "c_kv_scale": tensor((1, 512), FLOAT),
    "c_kv_offset": tensor((1, 512), FLOAT),
}
KEYS: Mapping[str, TensorInfo] = {
    **LATENT,
    "kv": tensor((2, 4, 3, 192)),
    "gamma": tensor((192,)),
    **{name: tensor((2, 4, 1, 64)) for name in ("cos", "sin")},
    "v": tensor((2, 4, 3, 128)),
    "k_cache": tensor((2, 4, 9, 192)),
    "ckv_cache": tensor((2, 4, 9, 128)),
}
TWO_HEADS = {
    "kv": tensor((2, 2, 3, 576)),
    **{name: tensor((2, 2, 3, 64)) for name in ("cos", "sin")},
    "k_cache": tensor((2, 2, 9, 64)),
    "ckv_cache": tensor((2, 2, 9, 512)),
}
PA, BLOCKS, NZ = ({"cache_mode": mode} for mode in ("PA_BNSD", "PA_BLK_BNSD", "PA_NZ"))
BLOCKS_INDEX = {"index": tensor((2,), "DT_INT64")}


def node(inputs: Mapping[str, TensorInfo], attrs: Mapping[str, Any] | None = None) -> NodeView:
    return NodeView(OP, OP, dict(inputs), {}, dict(attrs or {}))


@pytest.mark.parametrize("product", ["A2", "A3", "950", None])
def test_good_nodes_break_nothing(product: str | None) -> None:
    good = [(LATENT, {}), (PAGES, PA), (PAGES, NZ), ({**PAGES, **BLOCKS_INDEX}, BLOCKS), (INTEGERS, PA)]
    good += [] if product == "950" else [(KEYS, {})]
    for inputs, attrs in good:
        assert not verify(node(inputs, attrs), product or "A2")
        assert not verify(node(inputs, attrs))
        halves = {name: tensor(info.shape, BF16) for name, info in inputs.items() if info.dtype == "DT_FLOAT16"}
        assert not verify(node({**inputs, **halves}, attrs), product or "A2")


ROWS: list[tuple[Mapping[str, TensorInfo], dict[str, TensorInfo], dict[str, Any], str | None, str]] = [
    (LATENT, {"kv": tensor((2, 1, 3, 576), FLOAT)}, {}, None, "KRC.1"),
    (LATENT, {"gamma": tensor((512,), BF16)}, {}, None, "KRC.1"),
    (LATENT, {"index": tensor((2, 3), "DT_INT32")}, {}, None, "KRC.1"),
    (LATENT, {"k_cache": tensor((2, 1, 9, 64), BF16)}, {}, None, "KRC.2"),
    (INTEGERS, {"ckv_cache": tensor((5, 32, 1, 512), "DT_HIFLOAT8")}, PA, None, "KRC.2"),
    (LATENT, {}, {"cache_mode": "BNSD"}, None, "KRC.3"),
    (LATENT, TWO_HEADS, {}, None, "KRC.4"),
    (KEYS, {"kv": tensor((2, 3, 192))}, {}, None, "KRC.4"),
    (LATENT, {"gamma": tensor((2, 512))}, {}, None, "KRC.5"),
    (LATENT, {"sin": tensor((2, 1, 1, 64))}, {}, None, "KRC.5"),
    (LATENT, {"kv": tensor((2, 1, 3, 575))}, {}, None, "KRC.5"),
    (KEYS, {"v": tensor((2, 1, 3, 128))}, {}, None, "KRC.5"),
    (
        LATENT,
        {"kv": tensor((2, 1, 3, 320)), "gamma": tensor((256,)), "ckv_cache": tensor((2, 1, 9, 256))},
        {},
        "A2",
        "KRC.6",
    ),
    (KEYS, {"v": tensor((2, 4, 3, 64)), "ckv_cache": tensor((2, 4, 9, 64))}, {}, "A3", "KRC.6"),
    (KEYS, {}, {}, "950", "KRC.7"),
    (LATENT, {"k_cache": tensor((2, 1, 9, 32))}, {}, None, "KRC.8"),
    (LATENT, {"ckv_cache": tensor((2, 1, 8, 512))}, {}, None, "KRC.8"),
    (PAGES, {"k_cache": tensor((5, 8, 1, 64)), "ckv_cache": tensor((5, 8, 1, 512))}, PA, None, "KRC.8"),
    (LATENT, {"index": tensor((6,), "DT_INT64")}, {}, None, "KRC.9"),
    (PAGES, {"index": tensor((2, 3), "DT_INT64")}, PA, None, "KRC.9"),
    (PAGES, {}, BLOCKS, None, "KRC.9"),
    (PAGES, {"k_rope_scale": tensor((64,), FLOAT)}, PA, None, "KRC.10"),
    (PAGES, {"k_rope_offset": tensor((64,), FLOAT)}, PA, None, "KRC.10"),
    (PAGES, {"k_cache": tensor((5, 32, 1, 64), INT8)}, PA, None, "KRC.10"),
    (INTEGERS, {"k_rope_scale": tensor((1,), FLOAT)}, PA, "A2", "KRC.11"),
    (INTEGERS, {"c_kv_scale": tensor((2, 512), FLOAT)}, PA, None, "KRC.11"),
    (LATENT, {"index": constant([[0, 1, 2], [0, 1, 9]])}, {}, None, "KRC.12"),
    (LATENT, {"index": constant([[0, 1, 1], [0, 1, 2]])}, {}, None, "KRC.12"),
    (PAGES, {"index": constant([0, 1, 2, 3, 4, 160])}, PA, None, "KRC.12"),
    (PAGES, {"index": constant([0, 31])}, BLOCKS, None, "KRC.12"),
    (LATENT, {}, {"epsilon": -1.0}, None, "KRC.13"),
]


@pytest.mark.parametrize(("base", "inputs", "attrs", "product", "number"), ROWS)
def test_each_fault_is_found(
    base: Mapping[str, TensorInfo],
    inputs: dict[str, TensorInfo],
    attrs: dict[str, Any],
    product: str | None,
    number: str,
) -> None:
    changed = node({**base, **inputs}, attrs)
    found = verify(changed) if product is None else verify(changed, product)
    assert {entry.constraint for entry in found} == {number}
    assert product is None or not verify(changed)


def test_the_mode_norm_is_not_quantised_on_a2() -> None:
    caches = {"k_cache": tensor((2, 1, 9, 64), INT8), "k_rope_scale": tensor((64,), FLOAT)}
    changed = node({**LATENT, **caches})
    assert not verify(changed)
    assert [entry.constraint for entry in verify(changed, "A2")] == ["KRC.10"]


def test_a_place_may_be_skipped_any_number_of_times() -> None:
    assert not verify(node({**LATENT, "index": constant([[0, -1, -1], [8, -1, 0]])}))
    empty = verify(node({**LATENT, "index": constant(np.zeros((2, 0), np.int64))}))
    assert [entry.constraint for entry in empty] == ["KRC.9"]


def test_sizes_that_are_not_known_break_nothing() -> None:
    for base, attrs in ((LATENT, {}), (INTEGERS, PA), (KEYS, {})):
        unknown = {name: TensorInfo(info.dtype, None) for name, info in base.items()}
        assert not verify(node(unknown, attrs), "A3")
        opened = {
            name: tensor(("b", None, *(info.shape or ())[2:]), info.dtype)
            for name, info in base.items()
            if len(info.shape or ()) == 4
        }
        assert not verify(node({**base, **opened}, attrs), "A3")


def test_products_and_releases_without_the_operator() -> None:
    for product in ("310P", "310B", "910"):
        assert [entry.constraint for entry in verify(node(LATENT), product)] == ["G0"]
    with pytest.raises(UnknownVariant):
        get(OP, "8.0")


def test_shapes_of_results() -> None:
    found = infer(OP, LATENT, {})
    assert found == {
        "k_cache": LATENT["k_cache"],
        "ckv_cache": LATENT["ckv_cache"],
        "k_rope": tensor((2, 1, 3, 64)),
        "c_kv": tensor((2, 1, 3, 512)),
    }
    assert infer(OP, KEYS, {})["k_rope"] == tensor((2, 4, 3, 192))
    assert infer(OP, KEYS, {})["c_kv"] == tensor((2, 4, 3, 128))


SIZES = {"qkv_size": [2, 3, 8, 128], "head_nums": [4, 2, 2]}
HEADS: Mapping[str, TensorInfo] = {
    "qkv": tensor((6, 1024)),
    **{name: tensor((128,)) for name in ("q_gamma", "k_gamma")},
    **{name: tensor((6, 128)) for name in ("cos", "sin")},
    "index": tensor((6,), "DT_INT64"),
    "q_out": tensor((6, 512)),
    "k_cache": tensor((4, 16, 32, 16)),
    "v_cache": tensor((4, 16, 32, 16)),
}
NARROW: Mapping[str, TensorInfo] = {
    "k_cache": tensor((4, 8, 32, 32), INT8),
    "k_scale": tensor((2, 128), FLOAT),
    "k_offset": tensor((2, 128), FLOAT),
}


def joined(inputs: Mapping[str, TensorInfo], attrs: Mapping[str, Any] | None = None) -> NodeView:
    return NodeView(QKV, QKV, {**HEADS, **inputs}, {}, {**SIZES, **(attrs or {})})


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_good_nodes_of_joined_heads(product: str) -> None:
    for inputs in ({}, NARROW):
        assert not verify(joined(inputs), product)
        assert not verify(joined(inputs))
    halves = {name: tensor(info.shape, BF16) for name, info in HEADS.items() if info.dtype == "DT_FLOAT16"}
    assert not verify(joined(halves), product)
    assert not verify(joined({name: TensorInfo(info.dtype, None) for name, info in HEADS.items()}), product)


JOINED: list[tuple[dict[str, TensorInfo], dict[str, Any], str]] = [
    ({"q_gamma": tensor((128,), BF16)}, {}, "QRC.1"),
    ({"index": tensor((6,), "DT_INT32")}, {}, "QRC.1"),
    ({"k_cache": tensor((4, 16, 32, 16), BF16)}, {}, "QRC.2"),
    ({}, {"cache_mode": "PA"}, "QRC.3"),
    ({}, {"is_output_qkv": True}, "QRC.4"),
    ({}, {"head_nums": [4, 3, 1]}, "QRC.5"),
    ({}, {"head_nums": [8]}, "QRC.5"),
    ({}, {"qkv_size": [2, 3, 8, 64]}, "QRC.5"),
    ({}, {"qkv_size": [2, 3, 8]}, "QRC.5"),
    ({"q_out": tensor((6, 1024))}, {}, "QRC.6"),
    ({"cos": tensor((3, 128))}, {}, "QRC.6"),
    ({"k_cache": tensor((4, 8, 32, 32))}, {}, "QRC.7"),
    ({"v_cache": tensor((4, 16, 16, 16))}, {}, "QRC.7"),
    ({name: tensor((4, 16, 8, 16)) for name in ("k_cache", "v_cache")}, {}, "QRC.7"),
    ({name: tensor((1, 16, 32, 16)) for name in ("k_cache", "v_cache")}, {}, "QRC.8"),
    ({"k_scale": tensor((2, 128), FLOAT)}, {}, "QRC.9"),
    ({"v_offset": tensor((2, 128), FLOAT)}, {}, "QRC.9"),
    ({**NARROW, "k_scale": tensor((1, 128), FLOAT)}, {}, "QRC.9"),
    ({"k_cache": tensor((4, 8, 32, 32), INT8)}, {}, "QRC.9"),
    ({"index": constant([0, 1, 2, 3, 4, 128])}, {}, "QRC.10"),
    ({"index": constant([0, 1, -1, -1, 4, 0])}, {}, "QRC.10"),
    ({}, {"epsilon": -1.0}, "QRC.11"),
]


@pytest.mark.parametrize(("inputs", "attrs", "number"), JOINED)
def test_each_fault_of_joined_heads_is_found(inputs: dict[str, TensorInfo], attrs: dict[str, Any], number: str) -> None:
    assert {entry.constraint for entry in verify(joined(inputs, attrs))} == {number}


def test_products_and_results_of_joined_heads() -> None:
    for product in ("950", "310P"):
        assert [entry.constraint for entry in verify(joined({}), product)] == ["G0"]
    found = infer(QKV, HEADS, SIZES)
    assert found["q_out_before_quant"] == HEADS["q_out"]
    assert found["v_out_before_quant"] == tensor((6, 256))
    assert found["k_cache"] == HEADS["k_cache"]
