"""The model's own operators behind a DequantizeLinear, put in front of it (dequantised.py).

What ONNX Runtime makes of them depends on what is around them. A Transpose is harmless, for example, where the
optimiser can push it through a Concat and remove it together with the one behind: then no quantisation is copied behind
it. A fused attention has no such Transpose. So the operators that an attention is computed from do not stay behind a
DequantizeLinear, even if they are not new. Where the opset of a model was raised, none of the model's do.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from fa_compiler.passes.build import Builder, Names
from fa_compiler.passes.dequantised import COPIED_BEHIND, dequantised
from fa_compiler.passes.nodes import data_readers, is_op, producer, reached, values_read
from fa_compiler.passes.surgery import replace_value, restore_order, sweep
from fa_compiler.passes.values.shapes import ShapeInfo

UNSAFE = (ir.DataType.INT8, ir.DataType.INT32)
"""The integers whose quantisation ONNX Runtime may copy wrongly."""


def put_in_front(nodes: Iterable[ir.Node], info: ShapeInfo, names: Names) -> None:
    """Put the operators among these nodes that move what a DequantizeLinear gives in front of it."""
    of_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        if is_op(node, *COPIED_BEHIND) and isinstance(node.graph, ir.Graph):
            of_graph.setdefault(node.graph, []).append(node)
    for graph, moving in of_graph.items():
        builder = Builder(graph, names, info)
        if moved := [node for node in moving if _put_in_front(node, builder)]:
            sweep(graph, [*moved, *builder.nodes])
            restore_order(graph)


def needed_by(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """The nodes that these nodes are computed from, each behind those that it is computed from."""

    def sources(node: ir.Node) -> list[ir.Node]:
        return [maker for value in values_read(node) if (maker := producer(value)) is not None]

    found = set(reached(nodes, sources))
    graphs = dict.fromkeys(node.graph for node in found if node.graph is not None)
    return [node for graph in graphs for node in graph if node in found]


def _put_in_front(node: ir.Node, builder: Builder) -> bool:
    """Put an operator in front of a DequantizeLinear, if the quantisation would be copied behind it. Says whether."""
    info, output = builder.info, node.outputs[0]
    found = dequantised(node.inputs[0], info)
    if found is None or info.dtype(found.integers) not in UNSAFE:
        return False
    named = output.is_graph_output()
    if not named and all(is_op(reader, "QuantizeLinear") for reader in data_readers(output)):
        return False
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    new = builder.op(node.op_type, node.inputs, info.dtype(output), attributes)
    replace_value(output, builder.alias(new) if named else new, rename=named)
    return True
