"""What the report says, and what a fusion leaves of a model: nothing dead, nothing else changed."""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Code, Options, fuse
from fa_compiler.passes.answer.report import Block
from fa_compiler.passes.fusion import NEWEST_OPSET
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    SOFTMAX,
    assert_same,
    fused,
    parse,
    random_feeds,
    run,
)

ATTENTION = PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV

MIXED = (
    "a = LayerNormalization(q, w) kt = Transpose<perm=[0,1,3,2]>(k) "
    "s = MatMul(a, kt) x = Mul(s, c) p = Softmax<axis=-1>(x) o1 = MatMul(p, v) o1r = Relu(o1) "
    "s2 = MatMul(o1r, kt) t1 = Tanh(s2) t2 = Tanh(t1) p2 = Softmax<axis=-1>(t2) o2 = MatMul(p2, v) "
    "s3 = MatMul(o2, kt) x3 = Mul(s3, c) p3 = Softmax<axis=-1>(x3) o3 = MatMul(p3, v) "
    "y = Add(o3, o1) r = Softmax<axis=-1>(o3) z, i = TopK(r, one)"
)
MIXED_OPTIONS = {
    "outputs": "float[B,4,S,8] y, float[B,4,S,1] z",
    "initializers": "<float c = {0.5}, float[8] w = {1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0}, int64[1] one = {1}>",
}


def mixed() -> onnx.ModelProto:
    """Two attentions that fuse, one that is capped twice, one router; a key transposed once for all."""
    return parse(MIXED, **MIXED_OPTIONS)  # type: ignore[arg-type]


def test_one_block_a_softmax_in_order() -> None:
    _, report = fused(mixed())
    assert [block.id for block in report.blocks] == [0, 1, 2, 3]
    assert [block.anchor for block in report.blocks] == ["p", "p2", "p3", "r"]
    assert [block.status for block in report.blocks] == ["fused", "declined", "fused", "not_attention"]
    assert (report.fused_attentions, report.attentions) == (2, 3)  # the router is no attention
    assert [block.code for block in report.blocks] == [None, Code.SOFTCAP, None, Code.NOT_ATTENTION]
    assert [block.kind for block in report.blocks] == ["forward", "forward", "forward", "softmax_only"]


def test_fused_blocks_name_their_nodes() -> None:
    model, report = fused(mixed())
    nodes = {node.name: node for node in model.graph.node if node.domain == "ascend"}
    blocks = [block for block in report.blocks if block.status == "fused"]
    assert {block.node for block in blocks} == set(nodes)
    for block in blocks:
        assert block.op == "FlashAttentionScore"
        assert block.heads == (4, 4)
        layout = next(each for each in nodes[block.node or ""].attribute if each.name == "input_layout")
        assert layout.s.decode() == block.layout


def test_the_rest_of_the_graph_is_as_it_was() -> None:
    model = mixed()
    result, _ = fused(model)
    # Through the IR, which writes a node without an empty domain.
    before = {node.output[0]: node for node in ir.to_proto(ir.from_proto(model)).graph.node}
    fresh = {"p", "x", "s", "p3", "x3", "s3", "o1", "o3"}
    kept = {node.output[0]: node for node in result.graph.node if node.output[0] in before and node.domain != "ascend"}
    assert set(kept) == set(before) - fresh
    assert all(node == before[name] for name, node in kept.items())
    assert result.graph.input == model.graph.input
    assert result.graph.output == model.graph.output
    assert result.ir_version == model.ir_version
    wanted = {each.domain: each.version for each in model.opset_import} | {"ascend": 1}
    assert {each.domain: each.version for each in result.opset_import} == wanted


def test_nothing_dead_is_left() -> None:
    result, _ = fused(mixed())
    read = {name for node in result.graph.node for name in node.input} | {each.name for each in result.graph.output}
    assert all(set(node.output) & read for node in result.graph.node)
    assert {each.name for each in result.graph.initializer} <= read


