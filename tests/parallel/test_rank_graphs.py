"""The graph of each rank for Ascend, through its `.air` file: the ranks together compute what one process computes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise as neighbours
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.files import parse_message
from fa_compiler.lowering.ascend.convert import to_ge
from fa_compiler.lowering.ascend.graph import Model
from fa_compiler.op_registry import collectives, get, hcom, place_inputs
from fa_compiler.op_registry.collectives import CONTIGUOUS, METHODS, ORDERS, ZIGZAG
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED
from fa_compiler.parallel.communicator import Array
from fa_compiler.parallel.parts import Parts
from fa_compiler.passes.parallel.methods import refused_methods
from fa_compiler.passes.parallel.places import Refusal
from fa_compiler.passes.parallel.rank_emitter import Rank
from fa_compiler.passes.parallel.rank_graph import rank_graph
from fa_compiler.passes.parallel.shard import ShardReport
from tests.pairs import pairwise

from .air_ranks import run_ranks
from .running import BANDS, shape_in
from .test_methods import BATCH, HEADS, KEY_HEADS, SIZE, attrs_of, by_kernel

LENGTH = 24
Axes = Mapping[str, int | None]


def graphs(nodes: list[onnx.NodeProto], feeds: Mapping[str, Array], axes: Axes, parts: Parts) -> list[Model]:
    """The GE graph of each rank, read back from its file, for a model with the output "y"."""
    kind = helper.np_dtype_to_tensor_dtype
    inputs = [helper.make_tensor_value_info(name, kind(array.dtype), array.shape) for name, array in feeds.items()]
    outputs = [helper.make_tensor_value_info("y", kind(next(iter(feeds.values())).dtype), None)]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(collectives.DOMAIN, 1)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))
    report = ShardReport(parts.ranks, parts.order, LENGTH, axes, {}, (), ())
    sizes = {name: array.shape for name, array in feeds.items()}
    made = []
    for number in range(parts.ranks):
        rank = Rank(number, parts.ranks, parts.order, LENGTH)
        data, _ = serialise(to_ge(rank_graph(model, report, rank, sizes)))
        assert check_message(parse_message(data)) == []
        made.append(parse(data))
    return made


def run(nodes: list[onnx.NodeProto], feeds: Mapping[str, Array], axes: Axes, parts: Parts) -> list[Array]:
    """The output of each rank, which gets its part of the inputs."""

    def own(name: str, rank: int) -> Array:
        axis = axes[name]
        return feeds[name] if axis is None else parts.own(feeds[name], axis, rank)

    each = [{name: own(name, rank) for name in feeds} for rank in range(parts.ranks)]
    return [outputs[0] for outputs in run_ranks(graphs(nodes, feeds, axes, parts), each)]


def collective(op_type: str, inputs: tuple[str, ...] = ("x",), **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, ["y"], name="node", domain=collectives.DOMAIN, **attrs)


def numbers(dtype: Any, axis: int = 1) -> Array:
    shape = [2, 3, 5]
    shape[axis] = LENGTH
    drawn = np.random.default_rng(0).integers(-9, 9, shape)
    return drawn > 0 if dtype == np.bool_ else drawn.astype(dtype)


@pytest.mark.parametrize(
    "axis, dtype, ranks, order",
    pairwise([0, 1, 2], [np.float32, np.float16, np.int64, np.bool_, np.float64], [2, 3, 4], ORDERS),
)
def test_all_gather(axis: int, dtype: Any, ranks: int, order: str) -> None:
    x = numbers(dtype, axis)
    parts = Parts(order, ranks, LENGTH)
    for found in run([collective(collectives.ALL_GATHER, axis=axis)], {"x": x}, {"x": axis}, parts):
        np.testing.assert_array_equal(found, x)


def test_bfloat16_travels_as_float() -> None:
    """HCCL's operators are not declared for bfloat16."""
    x = numbers(np.float32).astype(helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    graph, _ = graphs([collective(collectives.ALL_GATHER, axis=1)], {"x": x}, {"x": 1}, Parts(ZIGZAG, 2, LENGTH))
    (message,) = graph.root.of_type(hcom.ALL_GATHER)
    assert (message.input_descs[0].dtype, message.output_descs[0].dtype) == ("DT_FLOAT", "DT_FLOAT")
    assert next(graph.root.of_type("NetOutput")).input_descs[0].dtype == "DT_BF16"


@pytest.mark.parametrize("dtype, scalar", pairwise([np.float32, np.int64], [False, True]))
def test_all_reduce(dtype: Any, scalar: bool) -> None:
    x, parts = np.arange(LENGTH).astype(dtype), Parts(CONTIGUOUS, 3, LENGTH)
    own = [parts.own(x, 0, rank) for rank in range(3)]
    first = helper.make_node("ReduceSum" if scalar else "Neg", ["x"], ["s"], **({"keepdims": 0} if scalar else {}))
    expected = sum(each.sum() if scalar else -each for each in own)
    for found in run([first, collective(collectives.ALL_REDUCE, ("s",))], {"x": x}, {"x": 0}, parts):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "reduction, dtype, inner, order", pairwise(["max", "min"], [np.float32, np.int64], [0, 1], ORDERS)
)
def test_token_extremes(reduction: str, dtype: Any, inner: int, order: str) -> None:
    """Of the tokens alone, and beside others in their dimension."""
    x, parts = numbers(dtype), Parts(order, 4, LENGTH)
    function = {"max": np.max, "min": np.min}[reduction]
    nodes = [collective(collectives.TOKEN_EXTREMES, axis=1, inner=0, reduction=reduction)]
    for found in run(nodes, {"x": x}, {"x": 1}, parts):
        np.testing.assert_array_equal(found, function(x, axis=1, keepdims=True))
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 1, 2] if inner else [1, 0, 2]),
        helper.make_node("Constant", [], ["c"], value_ints=[-1, x.shape[2]]),
        helper.make_node("Reshape", ["t", "c"], ["r"]),
        collective(collectives.TOKEN_EXTREMES, ("r",), axis=0, inner=inner, reduction=reduction),
    ]
    for found in run(nodes, {"x": x}, {"x": 1}, parts):
        np.testing.assert_array_equal(found, function(x, axis=1))


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    "indices, axis, order",
    [
        (np.array(0), 1, ZIGZAG),
        (np.array(-1), 1, CONTIGUOUS),
        (np.array([[-1, 5], [5, 17]]), 1, ZIGZAG),
        (np.array([23, 2]), 0, CONTIGUOUS),
    ],
    ids=["first", "last", "several", "two"],
)
def test_select_tokens(indices: Array, axis: int, order: str, fixed: bool) -> None:
    x, nodes, feeds = numbers(np.float32, axis), [], {}
    if fixed:
        nodes.append(helper.make_node("Constant", [], ["i"], value=onnx.numpy_helper.from_array(indices)))
    else:
        feeds["i"] = indices
    nodes.append(collective(collectives.SELECT_TOKENS, ("x", "i"), axis=axis))
    for found in run(nodes, {"x": x, **feeds}, {"x": axis, "i": None}, Parts(order, 4, LENGTH)):
        np.testing.assert_array_equal(found, np.take(x, indices, axis))


