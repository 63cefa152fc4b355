"""The fused nodes of a model as single GE operators, for `atc --singleop`."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.lowering.ascend.convert.emit import Emitter, Names, Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward import HANDLERS, OnnxCall
from fa_compiler.lowering.ascend.convert.forward.onnx_call import type_of
from fa_compiler.lowering.ascend.graph import Graph, Op
from fa_compiler.op_registry import DOMAIN
from fa_compiler.passes.ir.nodes import all_nodes, name_of, opset
from fa_compiler.passes.values.shapes import ShapeInfo


def fused_ops(model: ir.Model, info: ShapeInfo) -> list[Op]:
    """The nodes of our domain as GE operators, in order."""
    return [
        op
        for node in all_nodes(model.graph)
        for op in _alone(node, info)
        if op.type == node.op_type
    ]


def _alone(node: ir.Node, info: ShapeInfo) -> list[Op]:
    """The operators that a node of our domain becomes, without their inputs; none if it has no
    counterpart."""
    handler = HANDLERS.get((DOMAIN, node.op_type))
    if node.domain != DOMAIN or handler is None:
        return []
    emitter = Emitter(Graph("alone"), Names())
    emitter.stem = name_of(node)
    try:
        types = [None if value is None else type_of(value, info) for value in node.inputs]
        inputs = [None if given is None else Tensor(given.dtype, given.shape) for given in types]
        handler(OnnxCall(node, emitter, inputs, info, opset(node)))
    except CannotMapError:
        return []
    return emitter.graph.ops
