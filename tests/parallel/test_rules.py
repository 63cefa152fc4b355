"""Each rule by itself: what ranks compute from their parts is the part of what one process computes.

The models have no attention. Their sequence is named: dimension 1 of x, 13 tokens, which 3 ranks do not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.errors import InputError
from fa_compiler.parallel.communicator import Array
from fa_compiler.parallel.sharding import Sharded

from .running import TOLERANCE, by_ranks, check

BATCH, LENGTH, WIDTH, RANKS = 2, 13, 24, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
W = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
IDS = RNG.integers(0, 7, (BATCH, LENGTH))
TABLE = RNG.standard_normal((7, WIDTH)).astype(np.float32)
ANGLES = RNG.standard_normal((LENGTH, 4)).astype(np.float32)


def node(op: str, inputs: str, output: str = "y", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), name=f"{op}_{output.split()[0]}", **attrs)


def ints(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


def model(nodes: Sequence[onnx.NodeProto], weights: dict[str, Array], rank: int) -> onnx.ModelProto:
    """x is [batch, seq, 24] and ids [batch, seq]; an input that no node reads is left out. y has this rank."""
    read = {name for each in nodes for name in each.input}
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", WIDTH]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "seq"]),
    ]
    kinds = {"ArgMax": TensorProto.INT64}
    kind = TensorProto.FLOAT16 if SHORT[-1] in nodes else kinds.get(nodes[-1].op_type, TensorProto.FLOAT)
    y = helper.make_tensor_value_info("y", kind, [None] * rank)
    graph = helper.make_graph(
        list(nodes),
        "rules",
        [each for each in inputs if each.name in read],
        [y],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=8
    )


def both(made: onnx.ModelProto, folder: Path) -> tuple[dict[str, Array], dict[str, Array], Sharded]:
    """The outputs of one process and of the ranks."""
    every = {"x": X, "ids": IDS}
    feeds = {each.name: every[each.name] for each in made.graph.input if each.name in every}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(made.SerializeToString(), options)
    expected = dict(zip(["y"], session.run(["y"], feeds), strict=True))
    result = fa_compiler.shard(made, folder / "out", RANKS, axes=dict.fromkeys(feeds, 1))
    return expected, by_ranks(result.path, RANKS, feeds), result


def branch(op: str) -> onnx.GraphProto:
    """A branch that reads a value of the graph around it, of all tokens."""
    y = helper.make_tensor_value_info(f"{op}_y", TensorProto.INT64, None)
    inner = [
        helper.make_node(op, ["ids"], [f"{op}_x"], op),
        helper.make_node("Abs", [f"{op}_x"], [f"{op}_y"], f"{op}2"),
    ]
    return helper.make_graph(inner, op, [], [y])


def drawing(name: str) -> onnx.GraphProto:
    """A branch that draws a number for each feature."""
    y = helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH])
    return helper.make_graph([node("RandomNormal", "", name, shape=[WIDTH])], name, [], [y])


SHAPE = [node("Shape", "x", "shape"), node("Gather", "shape one", "seq"), node("Gather", "shape zero", "bat")]
SIZES = {"one": ints(1), "zero": ints(0)}


def written(*counting: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Features of x are negated for each token, at the places that `counting` makes as s."""
    return [
        *SHAPE,
        node("Squeeze", "bat zero", "texts"),
        node("Squeeze", "seq zero", "count"),
        node("Range", "start texts step", "b"),
        *counting,
        node("Reshape", "b batch_line", "b3"),
        node("Reshape", "s token_line", "s2"),
        node("Slice", "x zero four two", "part"),
        node("Shape", "part", "grid"),
        *(node("Expand", f"{line} grid", f"{line}_e") for line in ("b3", "s2", "places")),
        *(node("Unsqueeze", f"{line}_e end", f"{line}_u") for line in ("b3", "s2", "places")),
        node("Concat", "b3_u s2_u places_u", "indices", axis=-1),
        node("Neg", "part", "updates"),
        node("ScatterND", "x indices updates"),
    ]


