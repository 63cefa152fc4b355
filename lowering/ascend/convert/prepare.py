"""An ONNX model as the forward table wants it: no functions, nothing that only its definition in ONNX explains.

Operators without a row of their own whose ONNX definition is a function of other operators (CastLike, Attention,
GroupNormalization and so on) are replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
import onnx.defs
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from fa_compiler.passes.nodes import STANDARD, all_nodes, remember_versions
from fa_compiler.passes.shapes import ShapeInfo, analyse

_ROUNDS = 4
"""Definitions may use operators that have definitions."""


def prepare(model: ir.Model, known: Callable[[ir.Node], bool]) -> tuple[ir.Model, ShapeInfo]:
    """A copy of the model without functions and without operators that `known` does not know, as far as they have a
    definition; and its shapes."""
    model = model.clone()
    if model.functions:
        InlinePass()(model)
    info = analyse(model)
    for _ in range(_ROUNDS):
        if not _expand(model, info, known):
            break
        info = analyse(model)
    remember_versions(model)
    return model, info


def _expand(model: ir.Model, info: ShapeInfo, known: Callable[[ir.Node], bool]) -> bool:
    imports = model.opset_imports
    versions = {**imports, "": imports.get("", imports.get("ai.onnx", 1))}
    added = 0
    for node in list(all_nodes(model.graph)):
        if known(node):
            continue
        proto = _definition(node, info, versions)
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


def _definition(node: ir.Node, info: ShapeInfo, versions: Mapping[str, int]) -> onnx.FunctionProto | None:
    """The function that defines a node, in operators of the model's opset."""
    domain = "" if node.domain in STANDARD else node.domain
    version = versions.get(domain)
    if version is None or not onnx.defs.has(node.op_type, version, domain):
        return None
    schema = onnx.defs.get_schema(node.op_type, version, domain)
    wanted = versions[""]
    proto = onnx.FunctionProto()
    plain = [number for number in schema.function_opset_versions if number <= wanted]
    if plain:
        proto.ParseFromString(schema.get_function_with_opset_version(max(plain)))
        return proto
    fitting = [number for number in schema.context_dependent_function_opset_versions if number <= wanted]
    types = [_type(value, info) for value in node.inputs]
    if not fitting or any(kind is None for kind in types):
        return None
    body = schema.get_context_dependent_function_with_opset_version(
        max(fitting), ir.to_proto(node).SerializeToString(), types
    )
    proto.ParseFromString(body)
    return proto if proto.node else None


def _type(value: ir.Value | None, info: ShapeInfo) -> bytes | None:
    if value is None:
        return onnx.TypeProto().SerializeToString()
    dtype = info.dtype(value) or value.dtype
    if dtype is None:
        return None
    shape = info.shape(value)
    sizes = None if shape is None else [size.const for size in shape]
    return onnx.helper.make_tensor_type_proto(int(dtype), sizes).SerializeToString()


def _bind_attributes(node: ir.Node, function: ir.Function) -> None:
    """Keep only the attributes that the function knows: a definition made for this node has the others inside."""
    for name in list(node.attributes):
        if name not in function.attributes:
            del node.attributes[name]
