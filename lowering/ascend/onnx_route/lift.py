"""Raises a model of opset 8 or 9 with a TopK to opset 10: ATC's plugin writes the k of an older
TopK wrongly.

| operator | becomes |
| --- | --- |
| TopK | the same with k as input |
| Slice | the same with starts, ends and axes as inputs |
| BatchNormalization | the same without spatial; refused if spatial is 0 |
| Upsample | refused: opset 10 does not have it |

Every other operator of the parser has the same meaning in opset 8, 9 and 10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.errors import problem_at
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import STANDARD, all_graphs, all_nodes, any_op, int_attr, ints_attr

LIFTED = 10
"""The opset whose TopK has k as an input, and whose Slice has its bounds as inputs."""


def needs_lift(model: ir.Model, source: int) -> bool:
    """Whether the model has a TopK of an older opset."""
    return source < LIFTED and any_op(all_nodes(model.graph), "TopK")


def lift(model: ir.Model) -> list[str]:
    """Raise the model to opset 10, in place; returns the problems of nodes that cannot be
    raised."""
    nodes = [node for node in all_nodes(model.graph) if node.domain in STANDARD]
    why = "the model has a TopK of opset 8 or 9, which ATC's plugin writes wrongly; export with opset 10 or newer"
    problems = [
        problem_at(node, f"{why}: opset 10 does not have this node")
        for node in nodes
        if node.op_type == "Upsample"
        or (node.op_type == "BatchNormalization" and not int_attr(node, "spatial", 1))
    ]
    if problems:
        return problems
    names = Names.of(all_graphs(model))
    for node in nodes:
        if node.op_type == "TopK":
            _as_inputs(node, [[int_attr(node, "k", 1)]], names)
        elif node.op_type == "Slice":
            starts, ends = (ints_attr(node, name, ()) for name in ("starts", "ends"))
            _as_inputs(node, [starts, ends, ints_attr(node, "axes", range(len(starts)))], names)
        for name in (
            ("k", "starts", "ends", "axes") if node.op_type in ("TopK", "Slice") else ("spatial",)
        ):
            node.attributes.pop(name, None)
    model.opset_imports[""] = LIFTED
    for node in nodes:
        node.version = None
    return []


def _as_inputs(node: ir.Node, lists: Sequence[Sequence[int]], names: Names) -> None:
    assert node.graph is not None
    node.resize_inputs(1 + len(lists))
    for place, numbers in enumerate(lists, 1):
        tensor = ir.tensor(np.array(numbers, np.int64), name=names.new("fa_numbers"))
        made = ir.node("Constant", [], {"value": tensor}, name=tensor.name)
        value = made.outputs[0]
        value.name, value.dtype, value.shape = (
            f"{tensor.name}_output",
            ir.DataType.INT64,
            ir.Shape([len(numbers)]),
        )
        node.graph.insert_before(node, made)
        node.replace_input_with(place, value)