PLACES: dict[str, Array] = {
    **SIZES,
    "start": np.array(0),
    "step": np.array(1),
    "two": ints(2),
    "four": ints(4),
    "end": ints(-1),
    "batch_line": ints(-1, 1, 1),
    "token_line": ints(-1, 1),
    "places": ints(20, 3, 9, 11),
}
SHORT = [
    node("Clip", "x low high", "c"),
    node("Mul", "c large", "l"),
    node("Cast", "l", "h", to=TensorProto.FLOAT16),
]
LIMITS = {"low": np.array(-1, np.float32), "high": np.array(1, np.float32), "large": np.array(6e4, np.float32)}
INTEGERS = [node("Mul", "x many", "l"), node("Cast", "l", "d", to=TensorProto.INT32)]
MANY = {"many": np.array(1e5, np.float32)}
ADDED = [node("Add", "x p")]

PARTS: dict[str, tuple[list[onnx.NodeProto], dict[str, Array], int]] = {
    "projection": ([node("MatMul", "x w")], {"w": W}, 3),
    "norm": ([node("LayerNormalization", "x g b", axis=-1)], {"g": W[0], "b": W[1]}, 3),
    "embedding": ([node("Gather", "t ids")], {"t": TABLE}, 3),
    "mean of features": ([node("ReduceMean", "x", axes=[-1], keepdims=0)], {}, 2),
    "softmax of features": ([node("Softmax", "x", axis=-1)], {}, 3),
    "features in reversed order": (
        [
            node("Transpose", "x", "t", perm=[2, 0, 1]),
            node("ReverseSequence", "t lengths", "r", time_axis=0, batch_axis=1),
            node("Transpose", "r", perm=[1, 2, 0]),
        ],
        {"lengths": ints(*range(1, 1 + len(X)))},
        3,
    ),
    "largest feature": ([node("ArgMax", "x", axis=2, keepdims=0)], {}, 2),
    "heads": (
        [
            *SHAPE,
            node("Concat", "bat seq heads size", "target", axis=0),
            node("Reshape", "x target", "r"),
            node("Transpose", "r", "t", perm=[0, 2, 1, 3]),
            node("MatMul", "t w"),
        ],
        {**SIZES, "heads": ints(4), "size": ints(6), "w": W[:6, :6]},
        4,
    ),
    "rows of batch and sequence": (
        [
            node("Reshape", "x flat", "f"),
            node("Gemm", "f w b", "g", transB=1),
            *SHAPE,
            node("Concat", "bat seq width", "target", axis=0),
            node("Reshape", "g target"),
        ],
        {**SIZES, "flat": ints(-1, WIDTH), "w": W, "b": W[0], "width": ints(WIDTH)},
        3,
    ),
    "rotary angles": (
        [
            *SHAPE,
            node("Squeeze", "seq zero", "count"),
            node("Range", "start count step", "r"),
            node("Unsqueeze", "r one", "u"),
            node("Cast", "u", "c", to=TensorProto.FLOAT),
            node("Mul", "c f", "angles"),
            node("Cos", "angles", "cos"),
            node("Mul", "x cos"),
        ],
        {**SIZES, "start": np.array(0), "step": np.array(1), "f": W[0]},
        3,
    ),
    "learned positions of any length": (
        [*SHAPE, node("Slice", "p zero seq zero", "s"), node("Add", "x s")],
        {**SIZES, "p": RNG.standard_normal((99, WIDTH)).astype(np.float32)},
        3,
    ),
    "positions counted along the sequence": (
        [
            node("Greater", "ids three", "g"),
            node("Cast", "g", "c", to=TensorProto.INT64),
            node("CumSum", "c axis", "n"),
            node("Gather", "t n"),
        ],
        {"three": np.array(3), "axis": np.array(1), "t": RNG.standard_normal((99, WIDTH)).astype(np.float32)},
        3,
    ),
    "half of the features": (
        [
            node("Split", "x", "a b", axis=2),
            node("Slice", "b begin end axes", "c"),
            node("Concat", "a c", axis=2),
        ],
        {"begin": ints(1), "end": ints(5), "axes": ints(2)},
        3,
    ),
    "a product of two letters": ([node("Einsum", "x w", equation="bse,ef->sbf")], {"w": W}, 3),
    "a convolution of one token": (
        [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Conv", "t k", "c"), node("Transpose", "c", perm=[0, 2, 1])],
        {"k": W[:, :, None]},
        3,
    ),
    "a pair of tokens": (
        [
            node("Unsqueeze", "ids two", "a"),
            node("Unsqueeze", "ids one", "b"),
            node("Equal", "a b", "e"),
            node("Cast", "e", to=1),
        ],
        {"one": ints(1), "two": ints(2)},
        3,
    ),
    "an expanded vector": (
        [
            *SHAPE,
            node("Concat", "bat seq width", "target", axis=0),
            node("Expand", "w target", "e"),
            node("Add", "x e"),
        ],
        {**SIZES, "w": W[0], "width": ints(WIDTH)},
        3,
    ),
    "a filled tensor": (
        [
            *SHAPE,
            node("Concat", "bat seq", "target", axis=0),
            node("ConstantOfShape", "target", "z", value=numpy_helper.from_array(np.array([2], np.int64))),
            node("Gather", "t z", "e"),
            node("Add", "x e"),
        ],
        {**SIZES, "t": TABLE},
        3,
    ),
    "types for each token": (
        [
            *SHAPE,
            node("Slice", "zeros zero seq one", "s"),
            node("Concat", "bat seq", "target", axis=0),
            node("Expand", "s target", "e"),
            node("GatherElements", "e ids", "g", axis=1),
            node("Gather", "t g"),
        ],
        {**SIZES, "zeros": RNG.integers(0, 7, (1, 99)), "t": TABLE},
        3,
    ),
    "a mask that a GatherND looks up": (
        [
            *SHAPE,
            node("Squeeze", "seq zero", "count"),
            node("Range", "start count step", "r"),
            node("Unsqueeze", "r one", "u"),
            node("Transpose", "ids", "rows", perm=[1, 0]),
            node("GatherND", "rows u", "g"),
            node("Transpose", "g", "back", perm=[1, 0]),
            node("Gather", "t back"),
        ],
        {**SIZES, "start": np.array(0), "step": np.array(1), "t": TABLE},
        3,
    ),
    "features that a ScatterND writes for each token": (written(node("Range", "start count step", "s")), PLACES, 3),
    "features that a ScatterND writes for tokens that a CumSum counts": (
        written(node("Expand", "step seq", "ones"), node("CumSum", "ones start", "c"), node("Sub", "c step", "s")),
        PLACES,
        3,
    ),
    "a table that an If chooses": (
        [
            node("Shape", "ids", "sizes"),
            node("Gather", "sizes one_", "count"),
            node("Greater", "count long", "many"),
            helper.make_node(
                "If", ["many"], ["chosen"], "If_chosen", then_branch=branch("Neg"), else_branch=branch("Abs")
            ),
            node("Gather", "t chosen"),
        ],
        {"one_": np.array(1), "long": np.array(12), "t": TABLE},
        3,
    ),
    "quantised": (
        [node("QuantizeLinear", "x scale zp", "q"), node("DequantizeLinear", "q scale zp")],
        {"scale": np.array(0.1, np.float32), "zp": np.array(0, np.int8)},
        3,
    ),
    "tiled features": ([node("Tile", "x times")], {"times": ints(1, 1, 2)}, 3),
    "padded features": ([node("Pad", "x pads")], {"pads": ints(0, 0, 1, 0, 0, 2)}, 3),
    "a norm whose weight has another type": (
        [node("SimplifiedLayerNormalization", "x g", "n", axis=-1), node("Cast", "n", to=1)],
        {"g": W[0].astype(np.float16)},
        3,
    ),
    "a product of letters, of which one has 1 in place of the tokens": (
        [node("Einsum", "x v", equation="bse,bs->bse")],
        {"v": W[:BATCH, :1]},
        3,
    ),
    "the best features": ([node("TopK", "x k", "y i", axis=-1)], {"k": ints(3)}, 3),
    "features pooled as pixels": ([node("GlobalAveragePool", "x")], {}, 3),
    "a norm of a sum with positions": (
        [
            helper.make_node(
                "SkipLayerNormalization", ["x", "p", "g"], ["y"], "SkipLayerNormalization_y", domain="com.microsoft"
            )
        ],
        {"p": RNG.standard_normal((1, LENGTH, WIDTH)).astype(np.float32), "g": W[0]},
        3,
    ),
    "rotated heads": (
        [node("RotaryEmbedding", "x ids cos sin", domain="com.microsoft")],
        {"cos": np.cos(ANGLES), "sin": np.sin(ANGLES)},
        3,
    ),
    "rotated heads before the tokens": (
        [node("Reshape", "x heads", "r"), node("Transpose", "r", "t", perm=[0, 2, 1, 3])]
        + [node("RotaryEmbedding", "t ids cos sin", "h", domain="com.microsoft", interleaved=1)]
        + [node("Transpose", "h", perm=[0, 2, 1, 3])],
        {"heads": ints(0, 0, 3, 8), "cos": np.cos(ANGLES), "sin": np.sin(ANGLES)},
        4,
    ),
    "one hot": (
        [node("OneHot", "ids depth values", "h", axis=-1), node("MatMul", "h t")],
        {"depth": np.array(7), "values": np.array([0, 1], np.float32), "t": TABLE},
        3,
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str, tmp_path: Path) -> None:
    nodes, weights, rank = PARTS[name]
    expected, found, result = both(model(nodes, weights, rank), tmp_path)
    assert result.report.outputs["y"] is not None
    check(expected, found)


WHOLE: dict[str, tuple[list[onnx.NodeProto], dict[str, Array], int]] = {
    "the first token": (
        [node("MatMul", "x w", "h"), node("Gather", "h first", axis=1)],
        {"w": W, "first": np.array(0)},
        2,
    ),
    "tokens from the end": (
        [node("MatMul", "x w", "h"), node("Gather", "h some", axis=1)],
        {"w": W, "some": np.array([[-1, -13], [4, 4]])},
        4,
    ),
    "the last tokens": (
        [node("MatMul", "x w", "h"), node("Slice", "h begin end axes steps")],
        {"w": W, "begin": ints(-5), "end": ints(99), "axes": ints(1), "steps": ints(2)},
        3,
    ),
    "the mean over tokens": ([node("MatMul", "x w", "h"), node("ReduceMean", "h", axes=[1])], {"w": W}, 3),
    "the sum over tokens": (
        [node("MatMul", "x w", "h"), node("ReduceSum", "h axes", "s", keepdims=0), node("MatMul", "s w")],
        {"w": W, "axes": ints(1)},
        2,
    ),
    "a product that sums over the tokens": (
        [node("MatMul", "x w", "h"), node("Transpose", "x", "t", perm=[0, 2, 1]), node("MatMul", "t h")],
        {"w": W},
        3,
    ),
    "a product that sums over tokens and batch": (
        [node("MatMul", "x w", "h"), node("Reshape", "h flat", "d"), node("Reshape", "x flat", "r")]
        + [node("Gemm", "d r", transA=1)],
        {"w": W, "flat": ints(-1, WIDTH)},
        2,
    ),
    "a product that sums over tokens before the batch": (
        [node("MatMul", "x w", "h"), node("Transpose", "h", "t", perm=[1, 0, 2]), node("Reshape", "t flat", "d")]
        + [node("Transpose", "d", "turned", perm=[1, 0]), node("MatMul", "turned d")],
        {"w": W, "flat": ints(-1, WIDTH)},
        2,
    ),
    "an Einsum that sums over the tokens": (
        [node("MatMul", "x w", "h"), node("Einsum", "x h", equation="bsi,bso->bio")],
        {"w": W},
        3,
    ),
    "an Einsum that sums over the tokens, which are its last axis": (
        [node("MatMul", "x w", "h"), node("Transpose", "h", "t", perm=[0, 2, 1])]
        + [node("Einsum", "t x", equation="...os,...si->...oi")],
        {"w": W},
        3,
    ),
    "the sum over tokens and batch": (
        [node("MatMul", "x w", "h"), node("Reshape", "h flat", "d"), node("ReduceSum", "d axes", keepdims=0)],
        {"w": W, "flat": ints(-1, WIDTH), "axes": ints(0)},
        1,
    ),
    "the mean over tokens and batch": (
        [node("MatMul", "x w", "h"), node("ReduceMean", "h", keepdims=0)],
        {"w": W},
        0,
    ),
    "the largest token": ([node("MatMul", "x w", "h"), node("ReduceMax", "h", axes=[1], keepdims=0)], {"w": W}, 2),
    "the smallest of tokens and features": (
        [node("MatMul", "x w", "h"), node("ReduceMin", "h", axes=[1, 2], keepdims=0)],
        {"w": W},
        1,
    ),
    "the largest of some numbers and some NaN": ([node("Log", "x", "h"), node("ReduceMax", "h", axes=[1])], {}, 3),
    "the smallest of some numbers and some NaN": (
        [node("Log", "x", "h"), node("Reshape", "h flat", "d"), node("ReduceMin", "d", axes=[0], keepdims=0)],
        {"flat": ints(-1, WIDTH)},
        1,
    ),
    "the largest of tokens before the batch with NaN": (
        [node("Log", "x", "h"), node("Transpose", "h", "t", perm=[1, 0, 2]), node("Reshape", "t flat", "d")]
        + [node("ReduceMax", "d", axes=[0, 1], keepdims=0)],
        {"flat": ints(-1, WIDTH)},
        0,
    ),
    "the largest integer": ([*INTEGERS, node("ReduceMax", "d", "m", axes=[1]), node("Cast", "m", to=1)], MANY, 3),
    "the mean of integers": ([*INTEGERS, node("ReduceMean", "d", "m", axes=[1]), node("Cast", "m", to=1)], MANY, 3),
    "the mean of all integers": (
        [*INTEGERS, node("ReduceMean", "d", "m", keepdims=0), node("Cast", "m", to=1)],
        MANY,
        0,
    ),
    "the sum of 16 bits, which may be infinite for the tokens of a rank": (
        [*SHORT, node("ReduceSum", "h axes", keepdims=0)],
        {**LIMITS, "axes": ints(1)},
        2,
    ),
    "the mean of 16 bits": ([*SHORT, node("ReduceMean", "h", axes=[1])], LIMITS, 3),
    "a product of 16 bits that sums over the tokens": (
        [*SHORT, node("Transpose", "h", "t", perm=[0, 2, 1]), node("MatMul", "t h")],
        {**LIMITS, "large": np.array(200, np.float32)},
        3,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_tokens_that_are_taken_out_or_reduced(name: str, tmp_path: Path) -> None:
    nodes, weights, rank = WHOLE[name]
    expected, found, result = both(model(nodes, weights, rank), tmp_path)
    assert result.report.outputs["y"] is None
    check(expected, found, 2**-10 if "16 bits" in name else TOLERANCE)  # a sum may be rounded to either side


@pytest.mark.parametrize("nodes", [[*INTEGERS, node("ReduceMean", "d", "m", axes=[1]), node("Cast", "m", to=1)], ADDED])
def test_opset_11(nodes: list[onnx.NodeProto], tmp_path: Path) -> None:
    """Min and Max take no integers there."""
    made = model(nodes, {**MANY, "p": W[None, :1]}, 3)
    made.graph.input.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, [1, "open", WIDTH]))
    made.opset_import[0].version = 11
    expected, found, _ = both(made, tmp_path)
    check(expected, found)


@pytest.mark.parametrize("positions", [True, False])
def test_heads_that_are_rotated_by_onnx(positions: bool, tmp_path: Path) -> None:
    """Tables by position, and tables with a row for each token."""
    rotated = node("RotaryEmbedding", "h cos sin ids", num_heads=3)
    nodes = [node("MatMul", "x w", "h"), rotated]
    if not positions:
        rotated.input[:] = ["h", "c", "s"]
        nodes[1:] = [node("Gather", "cos ids", "c"), node("Gather", "sin ids", "s"), rotated]
    made = model(nodes, {"w": W, "cos": np.cos(ANGLES), "sin": np.sin(ANGLES)}, 3)
    made.opset_import[0].version = 23
    expected, found, _ = both(made, tmp_path)
    check(expected, found)


def test_a_slice_by_int32(tmp_path: Path) -> None:
    made = model(*WHOLE["the last tokens"])
    for tensor in made.graph.initializer:
        if tensor.data_type == TensorProto.INT64:
            narrow = numpy_helper.to_array(tensor).astype(np.int32)
            tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))
    expected, found, _ = both(made, tmp_path)
    check(expected, found)


