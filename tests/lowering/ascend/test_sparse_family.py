"""The sparse family as GE operators: through .air files and back, as single operators, and under the rules of both."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper

from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.schema import ModelDef
from fa_compiler.lowering.ascend.convert import to_ge
from fa_compiler.lowering.ascend.graph import Model, Op
from fa_compiler.lowering.ascend.single_op import check_text, from_json, to_json
from fa_compiler.op_registry import DOMAIN, NodeView, dtypes, full_attrs, get, infer, place_inputs, verify
from fa_compiler.passes import Options, analyse, fuse
from fa_compiler.passes.rewrite.node_view import node_view
from tests.op_registry import sparse_nodes
from tests.passes.running import run
from tools.ge_to_onnx import from_ge

OPERATORS = {
    "SparseFlashAttention": sparse_nodes.attention,
    "SparseFlashAttentionGrad": sparse_nodes.attention_grad,
    "LightningIndexer": sparse_nodes.indexer,
    "LightningIndexerGrad": sparse_nodes.indexer_grad,
    "SparseLightningIndexerGradKLLoss": sparse_nodes.indexer_loss,
}
CASES = [
    (name, layout, dtype) for name in OPERATORS for layout in ("BSND", "TND") for dtype in ("DT_FLOAT16", "DT_BF16")
]


def model_of(view: NodeView) -> onnx.ModelProto:
    """The node alone, its tensors the model's inputs, every output one of the model's."""
    spec = get(view.op_type)
    number = {name: dtypes.to_onnx(info.dtype) for name, info in view.inputs.items()}
    inputs = [helper.make_tensor_value_info(name, number[name], info.shape) for name, info in view.inputs.items()]
    found = {name: info for name, info in infer(view.op_type, view.inputs, view.attrs).items() if info.dtype}
    outputs = [
        helper.make_tensor_value_info(name, dtypes.to_onnx(info.dtype), info.shape) for name, info in found.items()
    ]
    names = place_inputs(spec, {name: name for name in view.inputs})
    node = helper.make_node(
        view.op_type,
        ["" if name is None else name for name in names],
        [name if name in found else "" for name in spec.output_names],
        name="node",
        domain=DOMAIN,
        **full_attrs(spec, view.attrs),
    )
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)])


def in_ge(name: str, layout: str, dtype: str) -> tuple[onnx.ModelProto, Model]:
    """A model of one node, and the same as a GE model that went through a file's bytes, after the loader's rules."""
    proto = model_of(OPERATORS[name](layout=layout, dtype=dtype))
    written = serialise(to_ge(ir.from_proto(proto)))[0]
    assert check_message(ModelDef.FromString(written)) == []
    return proto, parse(written)


def the(model: Model, op_type: str) -> Op:
    (op,) = [op for op in model.root.ops if op.type == op_type]
    return op


@pytest.mark.parametrize(("name", "layout", "dtype"), CASES)
def test_through_the_file_and_back(name: str, layout: str, dtype: str) -> None:
    proto, model = in_ge(name, layout, dtype)
    again = from_ge(model)
    (node,) = [node for node in again.graph.node if node.domain == DOMAIN]
    (original,) = proto.graph.node
    assert list(node.input) == list(original.input)
    assert len(node.output) >= len([name for name in original.output if name])
    wanted = {attr.name: helper.get_attribute_value(attr) for attr in original.attribute}
    assert {attr.name: pytest.approx(helper.get_attribute_value(attr)) for attr in node.attribute} == wanted
    ends = {value.name: value.type for value in again.graph.output}
    assert list(ends.values()) == [value.type for value in proto.graph.output]


@pytest.mark.parametrize(("name", "layout", "dtype"), CASES)
def test_as_a_single_operator(name: str, layout: str, dtype: str) -> None:
    op = the(in_ge(name, layout, dtype)[1], name)
    entry = to_json(op, op.name)
    assert check_text(json.dumps([entry]).encode()) == []
    again, _ = from_json(entry)
    assert to_json(again, op.name) == entry
    given = [desc.name for desc in again.input_descs]
    assert given == list(get(name).input_names)[: len(given)]


def test_the_reordered_gradient_is_read_by_name() -> None:
    """SparseFlashAttentionGrad of 2026 has its inputs in another order; a node here has that of 2025-12."""
    proto, model = in_ge("SparseFlashAttentionGrad", "TND", "DT_BF16")
    op = the(model, "SparseFlashAttentionGrad")
    places = {desc.name: place for place, desc in enumerate(op.input_descs)}
    order = [places[name] for name in get(op.type, "opdef_2026_reordered").input_names if name in places]
    assert order != sorted(order)
    op.inputs, op.input_descs = [op.inputs[place] for place in order], [op.input_descs[place] for place in order]
    again = from_ge(parse(serialise(model)[0]))
    (node,) = [node for node in again.graph.node if node.domain == DOMAIN]
    assert list(node.input) == list(proto.graph.node[0].input)


CASTS = (
    "low32 = Constant<value=float {-inf}>() low = Cast<to=10>(low32) two = Constant<value=int64[1] {2}>() "
    "scale32 = Constant<value=float {0.0625}>() scale = Cast<to=10>(scale32) heads = Constant<value=int64[1] {1}>() "
    "values, idx = TopK<axis=-1>(i, two) shape = Shape(i) of_list = Shape(idx) "
)
MASK = (
    "ones = ConstantOfShape<value=float[1] {1.0}>(shape) zeros = ConstantOfShape<value=float[1] {0.0}>(of_list) "
    "all = Cast<to=9>(ones) none = Cast<to=9>(zeros) hidden = ScatterElements<axis=-1>(all, idx, none) "
)
ROWS_FIRST = (
    "k3 = Squeeze(k, heads) e3 = Squeeze(e, heads) qt = Transpose<perm=[0,2,1,3]>(q) "
    "et = Transpose<perm=[0,2,1,3]>(qe) "
)
MODELS = {
    "masked": CASTS
    + MASK
    + "kt = Transpose<perm=[0,1,3,2]>(k) s0 = MatMul(q, kt) s = Mul(s0, scale) u = Unsqueeze(hidden, heads) "
    "x = Where(u, low, s) p = Softmax<axis=-1>(x) y = MatMul(p, k) ",
    "two_products": CASTS
    + MASK
    + ROWS_FIRST
    + 's1 = Einsum<equation="bshc,btc->bsht">(qt, k3) s2 = Einsum<equation="bshr,btr->bsht">(et, e3) s3 = Add(s1, s2) '
    "s = Mul(s3, scale) u = Unsqueeze(hidden, two) x = Where(u, low, s) p = Softmax<axis=-1>(x) "
    'yt = Einsum<equation="bsht,btc->bshc">(p, k3) y = Transpose<perm=[0,2,1,3]>(yt) ',
    "gathered": CASTS
    + ROWS_FIRST
    + "last = Constant<value=int64[1] {-1}>() at = Unsqueeze(idx, last) kg = GatherND<batch_dims=1>(k3, at) "
    "eg = GatherND<batch_dims=1>(e3, at) "
    's1 = Einsum<equation="bshc,bskc->bshk">(qt, kg) s2 = Einsum<equation="bshr,bskr->bshk">(et, eg) s3 = Add(s1, s2) '
    "s = Mul(s3, scale) p = Softmax<axis=-1>(s) "
    'yt = Einsum<equation="bshk,bskc->bshc">(p, kg) y = Transpose<perm=[0,2,1,3]>(yt) ',
}


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_goes_to_ge_and_back(name: str) -> None:
    """Keys and values one latent of 512, beside it 64 for positions, in float16: what the products have."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float16[1,4,5,512] q, float16[1,1,7,512] k, float16[1,4,5,64] qe, '
        "float16[1,1,7,64] e, float[1,5,7] i) => (float16[1,4,5,512] y) {" + MODELS[name] + "}"
    )
    fused = ir.from_proto(proto)
    report = fuse(fused, Options("ascend", assume=frozenset({"no-empty-rows"})))
    assert [block.op for block in report.blocks] == ["SparseFlashAttention"]
    (node,) = [node for node in fused.graph if node.domain == DOMAIN]
    assert verify(node_view(node, analyse(fused)), "A2") == []
    written = serialise(to_ge(fused))[0]
    assert check_message(ModelDef.FromString(written)) == []
    again = from_ge(parse(written))
    assert sorted(node.op_type for node in again.graph.node if node.domain == DOMAIN) == ["SparseFlashAttention"]
    rng = np.random.default_rng(2)
    feeds = {
        value.name: rng.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        )
        for value in proto.graph.input
    }
    found = run(again, {value.name: feeds[value.name] for value in again.graph.input})[0]
    np.testing.assert_array_equal(found, run(ir.to_proto(fused), feeds)[0])
    np.testing.assert_allclose(found, run(proto, feeds)[0], rtol=2e-2, atol=4e-3)  # scores rounded to float16 there


def test_other_sizes_are_left_to_flash_attention() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float16[1,4,5,64] q, float16[1,1,7,64] k, float[1,5,7] i) => '
        "(float16[1,4,5,64] y) {" + MODELS["masked"] + "}"
    )
    report = fuse(ir.from_proto(proto), Options("ascend", assume=frozenset({"no-empty-rows"})))
    assert [block.op for block in report.blocks] == ["FlashAttentionScore"]
