"""Model-local functions are inlined, so that the attention in them is found and each call has a
block of its own.

Attention may be spread over functions: one computes the scores, another the softmax. So every
function that can be inlined is inlined; only a model without any softmax keeps its functions, and
without any operator that is written out (written_out.py). A function cannot be inlined if one of
its operators is another in the model, or if it takes a graph as attribute. The report then has one
declined block for each softmax and call.

A function and the model may import different versions of a domain. Most operators are the same in
both, and only those that the function holds count. A call of a function is found by the names
alone. So the versions of domains that hold nothing but functions mean nothing; jax2onnx writes two
of them.

A function that is named like an operator which ONNX Runtime knows by itself, such as
com.microsoft's Gelu, is never called: the runtime takes its operator. So such a function is
dropped, and the nodes are read as that operator.

CastLike is a function that ONNX itself defines. It becomes a Cast. So the matcher does not have to
know CastLike, and a node that only takes the type of the scores is not taken for a reader of the
scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from fa_compiler.op_registry.runtime_schemas import is_runtime_operator
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.attention_ops import is_attention_op
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.emit.raise_opset import has_changed
from fa_compiler.passes.ir.nodes import all_nodes, is_op, nodes_of_type, operand_at
from fa_compiler.passes.ir.surgery import sweep
from fa_compiler.passes.prepare.written_out import is_written_out
from fa_compiler.passes.values.shapes import ShapeInfo

Calls = Mapping[ir.OperatorIdentifier, tuple[str, ...]]


def drop_shadowed(model: ir.Model) -> list[str]:
    """Drop the functions that ONNX Runtime never calls, and say of each why."""
    imports = _named(model.opset_imports)
    shadowed = [
        function
        for function in model.functions.values()
        if is_runtime_operator(
            function.domain, function.name, imports.get(_domain(function.domain), 1)
        )
    ]
    for function in shadowed:
        del model.functions[function.identifier()]
    names = {(function.domain, function.name) for function in shadowed}
    if not names:
        return []
    for node in _nodes(model):
        if (node.domain, node.op_type) in names:
            node.overload = ""
    reason = "ONNX Runtime has an operator of this name, and runs that"
    return [
        f"the function {domain or 'ai.onnx'}.{name} is left out: {reason}"
        for domain, name in sorted(names)
    ]


def inline_functions(model: ir.Model, writes_out: bool) -> list[str]:
    """Inline what can be inlined in a model that holds a softmax or an attention operator; with
    `writes_out` one that holds an operator which is written out, too. The result says which
    functions were dropped instead (`drop_shadowed`)."""
    if not model.functions:
        return []
    if not _has_reason(_nodes(model), writes_out):
        return []
    dropped, nodes = drop_shadowed(model), _nodes(model)
    with_graphs = {node.op_identifier() for node in nodes if _takes_graph(node.attributes)}
    with_graphs.update(
        name for name, function in model.functions.items() if _takes_graph(function.attributes)
    )
    fitting = brought_to_one_version(model, model.functions.keys() - with_graphs)
    for node in nodes:  # a call may leave out the last outputs, but the pass needs all
        called = model.functions.get(node.op_identifier())
        if called is not None and len(node.outputs) < len(called.outputs):
            node.resize_outputs(len(called.outputs))
    _Inliner(criteria=lambda function: function.identifier() in fitting)(model)
    return dropped


def brought_to_one_version(
    model: ir.Model, among: Collection[ir.OperatorIdentifier]
) -> set[ir.OperatorIdentifier]:
    """Those of the functions whose operators are the same in the versions that the model imports.
    They import these versions afterwards, as the inliner asks for."""
    imports = _named(model.opset_imports)
    fitting: set[ir.OperatorIdentifier] = set()
    for identifier in (each for each in model.functions if each in among):
        function = model.functions[identifier]
        wanted = _named(function.opset_imports)
        operators = [
            node for node in all_nodes(function) if node.op_identifier() not in model.functions
        ]
        if all(_is_same(node, wanted, imports) for node in operators):
            fitting.add(identifier)
            read = {_domain(node.domain) for node in operators}
            imports = {domain: wanted[domain] for domain in read & wanted.keys()} | imports
    for identifier in fitting:
        versions = model.functions[identifier].opset_imports
        for domain, version in versions.items():
            versions[domain] = imports.setdefault(_domain(domain), version)
    return fitting


def _is_same(node: ir.Node, wanted: Mapping[str, int], imports: Mapping[str, int]) -> bool:
    """Is a function's operator the same in the versions that the function and the model import?"""
    domain = _domain(node.domain)
    there = wanted.get(domain)
    here = imports.get(domain, there)
    if there is None or here is None or domain:
        return there == here
    return there == here or not has_changed(node.op_type, there, here)