def test_the_mean_of_nothing(tmp_path: Path) -> None:
    made = model(
        [node("Slice", "x zero zero two", "e"), node("ReduceMean", "e", keepdims=0)], {"two": ints(2), **SIZES}, 0
    )
    expected, found, _ = both(made, tmp_path)
    check(expected, found)


MIXED: dict[str, tuple[list[onnx.NodeProto], dict[str, Array], int, str]] = {
    "a convolution": (
        [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Conv", "t k", pads=[1, 1])],
        {"k": np.repeat(W[:, :, None], 3, 2)},
        3,
        "node 'Conv_y' (Conv): it mixes the sequence: its window is longer than one token",
    ),
    "a softmax over tokens": (
        [node("MatMul", "x w", "h"), node("Softmax", "h", axis=1)],
        {"w": W},
        3,
        "node 'Softmax_y' (Softmax): it mixes the sequence, along axis 1",
    ),
    "a sum of the tokens before": (
        [node("MatMul", "x w", "h"), node("CumSum", "h axis")],
        {"w": W, "axis": np.array(1)},
        3,
        "node 'CumSum_y' (CumSum): it mixes the sequence, along axis 1",
    ),
    "features that a ScatterND writes for the tokens from the last one on": (
        written(node("Range", "start count step", "r"), node("Sub", "seq r", "q"), node("Sub", "q step", "s")),
        PLACES,
        3,
        "node 'ScatterND_y' (ScatterND): it mixes the sequence: it writes to places along the sequence",
    ),
    "an attention that is not fused": (
        [
            node("MatMul", "x w", "h"),
            node("Einsum", "h h", "s", equation="bse,bte->bst"),
            node("Relu", "s", "p"),
            node("MatMul", "p h"),
        ],
        {"w": W},
        3,
        "node 'Einsum_s' (Einsum): it mixes the sequence: each rank would need 'h' of all tokens",
    ),
    "a norm with weights for each token": (
        [node("LayerNormalization", "x g", axis=-1)],
        {"g": RNG.standard_normal((LENGTH, WIDTH)).astype(np.float32)},
        3,
        "node 'LayerNormalization_y' (LayerNormalization): its weights may differ along the sequence",
    ),
    "random numbers": (
        [node("RandomNormalLike", "x", "r"), node("Add", "x r")],
        {},
        3,
        "node 'RandomNormalLike_r' (RandomNormalLike): it is not known how the operator treats the sequence",
    ),
    "random numbers in a branch": (
        [node("ReduceMax", "ids", "m", keepdims=0), node("Cast", "m", "c", to=TensorProto.BOOL)]
        + [node("If", "c", "n", then_branch=drawing("one"), else_branch=drawing("other")), node("Add", "x n")],
        {},
        3,
        "node 'RandomNormal_other' (RandomNormal): it draws random numbers",
    ),
    "heads that are rotated from one position on": (
        [node("RotaryEmbedding", "x start cos sin", domain="com.microsoft")],
        {"start": ints(0), "cos": np.cos(ANGLES), "sin": np.sin(ANGLES)},
        3,
        "node 'RotaryEmbedding_y' (RotaryEmbedding): it counts the positions of its tokens by itself",
    ),
    "joined tokens": (
        [node("MatMul", "x w", "h"), node("Concat", "h h", axis=1)],
        {"w": W},
        3,
        "the output 'y' is longer than the sequence, or has it merged with other dimensions",
    ),
    "an Einsum that repeats one number for all tokens": (
        [node("MatMul", "x w", "h"), node("Einsum", "h v", equation="bso,so->bo")],
        {"w": W, "v": W[:1]},
        2,
        "it mixes the sequence: each rank would need 'y' of all tokens",
    ),
    "tokens that a Pad shifts": (
        [node("MatMul", "x w", "h"), node("Pad", "h pads")],
        {"w": W, "pads": ints(0, 1, 0, 0, -1, 0)},
        3,
        "node 'Pad_y' (Pad): it mixes the sequence: it pads the sequence, or is not proven to leave it as it is",
    ),
    "a Squeeze of whatever is 1": (
        [node("MatMul", "x w", "h"), node("Squeeze", "h none")],
        {"w": W, "none": ints()},
        3,
        "node 'Squeeze_y' (Squeeze): the rank of 'y' is unknown",
    ),
    "an operator that nobody knows": (
        [node("MatMul", "x w", "h"), node("MeanVarianceNormalization", "h", axes=[0, 1, 2])],
        {"w": W},
        3,
        "node 'MeanVarianceNormalization_y' (MeanVarianceNormalization): it is not known how the operator treats",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_the_sequence_is_refused(name: str, tmp_path: Path) -> None:
    nodes, weights, rank, said = MIXED[name]
    with pytest.raises(InputError) as caught:
        both(model(nodes, weights, rank), tmp_path)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_input_that_is_an_output(tmp_path: Path) -> None:
    """It keeps its name, and is the rank's part in both places."""
    made = model([node("MatMul", "x w")], {"w": W}, 3)
    made.graph.output.append(made.graph.input[0])
    feeds = {"x": X}
    expected = dict(zip("yx", ort.InferenceSession(made.SerializeToString()).run(None, feeds), strict=True))
    result = fa_compiler.shard(made, tmp_path / "out", RANKS, axes={"x": 1})
    assert result.report.outputs == {"y": 1, "x": 1}
    check(expected, by_ranks(result.path, RANKS, feeds))


def test_an_input_with_a_default(tmp_path: Path) -> None:
    """It stays an input of the ranks, which all of them have whole. A caller may leave it out."""
    made = model([node("MatMul", "x w", "h"), node("Add", "h p")], {"w": W, "p": TABLE[:1]}, 3)
    made.graph.input.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["any", WIDTH]))
    session = ort.InferenceSession(made.SerializeToString())
    result = fa_compiler.shard(made, tmp_path / "out", RANKS, axes={"x": 1})
    assert result.report.inputs == {"x": 1}
    for more in ({}, {"p": TABLE[1:2]}, {"p": RNG.standard_normal((LENGTH, WIDTH)).astype(np.float32)}):
        feeds = {"x": X, **more}
        check({"y": session.run(["y"], feeds)[0]}, by_ranks(result.path, RANKS, feeds))
    with pytest.raises(InputError, match="the input 'p' has a default, which every rank has whole"):
        fa_compiler.shard(made, tmp_path / "other", RANKS, axes={"p": 0})


def test_two_names_for_one_length(tmp_path: Path) -> None:
    """The length of the attention is that of x and of a mask, to which an exporter gave another name. Both become the
    sequence, and inputs of two lengths are refused."""
    names = [("x", TensorProto.FLOAT, ["batch", "seq", WIDTH]), ("m", TensorProto.FLOAT, ["batch", "other", 1])]
    nodes = [
        node("Mul", "x m", "h"),
        node("Transpose", "h", "t", perm=[0, 2, 1]),
        node("MatMul", "h t", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p h"),
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3)
    graph = helper.make_graph(nodes, "two", [helper.make_tensor_value_info(*name) for name in names], [y])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"x": X, "m": RNG.standard_normal((BATCH, LENGTH, 1)).astype(np.float32)}
    result = fa_compiler.shard(made, tmp_path / "out", RANKS)
    assert result.report.inputs == {"x": 1, "m": 1}
    expected = dict(zip(["y"], ort.InferenceSession(made.SerializeToString()).run(["y"], feeds), strict=True))
    check(expected, by_ranks(result.path, RANKS, feeds))
    with pytest.raises(InputError, match=r"the inputs need sequences of one length \('x' has 13, 'm' has 1\)"):
        by_ranks(result.path, RANKS, {**feeds, "m": feeds["m"][:, :1]})


@pytest.mark.parametrize("method", ["gather", "all-to-all", "ring"])
def test_packed_sequences(method: str, tmp_path: Path) -> None:
    """A token attends to the tokens of its own sequence before it. The labels of sequences are counted along all
    tokens; their mask has the rank's rows, or all rows where the ranks divide the heads."""
    heads = {
        "heads": ints(0, 0, 3, 8),
        "zero": np.array(0),
        "one": np.array(1),
        "three": np.array(3),
        "axis": np.array(1),
    }
    last = np.array([2], np.int64)
    nodes = [
        node("Reshape", "x heads", "r"),
        node("Transpose", "r", "q", perm=[0, 2, 1, 3]),
        node("Transpose", "r", "k", perm=[0, 2, 3, 1]),
        node("MatMul", "q k", "s"),
        node("Equal", "ids three", "begins"),
        node("Cast", "begins", "counts", to=TensorProto.INT64),
        node("CumSum", "counts axis", "label"),
        node("Unsqueeze", "label last", "rows"),
        node("Unsqueeze", "label next", "keys"),
        node("Equal", "rows keys", "same"),
        node("Shape", "ids", "sizes"),
        node("Gather", "sizes one", "count"),
        node("Range", "zero count one", "i"),
        node("Unsqueeze", "i next", "above"),
        node("LessOrEqual", "i above", "causal"),
        node("And", "same causal", "both"),
        node("Unsqueeze", "both next", "mask"),
        node("Where", "mask s low", "m"),
        node("Softmax", "m", "p", axis=-1),
        node("MatMul", "p q", "o"),
        node("Transpose", "o", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t back"),
    ]
    weights = {**heads, "last": last, "next": ints(1), "low": np.array(-np.inf, np.float32), "back": ints(0, 0, WIDTH)}
    made = model(nodes, weights, 3)
    assert fa_compiler.inspect(made).blocks[0].mask == "packed+causal"
    expected = ort.InferenceSession(made.SerializeToString()).run(["y"], {"x": X, "ids": IDS})
    result = fa_compiler.shard(made, tmp_path / "out", RANKS, method=method)
    check({"y": expected[0]}, by_ranks(result.path, RANKS, {"x": X, "ids": IDS}))


def with_table(rows: int) -> onnx.ModelProto:
    """Attention with a bias from a table that has a row and a column for each position."""
    nodes = [
        *SHAPE,
        node("Reshape", "x heads", "r"),
        node("Transpose", "r", "q", perm=[0, 2, 1, 3]),
        node("Transpose", "r", "k", perm=[0, 2, 3, 1]),
        node("MatMul", "q k", "s"),
        node("Concat", "seq seq", "ends", axis=0),
        node("Slice", "table begins ends axes", "bias"),
        node("Add", "s bias", "b"),
        node("Softmax", "b", "p", axis=-1),
        node("MatMul", "p q", "o"),
        node("Transpose", "o", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t back"),
    ]
    weights = {
        **SIZES,
        "heads": ints(0, 0, 3, 8),
        "back": ints(0, 0, WIDTH),
        "begins": ints(0, 0),
        "axes": ints(2, 3),
        "table": RNG.standard_normal((1, 3, rows, rows)).astype(np.float32),
    }
    return model(nodes, weights, 3)


@pytest.mark.parametrize("method", ["gather", "all-to-all", "ring"])
@pytest.mark.parametrize("rows", [LENGTH, 40])
def test_a_bias_that_is_cut_from_a_table(rows: int, method: str, tmp_path: Path) -> None:
    """A run takes as many rows and columns as it has tokens."""
    made = with_table(rows)
    expected = ort.InferenceSession(made.SerializeToString()).run(["y"], {"x": X})
    result = fa_compiler.shard(made, tmp_path / "out", RANKS, method=method)
    check({"y": expected[0]}, by_ranks(result.path, RANKS, {"x": X}))


def test_a_table_of_as_many_rows_as_compressed_slopes_have(tmp_path: Path) -> None:
    """In a file that is fused already, 1024 rows may stand for those of more tokens."""
    fused = fa_compiler.optimize(with_table(40)).model
    (table,) = (tensor for tensor in fused.graph.initializer if tensor.name == "table")
    table.CopyFrom(numpy_helper.from_array(np.zeros((1, 3, 1024, 1024), np.float32), "table"))
    with pytest.raises(InputError, match="the rows of its bias are not proven to be those of the sequence"):
        fa_compiler.shard(fused, tmp_path / "out", RANKS, method="gather")
