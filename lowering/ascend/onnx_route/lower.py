"""Converts a fused model to one that ATC's ONNX parser takes: of opset 17, or 18 if the model needs
it.

    functions      are all inlined, but for those that ONNX Runtime does not call
                   (passes/prepare/functions.py)
    opset          a model of 8 to 17 keeps its opset; a newer one becomes 17, or 18 for operators
                   that 18 introduced; one of 8 or 9 becomes 10 if it has a TopK, see `lift`
    nodes          `changes` converts them to the opset, `expansions` replaces unknown operators,
                   and `forms` rewrites what the parser's plugins do not read. Each node must then
                   be one that the parser takes and reads, one of ours (domain `ascend`, for the
                   plugin), or one of domain npu
    If             its condition becomes a scalar
    constants      a Constant node holds a tensor, of a type that the parser knows
    outputs        one that depends on constants only is computed, see `constant_outputs`
    weights        in files move from subgraphs to the main graph: the parser finds the files of the
                   main graph only
    names          see `names`

A node that cannot be converted is a problem, which names the node. All problems are collected. The
model is changed in place, and it is not usable after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir
from onnx import defs
from onnx_ir.passes.common import InlinePass

from fa_compiler.lowering.ascend.convert.to_ge import not_fused
from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ascend.onnx_route import changes, constant_outputs, forms, names, parser
from fa_compiler.lowering.ascend.onnx_route.check_outputs import all_graphs as graphs_of_file
from fa_compiler.lowering.ascend.onnx_route.errors import (
    UnsupportedModel,
    UnsupportedNode,
    or_air,
    problem_at,
)
from fa_compiler.lowering.ascend.onnx_route.expansions import EXPANSIONS
from fa_compiler.lowering.ascend.onnx_route.lift import LIFTED, lift, needs_lift
from fa_compiler.lowering.ascend.onnx_route.plugin_reads import NodeForm, plugin_mismatches
from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite
from fa_compiler.op_registry import DOMAIN
from fa_compiler.op_registry import names as operators
from fa_compiler.op_registry.parser_plugins import NPU
from fa_compiler.passes.answer.options import NEWEST_OPSET
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    STANDARD,
    all_graphs,
    all_nodes,
    domain_of,
    remember_versions,
)
from fa_compiler.passes.ir.surgery import restore_order, sweep
from fa_compiler.passes.prepare.functions import brought_to_one_version, drop_shadowed
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

TARGET = 17
"""The target opset: the newest at which the parser takes every reduction and LayerNormalization."""

OLDEST = 8
"""The oldest opset whose operators the parser takes."""

IR_VERSION = 8
"""The IR version of opset 17. The parser's schema is older and ignores unknown fields."""


def lower(model: ir.Model) -> None:
    """Convert a model in place.

    Raises:
        UnsupportedModel: parts of the model cannot be converted; the error lists all of them.
    """
    problems = _inline(model)
    problems += _graph_problems(model)
    if problems:
        raise UnsupportedModel(problems)
    source = _one_import(model)
    if needs_lift(model, source):
        if problems := lift(model):
            raise UnsupportedModel(problems)
        source = LIFTED
    target = _target(model, source)
    remember_versions(model)
    info = analyse(model)
    _set_target(model, target)
    origins: dict[ir.Node, ir.Node] = {}
    if problems := _convert(model, info, source, target, origins):
        raise UnsupportedModel(problems)
    for graph in all_graphs(model):
        _plain_constants(graph)
    if problems := _unsupported(model, info, target, origins):
        raise UnsupportedModel(problems)
    if problems := constant_outputs.fold(model, origins):
        raise UnsupportedModel(problems)
    _hoist(model)
    names.make_unique(model, all_graphs(model))
    model.ir_version = min(model.ir_version, IR_VERSION)
    used = set(map(domain_of, all_nodes(model.graph)))
    for domain in set(model.opset_imports) - used - {""}:
        del model.opset_imports[domain]


def only_known_entries(proto: onnx.ModelProto) -> None:
    """Remove the entries of external tensors that the parser does not know: it would read a
    checksum as the length."""
    for graph in graphs_of_file(proto.graph):
        for tensor in graph.initializer:
            kept = [
                (entry.key, entry.value)
                for entry in tensor.external_data
                if entry.key in parser.EXTERNAL_ENTRIES
            ]
            del tensor.external_data[:]
            for key, value in kept:
                tensor.external_data.add(key=key, value=value)


# -- before ---------------------------------------------------------------------------------------


