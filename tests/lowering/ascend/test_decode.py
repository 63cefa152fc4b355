"""Decoding as GE has it: `.air` and --singleop of IncreFlashAttention, RingAttentionUpdate and AttentionUpdate.

Key and value are dynamic inputs, in GE key0, key1 and so on with value0 behind; in ONNX a node says by key_count and
value_count how many there are. What was written is read back as the same node, and gives the same bits.
"""

from __future__ import annotations

import json
from dataclasses import replace
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
from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ascend.graph import Model, Op
from fa_compiler.lowering.ascend.single_op import check_text, from_json, to_json
from fa_compiler.op_registry import DOMAIN, VERSION, count_attrs, full_attrs, get, place_inputs
from tests.lowering.decoding import OP, Form, Inputs
from tests.passes.attention_ops.test_npu import inference
from tests.passes.rewrite.test_paging import POOLS, Paged
from tests.passes.running import Array, assert_same, fused, run
from tools.ge_to_onnx import from_ge

HALF = Form("BNSD", "float16")
FORMS = {
    "one tensor": HALF,
    "a list": replace(HALF, storage="list", lists=(40, 8)),
    "pages": replace(HALF, storage="pages"),
    "pages by head": replace(HALF, storage="pages_by_head"),
    "int8 caches": replace(HALF, layout="BSH", int8_cache=True),
    "int8 pages": replace(HALF, layout="BSND", storage="pages", int8_cache=True),
}
MORE: dict[str, Inputs] = {
    "": {},
    "lengths": {"actual_seq_lengths": np.array([17, 8], np.int64)},
    "a mask": {"atten_mask": np.arange(128).reshape(2, 1, 1, 64) % 3 == 0},
    "quantised": {"quant_scale2": np.array([20.0], np.float32), "quant_offset2": np.array([3.0], np.float32)},
}


def node_model(op_type: str, inputs: Inputs, attrs: dict[str, Any], outputs: dict[str, int]) -> onnx.ModelProto:
    """A model of one node, the sizes of its inputs declared; `outputs` with their types."""
    spec = get(op_type)
    placed = place_inputs(spec, inputs)
    names = ["" if each is None else f"in{index}" for index, each in enumerate(placed)]
    given = {name: np.asarray(each) for name, each in zip(names, placed, strict=True) if each is not None}
    node = helper.make_node(op_type, names, list(outputs), name=op_type, domain=DOMAIN)
    every = {**full_attrs(spec, attrs), **count_attrs(spec, inputs)}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in every.items())
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
    ]
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph([node], "g", declared, results)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, ir_version=8, opset_imports=imports)


def feeds_of(op_type: str, inputs: Inputs) -> dict[str, Array]:
    placed = place_inputs(get(op_type), inputs)
    return {f"in{index}": np.asarray(each) for index, each in enumerate(placed) if each is not None}


def through_ge(model: onnx.ModelProto) -> tuple[Model, onnx.ModelProto]:
    """The GE graph, and what is read out of its file, which breaks no rule of the loader."""
    graph = to_ge(ir.from_proto(model))
    data, _ = serialise(graph)
    found = [str(each) for each in check_message(parse_message(data)) if each.severity is not Severity.NOTE]
    assert found == []
    return graph, from_ge(parse(data))


def check_single_op(op: Op) -> None:
    """The operator by hand: written, without a diagnostic, and read back."""
    entry = to_json(op, "one")
    assert [str(each) for each in check_text(json.dumps([entry]).encode())] == []
    again, _ = from_json(entry)
    assert [desc.name for desc in again.input_descs] == [desc.name for desc in op.input_descs]
    assert [(desc.dtype, desc.shape) for desc in again.output_descs] == [
        (desc.dtype, desc.shape) for desc in op.output_descs
    ]
    assert {name: attr.value for name, attr in again.attrs.items()} == {
        name: attr.value for name, attr in op.attrs.items()
    }


def check_same(model: onnx.ModelProto, op_type: str, feeds: dict[str, Array]) -> Op:
    """Written, read and run: the same bits. Returns GE's operator."""
    graph, back = through_ge(model)
    op = next(graph.root.of_type(op_type))
    check_single_op(op)
    again = dict(zip([value.name for value in back.graph.input], feeds.values(), strict=True))
    for got, wanted in zip(run(back, again), run(model, feeds), strict=True):
        np.testing.assert_array_equal(got, wanted)
    return op


