"""What follows for the outputs, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fa_compiler.op_registry import NodeError, TensorInfo, can_infer, infer, names, verify

from .nodes import DV, N1, N2, S1, SHAPES, B, D, backward, forward, tensor

OUT = {
    "BSH": (B, S1, N1 * DV),
    "SBH": (S1, B, N1 * DV),
    "BSND": (B, S1, N1, DV),
    "BNSD": (B, N1, S1, DV),
    "TND": (S1, N1, DV),
}


@pytest.mark.parametrize("dtype", ["DT_FLOAT16", "DT_BF16", "DT_FLOAT"])
@pytest.mark.parametrize("layout", list(SHAPES))
def test_forward(layout: str, dtype: str) -> None:
    node = forward(layout=layout, dtype=dtype)
    found = infer("FlashAttentionScore", node.inputs, node.attrs)  # type: ignore[arg-type]
    statistics = TensorInfo("DT_FLOAT", (S1, N1, 8) if layout == "TND" else (B, N1, S1, 8))
    assert found == {
        "softmax_max": statistics,
        "softmax_sum": statistics,
        "softmax_out": TensorInfo(dtype, (0, 0, 0, 0)),
        "attention_out": TensorInfo(dtype, OUT[layout]),
    }
    assert verify(replace(node, outputs=found)) == []


@pytest.mark.parametrize("layout", list(SHAPES))
def test_backward(layout: str) -> None:
    node = backward({"sink": tensor((N1,), "DT_FLOAT")}, layout=layout)
    found = infer("FlashAttentionScoreGrad", node.inputs, node.attrs)  # type: ignore[arg-type]
    shapes = [info.shape for info in found.values()]
    assert shapes == [*SHAPES[layout], (0,), (0,), (0,), (N1,)]
    assert [info.dtype for info in found.values()] == ["DT_FLOAT16"] * 6 + ["DT_FLOAT"]
    assert verify(replace(node, outputs=found)) == []


def test_symbols_are_carried_through() -> None:
    query = tensor(("batch", N1, "queries", D))
    kv = tensor(("batch", N2, "keys", "value_size"))
    found = infer(
        "FlashAttentionScore",
        {"query": query, "key": kv, "value": kv},
        {"head_num": N1, "input_layout": "BNSD"},
    )
    assert found["attention_out"].shape == ("batch", N1, "queries", "value_size")
    assert found["softmax_max"].shape == ("batch", N1, "queries", 8)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize(
    ("batches", "common"),
    [
        ((1, 2, 2), 2),
        ((2, 1, 1), 2),
        ((1, 1, 2), 2),
        ((1, 1, 1), 1),
        ((1, 0, 1), 0),
        (("b", 2, 1), 2),
        ((None, 1, 2), 2),
        (("b", 1, "b"), "b"),
        ((1, "kv", 1), "kv"),
        (("b", "kv", "kv"), None),
        (("b", None, "b"), None),
        ((None, None, None), None),
    ],
)
def test_the_batch_is_that_of_query_key_and_value_together(layout: str, batches: tuple[Any, ...], common: Any) -> None:
    axis = 1 if layout == "SBH" else 0

    def with_batch(shape: tuple[Any, ...], size: Any) -> tuple[Any, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    shapes = [with_batch(shape, size) for shape, size in zip(SHAPES[layout], batches, strict=True)]
    inputs = dict(zip(("query", "key", "value"), map(tensor, shapes), strict=True))
    attrs = {"head_num": N1, "input_layout": layout}
    found = infer("FlashAttentionScore", inputs, attrs)
    assert found["attention_out"].shape == with_batch(OUT[layout], common)
    assert found["softmax_max"].shape == found["softmax_sum"].shape == (common, N1, S1, 8)
    backward_found = infer("FlashAttentionScoreGrad", inputs, attrs)
    assert [backward_found[name].shape for name in ("dq", "dk", "dv")] == shapes


def test_folded_heads_with_symbols() -> None:
    same = tensor(("b", "s", "hidden"))
    attrs = {"head_num": 8, "input_layout": "BSH"}
    found = infer("FlashAttentionScore", {"query": same, "key": same, "value": same}, attrs)
    assert found["attention_out"].shape == ("b", "s", None)
    full = tensor(("b", "s", 512))
    found = infer("FlashAttentionScore", {"query": full, "key": full, "value": full}, attrs)
    assert found["attention_out"].shape == ("b", "s", 512)
    grouped = tensor(("b", "t", 128))
    found = infer("FlashAttentionScore", {"query": full, "key": grouped, "value": grouped}, attrs)
    assert found["attention_out"].shape == ("b", "s", 512)


def test_what_is_unknown_stays_unknown() -> None:
    unknown = TensorInfo("", None)
    found = infer(
        "FlashAttentionScore",
        {"query": unknown, "key": unknown, "value": unknown},
        {"head_num": 8, "input_layout": "BSND"},
    )
    assert found["attention_out"] == TensorInfo("", None)
    assert found["softmax_max"] == TensorInfo("DT_FLOAT", (None, 8, None, 8))


def test_eight_bit_floats_give_what_out_dtype_says() -> None:
    for out_dtype, dtype in ((0, "DT_FLOAT16"), (1, "DT_BF16")):
        node = forward(attrs={"out_dtype": out_dtype}, dtype="DT_FLOAT8_E5M2")
        found = infer(node.op_type, node.inputs, node.attrs)  # type: ignore[arg-type]
        assert found["attention_out"].dtype == dtype


def test_what_cannot_be_inferred_is_refused() -> None:
    node = forward()
    with pytest.raises(NodeError, match="input_layout is 'XYZ'"):
        infer(node.op_type, node.inputs, {"head_num": 8, "input_layout": "XYZ"})
    with pytest.raises(NodeError, match="key has rank 3, expected 4"):
        infer(node.op_type, {**node.inputs, "key": tensor((1, 2, 3))}, node.attrs)
    with pytest.raises(NodeError, match="needs the input value"):
        infer(node.op_type, {"query": tensor((1,)), "key": tensor((1,))}, node.attrs)
    assert all(map(can_infer, names()))
    assert not can_infer("Softmax")


def test_stated_outputs_must_agree() -> None:
    wrong_type = forward(outputs={"attention_out": tensor(OUT["BNSD"], "DT_FLOAT")})
    assert [(v.constraint, v.tensor) for v in verify(wrong_type)] == [("G0", "attention_out")]
    wrong_shape = forward(outputs={"attention_out": tensor((B, N1, S1, D))})
    (violation,) = verify(wrong_shape)
    assert violation.message == "attention_out has the shape [2,8,16,64], expected [2,8,16,32]"
