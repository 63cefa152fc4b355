"""What is true of all attention operators of a model: reasons, assumptions, graphs inside graphs, several layers."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops import ATTENTION_OPS, DIRECT, FAMILIES, REASONS
from fa_compiler.passes.attention_ops.direct import Direct
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.values.facts import Facts
from tests.passes.attention_ops.test_contrib import CAUSAL, LEFT_PADDED, LOWEST, SQUARE, addend, multi_head
from tests.passes.running import assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")


@pytest.mark.parametrize("name", sorted(REASONS))
def test_reasons(name: str) -> None:
    """An operator without a conversion says why."""
    model = parse(f"y = com.microsoft.{name}<num_heads = 4>(q, k, v) ")
    result, report = fused(model)
    assert report.blocks[0].code == "ready_made"
    assert report.blocks[0].reason == f"{name} is left as it is: {REASONS[name]}"
    assert [node.op_type for node in result.graph.node] == [name]


def test_every_operator_is_converted_or_explained() -> None:
    for domain, name in ATTENTION_OPS:
        assert domain == "ascend" or (domain, name) in FAMILIES or name in REASONS or (domain, name) in DIRECT, name


def test_the_operator_itself() -> None:
    """What a run has fused another one leaves alone."""
    result, _ = fused(parse("y = Attention(q, k, v) ", opset=23, ir_version=10))
    again, report = fused(result)
    assert (report.blocks[0].status, report.blocks[0].code) == ("already_fused", "already_fused")
    assert report.blocks[0].hint is None
    assert not report.advice
    assert again.graph.node == result.graph.node


PADDED = {**SQUARE, **CAUSAL, "mask": ("B S", LEFT_PADDED), "mask_filter_value": LOWEST, "fixed": True}


def test_padding_by_the_lowest_number_on_a_product() -> None:
    """There a row of padding alone does not give the mean."""
    operator = multi_head(**PADDED)
    model = operator.model(operator.feeds())
    (block,) = fused(model, "ascend")[1].blocks
    assert block.code == "empty_rows"
    assert block.hint is not None
    (block,) = fused(model, "ascend", ["no-empty-rows"])[1].blocks
    assert block.status == "fused", block.reason
    assert block.assumed == ("no-empty-rows",)


def test_causal_and_any_addend_with_an_assumption() -> None:
    """With a visible key in every row the band needs no tensor, whatever is added."""
    operator = multi_head(**{**SQUARE, **CAUSAL}, addend=("1 2 S S", addend(1, 2, 4, 4)))
    feeds = operator.feeds()
    model = operator.model(feeds)
    assert fused(model)[1].blocks[0].status == "declined"
    assert fused(model, "ort", ["masks-dominate"])[1].blocks[0].mask == "real_shift"
    result, report = fused(model, "ort", ["masks-dominate", "no-empty-rows"])
    assert report.blocks[0].mask == "causal+real_shift"
    assert report.blocks[0].assumed == ("masks-dominate", "no-empty-rows")
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize(("new", "past"), [("U", "P"), ("S", "R"), ("U", "R")])
def test_keys_and_values_with_names_of_their_own(new: str, past: str, target: Target) -> None:
    """They have one number in every run, so that the band of the keys is that of the values."""
    caches = f"float[B,4,P,8] pk, float[B,4,{past},8] pv"
    for body, flat, opset in (
        ("Attention<is_causal = 1>(q, k, v, , pk, pv) ", False, 23),
        ("com.microsoft.MultiHeadAttention<num_heads = 4, unidirectional = 1>(q, k, v, , , , pk, pv) ", True, 17),
    ):
        form = "float[B,{},32] {}" if flat else "float[B,4,{},8] {}"
        inputs = ", ".join(form.format(*pair) for pair in (("S", "q"), ("S", "k"), (new, "v")))
        outputs = form.format("S", "y") + ", float[B,4,K,8] a, float[B,4,V,8] b"
        model = parse(f"y, a, b = {body}", inputs=f"{inputs}, {caches}", outputs=outputs, opset=opset, ir_version=10)
        result, report = fused(model, target)
        assert report.blocks[0].mask == "causal", report.blocks[0].what
        if target == "ort":
            rng = np.random.default_rng(0)
            sizes = {"B": 2, "S": 3, "P": 4, new: 3, past: 4}
            shapes = {
                value.name: [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
                for value in model.graph.input
            }
            feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
                assert_same(got, wanted, 1e-5)


def test_in_a_branch() -> None:
    """An operator in a graph inside another, reading values of the outer one."""
    body = """y = If(flag) <then_branch = then_graph () => (float[B,4,S,8] a) { a = Attention<is_causal = 1>(q, k, v) },
                            else_branch = else_graph () => (float[B,4,S,8] b) { b = Identity(q) }>"""
    model = parse(body, "bool flag", opset=23, ir_version=10)
    result, report = fused(model)
    assert [block.status for block in report.blocks] == ["fused"]
    feeds = random_feeds(model, flag=np.array(True))
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_layers() -> None:
    """Layers behind one another share what is computed of the mask."""
    layers, value = "", "x"
    for index in range(3):
        layers += f"m{index} = com.microsoft.MultiHeadAttention<num_heads = 2>({value}, {value}, {value}, , mask) "
        layers += f"a{index} = Add(m{index}, {value}) "
        value = f"a{index}"
    model = parse(
        layers + f"y = Identity({value}) ", inputs="float[B,S,16] x, int32[B,S] mask", outputs="float[B,S,16] y"
    )
    feeds = random_feeds(model, mask=np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32))
    result, report = fused(model)
    assert report.count("fused") == 3
    assert [node.op_type for node in result.graph.node].count("Greater") == 1
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_function_bodies() -> None:
    """An operator in a model's own function is taken out of it."""
    functions = '<domain: "f", opset_import: ["": 23]> sdpa (a, b, c) => (d) { d = Attention(a, b, c) }'
    model = parse("y = f.sdpa(q, k, v) ", opset=23, ir_version=10, functions=functions)
    assert isinstance(model, onnx.ModelProto)
    result, report = fused(model)
    assert report.count("fused") == 1
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


