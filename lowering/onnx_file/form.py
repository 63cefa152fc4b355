"""The form that fused nodes have in files for ONNX Runtime.

In the graph a FlashAttentionScore has the outputs of its prototype: softmax_max, softmax_sum,
softmax_out and attention_out, of which an inference model needs the last one. Written as ONNX that
is ['', '', '', out]. Many tools know a node by its first output (ONNX Runtime's symbolic shape
inference, the float16 conversion of onnxconverter-common). If all outputs are named instead, the
float16 converters declare softmax_max to be float16, but it is float32. So a file has

    fa_compiler::FlashAttention(the inputs of the prototype) -> attention_out

with the same inputs and attributes; the library has the same kernel for it. A node whose statistics
are used (by a gradient) keeps its domain and its outputs.

Beside the nodes the file has their bodies (bodies.py) as model-local functions. Nodes with
different bodies have different names, because a function is found by its name: FlashAttention,
FlashAttentionBody2, and so on to FlashAttentionBody8. The library has the same kernel for all of
them. ONNX also has overload names for several functions of one operator, but ONNX Runtime takes
them only in new releases: 1.20 and 1.23 run one body for all nodes, with wrong results. A file has
the bodies of all its nodes, or none if a node has no body or if there are more than eight.

FlashLinearAttention and ShortConvolution keep their names and domain, because their first output is
the one that every model needs. Their bodies are functions of this name. If the nodes of one of them
need several bodies, it has none.

A file for Ascend keeps the nodes of the graph. It holds functions of the operators around
attention, of which the library has no kernels, and of CANN's linear attention, in the domain of the
nodes (around_bodies.py, delta_bodies.py). `add_ascend_bodies` adds them.

`to_graph_operators` is the way back: what reads a model of this form sees the nodes of the graph,
without functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnx_ir as ir

from fa_compiler.lowering.onnx_file.around_bodies import bodies_of, has_body
from fa_compiler.lowering.onnx_file.bodies import BodyKey, body_key, body_of
from fa_compiler.lowering.onnx_file.delta_bodies import STATES, delta_bodies
from fa_compiler.lowering.onnx_file.linear_bodies import LINEAR, LinearKey, linear_body, linear_key
from fa_compiler.lowering.onnx_file.magnitudes import tame_nodes
from fa_compiler.op_registry import (
    DOMAIN,
    DOMAINS,
    FILE_DOMAIN,
    FILE_OP,
    FILE_OPS,
    GRAPH_OP,
    VERSION,
    RegistryError,
    get,
)
from fa_compiler.passes.ir.nodes import all_nodes, graph_opset, is_op, source_through
from fa_compiler.passes.ir.surgery import replace_value
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.values.shapes import ShapeInfo

METADATA_KEY = "fa_compiler"
"""The key of the model's metadata that tells of the library."""

_LIBRARY = (
    "The nodes of the domains fa_compiler and ascend are operators of the custom-op library of the Python package "
    "fa_compiler. ONNX Runtime loads it by SessionOptions.register_custom_ops_library(path); "
    "fa_compiler.custom_ops_library() gives the path."
)
_COMPLETE = "Without it, the functions of this model compute the same, slower."
_INCOMPLETE = "This model cannot run without it."

_OUTPUTS_BEFORE = get(GRAPH_OP).output_names.index("attention_out")
"""The number of outputs before attention_out."""


def to_file_operators(model: ir.Model, info: ShapeInfo | None) -> list[onnx.FunctionProto]:
    """Rename the fused nodes to the operators that a file has, and return their bodies.

    `info` is what is known of the model; None makes no bodies. `finish_proto` does the rest when
    the model is a proto.
    """
    linear = [] if info is None else _linear_bodies(model, info)
    chosen = [node for node in all_nodes(model.graph) if _gives_only_attention_out(node)]
    if not chosen:
        return linear
    keys = None if info is None else _body_keys(model, chosen, info)
    for node in chosen:
        node.domain, node.op_type = FILE_DOMAIN, FILE_OP
    found = [] if keys is None else _name_by_body(chosen, keys)
    imports = model.graph.opset_imports
    imports[FILE_DOMAIN] = VERSION
    owners: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    if not any(node.domain == DOMAIN for owner in owners for node in all_nodes(owner)):
        imports.pop(DOMAIN, None)
    return [*found, *linear]