@pytest.mark.parametrize(
    ("name", "more"),
    # INT8 results of lists are told apart by no type that ONNX Runtime asks for: see op_registry/cpu_kernel.py.
    [(name, more) for name in FORMS for more in MORE if (name, more) != ("a list", "quantised")],
)
def test_incre_flash_attention(name: str, more: str) -> None:
    form = FORMS[name]
    inputs = form.inputs(np.random.default_rng(0)) | MORE[more]
    kind = onnx.TensorProto.INT8 if "quant_scale2" in inputs else onnx.TensorProto.FLOAT16
    model = node_model(OP, inputs, form.all_attrs, {"out": kind})
    op = check_same(model, OP, feeds_of(OP, inputs))
    count = len(form.lists) or 1
    names = [desc.name for desc in op.input_descs]
    assert names[: 1 + 2 * count] == ["query", *(f"{part}{n}" for part in ("key", "value") for n in range(count))]


def test_ring_attention_update() -> None:
    rng = np.random.default_rng(1)
    inputs: Inputs = {}
    for part in ("prev", "cur"):
        inputs[f"{part}_attn_out"] = rng.normal(size=(6, 2, 64)).astype(np.float16)
        for word in ("max", "sum"):
            numbers = rng.uniform(1, 2, (2, 1, 6, 1)).astype(np.float32)
            inputs[f"{part}_softmax_{word}"] = numbers.repeat(8, axis=-1)
    outputs = {
        "attn_out": onnx.TensorProto.FLOAT16,
        "softmax_max": onnx.TensorProto.FLOAT,
        "softmax_sum": onnx.TensorProto.FLOAT,
    }
    op_type = "RingAttentionUpdate"
    check_same(node_model(op_type, inputs, {}, outputs), op_type, feeds_of(op_type, inputs))


@pytest.mark.parametrize("count", [1, 3])
def test_attention_update(count: int) -> None:
    rng = np.random.default_rng(2)
    inputs: Inputs = {
        "lse": [rng.normal(size=24).astype(np.float32) for _ in range(count)],
        "go": [rng.normal(size=(24, 16)).astype(np.float32) for _ in range(count)],
    }
    op_type = "AttentionUpdate"
    model = node_model(op_type, inputs, {"update_type": 0, "sp": count}, {"output": onnx.TensorProto.FLOAT})
    op = check_same(model, op_type, feeds_of(op_type, inputs))
    assert [desc.name for desc in op.input_descs] == [f"{p}{n}" for p in ("lse", "go") for n in range(count)]


@pytest.mark.parametrize("pool", POOLS)
def test_pages_of_a_model(pool: str) -> None:
    """A fused decode step for a product: block table and lengths are computed in the graph, or its inputs."""
    case = Paged(pool, "flattened", groups=3, infinite=True, real="float16", table="int32")
    model, _ = fused(case.model(), "ascend", ("no-empty-rows",))
    feeds = {name: each.astype(np.float16) if each.dtype == np.float32 else each for name, each in case.feeds().items()}
    graph, back = through_ge(model)
    op = next(graph.root.of_type(OP))
    assert {"block_table", "actual_seq_lengths"} <= {desc.name for desc in op.input_descs if not desc.is_absent}
    assert {"SoftmaxV2", "BatchMatMulV2", "BatchMatMul"}.isdisjoint(each.type for each in graph.root.ops)
    assert all(len(each.output_descs[0].shape or ()) < 2 for each in graph.root.of_type("GatherV2"))
    order = [value.name for value in model.graph.input]
    again = {value.name: feeds[name] for value, name in zip(back.graph.input, order, strict=True)}
    np.testing.assert_array_equal(run(back, again)[0], run(model, feeds)[0])


def test_lengths_that_are_an_input_of_the_model() -> None:
    """NPUIncreFlashAttention with a mask and lengths, read back."""
    features = {"mask": ("B T", np.arange(12).reshape(2, 6) % 4 == 1), "klen": ("B", np.array([2, 6]))}
    operator = replace(inference("NPUIncreFlashAttention", **features), dtype="float16")
    feeds = operator.feeds()
    model, _ = fused(operator.model(feeds), "ascend")
    _, back = through_ge(model)
    again = dict(zip([value.name for value in back.graph.input], feeds.values(), strict=True))
    assert_same(run(back, again)[0], run(model, feeds)[0], 0.0)
