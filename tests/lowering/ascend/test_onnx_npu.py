"""Attention as NPUPromptFlashAttention: what ATC's own plugin connects, that it means the same, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from fa_compiler.lowering.ascend.onnx_route import UnsupportedModel, lower
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from fa_compiler.lowering.ascend.onnx_route.npu import ATTRIBUTES, to_npu, to_prompts
from fa_compiler.passes import Options, fuse
from fa_compiler.reference import evaluator

Q, K = "float16[2,4,6,16]", "float16[2,2,9,16]"
TRIANGLE = np.triu(np.ones((2048, 2048), np.bool_), 1)


def model(
    attrs: str = "", inputs: str = "q, k, v", more: str = "", q: str = Q, k: str = K, op: str = ""
) -> onnx.ModelProto:
    heads = "num_heads" if "Prompt" in op else "head_num"
    outputs = "o" if "Prompt" in op else "a, b, c, o"
    layout = "BNSD" if q.count(",") == 3 else "SBH"
    text = f"""
    <ir_version: 8, opset_import: ["" : 17, "ascend" : 1]>
    g({q} q, {k} k, {k} v{more}) => ({q} o)
    {{ {outputs} = ascend.{op or "FlashAttentionScore"}
        <{heads} = 4, input_layout = "{layout}", scale_value = 0.25{attrs}>({inputs}) }}"""
    return onnx.parser.parse_model(text)


def converted(
    proto: onnx.ModelProto, *assume: str, product: str = "A2", triangle: bool = False
) -> tuple[onnx.ModelProto, onnx.NodeProto]:
    """The model as it goes to ATC, and its attention."""
    intermediate = ir.from_proto(proto)
    if triangle:
        value = next(value for value in intermediate.graph.inputs if value.name == "m")
        intermediate.graph.inputs.remove(value)
        value.const_value = ir.tensor(TRIANGLE, name="m")
        intermediate.graph.register_initializer(value)
    options = Options("ascend", product, None, frozenset(assume))
    to_prompts(intermediate, options)
    to_npu(intermediate, "empty-bias" in options.assume)
    lower(intermediate)
    result = ir.to_proto(intermediate)
    onnx.checker.check_model(result)
    assert check_model(result, None) == []
    (node,) = [node for node in result.graph.node if node.domain == "npu"]
    assert sorted(attr.name for attr in node.attribute) == sorted(ATTRIBUTES)
    return result, node


def attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}


def back(result: onnx.ModelProto) -> onnx.ModelProto:
    """The model as this package reads NPUPromptFlashAttention, by an importer that knows nothing of this route."""
    intermediate = ir.from_proto(result)
    report = fuse(intermediate, Options("ort"))
    assert [block.status for block in report.blocks] == ["fused"], report.blocks[0].reason
    return ir.to_proto(intermediate)


def same(proto: onnx.ModelProto, result: onnx.ModelProto) -> None:
    random = np.random.default_rng(1)
    feeds = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        if value.name == "m" and shape[-1] == 2048:
            feeds["m"] = TRIANGLE
        elif kind.elem_type == onnx.TensorProto.BOOL:
            feeds[value.name] = random.random(shape) < 0.3
        else:
            feeds[value.name] = random.normal(size=shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    (right,) = evaluator(proto).run(None, feeds)
    given = {name: feeds[name] for name in (value.name for value in result.graph.input)}
    (found,) = evaluator(back(result)).run(None, given)
    np.testing.assert_allclose(found.astype(np.float32), right.astype(np.float32), atol=4e-3)


def test_no_mask() -> None:
    proto = model()
    result, node = converted(proto)
    assert list(node.input) == ["q", "k", "v"]
    assert [(entry.domain, entry.version) for entry in result.opset_import] == [("", 17), ("npu", 1)]
    found = attributes(node)
    assert (found["num_heads"], found["num_key_value_heads"]) == (4, 2)
    assert (found["pre_tokens"], found["next_tokens"], found["sparse_mode"]) == (2147483647, 2147483647, 0)
    same(proto, result)


def test_a_mask_needs_the_users_word() -> None:
    proto = model(inputs="q, k, v, , , , m", more=", bool[2,1,6,9] m", attrs=", sparse_mode = 1")
    with pytest.raises(UnsupportedModel, match="empty-bias"):
        converted(proto)
    result, node = converted(proto, "empty-bias")
    assert len(node.input) == 5
    (bias,) = [tensor for tensor in result.graph.initializer if tensor.name == node.input[3]]
    assert (bias.data_type, list(bias.dims)) == (onnx.TensorProto.FLOAT16, [0])
    same(proto, result)


def test_a_band() -> None:
    proto = model(
        inputs="q, k, v, , , , m",
        more=", bool[2048,2048] m",
        attrs=", sparse_mode = 4, pre_tockens = 2, next_tockens = 1",
    )
    result, node = converted(proto, "empty-bias", triangle=True)
    found = attributes(node)
    assert (found["pre_tokens"], found["next_tokens"], found["sparse_mode"]) == (2, 1, 4)
    same(proto, result)


def test_a_bias_gets_a_mask_of_nothing() -> None:
    proto = model(inputs="q, k, v, m", more=", float16[1,4,6,9] m", attrs=", pse_type = 0")
    result, node = converted(proto)
    (mask,) = [tensor for tensor in result.graph.initializer if tensor.name == node.input[4]]
    assert (mask.data_type, list(mask.dims)) == (onnx.TensorProto.BOOL, [6, 9])
    assert not onnx.numpy_helper.to_array(mask).any()
    assert attributes(node)["sparse_mode"] == 1
    same(proto, result)


@pytest.mark.parametrize(("batch", "turned"), [(1, False), (2, False), (2, True)])
def test_a_bias_of_one_row_is_repeated(batch: int, turned: bool) -> None:
    """As that of a padding mask: PromptFlashAttention takes a row for each row of the query only."""
    shapes = {"q": "float16[6,2,64]", "k": "float16[9,2,32]"} if turned else {}
    proto = model(inputs="q, k, v, m", more=f", float16[{batch},4,1,9] m", attrs=", pse_type = 0", **shapes)
    result, _ = converted(proto)
    assert [node.op_type for node in result.graph.node].count("Expand") == 1
    same(proto, result)


def test_the_batch_comes_first() -> None:
    proto = model(q="float16[6,2,64]", k="float16[9,2,32]")
    result, node = converted(proto)
    assert attributes(node)["input_layout"] == b"BSH"
    assert [entry.op_type for entry in result.graph.node].count("Transpose") == 4
    same(proto, result)


def test_float32_needs_the_users_word() -> None:
    proto = model(q="float[2,4,6,16]", k="float[2,2,9,16]")
    with pytest.raises(UnsupportedModel, match="half-attention"):
        converted(proto)
    result, _ = converted(proto, "half-attention")
    assert [node.op_type for node in result.graph.node].count("Cast") == 4
    same(proto, result)


def test_prompt_attention_is_written_as_it_is() -> None:
    proto = model(
        ", num_key_value_heads = 2, pre_tokens = 2147483647, next_tokens = 2147483647", op="PromptFlashAttention"
    )
    _, node = converted(proto)
    assert list(node.input) == ["q", "k", "v"]


REFUSED: dict[str, tuple[onnx.ModelProto, str]] = {
    "dropout": (model(", keep_prob = 0.5"), "dropout"),
    "open heads": (model(k="float16[2,n,9,16]"), "the number of heads"),
    "head sizes": (model(q="float16[2,4,6,24]", k="float16[2,2,9,24]"), "PFA.9"),
    "another operator": (
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17, "ascend" : 1]> g(float16[2,4,1,16] q, float16[2,4,9,16] k) => '
            "(float16[2,4,1,16] o) { o = ascend.IncreFlashAttention<num_heads = 4>(q, k, k) }"
        ),
        "no plugin for it that works",
    ),
    "open sizes": (
        model(inputs="q, k, v, m", more=", float16[1,4,S,9] m", attrs=", pse_type = 0", q="float16[2,4,S,16]"),
        "a mask needs known sizes",
    ),
    "quantised": (
        model(inputs="q, k, v, , , , , , , s", more=", float[1] s", op="PromptFlashAttention"),
        "which this route cannot write",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(case: str) -> None:
    proto, phrase = REFUSED[case]
    with pytest.raises(UnsupportedModel) as error:
        converted(proto)
    (problem,) = error.value.problems
    assert phrase in problem
    assert problem.startswith(("a (ascend.", "o (ascend.", "fa_PromptFlashAttention (ascend."))