def _linear_bodies(model: ir.Model, info: ShapeInfo) -> list[onnx.FunctionProto]:
    """The bodies of the operators of linear attention whose nodes have one body."""
    keys: dict[str, set[LinearKey | None]] = {}
    opset = graph_opset(model.graph)
    for node in all_nodes(model.graph):
        if node.domain == DOMAIN and node.op_type in LINEAR:
            keys.setdefault(node.op_type, set()).add(_linear_key(node, info, opset))
    return [linear_body(key) for (key, *others) in keys.values() if key is not None and not others]


def _linear_key(node: ir.Node, info: ShapeInfo, opset: int) -> LinearKey | None:
    try:
        return linear_key(node_view(node, info), opset)
    except RegistryError:  # a node that the model had before
        return None


def finish_proto(proto: onnx.ModelProto, functions: Sequence[onnx.FunctionProto]) -> None:
    """Remove the outputs before attention_out of the marked nodes, add their functions, and say in
    the model's metadata which library has the operators, and how it is loaded."""
    domains = {opset.domain for opset in proto.opset_import}
    if domains.isdisjoint(DOMAINS):
        return
    nodes = list(_each(proto.graph.node))
    _describe(proto, _is_complete(((node.domain, node.op_type) for node in nodes), functions))
    for node in nodes:
        if _is_of_file(node.domain, node.op_type) and len(node.output) > 1:
            del node.output[:_OUTPUTS_BEFORE]
    proto.functions.extend(functions)


def add_ascend_bodies(proto: onnx.ModelProto, made: Iterable[str], given: onnx.ModelProto) -> None:
    """Add the functions of Ascend's operators to a model: of those around attention that were
    `made` now, of those that the `given` model had functions of, and of the delta rules. Other
    nodes of the types around attention may be called in a way that the functions do not compute."""
    before = (
        each.name for each in given.functions if each.domain == DOMAIN and has_body(each.name)
    )
    owners = [proto.graph.node, *(function.node for function in proto.functions)]
    nodes = [node for owner in owners for node in _each(owner) if node.domain == DOMAIN]
    opset = next(
        (opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), 0
    )
    proto.functions.extend([*bodies_of([*made, *before], opset), *delta_bodies(nodes, opset)])


def add_around_functions(model: ir.Model, made: Iterable[str], given: ir.Model) -> None:
    """What `add_ascend_bodies` does for the operators around attention, for a model that stays in
    memory as an `ir.Model`."""
    before = (name for domain, name, _ in given.functions if domain == DOMAIN and has_body(name))
    for function in bodies_of([*made, *before], graph_opset(model.graph)):
        written = ir.serde.deserialize_function(function)
        model.functions[written.identifier()] = written


def add_functions(model: ir.Model, functions: Sequence[onnx.FunctionProto]) -> None:
    """What `finish_proto` does, for a model that stays in memory as an `ir.Model`."""
    for node in list(all_nodes(model.graph)):
        if _is_of_file(node.domain, node.op_type) and len(node.outputs) > 1:
            _replace_node(node, FILE_DOMAIN, node.op_type, 1)
    for function in functions:
        made = ir.serde.deserialize_function(function)
        model.functions[made.identifier()] = made
    operators = ((node.domain, node.op_type) for node in all_nodes(model.graph))
    model.metadata_props[METADATA_KEY] = _description(_is_complete(operators, functions))


def restore_graph_operators(model: ir.Model) -> None:
    """What `to_graph_operators` does, in place for an `ir.Model`."""
    for identifier in [each for each in model.functions if _is_body(each[0], each[1])]:
        del model.functions[identifier]
    if model.graph.opset_imports.pop(FILE_DOMAIN, None) is None:
        return
    model.graph.opset_imports[DOMAIN] = VERSION
    for node in list(all_nodes(model.graph)):
        if _is_of_file(node.domain, node.op_type) and len(node.outputs) == 1:
            _replace_node(node, DOMAIN, GRAPH_OP, _OUTPUTS_BEFORE + 1)


def _replace_node(node: ir.Node, domain: str, op_type: str, outputs: int) -> None:
    """Replace a node by one with this operator and number of outputs. Only the last output is used
    in both."""
    graph, last = node.graph, node.outputs[-1]
    assert graph is not None
    made = ir.Node(
        domain,
        op_type,
        node.inputs,
        node.attributes.values(),
        num_outputs=outputs,
        name=node.name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )
    for output in made.outputs[:-1]:
        output.name = ""
    graph.insert_before(node, made)
    replace_value(last, made.outputs[-1])
    graph.remove(node, safe=True)


