"""Outputs that depend on constants only. ATC's parser makes its graph of what is connected with an
input, drops the rest without a word, and moves the following outputs up. The same holds of a branch
of an If, whose inputs are the values that it reads from outside. An initializer or a Constant as an
output is kept, and so is a node without inputs.

| the output is | becomes |
| --- | --- |
| made by a node, of constants only | a constant with the value that ONNX Runtime computes |
| made by a node, of random numbers only | refused: it has no value |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.errors import problem_at
from fa_compiler.passes.ir.nodes import (
    RANDOM,
    STANDARD,
    all_graphs,
    makers_of,
    outputs_of,
    reached,
    subgraphs,
    takes_initializers,
    values_read,
)
from fa_compiler.passes.ir.surgery import replace_value, sweep


def fold(model: ir.Model, origins: Mapping[ir.Node, ir.Node]) -> list[str]:
    """Replace the outputs of constants by their values, in place; returns the problems of those
    that have none. A problem of a new node names the node of the model that it stands for, which
    `origins` holds."""
    problems = []
    for graph in all_graphs(model):
        connected = _connected(graph)
        for output in list(graph.outputs):
            nodes = _hanging(graph, output, connected)
            if not nodes:
                continue
            maker = nodes[-1]
            if any(node.op_type in RANDOM or node.domain not in STANDARD for node in nodes):
                sentence = f"the output '{output.name}' depends on no input of the graph, so ATC drops it; leave it out"
                problems.append(problem_at(origins.get(maker, maker), sentence))
                continue
            try:
                value = _computed(nodes, output, model)
            except Exception as error:  # ONNX Runtime's own, which share no class
                sentence = f"the output '{output.name}' depends on constants only, and ONNX Runtime does not compute it"
                problems.append(
                    problem_at(
                        origins.get(maker, maker),
                        f"{sentence} ({' '.join(str(error).split())[:100]})",
                    )
                )
                continue
            _replace(graph, output, value)
            sweep(graph, [maker])
    return problems


def _connected(graph: ir.Graph) -> set[ir.Node]:
    """The nodes of a sorted graph that depend on an input of it, or on a value from outside."""
    weights = set(graph.initializers.values())
    found: set[ir.Node] = set()
    for node in graph:
        for value in _read(node):
            source = value.producer()
            if source in found or (
                value not in weights and (source is None or source.graph is not graph)
            ):
                found.add(node)
                break
    return found


def _hanging(graph: ir.Graph, output: ir.Value, connected: set[ir.Node]) -> list[ir.Node]:
    """The nodes that compute an output of a graph, in order; none if it is kept, because it depends
    on an input of the graph or is the result of a node without inputs."""
    maker = output.producer()
    if maker is None or maker.graph is not graph or not maker.inputs or maker in connected:
        return []
    found = set(reached([maker], lambda node: makers_of(_read(node))))
    return [node for node in graph if node in found]


def _read(node: ir.Node) -> list[ir.Value]:
    """What a node reads of the graph that it is in and of those around it."""
    bodies = reached(
        subgraphs(node), lambda body: [inner for reader in body for inner in subgraphs(reader)]
    )
    own = {
        value
        for body in bodies
        for value in (*body.inputs, *body.initializers.values(), *outputs_of(body))
    }
    return [value for value in values_read(node) if value not in own]


def _computed(nodes: list[ir.Node], output: ir.Value, model: ir.Model) -> np.ndarray:
    """The value of an output, by ONNX Runtime without optimisations."""
    import onnxruntime as ort  # few models have such an output

    read = {value: None for node in nodes for value in _read(node)}
    weights = [
        value.const_value
        for value in read
        if value.producer() is None and value.const_value is not None
    ]
    graph = onnx.GraphProto(name="constants")
    graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
    graph.initializer.extend(
        ir.serde.serialize_tensor(ir.tensor(tensor.numpy(), tensor.dtype, name=tensor.name))
        for tensor in weights
    )
    graph.output.add(name=output.name or "")
    imports = [
        onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()
    ]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (value,) = session.run([output.name], {})
    return np.asarray(value)


def _replace(graph: ir.Graph, output: ir.Value, array: np.ndarray) -> None:
    """Make an output of a graph a constant of the same name."""
    tensor = ir.tensor(array)
    if takes_initializers(graph):
        value = ir.Value(
            const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
        )
        replace_value(output, value)
        tensor.name = value.name
        graph.register_initializer(value)
        return
    node = ir.node("Constant", [], {"value": tensor}, name=f"{output.name}_constant")
    graph.insert_before(next(iter(graph)), node)
    replace_value(output, node.outputs[0])