def test_names_are_unique_and_new() -> None:
    """Names that the fusion would like are taken already, in the graph and in a branch."""
    body = ATTENTION.replace("y =", "fa_FlashAttentionScore_attention_out =") + (
        "fa_FlashAttentionScore = Neg(fa_FlashAttentionScore_attention_out) "
        "y = If (c) <then_branch = g1 () => (float[B,4,S,8] fa_Transpose_output) "
        "{ fa_Transpose_output = Neg(fa_FlashAttentionScore) }, "
        "else_branch = g2 () => (float[B,4,S,8] b) { b = Neg(q) }>"
    )
    result, report = fused(parse(body, "bool c"))
    assert report.count("fused") == 1
    names = [name for node in result.graph.node for name in node.output if name]
    assert len(names) == len(set(names))
    nodes = [node.name for node in result.graph.node if node.name]
    assert len(nodes) == len(set(nodes))
    assert not set(nodes) & set(names)


def test_a_second_run_finds_nothing_to_do() -> None:
    once, _ = fused(mixed())
    twice, report = fused(once)
    assert report.count("fused") == 0
    assert twice == once


@pytest.mark.parametrize("body", ["y = Relu(q)", "t = Exp(q) n = Constant<value=float {2.0}>() y = Div(t, n)"])
def test_a_model_without_attention_is_not_touched(body: str) -> None:
    model = parse(body)
    graph = ir.from_proto(model)
    report = fuse(graph)
    assert not report.blocks
    assert ir.to_proto(graph).SerializeToString() == ir.to_proto(ir.from_proto(model)).SerializeToString()
    assert report.to_json()["summary"] == {
        "softmaxes": 0,
        "fused": 0,
        "already_fused": 0,
        "declined": 0,
        "not_attention": 0,
        "linear_attention": 0,
    }


def test_results_of_several_blocks() -> None:
    model = mixed()
    result, _ = fused(model)
    feeds = random_feeds(model)
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


FIELDS = {
    "id": int,
    "kind": str,
    "pair": type(None),
    "anchor": str,
    "status": str,
    "op": str,
    "node": str,
    "layout": str,
    "mask": str,
    "heads": list,
    "extensions": list,
    "assumed": list,
    "code": str,
    "reason": str,
    "culprit": str,
    "hint": str,
    "missed": list,
}


def test_json() -> None:
    """The schema that other tools read: every field in every block, the right type or null."""
    _, report = fused(mixed())
    report.model = "mixed.onnx"
    data = json.loads(json.dumps(report.to_json()))
    assert set(data) == {"schema", "model", "target", "blocks", "summary", "around", "caches", "notes", "seconds"}
    assert (data["schema"], data["model"], data["target"]) == (1, "mixed.onnx", "ort")
    assert data["summary"] == {
        "softmaxes": 4,
        "fused": 2,
        "already_fused": 0,
        "declined": 1,
        "not_attention": 1,
        "linear_attention": 0,
    }
    assert data["seconds"] >= 0
    for block in data["blocks"]:
        assert set(block) == set(FIELDS)
        assert all(value is None or isinstance(value, FIELDS[name]) for name, value in block.items())
        reasoned = block["status"] != "fused"
        assert all((block[name] is not None) == reasoned for name in ("code", "reason", "culprit"))
        assert all((block[name] is None) == reasoned for name in ("op", "node", "layout", "mask", "heads"))


@pytest.mark.parametrize(
    "heads, told", [((1, 1), "1 head"), ((4, 4), "4 heads"), ((4, 1), "4 heads on 1"), ((1, 4), "1 head on 4")]
)
def test_heads_in_words(heads: tuple[int, int], told: str) -> None:
    block = Block(0, "forward", "softmax", "fused", op="FlashAttentionScore", layout="BSH", heads=heads)
    assert block.what == f"FlashAttentionScore, BSH, {told}"


