"""The fused nodes of a model as single GE operators, for `atc --singleop`."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.graph import Op
from fa_compiler.op_registry import DOMAIN
from fa_compiler.passes.ir.nodes import all_nodes, constant
from fa_compiler.passes.values.shapes import ShapeInfo

SMALL = 1 << 13
"""Constants of up to this many elements keep their content, such as lengths that an operator reads at compile time."""


def fused_ops(model: ir.Model, info: ShapeInfo) -> list[Op]:
    """The nodes of our domain as GE operators, in order."""
    found = []
    for node in all_nodes(model.graph):
        if node.domain != DOMAIN:
            continue
        try:
            graphs = to_ge(_alone(node, info, model)).graphs
        except UnmappedError:
            continue
        found += [op for graph in graphs for op in graph.ops if op.type == node.op_type]
    return found


def _alone(node: ir.Node, info: ShapeInfo, model: ir.Model) -> ir.Model:
    """A model of one node."""
    values: dict[ir.Value, ir.Value] = {}
    for value in node.inputs:
        if value is not None and value not in values:
            values[value] = _copy(value, info)
    initializers = [value for value in values.values() if value.const_value is not None]
    outputs = [_copy(value, info, content=False) for value in node.outputs]
    alone = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else values[value] for value in node.inputs],
        list(node.attributes.values()),
        outputs=outputs,
        name=node.name,
    )
    graph = ir.Graph(
        [value for value in values.values() if value.const_value is None],
        outputs,
        nodes=[alone],
        initializers=initializers,
        opset_imports=dict(model.opset_imports),
        name="alone",
    )
    return ir.Model(graph, ir_version=model.ir_version)


def _copy(value: ir.Value, info: ShapeInfo, content: bool = True) -> ir.Value:
    shape, dtype = info.shape(value), info.dtype(value)
    copy = ir.Value(name=value.name)
    if shape is not None:
        copy.shape = ir.Shape([size.const for size in shape])
    if dtype is not None:
        copy.type = ir.TensorType(dtype)
    array = constant(value, SMALL) if content else None
    if array is not None:
        copy.const_value = ir.tensor(array, name=value.name)
    return copy