def _inline(model: ir.Model) -> list[str]:
    """Inline every function; returns the problems of functions for another opset, which cannot be
    inlined."""
    drop_shadowed(model)
    if not model.functions:
        return []
    fitting = brought_to_one_version(model, model.functions)
    other_opsets = model.functions.keys() - fitting
    InlinePass(criteria=lambda function: function.identifier() in fitting)(model)
    called = {node.op_identifier() for node in all_nodes(model.graph)}
    problems = [
        problem_at(
            node,
            "the model's opset changes an operator in this function; export with one opset for both",
        )
        for node in all_nodes(model.graph)
        if node.op_identifier() in other_opsets
    ]
    for identifier in [identifier for identifier in model.functions if identifier not in called]:
        del model.functions[identifier]
    return problems


def _graph_problems(model: ir.Model) -> list[str]:
    """The problems of the graph as a whole."""
    graph, problems = model.graph, []
    if not [value for value in graph.inputs if value.name not in graph.initializers]:
        problems.append("the model has no inputs, which ATC needs (E16001)")
    if not graph.outputs:
        problems.append("the model has no outputs, which ATC needs (E16001)")
    for value in (*graph.inputs, *graph.outputs):
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            problems.append(f"'{value.name}' is not a tensor; ATC takes tensors only")
    return problems


def _one_import(model: ir.Model) -> int:
    """The version of the standard opset, which is imported under one name afterwards."""
    named = {
        "" if domain in STANDARD else domain: version
        for domain, version in model.opset_imports.items()
    }
    version = named.get("", 0)
    if not version:
        named[""] = version = TARGET
    model.opset_imports.clear()
    model.opset_imports.update(named)
    if not OLDEST <= version <= NEWEST_OPSET:
        raise UnsupportedModel(
            [
                f"the model is of opset {version}; opsets {OLDEST} to {NEWEST_OPSET} can be converted: "
                f"export it again with {TARGET}"
            ]
        )
    return version


def _target(model: ir.Model, source: int) -> int:
    """The target opset: the model's own up to `TARGET`, otherwise `TARGET` or, if a node needs it,
    the next one."""
    if source <= TARGET:
        return source
    return parser.NEWEST if any(map(_came_with_18, all_nodes(model.graph))) else TARGET


def _came_with_18(node: ir.Node) -> bool:
    """Whether no older opset can express the node."""
    if node.domain not in STANDARD or node.op_type in EXPANSIONS:
        return False
    return parser.takes("", node.op_type, parser.NEWEST) and not parser.takes(
        "", node.op_type, TARGET
    )


def _set_target(model: ir.Model, target: int) -> None:
    """Set the target opset; new nodes are made for it afterwards."""
    model.opset_imports[""] = target
    remember_versions(model)
    for node in all_nodes(model.graph):
        node.version = None


# -- the nodes ------------------------------------------------------------------------------------


def _convert(
    model: ir.Model, info: ShapeInfo, source: int, target: int, origins: dict[ir.Node, ir.Node]
) -> list[str]:
    """Rewrite every node for the parser, and return the problems. `origins` gets the model's node
    for each new node."""
    problems = []
    graphs = all_graphs(model)
    taken = Names.of(graphs)
    for graph in graphs:
        builder = Builder(graph, taken, info)
        known = set(graph)
        for node in list(graph):
            if node.domain not in STANDARD:
                continue
            rewrite = Rewrite(node, builder, source)
            try:
                if not parser.takes("", node.op_type, target) and node.op_type in EXPANSIONS:
                    EXPANSIONS[node.op_type](rewrite)
                elif node.op_type == "If":
                    _scalar_condition(rewrite)
                elif source > target:
                    changes.convert(rewrite, target)
                if node.graph is not None:
                    forms.write_out(rewrite, graph is not model.graph)
            except UnsupportedNode as reason:
                problems.append(problem_at(node, str(reason)))
            # New nodes are at the end of the graph, those that only give a result another name
            # among them.
            for made in reversed(graph):
                if made in known:
                    break
                origins[made] = node
                known.add(made)
        if not problems:
            sweep(graph, [node for node in builder.nodes if node.graph is graph])
            restore_order(graph)
    return problems


def _scalar_condition(rewrite: Rewrite) -> None:
    """Make the condition of an If a scalar: GE treats any other condition as true unless it is
    empty."""
    condition = rewrite.needed(0)
    axes = list(range(len(rewrite.shape(condition))))
    rewrite.node.replace_input_with(0, rewrite.builder.squeeze(condition, axes))


