"""The operators that talk to other ranks in `.air` files: their form, their order, and what the checker says."""

from __future__ import annotations

from itertools import pairwise

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.encode import encode
from fa_compiler.lowering.ascend.air.files import parse_message
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.graph import Attr, Model
from fa_compiler.op_registry import DOMAIN, hcom
from tools.ge_to_onnx import from_ge

FLOAT = onnx.TensorProto.FLOAT


def message(op_type: str, inputs: list[str], outputs: list[str], **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, domain=DOMAIN, name=op_type, group=hcom.WORLD, **attrs)


NODES = [
    message(hcom.ALL_GATHER, ["x"], ["a"], rank_size=2, fusion=0),
    message(hcom.ALL_TO_ALL, ["x"], ["b"]),
    message(hcom.SEND, ["b"], [], sr_tag=7, dest_rank=1),
    message(hcom.RECEIVE, [], ["c"], sr_tag=7, src_rank=1, shape=[2, 3], dtype=FLOAT),
    message(hcom.ALL_REDUCE, ["c"], ["d"], reduction="sum", fusion=0),
]


def converted(nodes: list[onnx.NodeProto], outputs: dict[str, list[int]], shape: tuple[int, ...] = (2, 3)) -> Model:
    x = helper.make_tensor_value_info("x", FLOAT, shape)
    ends = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], ends), opset_imports=imports, ir_version=10)
    return to_ge(ir.from_proto(model))


def test_form_and_order() -> None:
    """All shapes are inferred, control edges keep the order, and nothing is dropped: HcomSend has no reader at all, and
    the others no output of the model but the last."""
    model = converted(NODES, {"a": [4, 3], "d": [2, 3]})
    data, _ = serialise(model)
    assert check_message(parse_message(data)) == []
    model = parse(data)
    ops = {op.type: op for op in model.root.ops}
    chain = [ops[name] for name in (*(node.op_type for node in NODES), "NetOutput")]
    for before, after in pairwise(chain):
        assert after.controls == [before.name]
    assert [desc.shape for desc in ops["NetOutput"].input_descs] == [(4, 3), (2, 3)]
    assert ops[hcom.RECEIVE].attrs["dtype"] == Attr("Type", "DT_FLOAT")
    assert ops[hcom.RECEIVE].output_descs[0].dtype == "DT_FLOAT"
    assert ops[hcom.SEND].attrs["dest_rank"] == Attr("Int", 1)
    assert ops[hcom.ALL_REDUCE].attrs["fusion"] == Attr("Int", 0)


def test_back_to_onnx() -> None:
    """The nodes stay in the order of the control edges, also where the file has another one."""
    model = converted(NODES, {"a": [4, 3], "d": [2, 3]})
    model.root.ops.reverse()
    back = [node for node in from_ge(model).graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in back] == [node.op_type for node in NODES]
    for node, given in zip(back, NODES, strict=True):
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        assert attrs.items() >= {attr.name: helper.get_attribute_value(attr) for attr in given.attribute}.items()


def test_the_checker() -> None:
    def said(op_type: str, name: str, value: object) -> list[str]:
        model = converted(NODES, {"a": [4, 3], "d": [2, 3]})
        (op,) = model.root.of_type(op_type)
        op.attrs[name] = Attr(op.attrs[name].kind, value)  # type: ignore[arg-type]  # a value of this kind
        return [f"{entry.rule}: {entry.message}" for entry in check_message(encode(model))]

    assert said(hcom.ALL_GATHER, "rank_size", 0) == ["inference: rank_size is 0"]
    assert said(hcom.ALL_GATHER, "rank_size", 3)[0] == "declared: output y is declared [4, 3], but is [6, 3]"
    assert said(hcom.RECEIVE, "shape", [2, 4])[0] == "declared: output y is declared [2, 3], but is [2, 4]"


def test_what_hccl_does_not_take() -> None:
    with pytest.raises(UnmappedError, match="HcomAllReduce of GE does not take double as x"):
        converted(
            [
                helper.make_node("Cast", ["x"], ["d"], to=onnx.TensorProto.DOUBLE),
                message(hcom.ALL_REDUCE, ["d"], ["y"], reduction="sum"),
            ],
            {"y": [2, 3]},
        )