def to_graph_operators(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the nodes of the graph in place of those of the file; the model itself if it
    has none."""
    has_bodies = any(_is_body(function.domain, function.name) for function in proto.functions)
    if not has_bodies and all(opset.domain != FILE_DOMAIN for opset in proto.opset_import):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for node in _each(result.graph.node):
        if _is_of_file(node.domain, node.op_type) and len(node.output) == 1:
            node.domain, node.op_type = DOMAIN, GRAPH_OP
            (output,) = node.output
            node.output[:] = [*[""] * _OUTPUTS_BEFORE, output]
    kept = [
        function for function in result.functions if not _is_body(function.domain, function.name)
    ]
    del result.functions[:]
    result.functions.extend(kept)
    imports = [opset for opset in result.opset_import if opset.domain not in (FILE_DOMAIN, DOMAIN)]
    del result.opset_import[:]
    result.opset_import.extend([*imports, onnx.helper.make_opsetid(DOMAIN, VERSION)])
    return result


def _describe(proto: onnx.ModelProto, complete: bool) -> None:
    kept = [entry for entry in proto.metadata_props if entry.key != METADATA_KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    proto.metadata_props.add(key=METADATA_KEY, value=_description(complete))


def _description(complete: bool) -> str:
    """What the metadata say. `complete` is whether every node of the library has a body."""
    return f"{_LIBRARY} {_COMPLETE if complete else _INCOMPLETE}"


def _gives_only_attention_out(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, GRAPH_OP) or len(
        node.outputs
    ) != _OUTPUTS_BEFORE + 1:
        return False
    return not any(output.name or output.uses() for output in node.outputs[:_OUTPUTS_BEFORE])


def _is_of_file(domain: str, name: str) -> bool:
    return domain == FILE_DOMAIN and name in FILE_OPS


def _is_body(domain: str, name: str) -> bool:
    """Whether a function of this name is the body of an operator."""
    return _is_of_file(domain, name) or (
        domain == DOMAIN and (name in LINEAR or name in STATES or has_body(name))
    )


def _is_complete(
    operators: Iterable[tuple[str, str]], functions: Sequence[onnx.FunctionProto]
) -> bool:
    """Whether each of these operators that is the library's has a body among the functions."""
    bodies = {(function.domain, function.name) for function in functions}
    return all(domain not in DOMAINS or (domain, name) in bodies for domain, name in operators)


def _body_keys(model: ir.Model, nodes: Sequence[ir.Node], info: ShapeInfo) -> list[BodyKey] | None:
    """What the body of each of these nodes depends on; None if one of them has no body, or if they
    have too many."""
    opset = graph_opset(model.graph)
    keys: list[BodyKey] = []
    tame = tame_nodes(nodes, model, info)
    for node in nodes:
        try:
            key = body_key(
                node_view(node, info),
                opset,
                is_tame=node in tame,
                is_dequantised=_is_dequantised(node),
            )
        except RegistryError:  # a node that the model had before
            return None
        if key is None:
            return None
        keys.append(key)
    if len(set(keys)) > len(FILE_OPS):
        keys = [key.for_any_call() for key in keys]
    return keys if len(set(keys)) <= len(FILE_OPS) else None


def _is_dequantised(node: ir.Node) -> bool:
    """Does a DequantizeLinear make an operand of a node, but for operators that move elements?"""
    operands = (value for value in node.inputs if value is not None)
    return any(
        is_op(source_through(value, *MOVES).producer(), "DequantizeLinear") for value in operands
    )


def _name_by_body(nodes: Sequence[ir.Node], keys: Sequence[BodyKey]) -> list[onnx.FunctionProto]:
    """Give the nodes of one body the same name, and return the bodies."""
    names = dict(zip(dict.fromkeys(keys), FILE_OPS, strict=False))
    for node, key in zip(nodes, keys, strict=True):
        node.op_type = names[key]
    return [body_of(key, name) for key, name in names.items()]


def _each(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those of the graphs in them."""
    pending = [nodes]
    while pending:
        for node in pending.pop():
            yield node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append(attribute.g.node)
                pending.extend(graph.node for graph in attribute.graphs)