def _has_reason(nodes: Sequence[ir.Node], writes_out: bool) -> bool:
    """Is there something for which functions are inlined?"""
    return may_hold_attention(nodes) or (writes_out and any(map(is_written_out, nodes)))


class _Inliner(InlinePass):
    """onnx_ir's inliner, in a time that is linear in the number of functions and calls.

    onnx_ir's inliner looks for a free name by counting from 2, once for each name of each call. So
    before each call the body gets free names, and the inliner finds them at once.
    """

    def _reset(self, model: ir.Model) -> None:
        super()._reset(ir.Model(ir.Graph([], [], nodes=[], opset_imports={}), ir_version=8))
        self._functions, self._opset_imports = model.functions, model.opset_imports
        self._function_id_abbreviations = {
            identifier: identifier[1] for identifier in model.functions
        }
        self._nodes, self._values = Names(self._used_node_names), Names(self._used_value_names)

    def _instantiate_call(
        self, node: ir.Node, call_site_id: str
    ) -> tuple[Sequence[ir.Node], Sequence[ir.Value]]:
        nodes = all_nodes(self._functions[node.op_identifier()])
        body = [(inner, inner.name, [value.name for value in inner.outputs]) for inner in nodes]
        made = self._nodes.mark, self._values.mark
        for inner, name, outputs in body:
            inner.name = self._nodes.new(name or "node")
            for value, given in zip(inner.outputs, outputs, strict=True):
                value.name = self._values.new(given or "val")
        self._nodes.release(made[0])
        self._values.release(made[1])
        try:
            return super()._instantiate_call(node, call_site_id)
        finally:
            for inner, name, outputs in body:
                inner.name = name
                for value, given in zip(inner.outputs, outputs, strict=True):
                    value.name = given


def resolve_casts(graphs: Iterable[ir.Graph], info: ShapeInfo) -> None:
    """Replace each CastLike by a Cast to the same type, where that is known, in graphs that may
    hold attention."""
    nodes = [node for graph in graphs for node in graph]
    casts = list(nodes_of_type(nodes, "CastLike"))
    if not casts or not may_hold_attention(nodes):
        return
    for node in casts:
        like = operand_at(node, 1)
        if (dtype := info.dtype(like)) is None:
            continue
        node.resize_inputs(1)
        node.op_type = "Cast"
        node.attributes.add(ir.AttrInt64("to", int(dtype)))
        maker = like.producer()
        if maker is not None and isinstance(maker.graph, ir.Graph):
            sweep(maker.graph, [maker])


def softmaxes_in_functions(model: ir.Model) -> Calls:
    """The names of the softmaxes and attention operators that a call of each remaining function
    runs."""
    known: dict[ir.OperatorIdentifier, tuple[str, ...]] = {}

    def inside(identifier: ir.OperatorIdentifier) -> tuple[str, ...]:
        if identifier not in known:
            known[identifier] = ()
            names: list[str] = []
            for node in all_nodes(model.functions[identifier]):
                if _matters(node):
                    names.append(label(node))
                elif node.op_identifier() in model.functions:
                    names.extend(f"{label(node)}/{name}" for name in inside(node.op_identifier()))
            known[identifier] = tuple(names)
        return known[identifier]

    for identifier in model.functions:
        inside(identifier)
    return {identifier: names for identifier, names in known.items() if names}


def _nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes of all graphs and functions."""
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    return [node for body in bodies for node in all_nodes(body)]


def _takes_graph(attributes: Mapping[str, ir.Attr]) -> bool:
    return any(
        attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for attr in attributes.values()
    )


def may_hold_attention(nodes: Iterable[ir.Node]) -> bool:
    """Is there a softmax, a part of one that is written out, or an attention operator among the
    nodes?"""
    return any(_matters(node) or is_op(node, "Exp", "ReduceMax") for node in nodes)


def _matters(node: ir.Node) -> bool:
    return is_op(node, "Softmax") or is_attention_op(node)


def _named(imports: Mapping[str, int]) -> dict[str, int]:
    return {_domain(domain): version for domain, version in imports.items()}


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