CONVERTED = {
    "LinearAttention": (
        'y, t = LinearAttention<q_num_heads=4, kv_num_heads=4, update_rule="linear">(q, k, v, p)',
        "float[B,S,32] q, float[B,S,32] k, float[B,S,32] v, float[B,4,8,8] p",
        "float[B,S,32] y, float[B,4,8,8] t",
    ),
    "CausalConvWithState": (
        "y, t = CausalConvWithState(q, w, b, p)",
        "float[B,6,S] q, float[6,1,4] w, float[6] b, float[B,6,3] p",
        "float[B,6,S] y, float[B,6,3] t",
    ),
    "PackedMultiHeadAttention": (
        "y = com.microsoft.PackedMultiHeadAttention<num_heads=4>(q, k, v, , o, e)",
        "float[T,32] q, float[T,32] k, float[T,32] v, int32[B,S] o, int32[C] e",
        "float[T,32] y",
    ),
}
"""The operators that become one node as they stand, of each way to build it."""


@pytest.mark.parametrize("name", CONVERTED)
def test_a_late_decline_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion may still decline when it has built everything: the fixture compares the files."""
    text, inputs, outputs = CONVERTED[name]
    model = parse(text, inputs=inputs, outputs=outputs, opset=27)
    assert fused(model)[1].count("fused") == 1
    (key,) = [key for key in DIRECT if key == (model.graph.node[0].domain, name)]
    kind, convert = DIRECT[key]

    def late(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
        convert(node, facts, builder)
        raise Decline(Code.READY_MADE, "it comes late", node)

    monkeypatch.setitem(DIRECT, key, (kind, late))
    (block,) = fused(model)[1].blocks
    assert block.reason == "it comes late"