def test_every_code_says_what_it_means() -> None:
    assert len({code.value for code in Code}) == len(Code)
    assert all(code.meaning and code.value == str(code) for code in Code)
    fixed = {"softcap", "scores_are_output", "probabilities_are_output", "head_size_over_768"}
    assert fixed <= {code.value for code in Code}


def test_an_opset_that_nobody_knows() -> None:
    model = mixed()
    model.opset_import[0].version = NEWEST_OPSET + 1
    result, report = fused(model)
    assert [block.code for block in report.blocks] == [Code.OPSET] * 4
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in model.graph.node]


def test_progress_counts_to_its_end() -> None:
    calls: list[tuple[str, int, int]] = []
    fuse(ir.from_proto(mixed()), Options(), lambda *call: calls.append(call))
    assert [call[1:] for call in calls] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_bytes_added_for_ascend_are_reported() -> None:
    """A padding mask has no legal form there but the written out one."""
    body = PRODUCT_QK + "f = Constant<value=float {-inf}>() x = Where(m, s, f) " + SOFTMAX.format("x") + PRODUCT_PV
    inputs = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v, bool[2,1,1,6] m"
    model = parse(body, inputs=inputs, outputs="float[2,4,5,8] y")
    result, report = fused(model, "ascend", ["no-empty-rows"])
    (block,) = report.blocks
    assert (block.mask, block.assumed) == ("atten_mask", ("no-empty-rows",))
    assert [each for each in block.missed if "48 bytes" in each.reason], block.missed
    (node,) = (node for node in result.graph.node if node.domain == "ascend")
    shapes = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in result.graph.value_info}
    assert shapes[node.input[6]] == [2, 1, 5, 6]


@pytest.mark.parametrize(
    ("dims", "mask", "shift"),
    [
        ((2, 1, 1, 6), [2, 1, 5, 6], [2, 4, 1, 6]),
        ((1, 1, 5, 6), [1, 1, 5, 6], [1, 4, 5, 6]),
        ((2, 1, 5, 6), [2, 1, 5, 6], [2, 4, 5, 6]),
        ((1, 4, 1, 6), [2, 4, 5, 6], [1, 4, 1, 6]),
        ((2, 4, 5, 6), [2, 4, 5, 6], [2, 4, 5, 6]),
        ((1, 1, 5, 1), [1, 1, 5, 6], [1, 4, 5, 6]),
    ],
)
def test_shapes_of_masks_for_ascend(dims: tuple[int, ...], mask: list[int], shift: list[int]) -> None:
    """Broadcast dimensions are written out as far as the product wants them (constraints of atten_mask and pse)."""
    inputs = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v, "
    shape = ",".join(map(str, dims))
    body = PRODUCT_QK + "f = Constant<value=float {-inf}>() x = Where(m, s, f) " + SOFTMAX.format("x") + PRODUCT_PV
    selected = parse(body, inputs=f"{inputs}bool[{shape}] m", outputs="float[2,4,5,8] y")
    body = PRODUCT_QK + "x = Add(s, m) " + SOFTMAX.format("x") + PRODUCT_PV
    added = parse(body, inputs=f"{inputs}float[{shape}] m", outputs="float[2,4,5,8] y")
    for model, position, wanted in ((selected, 6, mask), (added, 3, shift)):
        result, _ = fused(model, "ascend", ["no-empty-rows"])
        (node,) = (node for node in result.graph.node if node.domain == "ascend")
        values = [*result.graph.value_info, *result.graph.input]
        shapes = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in values}
        assert shapes[node.input[position]] == wanted
        feeds = random_feeds(model)
        if model is selected:
            feeds["m"][..., 0] = True
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize("bad", [{"target": "cuda"}, {"assume": frozenset({"nothing"})}])
def test_options_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unknown"):
        Options(**bad)  # type: ignore[arg-type]
