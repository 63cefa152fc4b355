"""310P, which has PromptFlashAttention only: what becomes one, that it computes the same, and what is declined."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from fa_compiler.op_registry import verify
from fa_compiler.passes import Block, Options, Report, fuse
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import remember_versions
from fa_compiler.passes.rewrite import prompt
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.values.shapes import analyse
from fa_compiler.reference import evaluator

HEADS, ROWS, KEYS, SIZE = 4, 6, 9, 16


def model(mask: str = "", dtype: str = "float16", inputs: str = "", kv_heads: int = HEADS) -> onnx.ModelProto:
    """softmax(q k^T / 4, masked) v; `mask` makes `masked` of `scaled`."""
    scores = mask or "masked = Identity(scaled)"
    text = f"""
    <ir_version: 8, opset_import: ["" : 17]>
    attention({dtype}[2,{HEADS},{ROWS},{SIZE}] q, {dtype}[2,{kv_heads},{KEYS},{SIZE}] k,
              {dtype}[2,{kv_heads},{KEYS},{SIZE}] v{inputs}) => ({dtype}[2,{HEADS},{ROWS},{SIZE}] o)
    {{
        kt = Transpose<perm = [0, 1, 3, 2]>(k)
        product = MatMul(q, kt)
        four = Constant<value_float = 0.25>()
        scale = Cast<to = {onnx.TensorProto.DataType.Value(dtype.replace("float32", "float").upper())}>(four)
        scaled = Mul(product, scale)
        {scores}
        p = Softmax<axis = -1>(masked)
        o = MatMul(p, v)
    }}"""
    return onnx.parser.parse_model(text.replace("float32", "float"))


LOW = "number = Constant<value_float = -65504.0>() low = Cast<to = 10>(number) "
CHOSEN = f"{LOW} masked = Where(m, low, scaled)"


def fused(proto: onnx.ModelProto, *assume: str, product: str = "310P") -> tuple[onnx.ModelProto, Report]:
    intermediate = ir.from_proto(proto)
    report = fuse(intermediate, Options("ascend", product, None, frozenset(assume)))
    return ir.to_proto(intermediate), report


def feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type == onnx.TensorProto.BOOL:
            found[value.name] = random.random(shape) < 0.3
        else:
            found[value.name] = random.normal(size=shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return found


GOOD: dict[str, tuple[onnx.ModelProto, tuple[str, ...]]] = {
    "no mask": (model(), ()),
    "float32": (model(dtype="float32"), ("half-attention",)),
    "a mask": (model(CHOSEN, inputs=f", bool[2,1,{ROWS},{KEYS}] m"), ("no-empty-rows", "masks-dominate")),
    "a mask of one batch": (model(CHOSEN, inputs=f", bool[1,1,{ROWS},{KEYS}] m"), ("no-empty-rows", "masks-dominate")),
}


@pytest.mark.parametrize("case", sorted(GOOD))
def test_the_same_is_computed(case: str) -> None:
    proto, assume = GOOD[case]
    result, report = fused(proto, *assume)
    (block,) = report.blocks
    assert (block.status, block.op) == ("fused", "PromptFlashAttention"), block.reason
    assert ("half-attention" in block.assumed) == (case == "float32")
    assert not any(node.op_type == "FlashAttentionScore" for node in result.graph.node)
    given = feeds(proto)
    (right,) = ReferenceEvaluator(proto).run(None, given)
    (found,) = evaluator(result).run(None, given)
    assert found.dtype == right.dtype
    np.testing.assert_allclose(found.astype(np.float32), right.astype(np.float32), atol=4e-3)


def test_bands_are_masks_on_310p() -> None:
    """A causal mask is a sparse_mode on A2 and a whole mask on 310P."""
    causal = (
        "one = Constant<value = bool[6,9] {"
        + ",".join(str(int(j > i + 3)) for i in range(6) for j in range(9))
        + "}>() "
        f"{LOW} masked = Where(one, low, scaled)"
    )
    proto = model(causal)
    result, report = fused(proto, "masks-dominate")
    assert [block.op for block in report.blocks] == ["PromptFlashAttention"], report.blocks[0].reason
    (node,) = [node for node in result.graph.node if node.domain == "ascend"]
    attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
    assert (attrs["sparse_mode"], attrs["inner_precise"]) == (0, 0)
    given = feeds(proto)
    (right,) = ReferenceEvaluator(proto).run(None, given)
    (found,) = evaluator(result).run(None, given)
    np.testing.assert_allclose(found.astype(np.float32), right.astype(np.float32), atol=4e-3)


DECLINED: dict[str, tuple[onnx.ModelProto, tuple[str, ...], str]] = {
    "float32": (model(dtype="float32"), (), "float16 or bfloat16"),
    "a bias": (
        model("masked = Add(scaled, m)", inputs=f", float16[1,{HEADS},{ROWS},{KEYS}] m"),
        (),
        "the operator of 310P takes no bias",
    ),
    "a mask by head": (
        model(CHOSEN, inputs=f", bool[2,{HEADS},{ROWS},{KEYS}] m"),
        ("no-empty-rows", "masks-dominate"),
        "atten_mask has the shape",
    ),
}


@pytest.mark.parametrize("case", sorted(DECLINED))
def test_declined(case: str) -> None:
    proto, assume, phrase = DECLINED[case]
    result, report = fused(proto, *assume)
    (block,) = report.blocks
    assert block.status == "declined"
    assert phrase in (block.reason or "")
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in proto.graph.node]


@pytest.mark.parametrize(
    "proto",
    [
        model(),
        model(dtype="float32"),
        model("masked = Add(scaled, m)", inputs=f", float16[1,{HEADS},{ROWS},{KEYS}] m"),
    ],
    ids=["plain", "float32", "a bias"],
)
def test_a_cann_without_a_prototype(proto: onnx.ModelProto) -> None:
    """The attention is declined, and the rest of the model goes on. What is advised comes before any assumption, which
    would not help."""

    def block(cann: str) -> Block:
        return fuse(ir.from_proto(proto), Options("ascend", "310P", cann)).blocks[0]

    older = block("8.3")
    assert older.reason == "no variant of PromptFlashAttention is known for CANN 8.3; the first is of CANN 8.5.0-beta.1"
    assert older.hint == "--cann 8.5.0-beta.1 or newer, if your CANN is"
    assert block("8.5.0-beta.1").reason != older.reason
    assert fuse(ir.from_proto(model()), Options("ascend", "310P", "8.5.0-beta.1")).blocks[0].status == "fused"


@pytest.mark.parametrize(
    ("assume", "named"),
    [
        ((), "--assume masks-dominate,no-empty-rows if"),
        (("no-empty-rows",), "--assume masks-dominate if"),
        (("masks-dominate",), "--assume no-empty-rows if"),
    ],
)
def test_a_hint_names_only_what_was_not_given(assume: tuple[str, ...], named: str) -> None:
    proto, _ = GOOD["a mask"]
    assert named in (fused(proto, *assume)[1].blocks[0].hint or "")


def test_a_bias_that_is_no_mask_is_not_told_to_be_one() -> None:
    """With every assumption it would be a bias all the same."""
    proto, _, _ = DECLINED["a bias"]
    for assume in ((), ("masks-dominate", "no-empty-rows")):
        assert (fused(proto, *assume)[1].blocks[0].hint or "").startswith("`fa-compiler optimize --target ort`")


def test_rows_without_keys_are_left_alone_on_310p() -> None:
    """Nothing is known of what they give there."""
    given, info = node(", inner_precise = 2", "q, k, v, , , , m", ", bool[6,9] m")
    assert given.graph is not None
    call, names = prompt.as_prompt(given, info), Names.of([given.graph])
    builder = Builder(given.graph, names, info)
    with pytest.raises(Decline, match="masked everywhere"):
        prompt.build(call, given, given.outputs[-1], builder, Options("ascend", "310P"))
    made = prompt.build(call, given, given.outputs[-1], builder, Options("ascend", "A2"))
    assert made.attributes["inner_precise"].as_int() == 2


def test_other_products_keep_their_operator() -> None:
    assert [block.op for block in fused(model(), product="A2")[1].blocks] == ["FlashAttentionScore"]


# -- one node -------------------------------------------------------------------------------------

Q, K = "float16[2,8,6,16]", "float16[2,4,9,16]"


def node(
    attrs: str = "",
    inputs: str = "q, k, v",
    more: str = "",
    outputs: str = "a, b, c, o",
    layout: str = "BNSD",
    q: str = Q,
    k: str = K,
) -> tuple[ir.Node, Any]:
    text = f"""
    <ir_version: 8, opset_import: ["" : 17, "ascend" : 1]>
    g({q} q, {k} k, {k} v{more}) => ({q} o)
    {{ {outputs} = ascend.FlashAttentionScore<head_num = 8, input_layout = "{layout}"{attrs}>({inputs}) }}"""
    parsed = ir.from_proto(onnx.parser.parse_model(text))
    remember_versions(parsed)
    return next(iter(parsed.graph)), analyse(parsed)


def test_groups_of_heads() -> None:
    call = prompt.as_prompt(*node())
    assert (call.attrs["num_heads"], call.attrs["num_key_value_heads"]) == (8, 4)
    flat = prompt.as_prompt(*node(layout="BSH", q="float16[2,6,128]", k="float16[2,9,64]"))
    assert flat.attrs["num_key_value_heads"] == 4
    equal = prompt.as_prompt(*node(k="float16[2,8,9,16]"))
    assert equal.attrs["num_key_value_heads"] == 0


def test_attributes() -> None:
    mask = ", bool[2048,2048] m"
    band = prompt.as_prompt(
        *node(", sparse_mode = 4, pre_tockens = 3, next_tockens = 1, inner_precise = 2", "q, k, v, , , , m", mask)
    )
    names = ("sparse_mode", "pre_tokens", "next_tokens", "inner_precise", "scale_value")
    assert [band.attrs[name] for name in names] == [4, 3, 1, 2, 1.0]
    assert sorted(band.inputs) == ["atten_mask", "key", "query", "value"]
    unmasked = prompt.as_prompt(*node(", sparse_mode = 4, pre_tockens = 3, next_tockens = 1"))
    assert [unmasked.attrs[name] for name in names[:3]] == [0, 2147483647, 2147483647]
    causal = prompt.as_prompt(*node(", sparse_mode = 2", "q, k, v, , , , m", mask))
    assert [causal.attrs[name] for name in names[:3]] == [2, 2147483647, 2147483647]


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "dropout": ({"attrs": ", keep_prob = 0.5"}, "dropout"),
    "layout": ({"layout": "SBH", "q": "float16[6,2,128]", "k": "float16[9,2,128]"}, "layout is SBH"),
    "scaled bias": (
        {"attrs": ", scale_value = 0.5", "inputs": "q, k, v, m", "more": ", float16[2,8,6,9] m"},
        "pse_type 1",
    ),
    "prefix": ({"inputs": "q, k, v, , , , , m", "more": ", int64[2] m"}, "it has prefix"),
    "sink": ({"inputs": "q, k, v" + ", " * 14 + ", m", "more": ", float[8] m"}, "it has sink"),
    "a window beside a mask": (
        {"attrs": ", next_tockens = 0", "inputs": "q, k, v, , , , m", "more": ", bool[6,9] m"},
        "a window beside",
    ),
    "prefix mode": (
        {"attrs": ", sparse_mode = 5", "inputs": "q, k, v, , , , m", "more": ", bool[6,9] m"},
        "sparse_mode is 5",
    ),
    "open heads": ({"k": "float16[2,n,9,16]"}, "number of heads"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(case: str) -> None:
    changes, phrase = REFUSED[case]
    with pytest.raises(Decline, match=phrase):
        prompt.as_prompt(*node(**changes))


def test_statistics_that_are_read() -> None:
    given, info = node()
    reader = ir.node("Relu", [given.outputs[0]])
    assert given.graph is not None
    given.graph.append(reader)
    with pytest.raises(Decline, match="statistic 'a' is read"):
        prompt.as_prompt(given, info)


def test_what_is_emitted_is_legal() -> None:
    result, _ = fused(model())
    intermediate = ir.from_proto(result)
    remember_versions(intermediate)
    (made,) = [each for each in intermediate.graph if each.domain == "ascend"]
    assert verify(node_view(made, analyse(intermediate)), "310P") == []
