"""A GE graph as an ONNX model.

A Data becomes an input of the same name. The inputs of the NetOutput become outputs with the names `output_0` and so
on. The declared types and shapes of tensors become value_info: ONNX's strict shape inference then compares them with
the inferred ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from fa_compiler.lowering.ascend.air.slots import PARENT_INDEX
from fa_compiler.lowering.ascend.convert.backward import OPSET
from fa_compiler.lowering.ascend.convert.backward.ge_call import onnx_type
from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.lowering.ascend.graph import Graph, Model, Op, TensorDesc, Weight, known_sizes
from fa_compiler.op_registry import DOMAIN, VERSION
from fa_compiler.op_registry.spec import Kind
from tools.ge_to_onnx.call import DeclaredCall, NodeCollector, tensor_proto
from tools.ge_to_onnx.meanings import HANDLERS

_IR_VERSION = 9


def from_ge(model: Model) -> onnx.ModelProto:
    """An ONNX model with the same results as the GE graph, in opset 20 and the domain "ascend".

    Raises:
        UnreadableError: an operator, an attribute or an edge has no meaning in ONNX.
    """
    graphs = {graph.name: graph for graph in model.graphs}
    reader = _GraphReader(graphs)
    proto = reader.graph(model.root, "", {})
    return helper.make_model(
        proto,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=_IR_VERSION,
        producer_name="fa_compiler",
    )


class _GraphReader:
    def __init__(self, graphs: Mapping[str, Graph]) -> None:
        self._graphs = graphs

    def graph(self, graph: Graph, prefix: str, outer: Mapping[int, str]) -> onnx.GraphProto:
        """One graph. `outer` are the tensors of the outer graph, by the index of the input that passes them in."""
        collector = NodeCollector(prefix)
        tensors: dict[tuple[str, int], str] = {}
        constants: dict[str, Weight] = {}
        initializers: list[onnx.TensorProto] = []
        inputs: list[tuple[int, onnx.ValueInfoProto]] = []
        infos: list[onnx.ValueInfoProto] = []
        end: Op | None = None
        for op in _sorted(graph):
            if op.type == "Data":
                if prefix:
                    tensors[op.name, 0] = outer[_integer(op, PARENT_INDEX)]
                    continue
                tensors[op.name, 0] = op.name
                inputs.append((_integer(op, "index"), _info(op.name, op.output_descs[0])))
            elif op.type in ("Const", "Constant"):
                weight = op.attrs["value"].value
                if not isinstance(weight, Weight):
                    raise UnreadableError(f"constant '{op.name}' has no value")
                name = tensors[op.name, 0] = collector.fresh(op.name)
                constants[name] = weight
                initializers.append(tensor_proto(weight, name))
            elif op.type == "NetOutput":
                end = op
            else:
                given = ["" if source is None else tensors[source.op, source.index] for source in op.inputs]
                made = self._op(op, given, collector, constants)
                for index, (name, desc) in enumerate(zip(made, op.output_descs, strict=True)):
                    tensors[op.name, index] = name
                    if name:
                        infos.append(_info(name, desc))
        if end is None:
            raise UnreadableError(f"graph '{graph.name}' has no NetOutput")
        outputs = []
        for index, (source, desc) in enumerate(zip(end.inputs, end.input_descs, strict=True)):
            if source is None:
                raise UnreadableError(f"output {index} of graph '{graph.name}' is not connected")
            name = f"{prefix}output_{index}"
            collector.nodes.append(helper.make_node("Identity", [tensors[source.op, source.index]], [name]))
            outputs.append(_info(name, desc))
        ordered = [info for _, info in sorted(inputs, key=lambda item: item[0])]
        return helper.make_graph(collector.nodes, graph.name, ordered, outputs, initializers, value_info=infos)

    def _op(
        self, op: Op, inputs: Sequence[str], collector: NodeCollector, constants: Mapping[str, Weight]
    ) -> Sequence[str]:
        if op.type == "If":
            return self._branches(op, inputs, collector)
        handler = HANDLERS.get(op.type)
        if handler is None:
            raise UnreadableError(f"operator '{op.name}' of type {op.type} has no meaning in ONNX here")
        call = DeclaredCall(op, inputs, collector, constants)
        made = handler(call)
        call.finish()
        names = [made] if isinstance(made, str) else list(made)
        declared = len(op.output_descs)
        if call.spec.outputs[-1:] and call.spec.outputs[-1].kind is Kind.DYNAMIC and len(names) != declared:
            raise UnreadableError(f"{op.type} '{op.name}' has {declared} outputs, its attributes say {len(names)}")
        return [*names, *[""] * (len(op.output_descs) - len(names))]

    def _branches(self, op: Op, inputs: Sequence[str], collector: NodeCollector) -> Sequence[str]:
        """The If node. A branch reads tensors of the outer graph by name; its Data are only other names for them."""
        branches = {}
        for name in ("then_branch", "else_branch"):
            graph = self._graphs.get(op.subgraphs.get(name, ""))
            if graph is None:
                raise UnreadableError(f"If '{op.name}' has no {name}")
            branches[name] = self.graph(graph, collector.fresh(name) + "/", dict(enumerate(inputs)))
        if op.input_descs[0].shape != ():
            raise UnreadableError(f"If '{op.name}': its condition is not a scalar; GE treats it as true unless empty")
        return collector.node("If", [inputs[0]], len(op.output_descs), "", op.name, branches)


def _sorted(graph: Graph) -> list[Op]:
    """The operators in an order in which they can run."""
    names = {op.name for op in graph.ops}
    for op in graph.ops:
        if lost := [name for name in op.sources if name not in names]:
            raise UnreadableError(f"operator '{op.name}' reads '{lost[0]}', which is not in the graph")
    try:
        return graph.ordered()
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def _integer(op: Op, name: str) -> int:
    attr = op.attrs.get(name)
    if attr is None or not isinstance(attr.value, int):
        raise UnreadableError(f"{op.type} '{op.name}' has no {name}")
    return attr.value


def _info(name: str, desc: TensorDesc) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx_type(desc.dtype), known_sizes(desc.shape))