def _plain_constants(graph: ir.Graph) -> None:
    """Replace the number or list of a Constant node by a tensor, which the parser reads in every
    case."""
    for node in graph:
        if node.domain not in STANDARD or node.op_type != "Constant" or "value" in node.attributes:
            continue
        for name, dtype in _CONSTANTS.items():
            attr = node.attributes.pop(name, None)
            if attr is not None:
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(attr.value, dtype))


_CONSTANTS = {
    "value_float": ir.DataType.FLOAT,
    "value_floats": ir.DataType.FLOAT,
    "value_int": ir.DataType.INT64,
    "value_ints": ir.DataType.INT64,
    "value_string": ir.DataType.STRING,
    "value_strings": ir.DataType.STRING,
}


def _hoist(model: ir.Model) -> None:
    """Move weights in files to the main graph."""
    main = model.graph
    taken = Names.of(all_graphs(model))
    for graph in all_graphs(model):
        if graph is main:
            continue
        for name, value in list(graph.initializers.items()):
            if isinstance(value.const_value, ir.ExternalTensor) and not value.is_graph_input():
                graph.initializers.pop(name)
                value.name = taken.new(f"{name}_of_{graph.name or 'subgraph'}")
                main.register_initializer(value)


# -- after ----------------------------------------------------------------------------------------


def _unsupported(
    model: ir.Model, info: ShapeInfo, target: int, origins: Mapping[ir.Node, ir.Node]
) -> list[str]:
    """The problems of the converted model: what the parser does not take, or what is illegal at the
    target opset.

    A problem of a new node names the node of the model that it stands for.
    """
    problems = []
    for node in all_nodes(model.graph):
        named = origins.get(node, node)
        domain = domain_of(node)
        if domain == DOMAIN:
            if node.op_type not in operators():
                problems.append(
                    problem_at(named, "the registry does not know it, so there is no plugin for it")
                )
        elif not parser.takes(domain, node.op_type, model.opset_imports.get(domain, 1)):
            problems.append(problem_at(named, _unknown(domain, node)))
        elif not domain:
            problems += [
                problem_at(named, f"{found.sentence}; export without it{or_air(named)}")
                for found in plugin_mismatches(NodeForm.of_node(node, target, info))
                if found.severity is not Severity.NOTE
            ]
            problems += _illegal_types(node, named, info, target)
    tensors = [
        value.const_value for graph in all_graphs(model) for value in graph.initializers.values()
    ]
    for tensor in tensors:
        if tensor is not None and (int(tensor.dtype) not in parser.TYPES - parser.NO_CONSTANTS):
            problems.append(
                f"'{tensor.name}' is of type {tensor.dtype}, which ATC does not take for constants"
            )
    return list(dict.fromkeys(problems))


def _unknown(domain: str, node: ir.Node) -> str:
    op_type = node.op_type
    if domain != NPU and (unfused := not_fused(node)) is not None:
        return (
            f"{unfused.reason}, and ATC's parser does not know the operator; {unfused.alternative}"
        )
    if not domain and op_type in ("Loop", "Scan", "SequenceMap"):
        return "ATC's parser knows no loops; export with the loop unrolled"
    if "Linear" in op_type and not domain:
        return "ATC's parser does not know quantisation; export without, or quantise with Ascend's own tools"
    return (
        f"ATC's parser does not know the operator (E13010); export again without it{or_air(node)}"
    )


def _illegal_types(node: ir.Node, named: ir.Node, info: ShapeInfo, target: int) -> list[str]:
    """The problems of inputs with a type that the operator does not take at this opset, else those
    of outputs.

    `named` is the node of the model.
    """
    try:
        schema = defs.get_schema(node.op_type, target)
    except defs.SchemaError:
        return []
    problems = []
    for side, values, formals in (
        ("input", node.inputs, schema.inputs),
        ("output", node.outputs, schema.outputs),
    ):
        for index, value in enumerate(values):
            formal = formals[min(index, len(formals) - 1)] if formals else None
            dtype = None if value is None else info.dtype(value)
            if formal is None or dtype is None or value is None:
                continue
            name = f"tensor({onnx.TensorProto.DataType.Name(int(dtype)).lower()})"
            if (
                any(legal.startswith("tensor(") for legal in formal.types)
                and name not in formal.types
            ):
                sentence = f"its {side} '{value.name}' is {dtype.name}, which it does not have at opset {target}"
                problems.append(problem_at(named, sentence))
        if problems:
            break
    return problems