def test_a_token_that_the_sequence_does_not_have() -> None:
    nodes = [helper.make_node("Constant", [], ["i"], value_int=LENGTH)]
    nodes.append(collective(collectives.SELECT_TOKENS, ("x", "i"), axis=1))
    with pytest.raises(Refusal, match="picks a token that the sequence of 24 tokens does not have"):
        graphs(nodes, {"x": numbers(np.float32)}, {"x": 1}, Parts(ZIGZAG, 4, LENGTH))


def test_positions() -> None:
    part = helper.make_node(collectives.SEQUENCE_PART, [], ["p", "l", "c"], domain=collectives.DOMAIN)
    nodes = [part, helper.make_node("Concat", ["p", "l", "c", "x"], ["y"], axis=0)]
    parts = Parts(ZIGZAG, 3, LENGTH)
    for rank, found in enumerate(run(nodes, {"x": np.zeros(1, np.int64)}, {"x": None}, parts)):
        np.testing.assert_array_equal(found, [*parts.positions(rank), LENGTH, 8, 0])


def attention_inputs(layout: str, mask: str, bias: str) -> dict[str, Array]:
    """query, key and value, a mask and a bias in the shapes that the device takes."""
    rng = np.random.default_rng(5)
    made = {}
    for name, heads in (("query", HEADS), ("key", KEY_HEADS), ("value", KEY_HEADS)):
        made[name] = rng.standard_normal(shape_in(layout, BATCH, heads, LENGTH, SIZE)).astype(np.float32)
    if bias:
        made["real_shift"] = rng.standard_normal((1, HEADS, 1 if bias == "keys" else LENGTH, LENGTH)).astype(np.float32)
    if mask:
        made["atten_mask"] = rng.random((BATCH, 1, LENGTH, LENGTH)) < 0.4
        made["atten_mask"][1, 0, :, 9:] = True  # some parts of the keys have none
        made["atten_mask"][..., range(LENGTH), range(LENGTH)] = mask == "empty row"
        made["atten_mask"][0, 0, 7] |= mask == "empty row"
    return made


