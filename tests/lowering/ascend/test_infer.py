"""Inference through GE graphs: one row for each operator, what must not be connected, and whole models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.check_shapes import DECLARED, INFERENCE, NO_RULE
from fa_compiler.lowering.ascend.air.encode import encode
from fa_compiler.lowering.ascend.convert import to_ge
from fa_compiler.lowering.ascend.graph import Attr, Graph, Model, Op, Output, TensorDesc, Weight
from fa_compiler.lowering.ascend.infer import Fact, InferenceError, can_infer, infer
from fa_compiler.lowering.ascend.infer.graph import constant, infer_model
from fa_compiler.op_registry.ge_prototypes import ge_operators, ge_prototype
from fa_compiler.op_registry.spec import Kind
from tests.examples import examples
from tests.lowering.ascend.graphs import attention, branches, data, net_output

F, H, I, B = "DT_FLOAT", "DT_FLOAT16", "DT_INT64", "DT_BOOL"  # noqa: E741


def vector(items: Sequence[int | None]) -> np.ndarray[Any, np.dtype[np.object_]]:
    made = np.empty(len(items), dtype=object)
    made[:] = list(items)
    return made


def ints(*numbers: int) -> Fact:
    return Fact(I, (len(numbers),), vector(numbers))


def number(value: int, dtype: str = I) -> Fact:
    made = np.empty((), dtype=object)
    made[...] = value
    return Fact(dtype, (), made)


def result(op_type: str, inputs: dict[str, Fact], attrs: dict[str, Any] | None = None) -> list[tuple[str, Any]]:
    spec = ge_prototype(op_type)
    assert spec is not None
    kinds = {entry.name: entry.type for entry in spec.attrs}
    op = Op("op", op_type, attrs={name: Attr(kinds[name], value) for name, value in (attrs or {}).items()})
    return [(fact.dtype, fact.shape) for fact in infer(op, inputs)]


X = {"x": Fact(F, (2, -1, 6))}

ROWS: list[tuple[str, dict[str, Fact], dict[str, Any], list[tuple[str, Any]]]] = [
    ("Relu", X, {}, [(F, (2, -1, 6))]),
    ("Cast", X, {"dst_type": 1}, [(H, (2, -1, 6))]),
    ("IsNan", X, {}, [(B, (2, -1, 6))]),
    ("Add", {"x1": Fact(F, (2, -1, 6)), "x2": Fact(F, (5, 1))}, {}, [(F, (2, 5, 6))]),
    ("Less", {"x1": Fact(F, (3, 1)), "x2": Fact(F, (1, 4))}, {}, [(B, (3, 4))]),
    ("SelectV2", {"condition": Fact(B, (4, 1)), "then": Fact(F, ()), "else": Fact(F, (3,))}, {}, [(F, (4, 3))]),
    ("AddN", {"x0": Fact(F, (2, -1)), "x1": Fact(F, (2, 3))}, {"N": 2}, [(F, (2, 3))]),
    ("Reshape", {**X, "shape": ints(2, 2, -1, 3)}, {}, [(F, (2, 2, -1, 3))]),
    ("Reshape", {"x": Fact(F, (4, 6)), "shape": ints(3, -1)}, {}, [(F, (3, 8))]),
    ("Reshape", {"x": Fact(F, (4, 6)), "shape": Fact(I, (3,))}, {}, [(F, (-1, -1, -1))]),
    ("Transpose", {**X, "perm": ints(2, 0, 1)}, {}, [(F, (6, 2, -1))]),
    ("Squeeze", {"x": Fact(F, (1, 3, 1))}, {"axis": (0,)}, [(F, (3, 1))]),
    ("Squeeze", {"x": Fact(F, (1, 3, 1))}, {"axis": ()}, [(F, (3,))]),
    ("SqueezeV3", {"x": Fact(F, (1, 3, 1)), "axes": ints(-1)}, {}, [(F, (1, 3))]),
    ("Unsqueeze", {"x": Fact(F, (3,))}, {"axes": (0, 2)}, [(F, (1, 3, 1))]),
    ("Shape", X, {"dtype": 9}, [(I, (3,))]),
    ("Size", X, {"dtype": 3}, [("DT_INT32", ())]),
    ("ConcatD", {"x0": Fact(F, (2, 3)), "x1": Fact(F, (-1, 4))}, {"concat_dim": 1, "N": 2}, [(F, (2, 7))]),
    ("SplitD", {"x": Fact(F, (4, 6))}, {"split_dim": 1, "num_split": 2}, [(F, (4, 3))] * 2),
    (
        "SplitV",
        {"x": Fact(F, (4, 6)), "size_splits": ints(1, -1), "split_dim": number(1)},
        {"num_split": 2},
        [(F, (4, 1)), (F, (4, 5))],
    ),
    (
        "StridedSliceV2",
        {"x": Fact(F, (8, 6)), "begin": ints(1), "end": ints(99), "axes": ints(0), "strides": ints(2)},
        {},
        [(F, (4, 6))],
    ),
    (
        "StridedSliceV2",
        {"x": Fact(F, (8, 6)), "begin": ints(-1), "end": ints(-9), "axes": ints(0), "strides": ints(-1)},
        {},
        [(F, (8, 6))],
    ),
    ("BroadcastTo", {"x": Fact(F, (3, 1)), "shape": ints(2, 3, 4)}, {}, [(F, (2, 3, 4))]),
    ("Tile", {"x": Fact(F, (3, -1)), "multiples": ints(2, 2)}, {}, [(F, (6, -1))]),
    ("PadV3", {"x": Fact(F, (3, 4)), "paddings": ints(1, 0, 0, 2)}, {"paddings_contiguous": False}, [(F, (4, 6))]),
    ("PadV3", {"x": Fact(F, (3, 4)), "paddings": ints(1, 0, 0, 2)}, {"paddings_contiguous": True}, [(F, (4, 6))]),
    ("Fill", {"dims": ints(2, 3), "value": Fact(H, ())}, {}, [(H, (2, 3))]),
    ("Range", {"start": number(1), "limit": number(8), "delta": number(3)}, {}, [(I, (3,))]),
    ("ReduceSum", {**X, "axes": ints(-1)}, {"keep_dims": True}, [(F, (2, -1, 1))]),
    ("ReduceMax", {**X, "axes": ints(0, 2)}, {"keep_dims": False}, [(F, (-1,))]),
    ("ReduceSum", {**X, "axes": ints()}, {"noop_with_empty_axes": True}, [(F, (2, -1, 6))]),
    ("ReduceSum", {**X, "axes": ints()}, {"noop_with_empty_axes": False}, [(F, ())]),
    ("SoftmaxV2", X, {"axes": (-1,)}, [(F, (2, -1, 6))]),
    (
        "LayerNorm",
        {**X, "gamma": Fact(F, (6,)), "beta": Fact(F, (6,))},
        {"begin_norm_axis": 2},
        [(F, (2, -1, 6)), ("", (2, -1, 1)), ("", (2, -1, 1))],
    ),
    ("RmsNorm", {**X, "gamma": Fact(F, (6,))}, {}, [(F, (2, -1, 6)), (F, (2, -1, 1))]),
    ("GemmaRmsNorm", {**X, "gamma": Fact(F, (6,))}, {}, [(F, (2, -1, 6)), (F, (2, -1, 1))]),
    (
        "AddRmsNorm",
        {"x1": X["x"], "x2": X["x"], "gamma": Fact(F, (6,))},
        {},
        [(F, (2, -1, 6)), (F, (2, -1, 1)), (F, (2, -1, 6))],
    ),
    ("LayerNormV4", {**X, "normalized_shape": ints(6)}, {}, [(F, (2, -1, 6)), (F, (2, -1, 1)), (F, (2, -1, 1))]),
    (
        "LayerNormV3",
        {"x": Fact(H, (2, -1, 6)), "gamma": Fact(F, (6,)), "beta": Fact(F, (6,))},
        {"begin_norm_axis": 1, "begin_params_axis": -1},
        [(H, (2, -1, 6)), (F, (2, 1, 1)), (F, (2, 1, 1))],
    ),
    (
        "AddLayerNorm",
        {"x1": Fact(H, (2, -1, 6)), "x2": X["x"], "gamma": Fact(F, (6,)), "beta": Fact(F, (6,))},
        {},
        [(F, (2, -1, 6)), (F, (2, -1, 1)), (F, (2, -1, 1)), (F, (2, -1, 6))],
    ),
    ("SwiGlu", X, {"dim": -1}, [(F, (2, -1, 3))]),
    (
        "RotaryPositionEmbedding",
        {"x": Fact(F, (2, -1, 4, 6)), "cos": Fact(F, (1, -1, 1, 6)), "sin": Fact(F, (1, -1, 1, 6))},
        {},
        [(F, (2, -1, 4, 6))],
    ),
    (
        "ApplyRotaryPosEmb",
        {
            **{name: Fact(F, (2, -1, heads, 6)) for name, heads in (("query", 4), ("key", 2))},
            **{name: Fact(F, (1, -1, 1, 6)) for name in ("cos", "sin")},
        },
        {},
        [(F, (2, -1, 4, 6)), (F, (2, -1, 2, 6))],
    ),
    (
        "RotaryMul",
        {"x": Fact(F, (2, -1, 4, 64)), **{name: Fact(F, (1, -1, 1, 64)) for name in ("r1", "r2")}},
        {},
        [(F, (2, -1, 4, 64))],
    ),
    (
        "InterleaveRope",
        {"x": Fact(H, (2, -1, 4, 64)), **{name: Fact(H, (2, 1, 1, 64)) for name in ("cos", "sin")}},
        {},
        [(H, (2, -1, 4, 64))],
    ),
    ("SwiGlu", X, {"dim": 1}, [(F, (2, -1, 6))]),
    ("ClippedSwiglu", X, {}, [(F, (2, -1, 3))]),
    ("GeGluV2", X, {}, [(F, (2, -1, 3)), (F, (2, -1, 3))]),
    ("ArgMaxV2", {**X, "dimension": number(1)}, {}, [(I, (2, 6))]),
    ("TopK", {**X, "k": number(4)}, {"dim": -1}, [(F, (2, -1, 4)), ("DT_INT32", (2, -1, 4))]),
    ("MatMulV2", {"x1": Fact(F, (3, 4)), "x2": Fact(F, (5, 4))}, {"transpose_x2": True}, [(F, (3, 5))]),
    ("BatchMatMulV2", {"x1": Fact(H, (2, 1, 3, 4)), "x2": Fact(H, (7, 4, 5))}, {}, [(H, (2, 7, 3, 5))]),
    (
        "Conv2D",
        {"x": Fact(F, (1, 3, 32, 32)), "filter": Fact(F, (8, 3, 4, 4))},
        {"strides": (1, 1, 4, 4), "pads": (0, 0, 0, 0), "dilations": (1, 1, 1, 1), "data_format": "NCHW"},
        [(F, (1, 8, 8, 8))],
    ),
    (
        "MaxPoolV3",
        {"x": Fact(F, (1, 3, 9, 9))},
        {"ksize": (1, 1, 3, 3), "strides": (1, 1, 2, 2), "pads": (1, 1, 1, 1), "data_format": "NCHW"},
        [(F, (1, 3, 5, 5))],
    ),
    ("Resize", {"x": Fact(F, (1, 3, 9, 9)), "sizes": ints(1, 3, 4, 5)}, {}, [(F, (1, 3, 4, 5))]),
    ("GatherV2", {"x": Fact(F, (9, 4)), "indices": Fact(I, (2, -1)), "axis": number(0)}, {}, [(F, (2, -1, 4))]),
    ("GatherElements", {"x": Fact(F, (9, 4)), "index": Fact(I, (2, 4))}, {"dim": 0}, [(F, (2, 4))]),
    ("GatherNd", {"x": Fact(F, (9, 4, 3)), "indices": Fact(I, (5, 2))}, {}, [(F, (5, 3))]),
    (
        "TensorScatterUpdate",
        {"x": Fact(F, (9, 4)), "indices": Fact(I, (5, 1)), "updates": Fact(F, (5, 4))},
        {},
        [(F, (9, 4))],
    ),
    (
        "OneHot",
        {"x": Fact(I, (5,)), "depth": number(7), "on_value": Fact(F, ()), "off_value": Fact(F, ())},
        {"axis": -1},
        [(F, (5, 7))],
    ),
    ("NonZero", X, {"transpose": True}, [(I, (3, -1))]),
    (
        "UnsortedSegmentSum",
        {"x": Fact(F, (5, 4)), "segment_ids": Fact(I, (5,)), "num_segments": number(3)},
        {},
        [(F, (3, 4))],
    ),
]


ROWS += [
    ("Add", {"x1": Fact("DT_COMPLEX32", (2, -1)), "x2": Fact("DT_COMPLEX32", ())}, {}, [("DT_COMPLEX32", (2, -1))]),
    ("RealDiv", {"x1": Fact(I, (2, 1)), "x2": Fact(I, (3,))}, {}, [(I, (2, 3))]),
    ("EuclideanNorm", {**X, "axes": ints()}, {"keep_dims": False}, [(F, (2, -1, 6))]),
    ("ReduceLogSum", {**X, "axes": ints()}, {"keep_dims": False}, [(F, ())]),
    ("SoftmaxV2", X, {"axes": (1, 2)}, [(F, (2, -1, 6))]),
    ("Transpose", {**X, "perm": ints(-1, 0, 1)}, {}, [(F, (6, 2, -1))]),
    ("Tile", {"x": Fact(F, (3, 4)), "multiples": Fact(I, (2,), vector([None, 2]))}, {}, [(F, (-1, 8))]),
    (
        "TensorScatterMax",
        {"input": Fact(H, (9,)), "indices": Fact(I, (5, 1)), "updates": Fact(H, (5,))},
        {},
        [(H, (9,))],
    ),
    (
        "Conv2D",
        {"x": Fact(F, (1, 32, 32, 3)), "filter": Fact(F, (8, 4, 4, 3))},
        {"strides": (1, 4, 4, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1, 1, 1), "data_format": "NHWC"},
        [(F, None)],
    ),
    ("HcomAllGather", {"x": Fact(F, (2, 3))}, {"rank_size": 4, "group": "g"}, [(F, (8, 3))]),
]
"""Types that only GE has, what ONNX has no meaning for, and numbers that are known in part."""


@pytest.mark.parametrize(("op_type", "inputs", "attrs", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_row(op_type: str, inputs: dict[str, Fact], attrs: dict[str, Any], expected: list[tuple[str, Any]]) -> None:
    assert result(op_type, inputs, attrs) == expected


MISFITS: list[tuple[str, dict[str, Fact], dict[str, Any], str]] = [
    ("Add", {"x1": Fact(F, (2, 3)), "x2": Fact(F, (4,))}, {}, "do not broadcast"),
    ("Add", {"x1": Fact(F, (3,)), "x2": Fact(H, (3,))}, {}, "x1 is DT_FLOAT and x2 DT_FLOAT16"),
    ("Less", {"x1": Fact(F, (3,)), "x2": Fact(I, (3,))}, {}, "x1 is DT_FLOAT and x2 DT_INT64"),
    ("Cast", X, {"dst_type": 99}, "dst_type 99 is not a type of GE"),
    ("SelectV2", {"condition": Fact(F, ()), "then": Fact(F, ()), "else": Fact(F, ())}, {}, "its condition is DT_FLOAT"),
    ("SelectV2", {"condition": Fact(B, ()), "then": Fact(F, ()), "else": Fact(H, ())}, {}, "then is DT_FLOAT and else"),
    ("Reshape", {"x": Fact(F, (4, 6)), "shape": ints(5, -1)}, {}, "24 elements do not fill the shape"),
    ("Reshape", {"x": Fact(F, (4, 6)), "shape": ints(5, 5)}, {}, "24 elements do not fill the shape"),
    ("Reshape", {"x": Fact(F, (4, 6)), "shape": ints(-1, -1)}, {}, "has -1 twice"),
    ("Transpose", {**X, "perm": ints(0, 0, 1)}, {}, "is not a permutation of 3 axes"),
    ("Transpose", {**X, "perm": ints(0, 5, 1)}, {}, "is not a permutation of 3 axes"),
    ("Squeeze", {"x": Fact(F, (2, 3))}, {"axis": (0,)}, "axis 0 of size 2 cannot be dropped"),
    ("Squeeze", {"x": Fact(F, (2, 3))}, {"axis": (5,)}, "axis 5 is outside a tensor of rank 2"),
    ("ConcatD", {"x0": Fact(F, (2, 3)), "x1": Fact(F, (4, 4))}, {"concat_dim": 1, "N": 2}, "sizes 2 and 4"),
    ("ConcatD", {"x0": Fact(F, (2, 3))}, {"concat_dim": 1, "N": 2}, "N is 2, and there are 1 inputs"),
    ("ConcatD", {"x0": Fact(F, (2,)), "x1": Fact(H, (2,))}, {"concat_dim": 0, "N": 2}, "different types"),
    ("SplitD", {"x": Fact(F, (4, 5))}, {"split_dim": 1, "num_split": 2}, "an axis of 5 has no 2 equal parts"),
    (
        "SplitV",
        {"x": Fact(F, (4, 6)), "size_splits": ints(1, 4), "split_dim": number(1)},
        {"num_split": 2},
        "are not 2 parts of 6",
    ),
    ("BroadcastTo", {"x": Fact(F, (3, 2)), "shape": ints(3, 4)}, {}, "do not broadcast"),
    ("BroadcastTo", {"x": Fact(F, (3, 2)), "shape": ints(2)}, {}, "cannot become"),
    ("BroadcastTo", {"x": Fact(F, (3, 2)), "shape": ints(3, 1)}, {}, "cannot become"),
    ("Tile", {"x": Fact(F, (3, 2)), "multiples": ints(2)}, {}, "1 multiples do not match 2 axes"),
    ("PadV3", {"x": Fact(F, (3, 4)), "paddings": ints(1, 0)}, {}, "2 paddings do not match 2 axes"),
    ("ReduceSum", {**X, "axes": ints(3)}, {"keep_dims": True}, "axis 3 is outside a tensor of rank 3"),
    ("LayerNorm", {**X, "gamma": Fact(F, (5,)), "beta": Fact(F, (6,))}, {"begin_norm_axis": 2}, "gamma has the shape"),
    ("RmsNorm", {**X, "gamma": Fact(F, (5,))}, {}, "gamma has the shape"),
    ("GemmaRmsNorm", {**X, "gamma": Fact(F, (5,))}, {}, "gamma has the shape"),
    ("AddRmsNorm", {"x1": X["x"], "x2": X["x"], "gamma": Fact(F, (5,))}, {}, "gamma has the shape"),
    (
        "AddRmsNorm",
        {"x1": X["x"], "x2": Fact(F, (2, 1, 7)), "gamma": Fact(F, (6,))},
        {},
        r"x2 has the shape \[2, 1, 7\], x1 \[2, -1, 6\]",
    ),
    ("LayerNormV4", {**X, "normalized_shape": ints(6), "beta": Fact(F, (5,))}, {}, "beta has the shape"),
    ("LayerNormV3", {**X, "gamma": Fact(F, (5,)), "beta": Fact(F, (5,))}, {}, "gamma has the shape"),
    (
        "LayerNormV3",
        {**X, "gamma": Fact(F, (6,)), "beta": Fact(F, (6,))},
        {"begin_norm_axis": 3, "begin_params_axis": 2},
        "begin_norm_axis 3 is outside a tensor of rank 3",
    ),
    ("SwiGlu", {"x": Fact(F, (2, 5))}, {"dim": 1}, "has no halves along the axis 1"),
    ("SwiGlu", X, {"dim": 3}, "dim is 3, x has 3 axes"),
    ("GeGluV2", {"x": Fact(F, (2, 5))}, {}, "has no halves along the axis -1"),
    (
        "RotaryPositionEmbedding",
        {"x": Fact(F, (2, 5, 4, 6)), "cos": Fact(F, (1, 4, 1, 6)), "sin": Fact(F, (1, 4, 1, 6))},
        {},
        r"cos has the shape \[1, 4, 1, 6\], x",
    ),
    (
        "RotaryPositionEmbedding",
        {"x": Fact(F, (2, 5, 4, 6)), "cos": Fact(F, (1, 5, 1, 6)), "sin": Fact(F, (1, 5, 1, 3))},
        {},
        r"sin \[1, 5, 1, 3\]",
    ),
    *(
        (
            "ApplyRotaryPosEmb",
            {
                "query": Fact(F, (2, 5, 4, 6)),
                "key": Fact(F, (2, tokens, 2, 6)),
                "cos": Fact(F, (2, 5, 1, 6)),
                "sin": Fact(F, (2, 5, 1, width)),
            },
            {},
            message,
        )
        for tokens, width, message in ((4, 6, r"key \[2, 4, 2, 6\]"), (5, 3, r"sin \[2, 5, 1, 3\]"))
    ),
    (
        "RotaryMul",
        {"x": Fact(F, (2, 5, 4, 64)), **{name: Fact(F, (1, 4, 1, 64)) for name in ("r1", "r2")}},
        {},
        r"r1 has the shape \[1, 4, 1, 64\], x",
    ),
    (
        "InterleaveRope",
        {"x": Fact(H, (2, 5, 4, 64)), **{name: Fact(H, (2, 1, 3, 64)) for name in ("cos", "sin")}},
        {},
        r"cos has the shape \[2, 1, 3, 64\], x",
    ),
    ("InterleaveRope", {name: Fact(H, ()) for name in ("x", "cos", "sin")}, {}, r"cos has the shape \[\], x \[\]"),
    ("ApplyRotaryPosEmb", {name: Fact(H, ()) for name in ("query", "key", "cos", "sin")}, {}, r"\[\], query \[\]"),
    ("TopK", {**X, "k": number(9)}, {"dim": -1}, "an axis of 6 has no 9 largest elements"),
    ("MatMulV2", {"x1": Fact(F, (3, 4)), "x2": Fact(F, (5, 4))}, {}, "share no axis: 4 and 5"),
    ("MatMulV2", {"x1": Fact(F, (2, 3, 4)), "x2": Fact(F, (4, 4))}, {}, "takes no tensors of ranks 3 and 2"),
    ("BatchMatMulV2", {"x1": Fact(F, (3, 4)), "x2": Fact(H, (4, 5))}, {}, "x1 is DT_FLOAT and x2 DT_FLOAT16"),
    (
        "Conv2D",
        {"x": Fact(F, (1, 3, 2, 2)), "filter": Fact(F, (8, 3, 4, 4))},
        {"strides": (1, 1, 4, 4), "pads": (0, 0, 0, 0), "dilations": (1, 1, 1, 1), "data_format": "NCHW"},
        "a window of 4 does not fit an axis of 2",
    ),
    ("GatherV2", {"x": ints(1, 2), "indices": ints(5), "axis": number(0)}, {}, "is outside an axis of 2"),
    ("GatherNd", {"x": Fact(F, (9,)), "indices": Fact(I, (5, 2))}, {}, "2 indices do not match 1 axes"),
    (
        "FlashAttentionScore",
        {"query": Fact(F, (1, 2, 3)), "key": Fact(F, (1, 2, 3, 4)), "value": Fact(F, (1, 2, 3, 4))},
        {"head_num": 2, "input_layout": "BNSD"},
        "query",
    ),
]


@pytest.mark.parametrize(("op_type", "inputs", "attrs", "message"), MISFITS, ids=[row[0] for row in MISFITS])
def test_misfit(op_type: str, inputs: dict[str, Fact], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceError, match=message):
        result(op_type, inputs, attrs)


def test_whole_graphs() -> None:
    for model in (attention(), branches()):
        found = infer_model(model)
        assert (found.errors, found.differences, found.without_rule) == ([], [], {})


def chain(*ops: Op) -> Model:
    return Model("m", [Graph("g", [data("a", 0, F, (4, 6)), *ops])])


def one(name: str, op_type: str, source: str, shape: tuple[int, ...] | None, dtype: str = F) -> Op:
    return Op(name, op_type, [Output(source)], [TensorDesc("x", F, (4, 6))], [TensorDesc("y", dtype, shape)])


def test_findings_of_a_file() -> None:
    model = chain(one("r", "Relu", "a", (4, 5)), net_output(Output("r"), dtype=F, shape=(4, 6)))
    found = check_message(encode(model))
    assert [(entry.rule, entry.message) for entry in found] == [
        (DECLARED.name, "output y is declared [4, 5], but is [4, 6]")
    ]
    model = chain(one("r", "Relu", "a", (4, 6), H), net_output(Output("r"), dtype=F, shape=(4, 6)))
    assert "output y is declared DT_FLOAT16, but is DT_FLOAT" in str(check_message(encode(model))[0])
    strange = one("r", "Relu6", "a", (4, 6))
    strange.type = "Spence"
    found = check_message(encode(chain(strange, net_output(Output("r"), dtype=F, shape=(4, 6)))))
    assert [entry.rule for entry in found] == [NO_RULE.name]
    wrong = Op("m", "MatMulV2", [Output("a"), Output("a")])
    wrong.input_descs = [TensorDesc("x1", F, (4, 6)), TensorDesc("x2", F, (4, 6))]
    wrong.output_descs = [TensorDesc("y", F, (4, 6))]
    found = check_message(encode(chain(wrong, net_output(Output("m"), dtype=F, shape=(4, 6)))))
    assert [(entry.rule, entry.node) for entry in found] == [(INFERENCE.name, "m")]


def test_branches_that_differ() -> None:
    model = branches()
    model.graphs[1].ops[1].output_descs[0] = TensorDesc("y", "DT_FLOAT", (9, 9))
    found = infer_model(model).differences
    assert ("change", "output y is declared [9, 9], but is [2, 3]") in found


SHAPES = st.none() | st.lists(st.integers(-1, 4), max_size=4).map(tuple)
ELEMENTS = st.none() | st.integers(-5, 9) | st.sampled_from([-(1 << 63), (1 << 63) - 1])
ATTRS: dict[str, st.SearchStrategy[Any]] = {
    "Int": st.integers(-4, 30) | st.just(1 << 62),
    "Float": st.floats(-2, 2),
    "Bool": st.booleans(),
    "String": st.sampled_from(["", "NCHW", "constant", "BNSD", "TND", "CALCULATED"]),
    "Type": st.sampled_from([F, I]),
    "ListInt": st.lists(st.integers(-3, 5), max_size=6).map(tuple),
}


@st.composite
def facts(draw: st.DrawFn) -> Fact:
    if draw(st.booleans()):
        return Fact(draw(st.sampled_from([F, H, I, B, ""])), draw(SHAPES))
    elements = vector(draw(st.lists(ELEMENTS, max_size=6)))
    return Fact(I, (len(elements),), elements) if len(elements) != 1 else Fact(I, (), elements.reshape(()))


KNOWN = [name for name in ge_operators() if can_infer(name)]


@settings(max_examples=examples(30))
@given(st.data())
@pytest.mark.parametrize("part", range(6))
def test_no_rule_fails_otherwise_than_by_a_misfit(part: int, source: st.DataObject) -> None:
    spec = ge_prototype(source.draw(st.sampled_from(KNOWN[part::6])))
    assert spec is not None
    inputs: dict[str, Fact] = {}
    for entry in spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            inputs |= {f"{entry.name}{n}": fact for n, fact in enumerate(source.draw(st.lists(facts(), max_size=3)))}
        elif entry.kind is Kind.REQUIRED or source.draw(st.booleans()):
            inputs[entry.name] = source.draw(facts())
    attrs = {e.name: Attr(e.type, source.draw(ATTRS[e.type])) for e in spec.attrs if source.draw(st.integers(0, 4))}
    try:
        found = infer(Op("op", spec.name, attrs=attrs), inputs)
    except InferenceError as error:
        assert str(error)
        return
    assert all(isinstance(fact, Fact) for fact in found)
    assert all(fact.value is None or fact.value.shape == fact.shape for fact in found)


def test_a_constant_of_an_open_size_is_not_read() -> None:
    fact = constant(Weight("DT_INT64", (-1,), 16, lambda: bytes(16)))
    assert (fact.shape, fact.value) == ((-1,), None)


def test_subgraphs_that_hold_each_other_come_to_an_end() -> None:
    """Without this limit 2 ** 40 walks, or a stack that is too deep."""
    model = branches()
    template = model.graphs[1]
    model.root.ops[2].subgraphs = {"then_branch": "g0", "else_branch": "g0"}
    model.graphs = [model.root]
    for depth in range(400):
        inner = f"g{depth + 1}" if depth < 399 else "g3"
        ops = [Op(f"if{n}", "If", subgraphs={"then_branch": inner, "else_branch": inner}) for n in range(2)]
        model.graphs.append(Graph(f"g{depth}", [*template.ops, *ops]))
    assert infer_model(model).without_rule == {}


SIZES = st.integers(1, 4)


@settings(max_examples=examples(20))
@given(st.data())
def test_shapes_that_are_computed_are_followed(source: st.DataObject) -> None:
    """Shape, Gather, Concat, arithmetic and Reshape as exporters write them: the result is known, although
    no descriptor but the input's tells any shape."""
    batch, length, heads, size = (source.draw(SIZES) for _ in range(4))
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
        helper.make_node("Gather", ["s", "one"], ["l"], axis=0),
        helper.make_node("Mul", ["b", "l"], ["bl"]),
        helper.make_node("Unsqueeze", ["bl", "axes"], ["rows"]),
        helper.make_node("Concat", ["rows", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    shape = [batch, length, heads * size]
    initial = [
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
        helper.make_tensor("one", TensorProto.INT64, [], [1]),
        helper.make_tensor("axes", TensorProto.INT64, [1], [0]),
        helper.make_tensor("rest", TensorProto.INT64, [2], [heads, size]),
    ]
    graph = helper.make_graph(
        nodes,
        "computed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initial,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = to_ge(ir.from_proto(proto))
    for op in model.root.ops:
        if op.type != "Data":
            op.output_descs = [TensorDesc(desc.name, desc.dtype, None) for desc in op.output_descs]
            op.input_descs = [TensorDesc(desc.name, desc.dtype, None) for desc in op.input_descs]
    end = next(op for op in model.root.ops if op.type == "NetOutput")
    end.input_descs[0] = TensorDesc("x0", F, (batch * length, heads, size + 1))
    assert [sentence for _, sentence in infer_model(model).differences] == [
        f"input x0 is declared [{batch * length}, {heads}, {size + 1}], but is [{batch * length}, {heads}, {size}]"
    ]
