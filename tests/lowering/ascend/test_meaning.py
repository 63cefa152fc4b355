"""Operators of GE as no file of ours has them: what their meaning in ONNX computes, and what is inferred of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fa_compiler.lowering.ascend.graph import Attr, Graph, Model, Op, Output, TensorDesc
from fa_compiler.lowering.ascend.infer import Fact, infer
from fa_compiler.lowering.ascend.infer.graph import constant
from fa_compiler.op_registry.dtypes import from_numpy
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from tests.lowering.ascend.graphs import const, data, net_output
from tests.lowering.ascend.onnx_models import run
from tools.ge_to_onnx import from_ge

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
IDS = np.array([[0, 2, 0], [2, 2, 1]])
SUMS = np.stack([X[0, 0] + X[0, 2], X[1, 2], X[0, 1] + X[1, 0] + X[1, 1]])
NORMALISED = 2 * X / np.sqrt(np.mean(4 * X * X, axis=-1, keepdims=True) + np.float32(1e-6))
CENTRED = X - X.mean(axis=-1, keepdims=True)
CENTRED = CENTRED / np.sqrt(np.mean(CENTRED * CENTRED, axis=-1, keepdims=True) + np.float32(1e-5))
TWOS = np.full(4, 2, np.float32)
TANH_GELU = X[..., :2] / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X[..., :2] + 0.044715 * X[..., :2] ** 3)))
EXACT_GELU = X[..., 1::-1] / 2 * (1 + np.vectorize(math.erf)(X[..., 1::-1] / np.sqrt(2)))


def clipped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 7)
    return (gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)).astype(np.float32)


HEADS = np.arange(2 * 3 * 64, dtype=np.float16).reshape(2, 1, 3, 64)
PLACES = [*range(0, 64, 2), *range(1, 64, 2)]
ONE_HOT = np.array([[0, 1, 0]], np.float32)

ROWS: list[tuple[str, dict[str, np.ndarray], dict[str, Any], np.ndarray]] = [
    ("Transpose", {"x": X, "perm": np.array([-1, 0, -2])}, {}, X.transpose(2, 0, 1)),
    ("UnsortedSegmentSum", {"x": X, "segment_ids": IDS, "num_segments": np.array(3)}, {}, SUMS),
    ("SqueezeV3", {"x": X[:1, :1], "axes": np.array([], np.int64)}, {}, X[0, 0]),
    ("TopK", {"x": X, "k": np.array([2], np.int32)}, {}, X[..., :1:-1]),
    (
        "OneHot",
        {"x": np.array([1]), "depth": np.array([3], np.int32), "on_value": X[0, 0, 1], "off_value": X[0, 0, 0]},
        {},
        ONE_HOT,
    ),
    ("AddRmsNorm", {"x1": X, "x2": X, "gamma": np.full(4, 2, np.float32)}, {}, 2 * NORMALISED),
    ("GemmaRmsNorm", {"x": 2 * X, "gamma": np.full(4, 2, np.float32)}, {}, 3 * NORMALISED),
    *(
        (  # the pairs of a row of four are neighbours, or its even and its odd elements in halves
            "RotaryPositionEmbedding",
            {"x": X, "cos": np.full((1, 3, 4), 2, np.float32), "sin": np.full((1, 3, 4), 3, np.float32)},
            {"mode": mode},
            2 * X[..., order] + 3 * X[..., source] * np.array(sign, np.float32),
        )
        for mode, order, source, sign in (
            (1, [0, 1, 2, 3], [1, 0, 3, 2], [-1, 1, -1, 1]),
            (3, [0, 2, 1, 3], [1, 3, 0, 2], [-1, -1, 1, 1]),
        )
    ),
    ("LayerNormV4", {"x": X, "normalized_shape": np.array([4], np.int32)}, {}, CENTRED),
    (
        "LayerNormV3",
        {"x": X, "gamma": TWOS, "beta": TWOS},
        {"begin_norm_axis": -1, "begin_params_axis": 2},
        2 * CENTRED + 2,
    ),
    (
        "LayerNormV4",
        {"x": X, "normalized_shape": np.array([4], np.int32), "gamma": TWOS, "beta": TWOS},
        {},
        2 * CENTRED + 2,
    ),
    (
        "AddLayerNorm",
        {"x1": X, "x2": TWOS * np.zeros_like(X), "gamma": TWOS, "beta": TWOS, "bias": TWOS},
        {"additional_output": True},
        2 * CENTRED + 2,
    ),
    (
        "RotaryPositionEmbedding",
        {"x": X, "cos": np.full((1, 3, 4), 2, np.float32), "sin": np.full((1, 3, 4), 3, np.float32)},
        {},
        2 * X + 3 * np.concatenate([-X[..., 2:], X[..., :2]], axis=-1),
    ),
    (
        "InterleaveRope",
        {"x": HEADS, "cos": np.full((2, 1, 1, 64), 2, np.float16), "sin": np.full((2, 1, 1, 64), 3, np.float16)},
        {},
        2 * HEADS[..., PLACES] + 3 * np.concatenate([-HEADS[..., 1::2], HEADS[..., ::2]], axis=-1),
    ),
    (
        "RotaryMul",
        {"x": X[None], "r1": np.full((1, 1, 3, 4), 2, np.float32), "r2": np.full((1, 1, 3, 4), 3, np.float32)},
        {},
        (2 * X + 3 * np.concatenate([-X[..., 2:], X[..., :2]], axis=-1))[None],
    ),
    (
        "ApplyRotaryPosEmb",
        {
            "query": X[:, :, None],
            "key": X[:, :, None],
            **{name: np.full((2, 3, 1, 4), number, np.float32) for name, number in (("cos", 2), ("sin", 3))},
        },
        {},
        (2 * X + 3 * np.concatenate([-X[..., 2:], X[..., :2]], axis=-1))[:, :, None],
    ),
    ("GeGluV2", {"x": X}, {"activate_left": True}, (TANH_GELU * X[..., 2:]).astype(np.float32)),
    ("GeGluV2", {"x": X[..., ::-1].copy()}, {"approximate": 0}, (EXACT_GELU * X[..., :1:-1]).astype(np.float32)),
    ("ClippedSwiglu", {"x": X}, {}, clipped(X[..., ::2], X[..., 1::2])),
    ("ClippedSwiglu", {"x": X}, {"interleaved": False, "dim": -1}, clipped(X[..., :2], X[..., 2:])),
    ("SwiGlu", {"x": X}, {"dim": -1}, X[..., :2] / (1 + np.exp(-X[..., :2])) * X[..., 2:]),
]


@pytest.mark.parametrize(("op_type", "inputs", "attrs", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_meaning(op_type: str, inputs: dict[str, np.ndarray], attrs: dict[str, Any], expected: np.ndarray) -> None:
    arrays = {name: np.asarray(array) for name, array in inputs.items()}
    spec = ge_prototype(op_type)
    assert spec is not None
    types = {name: str(from_numpy(array.dtype)) for name, array in arrays.items()}
    first = next(iter(arrays))
    ops = [data(first, 0, types[first], arrays[first].shape)]
    ops += [const(name, array, types[name]) for name, array in arrays.items() if name != first]
    op = Op("op", op_type, [Output(name) for name in arrays])
    op.input_descs = [TensorDesc(name, types[name], array.shape) for name, array in arrays.items()]
    op.attrs = {name: Attr(spec.attr(name).type, value) for name, value in attrs.items()}
    facts = {name: Fact(types[name], array.shape) for name, array in arrays.items()}
    facts |= {made.name: constant(made.attrs["value"].value) for made in ops[1:]}  # type: ignore[arg-type]
    found = infer(op, facts)
    op.output_descs = [
        TensorDesc(entry.name, fact.dtype, fact.shape) for entry, fact in zip(spec.outputs, found, strict=True)
    ]
    end = net_output(Output("op"), dtype=found[0].dtype, shape=found[0].shape)
    (made,) = run(from_ge(Model("m", [Graph("g", [*ops, op, end])])), {first: arrays[first]})
    np.testing.assert_allclose(made, expected, rtol=1e-6)  # roots and exponentials differ in the last bit
    assert (found[0].dtype, found[0].shape) == (from_numpy(expected.dtype), expected.shape)
