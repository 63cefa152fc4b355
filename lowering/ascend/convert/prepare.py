"""Prepares an ONNX model for the forward table: without functions, and with fewer kinds of
operators. The registry's operators stay what they are, whatever functions a file has of them.

ONNX defines some operators as functions of other operators (CastLike, Attention, GroupNormalization
and so on). Such an operator is replaced by its definition if the forward table has no row for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx.defs
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from fa_compiler.lowering.onnx_file import restore_graph_operators
from fa_compiler.passes.ir.nodes import STANDARD, all_nodes, domain_of, remember_versions
from fa_compiler.passes.prepare.functions import drop_shadowed
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

Known = Callable[[tuple[str, str]], bool]
"""Whether the forward table has a row for an operator, given by its domain ("" for ONNX's own) and
type."""

_ROUNDS = 4
"""How often definitions are expanded, because they may use operators that have definitions
themselves."""


_CHANGES = {
    "BatchNormalization": (14,),
    "Dropout": (12,),
    "GroupNormalization": (21,),
    "Hardmax": (13,),
    "LogSoftmax": (13,),
    "ReduceSum": (13,),
    "Resize": (13, 18, 19),
    "Softmax": (13,),
    "Split": (13, 18),
    "Squeeze": (13,),
    "Unsqueeze": (13,),
}
"""For the operators that definitions use: the opsets from 12 on in which more than their types
changed. The oldest definitions are of opset 12. All reductions but ReduceSum changed in 18."""


def key_of(domain: str, op_type: str) -> tuple[str, str]:
    """The key of an operator in the forward table."""
    return "" if domain in STANDARD else domain, op_type


def prepare(model: ir.Model, known: Known) -> tuple[ir.Model, ShapeInfo]:
    """A copy of the model, and its shapes. The copy has no functions, and no operator that has a
    definition in ONNX but is not `known`."""
    model = model.clone()
    drop_shadowed(model)
    restore_graph_operators(model)
    if model.functions:
        InlinePass()(model)
    info = analyse(model)
    for _ in range(_ROUNDS):
        if not _expand(model, info, known):
            break
        info = analyse(model)
    remember_versions(model)
    return model, info


def _expand(model: ir.Model, info: ShapeInfo, known: Known) -> bool:
    imports = model.opset_imports
    versions = {**imports, "": imports.get("", imports.get("ai.onnx", 1))}
    added = 0
    for node in list(all_nodes(model.graph)):
        if known(key_of(node.domain, node.op_type)):
            continue
        proto = _definition(node, info, versions, known)
        if proto is None:
            continue
        proto.domain, proto.name = "fa_compiler.definition", f"{node.op_type}_{added}"
        function = ir.serde.deserialize_function(proto)
        _bind_attributes(node, function)
        model.functions[function.identifier()] = function
        node.domain, node.op_type, node.overload = proto.domain, proto.name, ""
        added += 1
    if added:
        model.opset_imports["fa_compiler.definition"] = 1
        InlinePass()(model)
        model.functions.clear()
    return added > 0


def _definition(
    node: ir.Node, info: ShapeInfo, versions: Mapping[str, int], known: Known
) -> onnx.FunctionProto | None:
    """The function that defines a node, in operators of the model's opset; None if there is
    none."""
    domain = domain_of(node)
    version, wanted = versions.get(domain), versions[""]
    graphs = any(
        attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for attr in node.attributes.values()
    )
    if version is None or graphs or not onnx.defs.has(node.op_type, version, domain):
        return None
    # onnx's stubs lack the methods for functions
    schema: Any = onnx.defs.get_schema(node.op_type, version, domain)
    body = _body(schema, node, info, wanted)
    if body is None:
        return None
    proto = onnx.FunctionProto()
    proto.ParseFromString(body)
    _write_defaults(proto, schema)
    kinds = {key_of(inner.domain, inner.op_type) for inner in proto.node}
    explained = bool(kinds) and all(known(key) or _has_definition(key, wanted) for key in kinds)
    return proto if explained and _fit(proto, node, wanted) else None


def _write_defaults(proto: onnx.FunctionProto, schema: Any) -> None:
    """Give the attributes of a function the defaults of the schema."""
    for name in [name for name in proto.attribute if schema.attributes[name].default_value.type]:
        proto.attribute.remove(name)
        proto.attribute_proto.append(schema.attributes[name].default_value)


def _body(schema: Any, node: ir.Node, info: ShapeInfo, wanted: int) -> bytes | None:
    """The newest serialised function of a schema up to opset `wanted`: one that serves all nodes,
    or else one that is made for the types of this node."""
    plain = [number for number in schema.function_opset_versions if number <= wanted]
    if plain:
        return bytes(schema.get_function_with_opset_version(max(plain)))
    made = [
        number for number in schema.context_dependent_function_opset_versions if number <= wanted
    ]
    types = [_type(value, info) for value in node.inputs]
    if not made or None in types:
        return None
    described = ir.to_proto(node).SerializeToString()
    return bytes(
        schema.get_context_dependent_function_with_opset_version(max(made), described, types)
    )


def _has_definition(key: tuple[str, str], version: int) -> bool:
    domain, op_type = key
    if domain or not onnx.defs.has(op_type, version):
        return False
    schema: Any = onnx.defs.get_schema(op_type, version)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _fit(proto: onnx.FunctionProto, node: ir.Node, wanted: int) -> bool:
    """Give a definition the model's opset and the node's outputs; False if its operators have
    another meaning there."""
    for entry in proto.opset_import:
        if entry.domain in STANDARD:
            if any(
                _era(inner.op_type, entry.version) != _era(inner.op_type, wanted)
                for inner in proto.node
            ):
                return False
            entry.version = wanted
    del proto.output[len(node.outputs) :]
    made = {name for inner in proto.node for name in inner.output}
    for name in proto.output:
        if name not in made:  # an output that this node does not have
            proto.node.append(onnx.helper.make_node("Constant", [], [name], value_int=0))
    return True


def _era(op_type: str, version: int) -> int:
    """The number of times that the meaning of an operator's inputs and attributes changed up to an
    opset."""
    reduces = op_type.startswith("Reduce") and op_type != "ReduceSum"
    return sum(version >= change for change in (_CHANGES.get(op_type, (18,) if reduces else ())))


def _type(value: ir.Value | None, info: ShapeInfo) -> bytes | None:
    if value is None:
        return bytes(onnx.TypeProto().SerializeToString())
    dtype = info.dtype(value) or value.dtype
    if dtype is None:
        return None
    shape = info.shape(value)
    sizes = None if shape is None else [size.const for size in shape]
    return bytes(onnx.helper.make_tensor_type_proto(int(dtype), sizes).SerializeToString())


def _bind_attributes(node: ir.Node, function: ir.Function) -> None:
    """Keep only the attributes that the function takes. A definition made for this node already
    includes the others."""
    for name in list(node.attributes):
        if name not in function.attributes:
            del node.attributes[name]