@pytest.mark.parametrize(
    "layout, band, mask, bias, ranks, order, method",
    pairwise(
        ["BSH", "SBH", "BSND", "BNSD"],
        [*BANDS],
        ["", "rows", "empty row"],
        ["", "keys", "rows"],
        [2, 3],
        ORDERS,
        METHODS,
    ),
)
def test_attention(layout: str, band: str, mask: str, bias: str, ranks: int, order: str, method: str) -> None:
    if method in refused_methods(HEADS, KEY_HEADS, ranks, False, ""):
        method = "ring"
    compare(attention_inputs(layout, mask, bias), layout, band, method, Parts(order, ranks, LENGTH))


def compare(inputs: Mapping[str, Array], layout: str, band: str, method: str, parts: Parts) -> None:
    """The ranks' attention against one call of the kernel on the whole sequence."""
    attrs = attrs_of(layout, band, pse_type=0 if "real_shift" in inputs else 1)
    axis = SEQUENCE_AXIS[layout]

    def axis_of(name: str) -> int | None:
        if name in ("query", "key", "value"):
            return axis
        whole = method == "all-to-all" or name == "sink" or inputs[name].shape[2] == 1
        return None if whole else 2

    names = place_inputs(get("FlashAttentionScore"), {name: name for name in inputs})
    node = collective(collectives.SEQUENCE_ATTENTION, tuple(name or "" for name in names), method=method, **attrs)
    found = parts.joined(run([node], inputs, {name: axis_of(name) for name in inputs}, parts), axis)
    np.testing.assert_allclose(found, by_kernel(attrs, inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["SBH", "BNSD"])
def test_scores_of_the_lowest_number(layout: str, order: str) -> None:
    """The largest score of keys may be that of a part without a key, which has no weight beside them."""
    inputs = attention_inputs(layout, "rows", "rows")
    inputs["real_shift"][:, :, 3] = inputs["real_shift"][:, :, 15:] = np.finfo(np.float32).min
    inputs["atten_mask"][0, 0, 15, 9:] = inputs["atten_mask"][0, 0, 17, :17] = True
    compare(inputs, layout, "causal", "ring", Parts(order, 3, LENGTH))


def test_ranks_that_share_key_heads() -> None:
    """6 ranks have a query head each, and two of them read one key head."""
    compare(attention_inputs("BNSD", "rows", "rows"), "BNSD", "causal", "all-to-all", Parts(ZIGZAG, 6, LENGTH))


@pytest.mark.parametrize("method", ["gather", "all-to-all"])
def test_a_sink(method: str) -> None:
    inputs = {**attention_inputs("BNSD", "", ""), "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)}
    compare(inputs, "BNSD", "window", method, Parts(ZIGZAG, 3, LENGTH))


def test_a_causal_rank_computes_triangles_and_no_mask() -> None:
    """In a ring of 2 ranks in zigzag order each rank has two diagonal blocks, which are triangles of mode 3; the other
    blocks are complete, or not computed at all."""
    attrs = attrs_of("SBH", "causal")
    inputs = attention_inputs("SBH", "", "")
    node = collective(collectives.SEQUENCE_ATTENTION, tuple(inputs), method="ring", **attrs)
    for graph in graphs([node], inputs, dict.fromkeys(inputs, 0), Parts(ZIGZAG, 2, LENGTH)):
        calls = list(graph.root.of_type("FlashAttentionScore"))
        modes = [
            (call.attrs["sparse_mode"].value, "atten_mask" in [desc.name for desc in call.input_descs])
            for call in calls
        ]
        assert sorted(modes) == [(0, False)] * 3 + [(3, True)] * 2
        assert all(call.attrs["pre_tockens"].value == UNLIMITED for call in calls)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_messages_have_one_order(ranks: int) -> None:
    """Each message waits for the one before it, and the model ends after the last. Of two neighbours in a ring one
    sends first and the other receives first, but for the last rank and rank 0 of an odd number."""
    attrs = attrs_of("SBH", "none")
    inputs = attention_inputs("SBH", "", "")
    node = collective(collectives.SEQUENCE_ATTENTION, tuple(inputs), method="ring", **attrs)
    for rank, graph in enumerate(graphs([node], inputs, dict.fromkeys(inputs, 0), Parts(CONTIGUOUS, ranks, LENGTH))):
        messages = [op for op in graph.root.ops if op.type in hcom.OPERATORS]
        (end,) = graph.root.of_type("NetOutput")
        for before, after in neighbours([*messages, end]):
            assert after.controls == [before.name]
        both = [hcom.SEND, hcom.RECEIVE] if rank % 2 == 0 else [hcom.RECEIVE, hcom.SEND]
        assert [op.type for op in messages] == both * (ranks - 1)
        tags = [op.attrs["sr_tag"].value for op in messages]
        assert tags == [step for step in range(ranks - 1) for _ in both]
